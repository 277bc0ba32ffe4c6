"""Every kernel of the library: importing this registers all of them."""

from opfuse.kernels import cast, cast_block, chain, chain_cast, decode
from opfuse.kernels.registry import kernels

__all__ = ["cast", "cast_block", "chain", "chain_cast", "decode", "kernels"]
