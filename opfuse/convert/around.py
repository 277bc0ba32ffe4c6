"""The forward of a module that routes, masks and caches, traced for what it says of its submodules; it is never replaced."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
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


class _TracedValue(fx.Proxy):
    def __len__(self) -> int:
        raise TypeError("unknown")  # as of what has none: a list that takes its parts asks, and does without


class _Beginning(Tracer):
    """Follows a forward as far as it goes: what is unpacked, a shape above all, is taken to have two parts."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _TracedValue(node, self)

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
            return Tracer().trace(_Called(module, names))
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


def name_of(node: fx.Node) -> str:
    """The submodule that a node calls."""
    return str(node.target).removeprefix("inner.")
