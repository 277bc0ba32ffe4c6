"""Products of one tensor, such as query, key and value: one product computes all, and each module returns its columns.

The code of the module around them shows which get the same variable in a straight line of code (``method_calls.py``). When that
code calls them there, the first computes all, and the others take their columns if they get that very tensor, unwritten, with the
same parameters and modes. Any other call, such as one by a function that the code calls, computes its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from operator import is_
from threading import get_ident
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from opfuse.convert.converted import Converted, InGraph, apart_when_traced, changed_when_traced, converted
from opfuse.convert.leaves import leaf_of, obstacle, weight_of
from opfuse.convert.method_calls import KnownParts, MethodCalls, calm_methods, code_of_method, facts_of, is_own, methods_of
from opfuse.convert.pipeline import PipelineRun
from opfuse.convert.record import modes
from opfuse.convert.weights import MadeParameters, Weight
from opfuse.core.context import versions
from opfuse.core.operation import BasicOperation
from opfuse.inspect.alike import short
from opfuse.recipes.autocast import mark_region_used
from opfuse.runtime.compile.custom_op import hindrance, moment
from opfuse.runtime.compile.saved_call import autocast_like
from opfuse.torch_private.compiler import changing_outside
from opfuse.torch_private.modules import has_global_hooks, has_hooks
from opfuse.torch_private.stack import is_followed_in, place_of_call
from opfuse.torch_private.tensors import hooks_of, version_of

NUMBERS = (int, float)
WRAPPED = "base_layer"
"""The name of a layer in the adapter that wraps it, and calls it on its own input."""


class Waiting(NamedTuple):
    """Columns that are computed and not yet returned, by module, and what they were computed with: its parameters, how often
    these and the input were written, modes of torch, and the thread.
    """

    columns: dict[int, torch.Tensor]
    parameters: Sequence[Sequence[torch.Tensor | None]]
    writes: Sequence[Sequence[int] | None]
    modes: tuple[Any, ...]
    thread: int


class Shared:
    """One product for several modules.

    parent: the module around, one of whose methods calls them. code: of that method. names: of the modules in the parent, or of
    their adapters. places: of the call of each, as offsets in the code. modules, numbers, codes: submodules, numbers and methods
    of the parent that it uses there, by name. wrapped: by adapters, whose code nobody has read. waiting: by the input. members:
    the modules' forwards, in order. inside, followed: in a graph of torch.compile, whether it follows that code; the moment of
    the product, and the columns not yet returned.
    """

    def __init__(
        self, run: PipelineRun, columns: Sequence[int], parent: nn.Module, method: MethodCalls, names: Sequence[str]
    ) -> None:
        self.run = run
        self.columns = tuple(columns)
        self.parent, self.kind = parent, type(parent)
        self.code: CodeType | None = method.code
        self.names, self.sources = list(names), [*zip(*[[each[:2] for each in own] for own in run.made[0].sources.values()])]
        self.places = [method.offsets(name) for name in names]
        used, own = method.used_with(names), vars(parent)
        self.modules = {name: module for name in used if (module := parent._modules.get(name)) is not None}
        self.numbers = [name for name in used if type(own.get(name)) in NUMBERS]
        codes = {name: code_of_method(self.kind, name) for name in used - self.modules.keys() - own.keys()}
        self.codes = {name: code for name, code in codes.items() if code is not None}
        self.wrapped = any(WRAPPED in parent._modules[name]._modules for name in names)  # type: ignore[union-attr]
        self.waiting: MutableMapping[torch.Tensor, Waiting] = WeakTensorKeyDictionary()
        self.members: list[Sibling] = []
        self.in_graph: InGraph | None = None
        self.returns_all = method.returns_all(names)
        self.inside = False
        self.followed: tuple[Any, list[torch.Tensor]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        codes = [(code.co_name, facts_of(code)) for code in (self.code, *self.codes.values()) if code is not None]
        return {**vars(self), "code": None, "codes": codes, "waiting": None, "in_graph": None, "followed": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        codes = [code_of_method(state["kind"], name) for name, _ in state["codes"]]
        same = all(code and facts_of(code) == facts for code, (_, facts) in zip(codes, state["codes"]))
        code, *others = codes if same and codes else [None]  # in another process they may be others
        by_name = {other.co_name: other for other in others if other is not None}
        vars(self).update(state, code=code, codes=by_name, waiting=WeakTensorKeyDictionary())

    def forget(self) -> None:
        """Drop what is left of a run of the code that ended between the calls: the next one begins."""
        for x in [x for x, columns in self.waiting.items() if columns.thread == get_ident()]:
            self.waiting.pop(x, None)

    def first(self, x: torch.Tensor) -> torch.Tensor | None:
        """The columns of the first module; those of the others wait until they are taken, or ``x`` is gone. None: it is alone."""
        parameters = [self._parameters(index) for index in range(len(self.members))]
        writes = [self._writes(x, own) for own in parameters]
        if None in writes or not (self._is_called(0) and self._stands()):
            return None
        if torch.is_grad_enabled() and any(p is not None and any(hooks_of(p)) for own in parameters for p in own):
            return None  # they run in a backward pass through the product, also without a gradient
        one, *others = _Columns.apply(self.run(x, ()), self.columns, self.run.made[0])  # type: ignore[no-untyped-call]
        self.waiting[x] = Waiting(dict(enumerate(others, 1)), parameters, writes, modes(), get_ident())
        return one  # type: ignore[no-any-return]

    def take(self, index: int, x: torch.Tensor) -> torch.Tensor | None:
        """The columns of another module; None if they were not computed for this tensor, as it, all parameters and modes are."""
        found = self.waiting.get(x)
        if found is None or not self._is_called(index) or not self._is_in_place(self.names[0]):
            return None
        parameters = self._parameters(index)
        now = get_ident(), modes(), self._writes(x, parameters)
        if (found.thread, found.modes, found.writes[index]) != now or not all(map(is_, found.parameters[index], parameters)):
            return None
        columns = found.columns.pop(index, None)
        if not found.columns:
            self.waiting.pop(x, None)
        return columns

    def is_changed(self) -> bool:
        """Whether the weights may share a scale no more, of which a warning tells."""
        change = self.run.change()
        if change is not None:
            self.members[0].warn(change, level=7)
        return change is not None

    def _parameters(self, index: int) -> list[torch.Tensor | None]:
        """Those of one module."""
        return [module._parameters[own] for module, own in self.sources[index]]

    def _writes(self, x: torch.Tensor, parameters: Sequence[torch.Tensor | None]) -> list[int] | None:
        """How often the input and the parameters were written; None where adapters may write and torch does not count."""
        try:
            return [version_of(each) for each in (x, *parameters) if each is not None]
        except RuntimeError:  # of tensors of inference mode
            return None if self.wrapped else versions(x, *parameters)

    def _is_called(self, index: int) -> bool:
        """Whether the code calls this module where it was read to do so, as a method of the parent."""
        place = None if self.code is None else place_of_call(self.code, WRAPPED)
        return place is not None and place[0] in self.places[index] and place[1] is self.parent

    def is_followed(self) -> bool:
        """The same where dynamo follows the code, which has no places, and where what it returns depends on all columns: in a
        graph, those that no loss depends on get a gradient of zeros in place of none, and their weights with them.
        """
        return self.code is not None and self.returns_all and is_followed_in(self.code, WRAPPED) and self._stands()

    def _stands(self) -> bool:
        """Whether all that the code uses there is what it was, without hooks, which may write where nothing counts it."""
        own = vars(self.parent)
        if type(self.parent) is not self.kind or has_global_hooks():
            return False
        if self.wrapped and any(has_hooks(member.module) for member in self.members):
            return False
        return (
            all(map(self._is_in_place, self.modules))
            and all(type(own.get(name)) in NUMBERS for name in self.numbers)
            and all(name not in own and is_own(self.kind, name, code) for name, code in self.codes.items())
        )

    def _is_in_place(self, name: str) -> bool:
        """Whether the parent calls the same submodule, and that runs the forward of its class, or opfuse's, and no more."""
        module = self.modules[name]
        if self.parent._modules.get(name) is not module or has_hooks(module):
            return False
        return "forward" not in vars(module) or converted(module) is not None


class _Columns(torch.autograd.Function):
    """Columns of a matrix, each in memory of its own, as products of their own are.

    The weights of columns that no loss depends on get no gradient, as those of a product of their own get none.
    """

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, columns: Sequence[int], made: MadeParameters) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.shapes = [(*whole.shape[:-1], count) for count in columns]
        ctx.blank, ctx.reached = whole.new_zeros(()), made.reached
        return tuple(part.clone(memory_format=torch.contiguous_format) for part in whole.split(tuple(columns), dim=-1))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor, None, None]:
        ctx.reached[:] = [grad is not None for grad in grads]
        parts = [ctx.blank.expand(shape) if grad is None else grad for shape, grad in zip(ctx.shapes, grads)]
        with autocast_like(ctx.blank, None):  # which may be on around the backward pass, with another dtype
            return torch.cat(parts, dim=-1), None, None


def _follow(shared: Shared, columns: tuple[Any, list[torch.Tensor]] | None) -> None:
    """A function of its own, since dynamo allows no change in a checkpoint but by :func:`changing_outside`."""
    shared.followed = columns


class Sibling(Converted):
    """The forward of a module that shares its product with others."""

    shared: Shared
    index: int

    @property
    def runs(self) -> tuple[PipelineRun, ...]:
        return (*super().runs, *([] if self.index else [self.shared.run]))

    @property
    def products(self) -> dict[str, BasicOperation]:
        """Its own product, for calls alone; the first also has the product of all."""
        products = super().products
        if not self.index:
            (products["shared"],) = self.shared.run.casting().values()
        return products

    def get_ready(self) -> None:
        """Make what dynamo reads; the first also makes the call for all."""
        super().get_ready()
        shared = self.shared
        shared.inside = shared.is_followed()
        if not self.index and shared.in_graph is None:
            shared.in_graph = InGraph(self, shared.members, shared.run)

    def _as_op(self, call: Any, given: Sequence[Any]) -> Any:
        """In a graph the first computes all; the others recognise the tensor as long as nothing that the product read is written.
        Across graphs that is not known. A graph that is traced without a recipe has a product for each: one product would sum the
        gradients of its input before those of the input's other readers, and the last bits would not be those of torch.
        """
        shared, whole, (x,) = self.shared, self.shared.in_graph, given
        followed = shared.followed
        changing_outside(_follow, shared, None)
        if whole is None or not shared.inside or hindrance(whole, x, (), None):
            return super()._as_op(call, given)
        if self.index == 0:
            changed = any(changed_when_traced(member.ticket) for member in shared.members)
            if changed or self._trains_apart(x) or apart_when_traced(self.ticket):
                return super()._as_op(call, given)
            columns = super()._as_op(whole, given).split(shared.columns, dim=-1)
            first, *others = [part.clone(memory_format=torch.contiguous_format) for part in columns]
            changing_outside(_follow, shared, (moment(whole, x), others))
            return first
        if followed is None or followed[0] != moment(whole, x):
            return super()._as_op(call, given)
        if self.index < len(followed[1]):
            changing_outside(_follow, shared, followed)
        return followed[1][self.index - 1]

    def _run(self, args: Any, kwargs: Any) -> Any:
        if not self.index:
            self.shared.forget()
        return super()._run(args, kwargs)

    def compute(self, x: torch.Tensor, arguments: Sequence[torch.Tensor]) -> Any:
        if self.strict:  # whether they share depends on the call, and with the columns a library may change the order of sums
            return super().compute(x, arguments)
        if self.index:
            columns = self.shared.take(self.index, x)
        else:
            changed = self.shared.is_changed() or any(other.is_changed() for other in self.shared.members if other is not self)
            columns = None if changed or self._trains_apart(x) else self.shared.first(x)
        if columns is None:
            return super().compute(x, arguments)
        if self.index:
            mark_region_used()
        return columns

    def _trains_apart(self, x: torch.Tensor) -> bool:
        """Whether some of the results want a gradient and others do not."""
        wants = {any(p is not None and p.requires_grad for p in member._parameters()) for member in self.shared.members}
        return len(wants) > 1 and not x.requires_grad


def siblings(module: nn.Module, forwards: Mapping[nn.Module, Converted]) -> Iterator[list[Sibling]]:
    """Groups of submodules of ``module``, each converted alone so far, that can share a product, in the order of their calls."""
    alone = {name: weight for name, child in module.named_children() if (weight := _alone(child, forwards)) is not None}
    if len(alone) < 2:
        return
    kind: Any = type(module)
    called = {name for method in methods_of(kind) for name in method.called}
    others = [(name, child) for name, child in module.named_children() if name in called and _is_called_as_torch_does(child)]
    leaves = {name for name, child in others if obstacle(child) is None and leaf_of(child)}
    numbers = frozenset(name for name, value in vars(module).items() if type(value) in NUMBERS)
    grouped = set[str]()
    known = KnownParts(frozenset(alone), frozenset(leaves), numbers, calm_methods(module, numbers))
    for method in methods_of(kind, known):
        names = [call.name for call in method.calls if call.name in alone and call.name not in grouped]
        groups = list[tuple[str, ...]]()
        for name in dict.fromkeys(names):
            longer = [(*group, name) for group in groups]
            fits = [_agree(group, alone, forwards) and method.joins(group) for group in longer]
            if any(fits):
                groups[fits.index(True)] = longer[fits.index(True)]
            else:
                groups.append((name,))
        grouped.update(names)
        for group in groups:
            if len(group) > 1:
                weights = [alone[name] for name in group]
                shared = partial(Shared, parent=module, method=method, names=group)
                yield _joined([forwards[weight.module] for weight in weights], weights, shared)


def _alone(child: nn.Module, forwards: Mapping[nn.Module, Converted]) -> Weight | None:
    """The product that a submodule is, or that it begins with: adapters call the layer that they wrap, on their input."""
    for module in (child, child._modules.get(WRAPPED)):
        if module is None or not _is_called_as_torch_does(module):
            continue
        if type(forwards.get(module)) is Converted and (weight := weight_of(module)) is not None:
            return None if has_hooks(child) else weight
    return None


def _is_called_as_torch_does(module: nn.Module) -> bool:
    return type(module).__call__ is nn.Module.__call__


def _agree(group: Sequence[str], alone: Mapping[str, Weight], forwards: Mapping[nn.Module, Converted]) -> bool:
    """Whether one product under one recipe can do for the last of a group and all before it."""
    *others, last = [alone[name] for name in group]
    return all(last.agrees(other) and forwards[last.module].recipe == forwards[other.module].recipe for other in others)


def _joined(alone: Sequence[Converted], weights: Sequence[Weight], make: Callable[..., Shared]) -> list[Sibling]:
    """The forwards of modules, each converted alone so far, that share a product."""
    name = "+".join(forward.path for forward in alone)
    run = PipelineRun(path=short(name))
    run.multiply(weights, name, (name, f"{name}.bias"))
    shared = make(run, [weight.out_features for weight in weights])
    for index, one in enumerate(alone):
        options: dict[str, Any] = {"arguments": one.arguments, "run": one.run, "recipe": one.recipe, "proven": one.proven}
        sibling = Sibling(one.module, one.path, members={}, **options)
        sibling.shared, sibling.index = shared, index
        shared.members.append(sibling)
    return shared.members
