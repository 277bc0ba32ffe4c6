"""An FP8 product, the elementwise ops that follow it, and the cast of what they make, in one launch (cuda/product_chain.cu).

The bits are those of the product and of the chain's own kernel, one after the other; :data:`CHEAPER` says where the one launch
saves time.

The expressions are those of the chain's own kernel, over two neighbours at a time in place of eight. Each value is rounded
where the op alone would round it. Codes of the transpose, which weight gradients read, are turned in shared memory on their
way. A product is decided late: a rule asks for one that is yet to be made (``PendingProduct``), and the chain makes it with
itself or without.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import NoneType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from opfuse.formats import COLUMNWISE, ROWWISE
from opfuse.kernels.casts.encoding import (
    Blocks,
    EncodedArrays,
    Encoding,
    Measured,
    Microscaled,
    RecordingScale,
    RowScaled,
    WithOriginal,
    apart,
    original,
)
from opfuse.kernels.casts.room import room_for
from opfuse.kernels.chains.call import ChainCall, product_call
from opfuse.kernels.chains.cast import forward_chain_cast, forward_chain_encoded, is_light
from opfuse.kernels.chains.chain import chain_fields, forward_chain
from opfuse.kernels.chains.fragments import MOST_STORED, fits, fragments_of
from opfuse.kernels.chains.structure import ChainCode
from opfuse.kernels.chains.tiles import CASTS
from opfuse.kernels.engine.compiling import Variant
from opfuse.kernels.engine.parameters import CStruct, parameter_of
from opfuse.kernels.engine.registry import Launcher, Tolerance, kernel, on_kernels
from opfuse.kernels.engine.variants import variant_of
from opfuse.kernels.products.hopper import LEAST_LINES, TENSORS, TILES, Form, Pair, boxes, form_of
from opfuse.kernels.products.native import OWN_OUTPUTS, multiply, own_refusal
from opfuse.kernels.products.stored import Stored
from opfuse.numerics.activations import ARITHMETIC, POINTWISE
from opfuse.numerics.chain import Stage
from opfuse.numerics.layouts import check_cast
from opfuse.numerics.pointwise import Pointwise

ProductResult = tuple[list[EncodedArrays], Tensor | None, dict[int, Tensor]]
"""The planes of the chain's result, the result itself where nothing is cast, and what is kept."""


class Within(NamedTuple):
    """Products of one form for which one launch is faster: tiles at least, length of sums, elements of the result at most."""

    tiles: int
    length: int
    results: int


CHEAPER: Mapping[tuple[int, bool], Mapping[type, Within]] = {
    (TENSORS, True): {
        NoneType: Within(112, 16384, 1 << 40),
        RecordingScale: Within(112, 8192, 1 << 40),
        Measured: Within(112, 8192, 1 << 40),
    },
    (TILES, False): {NoneType: Within(112, 16384, 1 << 40), Blocks: Within(112, 8192, 1 << 26)},
}
"""By the scaling of the product and fast sums, and by the cast, as measured on an H200 for 256 to 16384 lines.

Where consumers share a tile nobody multiplies while it is cast, and large results are limited by power: a cast pays least there.
"""


UNROUNDED = "sums that are not rounded: in fp32 they leave a thread no registers for its chain"
"""Why a chain that rounds once is not made in one launch with its product."""

OF_EXPERTS = "products of experts: a gated activation behind them is slower in one launch"
"""Why chains behind products of experts are launches of their own."""

OF_DERIVATIVES = "derivatives run apart from the dgrad before them: one launch took 1.00 to 1.15 times as long"


def why_apart(
    left: Stored,
    right: Stored,
    stages: Sequence[Stage],
    encode: Encoding | None,
    *,
    shape: torch.Size,
    dtype: torch.dtype,
    fast: bool,
    keep: Collection[int] = (),
) -> str:
    """Why a product of ``shape``, its chain and its cast are not made in one launch; an empty string if they are."""
    if not on_kernels(left.data):
        return "no GPU whose kernels are used"
    if reason := own_refusal(left, right, dtype):
        return reason
    end = _end_of(encode, stages, left, right, dtype=dtype)
    if end is None:
        return _without_end(encode, stages)
    if reason := _crowded(stages, encode, end, keep):
        return reason
    why = slower(form_of(left, right, dtype, fast=fast), encode, left.layout.lines, right.layout.lines[0])
    given = [*map(_uncopied, stages)]
    return why or _unread(product_call(left.data, given, shape=shape, dtype=dtype, keep=(), stores=False))


def _uncopied(stage: Stage) -> Stage:
    """With memory in place of strided operands, which a call would copy."""
    dense = {
        name: t if t.is_contiguous() else torch.empty(t.shape, dtype=t.dtype, device=t.device)
        for name, t in stage.operands.items()
    }
    return replace(stage, operands=dense)


def _unread(call: ChainCall | None) -> str:
    """Why the kernel cannot read the operands of a chain; an empty string if it can."""
    if call is None:
        return "operands: wants dense tensors of the result's device and shape, in dtypes that kernels read"
    if any(t.data_ptr() % _PAIRS for t in call.tensors):
        return f"operands: wants addresses that are multiples of {_PAIRS} bytes"
    return ""


_NO_END: Mapping[type, str] = {
    RowScaled: "scales of whole rows: the result would be stored before it is cast, as it is apart",
    Microscaled: "no product whose result is cast to it, where products of that format are emulated",
    Blocks: "blocks of columns: the chain's own kernel casts both planes",
}
"""Why a product with such a cast behind it is not made in one launch."""


def _without_end(encode: Encoding | None, stages: Sequence[Stage]) -> str:
    """Why there is no kernel for a product, this chain and this cast."""
    if any(stage.math.is_gated for stage in stages):
        return "gated activations: slower in one launch, whose tile has half as many columns of either half"
    if not all(_is_known(stage.math) for stage in stages):
        return "an op of one's own, of which nobody knows how many registers it takes"
    cast = type(encode and apart(encode)[0])
    return _NO_END.get(cast, "no kernel for this chain with this cast")


def slower(form: Form, encode: Encoding | None, lines: tuple[int, int], columns: int) -> str:
    """Why one launch saves no time, by :data:`CHEAPER`. lines: number and length of those of the left."""
    (count, length), cast = lines, type(encode and apart(encode)[0])
    within = CHEAPER.get((form.scaling, form.fast), {}).get(cast)
    if within is None:
        return "not measured for this product with this cast"
    bounds = {
        "lines": (count, LEAST_LINES, math.inf),
        "tiles": (form.tiles(count, columns), within.tiles, math.inf),
        "length of the sum": (length, 1, within.length),
        "elements of the result": (count * columns, 1, within.results),
    }
    found = ((name, got, least, most) for name, (got, least, most) in bounds.items() if not least <= got <= most)
    return next((f"slower: wants {least} to {most} {name}, got {got}" for name, got, least, most in found), "")


_AMAX = parameter_of("encode.cuh", "Encode")
_PAIRS = 8  # bytes on which operands start


class _End(NamedTuple):
    """What becomes of a chain's result: the cast's name in product_chain.cu, its Encode, and definitions of its own."""

    cast: str
    encode: CStruct
    element: str = ""
    rowwise: bool = False
    turned: bool = False
    pow2: bool = False


def multiply_then_chain(
    left: Stored,
    right: Stored,
    stages: Sequence[Stage],
    encode: Encoding | None,
    *,
    shape: torch.Size,
    dtype: torch.dtype,
    keep: Collection[int] = (),
    fast: bool = False,
    invariant: bool = False,
) -> ProductResult:
    """The product as a tensor of ``shape`` in ``dtype``; then its chain, rounded after each op, and the cast."""
    x = multiply(left, right, out_dtype=dtype, fast=fast, invariant=invariant).view(shape)
    if encode is None:
        y, kept = forward_chain(x, stages, dtype=dtype, keep=keep)
        return [], y, kept
    encoded, kept = forward_chain_encoded(x, stages, encode, dtype=dtype, keep=keep)
    return encoded, None, kept


@kernel("product_chain.cu", reference=multiply_then_chain, tolerance=Tolerance(ulp=1))
def product_chain(
    launch: Launcher,
    left: Stored,
    right: Stored,
    stages: Sequence[Stage],
    encode: Encoding | None,
    *,
    shape: torch.Size,
    dtype: torch.dtype,
    keep: Collection[int] = (),
    fast: bool = False,
    invariant: bool = False,
) -> ProductResult:
    """For operands that hopper.py takes, each sum in one piece, so invariant or not is the same here.

    Where the amax of the result decides its scale, a second kernel casts what is stored.
    """
    inner, stores = (None, True) if encode is None else apart(encode)
    measured, again = isinstance(inner, Measured), 0 if stores else _made_again(inner, stages, keep)
    end = _end_of(encode, stages, left, right, dtype=dtype)
    stores = stores or (measured and not again)
    roomy = end is not None and not _crowded(stages, encode, end, keep)
    call = product_call(left.data, stages, shape=shape, dtype=dtype, keep=keep, stores=stores) if roomy else None
    if call is None or end is None or not fits(call.code) or _unread(call):
        options: dict[str, Any] = {"shape": shape, "dtype": dtype, "keep": keep, "fast": fast, "invariant": invariant}
        return multiply_then_chain(left, right, stages, encode, **options)
    form = form_of(left, right, dtype, fast=fast, turned=end.turned)
    amax = torch.zeros(1, dtype=torch.float32, device=call.device) if measured else None
    planes: list[EncodedArrays] = []
    fields: dict[str, Any] = {"amax": 0 if amax is None else amax.data_ptr()}
    if end.element:
        planes, fields = room_for(cast(Encoding, inner), left.data, dtype)
    _run(launch, form, (left, right, left.layout.lines[0]), call, end, fields=fields)
    if amax is not None and again:
        under = cast(Any, inner).under(amax)
        planes, *_ = forward_chain_cast.run(launch, call.kept[again], stages[again:], under, dtype=dtype)
    elif amax is not None:
        planes = cast(Measured, inner).given(cast(Tensor, call.result), amax)
    if encode is None:
        return [], call.result, call.kept
    return [*planes, *original(call.result if isinstance(encode, WithOriginal) else None)], None, call.kept


def _made_again(inner: Encoding | None, stages: Sequence[Stage], keep: Collection[int]) -> int:
    """The stage from whose input, which is kept, the result is made again when its amax is known; 0 if it is stored and read."""
    if not isinstance(inner, Measured) or inner.under is None:
        return 0
    last = max(keep, default=0)
    return last if is_light(stages[last:]) else 0


def _end_of(encode: Encoding | None, stages: Sequence[Stage], left: Stored, right: Stored, *, dtype: torch.dtype) -> _End | None:
    """What becomes of the result of a chain; None if this kernel cannot make it."""
    lines, columns = left.layout.lines[0], right.layout.lines[0]
    if columns % 16 or dtype not in OWN_OUTPUTS or not all(_is_known(stage.math) for stage in stages):
        return None
    encode = encode and apart(encode)[0]
    if encode is None or isinstance(encode, Measured):
        return _End("NOTHING" if encode is None else "AMAX", _AMAX)
    if not isinstance(encode, (RecordingScale, Blocks)):
        return None
    layouts = {layout.usage: layout for layout in encode.layouts}
    turned = COLUMNWISE in layouts
    if (turned and lines % 16) or (isinstance(encode, Blocks) and (turned or encode.layouts[0].block != (1, 128))):
        return None
    kind = CASTS[type(encode)]
    check_cast((lines, columns), dtype, encode.layouts, family=kind.family, where="cast of a chain")
    element, pow2 = encode.layouts[0].element.name.upper(), isinstance(encode, Blocks) and bool(encode.pow2)
    return _End(kind.name, kind.encode, element, ROWWISE in layouts, turned, pow2)


def _is_known(math: Pointwise) -> bool:
    """Whether an op has a place beside the sums: one of the user's own may take too many registers."""
    return POINTWISE.get(math.name) is math and not math.is_gated


def _run(launch: Launcher, form: Form, pair: Pair, call: ChainCall, end: _End, *, fields: Mapping[str, Any]) -> None:
    """Queue the kernel of a product and of a call over it; ``fields`` are those of the cast's Encode."""
    left, _, lines = pair
    columns, device = call.shape[-1], left.data.get_device()
    variant, parameter = _program(form, call.code, end)
    kinds = cast(dict[str, CStruct], dict(parameter.fields))
    groups, tiles = form.groups([pair], columns)
    last = cast(dict[str, CStruct], dict(kinds["end"].fields))
    packed = parameter(
        product=form.fields(kinds["product"], groups, columns, [left.layout.lines[1]], tiles=tiles),
        codes=boxes(torch.uint8, columns, 64, device),
        turned=boxes(torch.uint8, lines if end.turned else 128, 128, device),
        end=kinds["end"](chain=chain_fields(last["chain"], call, call.cut()), encode=end.encode.of(fields)),
    )
    launch(variant, "product_chain", form.grid(tiles, device), parameter.layout, *packed, device=device)


@functools.cache
def _program(form: Form, code: ChainCode, end: _End) -> tuple[Variant, CStruct]:
    """The variant, and its parameter."""
    text = fragments_of(code)
    parameter = parameter_of("product_chain.cu", generated=text, types=(("Encode", end.encode),), GROUPS=1, MAPS=1)
    cast_defines = {"OUT": end.element, "RECORD": 1, "POW2": end.pow2} if end.element else {}
    ends = {"CAST": end.cast, "ROWWISE": end.rowwise, "TURNED": end.turned, **cast_defines}
    plain = variant_of("product_chain.cu", parameter.layout, **form.defines, GROUPS=1, MAPS=1, **ends)
    return plain._replace(generated=text), parameter


# -- registers -------------------------------------------------------------------------------------------------------------------
# Which chains have registers beside the sums of a product: those that no compilation for sm_90a spilled.
#
# A thread loads all operands of half of a tile before the chain runs there: one of the result's size takes 16 registers in 16
# bits, a bias 8, and an activation some for what it computes with. What a compiler makes of more ops is found for each chain
# alone, so longer chains run apart from their product.
#
# Sums are rounded to 16 bits before the chain, since in fp32 they leave a thread no registers. Three ops fit, no two alike, one
# of them an activation; with two operands of the result's size there is no room for an activation, and less where no value of the
# chain is stored. Beyond that compiled kernels spilled up to 824 bytes of registers, the exact GELU with dropout most.

LONGEST = 3
"""Ops of a chain, no two alike, of which at most one is an activation."""

MOST_FULL = {"arithmetic": 2, "activation": 1, "nothing stored": 0}
"""Operands of the result's size, in 16 bits: beside arithmetic, beside an activation, for an end of :data:`FULL`."""

FULL = (("TENSOR", True), ("BLOCKS", False))
"""Casts (product_chain.cu), and whether they make a transpose, that leave least room where no value of the chain is stored.

A store keeps the compiler from loading operands of the other half of a tile beside those of the first.
"""

EXACT_GELU = ["bias", "gelu_erf"]
"""The only chain of the exact GELU, whose registers other ops take: erfc is the longest expression."""


def crowded(stages: Sequence[Stage], cast: str, *, turned: bool, stores: bool) -> str:
    """Why a chain has no registers beside the sums of a product; an empty string if it has.

    cast, turned: CAST and TURNED of product_chain.cu. stores: whether a value of the chain is stored.
    """
    names = [stage.math.name for stage in stages]
    own = [name for name in names if name not in ARITHMETIC]
    full = (cast, turned) in FULL and not stores
    if len(names) > LONGEST or len(own) > 1 or len({*names}) < len(names):
        return f"registers: wants at most {LONGEST} ops, no two alike and one an activation, got {', '.join(names)}"
    if "gelu_erf" in names and (names != EXACT_GELU or (cast, turned) in FULL):
        return "registers: the exact GELU has them only behind a bias, and neither for a transpose nor for blocks"
    room = MOST_FULL["nothing stored" if full else "activation" if own else "arithmetic"]
    operands = (t for stage in stages for name, t in stage.operands.items() if stage.math.operands[name] == "full")
    needed = sum(max(t.element_size(), 2) // 2 for t in operands)
    if needed <= room:
        return ""
    return f"registers: wants at most {room} operands of the result's size, of 16 bits, beside these ops, got {needed}"


def _crowded(stages: Sequence[Stage], encode: Encoding | None, end: _End, keep: Collection[int]) -> str:
    """Why a thread has no registers for the chain; an empty string if it has."""
    if len(keep) >= MOST_STORED:
        return f"registers: wants fewer than {MOST_STORED} inputs of ops that are kept, got {len(keep)}"
    return crowded(stages, end.cast, turned=end.turned, stores=bool(keep) or isinstance(encode, WithOriginal))
