"""What the rules would launch on a GPU: the chain and the cast as one kernel, and never a pass over what it made."""

from __future__ import annotations

import pytest
import torch

from opfuse import autocast, ops
from opfuse.fusions import RULES
from opfuse.kernels.engine.registry import Kernel
from opfuse.tensors import QuantizedTensor
from tests.compiler.harness import UNFUSED, Step, differences, randn, recipe_for, run, to

ROWS, WIDTH = 64, 128
CASTS = {"delayed": "CAST=TENSOR", "fp8_block": "CAST=BLOCKS", "mxfp8": "CAST=MX"}
MEASURED = ("fp8_current", "nvfp4")


@pytest.fixture
def launched(monkeypatch):
    """(kernel, entry, definitions, ops of the chain) of all that a GPU would be asked to launch; the definitions run."""
    calls = []
    within = []

    def record(variant, entry, *_, device):
        chain = variant.generated.partition(".")[0].removeprefix("// The chain ")
        calls.append((within[0].name, entry, variant.defines, chain))

    def call(self, *args, **kwargs):
        if within:
            return self.reference(*args, **kwargs)
        within.append(self)
        self.run(record, *args, **kwargs)
        result = self.reference(*args, **kwargs)
        within.clear()
        return result

    monkeypatch.setattr(Kernel, "__call__", call)
    return calls


def mlp(activation):
    torch.manual_seed(0)
    wide = 2 * WIDTH if activation is ops.SwiGLU else WIDTH
    return to(ops.Sequential(ops.Linear(WIDTH, wide), activation(), ops.Linear(WIDTH, WIDTH)), torch.bfloat16)


def step(activation, name, rules, override=None):
    x = randn(ROWS, WIDTH, dtype=torch.bfloat16)
    return run(mlp(activation), x, step=Step(recipe_for(name, override), rules))


def of(launched, kernel, entry, chain=None):
    return [defines for name, each, defines, ops in launched if (name, each) == (kernel, entry) and chain in (None, ops)]


def names(launched):
    return {name for name, *_ in launched}


@pytest.mark.parametrize("activation", [ops.GELU, ops.SwiGLU])
@pytest.mark.parametrize("name", CASTS)
def test_r4_chain_and_cast_are_one_kernel_in_both_directions(name, activation, launched):
    step(activation, name, RULES)
    for kernel in ("forward_chain_cast", "backward_chain_cast"):
        (defines,) = of(launched, kernel, "chain_tile", f"bias, {activation.kind}")
        assert CASTS[name] in defines
    assert not of(launched, "forward_chain_cast", "chain_forward") + of(launched, "backward_chain_amax", "chain_tile")
    launched.clear()
    step(activation, name, UNFUSED)
    assert not names(launched) & {"forward_chain_cast", "backward_chain_cast"}


@pytest.mark.parametrize("activation", [ops.GELU, ops.SwiGLU])
@pytest.mark.parametrize("name", MEASURED)
def test_r4_the_amax_comes_from_the_chain(name, activation, launched):
    step(activation, name, RULES)
    chain = f"bias, {activation.kind}"
    (forward,) = of(launched, "forward_chain_cast", "chain_forward", chain)
    assert "AMAX=1" in forward
    again = of(launched, "forward_chain_cast", "chain_tile", activation.kind)
    assert [{"CAST=TENSOR", "RECORD=0"} <= {*each} for each in again] == [True] * (
        activation is ops.GELU and name == "fp8_current"
    )
    (backward,) = of(launched, "backward_chain_amax", "chain_tile", chain)
    assert "CAST=AMAX" in backward
    assert of(launched, "backward_chain_amax", "chain_tile", "bias")
    fused = len(of(launched, "tensor_amax", "amax"))
    launched.clear()
    step(activation, name, UNFUSED)
    assert len(of(launched, "tensor_amax", "amax")) - fused == (3 if name == "fp8_current" else 0)


@pytest.mark.parametrize("op", [ops.GELU(), ops.RMSNorm(WIDTH)])
def test_an_input_that_came_quantized_is_launched_as_its_values(op, launched):
    x = randn(ROWS, WIDTH, dtype=torch.bfloat16)
    with autocast(recipe=recipe_for("mxfp8")):
        quantized = to(ops.Sequential(ops.Quantize()), torch.bfloat16)(x)
    assert isinstance(quantized, QuantizedTensor)
    launched.clear()
    y = to(ops.Sequential(op), torch.bfloat16)(quantized.requires_grad_())
    y.backward(torch.ones_like(y))
    assert len(of(launched, "forward_chain", "chain_forward") + of(launched, "norm_forward", "norm_forward")) == 1
    assert len(of(launched, "backward_chain", "chain_backward") + of(launched, "norm_backward", "norm_backward")) == 1


CASTING = ("cast_current", "cast_block", "cast_mx", "cast_nv")


@pytest.mark.parametrize("activation", [ops.GELU, ops.SwiGLU])
@pytest.mark.parametrize("name", ["fp8_block", "mxfp8"])
def test_r4_an_override_that_saves_the_original_stores_and_casts_it_in_the_chain(name, activation, launched):
    fused = step(activation, name, RULES, "high_precision")
    (defines,) = of(launched, "forward_chain_cast", "chain_tile", f"bias, {activation.kind}")
    assert {CASTS[name], "ROWWISE=1", "COLUMNWISE=0"} <= {*defines}
    assert not of(launched, "forward_chain", "chain_forward", f"bias, {activation.kind}")
    casts = sum(kernel in CASTING for kernel, *_ in launched)
    launched.clear()
    unfused = step(activation, name, UNFUSED, "high_precision")
    assert casts == sum(kernel in CASTING for kernel, *_ in launched) - 1
    assert differences(unfused.tensors, fused.tensors) == []
    assert fused.tensors["saved 3:basic_linear.x"].dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["fp8_row", "fp8_block", "mxfp8"])
def test_r4_an_override_that_saves_the_original_stores_and_casts_it_in_the_norm(name, launched):
    torch.manual_seed(0)
    model, x = to(ops.Sequential(ops.RMSNorm(WIDTH), ops.Linear(WIDTH, WIDTH)), torch.bfloat16), randn(ROWS, WIDTH)
    recipe = recipe_for(name, "high_precision", keep="all")
    fused = run(model, x, step=Step(recipe, RULES))
    (defines,) = of(launched, "norm_cast", "norm_cast")
    assert "STORES=1" in defines
    assert not [entry for _, entry, *_ in launched if entry == "norm_forward"]
    launched.clear()
    unfused = run(model, x, step=Step(recipe, UNFUSED))
    assert "norm_cast" not in names(launched)
    assert differences(unfused.tensors, fused.tensors) == []


@pytest.mark.parametrize("name", MEASURED)
def test_r4_an_override_that_saves_the_original_measures_it_in_the_chain(name, launched):
    fused = step(ops.GELU, name, RULES, "high_precision")
    (forward,) = of(launched, "forward_chain_cast", "chain_forward", "bias, gelu")
    assert "AMAX=1" in forward
    assert not of(launched, "forward_chain_cast", "chain_tile")
    assert not names(launched) & {"backward_chain_cast", "backward_chain_amax"}
    passes = len(of(launched, "tensor_amax", "amax"))
    launched.clear()
    unfused = step(ops.GELU, name, UNFUSED, "high_precision")
    assert len(of(launched, "tensor_amax", "amax")) - passes == (1 if name == "fp8_current" else 0)
    assert differences(unfused.tensors, fused.tensors) == []


@pytest.mark.parametrize("name", ["fp8_block", "mxfp8"])
def test_r4_an_override_that_saves_rows_casts_rows_in_the_chain(name, launched):
    step(ops.GELU, name, RULES, "dequantized")
    assert of(launched, "forward_chain_cast", "chain_tile")
    assert not of(launched, "backward_chain_cast", "chain_tile")
