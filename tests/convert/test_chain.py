"""What is read from the trace of a forward: a chain of steps, or why it is none."""

from __future__ import annotations

import copy
import inspect
import operator
import random
from collections import deque

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from opfuse.convert.chain import chain_of
from opfuse.convert.code import NotRecorded
from opfuse.convert.forms import ACTIVATIONS, expression
from opfuse.convert.leaves import leaf_of, weight_of
from opfuse.convert.record import record
from tests.convert.blocks import GatedMLP, HalvesMLP, Residual, Transposed

X = torch.zeros(3, 8)


def expression_of(function):
    """The expression of a function of one tensor."""
    return expression(record(type("Made", (nn.Module,), {"forward": lambda self, x: function(x)})(), {"x": X}, training=True))


def activation_of(function):
    """The activation that a function is written as, if it is one."""
    try:
        return ACTIVATIONS.get(expression_of(function))
    except NotRecorded:
        return None


def activation_of_module(module):
    leaf = leaf_of(module)
    return None if leaf is None else leaf.name


def module(forward):
    """A module with two linear layers and the given forward."""
    made = type("Made", (nn.Module,), {"forward": forward})()
    made.a, made.b, made.act, made.seen = nn.Linear(8, 8), nn.Linear(8, 8), nn.SiLU(), []
    return made


CHAINS = {
    "calls": (lambda self, x: self.b(self.act(self.a(x))), [("call", "a"), ("call", "act"), ("call", "b")]),
    "functions": (
        lambda self, x: self.b(F.gelu(self.a(x), approximate="tanh")),
        [("call", "a"), ("apply", "gelu"), ("call", "b")],
    ),
    "methods": (lambda self, x: self.b(self.a(x).relu()), [("call", "a"), ("apply", "relu"), ("call", "b")]),
    "a formula": (lambda self, x: self.b(torch.sigmoid(x)), None),
    "a type": (lambda self, x: self.b(self.a(x)) if type(x) is torch.Tensor else x, [("call", "a"), ("call", "b")]),
    "another type": (lambda self, x: self.b(self.a(x)) if torch.is_tensor(x) else x, [("call", "a"), ("call", "b")]),
    "an option": (lambda self, x, y=None, **rest: self.b(self.a(x if y is None else y)), [("call", "a"), ("call", "b")]),
    "written in place": (
        lambda self, x: self.b(F.silu(self.a(x), inplace=True)),
        [("call", "a"), ("apply", "silu"), ("call", "b")],
    ),
    "gate": (lambda self, x: self.a(x) * F.silu(self.b(x)), [("gate", ("apply", "silu"), "b", "a")]),
    "sum": (lambda self, x, y: y + self.a(x), [("call", "a"), ("add", 0)]),
    "sum in place": (lambda self, x, y: self.a(x).add_(y), [("call", "a"), ("add", 0)]),
    "a look at a signature": (
        lambda self, x: self.b(self.a(x)) if len(inspect.signature(self.a.forward).parameters) == 1 else x,
        [("call", "a"), ("call", "b")],
    ),
    "an argument that nothing reads": (lambda self, x, y: self.a(x), [("call", "a")]),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_forward_is_read_as_a_chain(name):
    forward, steps = CHAINS[name]
    if steps is None:
        with pytest.raises(NotRecorded):
            chain_of(module(forward))
    else:
        assert list(chain_of(module(forward)).steps) == steps


def test_gated_units_and_residuals_of_models():
    gated = (("gate", ("call", "act_fn"), "gate_proj", "up_proj"), ("call", "down_proj"))
    assert chain_of(GatedMLP()).steps == gated
    assert chain_of(HalvesMLP()).steps == (("call", "gate_up"), ("gate", ("apply", "silu")), ("call", "down"))
    residual = chain_of(Residual())
    assert (residual.arguments, residual.widths) == (("hidden", "residual"), (32, 32))
    assert residual.steps == (("call", "dense"), ("add", 0), ("call", "norm"))


def dropping(self, x):
    return self.a(F.dropout(x, 0.1, self.training))


def noisy(self, x):
    return self.a(self.b(x) if self.training else x)


def doubled(self, x):
    y = self.a(x)
    return y + y


def without_gradients(self, x):
    with torch.no_grad():
        y = self.a(x)
    return self.b(y)


def under_autocast(self, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return self.b(self.a(x))


def listing(self, x):
    y = self.a(x)
    self.seen.append(y)
    return self.b(y)


def halves(a, b):
    return F.silu(a) * b


KEPT = []


def listing_elsewhere(self, x):
    y = self.a(x)
    KEPT.append(y)
    return self.b(y)


REFUSED = {
    "many": (lambda self, x, y, z: self.a(x), "one with 3: x, y, z"),
    "control flow": (lambda self, x: self.a(x) if x.sum() > 0 else x, "the call of sum"),
    "a comparison": (lambda self, x: self.a(x) if x[0, 0, 0] > 0 else x, "the call of gt"),
    "a size that decides": (lambda self, x: self.a(x) if x.shape[0] == 1 else x, "a size that the forward compares"),
    "a number of dimensions": (lambda self, x: self.a(x) if x.dim() > 2 else x, "a size that the forward compares"),
    "whether there are rows": (lambda self, x: self.a(x) if x.shape[0] else x, "a size that the forward compares"),
    "a lot that hits seldom": (
        lambda self, x: self.a(x) if random.random() >= 0 else x,
        "which also reads random.random (the function random)",
    ),
    "a size that is calculated with": (lambda self, x: self.a(x) if x.numel() else x, "the call of numel"),
    "a device": (lambda self, x: self.a(x) if x.is_cuda else self.b(x), "the call of is_cuda"),
    "whether a gradient is wanted": (lambda self, x: self.a(x) if x.requires_grad else x, "the call of requires_grad"),
    "a mode": (lambda self, x: self.a(x) if torch.is_grad_enabled() else self.b(x), "another chain in "),
    "inference mode": (
        lambda self, x: self.a(x) if torch.is_inference_mode_enabled() else self.b(x),
        "another chain",
    ),
    "a write to its argument": (
        lambda self, x: self.a(F.silu(x, inplace=True)),
        "a write to a tensor that the forward did not make",
    ),
    "a sum in its argument": (lambda self, x, y: self.a(x.add_(y)), "a write to a tensor that"),
    "training": (noisy, "another chain in evaluation"),
    "a dropout as a function": (dropping, "the call of dropout"),
    "read twice": (lambda self, x: self.a(x) + self.b(x), "a(x) + b(x)"),
    "read thrice": (lambda self, x: self.a(x) * self.a(x) * self.b(x), "a(x) * a(x) * b(x)"),
    "two results": (lambda self, x: (self.a(x), x), "a tuple as its result"),
    "beside": (lambda self, x: (self.zeros(), self.a(x))[1], "AttributeError"),
    "a shape": (lambda self, x: self.a(x).reshape(-1), "the call of reshape"),
    "its own parameter": (lambda self, x: self.a(x) * self.a.weight[0], "the call of __getitem__"),
    "its own sum": (doubled, "a(x) + a(x)"),
    "another submodule beside": (lambda self, x, y: (self.b(y), self.a(x))[1], "the submodule b beside it"),
    "a multiple of a residual": (lambda self, x, y: torch.add(self.a(x), y, alpha=2), "the call of add"),
    "halves of the rows": (lambda self, x: halves(*self.a(x).chunk(2, 1)), "the call of chunk"),
    "two of four parts": (lambda self, x: halves(*self.a(x).chunk(4, -1)[:2]), "the call of chunk"),
    "no gradients for a part": (without_gradients, "a block of other gradients or casts"),
    "autocast for a part": (under_autocast, "a block of other gradients or casts"),
    "what it lists": (listing, "listing, which also reads the attribute seen (a list)"),
    "what it lists elsewhere": (listing_elsewhere, "listing_elsewhere, which also reads KEPT (a list)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_chain_says_what_was_met(name):
    forward, met = REFUSED[name]
    with pytest.raises(NotRecorded) as told:
        chain_of(module(forward))
    assert met in told.value.got
    assert told.value.wanted


class Deep(nn.Module):
    """Residual steps in one forward: what is written out doubles with each."""

    def __init__(self, count):
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))

    def forward(self, x):
        for step in self.steps:
            x = x + step(x)
        return x


def test_residual_steps_in_one_forward_are_no_chain():
    with pytest.raises(NotRecorded) as told:
        chain_of(Deep(2))
    assert told.value.got == "steps.0(x) + steps.1(steps.0(…) + x) + x"
    with pytest.raises(NotRecorded, match="a formula of more than 10000 parts"):
        chain_of(Deep(100))


@pytest.mark.parametrize("value", [lambda x, count: x, lambda x, count: count + 1], ids=["a value", "a count"])
def test_a_forward_that_keeps_something_is_no_chain_and_that_is_taken_back(value):
    def keeping(self, x):
        self.kept = value(x, self.kept)
        return self.a(x)

    made = module(keeping)
    made.kept = 0
    before = dict(vars(made))
    with pytest.raises(NotRecorded, match=r"writes to an attribute \(kept\)"):
        chain_of(made)
    assert vars(made) == before


WRITES = {
    "a list": ("log", [], lambda self: self.log.append(1)),
    "a part of a list": ("log", [1], lambda self: self.log.__setitem__(0, 2)),
    "a count by name": ("log", {"calls": 7}, lambda self: self.log.update(calls=self.log["calls"] + 1)),
    "a list in a dictionary": ("log", {"rows": [1]}, lambda self: self.log["rows"].append(2)),
    "a set": ("log", set(), lambda self: self.log.add(1)),
    "a queue": ("log", deque([1], maxlen=1), lambda self: self.log.append(2)),
    "a buffer": ("log", torch.zeros(2), lambda self: self.log.add_(1)),
    "an attribute of a submodule": ("a", None, lambda self: setattr(self.a, "calls", 1)),
    "a list of a submodule": ("a.log", [], lambda self: self.a.log.append(1)),
}
"""The name of an attribute, its value, and what a forward writes to it."""


@pytest.mark.parametrize("name", WRITES)
def test_a_forward_that_writes_to_what_it_has_is_no_chain_and_writes_nothing(name):
    """What only its forward keeps, such as a count, would stand still once that does not run."""
    path, value, write = WRITES[name]

    def writing(self, x):
        write(self)
        return self.a(x)

    made = module(writing)
    if isinstance(value, torch.Tensor):
        made.register_buffer(path, value.clone())
    elif value is not None:
        holder, _, last = path.rpartition(".")
        setattr(made.get_submodule(holder), last, copy.deepcopy(value))
    before = [[*vars(part)] for part in made.modules()]
    of_tensor = "a write to a tensor that the forward did not make"
    with pytest.raises(
        NotRecorded, match=of_tensor if name == "a buffer" else r"which also reads (the attribute log \(a|setattr')"
    ):
        chain_of(made)
    assert [[*vars(part)] for part in made.modules()] == before
    if value is not None:
        kept = operator.attrgetter(path)(made)
        assert torch.equal(kept, value) if isinstance(value, torch.Tensor) else kept == value


@pytest.mark.parametrize("name", [name for name, (path, value, _) in WRITES.items() if path == "log" and name != "a buffer"])
def test_an_activation_that_writes_to_what_it_has_stays(name):
    _, value, write = WRITES[name]

    class Writing(nn.Module):
        def forward(self, x):
            write(self)
            return F.gelu(x)

    made = Writing()
    made.log = copy.deepcopy(value)
    assert activation_of_module(made) is None
    assert made.log == value


def formula(x):
    return 0.5 * x * (1.0 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def doubled_through_a_view(x):
    y = F.silu(x)
    y.view(y.shape).mul_(2)
    return y


def test_activations_are_known_by_their_formulas():
    assert activation_of(formula) == "gelu"
    assert activation_of(lambda x: x * torch.sigmoid(1.702 * x)) == "qgelu"
    assert activation_of(lambda x: F.relu(x).square()) == "srelu"
    assert activation_of(lambda x: x[:3]) is None
    assert activation_of(lambda x: F.silu(x) + 1e-12) is None
    assert activation_of(lambda x: torch.nan_to_num(F.silu(x))) is None
    assert activation_of(lambda x: F.relu(x).clamp(max=65504)) is None
    assert activation_of(lambda x: (x.sqrt() * x.sqrt()) * torch.sigmoid(x)) is None
    assert activation_of(lambda x: x / torch.exp(-x).add_(1)) == "silu"
    assert activation_of(lambda x: F.silu(x.bfloat16()).float()) is None
    assert activation_of(doubled_through_a_view) is None
    assert activation_of(lambda x: x * torch.sigmoid(1.7 * x)) is None
    assert activation_of(F.mish) is None
    assert activation_of(lambda x: 1 / 0) is None
    assert activation_of_module(nn.ReLU(inplace=True)) == "relu"
    assert activation_of_module(Widened()) is None
    assert activation_of_module(nn.PReLU()) is None
    assert activation_of_module(nn.Softmax(-1)) is None


class Widened(nn.SiLU):
    """Returns fp32 for any input."""

    def forward(self, x):
        return super().forward(x).float()


def test_what_is_subtracted_from_what_is_told_apart():
    minus = expression_of(lambda x: x - 2)
    assert expression_of(lambda x: -2 + x) == minus
    assert expression_of(lambda x: 2 - x) == expression_of(lambda x: -x + 2) == expression_of(lambda x: torch.rsub(x, 2)) != minus


class Counting(nn.ReLU):
    """Keeps a count."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def straight_through(x):
    """The values of ReLU and the gradient of SiLU."""
    return F.relu(x).detach() + F.silu(x) - F.silu(x).detach()


def test_an_activation_has_the_gradient_of_its_op_and_leaves_nothing_behind():
    assert activation_of(straight_through) is None
    assert activation_of(torch.no_grad()(F.gelu)) is None
    assert activation_of_module(Counting()) is None


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Renamed(nn.Linear):
    """Computes what nn.Linear does."""


def test_products_are_known_by_what_they_compute():
    assert weight_of(Renamed(4, 8)).in_features == 4
    assert weight_of(Scaled(4, 8)) is None
    assert weight_of(nn.Embedding(4, 8)) is None
    found = weight_of(Transposed(8, 4))
    assert (found.in_features, found.out_features, found.transposed) == (4, 8, True)


def product_of(x, self):
    return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)


ADDMM = {
    "views by shape": (lambda self, x: product_of(x, self).view(*x.shape[:-1], 8), True),
    "sizes that are added": (lambda self, x: product_of(x, self).view(x.size()[:-1] + (8,)), True),
    "a factor": (lambda self, x: torch.addmm(self.bias, x.view(-1, 8), self.weight, alpha=0.5).view(x.size()), False),
    "part of the bias": (lambda self, x: torch.addmm(self.bias, x.view(-1, 8), self.weight, beta=0.5).view(x.size()), False),
    "a number behind it": (lambda self, x: product_of(x, self).view(x.size()) + 1, False),
    "a number before it": (lambda self, x: product_of(x + 1, self).view(x.size()), False),
    "a residual": (lambda self, x: product_of(x, self).view(x.size()) + x, False),
    "a transpose": (lambda self, x: product_of(x, self).view(x.size()).mT, False),
    "rows that stay together": (lambda self, x: product_of(x, self), False),
    "the weight first": (lambda self, x: torch.addmm(self.bias, self.weight, x.view(8, 8)), False),
    "a part of the columns": (lambda self, x: product_of(x, self).view(x.size())[..., :4], False),
    "a matrix as it is": (lambda self, x: torch.addmm(self.bias, x, self.weight), False),
    "a product and a sum": (lambda self, x: x @ self.weight + self.bias, True),
    "a transposed matrix": (lambda self, x: x @ self.weight.T + self.bias, True),
    "a multiple of the bias": (lambda self, x: torch.add(x @ self.weight, self.bias, alpha=2), False),
    "a matrix turned by numbers": (lambda self, x: x @ self.weight.transpose(-1, 0) + self.bias, True),
    "a matrix turned by a tuple": (lambda self, x: x @ self.weight.permute((1, 0)) + self.bias, True),
    "a matrix that is named": (
        lambda self, x: x @ torch.transpose(input=self.weight, dim0=0, dim1=1) + torch.reshape(input=self.bias, shape=(8,)),
        True,
    ),
    "a matrix turned by names": (lambda self, x: x @ self.weight.transpose(dim0=0, dim1=1) + self.bias, True),
    "a matrix that stays by numbers": (lambda self, x: x @ self.weight.permute(0, 1) + self.bias, False),
    "a matrix that stays by a tuple": (lambda self, x: x @ self.weight.permute((0, 1)) + self.bias, False),
    "a matrix that stays by names": (lambda self, x: x @ self.weight.transpose(dim0=1, dim1=1) + self.bias, False),
    "a matrix that is transposed back": (lambda self, x: x @ self.weight.T.T + self.bias, False),
}


@pytest.mark.parametrize("name", ADDMM)
def test_a_product_of_ones_own_is_nothing_but_that(name):
    """What stands beside the product would be lost."""
    forward, is_product = ADDMM[name]
    made = type("Made", (Transposed,), {"forward": forward})(8, 8)
    assert (weight_of(made) is not None) == is_product
    for mode in (True, False):
        doubling = {"forward": lambda self, x, mode=mode: forward(self, 2 * x if self.training is mode else x)}
        assert weight_of(type("Made", (Transposed,), doubling)(8, 8).eval()) is None


CUT_OFF = {
    "ReLU up to 20": lambda x: F.hardtanh(x, 0, 20),
    "SiLU of at most 16": lambda x: F.silu(x.clamp(max=16)),
    "GELU from -100": lambda x: F.gelu(x).masked_fill(x < -100, 1.0),
}


@pytest.mark.parametrize("name", CUT_OFF)
def test_an_activation_that_is_cut_off_far_out_is_another(name):
    assert activation_of(CUT_OFF[name]) is None
