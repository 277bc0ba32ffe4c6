"""Every kernel of the library: importing this registers all of them."""

from opfuse.kernels import cast
from opfuse.kernels.registry import kernels

__all__ = ["cast", "kernels"]
