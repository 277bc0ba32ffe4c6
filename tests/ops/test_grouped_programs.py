"""Grouped layers as programs: recorded for the sizes of groups that the host knows, with the bits of the interpreter."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import opfuse
from opfuse import ops, recipes
from opfuse.kernels.engine.joining import READ_WORDS
from opfuse.runtime.replay import program
from opfuse.runtime.replay.batch_launches import Homes, joined_launches
from opfuse.runtime.replay.codegen import MAKES_ROOM
from opfuse.runtime.replay.dispatch import interpreted
from opfuse.runtime.replay.instructions import LaunchStep, OpStep, Step
from opfuse.runtime.replay.replayable import Recorded
from tests.compiler.harness import CASES, gradient, randn, recipe_for, to
from tests.program.fake import fake_device, launches_seen

pytestmark = pytest.mark.cpu
BF16 = torch.bfloat16
RECIPE = recipes.Float8BlockScaling()
OPTIONS: list[dict[str, Any]] = [{}, {"bias": False, "single_grouped_weight": True}, {"pad_splits": True, "scale_bias": True}]


def step(model, recipe, splits, call: int, *, train: bool = True) -> list[torch.Tensor]:
    """Outputs and gradients of one step; scales of biases beside the splits where the op wants them."""
    rows = int(splits.sum())
    x = randn(rows, 128, seed=call).requires_grad_(train)
    extras = [splits, randn(rows, seed=call + 1)][: getattr(model, "num_extra_inputs", 1)]
    model.zero_grad(set_to_none=True)
    torch.manual_seed(call)
    with torch.set_grad_enabled(train), opfuse.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x, *extras)
    if not train:
        return [y]
    y.backward(gradient(y, call))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def made_for(op) -> list[Any]:
    """What became of each look of an op that was called alone."""
    return [made for _, plan in op._fuser.cache.items() for looks in plan.programs.values() for made in looks.values()]


def assert_same(model, other, recipe, splits, call: int, **options: bool) -> None:
    got = step(model, recipe, splits, call, **options)
    with interpreted():
        wanted = step(other, recipe, splits, call, **options)
    assert all(map(torch.equal, got, wanted)), call


@pytest.mark.few(apart=True)
@pytest.mark.row("B21")
@pytest.mark.parametrize(("number", "name", "override"), [(i % 3, *case) for i, case in enumerate(CASES)])
def test_a_training_step_with_sizes_of_the_host_is_a_program(number, name, override):
    """One of the groups has no rows."""
    model, recipe = to(ops.GroupedLinear(3, 128, 128, **OPTIONS[number]), BF16), recipe_for(name, override)
    other = copy.deepcopy(model)
    splits = torch.tensor([128, 0, 256])
    for call in range(5):
        assert_same(model, other, recipe, splits, call)
    (made,) = made_for(model)
    assert isinstance(made, Recorded)
    (backward,) = made.rest.replayable.values()
    assert isinstance(backward, Recorded)
    for call in range(3):
        assert_same(model, other, recipe, splits, call, train=False)
    assert all(isinstance(made, Recorded) for made in made_for(model))


@pytest.mark.parametrize("scale_bias", [False, True])
def test_biases_in_one_parameter_are_repeated(scale_bias):
    """Their gradient reads its dtype alone: no program is given the parameter once more for the backward pass."""
    model = to(ops.GroupedLinear(3, 128, 128, single_grouped_bias=True, scale_bias=scale_bias), BF16)
    other, recipe = copy.deepcopy(model), recipe_for("fp8_current", None)
    for call in range(5):
        assert_same(model, other, recipe, torch.tensor([128, 0, 256]), call)
    (made,) = made_for(model)
    assert all(isinstance(backward, Recorded) for backward in made.rest.replayable.values())
    assert made.rest.replayable


def test_other_sizes_are_another_program_also_in_the_same_tensor():
    model = to(ops.GroupedLinear(3, 128, 128), BF16)
    other = copy.deepcopy(model)
    splits = torch.tensor([128, 128, 128])
    ways = ([128, 128, 128], [0, 256, 128], [384, 0, 0])
    for call in range(12):
        splits.copy_(torch.tensor(ways[call % len(ways)]))
        assert_same(model, other, RECIPE, splits, call)
    assert [type(made) for made in made_for(model)] == [Recorded] * len(ways)


def test_wrong_sizes_are_the_error_that_they_are_without_programs():
    model = to(ops.GroupedLinear(3, 128, 128), BF16)
    good, bad = torch.tensor([128, 0, 256]), torch.tensor([128, 128, 256])
    for call in range(4):
        step(model, RECIPE, good, call)
    with pytest.raises(opfuse.errors.ShapeError, match="sum"), opfuse.autocast(recipe=RECIPE):
        model(randn(384, 128), bad)


def test_a_mixture_of_experts_in_a_pipeline_repeats_its_grouped_layers():
    def experts() -> ops.Sequential:
        torch.manual_seed(0)
        dispatch, combine = ops.TokenDispatch(2, 128, top_k=1), ops.TokenCombine()
        layers = ops.GroupedLinear(2, 128, 128, bias=False, pad_splits=True), ops.GroupedLinear(2, 128, 128, pad_splits=True)
        dispatch.set_extra_output_channel(0, "splits", output_to_caller=False)
        dispatch.set_extra_output_channel(2, "places", output_to_caller=False)
        for layer in layers:
            layer.set_extra_input_channel(0, "splits")
        combine.set_extra_input_channel(0, "places")
        return to(ops.Sequential(dispatch, layers[0], ops.GELU(), layers[1], combine), BF16)

    def run(model) -> list[torch.Tensor]:
        found = []
        for call in range(6):
            x = randn(64, 128, seed=call // 5).requires_grad_()
            model.zero_grad(set_to_none=True)
            with opfuse.autocast(recipe=RECIPE):
                y, _ = model(x)
            y.backward(gradient(y, call))
            found += [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
        return found

    model = experts()
    with interpreted():
        wanted = run(experts())
    assert all(map(torch.equal, run(model), wanted))
    (fuser,) = model.runs()
    looks = [looks for _, plan in fuser.cache.items() for looks in plan.programs.values()]
    assert sum(isinstance(made, Recorded) for each in looks for made in each.values()) >= 1


@pytest.mark.parametrize("option", ["delay_wgrad_compute", "accumulate_into_main_grad"])
def test_weight_gradients_that_are_put_off_or_added_by_hand_are_interpreted(option):
    """The forward pass is a program beside them."""
    model = to(ops.GroupedLinear(2, 128, 128, bias=False, **{option: True}), BF16)
    other = copy.deepcopy(model)
    for weight in (*model.parameters(), *other.parameters()):
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    for call in range(4):
        got = step(model, RECIPE, torch.tensor([128, 128]), call)
        with interpreted():
            wanted = step(other, RECIPE, torch.tensor([128, 128]), call)
        assert all(map(torch.equal, got[:2], wanted[:2]))
        for each in (model, other):
            if option == "delay_wgrad_compute":
                each.backward_dw()
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine.main_grad, theirs.main_grad)
            assert mine.grad is theirs.grad is None or torch.equal(mine.grad, theirs.grad)
    made = made_for(model)
    assert [type(each) for each in made] == [Recorded]
    assert not any(isinstance(each, Recorded) for each in made[0].rest.replayable.values())


def test_sizes_that_a_run_reads_in_its_midst_end_the_recording(monkeypatch, caplog):
    """As where no host could know them before."""
    model = to(ops.GroupedLinear(2, 128, 128), BF16)
    monkeypatch.setattr("opfuse.runtime.replay.dispatch._sizes", lambda *_: [None])
    other = copy.deepcopy(model)
    with caplog.at_level(logging.INFO, "opfuse.programs"):
        for call in range(4):
            assert_same(model, other, RECIPE, torch.tensor([128, 128]), call)
    assert "the host reads how many rows groups have" in caplog.text
    assert not any(isinstance(made, Recorded) for made in made_for(model))


def steps_of_nine_groups(name: str, monkeypatch: pytest.MonkeyPatch, **options: bool) -> Sequence[Step]:
    """What a forward pass without gradients repeats."""
    found: list[Sequence[Step]] = []

    def joined(steps: Sequence[Step], homes: Homes) -> list[Step]:
        found.append(joined_launches(steps, homes))
        return [*steps]

    monkeypatch.setattr(program, "joined_launches", joined)
    model, splits = to(ops.GroupedLinear(9, 128, 128, **options), BF16), torch.tensor([128] * 9)
    with fake_device(monkeypatch), launches_seen(monkeypatch):
        for call in range(2):
            step(model, recipe_for(name), splits, call, train=False)
    return found[0]


@pytest.mark.unrun
@pytest.mark.parametrize("name", ["delayed", "fp8_current", "fp8_block", "mxfp8", "fp8_row", "nvfp4"])
def test_casts_of_groups_are_joined(name, monkeypatch):
    """Of nine inputs and nine weights; under current scaling all are measured before one is cast."""
    steps = steps_of_nine_groups(name, monkeypatch)
    casts = Counter(each.entry for each in steps if isinstance(each, LaunchStep) and each.variant.source in READ_WORDS)
    apart = {"fp8_block": {"cast_block": 2}, "nvfp4": {"amax": 1, "cast_rows": 1, "cast_square": 1}}  # squares of weights
    assert casts == apart.get(name, dict.fromkeys(casts, 1))
    assert casts


@pytest.mark.unrun
@pytest.mark.parametrize(("name", "decode"), [("mxfp8", "dequantize_rows"), ("nvfp4", "decode_rows")])
def test_emulated_products_of_groups_are_decoded_and_scaled_by_a_launch_for_eight(name, decode, monkeypatch):
    """Between them nothing is done for each group but its product."""
    steps = steps_of_nine_groups(name, monkeypatch, bias=False)
    launches = Counter(each.entry for each in steps if isinstance(each, LaunchStep) and each.variant.source not in READ_WORDS)
    assert launches == {decode: 4, "scaled_sums": 2}
    ops_of = Counter(each.op for each in steps if isinstance(each, OpStep) and each.op not in MAKES_ROOM)
    assert ops_of.pop(torch.ops.aten.mm.out) == 9
    assert max(ops_of.values()) < 9, ops_of
