"""What a mutant is: one small change of one expression or statement of a module, by the table ``OPERATORS``.

Wording is no behaviour: what stands in a docstring, an annotation, a decorator or a call of ``WORDING`` is left alone, and
strings are never changed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

WORDING = frozenset(("describe", "warn", "warn_once", "debug", "info", "warning", "nearest"))
"""Functions whose arguments are text for a reader."""

Change = tuple[str, ast.AST]
"""(operator, what stands instead)."""


@dataclass(frozen=True)
class Mutant:
    """The ``site``-th change of ``file``.

    span: lines that a test must run to notice it; None: the change acts where the module is imported. before, after: the source.
    """

    file: str
    site: int
    operator: str
    line: int
    span: tuple[int, ...] | None
    before: str
    after: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line} {self.operator} #{self.site}"

    def source(self, root: Path) -> ast.Module:
        """The module with the change in it."""
        tree, places = _read(root / self.file)
        place, _, replacement = places[self.site]
        place.put(replacement)
        return ast.fix_missing_locations(tree)


@dataclass
class Place:
    """Where a node hangs: ``parent.field`` or ``parent.field[index]``; the statement around it, and whether a function is."""

    parent: ast.AST
    field: str
    index: int | None
    node: ast.AST
    statement: ast.stmt
    inside: bool

    def put(self, node: ast.AST) -> None:
        """Let ``node`` stand here."""
        ast.copy_location(node, self.node)
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node

    @property
    def span(self) -> tuple[int, ...] | None:
        """Lines of the statement, or of the head of a compound one."""
        if not self.inside:
            return None
        blocks = [block[0].lineno for name in ("body", "orelse") if (block := getattr(self.statement, name, None))]
        first, last = self.statement.lineno, self.statement.end_lineno or self.statement.lineno
        return tuple(range(first, max(first + 1, min(blocks)) if blocks else last + 1))


def mutants(root: Path, file: str) -> list[Mutant]:
    """Every mutant of a module, in the order of its source."""
    _, places = _read(root / file)
    return [
        Mutant(file, site, operator, place.node.lineno, place.span, _text(place.node), _text(replacement))  # type: ignore[attr-defined]
        for site, (place, operator, replacement) in enumerate(places)
    ]


def _read(path: Path) -> tuple[ast.Module, list[tuple[Place, str, ast.AST]]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return tree, [(place, *change) for place in _places(tree) for operator in OPERATORS for change in operator(place.node)]


def _text(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())[:160]


SKIPPED = {"annotation", "returns", "decorator_list", "bases"}


def _places(tree: ast.Module) -> Iterator[Place]:
    """Every node that may change, parents before children."""

    def walk(node: ast.AST, statement: ast.stmt | None, inside: bool) -> Iterator[Place]:
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for field, value in ast.iter_fields(node):
            if field in SKIPPED or (isinstance(node, ast.JoinedStr)):
                continue
            within = inside or (function and field == "body")
            for index, child in enumerate(value) if isinstance(value, list) else ((None, value),):
                if not isinstance(child, ast.AST) or _wording(child):
                    continue
                around = child if isinstance(child, ast.stmt) else statement
                if around is not None and hasattr(child, "lineno"):
                    yield Place(node, field, index, child, around, within)
                yield from walk(child, around, within)

    return walk(tree, None, False)


def _wording(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.Expr):
        return _wording(node.value)
    if not isinstance(node, ast.Call):
        return False
    return (node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")) in WORDING


# The operators ---------------------------------------------------------------------------------------------------------------

SWAPS: dict[type[ast.cmpop], Sequence[type[ast.cmpop]]] = {
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv}


def comparison(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        for swapped in SWAPS[type(node.ops[0])]:
            yield "comparison", ast.Compare(node.left, [swapped()], node.comparators)


def logic(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.BoolOp):
        yield "and/or", ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "removed not", node.operand


def constant(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield "constant", ast.Constant(node.value + 1)
        yield "constant", ast.Constant(node.value - 1)


def arithmetic(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.BinOp) and (other := ARITHMETIC.get(type(node.op))):
        yield "arithmetic", ast.BinOp(node.left, other(), node.right)


def arguments(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Call) and len(node.args) >= 2 and not any(isinstance(each, ast.Starred) for each in node.args[:2]):
        first, second, *rest = node.args
        if ast.dump(first) != ast.dump(second):
            yield "swapped arguments", ast.Call(node.func, [second, first, *rest], node.keywords)


def removal(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Raise):
        yield "removed raise", ast.Pass()
    elif isinstance(node, ast.Expr | ast.AugAssign | ast.Delete) or _sets_state(node):
        yield "removed statement", ast.Pass()
    elif isinstance(node, ast.Continue):
        yield "continue/break", ast.Break()
    elif isinstance(node, ast.Break):
        yield "continue/break", ast.Continue()


def _sets_state(node: ast.AST) -> bool:
    """Whether a statement sets attributes or items alone: without one that sets a name, what reads that could not run."""
    return isinstance(node, ast.Assign) and all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)


def result(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield "return None", ast.Return(ast.Constant(None))


OPERATORS: tuple[Callable[[ast.AST], Iterator[Change]], ...] = (
    *(comparison, logic, constant, arithmetic, arguments),
    *(removal, result),
)
