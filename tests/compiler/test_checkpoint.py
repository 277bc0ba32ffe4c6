"""Activation checkpointing: the recomputation computes the bits of the forward pass, and is loud where it could not."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
import torch.utils.checkpoint

import opfuse
from opfuse import ops, recipes
from opfuse.compiler.fuser import recorded_plans
from opfuse.errors import UnsupportedError

RECIPES = {
    "none": None,
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(),
    "fp8_current": recipes.Float8CurrentScaling(),
    "delayed": recipes.DelayedScaling(amax_history_len=4),
}
Checkpoint = Callable[..., torch.Tensor]


def block() -> ops.Sequential:
    torch.manual_seed(0)
    return ops.Sequential(ops.RMSNorm(64), ops.Linear(64, 128), ops.GELU(), ops.Linear(128, 64), ops.Dropout(0.25)).bfloat16()


def plain(first: ops.Sequential, second: ops.Sequential, x: torch.Tensor) -> torch.Tensor:
    return second(first(x))


def each(first: ops.Sequential, second: ops.Sequential, x: torch.Tensor) -> torch.Tensor:
    return opfuse.checkpoint(second, opfuse.checkpoint(first, x))


def nested(first: ops.Sequential, second: ops.Sequential, x: torch.Tensor) -> torch.Tensor:
    return opfuse.checkpoint(lambda x: second(opfuse.checkpoint(first, x)), x)


def trained(checkpoint: Checkpoint, recipe: recipes.Recipe | None, steps: int = 3) -> list[torch.Tensor]:
    """Outputs and gradients of some steps of two blocks, and what the blocks remember afterwards."""
    first, second = block(), block()
    torch.manual_seed(1)
    seen = []
    for step in range(steps):
        x = (step + 1) * torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
        x.retain_grad()
        with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
            y = checkpoint(first, second, x)
        y.square().sum().backward()
        seen += [y.detach(), x.grad, *(p.grad.clone() for model in (first, second) for p in model.parameters())]
    for op in (*first, *second):
        seen += list(op.quantizer_states.to_dict().values())
    return [*seen, torch.get_rng_state()]


@pytest.mark.row("H26")
@pytest.mark.parametrize("checkpoint", [each, nested])
@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputed_is_bitwise_what_was_not(recipe: str, checkpoint: Checkpoint) -> None:
    wanted, got = trained(plain, RECIPES[recipe]), trained(checkpoint, RECIPES[recipe])
    assert len(wanted) == len(got)
    assert all(torch.equal(w, g) for w, g in zip(wanted, got))
    if recipe != "none":
        assert not torch.equal(wanted[0], trained(plain, None)[0])


def test_it_keeps_no_activations_and_recomputes_each_block_once() -> None:
    model, calls = block(), []
    saved: list[int] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return model(x)

    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t)
    with opfuse.autocast(recipe=recipes.MXFP8BlockScaling()), recorded_plans() as plans, hooks:
        y = opfuse.checkpoint(run, x)
    assert sum(saved) <= x.nbytes
    y.sum().backward()
    assert (len(calls), len(plans)) == (2, 1)
    assert model.cache_info().misses == 1  # the recomputation found the plan


def test_recipe_and_rules_reach_another_thread() -> None:
    model, x = block(), torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    rules = opfuse.active_rules().without("epilogue")
    with opfuse.autocast(recipe=recipes.MXFP8BlockScaling()), opfuse.use_rules(rules):
        y = opfuse.checkpoint(model, x)
    thread = threading.Thread(target=lambda: y.sum().backward())
    thread.start()
    thread.join()
    assert x.grad is not None
    assert model.cache_info() == (1, 1, 1, "first plan: the cache was empty")


def test_two_backward_passes_over_one_graph() -> None:
    model, x = block(), torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    with opfuse.autocast(recipe=recipes.NVFP4BlockScaling(disable_stochastic_rounding=True)):
        y = opfuse.checkpoint(model, x)
    first, second = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_reentrant_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="use_reentrant=False"):
        opfuse.checkpoint(block(), torch.randn(32, 64), use_reentrant=True)


def run_torch(model: ops.Sequential, recipe: recipes.Recipe | None, *, reentrant: bool) -> None:
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
        y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)
    y.sum().backward()


def test_torch_checkpoints_that_lose_the_recipe_are_loud() -> None:
    model = block()
    run_torch(model, None, reentrant=True)  # high-precision plans are there
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"opfuse\.checkpoint"):
            run_torch(model, recipes.MXFP8BlockScaling(), reentrant=True)
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match="number of"):
        run_torch(model, recipes.MXFP8BlockScaling(), reentrant=False)


@pytest.mark.parametrize("reentrant", [True, False])
def test_torch_checkpoints_in_high_precision_run_beside_recipes(reentrant: bool) -> None:
    model = block()
    with torch.no_grad(), opfuse.autocast(recipe=recipes.MXFP8BlockScaling()):
        model(torch.randn(32, 64, dtype=torch.bfloat16))
    run_torch(model, None, reentrant=reentrant)
    run_torch(copy.deepcopy(model), None, reentrant=reentrant)
