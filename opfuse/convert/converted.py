"""The forward that a converted module gets. Nothing else of the module is replaced.

It keeps its class, its submodules and its parameters. Under a recipe the new forward runs pipelines over them; without one it
calls the forward that the module had.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial, wraps
from threading import RLock, get_ident
from types import MethodType
from typing import Any

import torch
from torch import nn

from opfuse.convert.in_graph import InGraph
from opfuse.convert.members import check_place, check_settings, has_global_hooks, has_hooks, settings_of, warn_of_hooks
from opfuse.convert.parts import Opaque, PipelineRun
from opfuse.convert.weights import MadeParameters
from opfuse.core.operation import BasicOperation
from opfuse.core.tracers import break_graph, check_exported, check_partial, enroll, outside, prepared
from opfuse.errors import ConversionError, describe
from opfuse.inspect.alike import short
from opfuse.recipes import Recipe, autocast, current_recipe, in_region
from opfuse.recipes.passes import is_recomputing
from opfuse.runtime.compiled import follow, hindrance, moment
from opfuse.runtime.listed import listed_plans
from opfuse.runtime.recompute import repeated
from opfuse.runtime.segment import unlisted_saves


class Converted:
    """The forward of a converted module.

    path: that of the module in the model. arguments: names of the arguments that its parts read. parts: runs, and submodules
    between them. recipe: its own, which holds where no ``autocast`` region is active. members: the submodules that it was made
    from, by path. awaited: by thread, the tensor that a norm has handed on, and a function that says whether it or the norm was
    written since. followed: in a graph of torch.compile, the moment of a norm's result, and the norm's input.
    """

    def __init__(
        self,
        module: nn.Module,
        path: str,
        *,
        arguments: Sequence[str],
        parts: Sequence[PipelineRun | Opaque],
        members: dict[str, nn.Module],
        recipe: Recipe | None,
    ) -> None:
        self.module = module
        self.kind = type(module)
        self.path = path
        self.arguments = tuple(arguments)
        self.parts = tuple(parts)
        self.members = members
        self.settings = {path: settings_of(each, member=bool(path)) for path, each in {"": module, **members}.items()}
        self.recipe = recipe
        self.region = None if recipe is None else autocast(recipe=recipe)
        self.normed: tuple[PipelineRun | Opaque, ...] = ()
        self.warned = False
        self.awaited: dict[int, tuple[weakref.ref[torch.Tensor], Callable[[], bool]]] = {}
        self.followed: tuple[Any, torch.Tensor] | None = None
        self.norm: Converted | None = None
        self.ticket = enroll(self)
        self.in_graph: tuple[InGraph, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        # The module that a copy belongs to has its ``forward``, and may need it before the copy has its state.
        own = {name: value for name, value in self.__dict__.items() if name != "ticket"}
        return _blank, (type(self), type(self.module)), {**own, "awaited": {}, "followed": None, "in_graph": ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, ticket=enroll(self))

    def begin_with(self, op: BasicOperation, name: str, norm: Converted) -> None:
        """Put a norm, ``op``, before the parts, for calls to which its module hands its input on: see ``feeds.py``."""
        self.norm = norm
        first = self.parts[0]
        if isinstance(first, PipelineRun):
            run = replace(first, ops=[op, *first.ops], names=[name, *first.names], fuser=None, spare={}, lock=RLock())
            self.normed = (run, *self.parts[1:])

    @property
    def made(self) -> list[MadeParameters]:
        """The parameters that its pipelines make for each call."""
        return [made for part in self.parts if isinstance(part, PipelineRun) for made in part.made]

    @property
    def forward(self) -> Callable[..., Any]:
        """The ``forward`` for the module, with the name, docstring and signature of its class's."""
        return MethodType(_forward_of(self.kind), self)

    @property
    def plain(self) -> Callable[..., Any]:
        """The forward that the module has without opfuse."""
        return partial(type(self.module).forward, self.module)

    @property
    def products(self) -> dict[str, BasicOperation]:
        """Its ops that cast, by name."""
        return casting(part for part in self.parts if isinstance(part, PipelineRun))

    # What a checkpoint compares, to find the first run of a call that it repeats.

    @property
    def label(self) -> str:
        """How messages call it."""
        return self.path or type(self.module).__name__

    @property
    def structure(self) -> str:
        """A text that identifies the module."""
        return f"{self.label} {id(self)}"

    @property
    def ops(self) -> Sequence[object]:
        """Itself, as the one thing that is run."""
        return (self,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            check_exported("a converted module")
            prepared(self.ticket)
            return self._followed(args, kwargs)
        self.followed = None  # of a graph that broke behind the norm: its result is what this call is given
        if self.region is None or in_region():
            return self._checkpointed(args, kwargs)
        with self.region:
            return self._checkpointed(args, kwargs)

    def _checkpointed(self, args: Any, kwargs: Any) -> Any:
        """Inside a checkpoint, the recipe is that of the first run, whatever is active when it is run again."""
        repeat = repeated(self)
        return self._run(args, kwargs) if repeat is None else repeat(partial(self._repeated, args, kwargs))

    def _repeated(self, args: Any, kwargs: Any) -> Any:
        return self.unrecorded(partial(self._run, args, kwargs))

    def unrecorded(self, run: Callable[[], Any]) -> Any:
        """What ``run()`` returns. A recomputation is kept from recorders, which have seen the first run."""
        if not is_recomputing():
            return run()
        with listed_plans(), unlisted_saves():
            return run()

    def _run(self, args: Any, kwargs: Any) -> Any:
        if self._recipe() is None and get_ident() not in self.awaited:  # what a norm has handed on is not normed yet
            return self.plain(*args, **kwargs)
        self.check_members()
        given = dict(zip(self.arguments, args)) | kwargs
        if given.keys() != set(self.arguments) or len(args) + len(kwargs) != len(given):
            return self.plain(*args, **kwargs)  # which says what it takes
        x, *arguments = (given[name] for name in self.arguments)
        return self.compute(x, arguments)

    @property
    def runs(self) -> tuple[PipelineRun, ...]:
        """The pipelines that it may run."""
        return tuple(each for each in (*self.parts, *self.normed) if isinstance(each, PipelineRun))

    def named_ops(self) -> Iterator[tuple[str, BasicOperation]]:
        """Its ops, each with a path in the model; the product of a linear layer has that of the layer."""
        for run in self.runs:
            for name, op in zip(run.names, run.ops):
                below = "" if name == "weight" else short(name).removeprefix(run.path).lstrip(".")
                yield ".".join(filter(None, (run.path, below))), op

    def compute(self, x: torch.Tensor, arguments: Sequence[torch.Tensor]) -> Any:
        """The result under a recipe."""
        return self.through(self.normed if self._is_awaited(x) else self.parts, x, arguments)

    def through(self, parts: Sequence[PipelineRun | Opaque], x: torch.Tensor, arguments: Sequence[torch.Tensor]) -> Any:
        """``x``, through one part after the other."""
        for part in parts:
            x = part(x, arguments)
        return x

    def _is_awaited(self, x: torch.Tensor) -> bool:
        """Whether a norm has handed ``x`` on. ConversionError if it has handed on another tensor, also if that is gone by now:
        ``x`` may have been made of it.
        """
        awaited = self.awaited.pop(get_ident(), None)
        if awaited is not None:
            handed, changed = awaited
            self._check_handed(handed(), x, changed=changed())
        return awaited is not None

    def _check_handed(self, handed: torch.Tensor | None, x: Any, *, changed: bool = False) -> None:
        if handed is not x or changed:
            got = "another tensor, made of that or not" if handed is not x else "it after a write to that norm or to its input"
            where, wanted = f"{self.label} input", "the very result of the norm before it, which it computes itself"
            cure = "pass filter_fn=lambda module, path: False for the norm, and fuse_ again"
            raise ConversionError(describe(where, wanted=wanted, got=got, cure=cure))

    # In a graph of torch.compile.

    def get_ready(self) -> None:
        """Make what dynamo reads: the call by itself and, if a norm hands its input on, the call with the norm."""
        if not self.in_graph:
            self.in_graph = (InGraph(self), *([] if self.norm is None else [InGraph(self, norm=self.norm)]))

    def pipeline(self, *, normed: bool, shared: bool) -> PipelineRun | None:
        """The pipeline of a call that runs nothing else, with its norm or without; None if it runs more."""
        parts = self.normed if normed else self.parts
        only = parts[0] if len(parts) == 1 and type(self).compute is Converted.compute else None
        return only if isinstance(only, PipelineRun) else None

    def resembles(self, other: Converted) -> bool:
        """Whether a graph that was made for ``other``, of the same class, can serve this one."""
        return type(self.module) is type(other.module)

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """The results of all modules that share a product, as the columns of one tensor."""
        result: torch.Tensor = self.compute(x, ())
        return result

    def outline(self, given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Stand-ins of the outputs for ``given``, if its own forward cannot run on tensors without values."""
        return ()

    def _followed(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The call as an op of a graph, or after a graph break."""
        if self.awaited:
            break_graph("a norm that ran before its graph. Cure: compile the module around both")
            return outside(_call_outside)(self, *args, **kwargs)
        given = [*args, *[kwargs[name] for name in self.arguments[len(args) :] if name in kwargs]]
        if len(given) != len(self.arguments) or len(given) != len(args) + len(kwargs):
            break_graph("other arguments of a converted module than its forward takes. Cure: pass these")
            return outside(_call_outside)(self, *args, **kwargs)
        call, followed, self.followed = self.in_graph[0], self.followed, None
        if followed is not None and followed[0] == moment(self.in_graph[-1], followed[1], given[0]):
            call, given[0] = self.in_graph[-1], followed[1]
        return self._as_op(call, given)

    def _as_op(self, call: InGraph, given: Sequence[Any]) -> Any:
        why = hindrance(call, given[0], given[1:], None)
        if not why:
            return follow(call, given[0], given[1:])
        break_graph(why)
        made = outside(_call_outside)(call, *given)
        return made[0] if len(made) == 1 else made

    def _recipe(self) -> Recipe | None:
        """The recipe of this call."""
        return current_recipe()

    def check_members(self) -> None:
        """ConversionError if a submodule was replaced, or an attribute that a forward reads was changed, since fuse_; an
        OpfuseWarning for the first submodule that got hooks, also hooks of all modules.
        """
        check_settings(self.module, self.label, self.settings[""])
        if not self.warned and self.members and has_global_hooks():
            self.warned = True
            warn_of_hooks(f"{self.label}.{next(iter(self.members))}", self.label, of_all=True)
        for path, member in self.members.items():
            check_place(self.module, path, member, self.label)
            check_settings(member, f"{self.label}.{path}", self.settings[path])
            if not self.warned and has_hooks(member):
                self.warned = True
                warn_of_hooks(f"{self.label}.{path}", self.label)


def _forward_of(kind: type[nn.Module]) -> Callable[..., Any]:
    """The one ``forward`` function for all modules of a class, since dynamo guards the function of a bound method.

    It has the signature of the class's own forward, which Trainer reads to choose columns of a data set. It has no
    ``__wrapped__``: under ``mixed_precision`` Accelerate unwraps functions, and binds this one to the module itself.
    """
    if kind not in _forwards:

        @wraps(kind.forward, updated=())
        def forward(self: Converted | nn.Module, *args: Any, **kwargs: Any) -> Any:
            own = vars(self)[OWN] if isinstance(self, nn.Module) else self
            return own(*args, **kwargs)

        del forward.__wrapped__
        vars(forward)["__signature__"] = inspect.signature(kind.forward)
        _forwards[kind] = forward
    return _forwards[kind]


OWN = "opfuse_forward"
"""The attribute of a module that holds its :class:`Converted`, beside the method, which others may bind anew."""

_forwards: dict[type[nn.Module], Callable[..., Any]] = {}
"""The forward of each class of converted modules."""


def _blank(made: type[Converted], kind: type[nn.Module]) -> Converted:
    """A copy that has no state yet, for unpickling."""
    copy = made.__new__(made)
    copy.kind = kind
    return copy


def _call_outside(forward: Converted | InGraph, *args: Any, **kwargs: Any) -> Any:
    """The function that compiled code calls outside of its graph."""
    check_partial(forward.label)
    return forward(*args, **kwargs)


def casting(runs: Iterable[PipelineRun]) -> dict[str, BasicOperation]:
    """The ops of ``runs`` that cast, by name."""
    return {name: op for run in runs for name, op in zip(run.names, run.ops) if op.quantizer_slots()}


def converted(module: nn.Module) -> Converted | None:
    """The forward that opfuse gave a module, if it has one."""
    method = vars(module).get("forward")
    own = getattr(method, "__self__", None)
    if own is module and getattr(method, "__func__", None) is _forwards.get(type(module)):
        own = vars(module).get(OWN)
    return own if isinstance(own, Converted) else None
