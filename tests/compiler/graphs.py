"""Random graphs: a pipeline, what it computes in plain torch, and what a call gives it, all by one seed.

A graph has residuals by channels, extra inputs and outputs of the caller, ops that stand in it two or three times, pipelines and
plain modules between its ops, views that change the leading dimensions, and parameters that are frozen. Its formula is that of
``tests.ops.op_cases``, which shares no code with opfuse, under torch's autograd.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import nn

from opfuse import ops
from opfuse.core.context import Context
from tests.compiler.harness import generator_of
from tests.ops import op_cases as plain

Params = dict[int, torch.Tensor]
"""Parameters of a formula, by the identity of those of the model."""


@dataclass
class State:
    """A formula under way: the value, extra inputs that are left, extra outputs so far, values by channel."""

    value: torch.Tensor
    params: Params
    given: Iterator[torch.Tensor]
    outputs: list[torch.Tensor] = field(default_factory=list)
    channels: dict[str, torch.Tensor] = field(default_factory=dict)


Step = Callable[[State], None]
Channel = tuple[Any, ...]
"""A name, and the shape of the value."""


@dataclass
class Graph:
    """A model, its formula and its inputs. silent: places of outputs that get no gradient."""

    model: ops.Sequential
    steps: list[Step]
    x: torch.Tensor
    extras: list[torch.Tensor]
    input_grad: bool
    silent: frozenset[int]

    def formula(self, x: torch.Tensor, params: Params, *extras: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Output and extra outputs of the model, by torch alone."""
        state = State(x, params, iter(extras))
        for step in self.steps:
            step(state)
        return (state.value, *state.outputs)


def unary(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    return lambda op, params, x: function(x)


def linear(op: nn.Module, params: Params, x: torch.Tensor) -> torch.Tensor:
    y = x @ params[id(op.weight)].T
    return y if op.bias is None else y + params[id(op.bias)]


def by_name(formula: Callable) -> Callable:
    """A formula of ``op_cases``, which takes parameters by their name."""
    return lambda op, params, x: formula(x, {name: params[id(p)] for name, p in op.named_parameters()}, ())


def l2_norm(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x**2).sum(-1, keepdim=True) + 1e-6)


def dropout(x: torch.Tensor) -> torch.Tensor:
    """The op draws its mask from torch's generator when it runs; so does this."""
    return torch.where(torch.rand(x.shape, dtype=torch.float32) >= 0.25, x / 0.75, 0.0)


SAME: dict[str, tuple[Callable[[int], nn.Module], Callable]] = {
    "linear": (lambda n: ops.Linear(n, n), linear),
    "linear without bias": (lambda n: ops.Linear(n, n, bias=False), linear),
    "bias": (ops.Bias, lambda op, params, x: x + params[id(op.bias)]),
    "rms norm": (ops.RMSNorm, by_name(plain.rms_norm)),
    "layer norm": (ops.LayerNorm, by_name(plain.layer_norm)),
    "l2 norm": (lambda _: ops.L2Normalization(), unary(l2_norm)),
    "gelu": (lambda _: ops.GELU(), unary(plain.gelu)),
    "gelu erf": (lambda _: ops.GELUErf(), unary(plain.gelu_erf)),
    "qgelu": (lambda _: ops.QGELU(), unary(plain.qgelu)),
    "relu": (lambda _: ops.ReLU(), unary(torch.relu)),
    "squared relu": (lambda _: ops.SReLU(), unary(plain.srelu)),
    "silu": (lambda _: ops.SiLU(), unary(nn.functional.silu)),
    "scale": (lambda _: ops.ConstantScale(0.6), unary(lambda x: 0.6 * x)),
    "dropout": (lambda _: ops.Dropout(0.25), unary(dropout)),
    "identity": (lambda _: ops.Identity(), unary(lambda x: x)),
    "tanh": (lambda _: nn.Tanh(), unary(torch.tanh)),
}
"""Ops that keep the shape, and a module that no pipeline takes in."""


class Turned(ops.BasicOperation):
    """Its first and last leading dimensions change places: a view that a user wrote, and that is not contiguous."""

    traits = frozenset(("view",))
    saves = ()

    def op_forward(self, ctx: Context, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, -2)

    def op_backward(self, ctx: Context, dy: torch.Tensor) -> tuple:
        return dy.transpose(0, -2), ()


Rows = Callable[[tuple[int, ...]], tuple[int, ...]]
VIEWS: dict[str, tuple[Callable[[int], nn.Module], Callable, Rows]] = {
    "flat": (lambda n: ops.Reshape((-1, n)), unary(lambda x: x.reshape(-1, x.shape[-1])), lambda rows: (prod(rows),)),
    "folded": (
        lambda n: ops.Reshape((2, -1, n)),
        unary(lambda x: x.reshape(2, -1, x.shape[-1])),
        lambda rows: (2, prod(rows) // 2),
    ),
    "turned": (
        lambda _: Turned(),
        unary(lambda x: x.transpose(0, -2)),
        lambda rows: (rows[-1], *rows[1:-1], rows[0])[: len(rows)],
    ),
}
"""Views, and the leading dimensions of what they make."""


class OwnScale(ops.BasicOperation):
    """1.5 times its input; the methods are a user's."""

    def op_forward(self, ctx: Context, x: torch.Tensor) -> torch.Tensor:
        return 1.5 * x

    def op_backward(self, ctx: Context, dy: torch.Tensor) -> tuple:
        return 1.5 * dy, ()


class OwnGELU(ops.GELU):
    """The library's method, called by a user's."""

    def op_forward(self, ctx: Context, x: torch.Tensor, **given: object) -> torch.Tensor:
        return super().op_forward(ctx, x, **given)


class OwnView(ops.BasicOperation):
    """Its input, seen anew."""

    def op_forward(self, ctx: Context, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1).view(x.shape)

    def op_backward(self, ctx: Context, dy: torch.Tensor) -> tuple:
        return dy.view_as(dy), ()


class OwnProduct(ops.BasicLinear):
    """A product between casts of the library; the methods are a user's."""

    roles = ("input", "weight", "grad_output")

    def op_forward(self, ctx: Context, x: torch.Tensor, **_: object) -> torch.Tensor:
        return super().op_forward(ctx, x)

    def op_backward(self, ctx: Context, dy: torch.Tensor) -> tuple:
        return super().op_backward(ctx, dy)


OWN: dict[str, tuple[Callable[[int], nn.Module], Callable]] = {
    "own scale": (lambda _: OwnScale(), unary(lambda x: 1.5 * x)),
    "own view": (lambda _: OwnView(), unary(lambda x: x)),
    "own product": (lambda n: OwnProduct(n, n), lambda op, params, x: x @ params[id(op.weight)].T),
    "own gelu": (lambda _: OwnGELU(), unary(plain.gelu)),
}
"""Ops with methods of a user's own, for graphs that are to have them."""
WIDER = (lambda n: ops.Linear(n, 2 * n), linear)
NARROWER: dict[str, tuple[Callable[[int], nn.Module], Callable]] = {
    "linear": (lambda n: ops.Linear(n, n // 2), linear),
    "swiglu": (lambda _: ops.SwiGLU(), unary(lambda x: plain.glu(nn.functional.silu)(x, {}, ()))),
    "geglu": (lambda _: ops.GEGLU(), unary(lambda x: plain.glu(plain.gelu)(x, {}, ()))),
    "interleaved": (lambda _: ops.SwiGLU(glu_interleave_size=4), unary(lambda x: plain.glu(nn.functional.silu, 4)(x, {}, ()))),
    "clamped": (lambda _: ops.ClampedSwiGLU(), unary(lambda x: plain.pair(plain.clamped, 7.0, 1.702, 1.0)(x, {}, ()))),
}


class Builder:
    """Puts a random graph together; the same seed gives the same one, parameter for parameter."""

    def __init__(self, seed: int, *, unit: int, rows: tuple[int, ...], dtype: torch.dtype, more: Mapping[str, Any]):
        self.same = [*SAME.values(), *VIEWS.values(), *3 * [*more.values()]]
        self.random, self.values = random.Random(seed), generator_of(seed)
        self.unit, self.rows, self.dtype = unit, rows, dtype
        self.width, self.extras = unit, []  # type: ignore[var-annotated]
        self.known: list[tuple[int, int, Rows, nn.Module, Step]] = []
        self.uses: dict[int, int] = {}
        self.names = 0

    def graph(self) -> Graph:
        if self.random.random() < 0.4:
            self.rows = (2, *self.rows[:-1], self.rows[-1] // 2)
        x = self.tensor(self.width)
        model, steps = self.pipeline(self.random.randint(3, 12), depth=0)
        model.to(self.dtype)
        for parameter in model.parameters():
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=self.values, dtype=torch.float64) * 0.4 + 0.1)
        if self.random.random() < 0.5:
            for parameter in model.parameters():
                parameter.requires_grad_(self.random.random() < 0.6)
        silent = frozenset(i for i in range(6) if self.random.random() < 0.15)
        return Graph(model, steps, x, self.extras, self.random.random() < 0.75, silent)

    def tensor(self, *trailing: int) -> torch.Tensor:
        return torch.randn(*self.rows, *trailing, generator=self.values, dtype=torch.float64).to(self.dtype)

    def pipeline(self, length: int, depth: int) -> tuple[ops.Sequential, list[Step]]:
        """Modules and what they compute; the channels that a tap opens here are read here."""
        modules: list[nn.Module] = []
        steps: list[Step] = []
        channels: list[Channel] = []
        for _ in range(length):
            for module, step in self.part(channels, depth):
                modules.append(module)
                steps.append(step)
        return ops.Sequential(*modules), steps

    def part(self, channels: list[Channel], depth: int) -> Iterator[tuple[nn.Module, Step]]:
        choice = self.random.random()
        open_channels = [name for name, *shape in channels if shape == [*self.rows, self.width]]
        if choice < 0.14 and depth < 2:
            yield self.inner(depth)
        elif choice < 0.24:
            yield self.tap(channels)
            if self.random.random() < 0.4:
                yield self.made(*SAME["rms norm"])
        elif choice < 0.42 and open_channels:
            yield self.add(self.random.choice(open_channels))
        elif choice < 0.47:
            yield self.add(None)
        elif choice < 0.62 and (again := self.again()):
            yield again
        elif self.width > self.unit:
            yield (
                self.scaled() if choice > 0.94 else self.made(*self.random.choice(list(NARROWER.values())), width=self.width // 2)
            )
        elif choice > 0.8:
            yield self.made(*WIDER, width=2 * self.width)
        else:
            yield self.made(*self.random.choice(self.same))

    def made(
        self, make: Callable[[int], nn.Module], function: Callable, rows: Rows = tuple, *, width: int = 0
    ) -> tuple[nn.Module, Step]:
        """An op of a table. rows: of its result, from those of its input. width: of its result; 0 for that of its input."""
        op = make(self.width)

        def step(state: State) -> None:
            state.value = function(op, state.params, state.value)

        self.known.append((self.width, width or self.width, rows, op, step))
        self.uses[id(op)] = 1
        self.width, self.rows = width or self.width, rows(self.rows)
        return op, step

    def again(self) -> tuple[nn.Module, Step] | None:
        """An op that stands in the graph already, once more; three times at most."""
        found = [each for each in self.known if each[0] == self.width and self.uses[id(each[3])] < 3]
        if not found:
            return None
        _, self.width, rows, op, step = self.random.choice(found)
        self.rows = rows(self.rows)
        self.uses[id(op)] += 1
        return op, step

    def inner(self, depth: int) -> tuple[nn.Module, Step]:
        module, steps = self.pipeline(self.random.randint(1, 4), depth + 1)

        def step(state: State) -> None:
            inside = State(state.value, state.params, state.given, state.outputs)
            for each in steps:
                each(inside)
            state.value = inside.value

        return module, step

    def tap(self, channels: list[Channel]) -> tuple[nn.Module, Step]:
        op = ops.MakeExtraOutput(in_place=self.random.random() < 0.3)
        name, to_caller = None, True
        if self.random.random() < 0.7:
            self.names += 1
            name, to_caller = f"c{self.names}", self.random.random() < 0.3
            op.set_extra_output_channel(0, name, output_to_caller=to_caller)
            channels.append((name, *self.rows, self.width))

        def step(state: State) -> None:
            if name is not None:
                state.channels[name] = state.value
            if to_caller:
                state.outputs.append(state.value)

        return op, step

    def add(self, channel: str | None) -> tuple[nn.Module, Step]:
        op = ops.AddExtraInput(in_place=self.random.random() < 0.3)
        if channel is None:
            self.extras.append(self.tensor(self.width))
        else:
            op.set_extra_input_channel(0, channel)

        def step(state: State) -> None:
            other = next(state.given) if channel is None else state.channels[channel]
            state.value = state.value + other

        return op, step

    def scaled(self) -> tuple[nn.Module, Step]:
        op = ops.ScaledSwiGLU()
        self.extras.append(self.tensor())
        self.width //= 2

        def step(state: State) -> None:
            state.value = plain.glu(nn.functional.silu)(state.value, {}, (next(state.given),))

        return op, step


def graph(
    seed: int, dtype: torch.dtype = torch.float64, *, unit: int = 8, rows: tuple[int, ...] = (6,), more: Mapping[str, Any] = {}
) -> Graph:
    """The graph of ``seed``, made anew at each call. unit: widths are ``unit`` or twice that. rows: leading dimensions.

    more: a table of which it is to have many ops, as :data:`OWN` or :data:`VIEWS`.
    """
    return Builder(seed, unit=unit, rows=rows, dtype=dtype, more=more).graph()
