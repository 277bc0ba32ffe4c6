"""Traces of forwards that route, mask and cache, to learn how submodules are connected; such a forward is never replaced."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import fx, nn
from torch.fx.proxy import TraceError

from opfuse.convert.chain import Tracer
from opfuse.convert.probe import kept


class _Called(nn.Module):
    """Calls the forward of a module with symbolic values for the arguments ``names``."""

    def __init__(self, inner: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.inner = inner
        self.names = names

    def forward(self, values: Any) -> Any:
        given = {name: values[i] for i, name in enumerate(self.names)}
        return type(self.inner).forward(self.inner, **given)


IN_PLACE = {
    name: getattr(operator, name)
    for name in dir(operator)
    if name.startswith("__i") and name not in ("__index__", "__inv__", "__invert__")
}
"""``x += y`` and the like: torch.fx traces them as if they made something new."""


class _WriteProxy(fx.Proxy):
    """A proxy that records in-place operators as such."""


def _in_place(function: Callable[..., Any]) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


for _name, _function in IN_PLACE.items():
    setattr(_WriteProxy, _name, _in_place(_function))


class _WritesTold(Tracer):
    """Traces a forward, in-place operators included."""

    kind = _WriteProxy


class _TracedValue(_WriteProxy):
    def __len__(self) -> int:
        raise TypeError("unknown")  # as of what has none: a list that takes its parts asks, and does without


class _Beginning(_WritesTold):
    """Traces a forward as far as it can: a value that is unpacked, usually a shape, is assumed to have two parts."""

    kind = _TracedValue

    def iter(self, obj: Any) -> Iterator[Any]:
        try:
            return super().iter(obj)
        except TraceError:
            return iter((obj[0], obj[1]))


def arguments_around(module: nn.Module) -> tuple[list[str], list[str]]:
    """The arguments that a forward needs, and all that have a name."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    given = [each for each in inspect.signature(type(module).forward).parameters.values() if each.kind in named][1:]
    return [each.name for each in given if each.default is inspect.Parameter.empty], [each.name for each in given]


def graph_around(module: nn.Module, names: Sequence[str], training: bool) -> fx.Graph | None:
    """The whole forward, called with ``names`` in a mode; None where torch.fx cannot follow."""
    try:
        with kept(module, training=training):
            return _WritesTold().trace(_Called(module, names))
    except Exception:  # of a stranger's code on symbolic values
        return None


def beginning_of(module: nn.Module) -> list[fx.Node]:
    """The nodes of a forward up to where it cannot be followed, called with what it needs."""
    tracer, (names, _) = _Beginning(), arguments_around(module)
    try:
        with kept(module):
            tracer.trace(_Called(module, names))
    except Exception:  # it goes no further
        return list(tracer.graph.nodes) if hasattr(tracer, "graph") else []
    return list(tracer.graph.nodes)


def writes_before(module: nn.Module, nodes: Iterable[fx.Node]) -> dict[fx.Node, int]:
    """For each node, how many nodes before it write to a tensor: a value may differ before and after a write."""
    found, count = {}, 0
    for node in nodes:
        found[node] = count
        count += _writes(module, node)
    return found


def _writes(module: nn.Module, node: fx.Node) -> bool:
    """Whether a node writes in place, by torch's naming (``add_``), an operator, ``out=``, or the flag ``inplace``."""
    if node.op == "call_module":
        return bool(getattr(module.get_submodule(name_of(node)), "inplace", False))
    if node.kwargs.get("out") is not None or node.kwargs.get("inplace"):
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    ends = name.endswith("_") and not name.endswith("__")
    return node.op.startswith("call") and (ends or node.target in IN_PLACE.values())


def name_of(node: fx.Node) -> str:
    """The submodule that a node calls."""
    return str(node.target).removeprefix("inner.")
