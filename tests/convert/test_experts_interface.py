"""``experts_implementation="opfuse"``: the experts of transformers' mixtures by opfuse, without ``fuse_``."""

from __future__ import annotations

import copy
import threading
import types
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import opfuse
from opfuse.convert.converted import converted
from opfuse.errors import ConversionError, OpfuseWarning, RecipeError
from opfuse.recipes import DelayedScaling, Float8CurrentScaling
from tests.convert.test_fuse import EXACT
from tests.convert.tiny import arguments, tiny
from tests.plans import plans_used

MIXTURES = ("MixtralForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "OlmoeForCausalLM", "GptOssForCausalLM")


def registered(kind: str, recipe: object = None) -> torch.nn.Module:
    opfuse.register_experts("opfuse", recipe=recipe)
    model = tiny(kind)
    model.set_experts_implementation("opfuse")
    return model


def experts_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith(".experts")]


def step(model: torch.nn.Module) -> list[torch.Tensor]:
    """The loss, and all gradients."""
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(**arguments(model)).loss
    loss.backward()
    return [loss.detach(), *[p.grad.clone() for p in model.parameters() if p.grad is not None]]


@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_by_the_interface_compute_what_transformers_do(kind):
    model = registered(kind, EXACT)
    plain = copy.deepcopy(model)
    plain.set_experts_implementation("grouped_mm")
    wanted = step(plain)
    for _ in range(3):
        with plans_used() as plans:
            found = step(model)
        assert plans
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    names = {type(module).__name__ for module in model.modules() if "forward" in vars(module)}
    assert len(names) == 1, "nothing but experts is converted"


def test_without_a_recipe_transformers_experts_run():
    model, plain = registered("MixtralForCausalLM"), tiny("MixtralForCausalLM")
    plain.set_experts_implementation("grouped_mm")
    with plans_used() as plans:
        found = step(model)
    assert not plans
    assert all(map(torch.equal, found, step(plain)))
    with opfuse.autocast(recipe=Float8CurrentScaling()), plans_used() as plans:
        step(model)
    assert plans


@pytest.mark.parametrize("around", ["checkpoint", "inference"])
def test_a_first_call_inside_of_something_converts_as_well(around):
    model = registered(MIXTURES[0], Float8CurrentScaling())
    if around == "checkpoint":
        model.gradient_checkpointing_enable()
        step(model)
    else:
        with torch.inference_mode():
            model(**arguments(model))
    assert all(converted(each) is not None for each in experts_of(model))
    step(model)


def test_a_first_call_in_several_threads_converts_once():
    """Other threads draw random numbers meanwhile, and the parameters stay."""
    for _ in range(4):
        model = registered(MIXTURES[0], Float8CurrentScaling())
        before, given, losses = dict(model.named_parameters()), arguments(model), []

        def call(model=model, given=given, losses=losses):
            torch.randn(100)
            losses.append(model(**given).loss.item())

        threads = [threading.Thread(target=call) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        after = dict(model.named_parameters())
        assert before.keys() == after.keys()
        assert all(before[name] is after[name] for name in before)
        assert losses == [model(**given).loss.item()] * 4


@pytest.mark.parametrize("kind", ["Qwen3MoeForCausalLM", "GptOssForCausalLM"])
def test_a_unit_that_is_another_later_counts(kind):
    """transformers' grouped products call it by its name, where the forward that they stand for does not."""
    model = registered(kind, EXACT)
    plain = copy.deepcopy(model)
    plain.set_experts_implementation("grouped_mm")
    step(model)
    for each in (plain, model):
        for experts in experts_of(each):
            experts._apply_gate = types.MethodType(lambda self, x: x.chunk(2, -1)[0], experts)
    with pytest.warns(OpfuseWarning, match="Experts has changed since fuse_: '_apply_gate' was .*, is the method"):
        found = step(model)
    for one, other in zip(found, step(plain), strict=True):
        torch.testing.assert_close(one, other)


def test_another_name_with_another_recipe_takes_over():
    opfuse.register_experts("opfuse_without")
    model = registered(MIXTURES[0], Float8CurrentScaling())
    wanted = step(copy.deepcopy(model))
    model.set_experts_implementation("opfuse_without")
    assert not torch.equal(step(model)[0], wanted[0])
    model.set_experts_implementation("opfuse")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*_experts_implementation", OpfuseWarning)
        found = step(model)
    assert all(map(torch.equal, found, wanted))


def test_another_implementation_takes_over():
    model = registered("MixtralForCausalLM", Float8CurrentScaling())
    step(model)
    model.set_experts_implementation("eager")
    with plans_used() as plans, pytest.warns(OpfuseWarning, match="_experts_implementation"):
        found = step(model)
    assert not plans
    plain = tiny("MixtralForCausalLM")
    plain.set_experts_implementation("eager")
    assert all(map(torch.equal, found, step(plain)))


def test_a_model_is_made_with_it_and_saved_without_a_trace(tmp_path):
    opfuse.register_experts(recipe=DelayedScaling())
    config = tiny("Qwen3MoeForCausalLM").config
    model = AutoModelForCausalLM.from_config(config, experts_implementation="opfuse")
    step(model)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.get_experts_implementation()[""] != "opfuse"
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


def test_experts_that_opfuse_has_no_pipeline_for_say_so_and_run():
    model, plain = registered("MixtralForCausalLM", Float8CurrentScaling()), tiny("MixtralForCausalLM")
    plain.set_experts_implementation("grouped_mm")
    for experts in (*experts_of(model), *experts_of(plain)):
        experts.act_fn = torch.nn.Tanh()
    with pytest.warns(OpfuseWarning, match=r"(?s)MixtralExperts.*grouped_mm runs"):
        found = step(model)
    assert all(map(torch.equal, found, step(plain)))
    assert len(step(model)) == len(found)  # and no second warning


@pytest.mark.cpu
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["a layer", "a model"])
def test_compiled_code_runs_them(whole):
    """A layer alone, or the model, which torch traces for ten seconds more."""
    model = registered("MixtralForCausalLM", EXACT)
    wanted = step(copy.deepcopy(model))
    (model if whole else model.model.layers[0]).compile(backend="aot_eager")
    for _ in range(2):
        found = step(model)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["eager", "grouped_mm"])
def test_names_of_transformers_stay_its_own(name):
    with pytest.raises(ConversionError, match="transformers uses"):
        opfuse.register_experts(name)


def test_a_recipe_that_is_none_is_told_at_once():
    with pytest.raises(RecipeError):
        opfuse.register_experts(recipe="fp9")


def trained(kind: str, recipe: object, steps: int) -> tuple[list[float], torch.nn.Module]:
    """Losses over texts in which each word follows from the one before; in bf16 by transformers' experts without a recipe."""
    model = registered(kind, recipe)
    if recipe is None:
        model.set_experts_implementation("grouped_mm")
    optimizer, draw = torch.optim.AdamW(model.parameters(), lr=3e-3), torch.Generator().manual_seed(1)
    words, losses = model.config.vocab_size, []
    for _ in range(steps):
        ids = (torch.randint(words, (8, 1), generator=draw) + 3 * torch.arange(24)) % words
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def trains_within_a_hundredth(kind: str, steps: int, folder: Path) -> None:
    plain, _ = trained(kind, None, steps)
    losses, model = trained(kind, Float8CurrentScaling(), steps)
    assert losses[-1] < losses[0] / 2
    assert losses != plain
    assert sum(losses) == pytest.approx(sum(plain), rel=0.01)
    assert sum(losses[-20:]) == pytest.approx(sum(plain[-20:]), rel=0.01)
    model.save_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="grouped_mm")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


def test_a_mixture_trains_as_in_bf16(tmp_path):
    trains_within_a_hundredth("GptOssForCausalLM", 32, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXTURES)
def test_mixtures_train_200_steps_as_in_bf16(kind, tmp_path):
    trains_within_a_hundredth(kind, 200, tmp_path)


def test_an_error_that_is_no_refusal_is_no_reason_to_run_otherwise(monkeypatch):
    def broken(*_):
        raise RuntimeError("a bug")

    model = registered("MixtralForCausalLM", EXACT)
    monkeypatch.setattr("opfuse.convert.experts_interface.fuse_", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        step(model)
