"""What counts as code of the user's own, which runs at every call; what is kept for the rest, and by which looks."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch

import opfuse
from opfuse import ops, recipes
from opfuse.compiler.registry import RuleSet, use_rules
from opfuse.compiler.rules import fusion
from opfuse.runtime.replay.dispatch import interpreted
from opfuse.runtime.replay.replayable import Recorded, layout_key, tensors_and_planes
from opfuse.tensors.quantizers import Float8CurrentScalingQuantizer
from tests.compiler.harness import differences, gradient, randn, to
from tests.programs import forwards, plans_of

BF16, SIZE = torch.bfloat16, 32
STEP = {"now": 0}


class Fused(ops.FusedOperation):
    """Over ops of the library alone."""

    def fuser_forward(self, basic_op_ctxs, input_, **given):
        y, extras = super().fuser_forward(basic_op_ctxs, input_, **given)
        return y + STEP["now"], extras


class Shifted(Float8CurrentScalingQuantizer):
    def quantize(self, x, **options):
        return super().quantize(x + STEP["now"], **options)


def shifted(x, *, linear, act):
    return act.op.op_forward(act, linear.op.op_forward(linear, x)) + STEP["now"]


RULE = fusion("shifted", "linear=basic_linear act=gelu", forward=shifted)
OWN = recipes.CustomRecipe(qfactory=lambda role: Shifted(torch.float8_e4m3fn))
PIPELINES = {
    "a rule": (lambda: [ops.Linear(SIZE, SIZE, bias=False), ops.GELU()], recipes.Float8CurrentScaling()),
    "a fused op": (lambda: [Fused([ops.GELU(), ops.ReLU()])], None),
    "a quantizer": (lambda: [ops.Linear(SIZE, SIZE)], OWN),
    "neither": (lambda: [ops.Linear(SIZE, SIZE), ops.GELU()], recipes.Float8CurrentScaling()),
}


def kept(model) -> list[Recorded]:
    plans = [plan for run in model.runs() for _, plan in run.cache.items()]
    return [made for plan in plans for looks in plan.programs.values() for made in looks.values() if isinstance(made, Recorded)]


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_what_the_users_code_reads_is_read_at_every_call(pipeline):
    make, recipe = PIPELINES[pipeline]
    model = to(ops.Sequential(*make()), BF16)
    other = copy.deepcopy(model)
    for STEP["now"] in range(5):
        found = []
        for each in (model, other):
            each.zero_grad()
            x = randn(16, SIZE, seed=1).requires_grad_()
            with interpreted() if each is other else nullcontext():
                rules = use_rules(RuleSet((RULE,))) if pipeline == "a rule" else nullcontext()
                with rules, opfuse.autocast(enabled=recipe is not None, recipe=recipe):
                    y = each(x)
                y.backward(gradient(y, 0))
            found.append({"y": y.detach(), "x": x.grad} | {name: p.grad for name, p in each.named_parameters()})
        assert differences(*found) == [], STEP
    # The user's quantizer casts before its segment, in which all else is repeated.
    assert bool(forwards(plans_of(model))) == (pipeline in ("neither", "a quantizer"))


@pytest.mark.parametrize(
    ("quantizer", "why"),
    [
        (lambda: Shifted(torch.float8_e4m3fn), "input is cast by code of the user's own"),
        (
            lambda: Float8CurrentScalingQuantizer(torch.float8_e4m3fn, with_amax_reduction=True),
            "input is cast with an amax over the ranks of each call",
        ),
    ],
)
def test_why_a_cast_runs_at_every_call(quantizer, why):
    with opfuse.autocast(recipe=recipes.CustomRecipe(qfactory=lambda role: quantizer())):
        found = opfuse.explain(ops.Sequential(ops.Linear(SIZE, SIZE)), randn(16, SIZE))
    assert why in str(found)


def test_programs_of_casts_are_counted():
    class Own(ops.BasicLinear):
        def op_forward(self, ctx, x, **given):
            return super().op_forward(ctx, x, **given)

    model = to(ops.Sequential(Own(SIZE, SIZE)), BF16)
    for _ in range(3):
        with torch.no_grad(), opfuse.autocast(recipe=recipes.Float8CurrentScaling()):
            model(randn(16, SIZE))
    assert len(kept(model)) == model.cache_info().programs == 2
    assert model.cache_info().host_bytes > 0


def test_a_look_says_which_tensors_there_are_and_which_are_one():
    x, y = torch.zeros(2, 8), torch.ones(2, 8)
    several = ([x], [x, None], [None, x], [x, y], [x, x], [x, y.t()], [x, y[:1]], [x, y.int()], [y, None, x])
    assert len({*map(layout_key, several)}) == len(several)
    assert layout_key([x, None]) == layout_key([y, None])
    quantized = [Float8CurrentScalingQuantizer(fmt)(x) for fmt in (torch.float8_e4m3fn, torch.float8_e5m2)]
    assert len({layout_key([each]) for each in quantized}) == 2  # bytes alike, which mean other numbers
    assert [id(each) for each in tensors_and_planes(quantized[:1])] == [id(quantized[0]), *map(id, quantized[0].held.tensors())]
    assert layout_key([x, x.view(16)]) is None  # of one memory, but each counts its own writes
    assert layout_key([x, torch.empty(0), torch.empty(0)]) is not None
    assert layout_key([x, 3]) is None
    assert [*map(id, tensors_and_planes([None, x, None, y]))] == [id(x), id(y)]


def test_each_output_of_a_program_is_its_own():
    torch.manual_seed(0)
    model, results = ops.TokenDispatch(4, SIZE, top_k=2, dtype=BF16), []
    for call in range(4):
        x = randn(16, SIZE, seed=call)
        with torch.no_grad():
            got = model(x)
            with interpreted():
                assert differences(dict(enumerate(got)), dict(enumerate(model(x)))) == []
        results.append(got)
    (made,) = [made for _, plan in model._fuser.cache.items() for looks in plan.programs.values() for made in looks.values()]
    assert len(made.program.recording.results if made.program.recording else results[-1]) == len({*map(id, results[-1])}) == 4
