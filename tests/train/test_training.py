"""The loop against plain torch; plans, delayed scaling and random state across training and evaluation."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import opfuse
from opfuse import ops, recipes
from opfuse.config import PydocTopics, Train
from opfuse.errors import PipelineError, TrainingError
from opfuse.keys import plain
from opfuse.train import ByteModel, evaluate, fit
from opfuse.train.data import Batch, corpus, random_batches, spread_batches
from opfuse.train.loop import rate

CONTEXT, EMBEDDING, HIDDEN = 4, 8, 32
SETTINGS = Train(steps=4, batch_size=32, learning_rate=1e-2, weight_decay=0.01, eval_every=1)


def model(*, dtype: torch.dtype = torch.float32) -> ByteModel:
    pipeline = ops.Sequential(
        ops.Linear(CONTEXT * EMBEDDING, HIDDEN, dtype=dtype), ops.ReLU(), ops.Linear(HIDDEN, 256, dtype=dtype)
    )
    return ByteModel(pipeline, embedding=EMBEDDING, dtype=dtype)


def samples(*, steps: int = 4) -> tuple[list[Batch], list[Batch]]:
    text = corpus(PydocTopics(kind="pydoc_topics"))
    batches = random_batches(text.train, context=CONTEXT, batch_size=32, seed=1)
    return [next(batches) for _ in range(steps)], spread_batches(text.validation, context=CONTEXT, batch_size=32, count=3)


def test_high_precision_is_what_plain_torch_trains() -> None:
    """Losses of every step and evaluation in fp32, against nn modules with the same weights and torch's own AdamW in fp64."""
    trained = model()
    plain = nn.Sequential(nn.Linear(CONTEXT * EMBEDDING, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 256))
    weights = trained.pipeline.state_dict()
    plain.load_state_dict({name: weights[name] for name in plain.state_dict()})
    table = copy.deepcopy(trained.embedding)
    parameters = [*table.double().parameters(), *plain.double().parameters()]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.01)
    batches, held_out = samples()

    def loss(batch: Batch) -> torch.Tensor:
        return nn.functional.cross_entropy(plain(table(batch.context).flatten(1)), batch.target)

    losses, validation = [], []
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 if step == 0 else 0.5 * (1 + math.cos(math.pi * (step - 1) / 3)))
        losses.append(loss(batch))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
        validation.append(sum(float(loss(held).detach()) for held in held_out) / 3)
    curve = fit(trained, batches, held_out, SETTINGS, recipe=None)
    assert curve.losses == pytest.approx([value.item() for value in losses], rel=2e-5)
    assert [step for step, _ in curve.validation] == [1, 2, 3, 4]
    assert [value for _, value in curve.validation] == pytest.approx(validation, rel=2e-5)


@pytest.mark.parametrize(("batch_size", "threads"), [(32, 1), (4096, 2)])
def test_small_steps_take_one_thread(batch_size: int, threads: int) -> None:
    """So their losses do not depend on the cores of a machine; torch has its own threads again afterwards."""
    batches, held_out = samples(steps=1)
    torch.set_num_threads(2)
    try:
        seen: list[int] = []
        settings = SETTINGS.model_copy(update={"steps": 1, "batch_size": batch_size})
        fit(model(), batches, held_out, settings, recipe=None, on_step=lambda step: seen.append(torch.get_num_threads()))
        assert (seen, torch.get_num_threads()) == ([threads], 2)
    finally:
        torch.set_num_threads(1)


def rates(**settings: object) -> list[float]:
    """The learning rate of every step, as a part of the highest."""
    made = Train(**{"steps": 100, **settings})  # type: ignore[arg-type]
    return [rate(step, made) for step in range(made.steps)]


def test_the_rate_rises_and_falls() -> None:
    assert rates()[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    falling = rates()[5:]
    assert falling == sorted(falling, reverse=True)
    assert rates(steps=99)[52] == pytest.approx(0.5, abs=0.01)
    assert 0 < falling[-1] < 1e-3
    assert rates(steps=1) == [1.0]


def test_the_schedule_is_settable() -> None:
    assert rates(steps=4, warm_up=0.5, schedule="linear") == [0.5, 1.0, 1.0, 0.5]
    assert rates(steps=4, warm_up=0.5, schedule="constant") == [0.5, 1.0, 1.0, 1.0]
    assert rates(steps=3, warm_up=0, schedule="linear") == [1.0, 1.0, 0.5]
    assert rates(steps=4, warm_up=1) == [0.25, 0.5, 0.75, 1.0]
    batches, held_out = samples()
    settings = SETTINGS.model_copy(update={"schedule": "constant", "warm_up": 0.0})
    constant = fit(trained := model(), batches, held_out, settings, recipe=None)
    torch.manual_seed(20260101)
    plain = model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.01)
    for batch in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(batch.context), batch.target).backward()
        optimizer.step()
    assert len(constant.losses) == 4
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), plain.parameters()))


@pytest.mark.parametrize("kind", [None, *(kind for kind in recipes.RECIPES if kind != "custom")])
def test_validation_alternates_without_a_new_plan(kind: str | None) -> None:
    recipe = None if kind is None else recipes.recipe_of(kind, {})
    batches, held_out = samples()
    curve = fit(model(dtype=torch.bfloat16), batches, held_out, SETTINGS, recipe=recipe)
    assert curve.cache[:3] == (2, 4 + 4 * 3 - 2, 2)
    values = [{leaf["path"]: leaf["value"] for leaf in plan["leaves"]} for plan in curve.plans]
    assert [each["env.grad"] for each in values] == [True, False]
    assert {each["env.recipe"] for each in values} == {plain(None if recipe is None else type(recipe))}


def test_delayed_scales_move_with_each_step_and_not_with_evaluations() -> None:
    recipe = recipes.DelayedScaling(amax_history_len=8)
    trained = model(dtype=torch.bfloat16)
    batches, held_out = samples()
    fit(trained, batches, held_out, SETTINGS, recipe=recipe)
    states = {(i, name): tensor for i in (0, 2) for name, tensor in trained.pipeline[i].quantizer_states.to_dict().items()}
    histories = [tensor for (_, name), tensor in states.items() if name.endswith("amax_history")]
    scales = [tensor for (_, name), tensor in states.items() if name.endswith("scale")]
    assert len(histories) == len(scales) == 6
    # Slot 0 collects what comes before the next update; the others hold one amax for each step.
    assert [int((history[1:] > 0).sum()) for history in histories] == [4] * 6
    assert all(float(scale) != 1.0 for scale in scales)
    settled = (*scales, *(history[1:] for history in histories))
    before = [tensor.clone() for tensor in settled]
    evaluate(trained, held_out, recipe=recipe)
    assert all(torch.equal(old, new) for old, new in zip(before, settled))


def test_stochastic_rounding_follows_the_seed_and_leaves_the_caller_alone() -> None:
    initial, (batches, held_out) = model(dtype=torch.bfloat16), samples()

    def losses(seed: int) -> tuple[float, ...]:
        settings = SETTINGS.model_copy(update={"seed": seed})
        return fit(copy.deepcopy(initial), batches, held_out, settings, recipe=recipes.NVFP4BlockScaling()).losses

    state = torch.get_rng_state()
    assert losses(1) == losses(1) != losses(2)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("recipe", [None, recipes.MXFP8BlockScaling()], ids=["none", "mxfp8"])
def test_a_loss_that_is_not_finite_stops_training(recipe: recipes.Recipe | None) -> None:
    settings = SETTINGS.model_copy(update={"optimizer": "sgd", "learning_rate": 1e38, "weight_decay": 0.0})
    with pytest.raises(TrainingError, match=r"wants a finite number, got (nan|inf)"):
        fit(model(), *samples(), settings, recipe=recipe)


def test_a_pipeline_without_a_logit_for_each_byte_is_refused() -> None:
    short = ByteModel(ops.Sequential(ops.Linear(CONTEXT * EMBEDDING, 255)), embedding=EMBEDDING, dtype=torch.float32)
    with pytest.raises(PipelineError, match=r"wants one output of shape \(32, 256\), got \(32, 255\)"):
        short(samples()[0][0].context)
    split = ops.Sequential(ops.MakeExtraOutput(), ops.Linear(CONTEXT * EMBEDDING, 256))
    with pytest.raises(PipelineError, match="got 2 outputs"):
        ByteModel(split, embedding=EMBEDDING, dtype=torch.float32)(samples()[0][0].context)


def test_logits_are_fp32_and_gradients_reach_the_table() -> None:
    trained = model(dtype=torch.bfloat16)
    with opfuse.autocast(recipe=recipes.Float8CurrentScaling()):
        logits = trained(samples()[0][0].context)
    assert (logits.dtype, logits.shape) == (torch.float32, (32, 256))
    logits.sum().backward()
    assert trained.embedding.weight.grad is not None
    assert trained.embedding.weight.grad.abs().sum() > 0
