"""How a GPU computes what opfuse.numerics defines. Nothing here knows an op, a recipe or a quantizer."""

from opfuse.kernels.engine.contract import ContractedKernel, raw

__all__ = ["ContractedKernel", "raw"]
