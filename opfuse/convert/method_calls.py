"""Which submodules a method calls with what may be one tensor, with nothing between that could write to it.

Read from the source of the method, once it is shown to be what the method was compiled from: a file may have been edited since,
and code may bear the name of another file.
"""

from __future__ import annotations

import ast
import inspect
import linecache
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from itertools import combinations
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from opfuse.convert.code import codes_of
from opfuse.convert.record import PARTS, SIZES, TRANSPOSES, VIEWS

VIEWING = VIEWS | TRANSPOSES | PARTS
"""Methods of tensors that write to nothing, which may be called between those of a group."""

LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp)
LATER = (ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
PARTLY = (ast.Try, getattr(ast, "TryStar", ast.Try), ast.Match, ast.BoolOp)
UNSURE = (*LOOPS, *LATER, *PARTLY)
"""What runs its body several times, later than where it stands, or not to the end."""

DISPLAYS = (ast.Tuple, ast.List, ast.Slice)
WORDS = (ast.expr_context, ast.operator, ast.unaryop, ast.cmpop)
CALM = (*DISPLAYS, *WORDS, ast.Name, ast.Constant, ast.Expr, ast.Assign, ast.Return, ast.keyword)
"""What runs no code but that of its parts; anything else may run some method of somebody's own class."""

Origins = frozenset[Any]
"""What a local variable may hold: arguments by name, assigned values by their nodes."""


class MemberCall(NamedTuple):
    """``self.name(x)``. origins: of x. span: how often unknown code could run before. arms: the branches that it stands in."""

    name: str
    origins: Origins
    span: int
    arms: Mapping[ast.AST, str]

    def leads_to(self, other: MemberCall) -> bool:
        """Whether ``other`` may get the same tensor, has nothing between that may write to it, and never runs without this."""
        return bool(self.span == other.span and self.origins & other.origins and self.arms.items() <= other.arms.items())


class KnownParts(NamedTuple):
    """What a method may use between calls of a group, as attributes of self.

    members: submodules that multiply. leaves: others that run no code but torch's. numbers: ints and floats. methods: those of
    the class that run nothing else on tensors.
    """

    members: frozenset[str] = frozenset()
    leaves: frozenset[str] = frozenset()
    numbers: frozenset[str] = frozenset()
    methods: frozenset[str] = frozenset()


class MethodCalls(ast.NodeVisitor):
    """Reads a method in the order in which it runs. calls: of submodules with one local variable. called: attributes of
    self. reads: attributes of anything. results: the parts of tuples that it returns. gives_tensor: whether it returns a tensor.

    kind: the class. span: how often unknown code could run so far. tensors: what holds tensors of torch's own class, none of them
    an input of the method unless ``given`` says so. plain: what holds values of Python's own classes.
    """

    def __init__(
        self, kind: type[nn.Module], code: CodeType, tree: ast.stmt, known: KnownParts, given: Sequence[str] = ()
    ) -> None:
        self.kind, self.code, self.known = kind, code, known
        self.span = 0
        self.calls: list[MemberCall] = []
        self.called: list[str] = []
        self.reads: list[str] = []
        self.arms: dict[ast.AST, str] = {}
        self.variables: dict[str, Origins] = {}
        self.values = defaultdict[str, list[ast.AST]](list)
        self.results: list[list[ast.expr]] = []
        self.gives_tensor = True
        self.tensors: set[ast.AST | str] = {*given}
        self.plain = set[ast.AST | str]()
        for statement in getattr(tree, "body", ()):
            self.visit(statement)

    def joins(self, names: Sequence[str]) -> bool:
        """Whether it calls these submodules with what may be one tensor, each once, and nothing unknown between."""
        calls = [call for call in self.calls if call.name in names]
        once = [call.name for call in calls] == [name for name in self.reads if name in names] == [*names]
        return once and all(one.leads_to(other) for one, other in combinations(calls, 2)) and self._return_together(names)

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
        """Children run in the order of their fields. Calls that may not run, or run twice, are in no group."""
        disturbs, calls = not isinstance(node, CALM), len(self.calls)
        self.span += disturbs
        super().generic_visit(node)
        self.span += disturbs
        if isinstance(node, UNSURE):
            del self.calls[calls:]

    def visit_Call(self, node: ast.Call) -> None:
        super().generic_visit(node)
        tensors = all(map(self._is_tensor, node.args)) and not node.keywords
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name), args=[ast.Name(id=variable)], keywords=[]):
                self.calls.append(MemberCall(name, self._origins_of(variable), self.span, dict(self.arms)))
        match node.func:
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                self.called.append(name)
                self._made(
                    node, tensor=name in self.known.members or (tensors and name in self.known.leaves | self.known.methods)
                )
            case ast.Attribute(value=value, attr=name):
                of_torch = self._module(value) is torch and bool(node.args)
                known = self._is_tensor(node.args[0] if of_torch else value)
                self._made(node, tensor=known and name in VIEWING, plain=known and name in SIZES)
            case _:
                self.span += 1

    def visit_BinOp(self, node: ast.BinOp) -> None:
        super().generic_visit(node)
        plain = [self._is_plain(side) for side in (node.left, node.right)]
        calm = all(one or self._is_tensor(side) for one, side in zip(plain, (node.left, node.right)))
        self._made(node, tensor=calm and not all(plain), plain=all(plain))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        super().generic_visit(node)
        self._made(node, plain=self._is_plain(node.operand))

    def visit_Compare(self, node: ast.Compare) -> None:
        super().generic_visit(node)
        same = len(node.ops) == 1 and isinstance(node.ops[0], (ast.Is, ast.IsNot))
        self._made(node, plain=same or all(map(self._is_plain, (node.left, *node.comparators[:1]))))
        if len(node.ops) > 1:  # of which some may not run
            self.span += 1

    def visit_Starred(self, node: ast.Starred) -> None:
        super().generic_visit(node)
        displayed = all(isinstance(origin, (ast.Tuple, ast.List)) for origin in self._origins(node.value))
        self._made(node, calm=displayed, plain=self._is_plain(node.value))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        super().generic_visit(node)
        self.reads.append(node.attr)
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Load()):
                reads = (self.kind.__getattribute__, self.kind.__getattr__)
                field = not hasattr(self.kind, name) and reads == (object.__getattribute__, nn.Module.__getattr__)
                self._made(node, calm=field or name in self.known.methods, plain=field and name in self.known.numbers)
            case ast.Attribute(value=value, attr=name, ctx=ast.Load()) if self._is_tensor(value):
                self._made(node, calm=name in VIEWING, tensor=name in TRANSPOSES, plain=name in SIZES)
            case ast.Attribute(value=value, ctx=ast.Load()):
                self._made(node, calm=self._module(value) is not None)
            case _:
                self.span += 1

    def visit_Subscript(self, node: ast.Subscript) -> None:
        super().generic_visit(node)
        plain, calm = self._is_plain(node.value), isinstance(node.ctx, ast.Load) and self._is_plain(node.slice)
        self._made(node, tensor=calm and self._is_tensor(node.value), plain=calm and plain)

    def _module(self, node: ast.AST) -> ModuleType | None:
        """The module of Python that an expression such as ``torch.nn`` names."""
        match node:
            case ast.Name(id=name) if name not in self.code.co_varnames + self.code.co_cellvars + self.code.co_freevars:
                found = function_of(self.kind, self.code.co_name).__globals__.get(name)
            case ast.Attribute(value=value, attr=name):
                found = getattr(self._module(value), name, None)
            case _:
                found = None
        return found if isinstance(found, ModuleType) else None

    def _made(self, node: ast.AST, *, calm: bool = False, tensor: bool = False, plain: bool = False) -> None:
        """``node`` runs no unknown code if it is one of these."""
        calm = calm or tensor or plain
        self.span += not calm
        self.tensors |= {node} if tensor else set()
        self.plain |= {node} if calm and plain else set()

    def _is_tensor(self, node: ast.AST) -> bool:
        return self.tensors.issuperset(self._origins(node))

    def _is_plain(self, node: ast.AST) -> bool:
        return all(self._is_value(one) for one in self._origins(node))

    def _is_value(self, origin: Any) -> bool:
        parts = ast.iter_child_nodes(origin) if isinstance(origin, DISPLAYS) else ()
        of_parts = isinstance(origin, (*DISPLAYS, *WORDS)) and all(map(self._is_plain, parts))
        return origin in self.plain or isinstance(origin, ast.Constant) or of_parts

    def visit_Return(self, node: ast.Return) -> None:
        super().generic_visit(node)
        self.gives_tensor &= node.value is not None and self._is_tensor(node.value)
        if isinstance(node.value, ast.Tuple):
            self.results.append(node.value.elts)

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        self.visit(node.test)
        self.span += not self._is_plain(node.test)
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
            self.span += hasattr(target, "elts") and not (isinstance(node.value, ast.Tuple) or self._is_tensor(node.value))
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
def methods_of(kind: Any, known: KnownParts | None = None) -> tuple[MethodCalls, ...]:
    """The methods of a class that its forward names, as far as their source is known. Without ``known``: as called on tensors."""
    codes = [code for code in codes_of(kind) if code is code_of_method(kind, code.co_name)]  # else of a base, or inside of one
    trees = [(code, tree) for code in codes if (tree := _tree_of(code)) is not None]
    if known is None:
        return tuple(MethodCalls(kind, code, tree, KnownParts(), code.co_varnames[1 : code.co_argcount]) for code, tree in trees)
    return tuple(MethodCalls(kind, code, tree, known) for code, tree in trees)


def calm_methods(module: nn.Module) -> frozenset[str]:
    """The methods that run no unknown code on tensors, and return one."""
    kind: Any = type(module)
    methods = [method for method in methods_of(kind) if not method.span and method.gives_tensor]
    return frozenset(method.code.co_name for method in methods).difference(vars(module))


def function_of(kind: type[nn.Module], name: str) -> Any:
    """A method of a class, as it was written below its decorators; None if it has none."""
    return inspect.unwrap(getattr(kind, name, None))  # type: ignore[arg-type]


def code_of_method(kind: type[nn.Module], name: str) -> CodeType | None:
    """The code of a method of a class; None if it has none."""
    return getattr(function_of(kind, name), "__code__", None)


def _tree_of(code: CodeType) -> ast.stmt | None:
    """The definition of a method; None without a source, or if the source is not this code's."""
    # ``inspect.getsource`` would look at every module for the file, in 7 ms.
    linecache.checkcache(code.co_filename)
    tree, codes = _compiled("".join(linecache.getlines(code.co_filename)))
    definition = tree.get(code.co_firstlineno)
    same = any(_facts(code) == _facts(made) for made in codes.get(code.co_firstlineno, ()))
    return definition if same else None


@lru_cache(maxsize=4)
def _compiled(source: str) -> tuple[Mapping[int, ast.stmt], Mapping[int, Sequence[CodeType]]]:
    """The definitions of functions in the text of a file, and the code that they compile to, each by its first line.

    Of the whole file, since Python 3.11 compiles a call of a name's attribute otherwise where the file imports that name.
    """
    definitions, codes = dict[int, ast.stmt](), defaultdict[int, list[CodeType]](list)
    with suppress(SyntaxError):
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                definitions[min(part.lineno for part in (node, *node.decorator_list))] = node
        waiting: list[Any] = [compile(tree, "", "exec", dont_inherit=True)]
        for made in waiting:
            codes[made.co_firstlineno].append(made)
            waiting += [each for each in made.co_consts if isinstance(each, CodeType)]
    return definitions, codes


def _facts(code: CodeType) -> tuple[Any, ...]:
    """What a code does, wherever it stands."""
    values = [_facts(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    variables = code.co_varnames, code.co_freevars, code.co_cellvars
    return code.co_code, code.co_exceptiontable, code.co_names, *variables, code.co_argcount, code.co_kwonlyargcount, values
