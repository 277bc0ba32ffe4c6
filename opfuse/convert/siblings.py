"""Products of one tensor, such as query, key and value: one product computes all, and each module returns its columns.

The recorded forward of the module around them shows which read the same tensor, with nothing but known functions between. When
that forward runs, the first of them computes all, and the others take their columns if they get that very tensor in the same run
of the forward, unwritten, in the same modes, with the same parameters. Any other call, such as one from outside of that forward,
computes its own.
"""

from __future__ import annotations

import ast
import inspect
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import cache
from itertools import combinations
from textwrap import dedent
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.utils.weak import WeakTensorKeyDictionary

from opfuse.convert.converted import Converted, casting
from opfuse.convert.guards import codes_of
from opfuse.convert.in_graph import InGraph
from opfuse.convert.leaves import weight_of
from opfuse.convert.pipeline import PipelineRun
from opfuse.convert.record import (
    LEADING,
    PARTS,
    SIZES,
    TRANSPOSES,
    VIEWS,
    RecordedForward,
    mode,
    record,
    required_arguments,
    rows,
)
from opfuse.convert.weights import MadeParameters, Weight
from opfuse.core.operation import BasicOperation
from opfuse.inspect.alike import short
from opfuse.recipes import note_use
from opfuse.runtime.compiled import hindrance, moment
from opfuse.torch_private.modules import has_global_hooks, has_hooks
from opfuse.torch_private.stack import run_of


class CallingPlace(NamedTuple):
    """Where modules are called: in a method of the class ``kind``, as children ``names``, beside others that are ``known``."""

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
        return {**self.__dict__, "waiting": WeakTensorKeyDictionary(), "in_graph": None, "followed": None}

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

    def running(self) -> int | None:
        """The run of the code at the place, also where dynamo follows it, as the ``id()`` of its frame.

        None if they are called from elsewhere, or with hooks, which may write to their input where nothing counts it.
        """
        code, follows = _code_at(self.place), torch.compiler.is_compiling()
        if code is None or has_global_hooks() or any(has_hooks(each.module) for each in self.members):
            return None
        return run_of(code, followed=follows)


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
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
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
        shared.inside = shared.running() is not None
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
            note_use()
        return found

    def _trains_apart(self, x: torch.Tensor) -> bool:
        """Whether some of the results want a gradient and others do not."""
        wants = {any(p is not None and p.requires_grad for p in each._parameters()) for each in self.shared.members}
        return len(wants) > 1 and not x.requires_grad


def siblings(module: nn.Module, made: Mapping[nn.Module, Converted]) -> Iterator[list[Sibling]]:
    """Groups of submodules of ``module``, each converted alone so far, that can share a product, in the order of their calls."""
    alone = {name: weight for name, child in module.named_children() if (weight := _alone(child, made)) is not None}
    if len(alone) < 2:
        return
    by_value: dict[Any, list[fx.Node]] = defaultdict(list)
    found = _beginning(module, alone.values())
    calls = [node for node in found.nodes if node.op == "call_module"]
    counts = Counter(str(node.target) for node in calls)
    for node in calls:
        reads = len(node.args) == 1 and isinstance(node.args[0], fx.Node) and not node.kwargs
        known = reads and counts[str(node.target)] == 1 and str(node.target) in alone
        if known and (node.users or "read" in node.meta):  # else it is returned, for who knows what
            by_value[node.args[0], node.meta["modes"]].append(node)
    for group in by_value.values():
        agreeing = [node for node in group if _agree(alone[str(group[0].target)], alone[str(node.target)], made)]
        names = [str(node.target) for node in agreeing]
        place = CallingPlace(type(module), tuple(names), frozenset(str(node.target) for node in calls))
        if len(agreeing) > 1 and _meet(agreeing, found.returned) and _code_at(place) is not None:
            weights = [alone[name] for name in names]
            yield _joined(weights, [made[weight.module] for weight in weights], place)


KNOWN = VIEWS | TRANSPOSES | PARTS | SIZES | {"isinstance", "len", "get"}
"""Functions and methods that write to nothing, which may be called between those of a place."""

LEAVES = (ast.With, ast.AugAssign, ast.Yield, ast.YieldFrom, ast.Await)
"""What may change modes or a tensor, or let other code run, if it stands or ends between the calls."""

REPEATS = (ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp)
"""What runs in another order than it is written in."""


@cache
def _code_at(place: CallingPlace) -> CodeType | None:
    """The code of the method that calls the modules of a place, each once, if it calls nothing unknown between; else None.

    A recording shows one way through a forward. Its code shows all, also the branch that writes where nothing counts it.
    """
    for code in codes_of(place.kind):
        method = inspect.unwrap(getattr(place.kind, code.co_name, None))  # type: ignore[arg-type]
        if getattr(method, "__code__", None) is not code:  # of a base, or a part of another one
            continue
        try:
            nodes: list[Any] = [*ast.walk(ast.parse(dedent(inspect.getsource(code))))]
        except (OSError, SyntaxError):  # code without a source, or a part of a line
            continue
        reads = [node for node in nodes if isinstance(node, ast.Attribute) and node.attr in place.names]
        if sorted(node.attr for node in reads) == sorted(place.names):
            spans = sorted(map(_span, reads))
            first, last = spans[0][1], spans[-1][0]
            if not any(_disturbs(node, place, first, last) for node in nodes if hasattr(node, "lineno")):
                return code
    return None


Spot = tuple[int, int]
"""A line and a column."""


def _span(node: Any) -> tuple[Spot, Spot]:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _disturbs(node: Any, place: CallingPlace, first: Spot, last: Spot) -> bool:
    """Whether what a node does between two spots of a method may be more than known functions do."""
    start, end = _span(node)
    if isinstance(node, ast.Call):
        called = node.func
        of_self = isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "self"
        return first < end <= last and getattr(called, "attr", getattr(called, "id", "")) not in (
            place.known if of_self else KNOWN
        )
    if isinstance(node, (ast.Attribute, ast.Subscript)):
        return first < start < last and not isinstance(node.ctx, ast.Load)
    overlaps, contains = start < last and end > first, start < first and last < end
    return overlaps and isinstance(node, REPEATS if contains else (*REPEATS, *LEAVES))


def _meet(group: Sequence[fx.Node], returned: Sequence[fx.Node]) -> bool:
    """Whether no two results have a part of the group each, on which two backward passes could come."""
    parts = [{each for each in group if each in _sources(result)} for result in returned]
    return all(one & other for one, other in combinations(filter(None, parts), 2))


def _sources(node: fx.Node) -> set[fx.Node]:
    found, waiting = set[fx.Node](), [node]
    while waiting:
        one = waiting.pop()
        waiting += [each for each in one.all_input_nodes if each not in found]
        found.add(one)
    return found


def _alone(child: nn.Module, made: Mapping[nn.Module, Converted]) -> Weight | None:
    """The product that a submodule is, or that it begins with: adapters call the layer that they wrap, on their input."""
    for module in (child, child._modules.get("base_layer")):
        if module is not None and type(made.get(module)) is Converted and (weight := weight_of(module)) is not None:
            return weight
    return None


def _beginning(module: nn.Module, weights: Iterable[Weight]) -> RecordedForward:
    """What a forward does, as far as it can be followed: with an input for its first argument and None for the others that it
    needs, or with inputs for all of them.
    """
    weight = next(iter(weights))
    names, found = required_arguments(module), [RecordedForward()]
    with mode("evaluation") as training:
        for count in dict.fromkeys((1, len(names))) if names else ():
            like = weight.module._parameters["weight"]
            given = {name: rows(LEADING[0], weight.in_features, like) if n < count else None for n, name in enumerate(names)}
            found.append(record(module, given, training=training, may_write=True))
    return max(found, key=lambda each: len(each.nodes))


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
