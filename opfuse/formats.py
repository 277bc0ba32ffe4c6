"""The number formats: one table of facts that quantizers, kernels, products and documents read.

An *element* is the encoding of one stored value. A *format* adds how values share scales and how the two planes of a
matrix are laid out. A matrix ``x`` of logical shape (M, K) has a *rowwise* plane, whose blocks run along K, and a
*columnwise* plane, whose blocks run along M.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` of ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


DTYPES = {dtype_name(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
"""The dtypes of torch by name."""

Usage = Literal["rowwise", "columnwise"]
ROWWISE: Final = "rowwise"
COLUMNWISE: Final = "columnwise"
USAGES: tuple[Usage, Usage] = (ROWWISE, COLUMNWISE)

SCALE_TILE = (128, 4)
"""Rows and columns of one 512-byte tile of block scales in the layout that matrix products read."""


@dataclass(frozen=True)
class Element:
    """Encoding of one stored value.

    ``max`` is the largest finite magnitude, ``max_code`` its byte, ``nan_code`` the canonical NaN byte (None: the
    encoding has no NaN), ``dtype`` the torch dtype of the same encoding (packed encodings use uint8).
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    max_code: int
    nan_code: int | None
    dtype: torch.dtype

    def __hash__(self) -> int:  # formats are looked up at every cast; equal elements have equal names
        return hash(self.name)


E4M3 = Element("e4m3", 8, 4, 3, 7, 448.0, 0x7E, 0x7F, torch.float8_e4m3fn)
E5M2 = Element("e5m2", 8, 5, 2, 15, 57344.0, 0x7B, 0x7F, torch.float8_e5m2)
E2M1 = Element("e2m1", 4, 2, 1, 1, 6.0, 0x7, None, torch.uint8)

ELEMENTS = {element.name: element for element in (E4M3, E5M2, E2M1)}
FP8_ELEMENTS = {E4M3.dtype: E4M3, E5M2.dtype: E5M2}


@dataclass(frozen=True)
class NumberFormat:
    """How a matrix is encoded.

    ``block`` is (rows, columns) that share one scale in the rowwise plane, mirrored in the columnwise plane; 0 columns are all of
    a row, None means the whole tensor. ``scale`` is the encoding of the stored decode scale. ``transposed`` says that columnwise
    data is stored (K, M). ``encode_max`` is the largest block scale the second level of NVFP4 aims at. ``rht`` holds the 16 signs
    of the Hadamard rotation that the data went through along its blocks; empty: none. ``per_row`` says that the global amax is
    one per row (columnwise: per column). ``pow2`` says that fp32 block scales are powers of two; bytes lie and mean the same
    without it. A plane says so for as long as it lives, since others may share its memory: no other scales are written to it.
    """

    name: str
    family: Literal["identity", "tensor", "row", "block", "mx", "nv"]
    element: Element | None
    block: tuple[int, int] | None
    scale: Literal["none", "fp32", "e8m0", "e4m3"]
    transposed: bool
    encode_max: int = 0
    rht: tuple[int, ...] = ()
    per_row: bool = False
    pow2: bool = False

    def __deepcopy__(self, memo: object) -> NumberFormat:
        """Itself, which nobody can change: dynamo compares a copy at each call of compiled code, and equal objects at once."""
        return self

    @property
    def as_stored(self) -> NumberFormat:
        """The format that says where bytes lie and what they mean, and nothing of their values."""
        return self.replace(pow2=False) if self.pow2 else self

    @property
    def multiple(self) -> int:
        """What the blocked dimension must be a multiple of (1: anything)."""
        return MULTIPLES.get(self.family, 1)

    @property
    def row_local(self) -> bool:
        """Whether no value of a row of the rowwise plane depends on another row."""
        shared = {"identity": False, "tensor": True, "nv": not self.per_row}
        return not shared.get(self.family, self.block is None or self.block[0] > 1)

    def __hash__(self) -> int:
        return hash((self.name, self.per_row))

    def __str__(self) -> str:
        """The name, and in brackets what its namesakes do not share: texts differ where formats do."""
        usual = self.encode_max in (0, _ENCODE_MAX)
        if usual and not (self.rht or self.per_row or self.pow2):  # the signature of a stored parameter asks at every call
            return self.name
        rotated = "rotated" if min(self.rht, default=0) < 0 else "rotated without signs"
        unlike = {rotated: self.rht, "row-scaled": self.per_row, f"scales to {self.encode_max}": not usual}
        unlike["power-of-two scales"] = self.pow2
        return f"{self.name} ({', '.join(mark for mark, applies in unlike.items() if applies)})"

    def replace(self, **changes: object) -> NumberFormat:
        """The same format with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


MULTIPLES = {"mx": 32, "nv": 16}
"""What the blocked dimension of a family must be a multiple of."""

IDENTITY = NumberFormat("identity", "identity", None, None, "none", transposed=False)
DEQUANTIZED = IDENTITY.replace(name="own_dequantized")
"""What a quantizer of the user's own made, dequantized."""


@functools.cache
def fp8_tensor(element: Element) -> NumberFormat:
    """One fp32 scale for the whole tensor; the columnwise plane is the byte transpose of the rowwise one."""
    return NumberFormat(f"fp8_tensor_{element.name}", "tensor", element, None, "fp32", transposed=True)


@functools.cache
def fp8_row(element: Element) -> NumberFormat:
    """One fp32 scale for each row; in the columnwise plane, for each column."""
    return NumberFormat(f"fp8_row_{element.name}", "row", element, (1, 0), "fp32", transposed=True)


@functools.cache
def fp8_block(element: Element, dims: int, *, pow2: bool = False) -> NumberFormat:
    """fp32 scales over 1x128 blocks (``dims=1``) or 128x128 tiles (``dims=2``), known to be powers of two or not."""
    name, block = f"fp8_block_{dims}d_{element.name}", (1, 128) if dims == 1 else (128, 128)
    return NumberFormat(name, "block", element, block, "fp32", transposed=True, pow2=pow2)


@functools.cache
def mxfp8(element: Element) -> NumberFormat:
    """E8M0 scales over 1x32 blocks; columnwise data keeps the shape (M, K). A 2D cast stores the same layout."""
    return NumberFormat(f"mxfp8_{element.name}", "mx", element, (1, 32), "e8m0", transposed=False)


def shared_format(formats: Iterable[NumberFormat]) -> NumberFormat:
    """The one format of groups that are stored alike, which says of their values what each of them does."""
    first, *others = formats
    return first if all(other is first or other == first for other in others) else first.as_stored


_ENCODE_MAX = 448

NVFP4 = NumberFormat("nvfp4", "nv", E2M1, (1, 16), "e4m3", transposed=True, encode_max=_ENCODE_MAX)
"""E4M3 scales over 1x16 blocks under one fp32 amax for the tensor; two values a byte, low nibble first."""

MXFP4 = NumberFormat("mxfp4", "mx", E2M1, (1, 32), "e8m0", transposed=True)
"""E8M0 scales over 1x32 blocks; two values a byte, low nibble first. For stored weights: torch casts, a kernel decodes."""
