"""Quantizers: frozen values that say how future casts are made. What they made describes itself (see storage.py)."""

from opfuse.tensors.quantizers.base import Quantizer
from opfuse.tensors.quantizers.composite import HybridQuantizer, IdentityQuantizer
from opfuse.tensors.quantizers.foreign import ForeignQuantizer
from opfuse.tensors.quantizers.fp8 import Float8BlockQuantizer, Float8CurrentScalingQuantizer, Float8Quantizer, Float8RowQuantizer
from opfuse.tensors.quantizers.grouped import GroupedQuantizer
from opfuse.tensors.quantizers.microscaled import MXFP4Quantizer, MXFP8Quantizer, NVFP4Quantizer

__all__ = [
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8RowQuantizer",
    "ForeignQuantizer",
    "GroupedQuantizer",
    "HybridQuantizer",
    "IdentityQuantizer",
    "MXFP4Quantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "Quantizer",
]
