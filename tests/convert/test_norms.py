"""A norm that no pipeline begins with runs as one op, on what that op takes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import opfuse
from opfuse import ops
from opfuse.convert import build
from opfuse.errors import OpfuseWarning
from tests.convert.test_fuse import EXACT, FP8, called, converted_exactly
from tests.plans import plans_used


class WrittenNorm(nn.Module):
    """An RMS norm as models write it."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.eps = 1e-6

    def forward(self, hidden):
        x = hidden.float() if hidden.dtype != torch.float64 else hidden
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(hidden.dtype)


class Attention(nn.Module):
    """Reads its input three times, and routes: its norm is not a part of any pipeline."""

    def __init__(self, width=32, norm=WrittenNorm):
        super().__init__()
        self.norm, self.last = norm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x, mask=None):
        y = self.norm(x)
        mixed = F.scaled_dot_product_attention(self.query(y), self.key(y), self.value(y), attn_mask=mask)
        return self.last(x + mixed + 0 * y)


@pytest.fixture(autouse=True)
def any_width(monkeypatch):
    monkeypatch.setattr(build, "NARROW", 32)


def test_lone_norms_run_as_ops_and_nothing_changes_without_a_recipe():
    model, x = Attention().double(), [torch.randn(4, 8, 32, dtype=torch.float64)]
    report = converted_exactly(model, lambda: called(model, x))
    assert (report["norm"].became, report["last"].became) == ("RMSNorm", "LayerNorm")


def test_the_op_computes_what_the_norm_is():
    model = Attention().bfloat16()
    own, x, dy = copy.deepcopy(model.norm), torch.randn(64, 32).bfloat16().requires_grad_(), torch.randn(64, 32).bfloat16()
    op = ops.RMSNorm(32, eps=1e-6, dtype=torch.bfloat16)
    op.weight.data.copy_(own.weight)
    opfuse.fuse_(model, FP8)
    with plans_used() as plans:
        y = model.norm(x)
    assert [name.partition("(")[0] for plan in plans for name in plan.ops] == ["RMSNorm"]
    assert torch.equal(y, op(x))
    found, same = (torch.autograd.grad(out, (x, weight), dy) for out, weight in ((y, model.norm.weight), (op(x), op.weight)))
    assert all(map(torch.equal, found, same))
    wanted = torch.autograd.grad(own.double()(x.double()), own.weight, dy.double())
    assert torch.allclose(found[1].double(), *wanted, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda norm, x: norm(x.double()), id="another dtype"),
        pytest.param(lambda norm, x: torch.autocast("cpu", torch.bfloat16)(norm)(x), id="torch.autocast"),
        pytest.param(lambda norm, x: torch.compile(norm, backend="eager", fullgraph=True)(x), id="torch.compile"),
    ],
)
def test_other_calls_are_those_of_the_module(call):
    model, x = Attention(norm=nn.RMSNorm), torch.randn(4, 32)
    wanted = call(copy.deepcopy(model).norm, x)
    opfuse.fuse_(model, FP8)
    with plans_used() as plans:
        found = call(model.norm, x)
    assert not plans
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)


@pytest.mark.row("B35")
def test_b35_a_norm_in_a_graph_saves_its_input_in_fp8_where_the_recipe_asks():
    model, seen = Attention(norm=nn.RMSNorm).bfloat16(), []
    opfuse.fuse_(model, FP8.replace(keep="quantized"))
    x, dy = torch.randn(64, 32).bfloat16().requires_grad_(), torch.randn(64, 32).bfloat16()
    call = torch.compile(lambda x: model.norm(2 * x), backend="aot_eager", fullgraph=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: seen.append(tensor) or tensor, lambda tensor: tensor)
    with plans_used() as plans, hooks:
        y = call(x)
    assert [name.partition("(")[0] for plan in plans for name in plan.ops] == ["RMSNorm"]
    assert not [tensor.shape for tensor in seen if tensor.is_floating_point()]
    wanted = torch.autograd.grad(model.norm(2 * x), (x, model.norm.weight), dy)
    assert all(map(torch.equal, torch.autograd.grad(y, (x, model.norm.weight), dy), wanted))


def test_another_eps_is_that_of_the_module():
    for norm in (WrittenNorm, nn.RMSNorm, nn.LayerNorm):
        model, x = Attention(norm=norm), torch.randn(4, 32) / 100
        opfuse.fuse_(model, FP8)
        model.norm.eps = 0.1
        with pytest.warns(OpfuseWarning, match=r"norm has changed since fuse_: 'eps' was (1e-0\d|None), is 0\.1"):
            model.norm(x)
        other = copy.deepcopy(model)
        assert torch.equal(model.norm(x), type(model.norm).forward(model.norm, x))
        assert torch.equal(other.norm(x), model.norm(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_eps_that_torch_takes_by_default(dtype):
    model, x = Attention(norm=nn.RMSNorm).to(dtype), torch.randn(64, 32, dtype=dtype) / 100
    wanted = model.norm(x)
    opfuse.fuse_(model, EXACT if dtype is torch.float64 else FP8)
    assert torch.allclose(model.norm(x), wanted, rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_what_is_narrow_or_not_asked_for_stays():
    for width, asked in ((16, {}), (32, {"filter_fn": lambda module, path: path != "norm"}), (32, {"policy": {"norm": None}})):
        report = opfuse.fuse_(Attention(width), None if width < 32 else FP8, **asked)
        assert (report["norm"].status, report["norm"].became) == ("kept", "")


def test_a_model_of_norms_alone_has_nothing_to_convert():
    with pytest.raises(opfuse.errors.ConversionError, match="a Sequential without any"):
        opfuse.fuse_(nn.Sequential(nn.RMSNorm(32), nn.RMSNorm(32)), FP8)
