"""Scale rules by name: how other libraries find the scale of a block from its amax, and casts under these scales.

The formats are the same everywhere, but the last bits of scales differ between libraries, and so do the bytes of casts. A rule is
*carried* if a cast of casts.py computes it under some options, so that its kernel does, too. Other rules are computed here, in
torch, on every device. docs/conformance.md compares each rule with the library that it is named after, byte by byte.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opfuse.errors import QuantizerError, describe, nearest
from opfuse.formats import Element
from opfuse.numerics.casts import Encoded, Scales, cast_tiles, over
from opfuse.numerics.layouts import Layout, check_cast
from opfuse.numerics.scalars import E8M0_NAN, MANTISSA, e8m0_multiplier, exponent_of_max, fl32, magnitude_bits
from opfuse.numerics.scales import divide, reciprocal

Formula = Callable[[Tensor, Element, torch.dtype], Scales]
"""From the fp32 amaxes of blocks, an element, and the dtype of the values to the scales of the blocks."""


@dataclass(frozen=True)
class Way:
    """A rule for the formats of one family.

    carried: options under which the cast of that family computes it, by whether scales are powers of two; an ``eps`` there is the
    least one. formula: what computes it otherwise. powers: whether the rule has scales that are powers of two, others, or both.
    """

    carried: Mapping[bool, Mapping[str, Any]] = field(default_factory=dict)
    formula: Formula | None = None
    powers: tuple[bool, ...] = (False, True)


class ScaleRule(NamedTuple):
    """Where a rule is published, and what it is for each family of formats that it knows."""

    source: str
    ways: Mapping[str, Way]


def _deepgemm(block_amax: Tensor, element: Element, dtype: torch.dtype) -> Scales:
    """Decode scale max(amax, 1e-4) / max, and values times its reciprocal."""
    scale = divide(block_amax.clamp(min=fl32(_DEEPGEMM_EPS)), element.max)
    return Scales(_visible(scale, block_amax), lambda tiles: tiles * over(reciprocal(scale)))


def _compressed_tensors(block_amax: Tensor, element: Element, dtype: torch.dtype) -> Scales:
    """Decode scale amax / max, or the dtype's epsilon for amax 0; values divided by it. Both are rounded to that dtype."""
    scale = divide(block_amax.to(dtype), element.max)
    scale = scale.masked_fill(scale == 0, torch.finfo(dtype).eps)
    stored = _visible(scale.to(torch.float32), block_amax)
    return Scales(stored, lambda tiles: (tiles.to(dtype) / over(scale)).to(torch.float32))


def _compressed_tensors_mx(block_amax: Tensor, element: Element, dtype: torch.dtype) -> Scales:
    """The exponent of amax less that of max, one more where the mantissa of amax is 1.75 or above."""
    exponent = (magnitude_bits(block_amax) + _QUARTER) >> 23
    code = (exponent - exponent_of_max(element)).clamp(min=0).to(torch.uint8)
    code = code.masked_fill(~torch.isfinite(block_amax), E8M0_NAN)
    return Scales(code, lambda tiles: tiles * over(e8m0_multiplier(code)))


def _visible(scale: Tensor, block_amax: Tensor) -> Tensor:
    """Decode scales that are NaN where a block has an element that is not finite."""
    return scale.masked_fill(~torch.isfinite(block_amax), torch.nan)


_DEEPGEMM_EPS, _TORCHAO_EPS = 1e-4, 1e-12
_QUARTER = (MANTISSA + 1) // 4
_OWN = Way({False: {"pow2": False}, True: {"pow2": True}})
_POWERS_OF_TORCHAO = Way({True: {"pow2": True, "eps": fl32(_TORCHAO_EPS)}}, powers=(True,))
_EXACT = Way(formula=_compressed_tensors, powers=(False,))


def _mx(rounding: str) -> Way:
    return Way({True: {"rounding": rounding}}, powers=(True,))


RULES: Mapping[str, ScaleRule] = MappingProxyType(
    {
        "te": ScaleRule(
            "TransformerEngine: common/recipe/recipe_common.cuh, common/cast/mxfp8/quantize_mxfp8.cuh",
            {"tensor": _OWN, "row": _OWN, "block": _OWN, "mx": _mx("ceil")},
        ),
        "deepgemm": ScaleRule(
            "DeepGEMM: deep_gemm/utils/math.py",
            {"block": Way({True: {"pow2": True, "eps": fl32(_DEEPGEMM_EPS)}}, _deepgemm)},
        ),
        "ocp_floor": ScaleRule("OCP Microscaling Formats 1.0, section 6.3", {"mx": _mx("floor")}),
        "rceil": ScaleRule("cuBLAS: D block quantization", {"mx": _mx("ceil")}),
        "compressed_tensors": ScaleRule(
            "compressed-tensors: quantization/utils/helpers.py, quantization/utils/mxfp_utils.py",
            {
                "row": _EXACT,
                "block": _EXACT,
                "mx": Way(formula=_compressed_tensors_mx, powers=(True,)),
            },
        ),
        "torchao_pow2": ScaleRule(
            "torchao: float8/float8_utils.py, round_scales_to_power_of_2",
            {"tensor": _POWERS_OF_TORCHAO, "row": _POWERS_OF_TORCHAO},
        ),
    }
)
"""The rules by name. ``te`` is what every quantizer has unless it is told otherwise."""


@functools.cache
def rules_of(family: str) -> tuple[str, ...]:
    """The names of the rules that know the formats of ``family``."""
    return tuple(name for name, rule in RULES.items() if family in rule.ways)


def way_of(name: str, family: str, *, pow2: bool, where: str) -> Way:
    """The rule ``name`` for ``family``. QuantizerError for one that is not known for it, or not with these powers of two."""
    known = rules_of(family)
    if name not in known:
        got = f"{name!r}{nearest(str(name), known)}"
        raise QuantizerError(describe(where, wanted=f"one of {', '.join(known)}", got=got, cure="pass one of these"))
    way = RULES[name].ways[family]
    if pow2 not in way.powers:
        kind, other = ("powers of two", "any fp32 scales") if pow2 else ("any fp32 scales", "powers of two")
        cure = "set force_pow_2_scales of a quantizer, use_power_2_scales or use_f32_scales of a recipe"
        raise QuantizerError(describe(f"{where}={name!r}", wanted=f"scales that are {other}", got=kind, cure=cure))
    return way


def cast_by(x: Tensor, layouts: Sequence[Layout], formula: Formula, *, rows: int = 1, eps: float = 0.0) -> list[Encoded]:
    """Planes of rows, of blocks, or of MXFP8 in blocks of ``rows`` x 32, whose scales ``formula`` finds.

    ``eps`` is the least amax. A block with a non-finite element is decoded with NaN.
    """
    check_cast(x.shape, x.dtype, layouts, family=layouts[0].format.family, where="cast_by")
    wide = x.to(torch.float32)

    def scales(block_amax: Tensor, element: Element) -> Scales:
        return formula(block_amax.clamp(min=eps), element, x.dtype)

    return [cast_tiles(wide, layout, scales, rows=rows) for layout in layouts]
