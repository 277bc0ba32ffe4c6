"""The CUDA text of a chain of elementwise ops, written from their declared expressions.

It has the same parts in both directions: one device function for each expression; ``Chain``, the kernel's parameter; the inputs
of eight neighbouring results and how they are loaded; ``run_chain``, which takes them from boundary to boundary and knows no
tile; how results are stored. Only structure is in the text: shapes, pointers and constants are parameters.

A gated op reads two columns for each of its results, so what comes before it runs as two *strands*, and as 2^d of them before d
gated ops. ``column_d_s`` maps a column of the chain's result to that of strand s.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from opfuse.kernels.pointwise import Pointwise, variables

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class StageCode:
    """One op of a chain, as far as its code depends on it.

    operands: C types of the operands that are read, by name.
    grads: C types of the operand gradients that are stored, by name.
    saved: C type of the saved input that the backward pass reads, or of the input that the forward pass keeps; None for neither.
    interleave: columns of the groups in which a gated unit's halves alternate, 0 for one half behind the other.
    """

    math: Pointwise
    operands: tuple[tuple[str, str], ...] = ()
    grads: tuple[tuple[str, str], ...] = ()
    saved: str | None = None
    interleave: int = 0


@dataclass(frozen=True)
class ChainCode:
    """The structure of a chain. source: C type of x, or of dy; io: of results; between: of what flows between two ops.

    stores, casts: whether the last result, or dx, is stored as it is; whether the kernel makes something else of it.
    """

    direction: Direction
    stages: tuple[StageCode, ...]
    source: str
    io: str
    between: str
    stores: bool = True
    casts: bool = False

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """For the input of each stage, and the chain's result, the number of gated ops that follow."""
        gated = [stage.math.is_gated for stage in self.stages]
        return tuple(sum(gated[i:]) for i in range(len(gated) + 1))

    def strands(self, level: int) -> range:
        """The strands at the input of stage ``level``, or at the chain's result."""
        return range(1 << self.depths[level])

    @property
    def packs(self) -> int:
        """Packs of eight results that a thread has in flight: with more strands, each has more loads of its own."""
        return 1 if self.depths[0] else 2

    @property
    def is_flat(self) -> bool:
        """Whether nothing depends on where rows end."""
        kinds = {kind for stage in self.stages for kind in stage.math.operands.values()}
        return not self.depths[0] and kinds <= {"full"}

    @property
    def name(self) -> str:
        """The names of the ops."""
        return ", ".join(stage.math.name for stage in self.stages)

    def of_kind(self, *kinds: str) -> Iterator[tuple[int, str, str, str]]:
        """(stage, name, C type, kind) of the operands of these kinds that are read."""
        return self._tensors("operands", kinds)

    def grads_of_kind(self, *kinds: str) -> Iterator[tuple[int, str, str, str]]:
        """(stage, name, C type, kind) of the operand gradients of these kinds that are stored."""
        return self._tensors("grads", kinds)

    def _tensors(self, field: str, kinds: tuple[str, ...]) -> Iterator[tuple[int, str, str, str]]:
        for i, stage in enumerate(self.stages):
            for name, c_type in getattr(stage, field):
                if (kind := stage.math.operands[name]) in kinds:
                    yield i, name, c_type, kind

    @property
    def saved(self) -> list[tuple[int, str]]:
        """(stage, C type) of saved inputs."""
        return [(i, stage.saved) for i, stage in enumerate(self.stages) if stage.saved is not None]

    @property
    def row_sums(self) -> list[tuple[int, str, str, int]]:
        """(stage, name, C type, strand) of every sum over rows."""
        return [(i, name, t, s) for i, name, t, _ in self.grads_of_kind("row") for s in self.strands(i + 1)]

    @property
    def column_sums(self) -> list[tuple[int, str, str]]:
        """(stage, name, C type) of every sum over columns, that of all strands together."""
        return [(i, name, t) for i, name, t, _ in self.grads_of_kind("column")]

    @property
    def constants(self) -> list[tuple[int, str]]:
        """(stage, name) of the constants, in the order in which they are parameters."""
        return [(i, name) for i, stage in enumerate(self.stages) for name in stage.math.constants]

    @property
    def final(self) -> int:
        """The level at which the result is: what x flows to, or dy flows back to."""
        return len(self.stages) if self.direction == "forward" else 0

    def text(self) -> str:
        """The text in place of generated.cuh."""
        return _text(self, _Forward(self) if self.direction == "forward" else _Backward(self))


class _Direction:
    """What both directions have: places, operands, calls of expressions."""

    def __init__(self, code: ChainCode) -> None:
        self.code = code

    def row_of(self, level: int) -> str:
        """The offset of a row of what is as wide as the input of stage ``level``."""
        depth = self.code.depths[level]
        return f"row * (p.cut.columns << {depth})" if depth else "row * p.cut.columns"

    def place(self, level: int, strand: int) -> str:
        """A function from columns of the chain's result to those of a strand."""
        depth = self.code.depths[level]
        return f"[&](long long c) {{ return column_{depth}_{strand}(p.cut, c); }}"

    def load(self, target: str, pointer: str, level: int, strand: int, *, rows: bool = True) -> str:
        base = f"{pointer} + {self.row_of(level)}" if rows else pointer
        return f"{target} = load({base}, {self.place(level, strand)}, column, count);"

    def store(self, pointer: str, value: str, level: int, strand: int) -> str:
        return f"store({pointer} + {self.row_of(level)}, {value}, {self.place(level, strand)}, column, count);"

    def arguments(self, expression: str, values: Mapping[str, str]) -> str:
        """Values of the variables that an expression reads, in the order of their names."""
        return ", ".join(values[name] for name in sorted(variables(expression)))

    def operands(self, stage: int, strand: int) -> dict[str, str]:
        """Elements i of a stage's operands and its constants, by name."""
        math = self.code.stages[stage].math
        where = {"row": "operands.", "full": "in.", "column": "in."}
        values = {constant: f"p.c{stage}_{constant}" for constant in math.constants}
        for name, kind in math.operands.items():
            packed = f"{where[kind]}o{stage}_{name}"
            values[name] = packed if kind == "column" else f"value({packed}_{strand}, i)"
        return values

    def operand_fields(self) -> list[str]:
        return [f"const {t}* o{i}_{name};  // {kind}" for i, name, t, kind in self.code.of_kind("row", "column", "full")]

    def operand_packs(self, kind: str) -> list[tuple[str, int, str, int]]:
        """(name of the pack, stage, C type, strand)."""
        code = self.code
        return [(f"o{i}_{name}", i, t, s) for i, name, t, _ in code.of_kind(kind) for s in code.strands(i + 1)]

    def input_declarations(self) -> list[str]:
        packs = [f"Pack<{t}, N> {name}_{s};" for name, _, t, s in self.operand_packs("full")]
        return packs + [f"float o{i}_{name};" for i, name, _, _ in self.code.of_kind("column")]

    def input_loads(self) -> list[str]:
        loads = [self.load(f"in.{name}_{s}", f"p.{name}", i + 1, s) for name, i, _, s in self.operand_packs("full")]
        names = [f"o{i}_{name}" for i, name, _, _ in self.code.of_kind("column")]
        return loads + [f"in.{name} = count > 0 ? value(p.{name}[row]) : 0.0f;" for name in names]


class _Forward(_Direction):
    """Values from the first boundary to the last."""

    def functions(self) -> Iterator[tuple[str, str]]:
        for i, stage in enumerate(self.code.stages):
            yield f"stage{i}_{stage.math.name}", stage.math.forward

    def fields(self) -> list[str]:
        kept = [f"{t}* kept{i};" for i, t in self.code.saved]
        y = [f"{self.code.io}* y;"] if self.code.stores else []
        return [f"const {self.code.source}* x;", *self.operand_fields(), *y, *kept]

    def boundary(self, level: int, strand: int) -> str:
        """The pack that flows into stage ``level``."""
        direct = level == 0 and self.code.between in (self.code.source, "float")
        return f"in.x_{strand}" if direct else f"out.v{level}_{strand}"

    def sections(self) -> Iterator[str]:
        code = self.code
        x = [f"Pack<{code.source}, N> x_{s};" for s in code.strands(0)]
        yield _struct("Inputs", [*x, *self.input_declarations()], "what N neighbouring results are made from")
        boundaries = [(level, s) for level in range(len(code.stages) + 1) for s in code.strands(level)]
        made = [(level, s) for level, s in boundaries if self.boundary(level, s).startswith("out.")]
        declared = [f"Pack<{code.between}, N> v{level}_{s};" for level, s in made]
        yield _struct("Results", [*declared, *_SUMS], "what flows into each stage, and out of the last")
        loads = [self.load(f"in.x_{s}", "p.x", 0, s) for s in code.strands(0)]
        yield _load_inputs([*loads, *self.input_loads()])
        yield _run_chain([self.step(level, s) for level, s in made])
        kept = [(f"p.kept{i}", i, s) for i, _ in code.saved for s in code.strands(i)]
        last = [("p.y", len(code.stages), 0)] if code.stores else []
        stores = [self.store(at, f"rounded<{code.io}>({self.boundary(i, s)})", i, s) for at, i, s in kept + last]
        yield _store_results(stores)
        yield _result(code, [self.boundary(code.final, 0)])

    def step(self, level: int, strand: int) -> str:
        target = f"out.v{level}_{strand}"
        if level == 0:
            return f"{target} = rounded<{self.code.between}>(in.x_{strand});"
        i = level - 1
        math = self.code.stages[i].math
        if (addend := self.addend(i, strand)) is not None:
            return f"{target} = sum_of({self.boundary(i, strand)}, {addend});"
        strands = [2 * strand, 2 * strand + 1] if math.is_gated else [strand]
        inputs = {name: f"value({self.boundary(i, s)}, i)" for name, s in zip(math.inputs, strands)}
        arguments = self.arguments(math.forward, {**inputs, **self.operands(i, strand)})
        return _each(target, self.code.between, f"stage{i}_{math.name}({arguments})")

    def addend(self, stage: int, strand: int) -> str | None:
        """The pack that an op adds to its input, if that is all it does and both are of one type."""
        given = self.code.stages[stage]
        types = {f"x + {name}": (name, c_type) for name, c_type in given.operands}
        name, c_type = types.get(given.math.forward, ("", ""))
        flows = self.code.source if self.boundary(stage, 0).startswith("in.") else self.code.between
        if not name or given.math.operands[name] == "column" or {c_type, flows} != {self.code.between}:
            return None
        return f"{'operands' if given.math.operands[name] == 'row' else 'in'}.o{stage}_{name}_{strand}"


class _Backward(_Direction):
    """Gradients from the last boundary to the first."""

    def functions(self) -> Iterator[tuple[str, str]]:
        for i, stage in enumerate(self.code.stages):
            math = stage.math
            for name, expression in zip(math.inputs, math.backward):
                yield f"stage{i}_{math.name}_{name}", expression
            for name, _ in stage.grads:
                yield f"stage{i}_{math.name}_{name}", math.operand_backward[name]

    def fields(self) -> list[str]:
        code = self.code
        saved = [f"const {t}* x{i};" for i, t in code.saved]
        grads = [f"{t}* d{i}_{name};  // {kind}" for i, name, t, kind in code.grads_of_kind("row", "column", "full")]
        dx = [f"{code.io}* dx;"] if code.stores else []
        return [f"const {code.source}* dy;", *saved, *self.operand_fields(), *dx, *grads]

    def gradient(self, level: int, strand: int) -> str:
        """The pack of the gradient of what flows into stage ``level``."""
        direct = level == len(self.code.stages) and self.code.between in (self.code.source, "float")
        return "in.dy" if direct else f"out.g{level}_{strand}"

    def sections(self) -> Iterator[str]:
        code = self.code
        saved = [(i, t, s) for i, t in code.saved for s in code.strands(i)]
        packs = [f"Pack<{code.source}, N> dy;", *(f"Pack<{t}, N> x{i}_{s};" for i, t, s in saved)]
        yield _struct("Inputs", [*packs, *self.input_declarations()], "what N neighbouring gradients are made from")
        first = 0 if code.stores or code.casts else min((i + 1 for i, stage in enumerate(code.stages) if stage.grads), default=0)
        levels = list(reversed(range(first, len(code.stages) + 1)))
        gradients = [(level, s) for level in levels for s in code.strands(level)]
        made = [(level, s) for level, s in gradients if self.gradient(level, s).startswith("out.")]
        full = [(i, name, t, s) for i, name, t, _ in code.grads_of_kind("full") for s in code.strands(i + 1)]
        declared = [f"Pack<{code.between}, N> g{level}_{s};" for level, s in made]
        declared += [f"Pack<{t}, N> d{i}_{name}_{s};" for i, name, t, s in full]
        yield _struct("Results", [*declared, *_SUMS], "gradients of what flows into each stage, and of its operands")
        loads = [self.load("in.dy", "p.dy", len(code.stages), 0)]
        loads += [self.load(f"in.x{i}_{s}", f"p.x{i}", i, s) for i, _, s in saved]
        yield _load_inputs([*loads, *self.input_loads()])
        yield _run_chain([*self.steps(levels)])
        stores = [self.store("p.dx", f"rounded<{code.io}>({self.gradient(0, s)})", 0, s) for s in code.strands(0) if code.stores]
        stores += [self.store(f"p.d{i}_{name}", f"out.d{i}_{name}_{s}", i + 1, s) for i, name, _, s in full]
        yield _store_results(stores)
        if first == 0:
            yield _result(code, [self.gradient(0, s) for s in code.strands(0)])

    def steps(self, levels: list[int]) -> Iterator[str]:
        code = self.code
        rows, columns = code.row_sums, code.column_sums
        if self.gradient(levels[0], 0).startswith("out."):
            yield f"{self.gradient(levels[0], 0)} = rounded<{code.between}>(in.dy);"
        for i in reversed(range(len(code.stages))):
            stage = code.stages[i]
            for s in code.strands(i + 1):
                for name, c_type in stage.grads:
                    call = self.call(i, name, stage.math.operand_backward[name], s)
                    if (i, name, c_type, s) in rows:
                        yield _loop(f"out.row_sum[{rows.index((i, name, c_type, s))}][i] = {call};")
                    elif (i, name, c_type) in columns:
                        yield _loop(f"out.column_sum[{columns.index((i, name, c_type))}][i] {'+=' if s else '='} {call};")
                    else:
                        yield _each(f"out.d{i}_{name}_{s}", c_type, call)
                if i not in levels:
                    continue
                for half, (name, expression) in enumerate(zip(stage.math.inputs, stage.math.backward)):
                    target = self.gradient(i, 2 * s + half if stage.math.is_gated else s)
                    yield _each(target, code.between, self.call(i, name, expression, s))

    def call(self, stage: int, name: str, expression: str, strand: int) -> str:
        math = self.code.stages[stage].math
        strands = [2 * strand, 2 * strand + 1] if math.is_gated else [strand]
        inputs = {name: f"value(in.x{stage}_{s}, i)" for name, s in zip(math.inputs, strands)}
        values = {"dy": f"value({self.gradient(stage + 1, strand)}, i)", **inputs, **self.operands(stage, strand)}
        return f"stage{stage}_{math.name}_{name}({self.arguments(expression, values)})"


_PARTS = ("float *row_parts, *column_parts;  // sums of each piece", "long long row_pieces;")
_SUMS = ("float row_sum[SOME(ROW_SUMS)][N];", "float column_sum[SOME(COLUMN_SUMS)][N];")


# -- C ---------------------------------------------------------------------------------------------------------------------------


def _text(code: ChainCode, direction: _Forward | _Backward) -> str:
    constants = [f"float c{i}_{name};" for i, name in code.constants]
    row_operands = direction.operand_packs("row")
    loads = [direction.load(f"operands.{name}_{s}", f"p.{name}", i + 1, s, rows=False) for name, i, _, s in row_operands]
    sections = [
        f"// The chain {code.name}.\nconstexpr int PACKS = {code.packs};",
        "struct Chain {" + _block([*direction.fields(), *_PARTS, "Cut cut;", *constants]) + "};",
        "\n".join(_columns(code)),
        f"constexpr int ROW_SUMS = {len(code.row_sums)}, COLUMN_SUMS = {len(code.column_sums)};",
        "\n\n".join(_expression(name, expression) for name, expression in direction.functions()),
        _struct("RowOperands", [f"Pack<{t}, N> {name}_{s};" for name, _, t, s in row_operands], "operands of all rows"),
        *direction.sections(),
        *_sums(code),
        _function(
            "RowOperands<8> load_row_operands(const Chain& p, long long column, long long count)",
            ["RowOperands<8> operands;", *loads, "return operands;"],
        ),
    ]
    return "\n\n".join(sections) + "\n"


def _columns(code: ChainCode) -> Iterator[str]:
    """The columns of strands, from the last gated op to the first."""
    head = "OPFUSE_FN long long column_{}_{}(const Cut& cut, long long column) {{ return {}; }}"
    yield head.format(0, 0, "column")
    gated = [stage.interleave for stage in reversed(code.stages) if stage.math.is_gated]
    for depth, interleave in enumerate(gated):
        for s in range(2 << depth):
            inner = f"column_{depth}_{s // 2}(cut, column)"
            yield head.format(depth + 1, s, f"half_column<{interleave}>({inner}, {s % 2}, cut.columns << {depth})")


def _sums(code: ChainCode) -> Iterator[str]:
    """Where the sums go that are gradients of operands."""
    rows = [
        f"if (sum == {k}) p.d{i}_{name}[column_{code.depths[i + 1]}_{s}(p.cut, column)] = from_fp32<{t}>(value);"
        for k, (i, name, t, s) in enumerate(code.row_sums)
    ]
    columns = [f"if (sum == {k}) p.d{i}_{name}[row] = from_fp32<{t}>(value);" for k, (i, name, t) in enumerate(code.column_sums)]
    yield _function("void store_row_sum(const Chain& p, int sum, long long column, float value)", rows)
    yield _function("void store_column_sum(const Chain& p, int sum, long long row, float value)", columns)


def _expression(name: str, expression: str) -> str:
    parameters = ", ".join(f"float {variable}" for variable in sorted(variables(expression)))
    return f"OPFUSE_FN float {name}({parameters}) {{ return {expression}; }}"


def _struct(name: str, fields: list[str], what: str) -> str:
    return f"// {name}: {what}.\ntemplate <int N>\nstruct {name} {{{_block(fields)}}};"


def _function(head: str, body: list[str]) -> str:
    return f"OPFUSE_FN {head} {{{_block(body)}}}"


def _load_inputs(loads: list[str]) -> str:
    head = "Inputs<8> load_inputs(const Chain& p, long long row, long long column, long long count)"
    return _function(head, ["Inputs<8> in;", *loads, "return in;"])


def _run_chain(steps: list[str]) -> str:
    head = "Results<N> run_chain(const Chain& p, const RowOperands<N>& operands, const Inputs<N>& in)"
    return "template <int N>\n" + _function(head, ["Results<N> out;", *steps, "return out;"])


_AT = "long long row, long long column, long long count"


def _store_results(stores: list[str]) -> str:
    return _function(f"void store_results(const Chain& p, const Inputs<8>& in, const Results<8>& out, {_AT})", stores)


def _result(code: ChainCode, packs: list[str]) -> str:
    """What flows out of the chain, for kernels that cast it: the pack of each strand, and where its columns lie."""
    depth = code.depths[code.final]
    values = [f"if constexpr (STRAND == {s}) return rounded<{code.io}>({pack});" for s, pack in enumerate(packs)]
    columns = [f"if constexpr (STRAND == {s}) return column_{depth}_{s}(cut, column);" for s in range(len(packs))]
    return "\n\n".join(
        [
            f"using IO = {code.io};\nconstexpr int STRANDS = {len(packs)};",
            "template <int STRAND>\n" + _function("Pack<IO, 8> result(const Inputs<8>& in, const Results<8>& out)", values),
            "template <int STRAND>\n" + _function("long long result_column(const Cut& cut, long long column)", columns),
        ]
    )


def _each(target: str, c_type: str, value: str) -> str:
    """A pack made element by element, with the operands' names in scope."""
    return f"{target} = pack_of<{c_type}, N>([&](int i) {{ return {value}; }});"


def _loop(statement: str) -> str:
    return f"#pragma unroll\nfor (int i = 0; i < N; ++i) {statement}"


def _block(lines: list[str]) -> str:
    return "\n" + textwrap.indent("\n".join(lines), "    ") + "\n" if lines else ""
