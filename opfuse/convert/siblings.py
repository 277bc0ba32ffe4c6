"""Products of one tensor, such as query, key and value: one product computes all, and each module returns its columns.

The code of the module around them shows which may get the same tensor, with nothing but known functions between. When that code
runs, the first of them computes all, and the others take their columns if they get that very tensor in the same run of the code,
unwritten, with the same parameters. Any other call, such as one from outside of that code, computes its own.
"""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import combinations
from textwrap import dedent
from types import CodeType
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from opfuse.convert.converted import Converted, casting
from opfuse.convert.guards import codes_of
from opfuse.convert.in_graph import InGraph
from opfuse.convert.leaves import leaf_of, obstacle, weight_of
from opfuse.convert.pipeline import PipelineRun
from opfuse.convert.record import PARTS, SIZES, TRANSPOSES, VIEWS
from opfuse.convert.weights import MadeParameters, Weight
from opfuse.core.operation import BasicOperation
from opfuse.inspect.alike import short
from opfuse.recipes import mark_region_used
from opfuse.runtime.compile.custom_op import hindrance, moment
from opfuse.torch_private.modules import has_global_hooks, has_hooks
from opfuse.torch_private.stack import run_of


class CallingPlace(NamedTuple):
    """Where modules are called: in a method of the class ``kind``, as children ``names``, beside ``known`` ones of self."""

    kind: type[nn.Module]
    names: tuple[str, ...]
    known: frozenset[str]


class Shared:
    """One product for several modules.

    place: where they are called. waiting: by the input, the run of the code at that place, and columns that are computed and not
    yet returned, by module. members: the modules' forwards, in order. inside, followed: in a graph of torch.compile, whether it
    follows that code; the moment of the product, and the columns not yet returned.
    """

    def __init__(self, run: PipelineRun, columns: Sequence[int], place: CallingPlace) -> None:
        self.run = run
        self.columns = tuple(columns)
        self.place = place
        self.waiting: MutableMapping[torch.Tensor, tuple[int, dict[int, torch.Tensor]]] = WeakTensorKeyDictionary()
        self.members: list[Sibling] = []
        self.in_graph: InGraph | None = None
        self.inside = False
        self.followed: tuple[Any, list[torch.Tensor]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "waiting": None, "in_graph": None, "followed": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, waiting=WeakTensorKeyDictionary())

    def views(self, whole: torch.Tensor) -> Sequence[torch.Tensor]:
        """The columns of all modules in a graph."""
        return [part.contiguous() for part in whole.split(self.columns, dim=-1)]

    def first(self, x: torch.Tensor) -> torch.Tensor | None:
        """The columns of the first module; those of the others wait until they are taken, or ``x`` is gone. None: it is alone."""
        run = self.running()
        if run is None:
            return None
        one, *others = _Columns.apply(self.run(x, ()), self.columns, self.run.made[0])  # type: ignore[no-untyped-call]
        self.waiting[x] = run, dict(enumerate(others, 1))
        return one  # type: ignore[no-any-return]

    def take(self, index: int, x: torch.Tensor) -> torch.Tensor | None:
        """The columns of another module; None if they were not computed for this tensor in this run."""
        run, left = self.waiting.get(x, (None, {}))
        if run is None or run != self.running():
            return None
        found = left.pop(index, None)
        if not left:
            self.waiting.pop(x, None)
        return found

    def running(self, *, followed: bool = False) -> int | None:
        """The run of the code at the place, as the ``id()`` of its frame; followed: of dynamo's own frame, which follows it.

        None if they are called from elsewhere, or with hooks, which may write to their input where nothing counts it.
        """
        code = _code_at(self.place)
        if code is None or has_global_hooks() or any(has_hooks(each.module) for each in self.members):
            return None
        return run_of(code, followed=followed)


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
        return torch.cat(parts, dim=-1), None, None


class Sibling(Converted):
    """The forward of a module that shares its product with others."""

    shared: Shared
    index: int

    @property
    def made(self) -> list[MadeParameters]:
        return self.shared.run.made

    @property
    def runs(self) -> tuple[PipelineRun, ...]:
        return (*super().runs, *([] if self.index else [self.shared.run]))

    @property
    def products(self) -> dict[str, BasicOperation]:
        """Its own product, for calls alone; the first also has the product of all."""
        alone = super().products
        if self.index:
            return alone
        (product,) = casting([self.shared.run]).values()
        return alone | {"shared": product}

    def check_unchanged(self) -> None:
        """Check this module; the first checks all, since its product reads the parameters of all."""
        for each in [self] if self.index else self.shared.members:
            Converted.check_unchanged(each)

    def get_ready(self) -> None:
        """Make what dynamo reads; the first also makes the call for all."""
        super().get_ready()
        shared = self.shared
        shared.inside = shared.running(followed=True) is not None
        if not self.index and shared.in_graph is None:
            shared.in_graph = InGraph(self, others=[each for each in shared.members if each is not self])

    def _as_op(self, call: Any, given: Sequence[Any]) -> Any:
        """In a graph the first computes all; the others recognise the tensor as long as nothing that the product read is written.
        Across graphs that is not known.
        """
        shared, whole, (x,) = self.shared, self.shared.in_graph, given
        followed, shared.followed = shared.followed, None
        if whole is None or not shared.inside or hindrance(whole, x, (), None):
            return super()._as_op(call, given)
        if self.index == 0:
            if self._trains_apart(x):
                return super()._as_op(call, given)
            first, *others = shared.views(super()._as_op(whole, given))
            shared.followed = moment(whole, x), others
            return first
        if followed is None or followed[0] != moment(whole, x):
            return super()._as_op(call, given)
        if self.index < len(followed[1]):
            shared.followed = followed
        return followed[1][self.index - 1]

    def pipeline(self, *, shared: bool) -> PipelineRun | None:
        """The pipeline of all modules, if ``shared``."""
        return self.shared.run if shared else None

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """The columns of all modules, in one tensor."""
        return self.shared.run(x, ())

    def compute(self, x: torch.Tensor, arguments: Sequence[torch.Tensor]) -> Any:
        if self.index:
            found = self.shared.take(self.index, x)
        else:
            alone = self._trains_apart(x) or any(each.is_changed() for each in self.shared.members if each is not self)
            found = None if alone else self.shared.first(x)
        if found is None:
            return super().compute(x, arguments)
        if self.index:
            mark_region_used()
        return found

    def _trains_apart(self, x: torch.Tensor) -> bool:
        """Whether some of the results want a gradient and others do not."""
        wants = {any(p is not None and p.requires_grad for p in each._parameters()) for each in self.shared.members}
        return len(wants) > 1 and not x.requires_grad


def siblings(module: nn.Module, made: Mapping[nn.Module, Converted]) -> Iterator[list[Sibling]]:
    """Groups of submodules of ``module``, each converted alone so far, that can share a product, in the order of their calls."""
    alone = {name: weight for name, child in module.named_children() if (weight := _alone(child, made)) is not None}
    seen, kind = set[str](), cast(Any, type(module))
    methods = _methods(kind) if len(alone) > 1 else ()
    views = {method.code.co_name for method in methods if method.only_views}
    for method in methods:
        names = list(dict.fromkeys(call.name for call in method.calls if call.name in alone and call.name not in seen))
        leaves = {name for name in method.called_between(names) if _is_leaf(module._modules.get(name))}
        groups = list[CallingPlace]()
        for name in names:
            places = [place._replace(names=(*place.names, name)) for place in groups]
            fits = [_agree(alone[place.names[0]], alone[name], made) and _code_at(place) is not None for place in places]
            if any(fits):
                groups[fits.index(True)] = places[fits.index(True)]
            else:
                groups.append(CallingPlace(kind, (name,), frozenset({*alone, *leaves, *views})))
        seen.update(names)
        for place in groups:
            if len(place.names) > 1:
                weights = [alone[name] for name in place.names]
                yield _joined(weights, [made[weight.module] for weight in weights], place)


def _is_leaf(child: nn.Module | None) -> bool:
    return child is not None and obstacle(child) is None and leaf_of(child) is not None


# -- the code around the calls ---------------------------------------------------------------------------------------------------

KNOWN = VIEWS | TRANSPOSES | PARTS | SIZES | {"isinstance", "len", "get"}
"""Functions and methods that write to nothing, which may be called between those of a place."""

LEAVES = (ast.With, ast.AugAssign, ast.Yield, ast.YieldFrom, ast.Await)
"""What may change modes or a tensor, or let other code run, if it stands or ends between the calls."""

REPEATS = (ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp, ast.For, ast.While, ast.Lambda, ast.FunctionDef)
"""What runs in another order than it is written in."""

Spot = tuple[int, int]
"""A line and a column."""


class _Assignment(NamedTuple):
    """Of a name, from ``start`` to ``end``. value: None if it is not written there. conditional: it may be left out."""

    start: Spot
    end: Spot
    value: ast.AST | None
    conditional: bool


class _PartCall(NamedTuple):
    """``self.name(x)``. origins: what x may be, names with the end of their assignment. arms: the branch taken at each condition
    around it.
    """

    name: str
    origins: frozenset[tuple[str, Spot]]
    arms: Mapping[ast.AST, str]

    def meets(self, other: _PartCall) -> bool:
        """Whether both may get one tensor in one run."""
        return bool(self.origins & other.origins) and all(other.arms.get(node, arm) == arm for node, arm in self.arms.items())


class _MethodCode:
    """A method, and its calls of submodules with one local name, in the order of their text."""

    def __init__(self, code: CodeType, tree: ast.AST) -> None:
        self.code = code
        nodes: list[tuple[Any, Mapping[ast.AST, str]]] = [each for each in _below(tree, {}) if hasattr(each[0], "lineno")]
        nodes.sort(key=lambda each: _span(each[0]))
        self.nodes: list[Any] = [node for node, _ in nodes]
        self.reads = [node for node in self.nodes if isinstance(node, ast.Attribute)]
        self.values = defaultdict[str, list[_Assignment]](list)
        for node, arms in nodes:
            for target in getattr(node, "targets", [getattr(node, "target", None)]):
                for name, value in _assigned(target, getattr(node, "value", None)):
                    self.values[name].append(_Assignment(*_span(node), value, bool(arms)))
        self.calls = [
            _PartCall(_called(node), self._origins(node.args[0].id, _span(node)[0]), arms)
            for node, arms in nodes
            if _called(node) and [*map(type, node.args)] == [ast.Name] and not node.keywords
        ]

    def _origins(self, name: str, at: Spot) -> frozenset[tuple[str, Spot]]:
        found = set[tuple[str, Spot]]()
        for each in reversed(self.values[name]):
            if each.end <= at:
                names = _names(each.value)
                found |= {(name, each.end)} if not names else {one for other in names for one in self._origins(other, each.start)}
                if not each.conditional:
                    return frozenset(found)
        return frozenset({*found, (name, (0, 0))})

    @property
    def only_views(self) -> bool:
        """Whether it calls known functions alone."""
        nowhere = CallingPlace(nn.Module, (), frozenset())
        return not any(_disturbs(node, nowhere, (0, 0), _span(self.nodes[-1])[1]) for node in self.nodes)

    def called_between(self, names: Sequence[str]) -> set[str]:
        """Attributes of self that are called between the first and the last of ``names``."""
        spots = [_span(node)[0] for node in self.reads if node.attr in names]
        return {_called(node) for node in self.nodes if spots and spots[0] < _span(node)[1] <= spots[-1]} - {""}

    def joins(self, place: CallingPlace) -> bool:
        """Whether it calls the modules of a place with what may be one tensor, each once, and nothing unknown between."""
        calls = [call for call in self.calls if call.name in place.names]
        reads = [node for node in self.reads if node.attr in place.names]
        if not [call.name for call in calls] == [node.attr for node in reads] == [*place.names]:
            return False
        first, last = _span(reads[0])[1], _span(reads[-1])[0]
        return (
            all(one.meets(other) for one, other in combinations(calls, 2))
            and not any(_disturbs(node, place, first, last) for node in self.nodes)
            and self._returns_together(place.names)
        )

    def _returns_together(self, members: Sequence[str]) -> bool:
        """Whether no two parts of what it returns have a member each, on which two backward passes could come."""
        found = [node.value.elts for node in self.nodes if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple)]
        parts = [[self._members_in(each, members, frozenset()) for each in elements] for elements in found]
        return all(one & other for each in parts for one, other in combinations(filter(None, each), 2))

    def _members_in(self, node: ast.AST, members: Sequence[str], seen: frozenset[str]) -> set[str]:
        """The members that a value is made of, however often its names are assigned."""
        if isinstance(node, ast.Attribute) and node.attr in members:
            return {node.attr}
        below: list[ast.AST] = [*ast.iter_child_nodes(node)]
        if isinstance(node, ast.Name) and node.id not in seen:
            seen |= {node.id}
            below = [each.value for each in self.values[node.id] if each.value is not None]
        return {member for each in below for member in self._members_in(each, members, seen)}


@cache
def _methods(kind: Any) -> tuple[_MethodCode, ...]:
    """The methods of a class that its forward names."""
    found = list[_MethodCode]()
    for code in codes_of(kind):
        method = inspect.unwrap(getattr(kind, code.co_name, None))  # type: ignore[arg-type]
        if getattr(method, "__code__", None) is code:  # else of a base, or a part of another one
            with suppress(OSError, SyntaxError):  # code without a source, or a part of a line
                found.append(_MethodCode(code, ast.parse(dedent(inspect.getsource(code))).body[0]))
    return tuple(found)


@cache
def _code_at(place: CallingPlace) -> CodeType | None:
    """The code of the method that calls the modules of a place together; None if there is none."""
    return next((method.code for method in _methods(cast(Any, place.kind)) if method.joins(place)), None)


def _below(node: ast.AST, arms: Mapping[ast.AST, str]) -> Iterator[tuple[ast.AST, Mapping[ast.AST, str]]]:
    """All nodes below one, each with the branch that it stands in of each condition around it."""
    for name, value in ast.iter_fields(node):
        inside = {**arms, node: name} if isinstance(node, (ast.If, ast.IfExp)) and name != "test" else arms
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child, inside
                yield from _below(child, inside)


def _span(node: Any) -> tuple[Spot, Spot]:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _called(node: Any) -> str:
    """The name in ``self.name(…)``; empty for anything else."""
    method = node.func if isinstance(node, ast.Call) else None
    of_self = isinstance(method, ast.Attribute) and isinstance(method.value, ast.Name) and method.value.id == "self"
    return method.attr if of_self else ""  # type: ignore[union-attr]


def _assigned(target: Any, value: Any) -> Iterator[tuple[str, ast.AST | None]]:
    """Names that an assignment gives a value, with that value."""
    if isinstance(target, ast.Name):
        yield target.id, value
    for at, each in enumerate(getattr(target, "elts", ())):
        pairs = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
        yield from _assigned(each, value.elts[at] if pairs else value)


def _names(value: ast.AST | None) -> list[str]:
    """The names of which a value is one; none if it may be something else."""
    if isinstance(value, ast.IfExp):
        names = [_names(value.body), _names(value.orelse)]
        return [*names[0], *names[1]] if all(names) else []
    return [value.id] if isinstance(value, ast.Name) else []


def _disturbs(node: Any, place: CallingPlace, first: Spot, last: Spot) -> bool:
    """Whether what a node does between two spots of a method may be more than known functions do."""
    start, end = _span(node)
    if isinstance(node, ast.Call):
        known = (
            _called(node) in place.known if _called(node) else getattr(node.func, "attr", getattr(node.func, "id", "")) in KNOWN
        )
        return first < end <= last and not known
    if isinstance(node, (ast.Attribute, ast.Subscript)):
        return first < start < last and not isinstance(node.ctx, ast.Load)
    overlaps, contains = start < last and end > first, start < first and last < end
    return overlaps and isinstance(node, REPEATS if contains else (*REPEATS, *LEAVES))


def _alone(child: nn.Module, made: Mapping[nn.Module, Converted]) -> Weight | None:
    """The product that a submodule is, or that it begins with: adapters call the layer that they wrap, on their input."""
    for module in (child, child._modules.get("base_layer")):
        if module is not None and type(made.get(module)) is Converted and (weight := weight_of(module)) is not None:
            return None if has_hooks(child) else weight
    return None


def _agree(one: Weight, other: Weight, made: Mapping[nn.Module, Converted]) -> bool:
    return one.agrees(other) and made[one.module].recipe == made[other.module].recipe


def _joined(weights: Sequence[Weight], alone: Sequence[Converted], place: CallingPlace) -> list[Sibling]:
    name = "+".join(each.path for each in alone)
    run = PipelineRun(path=short(name))
    run.multiply(weights, name, (name, f"{name}.bias"))
    shared, found = Shared(run, [weight.out_features for weight in weights], place), []
    for index, own in enumerate(alone):
        sibling = Sibling(
            own.module, own.path, arguments=own.arguments, run=own.run, members={}, recipe=own.recipe, proven=own.proven
        )
        sibling.shared, sibling.index = shared, index
        found.append(sibling)
    shared.members = found
    return found
