"""The forward that a converted module gets. Nothing else of the module is replaced.

It keeps its class, its submodules and its parameters. Under a recipe the new forward runs a pipeline over them, as long as all
holds that the pipeline was proven on. Without a recipe, and for any other call, the forward of its class runs.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from itertools import pairwise
from types import MethodType
from typing import Any

import torch
from torch import nn

from opfuse.convert.guards import ModuleGuard
from opfuse.convert.in_graph import InGraph
from opfuse.convert.pipeline import PipelineRun
from opfuse.convert.weights import MadeParameters, stand_ins
from opfuse.core.operation import BasicOperation
from opfuse.core.tracers import any_transformed, break_graph, check_exported, check_partial, enroll, outside, prepared
from opfuse.errors import ConversionError, OpfuseWarning, describe
from opfuse.inspect.alike import short
from opfuse.recipes import Recipe, autocast, current_recipe, in_region
from opfuse.runtime.compile.custom_op import autocast_dtype, follow, hindrance
from opfuse.runtime.interpret.checkpoint_replay import repeated
from opfuse.torch_private.stack import module_that_calls


@dataclass(frozen=True)
class Proven:
    """The calls for which a pipeline was proven to compute what the forward does, by types, dtypes and shapes of their arguments.

    linear: the pipeline is that of one linear layer, which takes what a linear layer takes. ranks: numbers of dimensions of
    the input. dtypes: of inputs and parameters; empty: any. in_autocast: also under torch.autocast. columns: of each further
    argument, which has the rows of the first. views: only those whose arguments can be viewed as a matrix.
    """

    linear: bool = False
    ranks: tuple[int, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    in_autocast: bool = False
    columns: tuple[int, ...] = ()
    views: bool = False

    def covers(self, x: Any, extras: Sequence[Any], parameters: Sequence[torch.Tensor | None]) -> bool:
        """Whether a call with these arguments is one of them."""
        dense = not isinstance(x, torch.Tensor) or (x.layout is torch.strided and not x.is_nested)
        if not dense or type(x) is not torch.Tensor:
            return dense and self.linear
        cast = autocast_dtype(x)
        dtype = x.dtype if cast is None else cast
        if cast is None and not all(p is None or p.dtype == dtype for p in parameters):
            return False
        if cast is not None and torch.float64 in (x.dtype, *[p.dtype for p in parameters if p is not None]):
            return False  # which torch.autocast leaves alone
        suits = not self.views or all(_is_matrix(each) for each in (x, *extras) if isinstance(each, torch.Tensor))
        if self.linear or not suits:
            return suits
        if x.dim() not in self.ranks or 0 in x.shape or (cast is not None and not self.in_autocast) or _is_tagged(x):
            return False
        fits = not self.dtypes or dtype in self.dtypes
        return fits and all(self._adds(x, dtype, *pair) for pair in zip(extras, self.columns))

    def _adds(self, x: torch.Tensor, dtype: torch.dtype, extra: Any, columns: int) -> bool:
        plain = type(extra) is torch.Tensor and extra is not x
        return plain and extra.dtype == dtype and extra.shape == (*x.shape[:-1], columns)


def _is_matrix(x: torch.Tensor) -> bool:
    """Whether ``x.view(-1, x.shape[-1])`` exists: its leading dimensions lie behind each other."""
    sizes = [(size, stride) for size, stride in zip(x.shape[:-1], x.stride()) if size != 1]
    return all(stride == size * inner for (_, stride), (size, inner) in pairwise(sizes))


def _is_tagged(x: torch.Tensor) -> bool:
    """Whether somebody has assigned attributes to a tensor, which code that a pipeline stands for may read."""
    return not torch.compiler.is_compiling() and any(not name.startswith("_dynamo") for name in vars(x))


class Converted:
    """The forward of a converted module.

    path: that of the module in the model. arguments: names of the arguments that its pipeline reads. run: the pipeline.
    recipe: its own, which holds where no ``autocast`` region is active. guard: what must be as it was. proven: the calls that
    it is for.
    """

    def __init__(
        self,
        module: nn.Module,
        path: str,
        *,
        arguments: Sequence[str],
        run: PipelineRun,
        members: dict[str, nn.Module],
        recipe: Recipe | None,
        proven: Proven,
    ) -> None:
        self.module = module
        self.kind = type(module)
        self.path = path
        self.arguments = tuple(arguments)
        self.run = run
        self.guard = ModuleGuard(module, self.label, members)
        self.proven = proven
        self.recipe = recipe
        self.region = None if recipe is None else autocast(recipe=recipe)
        self.warned = False
        self.ticket = enroll(self)
        self.in_graph: InGraph | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # The module that a copy belongs to has its ``forward``, and may need it before the copy has its state.
        own = {name: value for name, value in self.__dict__.items() if name != "ticket"}
        return _blank, (type(self), type(self.module)), {**own, "in_graph": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, ticket=enroll(self))

    @property
    def made(self) -> list[MadeParameters]:
        """The parameters that its pipeline makes for each call."""
        return self.run.made

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
        return casting([self.run])

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
        if self.region is None or in_region():
            return self._checkpointed(args, kwargs)
        with self.region:
            return self._checkpointed(args, kwargs)

    def _checkpointed(self, args: Any, kwargs: Any) -> Any:
        """Inside a checkpoint, the recipe is that of the first run, whatever is active when it is run again."""
        repeat = repeated(self)
        return self._run(args, kwargs) if repeat is None else repeat(partial(self._run, args, kwargs))

    def _run(self, args: Any, kwargs: Any) -> Any:
        if self._recipe() is None or any_transformed((*args, *kwargs.values(), *self._parameters())):
            return self.plain(*args, **kwargs)
        given = self._given(args, kwargs)
        if given is None or not self._is_proven(given) or self.is_changed():
            return self.plain(*args, **kwargs)
        x, *arguments = given
        return self.compute(x, arguments)

    def _given(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any] | None:
        """The arguments of the pipeline in order; None if the call has others."""
        given = [*args, *[kwargs[name] for name in self.arguments[len(args) :] if name in kwargs]]
        return given if len(given) == len(self.arguments) == len(args) + len(kwargs) else None

    def _is_proven(self, given: Sequence[Any]) -> bool:
        x, *extras = given
        return self._has_one_mode() and self.proven.covers(x, extras, self._parameters())

    def _has_one_mode(self) -> bool:
        """Whether all of the module trains or none of it, and no dropout draws: those of the module draw what they did."""
        trains = self.module.training
        for member in self.guard.members.values():
            if member.training is not trains or (trains and isinstance(member, nn.Dropout) and member.p):
                return False
        return True

    def _parameters(self) -> list[torch.Tensor | None]:
        """The parameters of the modules that the pipeline stands for."""
        modules = self.guard.members.values() or (self.module,)
        return [p for module in modules for p in module._parameters.values()]

    def is_changed(self) -> bool:
        """Whether the module is not what it was when it was converted, of which an OpfuseWarning tells once."""
        change = self.guard.change()
        if change is not None and not self.warned:
            self.warned = True
            warnings.warn(change, OpfuseWarning, stacklevel=5)
        return change is not None

    def beside(self, copy: nn.Module, args: Any, kwargs: Any) -> Any:
        """The call of a shallow copy of the module, which may have other parameters."""
        if not self.warned:
            self.warned = True
            cure = "call opfuse.fuse_ on a copy.deepcopy, or use DistributedDataParallel in place of DataParallel"
            got = "a shallow copy of it, which computes in high precision"
            told = describe(self.label, wanted="calls of the module that fuse_ converted", got=got, cure=cure)
            warnings.warn(told, OpfuseWarning, stacklevel=4)
        return type(copy).forward(copy, *args, **kwargs)

    @property
    def runs(self) -> tuple[PipelineRun, ...]:
        """The pipelines that it may run."""
        return (self.run,)

    def named_ops(self) -> Iterator[tuple[str, BasicOperation]]:
        """Its ops, each with a path in the model; the product of a linear layer has that of the layer."""
        for run in self.runs:
            for name, op in zip(run.names, run.ops):
                below = "" if name == "weight" else short(name).removeprefix(run.path).lstrip(".")
                yield ".".join(filter(None, (run.path, below))), op

    def compute(self, x: torch.Tensor, arguments: Sequence[torch.Tensor]) -> Any:
        """The result under a recipe."""
        return self.run(x, arguments)

    # In a graph of torch.compile.

    def get_ready(self) -> None:
        """Make what dynamo reads."""
        if self.in_graph is None:
            self.in_graph = InGraph(self)

    def pipeline(self, *, shared: bool) -> PipelineRun | None:
        """The pipeline of a call that runs nothing else; None if it runs more."""
        return self.run if type(self).compute is Converted.compute else None

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

    def check_unchanged(self) -> None:
        """ConversionError in a graph that was made for what the module was when it was converted."""
        change = self.guard.change()
        if change is not None:
            raise ConversionError(change)

    def _followed(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The call as an op of a graph, or after a graph break; the forward of its class, where a pipeline would not run."""
        given = self._given(args, kwargs)
        if given is None or not self._is_proven(given):
            return type(self.module).forward(self.module, *args, **kwargs)
        return self._as_op(self.in_graph, given)

    def _as_op(self, call: Any, given: Sequence[Any]) -> Any:
        """The op of ``call``, an :class:`InGraph` that :meth:`get_ready` has made."""
        why = hindrance(call, given[0], given[1:], None)
        if not why:
            return follow(call, given[0], given[1:])
        break_graph(why)
        made = outside(_call_outside)(call, *given)
        return made[0] if len(made) == 1 else made

    def _recipe(self) -> Recipe | None:
        """The recipe of this call."""
        return current_recipe()


def _forward_of(kind: type[nn.Module]) -> Callable[..., Any]:
    """The one ``forward`` function for all modules of a class, since dynamo guards the function of a bound method.

    It has the signature of the class's own forward, which Trainer reads to choose columns of a data set. It has no
    ``__wrapped__``: under ``mixed_precision`` Accelerate unwraps functions, and binds this one to the module itself.
    """
    if kind not in _forwards:

        @wraps(kind.forward, updated=())
        def forward(self: Converted | nn.Module, *args: Any, **kwargs: Any) -> Any:
            own = vars(self)[OWN] if isinstance(self, nn.Module) else self
            if torch.compiler.is_compiling() or stand_ins() is not None:
                return own(*args, **kwargs)
            called = module_that_calls()  # a shallow copy of a module has its forward, which knows the original alone
            return own(*args, **kwargs) if called in (None, own.module) else own.beside(called, args, kwargs)

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


def _call_outside(forward: InGraph, *args: Any) -> Any:
    """The function that compiled code calls outside of its graph."""
    check_partial(forward.label)
    return forward(*args)


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
