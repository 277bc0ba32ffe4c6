"""The forward of a module as a chain of steps, read from what it does in every mode.

In a chain one value goes from the first argument to the result: each step reads it, and nothing else but parameters of
submodules, constants and, in a sum, a further argument of ``forward``. The only branch is a gated unit. Any other forward is no
chain, and NoChain says why.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NoReturn

import torch
from torch import fx, nn

from opfuse.convert.code import NotRecorded
from opfuse.convert.forms import activation_at
from opfuse.convert.record import (
    LEADING,
    NotOfThisWidth,
    RecordedForward,
    describe_node,
    first_parameter,
    mode,
    record,
    recordings,
    required_arguments,
    rows,
)

MOST_ARGUMENTS = 2
"""Arguments that a forward cannot do without, at most. With more it routes and masks."""


@dataclass(frozen=True)
class CallModule:
    """y = the submodule ``path`` of x."""

    path: str


@dataclass(frozen=True)
class Apply:
    """y = a function of x that is the activation ``name``."""

    name: str


@dataclass(frozen=True)
class GatedUnit:
    """y = act(gate(x)) * up(x), where ``gate`` and ``up`` are submodules; without them, of the two halves of x."""

    act: CallModule | Apply
    gate: str = ""
    up: str = ""


@dataclass(frozen=True)
class Add:
    """y = x + the further argument ``index`` of forward, the first being 0."""

    index: int


ChainStep = CallModule | Apply | GatedUnit | Add


@dataclass(frozen=True)
class TracedChain:
    """The steps of a forward.

    arguments: the names of the one that the steps begin with, and of those that they add. dtype: the one dtype of inputs and
    parameters for which this holds, if the forward asks for it; None: any. widths: the columns of each argument. in_autocast: the
    same steps under torch.autocast.
    """

    arguments: tuple[str, ...]
    steps: tuple[ChainStep, ...]
    dtype: torch.dtype | None = None
    widths: tuple[int, ...] = ()
    in_autocast: bool = False


class NoChain(NotRecorded):
    """A forward is no chain."""


def chain_of(module: nn.Module) -> TracedChain:
    """The forward of ``module`` as a chain, the same in all modes and for all leading dimensions. NoChain if it is none."""
    if type(module).forward is nn.Module.forward:
        raise NoChain("none", "a forward")
    names = required_arguments(module)
    if not 1 <= len(names) <= MOST_ARGUMENTS:
        got = f"a forward that needs {', '.join(names) or 'nothing'}"
        raise NoChain(got, f"a forward that needs 1 to {MOST_ARGUMENTS} tensors")
    widths, chain = _widths(module, names)
    same_in_autocast = torch.amp.is_autocast_available(_device(module))
    for name, in_autocast, recording in recordings(module, widths):
        if in_autocast:
            same_in_autocast &= recording.ended is None and _is_chain(recording, chain)
        elif (other := _read(recording)) != chain:
            _refuse(f"another chain in {name}: {other.steps}", "one chain, whose dropouts are submodules")
    return replace(chain, widths=tuple(widths.values()), in_autocast=same_in_autocast)


def _device(module: nn.Module) -> str:
    like = first_parameter(module)
    return "cpu" if like is None else like.device.type


def _is_chain(recording: RecordedForward, chain: TracedChain) -> bool:
    try:
        return _read(recording) == chain
    except NoChain:
        return False


def _widths(module: nn.Module, names: Sequence[str]) -> tuple[Mapping[str, int], TracedChain]:
    """The widths of inputs, by name, on which a forward runs, and its chain there. NoChain of what went furthest."""
    sizes = list(dict.fromkeys(size for p in module.parameters() for size in reversed(p.shape[:2]) if size > 1))[
        :MOST_WIDTHS
    ] or [8]
    furthest, reached = NotRecorded("no input", "inputs of some width"), -1
    like = first_parameter(module)
    with mode("training") as training:
        for widths in product(sizes, repeat=len(names)):
            given = {name: rows(LEADING[0], width, like) for name, width in zip(names, widths)}
            recording = record(module, given, training=training)
            if recording.ended is None:
                return dict(zip(names, widths)), _read(recording)
            if not isinstance(recording.ended, NotOfThisWidth):  # it does the same on others, as sizes are compared by none
                raise NoChain(recording.ended.got, recording.ended.wanted)
            if len(recording.nodes) > reached:
                furthest, reached = recording.ended, len(recording.nodes)
    raise NoChain(furthest.got, furthest.wanted)


MOST_WIDTHS = 4
"""How many sizes of parameters are tried as widths of the inputs."""


def _read(recording: RecordedForward) -> TracedChain:
    if recording.ended is not None:
        raise NoChain(recording.ended.got, recording.ended.wanted)
    return _GraphReader(recording).chain()


class _GraphReader:
    """Reads a graph from its first argument to its result."""

    def __init__(self, recording: RecordedForward) -> None:
        self.recording = recording
        self.arguments = [node for node in recording.nodes if node.op == "placeholder"]
        self.nodes = dict.fromkeys(node for node in recording.nodes if node.op != "placeholder")

    def chain(self) -> TracedChain:
        first, *_ = self.arguments
        steps, value = [], first
        while not self._is_result(value):
            step, value = self._next(value)
            steps.append(step)
        if self.nodes:
            _refuse(f"{describe_node(next(iter(self.nodes)))} beside it", "one value from the argument to the result")
        dtype = first.meta["dtype"] if self.recording.reads_dtype else None
        return TracedChain(tuple(str(node.target) for node in self.arguments), tuple(steps), dtype)

    def _is_result(self, value: fx.Node) -> bool:
        result = next(iter(value.users), None)
        if len(value.users) != 1 or result is None or result.op != "output":
            return False
        self._take(result)
        return True

    def _next(self, value: fx.Node) -> tuple[ChainStep, fx.Node]:
        users = list(value.users)
        if len(users) == 1:
            (node,) = users
            if _is(node, "chunk"):
                return self._halves(node)
            return self._step(node, value), self._take(node)
        if len(users) == 2:
            return self._gate(value, users)
        _refuse(
            f"{describe_node(value)} read {len(users)} times", "a value that is read once, or by the two parts of a gated unit"
        )

    def _take(self, *nodes: fx.Node) -> fx.Node:
        """The last of nodes that are accounted for."""
        for node in nodes:
            self.nodes.pop(node, None)
        return nodes[-1]

    def _step(self, node: fx.Node, value: fx.Node) -> ChainStep:
        if _calls(node, value):
            return CallModule(str(node.target))
        if _is(node, "add") and len(node.args) == 2 and not node.kwargs:
            other: Any = next((arg for arg in node.args if arg is not value), value)
            if other in self.arguments[1:] and len(other.users) == 1:
                return Add(self.arguments.index(other) - 1)
        name = activation_at(node, value)
        if name is not None:
            return Apply(name)
        _refuse(describe_node(node), "a submodule, an activation or a sum with an argument of forward")

    def _gate(self, value: fx.Node, users: Sequence[fx.Node]) -> tuple[ChainStep, fx.Node]:
        for gate, up in (users, users[::-1]):
            unit = _gated(gate, up)
            if unit is not None and all(_calls(each, value) for each in users):
                act, multiplied = unit
                step = GatedUnit(self._act(act, gate), str(gate.target), str(up.target))
                return step, self._take(gate, up, act, multiplied)
        _refuse(f"{describe_node(value)} read by {describe_node(users[0])} and {describe_node(users[1])}", "act(gate(x)) * up(x)")

    def _halves(self, chunk: fx.Node) -> tuple[ChainStep, fx.Node]:
        """act(a) * b of ``a, b = x.chunk(2, dim=-1)``."""
        parts = {node.args[1]: node for node in chunk.users if node.target is operator.getitem}
        wanted = "act(a) * b of a, b = x.chunk(2, dim=-1)"
        if parts.keys() != {0, 1} or (*chunk.args[1:], *chunk.kwargs.values()) != (2, -1):
            _refuse(describe_node(chunk), wanted)
        a, b = parts[0], parts[1]
        unit = _gated(a, b)
        if unit is None:
            _refuse(describe_node(chunk), wanted)
        act, multiplied = unit
        return GatedUnit(self._act(act, a)), self._take(chunk, a, b, act, multiplied)

    def _act(self, node: Any, value: fx.Node) -> CallModule | Apply:
        step = self._step(node, value)
        if isinstance(step, (CallModule, Apply)):
            return step
        _refuse(describe_node(node), "an activation of the gate")


def _is(node: fx.Node, name: str) -> bool:
    return node.op == "call_method" and node.target == name


def _calls(node: fx.Node, value: fx.Node) -> bool:
    return node.op == "call_module" and node.args == (value,) and not node.kwargs


def _gated(gate: fx.Node, up: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The activation that alone reads ``gate``, and its product with ``up``, which alone reads both; None where they are none."""
    act = next(iter(gate.users), None)
    multiplied = None if act is None else next(iter(act.users), None)
    if act is None or multiplied is None or any(len(each.users) != 1 for each in (gate, act, up)):
        return None
    is_product = _is(multiplied, "mul") and not multiplied.kwargs and set(multiplied.args) == {act, up}
    return (act, multiplied) if is_product else None


def _refuse(got: str, wanted: str) -> NoReturn:
    raise NoChain(got, wanted)
