"""Experts whose matrices are two parameters run as grouped products."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import opfuse
from opfuse.convert.experts import experts_of
from opfuse.convert.leaves import GATED
from opfuse.errors import OpfuseWarning
from opfuse.ops import SwiGLU
from opfuse.recipes import MXFP8BlockScaling
from tests.convert.test_fuse import EXACT, MAY_RUN_PLAIN, called, converted_exactly
from tests.ops.test_routing import made_by
from tests.plans import plans_used

EXPERTS = 5


class Mixture(nn.Module):
    """As in Mixtral, Qwen and DeepSeek."""

    def __init__(self, width: int = 32, inner: int = 64) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * inner, width) / 6)
        self.down = nn.Parameter(torch.randn(EXPERTS, width, inner) / 8)
        self.act = nn.SiLU()

    def forward(self, hidden, chosen, weights):
        result = torch.zeros_like(hidden)
        for expert in range(EXPERTS):
            token, place = torch.where(chosen == expert)
            a, b = self.halves(nn.functional.linear(hidden[token], self.up[expert]))
            y = nn.functional.linear(self.act(a) * b, self.down[expert]) * weights[token, place, None]
            result.index_add_(0, token, y.to(result.dtype))
        return result

    def halves(self, both):
        return both.chunk(2, -1)


class Interleaved(Mixture):
    def halves(self, both):
        return both[..., ::2], both[..., 1::2]


class OfGELU(Mixture):
    """As in Gemma 4."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.GELU(approximate="tanh")


class OfReLU(Mixture):
    """Of a unit that no op multiplies by a scale for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()


class Clamped(nn.Module):
    """As in GPT-OSS: matrices to be multiplied from the right, biases, and a clamped unit whose halves take turns."""

    offset = 1

    def __init__(self, width: int = 32, inner: int = 64, limit: float = 0.5) -> None:
        super().__init__()
        self.up, self.up_bias = (
            nn.Parameter(torch.randn(EXPERTS, width, 2 * inner) / 6),
            nn.Parameter(torch.randn(EXPERTS, 2 * inner)),
        )
        self.down, self.down_bias = (
            nn.Parameter(torch.randn(EXPERTS, inner, width) / 8),
            nn.Parameter(torch.randn(EXPERTS, width)),
        )
        self.alpha, self.limit = 1.702, limit

    def forward(self, hidden, chosen=None, weights=None):
        result = torch.zeros_like(hidden)
        for expert in range(EXPERTS):
            token, place = torch.where(chosen == expert)
            a, b = self.halves(hidden[token] @ self.up[expert] + self.up_bias[expert])
            y = (b + self.offset) * a * torch.sigmoid(a * self.alpha) @ self.down[expert] + self.down_bias[expert]
            result.index_add_(0, token, (y * weights[token, place, None]).to(result.dtype))
        return result

    def halves(self, both):
        return both[..., ::2].clamp(max=self.limit), both[..., 1::2].clamp(min=-self.limit, max=self.limit)


class InHalves(Clamped):
    offset = 0

    def halves(self, both):
        a, b = both.chunk(2, dim=-1)
        return a.clamp(None, self.limit), b.clamp(-self.limit, self.limit)


class Biased(Mixture):
    """Weights multiply what is added behind the last product, too."""

    def __init__(self, width: int = 32, inner: int = 64) -> None:
        super().__init__(width, inner)
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, 2 * inner))
        self.down_bias = nn.Parameter(torch.randn(EXPERTS, width))

    def forward(self, hidden, chosen, weights):
        result = torch.zeros_like(hidden)
        for expert in range(EXPERTS):
            token, place = torch.where(chosen == expert)
            a, b = self.halves(nn.functional.linear(hidden[token], self.up[expert], self.up_bias[expert]))
            y = nn.functional.linear(self.act(a) * b, self.down[expert], self.down_bias[expert]) * weights[token, place, None]
            result.index_add_(0, token, y.to(result.dtype))
        return result


class OneSided(Clamped):
    def halves(self, both):
        return both[..., ::2].clamp(max=self.limit), both[..., 1::2].clamp(max=self.limit)


class Twice(Clamped):
    def halves(self, both):
        a, b = super().halves(both)
        return a.clamp(max=self.limit / 2), b


class CutOff(Mixture):
    """As models that bound what a gate sees: no small value is above it."""

    def halves(self, both):
        a, b = super().halves(both)
        return a.clamp(max=50), b.clamp(-50, 50)


class Frozen(Mixture):
    """Gates that get no gradient."""

    def halves(self, both):
        a, b = super().halves(both)
        return a.detach(), b


class Bounded(Mixture):
    """Beyond what any value that is tried shows."""

    def halves(self, both):
        a, b = super().halves(both)
        return a.clamp(max=1e30), b


class Dropping(Mixture):
    def halves(self, both):
        return super().halves(nn.functional.dropout(both, 0.5, self.training))


class Capacity(Mixture):
    """Each expert takes the first tokens alone."""

    most = 8

    def forward(self, hidden, chosen, weights):
        result = torch.zeros_like(hidden)
        for expert in range(EXPERTS):
            token, place = self.first(*torch.where(chosen == expert))
            a, b = self.halves(nn.functional.linear(hidden[token], self.up[expert]))
            y = nn.functional.linear(self.act(a) * b, self.down[expert]) * weights[token, place, None]
            result.index_add_(0, token, y.to(result.dtype))
        return result

    def first(self, token, place):
        return token[: self.most], place[: self.most]


class Narrow(Capacity):
    def first(self, token, place):
        most = min(self.most, len(token))
        return token.narrow(0, 0, most), place.narrow(0, 0, most)


class ByDtype(Mixture):
    """Twice as much in what trainings use."""

    dtype = torch.float32

    def halves(self, both):
        a, b = super().halves(both)
        return a, 2 * b if both.dtype == self.dtype else b


class InHalf(ByDtype):
    dtype = torch.bfloat16


class InFloat16(ByDtype):
    dtype = torch.float16


class ManyAtMost(Capacity):
    """More than any are tried on: what is cut says it."""

    most = 1000


class InTraining(Mixture):
    def halves(self, both):
        a, b = super().halves(both)
        return a, 2 * b if self.training else b


class OtherFunction(Mixture):
    """Which is another value for what no experiment has."""

    def halves(self, both):
        a, b = super().halves(both)
        return a.nan_to_num(), b


class WithoutGradient(Mixture):
    def halves(self, both):
        a, b = super().halves(both)
        with torch.no_grad():
            a = a * 1
        return a, b


class OneMore(Mixture):
    """In another shape."""

    def forward(self, hidden, chosen, weights):
        return super().forward(hidden, chosen, weights)[None]


class ClampedResult(Clamped):
    """Beyond any value that is tried, by bounds that nobody named."""

    def forward(self, hidden, chosen=None, weights=None):
        return super().forward(hidden, chosen, weights).clamp(-6e4, 6e4)


@pytest.mark.parametrize(
    "make",
    [
        *(Capacity, Narrow, ManyAtMost, ByDtype, InHalf, InFloat16, InTraining),
        *(OtherFunction, WithoutGradient, OneMore, ClampedResult),
    ],
)
def test_experts_that_depend_on_how_many_or_of_which_dtype_stay(make):
    assert experts_of(make()) is None


@pytest.mark.parametrize("sentinel", [-1, EXPERTS])
def test_a_number_that_is_no_experts_adds_nothing(sentinel):
    model, (x, chosen, weights) = Mixture(), routed()
    chosen[0, 1] = chosen[3] = sentinel
    wanted = model(x, chosen, weights)
    wanted.square().sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    opfuse.fuse_(model, EXACT)
    found = model(x, chosen, weights)
    found.square().sum().backward()
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close([p.grad for p in model.parameters()], grads)


def routed(dtype=torch.float32):
    """Tokens, their experts, of which one gets none, and the weights."""
    chosen = torch.tensor([[0, 1], [1, 3], [4, 3], [1, 0], [3, 4], [0, 4]])
    return torch.randn(6, 32, dtype=dtype), chosen, torch.rand(6, 2, dtype=dtype)


def test_experts_with_an_activation_that_gates_nothing_here_stay(monkeypatch):
    monkeypatch.delitem(GATED, "silu")
    assert experts_of(Mixture()) is None


def test_experts_are_known_by_what_they_compute():
    found = experts_of(Mixture())
    assert (found.both, found.down, type(found.gate), found.sizes) == ("up", "down", SwiGLU, (EXPERTS, 32, 64))
    assert experts_of(Mixture().to("meta")) is not None
    assert experts_of(Interleaved()).gate.glu_interleave_size == 1
    assert experts_of(CutOff()) is None
    assert experts_of(Bounded()) is None
    assert experts_of(Frozen()) is None
    assert experts_of(Dropping().eval()) is None
    assert opfuse.fuse_(nn.ModuleList([CutOff(), nn.Linear(8, 8)]))["0"].status == "kept"


@pytest.mark.parametrize("make", [Clamped, InHalves, lambda: Clamped(width=64)])
def test_clamped_experts_are_known_with_their_numbers(make):
    model = make()
    found = experts_of(model)
    assert (found.transposed, found.biases) == (True, ("up_bias", "down_bias"))
    gate, size = found.gate, None if isinstance(model, InHalves) else 1
    assert (gate.limit, gate.alpha, gate.glu_linear_offset, gate.glu_interleave_size) == (0.5, 1.702, model.offset, size)


@pytest.mark.parametrize("make", [OneSided, Twice, *(lambda at=at: Clamped(limit=at) for at in (1e30, 2e3, 1e-3))])
def test_units_that_are_clamped_otherwise_or_where_no_value_tells_stay(make):
    assert experts_of(make()) is None


def test_an_activation_with_hooks_keeps_experts_as_they_are_and_so_does_another_one_later():
    model, given = Mixture(), routed()
    opfuse.fuse_(model, MXFP8BlockScaling())
    model.act = nn.ReLU()
    with pytest.warns(OpfuseWarning, match=r"has changed since fuse_: 'act' was SiLU\(\), is "):
        assert torch.equal(model(*given), Mixture.forward(model, *given))
    model = Mixture()
    model.act.register_forward_hook(lambda module, args, y: 2 * y)
    assert experts_of(model) is None


UNITS = {Mixture: "ScaledSwiGLU", Interleaved: "ScaledSwiGLU", OfGELU: "ScaledGEGLU", OfReLU: "ReGLU"}
UNITS |= {Biased: "SwiGLU"}
UNITS |= {Clamped: "ClampedSwiGLU", InHalves: "ClampedSwiGLU"}
"""What stands between the products; where it does not multiply by the weights, the sum behind them does."""


@pytest.mark.parametrize("make", UNITS)
def test_a_mixture_computes_the_same(make):
    """Bitwise without a recipe, and under one that casts nothing as exactly as fp64 sums allow."""
    model = make().double()
    x, chosen, weights = routed(torch.float64)

    def both():
        class Fixed(nn.Module):
            def __init__(self):
                super().__init__()
                self.model = model

            def forward(self, hidden, weights):
                return self.model(hidden, chosen, weights)

        return called(Fixed(), [x, weights])

    unit = UNITS[make]
    assert converted_exactly(model, both).fused == {"": f"TokenPermute → GroupedLinear → {unit} → GroupedLinear → TokenCombine"}


def test_autocast_leaves_fp64_alone():
    model = Mixture()
    x, chosen, weights = routed(torch.float64)
    opfuse.fuse_(model, MXFP8BlockScaling())
    model.double()
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(OpfuseWarning, match="ran in high precision"):
        y = model(x, chosen, weights)
    opfuse.unfuse_(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(y, model(x, chosen, weights))


def test_rows_of_an_expert_need_not_fill_blocks():
    model, recipe = Mixture(), MXFP8BlockScaling()
    x, chosen, weights = routed()
    plain = model(x, chosen, weights)
    opfuse.fuse_(model, recipe)
    with plans_used() as plans:
        y = model(x, chosen, weights=weights)
    assert plans[0].key.env.recipe == recipe
    assert 1e-3 < ((y - plain).norm() / plain.norm()).item() < 0.1
    y.sum().backward()
    assert model.up.grad[2].abs().sum() == 0
    assert model.up.grad[1].abs().sum() > 0


def test_sizes_are_asked_of_both_matrices():
    report = opfuse.fuse_(nn.ModuleList([Mixture(inner=40), nn.Linear(32, 32)]), MXFP8BlockScaling())
    assert "got 40 output features" in report["0"].why


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.experts, self.linear = nn.RMSNorm(32), Mixture(), nn.Linear(32, 32)

    def forward(self, hidden, chosen, weights):
        return self.linear(hidden) + self.experts(self.norm(hidden), chosen, weights)


def test_a_norm_before_experts_stays_what_it_is():
    model, given = Layer(), routed()
    plain = model(*given)
    assert opfuse.fuse_(model).of("joined") == ()
    with opfuse.autocast(recipe=EXACT):
        torch.testing.assert_close(model(*given), plain)


def test_gradients_of_tokens_are_sums_in_one_order():
    """In fp32, rounded once: nothing is added to memory that others add to."""
    model, (x, chosen, weights) = Mixture().bfloat16(), routed(torch.bfloat16)
    opfuse.fuse_(model)
    x.requires_grad_()
    rows = []  # of each token for one of its experts
    with opfuse.autocast(recipe=EXACT):
        y = model(x, chosen, weights)
        for place in range(chosen.shape[1]):
            alone = x.detach().clone().requires_grad_()
            model(alone, chosen[:, place : place + 1], weights[:, place : place + 1]).sum().backward()
            rows.append(alone.grad.float())
    made = made_by(lambda: y.sum().backward())
    assert not {"index_add", "index_add_", "index_put", "index_put_"} & {*made.names}
    assert torch.equal(x.grad, sum(rows).bfloat16())


def test_the_result_has_the_dtype_of_the_tokens_whatever_the_weights_have():
    model, (x, chosen, weights) = Mixture().bfloat16(), routed()
    opfuse.fuse_(model, EXACT)
    assert model(x.bfloat16(), chosen, weights).dtype is torch.bfloat16
    with pytest.raises(RuntimeError, match="same dtype"):
        model(x, chosen, weights)  # as without opfuse


@MAY_RUN_PLAIN
def test_tokens_that_are_a_transpose_keep_their_layout():
    """A forward that begins with ``zeros_like`` returns the layout of its tokens; rows with gaps give a result without any."""
    model, (x, chosen, weights) = Mixture(), routed()
    transposed, gaps = x.detach().t().contiguous().t(), torch.cat((x, x), 1).detach()[:, : x.shape[1]]
    plain = [model(each, chosen, weights) for each in (transposed, gaps)]
    opfuse.fuse_(model, EXACT)
    with plans_used() as plans:
        strides = [model(each, chosen, weights).stride() for each in (transposed, gaps)]
    assert strides == [each.stride() for each in plain]
    assert len(plans) == 1  # of the rows with gaps


def test_experts_that_are_spread_over_devices_stay():
    model = Mixture()
    model._is_expert_parallel = True
    assert experts_of(model) is None


def test_a_call_reads_the_fields_of_a_config_once_whatever_it_compares(monkeypatch):
    """Configs of transformers compute whatever is read of them, also their class."""

    class Config:
        def __init__(self):
            self.halves = 2

    class Configured(Mixture):
        def halves(self, both):
            return both.chunk(self.config.halves, -1)

    def counted(self, name):
        read.append(name)
        return object.__getattribute__(self, name)

    model, given, read = Configured(), routed(), []
    model.config = Config()
    opfuse.fuse_(model, MXFP8BlockScaling())
    monkeypatch.setattr(Config, "__getattribute__", counted)
    model(*given)
    assert read == ["__dict__"]
    model.config.halves = 2.0
    with pytest.warns(OpfuseWarning, match="'halves', 2.0"), pytest.raises(TypeError):
        model(*given)


class Tagged(torch.Tensor):
    """A tensor of another class, which its functions keep."""


OTHERWISE = {
    "more weights than choices": lambda x, chosen, weights: (x, chosen, torch.rand(6, 3)),
    "more tokens than choices": lambda x, chosen, weights: (torch.randn(9, 32), chosen, weights),
    "no choices": lambda x, chosen, weights: (x, chosen[:, :0], weights[:, :0]),
    "choices in floating point": lambda x, chosen, weights: (x, chosen.float(), weights),
    "whole weights": lambda x, chosen, weights: (x, chosen, torch.ones(6, 2, dtype=torch.long)),
    "tokens of another class": lambda x, chosen, weights: (x.as_subclass(Tagged), chosen, weights),
}


@MAY_RUN_PLAIN
@pytest.mark.parametrize("given", OTHERWISE.values(), ids=OTHERWISE)
def test_calls_that_nobody_tried_run_the_modules_own_forward(given):
    model = Mixture()
    given = given(*routed())
    wanted = model(*given)
    opfuse.fuse_(model, EXACT)
    with plans_used() as plans:
        found = model(*given)
    assert not plans
    assert type(found) is type(wanted)
    assert torch.equal(found, wanted)


def test_autocast_gives_tokens_and_matrices_one_dtype():
    model, (x, chosen, weights) = Mixture(), routed()
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model(x.bfloat16(), chosen, weights)
        opfuse.fuse_(model, EXACT)
        with plans_used() as plans:
            found = model(x.bfloat16(), chosen, weights)
    assert plans
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=2**-6, atol=2**-6)
