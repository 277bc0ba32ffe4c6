"""Casts beside collectives: rows travel between ranks quantized, if each rank then holds the bits of a cast of the whole tensor.

If they cannot, or if that would be more bytes, values travel in high precision and each rank casts all of them.

The cast stands on the near side of the collective, so a norm casts the rank's own tokens in its kernel, and bytes travel. Of
planes with the same values one travels. Planes that were cast apart travel in the pass that reads each, and until then a rank
saves its own rows only. The gather of a gradient, whose pass reads both planes, sends values where these are fewer bytes.
Values travel where bits would differ from those of one rank: a scale that columns share, random rounding, rows that cut a
block.

Collectives are torch's functional ones, which take and return tensors, so a program repeats them like any op.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch.distributed as dist

from opfuse.compiler.graph import BACKWARD, FORWARD, GROUPED, CastSpec
from opfuse.core.operation import BasicOperation
from opfuse.core.signature import Env
from opfuse.formats import ROWWISE, USAGES, NumberFormat, Usage
from opfuse.numerics.row_groups import MOST_GROUPS
from opfuse.recipes import DelayedScaling, Recipe
from opfuse.recipes.autocast import current_amax_group
from opfuse.recipes.recipe import OVERRIDES
from opfuse.tensors.expert_rows import why_values
from opfuse.tensors.quantizers import Quantizer
from opfuse.tensors.quantizers.base import is_repeatable
from opfuse.tensors.row_collectives import PlaneTransfer

CARRIERS: Mapping[str, Mapping[str, bool]] = MappingProxyType(
    {
        FORWARD: MappingProxyType({"gathers": True, "spreads": False}),
        BACKWARD: MappingProxyType({"scatters": True, "sums": False}),
    }
)
"""By pass: traits of ops that pass a value on unchanged to more ranks, and whether they join it with rows of other ranks."""

COLLECTIVES = frozenset(chain.from_iterable(CARRIERS.values()))
"""Traits of ops with which casts may change places."""

KEEPS_ROWS = frozenset(("elementwise", "norm", "gemm", "transparent", "spreads", "sums"))
"""Traits of ops whose results have as many rows as their inputs."""

GROWTH: Mapping[str, int] = MappingProxyType({"gathers": 1, "scatters": -1})
"""Traits of ops whose results have the rows of all ranks together (1), or one rank's part of the rows (-1)."""

SCALE_BYTES: Mapping[str, int] = MappingProxyType({"none": 0, "fp32": 4, "e8m0": 1, "e4m3": 1})
"""Bytes of one scale, by ``NumberFormat.scale``."""


def carrier(op: BasicOperation, direction: str) -> bool | None:
    """Whether ``op`` joins a value with rows of other ranks in ``direction``; None if it is no carrier: it changes the value."""
    traits = op.known.traits
    for trait, joins in CARRIERS[direction].items():
        if trait in traits:
            return joins
    return None


def rows_behind(op: BasicOperation, rows: int) -> int:
    """A number that divides the number of rows of the op's result, if ``rows`` divides that of its input."""
    ranks, traits = getattr(op, "process_group_size", 1), op.known.traits
    for trait, growth in GROWTH.items():
        if trait in traits:
            return rows * ranks if growth > 0 else rows // math.gcd(rows, ranks)
    return rows if not KEEPS_ROWS.isdisjoint(traits) and GROUPED not in traits else 1


class Carried(NamedTuple):
    """A cast that changes places with a collective, and how its planes travel; or why it does not."""

    spec: CastSpec
    transfer: PlaneTransfer | None = None
    why: str = ""


class Beside(NamedTuple):
    """A collective beside a cast. product: the op whose operand is cast. rows: a number that divides that of a rank's rows.

    width: bytes of a value in high precision. direction: the pass in which the collective joins rows.
    """

    product: BasicOperation
    collective: Any
    env: Env
    rows: int
    width: int
    direction: str


def carried(spec: CastSpec, beside: Beside) -> Carried:
    """The cast of this rank's rows and how its planes travel, or why values travel in high precision."""
    usages = spec.quantizer.usages
    if not carrier(beside.collective, beside.direction) or beside.collective.process_group_size == 1:
        return Carried(spec, PlaneTransfer(usages))
    if why := next(_refusals(spec, beside), None):
        return Carried(spec, why=why)
    quantizer, sent = cast(Quantizer, _together(spec, beside)), _sent(spec.quantizer)
    if _waits(spec.quantizer, beside):
        return Carried(replace(spec, quantizer=quantizer), PlaneTransfer(sent[:1], sent[1:]))
    mirror = sent != usages
    return Carried(
        replace(spec, quantizer=quantizer.wanting(columnwise=False) if mirror else quantizer), PlaneTransfer(sent, (), mirror)
    )


def why_values_go(there: CastSpec, env: Env, spec: Any) -> str:
    """Why rows go to experts on other ranks as values; empty: as the codes of the cast ``there``. spec: of the op that sends
    them.
    """
    recipe = cast(Recipe, env.recipe)
    override = OVERRIDES[recipe.backward_override]
    if not spec.quantized:
        return "the op was made with quantized=False"
    if there.state:
        return "scales are delayed, and kept where the experts are"
    if override.backward != "quantized" and there.role != "input":
        return f"backward_override={recipe.backward_override!r} casts no gradient"
    if override.saved == "original" and env.grad:  # also where only weights behind want gradients
        return f"backward_override={recipe.backward_override!r} reads the values themselves"
    if there.groups > MOST_GROUPS:
        return f"kernels take codes of at most {MOST_GROUPS} experts of a rank, got {there.groups}"
    return why_values(there.quantizer, spec.num_groups)


def _refusals(spec: CastSpec, beside: Beside) -> Iterator[str]:
    quantizer, usages = spec.quantizer, spec.quantizer.usages
    formats: dict[Usage, NumberFormat] = dict(zip(USAGES, quantizer.formats))
    if any(formats[usage].element is None for usage in usages):
        yield "a product of the backward pass reads the values themselves"
        return
    if not is_repeatable(quantizer):
        yield "the cast draws random numbers, or is not the library's"
    if _together(spec, beside) is None:
        yield "rows share a scale that the ranks do not find together"
    # Planes that agree are cast in tiles, of which the columnwise plane knows the rows.
    unit = math.lcm(*(_lines(formats[usage], usage) for usage in (USAGES if quantizer.planes_agree else usages)))
    if beside.rows % unit:
        yield f"rows come apart at multiples of {unit}, and those of a rank are known to be one of {beside.rows}"
    sizes = [_bytes(formats[usage]) for usage in _sent(quantizer)]
    if (max if _waits(quantizer, beside) else sum)(sizes) >= beside.width:
        yield f"in both directions they are more bytes than values of {beside.width}"


def _sent(quantizer: Quantizer) -> tuple[Usage, ...]:
    """The planes that travel: of two that hold the same values one does."""
    return (ROWWISE,) if quantizer.planes_agree and quantizer.usages == USAGES else quantizer.usages


def _waits(quantizer: Quantizer, beside: Beside) -> bool:
    """Whether the columnwise plane travels when the backward pass reads it."""
    return beside.direction == FORWARD and _sent(quantizer) == USAGES


def _together(spec: CastSpec, beside: Beside) -> Quantizer | None:
    """A quantizer of one rank's rows whose scales are those of all ranks: known before, or found together; None if neither."""
    quantizer: Quantizer = spec.quantizer
    if spec.state is not None:
        recipe, role = cast(Recipe, beside.env.recipe), beside.product.quantizer_role(spec.role)
        reduced = cast(DelayedScaling, recipe.delayed_scaling(role)).reduce_amax
        return quantizer if reduced and _ranks(beside.collective.process_group) <= _ranks(current_amax_group()) else None
    if quantizer.usages == (ROWWISE,) and quantizer.formats[0].row_local:
        return quantizer
    return quantizer.reducing(beside.collective.process_group)


def _ranks(group: Any) -> set[int]:
    return set(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))


def _lines(fmt: NumberFormat, usage: Usage) -> int:
    """Rows of a plane that share a scale of their own; 1 where all rows share it."""
    return 1 if fmt.block is None else max(fmt.block[usage != ROWWISE], 1)


def _bytes(fmt: NumberFormat) -> float:
    """Bytes of one value, with its part of a scale; scales of whole lines or tensors do not count."""
    elements = math.prod(fmt.block or (0,))
    bits = 0 if fmt.element is None else fmt.element.bits
    return bits / 8 + (SCALE_BYTES[fmt.scale] / elements if elements else 0)
