"""Products of one tensor, such as query, key and value: one product computes all, and each module returns its columns.

The code of the module around them shows which may get the same tensor, with nothing but known functions between. When that code
runs, the first of them computes all, and the others take their columns if they get that very tensor in the same run of the code,
unwritten, with the same parameters. Any other call, such as one from outside of that code, computes its own.
"""

from __future__ import annotations

import ast
import inspect
import linecache
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence, Set
from contextlib import suppress
from functools import cache
from itertools import combinations
from textwrap import dedent
from tokenize import TokenError
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from opfuse.convert.code import codes_of
from opfuse.convert.converted import Converted, InGraph, casting, changed_when_traced
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
from opfuse.torch_private.tensors import version_of


class Shared:
    """One product for several modules.

    kind, code: the class whose method calls them, and the code of that method. wrapped: by adapters, whose code nobody has read.
    waiting: by the input, the run of that code, how often the input was written, and columns that are computed and not yet
    returned, by module. members: the modules' forwards, in order. inside, followed: in a graph of torch.compile, whether it
    follows that code; the moment of the product, and the columns not yet returned.
    """

    def __init__(self, run: PipelineRun, columns: Sequence[int], kind: type[nn.Module], code: CodeType, wrapped: bool) -> None:
        self.run = run
        self.columns = tuple(columns)
        self.kind, self.wrapped = kind, wrapped
        self.code: CodeType | None = code
        self.waiting: MutableMapping[torch.Tensor, tuple[int, int, dict[int, torch.Tensor]]] = WeakTensorKeyDictionary()
        self.members: list[Sibling] = []
        self.in_graph: InGraph | None = None
        self.inside = False
        self.followed: tuple[Any, list[torch.Tensor]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        code = self.code and (self.code.co_name, self.code.co_code)
        return {**vars(self), "code": code, "waiting": None, "in_graph": None, "followed": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        name, text = state["code"] or ("", b"")
        code = _code_of(state["kind"], name)  # in another process it may be another one
        vars(self).update(state, code=code if code and code.co_code == text else None, waiting=WeakTensorKeyDictionary())

    def first(self, x: torch.Tensor) -> torch.Tensor | None:
        """The columns of the first module; those of the others wait until they are taken, or ``x`` is gone. None: it is alone."""
        run, writes = self.running(), self._writes(x)
        if run is None or writes is None:
            return None
        one, *others = _Columns.apply(self.run(x, ()), self.columns, self.run.made[0])  # type: ignore[no-untyped-call]
        self.waiting[x] = run, writes, dict(enumerate(others, 1))
        return one  # type: ignore[no-any-return]

    def take(self, index: int, x: torch.Tensor) -> torch.Tensor | None:
        """The columns of another module; None if they were not computed for this tensor in this run."""
        run, writes, waiting = self.waiting.get(x, (None, 0, {}))
        if run is None or run != self.running() or writes != self._writes(x):
            return None
        columns = waiting.pop(index, None)
        if not waiting:
            self.waiting.pop(x, None)
        return columns

    def is_changed(self) -> bool:
        """Whether the weights may share a scale no more, of which a warning tells."""
        change = self.run.change()
        if change is not None:
            self.members[0].warn(change, level=7)
        return change is not None

    def _writes(self, x: torch.Tensor) -> int | None:
        """How often ``x`` was written, where adapters may write to it; None if torch does not count."""
        if not self.wrapped:
            return 0
        return None if x.is_inference() else version_of(x)

    def running(self, *, followed: bool = False) -> int | None:
        """The run of the code at the place, as the ``id()`` of its frame; followed: of dynamo's own frame, which follows it.

        None if they are called from elsewhere, or with hooks, which may write to their input where nothing counts it.
        """
        if self.code is None or has_global_hooks() or any(has_hooks(member.module) for member in self.members):
            return None
        return run_of(self.code, followed=followed)


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
    def runs(self) -> tuple[PipelineRun, ...]:
        return (*super().runs, *([] if self.index else [self.shared.run]))

    @property
    def products(self) -> dict[str, BasicOperation]:
        """Its own product, for calls alone; the first also has the product of all."""
        products = super().products
        if not self.index:
            (products["shared"],) = casting([self.shared.run]).values()
        return products

    def get_ready(self) -> None:
        """Make what dynamo reads; the first also makes the call for all."""
        super().get_ready()
        shared = self.shared
        shared.inside = shared.running(followed=True) is not None
        if not self.index and shared.in_graph is None:
            shared.in_graph = InGraph(self, shared.members, shared.run)

    def _as_op(self, call: Any, given: Sequence[Any]) -> Any:
        """In a graph the first computes all; the others recognise the tensor as long as nothing that the product read is written.
        Across graphs that is not known.
        """
        shared, whole, (x,) = self.shared, self.shared.in_graph, given
        followed, shared.followed = shared.followed, None
        if whole is None or not shared.inside or hindrance(whole, x, (), None):
            return super()._as_op(call, given)
        if self.index == 0:
            if self._trains_apart(x) or any(changed_when_traced(member.ticket) for member in shared.members):
                return super()._as_op(call, given)
            columns = super()._as_op(whole, given).split(shared.columns, dim=-1)
            first, *others = [part.contiguous() for part in columns]
            shared.followed = moment(whole, x), others
            return first
        if followed is None or followed[0] != moment(whole, x):
            return super()._as_op(call, given)
        if self.index < len(followed[1]):
            shared.followed = followed
        return followed[1][self.index - 1]

    def compute(self, x: torch.Tensor, arguments: Sequence[torch.Tensor]) -> Any:
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


def siblings(module: nn.Module, converted: Mapping[nn.Module, Converted]) -> Iterator[list[Sibling]]:
    """Groups of submodules of ``module``, each converted alone so far, that can share a product, in the order of their calls."""
    alone = {name: weight for name, child in module.named_children() if (weight := _alone(child, converted)) is not None}
    if len(alone) < 2:
        return
    kind: Any = type(module)
    pure = {method.code.co_name for method in _methods(kind) if not method.span}
    called = {name for method in _methods(kind) for name in method.called}
    leaves = {name for name, child in module.named_children() if name in called and obstacle(child) is None and leaf_of(child)}
    grouped = set[str]()
    for method in _methods(kind, frozenset({*alone, *leaves, *pure})):
        names = [call.name for call in method.calls if call.name in alone and call.name not in grouped]
        groups = list[tuple[str, ...]]()
        for name in dict.fromkeys(names):
            longer = [(*group, name) for group in groups]
            fits = [_agree(group, alone, converted) and method.joins(group) for group in longer]
            if any(fits):
                groups[fits.index(True)] = longer[fits.index(True)]
            else:
                groups.append((name,))
        grouped.update(names)
        for group in groups:
            if len(group) > 1:
                weights = [alone[name] for name in group]
                wrapped = any(module._modules[name] is not weight.module for name, weight in zip(group, weights))
                members = [converted[weight.module] for weight in weights]
                yield _joined(members, weights, kind, method.code, wrapped)


# -- the code around the calls ---------------------------------------------------------------------------------------------------

PURE = VIEWS | TRANSPOSES | PARTS | SIZES | {"isinstance", "len", "get"}
"""Functions and methods that write to nothing, which may be called between those of a place."""

LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp)
REPEATED = (*LOOPS, ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
"""What runs its body several times, or later than where it stands."""

BLOCKS = (ast.With, ast.AsyncWith, ast.Yield, ast.YieldFrom, ast.Await)
"""What may change modes, or let other code run, where it begins and where it ends."""

Origins = frozenset[Any]
"""What a local variable may hold: arguments by name, assigned values by their nodes."""


class _MemberCall(NamedTuple):
    """``self.name(x)``. origins: of x. span: how often other code could run before. arms: the branch of each condition around."""

    name: str
    origins: Origins
    span: int
    arms: Mapping[ast.AST, str]

    def meets(self, other: _MemberCall) -> bool:
        """Whether both may get one tensor in one run of the code, with nothing between that may write to it."""
        together = self.span == other.span and self.origins & other.origins
        return bool(together) and all(other.arms.get(node, arm) == arm for node, arm in self.arms.items())


class _MethodCode(ast.NodeVisitor):
    """Reads a method in the order in which it runs. calls: of submodules with one local variable. called: attributes of
    self. reads: attributes of anything.

    known: the attributes of self that may be called, as they run no other code. span: how often other code could run so far.
    """

    def __init__(self, code: CodeType, tree: ast.FunctionDef | ast.AsyncFunctionDef, known: Set[str]) -> None:
        self.code, self.known = code, known
        self.span = 0
        self.calls: list[_MemberCall] = []
        self.called: list[str] = []
        self.reads: list[str] = []
        self.arms: dict[ast.AST, str] = {}
        self.variables: dict[str, Origins] = {}
        self.values = defaultdict[str, list[ast.AST]](list)
        self.results: list[list[ast.expr]] = []
        for statement in tree.body:
            self.visit(statement)

    def joins(self, names: Sequence[str]) -> bool:
        """Whether it calls these submodules with what may be one tensor, each once, and nothing unknown between."""
        calls = [call for call in self.calls if call.name in names]
        once = [call.name for call in calls] == [name for name in self.reads if name in names] == [*names]
        return once and all(one.meets(other) for one, other in combinations(calls, 2)) and self._return_together(names)

    def _return_together(self, names: Sequence[str]) -> bool:
        """Whether no two parts of what it returns have a member each, on which two backward passes could come."""
        parts = [[self._members_in(part, names, frozenset()) for part in result] for result in self.results]
        return all(one & other for result in parts for one, other in combinations(filter(None, result), 2))

    def _members_in(self, node: ast.AST, names: Sequence[str], passed: frozenset[str]) -> set[str]:
        """The members that a value is computed with, however often its variables are assigned."""
        if isinstance(node, ast.Attribute) and node.attr in names:
            return {node.attr}
        inside: list[ast.AST] = [*ast.iter_child_nodes(node)]
        if isinstance(node, ast.Name) and node.id not in passed:
            passed |= {node.id}
            inside = self.values[node.id]
        return {member for child in inside for member in self._members_in(child, names, passed)}

    # -- what runs -----------------------------------------------------------------------------------------------------------

    def generic_visit(self, node: ast.AST) -> None:
        """Children run in the order of their fields. Calls in what repeats are in no group."""
        disturbs = isinstance(node, (*REPEATED, *BLOCKS))
        calls = len(self.calls)
        self.span += disturbs
        super().generic_visit(node)
        self.span += disturbs
        if isinstance(node, REPEATED):
            del self.calls[calls:]

    def visit_Call(self, node: ast.Call) -> None:
        super().generic_visit(node)
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name), args=[ast.Name(id=variable)], keywords=[]):
                self.calls.append(_MemberCall(name, self._origins_of(variable), self.span, dict(self.arms)))
        match node.func:
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                self.called.append(name)
                self.span += name not in self.known
            case function:
                self.span += getattr(function, "attr", getattr(function, "id", "")) not in PURE

    def visit_Attribute(self, node: ast.Attribute | ast.Subscript) -> None:
        super().generic_visit(node)
        self.reads.append(getattr(node, "attr", ""))
        self.span += not isinstance(node.ctx, ast.Load)

    visit_Subscript = visit_Attribute

    def visit_Return(self, node: ast.Return) -> None:
        super().generic_visit(node)
        if isinstance(node.value, ast.Tuple):
            self.results.append(node.value.elts)

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        self.visit(node.test)
        before, outcomes = self.variables, list[dict[str, Origins]]()
        for arm in ("body", "orelse"):
            self.variables, self.arms[node] = dict(before), arm
            branch = getattr(node, arm)
            for child in branch if isinstance(branch, list) else [branch]:
                self.visit(child)
            outcomes.append(self.variables)
        del self.arms[node]
        names = {name for outcome in outcomes for name in outcome}
        unassigned = {name: frozenset({name}) for name in names}
        self.variables = {name: frozenset().union(*[(unassigned | outcome)[name] for outcome in outcomes]) for name in names}

    visit_IfExp = visit_If

    # -- what variables hold -------------------------------------------------------------------------------------------------

    def visit_Assign(self, node: Any) -> None:
        """Also of one target, with an annotation, in an expression, and in place, which may write to a tensor."""
        if node.value is not None:
            self.visit(node.value)
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            self.visit(target)
            self._bind(target, node.value)
            if isinstance(node, ast.AugAssign) and isinstance(target, ast.Name):
                self.variables[target.id] = frozenset({node})
        self.span += isinstance(node, ast.AugAssign)

    visit_AnnAssign = visit_AugAssign = visit_NamedExpr = visit_Assign

    def _bind(self, target: Any, value: ast.AST | None) -> None:
        if isinstance(target, ast.Name) and value is not None:
            self.values[target.id].append(value)
            self.variables[target.id] = self._origins(value)
        parts = getattr(target, "elts", ())
        pairs = isinstance(value, ast.Tuple) and len(value.elts) == len(parts)
        for at, part in enumerate(parts):
            self._bind(part, value.elts[at] if pairs else value)  # type: ignore[union-attr]

    def _origins_of(self, variable: str) -> Origins:
        return self.variables.get(variable, frozenset({variable}))

    def _origins(self, value: ast.AST) -> Origins:
        match value:
            case ast.Name(id=name):
                return self._origins_of(name)
            case ast.IfExp(body=body, orelse=orelse):
                return self._origins(body) | self._origins(orelse)
        return frozenset({value})


@cache
def _methods(kind: Any, known: frozenset[str] = frozenset()) -> tuple[_MethodCode, ...]:
    """The methods of a class that its forward names."""
    methods = list[_MethodCode]()
    for code in codes_of(kind):
        if code is _code_of(kind, code.co_name):  # else of a base, or a part of another one
            with suppress(IndexError, SyntaxError, TokenError):  # code without a source, or a part of a line
                tree = ast.parse(dedent(_source(code))).body[0]
                if isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    methods.append(_MethodCode(code, tree, known))
    return tuple(methods)


def _source(code: CodeType) -> str:
    """The lines of a function, if there are any. ``inspect.getsource`` would look at every module for the file, in 7 ms."""
    return "".join(inspect.getblock(linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]))


def _code_of(kind: type[nn.Module], name: str) -> CodeType | None:
    """The code of a method of a class; None if it has none."""
    method: Any = getattr(kind, name, None)
    return getattr(inspect.unwrap(method), "__code__", None)


def _alone(child: nn.Module, converted: Mapping[nn.Module, Converted]) -> Weight | None:
    """The product that a submodule is, or that it begins with: adapters call the layer that they wrap, on their input."""
    for module in (child, child._modules.get("base_layer")):
        if module is not None and type(converted.get(module)) is Converted and (weight := weight_of(module)) is not None:
            return None if has_hooks(child) else weight
    return None


def _agree(group: Sequence[str], alone: Mapping[str, Weight], converted: Mapping[nn.Module, Converted]) -> bool:
    """Whether one product under one recipe can do for the last of a group and all before it."""
    *others, last = [alone[name] for name in group]
    return all(last.agrees(other) and converted[last.module].recipe == converted[other.module].recipe for other in others)


def _joined(
    alone: Sequence[Converted], weights: Sequence[Weight], kind: type[nn.Module], code: CodeType, wrapped: bool
) -> list[Sibling]:
    """The forwards of modules, each converted alone so far, that share a product."""
    name = "+".join(forward.path for forward in alone)
    run = PipelineRun(path=short(name))
    run.multiply(weights, name, (name, f"{name}.bias"))
    shared = Shared(run, [weight.out_features for weight in weights], kind, code, wrapped)
    for index, one in enumerate(alone):
        options: dict[str, Any] = {"arguments": one.arguments, "run": one.run, "recipe": one.recipe, "proven": one.proven}
        sibling = Sibling(one.module, one.path, members={}, **options)
        sibling.shared, sibling.index = shared, index
        shared.members.append(sibling)
    return shared.members
