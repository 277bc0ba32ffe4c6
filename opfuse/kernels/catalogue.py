"""Every kernel of the library: importing this registers all of them."""

from opfuse.kernels import cast, cast_block, cast_nvfp4, chain, chain_cast, decode, delayed, norm_cast, norm_rows
from opfuse.kernels.registry import kernels

__all__ = ["cast", "cast_block", "cast_nvfp4", "chain", "chain_cast", "decode", "delayed", "kernels", "norm_cast", "norm_rows"]
