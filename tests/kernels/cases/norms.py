"""Cases of normalisations: every kind, every number of threads that share a row, addresses without vectors."""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from opfuse.formats import (
    COLUMNWISE,
    E4M3,
    E5M2,
    IDENTITY,
    ROWWISE,
    USAGES,
    Element,
    Usage,
    fp8_block,
    fp8_row,
    fp8_tensor,
    mxfp8,
)
from opfuse.kernels.casts.encoding import (
    Blocks,
    Current,
    EncodedArrays,
    Encoding,
    Measured,
    Microscaled,
    RecordingScale,
    RowScaled,
    WithOriginal,
)
from opfuse.kernels.casts.tensor import tensor_amax
from opfuse.kernels.engine.registry import Arguments, Case, CaseTable
from opfuse.kernels.norms.cast import norm_cast
from opfuse.kernels.norms.norm import norm_backward, norm_forward
from opfuse.numerics import norm as definition
from opfuse.numerics.chain import Rounding
from opfuse.numerics.layouts import Layout
from opfuse.numerics.norm import Norm, NormKind
from tests.kernels.cases.matrices import hard

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Types(NamedTuple):
    """The dtypes of x, of the weight, and of the result; None: that of x."""

    x: torch.dtype = BF16
    weight: torch.dtype = BF16
    made: torch.dtype | None = None


_BF16 = Types()


@dataclass(frozen=True)
class Rows:
    """A normalisation of a tensor of ``shape``, over its last ``trailing`` dimensions.

    values: "normal"; "hard", of all magnitudes; "nonfinite", with a NaN and an infinity. misaligned: tensors start one element
    behind an address from which vectors can be loaded.
    """

    kind: NormKind
    shape: tuple[int, ...]
    types: Types = _BF16
    trailing: int = 1
    zero_centered: bool = False
    misaligned: bool = False
    values: str = "normal"

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor whose values depend on its name and on the case, in a storage of its own."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {self!r}".encode()))
        values = torch.randn(shape, generator=generator).to(dtype)
        if name == "x" and self.values == "hard":
            values = hard(torch.Size(shape[:-1]).numel(), shape[-1], generator, dtype).reshape(shape)
        if name == "x" and self.values == "nonfinite":
            values.view(-1)[[shape[-1] // 2, -1]] = torch.tensor([torch.nan, torch.inf], dtype=dtype)
        start = int(self.misaligned)
        storage = torch.empty(values.numel() + start, dtype=dtype, device=device)
        return storage[start:].view(shape).copy_(values)

    def x(self, device: torch.device) -> torch.Tensor:
        return self.tensor("x", self.shape, self.types.x, device)

    def norm(self, device: torch.device) -> Norm:
        if self.kind == "l2_normalization":
            return Norm(self.kind, eps=1e-6)
        shape = self.shape[len(self.shape) - self.trailing :]
        weight = self.tensor("weight", shape, self.types.weight, device)
        bias = self.tensor("bias", shape, self.types.weight, device) if self.kind == "layer_norm" else None
        return Norm(self.kind, weight, bias, 1e-5, self.zero_centered)

    def forward(self, device: torch.device) -> Arguments:
        return Arguments((self.x(device), self.norm(device)), {"dtype": self.types.made})

    def backward(self, rounding: Rounding | None, device: torch.device) -> Arguments:
        """A call with dy in the dtype of the result. rounding: with one, the call adds ``extra`` to dx; None: it adds nothing."""
        cpu = torch.device("cpu")
        _, statistics = definition.norm_forward(self.x(cpu), self.norm(cpu))
        dy = self.tensor("dy", self.shape, self.types.made or self.types.x, device)
        options = {"extra": self.tensor("extra", self.shape, self.types.x, device), "rounding": rounding} if rounding else {}
        return Arguments((dy, self.x(device), self.norm(device), statistics.each(lambda t: t.to(device))), options)

    @property
    def name(self) -> str:
        """What tells this case from others."""
        dtypes = (str(dtype).removeprefix("torch.") for dtype in self.types if dtype is not None)
        flags = ["zero-centered"] * self.zero_centered + ["misaligned"] * self.misaligned
        return " ".join(map(str, (self.kind, self.shape, *dtypes, *flags, self.values)))


_KINDS: tuple[NormKind, ...] = ("rms_norm", "layer_norm", "l2_normalization")
_TYPES = (Types(), Types(BF16, FP32), Types(FP16, FP16), Types(FP32, FP32), Types(BF16, BF16, FP32))
_WIDTHS = (8, 264, 520, 1024, 1032, 2048, 2056, 4096, 8192, 8200, 16384, 16392, 67, 1031, 9001)
"""Columns: for every team of threads, and every number of eights that a thread may have; a few are no multiples of eight."""


def _varied(rows: int) -> Iterator[Rows]:
    """Every width, for RMSNorm and for one of the other kinds, with dtypes in turn."""
    types = itertools.cycle(_TYPES)
    for i, width in enumerate(_WIDTHS):
        for kind in (_KINDS[0], _KINDS[1 + i % 2]):
            yield Rows(kind, (rows, width), next(types), zero_centered=i % 3 == 1)


_SPECIAL = (
    Rows("rms_norm", (2, 3, 4, 40), trailing=2),
    Rows("layer_norm", (300, 24), misaligned=True),
    Rows("rms_norm", (9, 1032), misaligned=True),
    Rows("rms_norm", (64, 272), values="hard"),
    Rows("layer_norm", (64, 2048), values="hard"),
    Rows("l2_normalization", (64, 272), values="hard"),
    Rows("rms_norm", (12, 264), values="nonfinite"),
    Rows("layer_norm", (12, 1032), values="nonfinite"),
    Rows("layer_norm", (1, 7)),
    Rows("rms_norm", (24,)),
    Rows("rms_norm", (5, 1), Types(FP32, FP32)),
    Rows("layer_norm", (5, 264), Types(FP32, BF16, BF16)),
    Rows("rms_norm", (0, 32)),
)
_TALL = (
    Rows("rms_norm", (4100, 24)),
    Rows("layer_norm", (2050, 264)),
    Rows("rms_norm", (1100, 1032)),
    Rows("layer_norm", (600, 2056)),
    Rows("rms_norm", (300, 5120)),
)


FORWARD: dict[str, Case] = {rows.name: functools.partial(Rows.forward, rows) for rows in (*_varied(9), *_SPECIAL)}
_ROUNDINGS: tuple[Rounding, ...] = ("per_op", "single")
_ALONE: list[tuple[Rows, Rounding | None]] = [(rows, None) for rows in (*_varied(9), *_SPECIAL, *_TALL)]
_ADDED = zip((*list(_varied(8))[::2], *_SPECIAL[:4], *_TALL), itertools.cycle(_ROUNDINGS))
BACKWARD: dict[str, Case] = {
    f"{rows.name} {rounding or 'alone'}": functools.partial(Rows.backward, rows, rounding)
    for rows, rounding in (*_ALONE, *_ADDED)
}

# -- casts -------------------------------------------------------------------------------------------------------------------

_ELEMENTS = (E4M3, E5M2)
_PLANES: tuple[tuple[Usage, ...], ...] = ((ROWWISE,), (ROWWISE, COLUMNWISE), (ROWWISE,), (COLUMNWISE,))

Planes = tuple[tuple[int, int], Element, tuple[Usage, ...]]


def _recording(planes: Planes, device: torch.device) -> RecordingScale:
    layouts = [Layout(fp8_tensor(planes[1]), usage, planes[0]) for usage in planes[2]]
    scale, amax = (torch.full((1,), value, dtype=torch.float32, device=device) for value in (3.7, 2.0**-20))
    return RecordingScale(scale, amax, layouts)


def _measured(planes: Planes, device: torch.device) -> Measured:
    layouts = [Layout(fp8_tensor(planes[1]), usage, planes[0]) for usage in planes[2]]

    def under(amax: torch.Tensor) -> Current:
        return Current(amax, layouts)

    def cast(x: torch.Tensor, amax: torch.Tensor | None) -> list[EncodedArrays]:
        return under(tensor_amax(x) if amax is None else amax)(x)

    return Measured(layouts, cast, None if planes[0][1] % 3 == 2 else under)


def _row_scaled(pow2: bool, planes: Planes, device: torch.device) -> RowScaled:
    layouts = [Layout(fp8_row(planes[1]), usage, planes[0]) for usage in planes[2]]
    return RowScaled(layouts, eps=0.25, pow2=pow2)


def _blocks(dims: int, planes: Planes, device: torch.device) -> Blocks:
    layouts = [Layout(fp8_block(planes[1], dims), usage, planes[0]) for usage in planes[2]]
    return Blocks(layouts, eps=0.25 * (dims - 1), pow2=planes[0][1] % 3 != 0)


def _microscaled(rows: int, swizzled: bool, planes: Planes, device: torch.device) -> Microscaled:
    layouts = [Layout(mxfp8(planes[1]), usage, planes[0], swizzled) for usage in planes[2]]
    return Microscaled(layouts, rows, "floor" if planes[0][1] % 3 == 0 else "ceil")


def _with_original(inner: Callable[[Planes, torch.device], Encoding], planes: Planes, device: torch.device) -> WithOriginal:
    shape, element, _ = planes
    encode = inner((shape, element, (ROWWISE,)), device)
    return WithOriginal((*encode.layouts, Layout(IDENTITY, COLUMNWISE, shape)), encode)


_ENCODINGS: dict[str, Callable[[Planes, torch.device], Encoding]] = {
    "recording": _recording,
    "measured": _measured,
    "row-scaled": functools.partial(_row_scaled, False),
    "row-scaled pow2": functools.partial(_row_scaled, True),
    "1x128": functools.partial(_blocks, 1),
    "128x128": functools.partial(_blocks, 2),
    "MX": functools.partial(_microscaled, 1, False),
    "MX swizzled": functools.partial(_microscaled, 1, True),
    "MX square": functools.partial(_microscaled, 32, False),
}
_ENCODINGS |= {
    f"{name} with original": functools.partial(_with_original, _ENCODINGS[name])
    for name in ("recording", "measured", "128x128", "MX swizzled")
}
_CAST = (
    Rows("rms_norm", (130, 200)),
    Rows("layer_norm", (33, 1024), Types(FP16, FP32)),
    Rows("rms_norm", (5, 8192), zero_centered=True),
    Rows("layer_norm", (5, 8192), zero_centered=True),
    Rows("layer_norm", (9, 2056), Types(FP32, FP32)),
    Rows("l2_normalization", (259, 67)),
    Rows("rms_norm", (3, 16392), Types(BF16, BF16, FP16)),
    Rows("rms_norm", (34, 1032), values="nonfinite"),
    Rows("layer_norm", (64, 272), values="hard"),
    Rows("rms_norm", (2, 3, 4, 40), trailing=2),
)


def _cast(rows: Rows, encoding: str, element: Element, usages: tuple[Usage, ...], device: torch.device) -> Arguments:
    x, norm = rows.forward(device).args
    matrix = (torch.Size(rows.shape[:-1]).numel(), rows.shape[-1])
    return Arguments((x, norm, _ENCODINGS[encoding]((matrix, element, usages), device)), {"dtype": rows.types.made})


_BOTH = (Rows("rms_norm", (96, 288)), Rows("layer_norm", (64, 1024), Types(FP16, FP16)), Rows("l2_normalization", (32, 2080)))
# The numbers of encodings, elements and choices of planes share no factor, so all combinations of them occur.
_TURNS = zip(itertools.product(_CAST, _ENCODINGS), itertools.cycle(_ELEMENTS), itertools.cycle((*_PLANES, (ROWWISE,))))
_NONFINITE = zip(
    itertools.product((Rows("layer_norm", (9, 768), values="nonfinite"),), _ENCODINGS),
    itertools.cycle(_ELEMENTS),
    itertools.repeat(_PLANES[0]),
)
_ALL_BOTH = zip(itertools.product(_BOTH, _ENCODINGS), itertools.cycle(_ELEMENTS), itertools.repeat(USAGES))
CAST: dict[str, Case] = {
    f"{rows.name} {encoding} {element.name} {'+'.join(usages)}": functools.partial(_cast, rows, encoding, element, usages)
    for (rows, encoding), element, usages in (*_TURNS, *_NONFINITE, *_ALL_BOTH)
}

CASES: CaseTable = {
    norm_forward: FORWARD,
    norm_backward: BACKWARD,
    norm_cast: CAST,
}
