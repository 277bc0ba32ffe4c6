"""Norms whose result only one converted module reads: they become the first op of its pipeline.

The forward of the module around both says who reads a norm's result. It is traced for that alone, once without its optional
arguments and once with all of them, and both traces must agree. When the model runs, the norm hands on its input itself; the
reader recognises that tensor by identity, and its pipeline begins with the norm.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Mapping, Sequence
from threading import get_ident
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx, nn

from opfuse.convert.around import arguments_around, graph_around, name_of, writes_before
from opfuse.convert.chain import arguments_of
from opfuse.convert.converted import Converted, converted
from opfuse.convert.leaves import norm_of, obstacle
from opfuse.convert.members import HOOKS_OF_RESULTS, forward_code, has_global_hooks, has_hooks, settings_of
from opfuse.convert.parts import PipelineRun
from opfuse.convert.weights import state_of
from opfuse.core.context import versions
from opfuse.core.operation import BasicOperation
from opfuse.errors import OpfuseWarning, describe
from opfuse.recipes import Recipe, current_recipe, in_region
from opfuse.runtime.compiled import hindrance, moment

DEPTH = 16
"""Frames of Python, hooks included, in which a norm finds the forward that calls it; further away, it computes itself."""


def feeds(module: nn.Module) -> dict[str, str]:
    """For submodules of ``module``: the one submodule that reads the result, as its first argument."""
    return _agreed(_traces(module))


def _traces(module: nn.Module) -> list[dict[str, str] | None]:
    """What each trace shows, by combination of arguments, in training and in evaluation."""
    return [_fed(module, names, training) for names in arguments_around(module) for training in (True, False)]


def _agreed(traces: Sequence[dict[str, str] | None]) -> dict[str, str]:
    return dict(set.intersection(*(set((each or {}).items()) for each in traces)))


def _fed(module: nn.Module, names: Sequence[str], training: bool) -> dict[str, str] | None:
    """Of one trace; None where torch.fx cannot follow."""
    graph = graph_around(module, names, training)
    if graph is None:
        return None
    written = writes_before(module, graph.nodes)
    calls = [node for node in graph.nodes if node.op == "call_module"]
    called = [node.target for node in calls]
    return {
        name_of(node): name_of(reader)
        for node in calls
        for reader in node.users
        if len(node.users) == 1 and reader.op == "call_module" and _is_first(module, reader, node)
        if called.count(node.target) == called.count(reader.target) == 1 and written[node] == written[reader]
        if "stored" not in node.meta and node.meta["modes"] == reader.meta["modes"]
    }


def _is_first(module: nn.Module, reader: fx.Node, value: fx.Node) -> bool:
    """Whether ``value`` is the first argument of a call, and no other one."""
    first = next(iter(arguments_of(module.get_submodule(name_of(reader)))), None)
    given = [*reader.args, *reader.kwargs.values()]
    return given.count(value) == 1 and (reader.args[:1] == (value,) or reader.kwargs.get(first or "") is value)


class Fed(Converted):
    """The forward of a norm that the pipeline of another module begins with.

    holder, name: the module around both, and what it calls the reader. around: what decides how the holder's forward runs.
    """

    def __init__(self, module: nn.Module, path: str, reader: Converted, holder: nn.Module, name: str) -> None:
        super().__init__(module, path, arguments=arguments_of(module)[:1], parts=(), members={}, recipe=reader.recipe)
        self.region = None  # it runs nothing under its recipe
        self.reader, self.holder, self.name = reader, holder, name
        self.around = settings_of(holder, member=True)

    def _is_read(self) -> bool:
        """Whether the reader still reads: it was not wrapped, compiled alone, unfused or given another forward."""
        reader = self.reader.module
        stands = self.holder._modules.get(self.name) is reader and converted(reader) is self.reader
        return stands and reader._compiled_call_impl is None

    def _is_blind(self, x: torch.Tensor) -> bool:
        """Whether hooks may write to ``x`` unnoticed: tensors made in inference mode count no writes."""
        return x.is_inference() and (has_hooks(self.module) or has_hooks(self.reader.module) or has_global_hooks())

    def _recipe(self) -> Recipe | None:
        return current_recipe() if in_region() else self.recipe

    def _followed(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """In a graph, the result of the norm. A reader that gets it unchanged computes the norm in its own op; then
        nothing reads this result, and the compiler drops it.
        """
        (x,) = [*args, *kwargs.values()]
        normed = self.plain(x)
        whole = self.reader.in_graph[-1]
        if self._is_read() and not hindrance(whole, x, (), None):
            self.reader.followed = moment(whole, x, normed), x
        return normed

    def _state(self, handed: torch.Tensor | None) -> Any:
        """Counts of writes to ``handed`` and to the norm's parameters: the result holds while they stay."""
        return versions(handed), state_of(self.module)

    def get_ready(self) -> None:
        """Make what dynamo reads of the reader."""
        self.reader.get_ready()

    def check_members(self) -> None:
        """Also an OpfuseWarning if the norm got hooks of its result, which would see its input instead."""
        super().check_members()
        of_all = has_global_hooks(HOOKS_OF_RESULTS)
        if not self.warned and (of_all or has_hooks(self.module, HOOKS_OF_RESULTS)):
            self.warned = True
            wanted, got = "none that read the result, which its reader computes", "some that see its input instead"
            cure = "pass filter_fn=lambda module, path: False for the norm" if of_all else "register them before opfuse.fuse_"
            told = describe(f"{self.label} hooks", wanted=wanted, got=got, cure=cure)
            warnings.warn(told, OpfuseWarning, stacklevel=2)

    def compute(self, x: torch.Tensor, arguments: Any) -> torch.Tensor:
        """A view of the input itself; its norm, if the reader cannot take the input, if the holder is no longer what told that
        nobody else reads it, or if other code than the holder's forward calls the norm.
        """
        told = self.around.hold(self.holder, wrapped=True) and _is_called_by(forward_code(self.holder))
        if not told or not self._is_read() or self._is_blind(x):
            return self.plain(x)  # type: ignore[no-any-return]
        handed = x.view_as(x)
        known, before = weakref.ref(handed), self._state(handed)
        self.reader.awaited[get_ident()] = known, lambda: self._state(known()) != before
        return handed


def _is_called_by(code: CodeType | None) -> bool:
    """Whether ``code`` runs, not far from here."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(DEPTH):
        if frame is None or frame.f_code is code:
            break
        frame = frame.f_back
    else:
        return False
    return frame is not None


def fed(
    module: nn.Module, path: str, made: Mapping[nn.Module, Converted]
) -> tuple[list[tuple[Converted, Fed, BasicOperation]], str]:
    """For each submodule of ``module`` that alone reads a norm: its forward, the new forward of the norm, and the norm's op; and
    why it is not known what reads the norms, an empty string where it is known.
    """
    candidates = {name: norm for name, norm in module.named_children() if norm not in made and norm_of(norm) is not None}
    readers = {name: made[child] for name, child in module.named_children() if child in made and _begins(made[child])}
    if not candidates or not readers:
        return [], ""
    traces, found = _traces(module), []
    for name, reader in _agreed(traces).items():
        if name in candidates and reader in readers and obstacle(candidates[name]) is None:
            norm, own = candidates[name], readers[reader]
            op = norm_of(norm)
            if op is not None:
                found.append((own, Fed(norm, f"{path}.{name}".lstrip("."), own, module, reader), op))
    return found, f"torch.fx cannot follow all of {type(module).__name__}.forward" if None in traces else ""


def _begins(made: Converted) -> bool:
    """Whether it is a chain that begins with a run: experts and siblings compute in ways of their own."""
    return type(made) is Converted and bool(made.parts) and isinstance(made.parts[0], PipelineRun)
