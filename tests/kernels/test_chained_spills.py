"""A product with its chain and cast spills nothing. What the rule refuses, as it would spill, runs apart.

Of what the rule lets pass, chains that begin with a bias are compiled with every end (``-m slow``), and of all chains, with other
element types, dtypes and inputs that are kept, some at random.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from opfuse.formats import COLUMNWISE, E4M3, E5M2, ROWWISE, Element, Usage
from opfuse.kernels.casts.encoding import WithOriginal
from opfuse.kernels.engine import compiling
from opfuse.kernels.engine.compiling import Variant
from opfuse.kernels.engine.registry import Arguments
from opfuse.kernels.products import chained
from opfuse.kernels.products.chained import LONGEST, crowded, product_chain
from opfuse.numerics.activations import ARITHMETIC, POINTWISE
from tests.kernels.cases.chained import BOTH, ChainedCase

CPU, SIZES = torch.device("cpu"), (16, 128, 128)


class End(NamedTuple):
    """What becomes of a chain's result; original: it is stored beside its cast."""

    cast: str = ""
    usages: tuple[Usage, ...] = (ROWWISE,)
    original: bool = False
    blocked: bool = False


ENDS = {
    "stored": End(),
    "stored, blocks": End(blocked=True),
    "current": End("current"),
    "current, original": End("current", original=True),
    "delayed": End("delayed"),
    "delayed, original": End("delayed", original=True),
    "delayed, both": End("delayed", BOTH),
    "delayed, columns": End("delayed", (COLUMNWISE,)),
    "1x128": End("1x128", blocked=True),
    "1x128, original": End("1x128", original=True, blocked=True),
}


def arguments(ops: tuple[str, ...], end: End, keep: tuple[int, ...], *, wide: bool, **types: Any) -> Arguments:
    """A call of the chain and the end. wide: operands are in fp32, masks as they are. types: io and element of the case."""
    blocked: dict[str, Any] = {"kind": "1x128, 128x128", "fast": False} if end.blocked else {}
    case = ChainedCase(ops, SIZES, end.cast, end.usages, keep, **blocked, **types)
    (left, right, stages, encode), options = case.arguments(CPU)
    if wide:
        operands = ({n: t if t.dtype == torch.uint8 else t.float() for n, t in stage.operands.items()} for stage in stages)
        stages = [replace(stage, operands=each) for stage, each in zip(stages, operands)]
    return Arguments((left, right, stages, WithOriginal(encode.layouts, encode) if end.original else encode), options)


def launched(ops: tuple[str, ...], end: End, keep: tuple[int, ...], *, wide: bool, **types: Any) -> list[Variant]:
    """The variants of product_chain.cu that the call launches: one, or none."""
    args, options = arguments(ops, end, keep, wide=wide, **types)
    made: list[Variant] = []
    product_chain.run(lambda variant, *_, **__: made.append(variant), *args, **options)
    return [variant for variant in made if variant.source == "product_chain.cu"]


def spilled(variant: Variant) -> int:
    return compiling.compile_text(compiling.assemble(variant), "sm_90a", variant.source).spills


UNGATED = [name for name, math in POINTWISE.items() if not math.is_gated]
ACTIVATIONS = [name for name in UNGATED if name not in ARITHMETIC]
Call = tuple[tuple[str, ...], str, bool, bool]
"""Ops, end, whether the input of the last op is kept, whether operands are in fp32."""

AT_EVERY_RUN: tuple[Call, ...] = (
    (("bias", "dropout", "add"), "stored", False, False),
    (("bias", "gelu", "add"), "current", True, False),
    (("bias", "gelu_erf"), "delayed, original", True, False),
)
AT_TIMES: tuple[Call, ...] = (
    (("bias", "silu", "dropout"), "delayed", False, False),
    (("bias", "silu"), "1x128", False, True),
)
"""Casts that ``test_launch.py`` compiles behind other chains at every run."""


def chains() -> Iterator[tuple[str, ...]]:
    """All of a bias and up to two more ops."""
    for more in range(LONGEST):
        for rest in itertools.product(UNGATED, repeat=more):
            yield ("bias", *rest)


def variants_of(ops: tuple[str, ...], end: str, keeps: bool, wide: bool) -> list[Variant]:
    return launched(ops, ENDS[end], (len(ops) - 1,) if keeps else (), wide=wide)


@pytest.mark.parametrize("call", [*AT_EVERY_RUN, *(pytest.param(call, marks=pytest.mark.slow) for call in AT_TIMES)], ids=str)
def test_a_chain_beside_its_product_spills_nothing(call):
    (variant,) = variants_of(*call)
    assert spilled(variant) == 0


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_no_chain_that_the_rule_lets_pass_spills(end):
    both = ((False, False), (True, True))
    found = {
        (*call, *form): made
        for call in itertools.product(chains(), (end,))
        for form in both
        for made in variants_of(*call, *form)
    }
    with ThreadPoolExecutor() as threads:
        assert {call: bytes for call, bytes in zip(found, threads.map(spilled, found.values())) if bytes} == {}


SOME = 48
"""Calls that are compiled, of all others that the rule lets pass."""


def others() -> Iterator[tuple[tuple[str, ...], str, tuple[int, ...], bool, torch.dtype, Element]]:
    """Calls at random: any ops in any order, any end, at most one input that is kept."""
    draw = random.Random(0)
    while True:
        ops = tuple(draw.sample(UNGATED, draw.randint(1, LONGEST)))
        end, keep = draw.choice([*ENDS]), draw.choice([(), (draw.randrange(len(ops)),)])
        element = E4M3 if ENDS[end].blocked else draw.choice([E4M3, E5M2])
        yield ops, end, keep, draw.random() < 0.5, draw.choice([torch.bfloat16, torch.float16]), element


@pytest.mark.slow
def test_no_other_chain_that_the_rule_lets_pass_spills():
    calls = ((call, launched(call[0], ENDS[call[1]], call[2], wide=call[3], io=call[4], element=call[5])) for call in others())
    found = dict(itertools.islice(((call, made[0]) for call, made in calls if made), SOME))
    with ThreadPoolExecutor() as threads:
        assert {call: bytes for call, bytes in zip(found, threads.map(spilled, found.values())) if bytes} == {}


REFUSED: tuple[tuple[Call, str], ...] = (
    ((("bias", "gelu_erf", "dropout"), "delayed", False, False), "exact GELU has them only behind a bias"),
    ((("bias", "gelu_erf", "add"), "delayed", True, False), "exact GELU"),
    ((("bias", "gelu_erf"), "delayed, both", False, False), "neither for a transpose nor for blocks"),
    ((("bias", "gelu_erf"), "1x128", False, True), "nor for blocks"),
    ((("gelu_erf",), "1x128", False, False), "exact GELU"),
    ((("srelu", "dropout", "add"), "delayed, both", True, False), "at most 1 operands of the result's size"),
    ((("bias", "gelu", "add"), "stored", False, True), "at most 1 operands of the result's size, of 16 bits, .* got 2"),
    ((("bias", "dropout", "add"), "stored", False, True), "at most 2 operands of the result's size, of 16 bits, .* got 3"),
    ((("bias", "dropout"), "1x128", False, False), "at most 0 operands of the result's size"),
    ((("bias", "srelu", "dropout", "add"), "delayed, both", False, False), "at most 3 ops, .*got bias, srelu"),
    ((("bias", "relu", "bias"), "delayed", False, False), "no two alike and one an activation, got bias, relu, bias"),
    ((("bias", "dropout", "dropout"), "current", True, True), "no two alike .*got bias, dropout, dropout"),
    ((("gelu", "silu"), "1x128", False, False), "one an activation, got gelu, silu"),
)


@pytest.mark.parametrize(("call", "why"), REFUSED, ids=str)
def test_what_would_spill_runs_apart_and_says_why(call, why):
    assert variants_of(*call) == []
    ops, end, keeps, wide = call
    (_, _, stages, _), _ = arguments(ops, ENDS[end], (0,) if keeps else (), wide=wide)
    of_end = ENDS[end]
    kind = {"delayed": "TENSOR", "current": "AMAX", "1x128": "BLOCKS", "": "NOTHING"}[of_end.cast]
    stores = keeps or of_end.original
    assert re.search(why, crowded(stages, kind, turned=COLUMNWISE in of_end.usages, stores=stores))


def test_without_the_rule_they_would_spill(monkeypatch):
    monkeypatch.setattr(chained, "_crowded", lambda *_: "")
    (variant,) = variants_of(*REFUSED[0][0])
    assert spilled(variant) > 0
