"""Every kernel of the library: importing this registers all of them."""

from opfuse.kernels import cast, chain
from opfuse.kernels.registry import kernels

__all__ = ["cast", "chain", "kernels"]
