"""Quantizers of a user's own, by plain subclassing as TransformerEngine's references are written, run under a custom recipe."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional as F

import opfuse
from opfuse import ops, te
from opfuse.errors import QuantizerError
from opfuse.recipes import CustomRecipe
from opfuse.tensors.quantizers import (
    Float8CurrentScalingQuantizer,
    Float8RowQuantizer,
    ForeignQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
)


@dataclass
class Kept(te.QuantizedTensorStorage):
    """Codes and scales of both directions; no dequantize of its own."""

    data: torch.Tensor | None
    scale: torch.Tensor | None
    data_t: torch.Tensor | None
    scale_t: torch.Tensor | None


class Reference(te.Quantizer):
    """Per-tensor FP8 in plain torch."""

    def __init__(self, dtype: torch.dtype, rowwise: bool = True, columnwise: bool = True, bits: int = 8) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype, self.bits = dtype, bits
        self.amax_reduction_group = None

    def quantize(self, tensor: torch.Tensor, **_) -> Kept:
        scale = torch.full((1,), torch.finfo(self.dtype).max) / tensor.float().abs().max()
        codes = (tensor.float() * scale).to(self.dtype)
        turned = codes.t().contiguous() if self.columnwise_usage else None
        return Kept(codes, 1 / scale, turned, 1 / scale)

    def dequantize(self, tensor: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return (tensor.float() * scale).to(dtype or torch.float32)


class Rounded:
    """Derived from nothing; what it makes dequantizes itself."""

    class Made:
        def __init__(self, values: torch.Tensor) -> None:
            self.values = values

        def dequantize(self) -> torch.Tensor:
            return self.values

    def __init__(self, step: float) -> None:
        self.step = step

    def quantize(self, x: torch.Tensor) -> object:
        return self.Made((x / self.step).round() * self.step)


def reference(role):
    return Reference(torch.float8_e5m2 if role.is_gradient else torch.float8_e4m3fn)


def train(model: torch.nn.Module, x: torch.Tensor, recipe: object) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    model.zero_grad()
    with opfuse.autocast(recipe=recipe):
        y = model(x)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def test_a_reference_quantizer_runs_as_it_is():
    torch.manual_seed(0)
    model, x = ops.Sequential(ops.Linear(32, 48, bias=False)), torch.randn(16, 32)
    for _ in range(3):  # a recording would not run its code
        y, dx, dw = train(model, x, CustomRecipe(qfactory=reference))
    exact = Float8CurrentScalingQuantizer(torch.float8_e4m3fn)
    xq, wq = (exact(t.detach()).dequantize() for t in (x, model[0].weight))
    dy = torch.linspace(-1, 1, y.numel()).view_as(y)
    dyq = Float8CurrentScalingQuantizer(torch.float8_e5m2)(dy).dequantize()
    assert torch.equal(y, F.linear(xq, wq))
    assert torch.allclose(dx, dyq @ wq, rtol=1e-6, atol=1e-6)
    assert torch.allclose(dw, dyq.t() @ xq, rtol=1e-6, atol=1e-6)


def test_its_code_runs_at_every_call():
    seen = []

    class Counting(Rounded):
        def quantize(self, x):
            seen.append(x.shape)
            return super().quantize(x)

    model, x = ops.Sequential(ops.Linear(8, 8), ops.ReLU(), ops.Linear(8, 8)), torch.randn(4, 8)
    recipe = CustomRecipe(qfactory=lambda role: Counting(0.5))
    counts = []
    for _ in range(5):
        before = len(seen)
        train(model, x, recipe)
        counts.append(len(seen) - before)
    assert set(counts) == {6}


def test_objects_of_equal_settings_are_one_plan_and_others_are_another():
    one, same, other = (ForeignQuantizer(Rounded(step)) for step in (0.5, 0.5, 0.25))
    assert one == same != other
    assert ForeignQuantizer(Reference(torch.float8_e4m3fn)) != ForeignQuantizer(Reference(torch.float8_e5m2))
    model, x, step = ops.Sequential(ops.Linear(8, 8)), torch.randn(4, 8), [0.5]

    def factory(role):
        return Rounded(step[0])

    recipe = CustomRecipe(qfactory=factory)
    coarse = train(model, x, recipe)[0]
    assert torch.equal(train(model, x, recipe)[0], coarse)
    step[0] = 2.0**-10
    fine = train(model, x, recipe)[0]
    assert not torch.equal(fine, coarse)
    assert torch.allclose(fine, model(x), atol=1e-2)
    assert model.cache_info().misses == 3  # two recipes, and none


def test_a_plain_tensor_is_a_result_and_anything_else_is_refused():
    class Fake:
        def __init__(self, made):
            self.made = made

        def quantize(self, x):
            return self.made(x)

    x = torch.randn(4, 8)
    assert torch.equal(ForeignQuantizer(Fake(lambda t: t.round())).quantize(x).dequantize(), x.round())
    with pytest.raises(QuantizerError, match=r"Fake.quantize: wants a result with dequantize\(\).*got str"):
        ForeignQuantizer(Fake(str)).quantize(x)
    with pytest.raises(QuantizerError, match=r"Fake.quantize: wants values of shape \(4, 8\), .*, got \(1, 8\)"):
        ForeignQuantizer(Fake(lambda t: t[:1])).quantize(x)


def test_the_base_class_is_as_the_peer_s():
    quantizer = Reference(torch.float8_e4m3fn, columnwise=False)
    assert (quantizer.rowwise_usage, quantizer.columnwise_usage) == (True, False)
    other = quantizer.copy()
    other.set_usage(rowwise=False, columnwise=True)
    assert (quantizer.columnwise_usage, other.rowwise_usage, other.columnwise_usage) == (False, False, True)
    assert isinstance(other(torch.randn(4, 4)), Kept)


FACTORIES = {
    "all": (reference, {"fprop": "emulated", "dgrad": "emulated", "wgrad": "emulated"}),
    "weights beside a format": (
        lambda role: Rounded(0.5) if role.tensor_type == "weight" else MXFP8Quantizer(),
        {"fprop": "emulated", "dgrad": "emulated", "wgrad": "emulated"},
    ),
    "weights beside high precision": (
        lambda role: Rounded(0.5) if role.tensor_type == "weight" else IdentityQuantizer(),
        {"fprop": "high precision", "dgrad": "high precision", "wgrad": "high precision"},
    ),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_products_are_said_to_be_what_they_are(name):
    factory, wanted = FACTORIES[name]
    model, x = ops.Sequential(ops.Linear(32, 32)), torch.randn(32, 32, requires_grad=True)
    with opfuse.autocast(recipe=CustomRecipe(qfactory=factory)):
        found = opfuse.explain(model, x)
    (products,) = [each["products"] for each in found.to_dict()["pipelines"]]
    assert {each["product"]: each["status"] for each in products} == wanted
    foreign = [each for each in products if "own_dequantized" in (each["left"], each["right"])]
    assert len(foreign) == (3 if name == "all" else 2)
    reasons = {each["reason"] for each in foreign}
    own, plain = "it reads the dequantized values of a quantizer of one's own", "an operand is in high precision"
    assert reasons == {plain if "high" in name else own}
    assert found.backend == ("native" if "high" in name else "emulated")


def test_support_says_that_it_is_emulated_and_what_torch_casts():
    told = opfuse.support(CustomRecipe(qfactory=reference), (9, 0))
    assert str(told) == "emulated: products read the dequantized values of a quantizer of one's own: input, weight, grad_output"

    def beside_high_precision(role):
        return Rounded(0.5) if role.tensor_type == "weight" else IdentityQuantizer()

    told = opfuse.support(CustomRecipe(qfactory=beside_high_precision), (9, 0))
    assert str(told) == "native: all products are in high precision"

    def slow_weights(role):
        rows = Float8RowQuantizer(torch.float8_e4m3fn)
        exact = Float8RowQuantizer(torch.float8_e4m3fn, scale_rule="compressed_tensors")
        return HybridQuantizer(exact, rows) if role.tensor_type == "weight" else rows

    told = opfuse.support(CustomRecipe(qfactory=slow_weights), (9, 0))
    assert told.status == "native"
    assert told.reason.endswith("; no kernel casts by scale_rule='compressed_tensors': torch casts weight")
