"""torch's default device and dtype are for tensors that nothing else says it of: a call's tensors say it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import pytest
import torch

import opfuse
from opfuse import ops, recipes
from tests.compiler.harness import CASES, delayed_state, differences, randn, recipe_for, to
from tests.turns import in_turn

ROWS, WIDTH = 96, 64


@contextlib.contextmanager
def other_defaults() -> Iterator[None]:
    """A default device without values, on which nothing can be computed, and a dtype that no kernel takes."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def model() -> torch.nn.Module:
    """Linear layers, a normalisation, elementwise ops, random numbers, and groups."""
    first = ops.Sequential(ops.RMSNorm(WIDTH), ops.Linear(WIDTH, 2 * WIDTH), ops.SwiGLU(), ops.Dropout(0.3), ops.Bias(WIDTH))
    return to(torch.nn.ModuleList((first, ops.GroupedLinear(2, WIDTH, WIDTH))), torch.bfloat16)


def trained(model: torch.nn.Module, recipe: recipes.Recipe | None) -> dict[str, torch.Tensor | None]:
    """Results, gradients and states of two steps, and what the inspectors say of a third."""
    first, second = model
    x, splits = X.detach().clone().requires_grad_(), [ROWS // 3, ROWS - ROWS // 3]
    torch.manual_seed(0)
    for _ in range(2):
        with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
            y = second(first(x), splits)
        y.sum().backward()
    with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
        opfuse.explain(first, x)
        opfuse.saved(second, x, splits)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **gradients, **delayed_state(model)}


X = randn(ROWS, WIDTH)


@pytest.mark.few(apart=True)
@pytest.mark.parametrize(("name", "override"), [CASES[0], *in_turn(CASES[1:], of=2)])
def test_a_step_does_not_see_them(name: str, override: str | None) -> None:
    made, recipe = model(), recipe_for(name, override)
    want = trained(copy.deepcopy(made), recipe)
    with other_defaults():
        got = trained(made, recipe)
    assert not differences(got, want)


@pytest.mark.parametrize("kind", ["fp8_current", "fp8_block", "mxfp8", "nvfp4", "delayed"])
def test_quantized_parameters_and_their_states_are_where_they_are_asked_for(kind: str) -> None:
    recipe = recipes.recipe_of(kind, {})
    options = {"device": X.device, "dtype": torch.bfloat16}
    with other_defaults(), opfuse.quantized_model_init(recipe=recipe):
        linear = ops.Linear(WIDTH, WIDTH, **options)
        saved = linear.state_dict()
        linear.load_state_dict(saved)
        with opfuse.autocast(recipe=recipe):
            linear(X)
    assert {part.device for part in linear.weight.record.tensors()} == {X.device}
    assert {tensor.device for tensor in linear.quantizer_states.to_dict().values()} <= {X.device}
    assert torch.isfinite(linear.weight.dequantize()).all()
