"""Casts as values: what a kernel that makes a tensor may do with it in place of storing it.

Calling an encoding casts a tensor that exists, and is the definition of what a kernel that takes it does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from opfuse.kernels.casts.block import cast_block
from opfuse.kernels.casts.row import cast_row
from opfuse.kernels.casts.tensor import cast_current, cast_mx, cast_recording
from opfuse.numerics.checks import check_planes
from opfuse.numerics.layouts import Layout
from opfuse.numerics.rules import Formula, cast_by
from opfuse.numerics.scales import ScaleRounding

EncodedArrays = tuple[Tensor, ...]
"""Data and decode scale of one plane, and its global amax where its format has one; of an identity plane, its data alone."""


class Encoding(Protocol):
    """The cast of a tensor (..., columns) to the planes ``layouts`` of the matrix that it is."""

    @property
    def layouts(self) -> Sequence[Layout]:
        """The planes, in the order of the results."""

    def __call__(self, x: Tensor) -> list[EncodedArrays]:
        """The planes of a tensor that exists."""


@dataclass(frozen=True, eq=False)
class RecordingScale:
    """One given scale for the tensor, whose amax is recorded: :func:`casts.cast_recording`.

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
    """The scale that an amax gives, for the tensor whose amax it is: :func:`casts.cast_current`.

    amax: fp32 (1,), the largest magnitude.
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
    """An fp32 scale for each line: :func:`casts.cast_row`."""

    layouts: Sequence[Layout]
    eps: float = 0.0
    pow2: bool = False

    def __call__(self, x: Tensor) -> list[EncodedArrays]:
        return [*cast_row(_matrix(x, self.layouts), self.layouts, eps=self.eps, pow2=self.pow2)]


@dataclass(frozen=True, eq=False)
class Blocks:
    """An fp32 scale for each block of 128, or of 128 x 128: :func:`casts.cast_block`."""

    layouts: Sequence[Layout]
    eps: float = 0.0
    pow2: bool = True

    def __call__(self, x: Tensor) -> list[EncodedArrays]:
        return [*cast_block(_matrix(x, self.layouts), self.layouts, eps=self.eps, pow2=self.pow2)]


@dataclass(frozen=True, eq=False)
class Microscaled:
    """An E8M0 scale for each ``rows`` x 32 values of a line: :func:`casts.cast_mx`."""

    layouts: Sequence[Layout]
    rows: int = 1
    rounding: ScaleRounding = "ceil"

    def __call__(self, x: Tensor) -> list[EncodedArrays]:
        return [*cast_mx(_matrix(x, self.layouts), self.layouts, rows=self.rows, rounding=self.rounding)]


@dataclass(frozen=True, eq=False)
class Ruled:
    """Scales by a rule that no kernel has: :func:`rules.cast_by`, on every device."""

    layouts: Sequence[Layout]
    formula: Formula
    rows: int = 1
    eps: float = 0.0

    def __call__(self, x: Tensor) -> list[EncodedArrays]:
        return [*cast_by(_matrix(x, self.layouts), self.layouts, self.formula, rows=self.rows, eps=self.eps)]


@dataclass(frozen=True, eq=False)
class Measured:
    """A cast under the amax of the whole tensor, which a kernel can find while it makes the tensor; another one casts it.

    cast: ``cast(x, amax)`` of the matrix and of fp32 (1,) its largest magnitude, or None where that is not known.
    under: the cast when the amax is known, if the kernel that makes the tensor can do that one; None: it cannot.
    """

    layouts: Sequence[Layout]
    cast: Callable[[Tensor, Tensor | None], list[EncodedArrays]]
    under: Callable[[Tensor], Encoding] | None = None

    def __call__(self, x: Tensor) -> list[EncodedArrays]:
        return self.cast(_matrix(x, self.layouts), None)

    def given(self, x: Tensor, amax: Tensor) -> list[EncodedArrays]:
        """The planes of a tensor whose amax is known."""
        return self.cast(_matrix(x, self.layouts), amax)


@dataclass(frozen=True, eq=False)
class WithOriginal:
    """The planes of another encoding, and last, as a plane, the tensor itself, which whoever makes it stores."""

    layouts: Sequence[Layout]
    encode: Encoding

    def __call__(self, x: Tensor) -> list[EncodedArrays]:
        return [*self.encode(x), (x,)]


def apart(encode: Encoding) -> tuple[Encoding, bool]:
    """What is cast, and whether the tensor itself is a plane as well."""
    return (encode.encode, True) if isinstance(encode, WithOriginal) else (encode, False)


def original(stored: Tensor | None) -> list[EncodedArrays]:
    """The plane of a tensor that was stored beside its casts, if it was."""
    return [] if stored is None else [(stored,)]


def _matrix(x: Tensor, layouts: Sequence[Layout]) -> Tensor:
    if x.shape == layouts[0].shape:
        return x
    check_planes(x.shape, layouts, where="cast")
    return x.reshape(layouts[0].shape)
