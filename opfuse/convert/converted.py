"""The forward that a converted module gets. Nothing else of the module is replaced.

It keeps its class, its submodules and its parameters. Under a recipe the new forward runs a pipeline over them, as long as all
holds that the pipeline was proven on. Without a recipe, and for any other call, the forward of its class runs.

In a graph of torch.compile it is one op, which decides by the recipe at run time, as an eager call does. Autograd does not see
into the op, which runs over stand-ins of its arguments. So the modules inside are called as shallow copies with stand-ins for
parameters, and the op runs an autograd of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from opfuse.convert.code import code_of
from opfuse.convert.given import GivenForward, given_forward
from opfuse.convert.guards import ModuleGuard, Proven
from opfuse.convert.pipeline import PipelineRun
from opfuse.convert.report import Conversion, Report
from opfuse.convert.states import METHODS, States
from opfuse.convert.weights import replica, run_with
from opfuse.core.operation import BasicOperation
from opfuse.core.tracers import any_transformed, break_graph, check_exported, check_partial, outside
from opfuse.core.watched import Tree, enroll, enrolled, prepared
from opfuse.errors import ConversionError, Described, OpfuseWarning, describe, notice
from opfuse.inspect.alike import short
from opfuse.recipes import Recipe, autocast, current_recipe
from opfuse.recipes.autocast import in_region, mark_region_used
from opfuse.runtime.compile.backward_tape import BackwardTape
from opfuse.runtime.compile.custom_op import follow, hindrance, parameters_of
from opfuse.runtime.compile.saved_call import CallInside
from opfuse.runtime.interpret.checkpoint_replay import CheckpointedCall, repeated
from opfuse.sources import site
from opfuse.torch_private.compiler import constant_when_traced

SHOWN = "extra_repr"
"""The method that ``print`` asks, which a module may have of its own."""


class _ModuleRegion(autocast):
    """The region of a converted module of class ``kind``: where a call is not for its pipeline, nothing runs under the recipe."""

    def __init__(self, recipe: Recipe, kind: type[nn.Module], *, tells: bool) -> None:
        """tells: whether something would have been cast."""
        super().__init__(recipe=recipe)
        self._kind, self._tells = kind, tells

    def _tell_unused(self, recipe: Recipe) -> None:
        """An OpfuseWarning, once; Python shows one of all modules of a class, for which the text is the same."""
        if self._tells:
            self._tells = False
            got = f"a call that its pipeline is not for ran in high precision, and not under {recipe!r}"
            cure = "pass contiguous tensors in the dtype of its weights, with the arguments and in the mode that docs/fuse.md "
            cure += "names; opfuse.explain(model, ...) says what runs"
            text = notice(self._kind.__name__, got=got, cure=cure)
            warnings.warn_explicit(text, OpfuseWarning, *site(), registry=_SHOWN)


_SHOWN: dict[Any, Any] = {}
"""What Python has shown of such warnings, as it keeps it for a module."""


class Converted(GivenForward):
    """The forward of a converted module.

    arguments: names of the arguments that its pipeline reads. run: the pipeline. recipe: its own, which holds where no
    ``autocast`` region is active. guard: what must be as it was. proven: the calls that it is for. report: of the conversion.
    """

    report: Report | None = None
    strict = False
    """Whether calls that the pipeline is not for are refused, as in a model that :func:`opfuse.invariant` has made."""

    over_ranks = False
    """Whether the module has the parameters of this rank alone, over which no other forward can run."""

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
        super().__init__(module, path)
        self.arguments = tuple(arguments)
        self.run = run
        self.guard = ModuleGuard(module, self.label, members)
        self.proven = proven
        self.recipe = recipe
        self.region = None if recipe is None else _ModuleRegion(recipe, type(module), tells=bool(run.casting()))
        self.warned = False
        self.in_graph: InGraph | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        made, kinds, own = super().__reduce__()
        return made, kinds, {**own, "in_graph": None}

    @property
    def plain(self) -> Callable[..., Any]:
        """The forward that the module has without opfuse.

        ConversionError where nobody can tell: a function around ``forward`` would have kept the class's forward of its time, and
        the class has another one now.
        """
        now = type(self.module).forward
        set_here = getattr(vars(self.module).get("forward"), "__self__", None) is self
        if not set_here and now is not self.guard.of_class:
            wanted, got = "one forward of its class since fuse_ ran", "another one, and a function around the module's forward"
            cure = "replace the class's forward before fuse_, or call opfuse.unfuse_ first"
            raise ConversionError(describe(self.label, wanted=wanted, got=got, cure=cure))
        return partial(now, self.module)

    @property
    def products(self) -> dict[str, BasicOperation]:
        """Its ops that cast, by name."""
        return self.run.casting()

    # What a checkpoint compares, to find the first run of a call that it repeats.

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
            if self.strict:  # refused as compiled code runs: dynamo would go on without an error that it meets
                return outside(_refuse_compiled)(self.label)
            check_exported("a converted module")
            prepared(self.ticket)
            return self._followed(args, kwargs)
        return self.around(partial(self._run, args, kwargs))

    def around(self, run: Callable[[], Any], checkpointed: CheckpointedCall | None = None) -> Any:
        """What ``run()`` gives under the recipe of this call: inside a checkpoint that of its first run. checkpointed: as of
        :func:`repeated`.
        """
        if self.strict and in_region() and current_recipe() != self.recipe:
            raise _not_invariant(self.label, f"a region of {current_recipe()!r}")
        with nullcontext() if self.region is None or in_region() else self.region:
            repeat = repeated(self, checkpointed)
            return run() if repeat is None else repeat(run)

    def _run(self, args: Any, kwargs: Any) -> Any:
        if current_recipe() is None or any_transformed((*args, *kwargs.values(), *self._parameters())):
            return self._unfused(args, kwargs)
        given = self._given(args, kwargs)
        if given is None or not self._is_proven(given):
            return self._unfused(args, kwargs)
        if self.is_changed():
            mark_region_used()  # a warning has told of the change
            return self._unfused(args, kwargs)
        x, *arguments = given
        return self.compute(x, arguments)

    def _unfused(self, args: Any, kwargs: Any) -> Any:
        """What the module's own forward gives, for a call that the pipeline is not for."""
        if self.strict:
            raise _not_invariant(self.label, "another: other arguments, dtypes or modes, or a module that was changed")
        return self.plain(*args, **kwargs)

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
        members = self.guard.members  # dynamo takes the values of any dictionary for true
        modules = members.values() if len(members) else (self.module,)
        return [p for module in modules for p in module._parameters.values()]

    def change(self) -> Described | None:
        """Why the module's own forward runs since it was converted; None: its pipeline does."""
        return self.guard.change() or self.run.change()

    @property
    def entry(self) -> Conversion | None:
        """Its line of the report; for a part of another module's pipeline, which has none there, one that names the other."""
        if self.report is None:
            return None
        lines = {line.path: line for line in (*self.report.of("fused"), *self.report.of("joined"))}
        above = self.path
        while (line := lines.get(above)) is None and above:
            above = above.rpartition(".")[0]
        if line is None or above == self.path:
            return line
        return Conversion(self.path, self.kind.__name__, "joined", became=f"in {line.kind}", recipe=line.recipe)

    def extra_repr(self) -> str:
        """What ``print`` shows of the module: what its class says, and what it runs as, behind it or on a line of its own."""
        own: str = type(self.module).extra_repr(self.module)
        if (entry := self.entry) is None:
            return own
        runs = ("its own forward",) if self.change() else (entry.became, entry.recipe)
        told = f"opfuse: {', '.join(filter(None, runs))}"
        return ("\n" if "\n" in own else ", ").join(filter(None, (own, told)))

    def is_changed(self) -> bool:
        """Whether the module is not what it was when it was converted, of which a warning tells."""
        change = self.change()
        if change is not None:
            self.warn(change, level=6)
        return change is not None

    def warn_of_copy(self) -> None:
        """Say that a shallow copy of the module, which may have other parameters, runs the forward of its class."""
        cure = "call opfuse.fuse_ on a copy.deepcopy, or use DistributedDataParallel in place of DataParallel"
        got = "this is a shallow copy of a converted module; it runs in high precision"
        self.warn(notice(self.label, got=got, cure=cure), level=5)

    def warn(self, text: str, level: int) -> None:
        """Warn once of what keeps calls from the pipeline. level: of the stack, where the call is."""
        if not self.warned:
            self.warned = True
            warnings.warn(text, OpfuseWarning, stacklevel=level)

    def install(self) -> None:
        """Replace the module's forward, and what copies, moves, saves and shows it."""
        super().install()
        vars(self.module).update(States(self.module, self.products).methods)
        vars(self.module).setdefault(SHOWN, self.extra_repr)

    def installed(self, attributes: Mapping[str, Any]) -> set[str]:
        shown = isinstance(getattr(attributes.get(SHOWN), "__self__", None), Converted)
        return super().installed(attributes) | {*METHODS, *([SHOWN] if shown else ())}

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

    def told(self) -> Iterator[tuple[str, ...]]:
        """The rows of the report on the model that was converted."""
        yield from self.report.rows() if self.report is not None else ()

    def compute(self, x: torch.Tensor, arguments: Sequence[torch.Tensor]) -> Any:
        """The result under a recipe."""
        return self.run(x, arguments)

    # In a graph of torch.compile.

    def get_ready(self) -> None:
        """Make what dynamo reads."""
        if self.in_graph is None:
            self.in_graph = InGraph(self, [self], self.run)

    code = None
    """That of its class, as graphs know it, and not an attribute of the module."""

    def resembles(self, other: Converted) -> bool:
        """Whether a graph that was made for ``other``, of the same class, can serve this one."""
        return type(self.module) is type(other.module)

    def outline(self, given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Stand-ins of the outputs for ``given``, if its own forward cannot run on tensors without values."""
        return ()

    def _followed(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The call as an op of a graph, or after a graph break; the forward of its class, where a pipeline would not run."""
        given = self._given(args, kwargs)
        if given is None or not self._is_proven(given) or changed_when_traced(self.ticket):
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


@constant_when_traced
def changed_when_traced(ticket: torch.Tensor) -> bool:
    """Whether the module of a forward is not what it was, when dynamo traces the call. Later changes end the graph, or the op."""
    return bool(enrolled(int(ticket)).is_changed())


@constant_when_traced
def apart_when_traced(ticket: torch.Tensor) -> bool:
    """Whether dynamo traces the call without a recipe, which the graph that it makes remembers."""
    own: Converted = enrolled(int(ticket))
    apart = current_recipe() is None and (own.region is None or in_region())
    if own.in_graph is not None:
        own.in_graph.traced_apart |= apart
    return apart


class InGraph:
    """A call of a converted module, or of several, as an op knows a pipeline.

    members: forwards that share one product, ``owner`` being the first; the op returns the columns of all in one tensor, of which
    the graph takes views, since outputs of one op may not share memory. run: the pipeline of the call.
    """

    ops: tuple[BasicOperation, ...] = ()
    """No ops of the caller's."""

    traced_apart = False
    """Whether a graph has this product alone because it was traced without a recipe."""

    def __init__(self, owner: Converted, members: Sequence[Converted], run: PipelineRun) -> None:
        self.ticket = enroll(self)
        self.owner, self.members, self.run = owner, members, run
        self.label = owner.label
        self.modules = [member.module for member in members]
        parts = [(name, type(part), type(part).extra_repr(part)) for one in self.modules for name, part in one.named_modules()]
        self.form = f"{type(owner).__name__} {owner.arguments} {parts}"  # without what opfuse says of them, such as paths
        self._find()

    def get_ready(self) -> None:
        """Find the parameters, unless modules and names are those of the last time."""
        for tree in self._trees:
            if not tree.stands:
                return self._find()

    def _find(self) -> None:
        self.code = code_of(type(part) for module in self.modules for part in module.modules())
        self._trees = tuple(map(Tree.of, self.modules))
        self.slots = tuple((slot, name) for tree in self._trees for slot, names in tree.parameters for name in names)

    def outline(self, given: Sequence[torch.Tensor], dtype: torch.dtype | None) -> list[torch.Tensor]:
        """Stand-ins of the outputs for ``given``, which may have no values."""
        with autocast(enabled=False):
            return list(self.owner.outline(given)) or [self._plain(*given)]

    def reach(self, given: Sequence[torch.Tensor], dtype: torch.dtype | None) -> Sequence[bool]:
        """Whether a gradient comes to each input and parameter: to those that the pipeline reads; empty where more runs."""
        if self.run is None:
            return ()
        parameters = self.run.parameters()
        inputs = [not index or index - 1 in self.run.extras for index in range(len(given))]
        return [*inputs, *[any(own is parameter for own in parameters) for parameter in parameters_of(self)]]

    def __call__(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The call outside of a graph, after a break, as an eager one."""
        return (self.owner.around(partial(self._run, given)),)

    def run_inside(self, call: CallInside) -> tuple[torch.Tensor, ...]:
        """The call inside of an op."""
        result: tuple[torch.Tensor, ...] = self.owner.around(partial(self._run_inside, call), call.checkpointed)
        return result

    def _run_inside(self, call: CallInside) -> tuple[torch.Tensor, ...]:
        """A single pipeline records its backward pass on a tape; anything else is recorded by autograd."""
        pipeline = self.run
        if current_recipe() is None or pipeline.spare_of(call.given[0], call.trains):
            return call.recorded_by_autograd(lambda given, instead: run_with(instead, partial(self._run, given)))
        self._check()
        if self.traced_apart:
            got = "the graph was traced without a recipe, and runs under one; the products of one input stay apart in it"
            cure = "trace it under the recipe: torch.compiler.reset(), then call it inside opfuse.autocast"
            self.owner.warn(notice(self.label, got=got, cure=cure), level=2)

        def run(given: Sequence[torch.Tensor], tape: BackwardTape) -> Any:
            return run_with(tape, partial(pipeline, given[0], given[1:]))

        fuser = pipeline.pipeline()
        return call.recorded_on_tape(run, fuser.calls, fuser.surroundings())

    def _check(self) -> None:
        """ConversionError in a graph that was made for what the modules were when they were converted."""
        for change in (self.run.change(), *[member.guard.change() for member in self.members]):
            if change is not None:
                raise ConversionError(change)

    def _run(self, given: Sequence[torch.Tensor]) -> torch.Tensor:
        if current_recipe() is None:
            return self._plain(*given)
        self._check()
        x, *arguments = given
        result: torch.Tensor = self.run(x, arguments)
        return result

    def _plain(self, x: torch.Tensor, *arguments: torch.Tensor) -> torch.Tensor:
        """The result by the modules' original forwards."""
        results = [type(module).forward(replica(module, plain=True), x, *arguments) for module in self.modules]
        result: torch.Tensor = torch.cat(results, dim=-1) if len(results) > 1 else results[0]
        return result


def _refuse_compiled(label: str) -> None:
    raise _not_invariant(label, "torch.compile, which orders sums anew")


def _not_invariant(label: str, got: str) -> ConversionError:
    """For a call of an invariant model in which it would not be so."""
    cure = "call the model as it was when opfuse.invariant made it, outside of other recipes, or opfuse.unfuse_ it"
    wanted = "a call in which its rows do not depend on each other"
    return ConversionError(describe(f"{label} of an invariant model", wanted=wanted, got=got, cure=cure))


def _call_outside(forward: InGraph, *args: Any) -> Any:
    """The function that compiled code calls outside of its graph."""
    check_partial(forward.label)
    return forward(*args)


def converted(module: nn.Module) -> Converted | None:
    """The forward that :func:`opfuse.fuse_` gave a module that it has converted."""
    own = given_forward(module)
    return own if isinstance(own, Converted) else None


def is_converted(model: nn.Module) -> bool:
    """Whether it has converted some module of ``model``."""
    return any(converted(module) is not None for module in model.modules())
