"""Which submodules a method calls with one variable, with nothing between that could write to the tensor in it.

Read from the source of the method, once it is shown to be what the method was compiled from: a file may have been edited since,
and code may bear the name of another file. Only a straight line of code counts: what may be skipped or repeated ends it, as does
anything that may run code which is neither torch's nor known.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import cache, lru_cache
from itertools import combinations, count, pairwise
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from opfuse.convert.code import codes_of
from opfuse.convert.record import PARTS, SIZES, TRANSPOSES, VIEWS

VIEWING = VIEWS | TRANSPOSES | PARTS
"""Methods of tensors that write to nothing, and give views of their tensor or copies."""

CONTAINERS = {"tuple", "list", "dict", "set", "iter", "zip", "reversed", "sorted", "enumerate", "map", "filter"}
"""Functions whose result holds what they are given."""

PUTTING = {"append", "extend", "insert", "add", "update", "setdefault", "appendleft"}
"""Methods that put what they are given into something."""

ABSENT = object()
PLAIN, DISPLAY, OTHER = "a value of Python's own classes", "a tuple or a list", "anything"
Given = int | str
"""What an expression gives: one of these, or the number of the memory that a tensor of torch's own class may lie in."""


class MemberCall(NamedTuple):
    """``self.name(variable)``. memory: of its argument, as far as known. line: of straight code. place: of the call."""

    name: str
    variable: str
    memory: Given
    line: int
    place: tuple[int | None, ...]


class KnownParts(NamedTuple):
    """What may stand between calls of a group, as attributes of self.

    members: submodules that multiply. leaves: others that run no code but torch's. numbers: ints and floats. methods: those of
    the class that run nothing else on tensors.
    """

    members: frozenset[str] = frozenset()
    leaves: frozenset[str] = frozenset()
    numbers: frozenset[str] = frozenset()
    methods: frozenset[str] = frozenset()


NOTHING = KnownParts()


CUTS = frozenset({"detach", "detach_", "data", "item", "tolist", "numpy", "no_grad", "inference_mode", "set_grad_enabled"})
"""Names of what ends gradients: a module whose result goes through them may get none."""


class MethodCalls(ast.NodeVisitor):
    """What a method calls, in the order in which it runs.

    calls: of members. accesses: of variables, as :func:`_accesses` tells them. reads: attributes of anything, those that are
    called first. uses: attributes of self, by line of straight code. written: memory that leaves may write to, by line. results:
    expressions that it returns. ends: how often straight code has ended. gives_tensor: whether all that it returns is a tensor.
    """

    def __init__(
        self, kind: type[nn.Module], code: CodeType, definition: ast.stmt, known: KnownParts, given: Sequence[str] = ()
    ) -> None:
        self.kind, self.code, self.known = kind, code, known
        self.calls: list[MemberCall] = []
        self.uses = defaultdict[int, list[str]](list)
        self.written = defaultdict[int, set[Given]](set)
        self.values = defaultdict[str, list[ast.expr]](list)
        self.results: list[ast.expr] = []
        self.ends, self.gives_tensor = 0, True
        self.memories = count()
        self.variables: dict[str, Given] = {name: next(self.memories) for name in given}
        self.accesses = [*_accesses(definition)]
        self.nodes = nodes = [*ast.walk(definition)]
        self.called = {each.func.attr for each in nodes if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute)}
        self.reads = [each.attr for each in nodes if isinstance(each, ast.Attribute)]
        self.binds_self = any(isinstance(each, ast.Name) and each.id == "self" and _is_stored(each) for each in nodes)
        for each in nodes:  # what is put into a list that is returned
            match each:
                case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) if method in PUTTING:
                    self.values[name] += [*each.args, *[one.value for one in each.keywords]]
        self._block(definition.body)  # type: ignore[attr-defined]

    def joins(self, names: Sequence[str]) -> bool:
        """Whether it calls these submodules with one variable, each once, and with nothing between that may write to it."""
        calls = [call for call in self.calls if call.name in names]
        once = [call.name for call in calls] == [*names] and all(self.reads.count(name) == 1 for name in names)
        together = len({(call.line, call.variable, call.memory) for call in calls}) == 1
        unwritten = not any(call.memory in self.written[call.line] for call in calls)
        return once and together and unwritten and not self.binds_self and self._return_together(names)

    def returns_all(self, names: Sequence[str]) -> bool:
        """Whether what it returns is computed with the result of each of these calls, which no variable loses unread before, and
        which nothing that it names cuts off from autograd.
        """
        returned = {member for result in self.results for member in self._members_in(result, names, set())}
        if CUTS.intersection(self.code.co_names) or not {*names} <= returned:
            return False
        by_variable = defaultdict[str, list[ast.AST | None]](list)
        for name, stored in self.accesses:
            by_variable[name].append(stored)
        pairs = [pair for own in by_variable.values() for pair in pairwise([*own, self.nodes[0]])]
        return not any(one and other and self._calls_one_of(names, one) for one, other in pairs)

    def offsets(self, name: str) -> frozenset[int]:
        """Where the code calls a member that it calls once, as ``f_lasti`` of a frame says it."""
        (place,) = [call.place for call in self.calls if call.name == name]
        positions = enumerate(self.code.co_positions())  # without columns if Python was told to have none
        return frozenset(2 * at for at, found in positions if all(one in {None, other} for one, other in zip(found, place)))

    def used_with(self, names: Sequence[str]) -> set[str]:
        """The attributes of self that it uses from the first of these calls to the last."""
        (line,) = {call.line for call in self.calls if call.name in names}
        uses = self.uses[line]
        return {*uses[uses.index(names[0]) : uses.index(names[-1]) + 1]}

    # -- statements ------------------------------------------------------------------------------------------------------------

    def _block(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            match statement:
                case ast.Expr(value=value):
                    self.visit(value)
                case ast.Return(value=ast.expr() as value):
                    given = self.visit(value)
                    self.gives_tensor &= isinstance(given, int)
                    self.results.append(value)
                case ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=ast.expr() as value):
                    self._assign(target, value)
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    self._end()
                case _:
                    self._note_values(statement)
                    self._end()
                    for part in _blocks(statement):
                        self._block(part)
                        self._end()

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        self._note_value(target, value)
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            pairs = [*zip(target.elts, [self.visit(each) for each in value.elts])]
        else:
            given = self.visit(value)
            parts = target.elts if isinstance(target, ast.Tuple) and isinstance(given, int) else [target]
            pairs = [(part, given) for part in parts]
        if all(isinstance(one, ast.Name) for one, _ in pairs):
            self.variables.update((one.id, given) for one, given in pairs)  # type: ignore[attr-defined]
        else:
            self._end()

    def _note_value(self, target: ast.expr, value: ast.expr) -> None:
        """Note what variables may hold, for what is returned."""
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, other in zip(target.elts, value.elts):
                self._note_value(one, other)
            return
        for name in ast.walk(target):
            if isinstance(name, ast.Name):
                self.values[name.id].append(value)

    def _note_values(self, statement: ast.stmt) -> None:
        """The same, of all that this statement itself assigns."""
        for node in ast.walk(statement):
            for target in [*getattr(node, "targets", []), getattr(node, "target", None)]:
                value = getattr(node, "value", getattr(node, "iter", None))
                if isinstance(target, ast.expr) and isinstance(value, ast.expr):
                    self._note_value(target, value)

    def _end(self) -> Given:
        """Unknown code may run here. Nothing is known of variables afterwards."""
        self.ends += 1
        self.variables = {}
        return OTHER

    # -- expressions -----------------------------------------------------------------------------------------------------------

    # A visit gives what an expression gives. Parts are visited in the order in which they run.

    def generic_visit(self, node: ast.AST) -> Given:
        return self._end()

    def visit_Constant(self, node: ast.Constant) -> Given:
        return PLAIN

    def visit_Name(self, node: ast.Name) -> Given:
        return self.variables.get(node.id, OTHER)

    def visit_Tuple(self, node: ast.Tuple | ast.List) -> Given:
        return self._display(node.elts)

    visit_List = visit_Tuple

    def visit_Slice(self, node: ast.Slice) -> Given:
        return self._display([part for part in (node.lower, node.upper, node.step) if part is not None])

    def _display(self, parts: Sequence[ast.expr]) -> Given:
        given = [self.visit(part) for part in parts]
        return PLAIN if all(each is PLAIN for each in given) else DISPLAY

    def visit_Starred(self, node: ast.Starred) -> Given:
        given: Given = self.visit(node.value)
        return given if given in {PLAIN, DISPLAY} else self._end()

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Given:
        return PLAIN if self.visit(node.operand) is PLAIN else self._end()

    def visit_BinOp(self, node: ast.BinOp) -> Given:
        return self._calculated([self.visit(node.left), self.visit(node.right)])

    def visit_Subscript(self, node: ast.Subscript) -> Given:
        of, at = self.visit(node.value), self.visit(node.slice)
        return of if at is PLAIN and (of is PLAIN or isinstance(of, int)) else self._end()

    def _calculated(self, sides: Sequence[Given]) -> Given:
        if all(side is PLAIN for side in sides):
            return PLAIN
        known = all(side is PLAIN or isinstance(side, int) for side in sides)
        return next(self.memories) if known else self._end()

    def visit_Attribute(self, node: ast.Attribute) -> Given:
        value, name = node.value, node.attr
        if _is_self(value):
            self.uses[self.ends].append(name)
            if not self._is_field(name):
                return self._end()
            return PLAIN if name in self.known.numbers else OTHER
        if (module := self._module(value)) is not None:
            return OTHER if name in vars(module) else self._end()
        return self._of_tensor(self.visit(value), name, TRANSPOSES)

    def visit_Call(self, node: ast.Call) -> Given:
        match node:
            case ast.Call(func=ast.Attribute(value=owner, attr=name), args=[first, *rest], keywords=[]) if _is_self(owner):
                return self._call_of_self(node, name, first, rest)
            case ast.Call(func=ast.Attribute(value=owner, attr=name), args=[first, *rest]) if self._module(owner) is torch:
                of = self.visit(first)
            case ast.Call(func=ast.Attribute(value=owner, attr=name), args=rest) if self._module(owner) is None:
                of = OTHER if _is_self(owner) else self.visit(owner)
            case _:
                name, of, rest = "", self.visit(node.func), node.args
        for argument in (*rest, *[each.value for each in node.keywords]):
            self.visit(argument)
        return self._of_tensor(of, name, VIEWING)

    def _of_tensor(self, of: Given, name: str, views: Set[str]) -> Given:
        if isinstance(of, int) and name in SIZES:
            return PLAIN
        return of if isinstance(of, int) and name in views else self._end()

    def _call_of_self(self, node: ast.Call, name: str, argument: ast.expr, others: Sequence[ast.expr]) -> Given:
        given = self.visit(argument)
        for other in others:
            self.visit(other)
        self.uses[self.ends].append(name)
        if isinstance(given, int) and name in self.known.methods:
            return given
        if others or not self._is_field(name):
            return self._end()
        if name in self.known.members and isinstance(argument, ast.Name):
            place = node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
            self.calls.append(MemberCall(name, argument.id, given, self.ends, place))
            return next(self.memories)
        if isinstance(given, int) and name in self.known.leaves:
            self.written[self.ends].add(given)
            return given
        return self._end()

    def _is_field(self, name: str) -> bool:
        """Whether self.name is read as torch does, by no code of the class."""
        static = inspect.getattr_static
        reads = [static(self.kind, each, None) is static(nn.Module, each, None) for each in ("__getattribute__", "__getattr__")]
        return all(reads) and static(self.kind, name, ABSENT) is ABSENT

    def _module(self, node: ast.expr) -> ModuleType | None:
        """The module of Python that an expression such as ``torch.nn`` names."""
        match node:
            case ast.Name(id=name):
                found = self._global(name)
            case ast.Attribute(value=value, attr=name) if (inner := self._module(value)) is not None:
                found = vars(inner).get(name)
            case _:
                found = None
        return found if isinstance(found, ModuleType) else None

    def _global(self, name: str) -> Any:
        """The value of a global variable; None for any other."""
        local = name in self.code.co_varnames + self.code.co_cellvars + self.code.co_freevars
        return None if local else function_of(self.kind, self.code.co_name).__globals__.get(name)

    # -- results ---------------------------------------------------------------------------------------------------------------

    def _return_together(self, names: Sequence[str]) -> bool:
        """Whether no two parts of what it returns have a member each, on which two backward passes could come."""
        parts = [[self._members_in(part, names, set()) for part in self._parts(result, set())] for result in self.results]
        return all(one & other for result in parts for one, other in combinations(filter(None, result), 2))

    def _calls_one_of(self, names: Sequence[str], node: ast.AST) -> bool:
        return any(isinstance(each, ast.Attribute) and each.attr in names for each in ast.walk(node))

    def _parts(self, node: ast.AST, passed: set[str]) -> Iterator[ast.AST]:
        """What somebody outside may take from a result apart: of a tensor itself, of anything else each expression in it."""
        match node:
            case ast.Name(id=name):
                values = () if name in passed else self.values[name]
                passed.add(name)
                for value in values:
                    yield from self._parts(value, passed)
            case ast.Call(func=ast.Attribute()) | ast.Attribute() | ast.Subscript() | ast.Constant():
                yield node
            case ast.Call(func=ast.Name(id=name)) if name not in CONTAINERS and not isinstance(self._global(name), type):
                yield node
            case ast.BinOp(left=left, right=right) if not any(map(_displays, (left, right))):
                yield node
            case _:
                for child in ast.iter_child_nodes(node):
                    yield from self._parts(child, passed)

    def _members_in(self, node: ast.AST, names: Sequence[str], passed: set[str]) -> set[str]:
        """The members that a value is computed with, however often its variables are assigned."""
        if isinstance(node, ast.Attribute) and node.attr in names:
            return {node.attr}
        inside: list[Any] = [*ast.iter_child_nodes(node)]
        if isinstance(node, ast.Name) and node.id not in passed:
            passed.add(node.id)
            inside = self.values[node.id]
        return {member for child in inside for member in self._members_in(child, names, passed)}


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _is_stored(node: ast.Name) -> bool:
    return not isinstance(node.ctx, ast.Load)


def _accesses(node: ast.AST, value: ast.AST | None = None) -> Iterator[tuple[str, ast.AST | None]]:
    """The variables that code uses, in the order in which it runs, each with what it is assigned; None where it is read."""
    parts: Iterable[ast.AST] = ast.iter_child_nodes(node)
    match node:
        case ast.Name(id=name):
            yield name, value if _is_stored(node) else None
        case ast.AugAssign(target=ast.Name(id=name), value=change):  # keeps some of what the variable holds
            yield name, None
            parts = [change]
        case ast.Assign(targets=[*targets], value=value) | ast.AnnAssign(target=targets, value=ast.expr() as value):
            yield from _accesses(value)
            parts = targets if isinstance(targets, list) else [targets]
    for part in parts:
        yield from _accesses(part, value)


def _displays(node: ast.AST) -> bool:
    return any(isinstance(each, (ast.Tuple, ast.List)) for each in ast.walk(node))


def _blocks(statement: ast.stmt) -> Iterator[Sequence[ast.stmt]]:
    """The blocks of a compound statement."""
    parts = [statement, *getattr(statement, "handlers", []), *getattr(statement, "cases", [])]
    for part in parts:
        yield from (block for name in ("body", "orelse", "finalbody") if (block := getattr(part, name, None)))


# -- the code of a class ---------------------------------------------------------------------------------------------------------


def methods_of(kind: Any, known: KnownParts = NOTHING, *, on_tensor: bool = False) -> tuple[MethodCalls, ...]:
    """The methods of a class that its forward names, as far as their source is known. on_tensor: their first argument is one."""
    codes = [code for code in codes_of(kind) if code is code_of_method(kind, code.co_name)]  # else of a base, or inside of one
    return _methods_of(kind, tuple(codes), known, on_tensor)


@cache
def _methods_of(kind: Any, codes: Sequence[CodeType], known: KnownParts, on_tensor: bool) -> tuple[MethodCalls, ...]:
    found = [(code, definition) for code in codes if (definition := _definition_of(code)) is not None]
    with suppress(RecursionError):  # of very long expressions
        return tuple(MethodCalls(kind, code, each, known, code.co_varnames[1:2] if on_tensor else ()) for code, each in found)
    return ()


def calm_methods(module: nn.Module, numbers: frozenset[str]) -> frozenset[str]:
    """The methods that run no unknown code on a tensor, whatever their other arguments are, and return a tensor."""
    kind: Any = type(module)
    methods = methods_of(kind, KnownParts(numbers=numbers), on_tensor=True)
    calm = [method.code for method in methods if not method.ends and method.gives_tensor and method.results]
    own = [code.co_name for code in calm if is_own(kind, code.co_name, code)]
    return frozenset(own).difference(vars(module))


def is_own(kind: type[nn.Module], name: str, code: CodeType) -> bool:
    """Whether calls of a method run this code, and no decorator's."""
    method = inspect.getattr_static(kind, name, None)
    return isinstance(method, FunctionType) and method.__code__ is code


def function_of(kind: type[nn.Module], name: str) -> Any:
    """A method of a class, as it was written below its decorators; None if it has none."""
    found = inspect.getattr_static(kind, name, None)  # not by code of the class, such as a descriptor's
    return inspect.unwrap(getattr(found, "__func__", found))


def code_of_method(kind: type[nn.Module], name: str) -> CodeType | None:
    """The code of a method of a class; None if it has none."""
    return getattr(function_of(kind, name), "__code__", None)


def _definition_of(code: CodeType) -> ast.stmt | None:
    """The definition of a method; None without a source, or if the source is not this code's."""
    # ``inspect.getsource`` would look at every module for the file, in 7 ms.
    linecache.checkcache(code.co_filename)
    definitions, codes = _compiled("".join(linecache.getlines(code.co_filename)))
    same = any(facts_of(code) == facts_of(made) for made in codes.get(code.co_firstlineno, ()))
    return definitions.get(code.co_firstlineno) if same else None


@lru_cache(maxsize=4)
def _compiled(source: str) -> tuple[Mapping[int, ast.stmt], Mapping[int, Sequence[CodeType]]]:
    """The definitions of functions in the text of a file, and the code that they compile to, each by its first line.

    Of the whole file, since Python 3.11 compiles a call of a name's attribute otherwise where the file imports that name.
    """
    definitions, codes = dict[int, ast.stmt](), defaultdict[int, list[CodeType]](list)
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the file, which Python gave when it was imported
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                definitions[min(part.lineno for part in (node, *node.decorator_list))] = node
        waiting: list[Any] = [compile(tree, "", "exec", dont_inherit=True)]
        for made in waiting:
            codes[made.co_firstlineno].append(made)
            waiting += [each for each in made.co_consts if isinstance(each, CodeType)]
    return definitions, codes


def facts_of(code: CodeType) -> tuple[Any, ...]:
    """What a code does, wherever it stands."""
    values = tuple(facts_of(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts)
    variables = code.co_varnames, code.co_freevars, code.co_cellvars
    return code.co_code, code.co_exceptiontable, code.co_names, *variables, code.co_argcount, code.co_kwonlyargcount, values
