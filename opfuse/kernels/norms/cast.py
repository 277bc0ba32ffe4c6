"""Normalisations that end in a cast.

- A rowwise cast runs in the kernel of the normalisation, which holds whole rows and knows their statistics.
- A columnwise cast, or one in square blocks, takes two kernels, which both read the input. The first finds the statistics. With
  these the rest of a normalisation is an elementwise op, so the second is the kernel that casts a chain of such ops in tiles.
- If the scale depends on the amax of the whole result, the kernel that finds the statistics finds the amax, too. A second kernel
  computes the result again from the input and casts it; where storing the result and reading it takes fewer bytes, that is done.
- If the result is kept as well, as for a backward pass in high precision, a rowwise cast stores it beside the codes; before any
  other cast it is stored, and the cast reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from opfuse.formats import ROWWISE
from opfuse.kernels.casts.encoding import (
    Blocks,
    EncodedArrays,
    Encoding,
    Measured,
    Microscaled,
    RecordingScale,
    RowScaled,
    apart,
    original,
)
from opfuse.kernels.casts.room import room_for
from opfuse.kernels.chains.cast import forward_chain_cast
from opfuse.kernels.chains.tiles import CASTS
from opfuse.kernels.engine.compiling import Variant
from opfuse.kernels.engine.parameters import CStruct, parameter_of
from opfuse.kernels.engine.registry import BITWISE, Launcher, kernel
from opfuse.kernels.engine.variants import C_TYPES, addresses, variant_of
from opfuse.kernels.norms import trials
from opfuse.kernels.norms.call import NormCall, NormVariant, call_of
from opfuse.kernels.norms.norm import norm_forward, run_forward
from opfuse.numerics.chain import Rounding, Stage
from opfuse.numerics.layouts import Layout, are_known, check_cast
from opfuse.numerics.norm import Norm, NormKind, Statistics
from opfuse.numerics.pointwise import OperandKind, Pointwise


def norm_then_cast(
    x: Tensor, norm: Norm, encode: Encoding, *, dtype: torch.dtype | None = None
) -> tuple[list[EncodedArrays], Statistics]:
    """The planes of :func:`norm_forward`'s y, in the order of ``encode.layouts``, and the statistics.

    dtype: to which y is rounded before the cast; by default that of ``x``. Errors: of :func:`norm_forward` and of ``encode``.
    """
    y, statistics = norm_forward(x, norm, dtype=dtype)
    return encode(y), statistics


@kernel("norm_cast.cu", reference=norm_then_cast, tolerance=BITWISE, trials=trials.cast)
def norm_cast(
    launch: Launcher, x: Tensor, norm: Norm, encode: Encoding, *, dtype: torch.dtype | None = None
) -> tuple[list[EncodedArrays], Statistics]:
    """Reads ``x`` once for a rowwise cast, twice for others and where the scale depends on the amax of the whole result."""
    dtype = dtype or x.dtype
    call = call_of(x, norm, None, [dtype])
    if call is None:
        return norm_then_cast(x, norm, encode, dtype=dtype)
    inner, stores = apart(encode)
    y = torch.empty(x.shape, dtype=dtype, device=x.device) if stores else None
    return [*_cast(launch, call, inner, dtype, y), *original(y)], call.statistics


def _cast(launch: Launcher, call: NormCall, encode: Encoding, dtype: torch.dtype, y: Tensor | None) -> list[EncodedArrays]:
    """The planes of the result, rounded to ``dtype``; the result is stored in ``y``, if that is given."""
    if isinstance(encode, Measured):
        return _measured(launch, call, encode, dtype, y)
    if (call.rows, call.columns) == encode.layouts[0].shape and are_known(encode.layouts):
        if type(encode) in _TARGETS and _is_by_rows(encode):
            return _by_rows(launch, call, encode, dtype, y)
        if type(encode) in CASTS and _is_whole(call, encode) and y is None:
            run_forward(launch, call, None)
            return _by_tiles(launch, call, encode, dtype)
    made = _room(call, dtype, y)
    run_forward(launch, call, made)
    return encode(made)


def _measured(launch: Launcher, call: NormCall, encode: Measured, dtype: torch.dtype, y: Tensor | None) -> list[EncodedArrays]:
    amax = torch.zeros(1, dtype=torch.float32, device=call.x.device)
    if y is None and encode.under is not None and call.x.dtype.itemsize <= dtype.itemsize and _is_whole(call, encode):
        run_forward(launch, call, None, amax, dtype=dtype)
        return _by_tiles(launch, call, encode.under(amax), dtype)
    made = _room(call, dtype, y)
    run_forward(launch, call, made, amax)
    return encode.given(made, amax)


def _room(call: NormCall, dtype: torch.dtype, y: Tensor | None) -> Tensor:
    """``y``, or new memory for the result."""
    return torch.empty(call.x.shape, dtype=dtype, device=call.x.device) if y is None else y


def _is_whole(call: NormCall, encode: Encoding) -> bool:
    """Whether the planes are those of the matrix that is normalised, and their lines whole multiples of what formats ask for."""
    whole = all(layout.lines[1] % layout.format.multiple == 0 for layout in encode.layouts)
    return whole and (call.rows, call.columns) == encode.layouts[0].shape and are_known(encode.layouts)


# -- by rows -----------------------------------------------------------------------------------------------------------------


def _is_by_rows(encode: Encoding) -> bool:
    """Whether the codes of a row depend on that row alone, and so do its scales, unless the tensor has a given one."""
    layout = encode.layouts[0]
    rows = encode.rows if isinstance(encode, Microscaled) else 1 if layout.format.family == "tensor" else layout.block[0]
    return len(encode.layouts) == 1 and layout.usage == ROWWISE and rows == 1


def _by_rows(launch: Launcher, call: NormCall, encode: Encoding, dtype: torch.dtype, y: Tensor | None) -> list[EncodedArrays]:
    (layout,) = encode.layouts
    planes, fields = room_for(encode, call.x, dtype)
    data = planes[0][0]
    form, pow2 = call.form(*(t for t in (data, y) if t is not None)), getattr(encode, "pow2", False)
    parameters, variant = _variant(form, type(encode), layout, dtype, pow2=pow2, stores=y is not None)
    packed = parameters(norm=call.fields(), **addresses({"codes": data, "y": y}), target=_TARGETS[type(encode)].target.of(fields))
    launch(variant, "norm_cast", call.grid, parameters.layout, *packed, device=call.x.get_device())
    return planes


@functools.lru_cache(maxsize=4096)
def _variant(
    form: NormVariant, encoding: type, layout: Layout, made: torch.dtype, *, pow2: bool, stores: bool
) -> tuple[CStruct, Variant]:
    check_cast(layout.shape, made, [layout], family=_TARGETS[encoding].family, where="norm_cast")
    parameters = parameter_of("norm_cast.cu", types=(("CAST::Target", _TARGETS[encoding].target),))
    variant = variant_of(
        "norm_cast.cu",
        parameters.layout,
        **form.defines(form.held()),
        IO=C_TYPES[made],
        OUT=layout.element.name.upper(),
        CAST=_TARGETS[encoding].name,
        SWIZZLED=layout.swizzled,
        POW2=bool(pow2),
        STORES=stores,
        RESIDENT=form.resident(twice=_TARGETS[encoding].twice),
    )
    return parameters, variant


class _RowCast(NamedTuple):
    """A cast by rows: its name in norm_cast.cu, and the family of its formats.

    twice: whether the kernel computes values twice, first for the amax of the row.
    """

    name: str
    family: str
    twice: bool = False

    @property
    def target(self) -> CStruct:
        """The struct by which the kernel finds the planes."""
        return parameter_of("norm_cast.cu", f"{self.name}::Target")


_TARGETS: Mapping[type, _RowCast] = {
    RecordingScale: _RowCast("Recording", "tensor"),
    RowScaled: _RowCast("RowScaled", "row", twice=True),
    Blocks: _RowCast("Blocks", "block"),
    Microscaled: _RowCast("Microscaled", "mx"),
}
"""Casts by rows, by the type of the encoding."""

# -- by tiles ----------------------------------------------------------------------------------------------------------------


def _by_tiles(launch: Launcher, call: NormCall, encode: Encoding, dtype: torch.dtype) -> list[EncodedArrays]:
    """The planes of a normalised matrix whose statistics are known."""
    x = call.x.view(call.rows, call.columns)
    rounding: Rounding = "per_op" if x.dtype == dtype else "single"  # which alone does not round x
    stage = stage_of(call.norm, call.statistics)
    encoded, _, _ = forward_chain_cast.run(launch, x, [stage], encode, rounding=rounding, dtype=dtype)
    return encoded


def stage_of(norm: Norm, statistics: Statistics) -> Stage:
    """The elementwise op that a normalisation of a matrix is once its statistics are known."""
    tensors = {"weight": norm.weight, "bias": norm.bias, **statistics._asdict()}
    operands = {name: tensor.flatten() for name, tensor in tensors.items() if tensor is not None}
    return Stage(_stage_math(norm.kind, norm.zero_centered_gamma), operands)


@functools.cache
def _stage_math(kind: NormKind, zero_centered: bool) -> Pointwise:
    """(x - mean) * rstd * gamma + bias, as far as the kind has these terms. Its gradient treats the statistics as constants."""
    operands: dict[str, OperandKind] = {"rstd": "column"}
    normal, gamma, bias = "x * rstd", "", ""
    if kind != "l2_normalization":
        operands["weight"] = "row"
        gamma = " * (1.0f + weight)" if zero_centered else " * weight"
    if kind == "layer_norm":
        operands |= {"mean": "column", "bias": "row"}
        normal, bias = "(x - mean) * rstd", " + bias"

    def factor(weight: Tensor) -> Tensor:
        return 1 + weight if zero_centered else weight

    def value(x: Tensor, *, rstd: Tensor, **given: Tensor) -> Tensor:
        y = (x - given["mean"] if "mean" in given else x) * rstd
        y = y * factor(given["weight"]) if "weight" in given else y
        return y + given["bias"] if "bias" in given else y

    def grad(dy: Tensor, x: Tensor, *, rstd: Tensor, **given: Tensor) -> tuple[Tensor]:
        return ((dy * factor(given["weight"]) if "weight" in given else dy) * rstd,)

    return Pointwise(kind, f"{normal}{gamma}{bias}", (f"dy{gamma} * rstd",), value, grad, operands=operands)
