"""A forward that would do something else for another number of rows, or in a mode nobody tried, is left to itself."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import opfuse
from tests.convert.test_fuse import EXACT

pytestmark = pytest.mark.cpu
ROWS = 150
"""More than any forward is tried on."""


class Sized(nn.Module):
    """A block; its classes choose the activation."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)


def _by(choose):
    """A class whose forward takes relu or silu by what ``choose`` says of the rows."""

    class Chosen(Sized):
        def forward(self, x):
            y = self.a(x)
            return self.b(F.silu(y) if choose(x.shape[0]) else F.relu(y))

    return Chosen


def by_list(n):
    return [0, 1][n // 100]


def caught(n):
    try:
        return n.bit_length() < 8
    except AttributeError:
        return True


CHOICES = {
    "a float on the left": lambda n: 100.0 < n,  # noqa: SIM300
    "a float": lambda n: n > 100.0,
    "an int on the left": lambda n: 100 < n,  # noqa: SIM300
    "a float product": lambda n: 0.5 * n > 50,
    "a float quotient": lambda n: 1.0 / n < 0.01,
    "a float sum": lambda n: 0.0 + n > 100,
    "real": lambda n: n.real > 100,
    "numerator": lambda n: n.numerator > 100,
    "index": lambda n: n.__index__() > 100,
    "an index of a list": by_list,
    "a quotient": lambda n: n // 100 == 1,
    "a rest": lambda n: n % 100 < n,
    "a range": lambda n: len(range(n)) > 100,
    "isqrt": lambda n: math.isqrt(n) > 10,
    "gcd": lambda n: math.gcd(n, 150) > 100,
    "ceil": lambda n: math.ceil(n / 100.0) > 1,
    "int": lambda n: int(n) > 100,
    "a type": lambda n: not isinstance(n, int) or n + 0 > 100,
    "text": lambda n: len(str(n)) > 2,
    "hash": lambda n: hash(n) > 100,
    "bool": lambda n: bool(n // 100),
    "a power": lambda n: n**2 > 10000,
    "max": lambda n: max(n, 100) > 100,
    "membership": lambda n: n in {ROWS},
    "an error that is caught": caught,
    "an attribute": lambda n: not hasattr(n, "bit_length"),
}


def _by_all(choose):
    class ByAll(Sized):
        def forward(self, x):
            y = self.a(x)
            return self.b(F.relu(y) if choose(x) else F.silu(y))

    return ByAll


OF_SHAPES = {
    "a class": lambda x: isinstance(x.shape, torch.Size),
    "a type": lambda x: type(x.shape[-1]) is int,
    "a symbol": lambda x: not isinstance(x.size(0), torch.SymInt),
    "a number of values": lambda x: x.shape.numel() > 0,
    "the rank without gradients": lambda x: len(x.shape) == 2 and not torch.is_grad_enabled(),
    "the truth of a part": lambda x: not (x.shape[1:-1] or torch.is_grad_enabled()),
    "an equal shape": lambda x: x.shape == (ROWS, 8),
    "a shape that contains": lambda x: ROWS in x.shape,
}


@pytest.mark.parametrize("name", OF_SHAPES)
def test_no_choice_by_a_shape_is_taken_for_the_one_that_was_tried(name):
    plain = _by_all(OF_SHAPES[name])()
    model, x = copy.deepcopy(plain), torch.randn(ROWS, 8)
    opfuse.fuse_(model, EXACT)
    for around in (torch.enable_grad, torch.no_grad):
        with around():
            torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize("name", CHOICES)
def test_no_choice_by_a_size_is_taken_for_the_one_that_was_tried(name):
    plain = _by(CHOICES[name])()
    model, x = copy.deepcopy(plain), torch.randn(ROWS, 8)
    report = opfuse.fuse_(model, EXACT)
    assert report.fused == {"a": "Linear", "b": "Linear"}
    torch.testing.assert_close(model(x), plain(x))


class Picked(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts, self.b = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]), nn.Linear(8, 8)

    def forward(self, x):
        return self.b(F.relu(self.parts[x.shape[0] // 100](x)))


class Factor(nn.Module):
    """An activation with a factor that is 1 for few rows."""

    def forward(self, x):
        return F.gelu(x) * (x.shape[0] // 100 + 1)


class Steps(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight, self.bias) * (x.shape[0] // 100 + 1)


class Powers(nn.Linear):
    def forward(self, x):
        n = x.shape[0]
        return F.linear(x, self.weight, self.bias) * ((n - 1) * (n - 2) * (n - 5) + 1)


class Parts(nn.Module):
    """Halves of columns that move with the rows."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x):
        y, at = self.a(x), x.shape[0] // 100
        return self.b(F.silu(y[..., at : 8 + at]) * y[..., 8 - at : 16 - at])


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1024))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight * (x.shape[0] // 100 + 1)


@pytest.mark.parametrize(
    "make", [Picked, lambda: nn.Sequential(nn.Linear(8, 8), Factor(), nn.Linear(8, 8)), Steps, Powers, Parts]
)
def test_what_is_calculated_from_a_size_is_no_constant(make):
    plain = make() if make not in {Steps, Powers} else nn.Sequential(make(8, 8), nn.Linear(8, 8))
    model, x = copy.deepcopy(plain), torch.randn(ROWS, 8)
    opfuse.fuse_(model, EXACT)
    torch.testing.assert_close(model(x), plain(x))


def test_a_norm_with_a_factor_by_size_is_left_alone():
    plain = nn.Sequential(Normed(), nn.Linear(1024, 16))
    model, x = copy.deepcopy(plain), torch.randn(ROWS, 1024)
    assert "0" not in opfuse.fuse_(model, EXACT).fused
    torch.testing.assert_close(model(x), plain(x))


class Words(nn.Linear):
    """Sizes as GPT-2's layer has them."""

    def forward(self, x):
        size = (*x.size()[:-1], self.out_features)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight.t()).view(size)


def test_sizes_of_views_stay_one_pipeline():
    plain = nn.Sequential(Words(8, 16), nn.GELU(), nn.Linear(16, 8))
    model, x = copy.deepcopy(plain), torch.randn(3, ROWS, 8)
    assert opfuse.fuse_(model, EXACT).fused == {"": "Linear → GELUErf → Linear"}
    torch.testing.assert_close(model(x), plain(x))


# -- modes -----------------------------------------------------------------------------------------------------------------------


class InMode(Sized):
    """Takes silu in a mode that ``asks`` knows of."""

    def forward(self, x):
        y = self.a(x)
        return self.b(F.silu(y) if self.asks() else F.relu(y))


class TrainsInInference(InMode):
    def asks(self):
        return self.training and torch.is_inference_mode_enabled()


class OtherAutocast(InMode):
    def asks(self):
        return torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.float16


class OfCuda(InMode):
    def asks(self):
        return torch.is_autocast_enabled("cuda")


class ByDefault(InMode):
    def asks(self):
        return torch.get_default_dtype() == torch.bfloat16


class default_dtype:
    def __enter__(self):
        torch.set_default_dtype(torch.bfloat16)

    def __exit__(self, *_):
        torch.set_default_dtype(torch.float32)


AROUND = {
    TrainsInInference: torch.inference_mode,
    OtherAutocast: lambda: torch.autocast("cpu", torch.float16),
    OfCuda: lambda: torch.autocast("cuda", torch.bfloat16),
    ByDefault: default_dtype,
}


@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")
@pytest.mark.parametrize("make", AROUND)
def test_a_mode_that_was_not_tried_is_the_forward_of_the_module(make):
    plain = make()
    model, x = copy.deepcopy(plain), torch.randn(4, 8)
    opfuse.fuse_(model, EXACT)
    with AROUND[make]():
        torch.testing.assert_close(model(x), plain(x), rtol=2**-8, atol=2**-8)


def test_a_tag_of_a_further_argument_is_seen():
    class Tagged(Sized):
        def forward(self, x, r):
            try:
                r.flag  # noqa: B018
            except AttributeError:
                return self.b(F.relu(self.a(x))) + r
            return self.a(x)

    plain = Tagged()
    model, x, r = copy.deepcopy(plain), torch.randn(4, 8), torch.randn(4, 8)
    assert opfuse.fuse_(model, EXACT).fused
    torch.testing.assert_close(model(x, r), plain(x, r))
    r.flag = 1
    torch.testing.assert_close(model(x, r), plain(x, r))


class Doubled(nn.Parameter):
    """Doubles a product."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        y = super().__torch_function__(function, types, args, kwargs or {})
        return y * 2 if function is F.linear else y


def test_a_graph_asks_for_the_parameters_of_a_lone_layer():
    """It has what torch's graph of the plain module has; before 2.12 torch leaves out what such a parameter does."""
    plain, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
    model = copy.deepcopy(plain)
    opfuse.fuse_(model, EXACT)
    for each in (plain, model):
        each[0].weight = Doubled(each[0].weight.data)
    torch._dynamo.reset()
    wanted = torch.compile(plain, backend="eager")(x)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="eager")(x), wanted)
    other = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    opfuse.fuse_(other, EXACT)
    other[0].bfloat16()
    with pytest.raises(Exception, match="same dtype"):
        torch.compile(other, backend="eager")(x)
