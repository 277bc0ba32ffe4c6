"""Of modules that are alike, one is read; one that differs in anything that its forward reads is read by itself."""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn

import opfuse
from opfuse.convert.converted import converted
from opfuse.convert.leaves import likeness
from opfuse.recipes import Float8CurrentScaling
from tests.convert.test_experts import Mixture
from tests.convert.test_fuse import called, converted_exactly
from tests.convert.test_norms import Attention, any_width  # noqa: F401 - a fixture


class Config:
    """What a norm may read, and no constant is."""

    def __init__(self, eps):
        self.eps = eps


class Norm(nn.Module):
    """An RMS norm that reads its eps of an object."""

    def __init__(self, width=32, eps=1e-6, shift=0.0, powers=(2, -1)):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.config, self.shift, self.powers = Config(eps), shift, powers

    def forward(self, hidden):
        power, axis = self.powers
        x = hidden.float() if hidden.dtype != torch.float64 else hidden
        x = x * torch.rsqrt(x.pow(power).mean(axis, keepdim=True) + self.config.eps)
        weight = self.weight if self.shift == 0.0 else self.shift + self.weight
        return weight * x.to(hidden.dtype)


class Mixtures(nn.Sequential):
    def forward(self, x):
        for experts in self:
            x = x + experts(x, torch.zeros(len(x), 2, dtype=torch.int64), torch.ones(len(x), 2, dtype=x.dtype))
        return x


def runs_of(model):
    """How often each forward runs while the model is converted."""
    found = Counter()

    def seen(frame, event, _):
        if event == "call" and frame.f_code.co_name == "forward":
            found[frame.f_code.co_qualname] += 1

    sys.setprofile(seen)
    try:
        opfuse.fuse_(model, Float8CurrentScaling())
    finally:
        sys.setprofile(None)
    return found


MODELS = {
    "Mixture": lambda count: Mixtures(*[Mixture() for _ in range(count)]),
    "WrittenNorm": lambda count: nn.Sequential(*[Attention() for _ in range(count)]),
}


@pytest.mark.parametrize("name", MODELS)
def test_one_of_many_that_are_alike_is_read(name):
    """The others run no more than once, where the module around them is read."""
    one, six = (runs_of(MODELS[name](count))[f"{name}.forward"] for count in (1, 6))
    assert 10 < one <= six <= one + 5


OTHERS = {
    "a number": ({"shift": 1.0}, True),
    "a number in a tuple": ({"powers": (4, -1)}, False),
    "a field of an object": ({"eps": 0.5}, True),
    "nothing": ({}, True),
}
"""Fields of the other norm, and whether it is an RMS norm."""


@pytest.mark.parametrize("name", OTHERS)
def test_one_that_differs_is_read_by_itself(name):
    fields, known = OTHERS[name]
    model = nn.Sequential(*[Attention(norm=partial(Norm, **each)) for each in ({}, fields)]).double()
    x = [torch.randn(4, 8, 32, dtype=torch.float64)]
    report = converted_exactly(model, lambda: called(model, x))
    assert [report[f"{i}.norm"].became for i in range(2)] == ["RMSNorm", "RMSNorm" if known else ""]


def test_experts_of_other_units_are_read_by_themselves():
    torch.manual_seed(0)
    other = Mixture()
    other.act = nn.GELU(approximate="tanh")
    model = Mixtures(Mixture(), other, Mixture())
    report = opfuse.fuse_(model, Float8CurrentScaling())
    assert ["GEGLU" in report[str(i)].became for i in range(3)] == [False, True, False]
    gates = [next(op for _, op in converted(model[i]).named_ops() if "GLU" in type(op).__name__) for i in (0, 2)]
    assert gates[0] is not gates[1]


def test_what_is_alike():
    config = Config(1e-6)

    def norm(**fields):
        made = Norm()
        vars(made).update({"config": config, **fields})
        return made

    one = likeness(norm())
    assert one == likeness(norm()) == likeness(norm(powers=(2, -1)))
    for fields in (
        {"shift": 0},
        {"powers": (2, -1.0)},
        {"powers": [2, -1]},
        {"config": Config(1e-6)},
        {"training": False},
        {"a": 1},
    ):
        assert likeness(norm(**fields)) != one, fields
    assert likeness(norm(shift=-0.0)) != one
    changes = (
        lambda norm: norm.half(),
        lambda norm: norm.requires_grad_(False),
        lambda norm: norm.add_module("part", None),
        lambda norm: norm.register_parameter("bias", None),
        lambda norm: norm.register_forward_hook(lambda *_: None),
        lambda norm: norm.register_buffer("places", torch.ones(1)),
    )
    for change in changes:
        changed = norm()
        change(changed)
        assert likeness(changed) != one
