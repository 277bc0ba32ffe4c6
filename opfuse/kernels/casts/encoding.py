"""Encodings: casts as values, which a kernel that computes a tensor can take over, so that it stores codes and not the tensor.

A kernel looks an encoding up by its type. Calling the encoding on a tensor casts that tensor, and defines what the kernel has to
compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from opfuse.kernels.casts.block import cast_block
from opfuse.kernels.casts.groups import cast_block_groups
from opfuse.kernels.casts.row import cast_row
from opfuse.kernels.casts.tensor import cast_current, cast_mx, cast_recording
from opfuse.numerics.layouts import Layout, check_planes
from opfuse.numerics.row_groups import RowGroups
from opfuse.numerics.rules import Formula, cast_by
from opfuse.numerics.scales import ScaleRounding

EncodedArrays = tuple[Tensor, ...]
"""The arrays of one plane: data and decode scale, and the global amax if the format has one; an identity plane has data alone."""


class Encoding(Protocol):
    """The cast of a tensor (..., columns), seen as a matrix (rows, columns), to planes of these ``layouts``."""

    @property
    def layouts(self) -> Sequence[Layout]:
        """The planes, in the order of the results."""

    def __call__(self, x: Tensor) -> list[EncodedArrays]:
        """The planes of ``x``, in the order of ``layouts``."""


@dataclass(frozen=True, eq=False)
class RecordingScale:
    """One given scale for the whole tensor, and a record of its amax: :func:`casts.cast_recording`.

    scale: fp32 (1,), what values are multiplied by. amax: fp32 (1,), raised in place to the largest magnitude.
    """

    scale: Tensor
    amax: Tensor
    layouts: Sequence[Layout]

    def __call__(self, x: Tensor) -> list[EncodedArrays]:
        data, decode_scale = cast_recording(_matrix(x, self.layouts), self.scale, self.amax, self.layouts)
        return [(each, decode_scale) for each in data]


@dataclass(frozen=True, eq=False)
class Current:
    """One scale for the whole tensor, computed from its amax, which is known: :func:`casts.cast_current`.

    amax: fp32 (1,), the largest magnitude of the tensor.
    """

    amax: Tensor
    layouts: Sequence[Layout]
    eps: float = 0.0
    pow2: bool = False

    def __call__(self, x: Tensor) -> list[EncodedArrays]:
        data, decode_scale = cast_current(_matrix(x, self.layouts), self.amax, self.layouts, eps=self.eps, pow2=self.pow2)
        return [(each, decode_scale) for each in data]


@dataclass(frozen=True, eq=False)
class RowScaled:
    """An fp32 scale for each line, a row or a column: :func:`casts.cast_row`."""

    layouts: Sequence[Layout]
    eps: float = 0.0
    pow2: bool = False

    def __call__(self, x: Tensor) -> list[EncodedArrays]:
        return [*cast_row(_matrix(x, self.layouts), self.layouts, eps=self.eps, pow2=self.pow2)]


@dataclass(frozen=True, eq=False)
class Blocks:
    """An fp32 scale for each block of 128 values or of 128 x 128: :func:`casts.cast_block`."""

    layouts: Sequence[Layout]
    eps: float = 0.0
    pow2: bool = True

    def __call__(self, x: Tensor) -> list[EncodedArrays]:
        return [*cast_block(_matrix(x, self.layouts), self.layouts, eps=self.eps, pow2=self.pow2)]


@dataclass(frozen=True, eq=False)
class BlocksOfGroups:
    """:class:`Blocks` of 1 x 128, of groups of rows that are cast apart: :func:`groups.cast_block_groups`."""

    layouts: Sequence[Layout]
    groups: RowGroups
    eps: float = 0.0
    pow2: bool = True

    def __call__(self, x: Tensor) -> list[EncodedArrays]:
        matrix = x.reshape(self.groups.rows, x.shape[-1])
        return [*cast_block_groups(matrix, self.groups, self.layouts, eps=self.eps, pow2=self.pow2)]


@dataclass(frozen=True, eq=False)
class Microscaled:
    """An E8M0 scale for each block of ``rows`` x 32 values: :func:`casts.cast_mx`."""

    layouts: Sequence[Layout]
    rows: int = 1
    rounding: ScaleRounding = "ceil"

    def __call__(self, x: Tensor) -> list[EncodedArrays]:
        return [*cast_mx(_matrix(x, self.layouts), self.layouts, rows=self.rows, rounding=self.rounding)]


@dataclass(frozen=True, eq=False)
class Ruled:
    """Scales by a rule for which there is no kernel: :func:`rules.cast_by`, on every device."""

    layouts: Sequence[Layout]
    formula: Formula
    rows: int = 1
    eps: float = 0.0

    def __call__(self, x: Tensor) -> list[EncodedArrays]:
        return [*cast_by(_matrix(x, self.layouts), self.layouts, self.formula, rows=self.rows, eps=self.eps)]


@dataclass(frozen=True, eq=False)
class Measured:
    """A cast whose scale depends on the amax of the whole tensor.

    A kernel that computes the tensor can find the amax, but only a second kernel can cast.

    cast: ``cast(x, amax)`` casts the matrix ``x``; amax: fp32 (1,), its largest magnitude, or None if that is not known. under:
    makes the encoding for a known amax, by which a kernel casts values as it computes them again; None: no kernel can.
    """

    layouts: Sequence[Layout]
    cast: Callable[[Tensor, Tensor | None], list[EncodedArrays]]
    under: Callable[[Tensor], Encoding] | None = None

    def __call__(self, x: Tensor) -> list[EncodedArrays]:
        return self.cast(_matrix(x, self.layouts), None)

    def given(self, x: Tensor, amax: Tensor) -> list[EncodedArrays]:
        """The planes of ``x``, whose largest magnitude is ``amax``, fp32 (1,)."""
        return self.cast(_matrix(x, self.layouts), amax)


@dataclass(frozen=True, eq=False)
class WithOriginal:
    """The planes of another encoding, followed by the tensor itself as a plane, which the kernel that computes it stores."""

    layouts: Sequence[Layout]
    encode: Encoding

    def __call__(self, x: Tensor) -> list[EncodedArrays]:
        return [*self.encode(x), (x,)]


def apart(encode: Encoding) -> tuple[Encoding, bool]:
    """The encoding without the tensor itself, and whether that is a plane, too."""
    return (encode.encode, True) if isinstance(encode, WithOriginal) else (encode, False)


def original(stored: Tensor | None) -> list[EncodedArrays]:
    """The tensor itself as a plane, if it was stored beside its casts; nothing for None."""
    return [] if stored is None else [(stored,)]


def _matrix(x: Tensor, layouts: Sequence[Layout]) -> Tensor:
    if x.shape == layouts[0].shape:
        return x
    check_planes(x.shape, layouts, where="cast")
    return x.reshape(layouts[0].shape)
