"""Maps for the copy engine of sm_90a: windows of memory, as kernels/cuda/hopper.cuh reads and writes them.

A map describes a box of rows, ``pitch`` bytes apart, and two more dimensions that move it over all of memory in steps of 16
bytes. It knows no address and no shape, so a pitch has one map for as long as the process runs, and a program that repeats a
launch has nothing to fill in.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from opfuse.errors import KernelError, describe
from opfuse.kernels.engine.bindings import libcuda

WORDS = 16
"""How many words of 8 bytes a map has."""

BLANK = (0,) * WORDS
"""Stands for a map where nothing is launched."""

_BASE, _NEAR_BITS, _STEP = 256, 34, 16  # as in hopper.cuh
_FAR = 1 << 15  # so that 49 bits of addresses are reached
_SWIZZLE_128, _PROMOTION_256 = 3, 3


_KINDS = {torch.uint8: 0, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
"""CUtensorMapDataType of dtypes."""


@functools.cache
def window(dtype: torch.dtype, pitch: int, box: tuple[int, int]) -> tuple[int, ...]:
    """The map of a box, as 16 words of 8 bytes.

    box: (rows, elements), where the elements of a row have 128 bytes. pitch: bytes from one row to the next, a multiple of 16
    below 2^40. KernelError if the driver refuses it.
    """
    rows, columns = box
    near = 1 << _NEAR_BITS
    buffer = ctypes.create_string_buffer(8 * WORDS + 64)
    address = ctypes.addressof(buffer) + 63 & ~63
    encode = libcuda().cuTensorMapEncodeTiled
    encode.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, *[ctypes.c_void_p] * 5, *[ctypes.c_int] * 4]
    result = encode(
        address,
        _KINDS[dtype],
        4,
        _BASE,
        (ctypes.c_uint64 * 4)(columns, rows, near // _STEP, _FAR),
        (ctypes.c_uint64 * 3)(pitch, _STEP, near),
        (ctypes.c_uint32 * 4)(columns, rows, 1, 1),
        (ctypes.c_uint32 * 4)(1, 1, 1, 1),
        0,
        _SWIZZLE_128,
        _PROMOTION_256,
        0,
    )
    if result:
        got, cure = f"CUresult {result} for a pitch of {pitch} bytes", "pass operands whose lines are a multiple of 16 bytes"
        raise KernelError(describe("a map of windows", wanted="a map from the driver", got=got, cure=cure))
    return tuple(ctypes.cast(address, ctypes.POINTER(ctypes.c_uint64))[:WORDS])
