"""The forward of a module as a chain of steps, from its symbolic trace.

The trace follows ``forward`` with torch.fx and does not look into the submodules that it calls. In a chain one value goes from
the first argument to the result: each step reads it, and nothing else but parameters of submodules, constants and, in a sum, a
further argument of ``forward``. The only branch is a gated unit. Any other forward is no chain, and NoChain says why.
"""

from __future__ import annotations

import gc
import inspect
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

import torch
from torch import fx, nn
from torch.nn import functional as F

from opfuse.convert.probe import activation_of, kept, random_states

MOST_ARGUMENTS = 2
"""Arguments of a forward that is traced, at most. With more, or with optional ones, it routes and masks: what it does depends on
the call.
"""


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
    """The steps of a forward, and the names of its arguments: the one that the steps begin with, then those that they add."""

    arguments: tuple[str, ...]
    steps: tuple[ChainStep, ...]

    def within(self, path: str) -> tuple[ChainStep, ...]:
        """The steps, with paths as seen from the module that has this one as its submodule ``path``."""
        return tuple(_within(step, path) for step in self.steps)


class NoChain(Exception):
    """A forward is no chain. got: what was found. wanted: what a chain has there."""

    def __init__(self, got: str, wanted: str) -> None:
        super().__init__(got, wanted)
        self.got, self.wanted = got, wanted


@contextmanager
def _no_cycles_left() -> Iterator[None]:
    """Frees at the end of the block what became garbage in it: torch.fx leaves cycles where it unpacks a value."""
    collects = gc.isenabled()
    gc.disable()  # so that all of it is in the youngest generation
    try:
        yield
    finally:
        gc.collect(0)
        if collects:
            gc.enable()


def _modes() -> tuple[Any, ...]:
    casts = [torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *casts


class Tracer(fx.Tracer):
    """torch.fx's tracer, which does not look into submodules; ``meta`` of a node has what a graph does not show.

    "stored": the value is alive after the forward, which put it somewhere, such as in an attribute or a list.
    "modes": the modes of autograd and autocast in which the value was made; a forward may change them for a part of it.
    kind: the class of the values in a forward that is traced.
    """

    kind: ClassVar[type[fx.Proxy]] = fx.Proxy
    proxy_buffer_attributes = True  # a trace writes to none

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        self._values: list[weakref.ref[fx.Proxy]] = []
        with _no_cycles_left():
            graph = super().trace(root, concrete_args)
        for value in [known() for known in self._values]:
            if value is not None:
                value.node.meta["stored"] = True
        return graph

    def proxy(self, node: fx.Node) -> fx.Proxy:
        value = self.kind(node, self)
        node.meta["modes"] = _modes()
        self._values.append(weakref.ref(value))
        return value

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def chain_of(module: nn.Module) -> TracedChain:
    """The forward of ``module`` as a chain, the same in training and in evaluation. NoChain if it is none."""
    _check_arguments(type(module).forward)
    one, other = (_TraceReader(_traced(module, training)).chain() for training in (True, False))
    if one != other:
        raise NoChain("another chain in training than in evaluation", "one chain, whose dropouts are submodules")
    return one


def _traced(module: nn.Module, training: bool) -> fx.Graph:
    before = random_states()
    try:
        with kept(module, training=training) as assigned, torch.set_grad_enabled(training):
            graph = Tracer().trace(module)
            names = [f"self.{name}" for name in assigned()]
    except Exception as error:  # whatever a stranger's code raises on symbolic values
        text = str(error).strip().partition("\n")[0]
        raise NoChain(f"{type(error).__name__}: {text}", "a forward that torch.fx can follow") from error
    if random_states() != before:
        raise NoChain("random numbers that the forward draws", "a forward that does the same at each call")
    if stored := names or [_told(node) for node in graph.nodes if "stored" in node.meta]:
        raise NoChain(f"{', '.join(stored)}, which the forward keeps", "a forward that leaves nothing but its result")
    if changes_modes(graph):
        raise NoChain("a block of other gradients or casts in the forward", "one mode of autograd and autocast for all of it")
    return graph


def changes_modes(graph: fx.Graph) -> bool:
    """Whether parts of a traced forward are in other modes of autograd or autocast, as inside of ``torch.no_grad()``."""
    return len({node.meta["modes"] for node in graph.nodes if "modes" in node.meta}) > 1


def _check_arguments(forward: Callable[..., Any]) -> None:
    if forward is nn.Module.forward:
        raise NoChain("none", "a forward")
    given = list(inspect.signature(forward).parameters.values())[1:]
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    optional = [_name(each) for each in given if each.kind not in plain or each.default is not inspect.Parameter.empty]
    if not 1 <= len(given) <= MOST_ARGUMENTS or optional:
        got = f"forward({', '.join(map(_name, given))})" + (f", where {optional[0]} is optional" if optional else "")
        raise NoChain(got, f"a forward of 1 to {MOST_ARGUMENTS} tensors, none of them optional")


def _name(argument: inspect.Parameter) -> str:
    """The name of an argument, with the stars of one that takes any number."""
    return str(argument.replace(annotation=inspect.Parameter.empty, default=inspect.Parameter.empty))


def arguments_of(module: nn.Module) -> tuple[str, ...]:
    """Names of the arguments of a forward."""
    return tuple(inspect.signature(type(module).forward).parameters)[1:]


class _TraceReader:
    """Reads a traced graph from its first argument to its result."""

    def __init__(self, graph: fx.Graph) -> None:
        self.arguments = [node for node in graph.nodes if node.op == "placeholder"]
        self.nodes = dict.fromkeys(node for node in graph.nodes if node.op != "placeholder")

    def chain(self) -> TracedChain:
        first, *_ = self.arguments
        steps, value = [], first
        while not self._is_result(value):
            step, value = self._next(value)
            steps.append(step)
        if self.nodes:
            _refuse(f"{_told(next(iter(self.nodes)))} beside it", "one value from the argument to the result")
        return TracedChain(tuple(str(node.target) for node in self.arguments), tuple(steps))

    def _is_result(self, value: fx.Node) -> bool:
        result = next(iter(value.users), None)
        if len(value.users) != 1 or result is None or result.op != "output":
            return False
        if result.args != (value,):
            _refuse("a result of several values", "one tensor")
        self._take(result)
        return True

    def _next(self, value: fx.Node) -> tuple[ChainStep, fx.Node]:
        users = list(value.users)
        if len(users) == 1:
            (node,) = users
            if _is(node, CHUNK):
                return self._halves(node)
            return self._step(node, value), self._take(node)
        if len(users) == 2:
            return self._gate(value, users)
        _refuse(f"{_told(value)} read {len(users)} times", "a value that is read once, or by the two parts of a gated unit")

    def _take(self, *nodes: fx.Node) -> fx.Node:
        """The last of nodes that are accounted for."""
        for node in nodes:
            self.nodes.pop(node, None)
        return nodes[-1]

    def _step(self, node: fx.Node, value: fx.Node) -> ChainStep:
        if _calls(node, value):
            return CallModule(str(node.target))
        if _is(node, ADD) and len(node.args) == 2 and not node.kwargs:
            other: Any = next((arg for arg in node.args if arg is not value), value)
            if other in self.arguments[1:] and len(other.users) == 1:
                return Add(self.arguments.index(other) - 1)
        name = _activation(node, value)
        if name is not None:
            return Apply(name)
        _refuse(_told(node), "a submodule, an activation or a sum with an argument of forward")

    def _gate(self, value: fx.Node, users: Sequence[fx.Node]) -> tuple[ChainStep, fx.Node]:
        for gate, up in (users, users[::-1]):
            unit = _gated(gate, up)
            if unit is not None and all(_calls(each, value) for each in users):
                act, product = unit
                step = GatedUnit(self._act(act, gate), str(gate.target), str(up.target))
                return step, self._take(gate, up, act, product)
        _refuse(f"{_told(value)} read by {_told(users[0])} and {_told(users[1])}", "act(gate(x)) * up(x)")

    def _halves(self, chunk: fx.Node) -> tuple[ChainStep, fx.Node]:
        """act(a) * b of ``a, b = x.chunk(2, dim=-1)``."""
        parts = {node.args[1]: node for node in chunk.users if _is(node, (operator.getitem,))}
        wanted = "act(a) * b of a, b = x.chunk(2, dim=-1)"
        if sorted(map(str, parts)) != ["0", "1"] or len(chunk.users) != 2 or _chunked(chunk) != (2, -1):
            _refuse(_told(chunk), wanted)
        a, b = parts[0], parts[1]
        unit = _gated(a, b)
        if unit is None:
            _refuse(_told(chunk), wanted)
        act, product = unit
        return GatedUnit(self._act(act, a)), self._take(chunk, a, b, act, product)

    def _act(self, node: Any, value: fx.Node) -> CallModule | Apply:
        step = self._step(node, value)
        if isinstance(step, (CallModule, Apply)):
            return step
        _refuse(_told(node), "an activation of the gate")


ADD = (operator.add, operator.iadd, torch.add, "add")
MULTIPLY = (operator.mul, operator.imul, torch.mul, "mul")
CHUNK = (torch.chunk, "chunk")


def _is(node: Any, targets: Sequence[Any]) -> bool:
    return node.op in ("call_function", "call_method") and any(node.target is t or node.target == t for t in targets)


def _calls(node: fx.Node, value: fx.Node) -> bool:
    return node.op == "call_module" and node.args == (value,) and not node.kwargs


def _gated(gate: fx.Node, up: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The activation that alone reads ``gate``, and its product with ``up``, which alone reads both; None where they are none."""
    act = next(iter(gate.users), None)
    product = None if act is None else next(iter(act.users), None)
    if act is None or product is None or any(len(each.users) != 1 for each in (gate, act, up)):
        return None
    is_product = _is(product, MULTIPLY) and not product.kwargs and set(product.args) == {act, up}
    return (act, product) if is_product else None


def _chunked(node: fx.Node) -> tuple[Any, Any]:
    values = [*node.args[1:], *node.kwargs.values()]
    return (*values, None, None)[:2]  # type: ignore[return-value]


def _activation(node: fx.Node, value: fx.Node) -> str | None:
    """The activation that a node with constants as further arguments is."""
    if node.op not in ("call_function", "call_method") or node.args[:1] != (value,) or len(node.all_input_nodes) != 1:
        return None
    target: Any = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
    return None if target is F.dropout else activation_of(lambda x: target(x, *node.args[1:], **node.kwargs))


def _told(node: fx.Node) -> str:
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return f"{WORDS.get(node.op, 'the call of')} {target}"


WORDS = {"call_module": "the submodule", "placeholder": "the argument", "get_attr": "the tensor"}


def _refuse(got: str, wanted: str) -> NoReturn:
    raise NoChain(got, wanted)


def _within(step: ChainStep, path: str) -> ChainStep:
    match step:
        case CallModule():
            return CallModule(f"{path}.{step.path}")
        case GatedUnit():
            act: Any = _within(step.act, path)
            return replace(step, act=act, **{key: f"{path}.{getattr(step, key)}" for key in ("gate", "up") if getattr(step, key)})
        case _:
            return step


def paths_of(steps: Sequence[ChainStep]) -> Iterator[str]:
    """The submodules that a chain calls."""
    for step in steps:
        if isinstance(step, CallModule):
            yield step.path
        elif isinstance(step, GatedUnit):
            yield from (path for path in (step.gate, step.up) if path)
            yield from paths_of((step.act,))
