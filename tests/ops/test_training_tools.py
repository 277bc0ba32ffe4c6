"""What stands around a training step, on plain and on stored weights: optimizers, GradScaler, clipping, averages."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import opfuse
from opfuse import ops, recipes
from opfuse.tensors import QuantizedTensor

with warnings.catch_warnings():  # of extensions for GPUs that are not here
    warnings.simplefilter("ignore")
    from torchao.optim import AdamW8bit, _AdamW

OPTIMIZERS = {
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "torchao, 8 bits": lambda p: AdamW8bit(p, lr=1e-3, block_size=256),
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
every_weight = pytest.mark.parametrize("stored", [False, True], ids=["plain", "stored"])


def made(stored: bool, dtype: torch.dtype = torch.float32) -> ops.Sequential:
    torch.manual_seed(0)
    with opfuse.quantized_model_init(enabled=stored, recipe=recipes.MXFP8BlockScaling()):
        return ops.Sequential(ops.Linear(64, 64, dtype=dtype), ops.GELU(), ops.Linear(64, 64, dtype=dtype))


def optimizer_of(name: str, model: ops.Sequential, stored: bool) -> Any:
    optimizer = OPTIMIZERS[name](model.parameters())
    return opfuse.with_masters(optimizer) if stored else optimizer


def give_gradients(model: ops.Sequential, step: int, factor: float) -> None:
    torch.manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape) * factor


def bits(model: ops.Sequential) -> list[torch.Tensor]:
    """A copy of all that parameters hold."""
    return [
        x.clone() for p in model.parameters() for x in (p.record.tensors() if isinstance(p, QuantizedTensor) else [p.detach()])
    ]


def same(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, ones, others)) and len(ones) == len(others)


@pytest.fixture(autouse=True)
def _eager() -> Any:
    """torchao compiles its step, which takes long."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.cpu
@every_weight
@every_optimizer
def test_scaled_and_clipped_steps_are_those_without_a_scaler_and_an_infinite_one_is_none(name, stored):
    model, other = made(stored), made(stored)
    optimizer, plain = optimizer_of(name, model, stored), optimizer_of(name, other, stored)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step, factor in enumerate((1.0, torch.inf, 1.0)):
        before = bits(model)
        scaler.scale(torch.zeros(()))
        give_gradients(model, step, factor * scaler.get_scale())
        if step == 2:
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert same(bits(model), before) == (factor == torch.inf)
        if factor != torch.inf:
            give_gradients(other, step, factor)
            if step == 2:
                assert torch.equal(torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0), norm)
            plain.step()
    assert same(bits(model), bits(other))
    assert isinstance(model[0].weight, QuantizedTensor) == stored


@pytest.mark.cpu
@every_weight
def test_an_exponential_average_follows_the_values(stored):
    model = made(stored)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    want = [p.detach().dequantize() if isinstance(p, QuantizedTensor) else p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    average.update_parameters(model)
    for mine, start, p in zip(average.module.parameters(), want, model.parameters()):
        mean = torch.lerp(start, p.detach() + 0, 0.5)
        assert type(mine) is type(p)
        assert torch.equal(mine.detach() + 0, mine.quantizer(mean).dequantize() if isinstance(mine, QuantizedTensor) else mean)


@pytest.mark.cpu
def test_weights_in_bf16_round_at_random_where_torchao_is_asked_to():
    """Steps far below the spacing of bf16 are lost by rounding to nearest, and come through on average."""
    moved = []
    for at_random in (False, True):
        model = made(False, torch.bfloat16)
        start = model[0].weight.detach().clone()
        optimizer = _AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, bf16_stochastic_round=at_random)
        for _ in range(8):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
        far = start.abs() > 2.0**-5
        moved.append((start.float() - model[0].weight.detach().float())[far].mean().item())
    assert moved[0] == 0
    assert moved[1] == pytest.approx(8e-6, rel=0.3)
