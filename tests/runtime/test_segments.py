"""Segments: the smallest stretches that no group and no quantized value crosses, one autograd node each."""

from __future__ import annotations

import itertools

import pytest
import torch

import opfuse
from opfuse import ops
from opfuse.compiler.cover import Group
from opfuse.compiler.graph import BACKWARD, FORWARD
from opfuse.compiler.plan import Plan, verify
from opfuse.compiler.registry import RuleSet
from opfuse.compiler.rules import fusion
from opfuse.errors import FusionError
from opfuse.fusions import RULES
from opfuse.recipes import MXFP8BlockScaling, Recipe
from opfuse.runtime.fuser import OperationFuser
from tests.compiler.harness import randn, to
from tests.compiler.pipelines import residual_block

BF16 = torch.bfloat16
UNFUSED = RuleSet(())


def planned(*modules: torch.nn.Module, rules: RuleSet = UNFUSED, recipe: Recipe | None = None, grad: bool = True) -> Plan:
    to(torch.nn.ModuleList(modules), BF16)
    fuser = OperationFuser(modules, rules=rules)
    x, extras = randn(32, 64).requires_grad_(grad), [randn(32, 64) for _ in fuser.extra_inputs]
    with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
        return fuser.plan(x, *extras)


def cut(plan: Plan) -> list[list[str]]:
    return [[plan.graph.nodes[i].name.split(":")[1] for i in segment.nodes] for segment in plan.segments]


def block() -> tuple[torch.nn.Module, ...]:
    return ops.RMSNorm(64), ops.Linear(64, 64), ops.GELU()


def test_unfused_ops_stand_alone():
    assert cut(planned(*block())) == [["rms_norm"], ["basic_linear"], ["bias"], ["gelu"]]


def test_quantized_values_stay_inside_a_segment():
    product = ["quantize[input]", "quantize[weight]", "basic_linear", "quantize[grad_output]"]
    assert cut(planned(*block(), recipe=MXFP8BlockScaling(keep="all"))) == [["rms_norm"], product, ["bias"], ["gelu"]]
    remade = planned(*block(), recipe=MXFP8BlockScaling())  # from the state of the norm, which is that of the segment
    assert cut(remade) == [["rms_norm", *product], ["bias"], ["gelu"]]
    two = planned(ops.Linear(64, 64, bias=False), ops.Linear(64, 64, bias=False), recipe=MXFP8BlockScaling())
    assert cut(two) == [product, product]
    tapped = planned(
        ops.Quantize(), ops.Identity(), ops.Identity(), ops.MakeExtraOutput(), ops.GELU(), recipe=MXFP8BlockScaling()
    )
    assert cut(tapped) == [["quantize[input]", "identity", "identity", "make_extra_output", "gelu"]]
    ended = planned(ops.Quantize(), ops.Identity(), ops.GELU(), ops.GELU(), recipe=MXFP8BlockScaling())
    assert cut(ended) == [["quantize[input]", "identity", "gelu"], ["gelu"]]


NORM_CAST = fusion("norm_cast", "norm quantize", forward=lambda x, *, norm, quantize: norm.op.produce_cast(norm, x, quantize.op))


def only(name: str) -> RuleSet:
    return RULES.without(*(rule.name for rule in RULES.rules if rule.name != name))


def test_a_segment_is_as_wide_as_its_groups():
    forward = planned(*block(), rules=RuleSet((NORM_CAST,)), recipe=MXFP8BlockScaling())
    assert cut(forward)[0] == ["rms_norm", "quantize[input]", "quantize[weight]", "basic_linear", "quantize[grad_output]"]
    assert len(cut(forward)) == 3
    backward = planned(*block(), rules=only("backward_activation_bias"), recipe=MXFP8BlockScaling(keep="all"))
    assert cut(backward) == [
        ["rms_norm"],
        ["quantize[input]", "quantize[weight]", "basic_linear", "quantize[grad_output]", "bias", "gelu"],
    ]
    assert cut(planned(*block(), *block(), rules=RULES)) == [["rms_norm"], ["basic_linear", "bias", "gelu"]] * 2


def test_a_residual_joins_nothing():
    plan = planned(*residual_block().ops)
    assert all(len(segment.nodes) == 1 for segment in plan.segments)
    first, last = plan.segments[0], plan.segments[-1]
    assert (len(first.outputs), len(last.inputs)) == (2, 2)
    assert set(last.inputs) & set(first.outputs)


@pytest.mark.parametrize("rules", [UNFUSED, RULES], ids=["unfused", "fused"])
@pytest.mark.parametrize("recipe", [None, MXFP8BlockScaling()], ids=["none", "mxfp8"])
def test_segments_tile_the_pipeline(rules, recipe):
    plan = planned(*residual_block().ops, *block(), rules=rules, recipe=recipe)
    assert [i for segment in plan.segments for i in segment.nodes] == list(range(len(plan.graph.nodes)))
    available = {0, *plan.graph.extra_inputs}
    for segment in plan.segments:
        assert set(segment.inputs) <= available
        available |= set(segment.outputs)
    assert set(plan.graph.outputs) <= available
    for side, groups in ((FORWARD, "forward"), (BACKWARD, "backward")):
        run = sorted(i for segment in plan.segments for group in getattr(segment, groups) for i in group.nodes)
        assert run == [node.index for node in plan.graph.nodes if side in node.directions]


def test_only_segments_that_train_are_autograd_nodes():
    frozen = ops.Linear(64, 64)
    for parameter in frozen.parameters():
        parameter.requires_grad_(False)
    plan = planned(frozen, ops.GELU(), *block(), grad=False)
    assert [segment.requires_grad for segment in plan.segments] == [False, False, False, True, True, True, True]
    with torch.no_grad():
        assert not any(segment.requires_grad for segment in planned(*block()).segments)


def test_gradients_and_saved_tensors_come_segment_by_segment():
    """The last op's gradients are there before the first op's saved tensors are asked for."""
    model = to(ops.Sequential(*block(), *block()), BF16)
    events = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: events.append(name))

    numbers = itertools.count()

    def unpack(saved: tuple[int, torch.Tensor]) -> torch.Tensor:
        events.append(f"unpack {saved[0]}")
        return saved[1]

    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: (next(numbers), tensor), unpack)
    with hooks, opfuse.autocast(recipe=MXFP8BlockScaling()):
        y = model(randn(32, 64).requires_grad_())
    y.sum().backward()
    assert events.index("4.weight") < events.index("unpack 0")
    assert events.index("4.weight") < events.index("1.weight") < events.index("0.weight")


GROUPS = {
    "a node twice": ([Group((0, 1)), Group((1, 2)), Group((3,))], FORWARD),
    "a node missing": ([Group((0, 1)), Group((3,))], FORWARD),
    "a node of another pipeline": ([Group((0, 1)), Group((2, 3)), Group((4,))], FORWARD),
    "out of order": ([Group((1, 0)), Group((2,)), Group((3,))], FORWARD),
    "out of order, backward": ([Group((1, 0)), Group((2,)), Group((3,))], BACKWARD),
}


@pytest.mark.parametrize("name", GROUPS)
def test_bad_groups_are_found(name):
    graph = planned(*block()).graph
    groups, side = GROUPS[name]
    with pytest.raises(FusionError, match="each once and in order"):
        verify(graph, groups, side)


@pytest.mark.parametrize("side", [FORWARD, BACKWARD])
def test_good_groups_pass(side):
    verify(planned(*block()).graph, [Group((0, 1)), Group((2, 3))], side)
