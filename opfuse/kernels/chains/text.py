"""The CUDA text of a chain of elementwise ops, written from their declared expressions.

The text has the same parts in both directions: a device function for each expression; ``Chain``, the kernel's parameter;
``load_inputs``, which loads the inputs of eight neighbouring results; ``run_chain``, which computes with them from boundary to
boundary and knows no addresses; and functions that store results. Shapes, pointers and constants are parameters.

Strand s of what lies before d gated ops has its columns by ``column_d_s``, which takes a column of the chain's result.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping

from opfuse.kernels.chains.structure import ChainCode
from opfuse.numerics.pointwise import variables

_PARTS = ("float *row_parts, *column_parts;  // sums of each tile", "long long row_pieces, column_pieces;")
_SUMS = ("float row_sum[SOME(ROW_SUMS)][N];", "float column_sum[SOME(COLUMN_SUMS)][N];")
_LOAD = "Inputs<8> load_inputs(const Chain& p, const Place& at)"
_RUN = "Results<N> run_chain(const Chain& p, const RowOperands<N>& operands, const Inputs<N>& in)"
_STORE = "void store_results(const Chain& p, const Inputs<8>& in, const Results<8>& out, const Place& at)"


def text_of(code: ChainCode) -> str:
    """The text in place of generated.cuh."""
    steps = Forward(code) if code.direction == "forward" else Backward(code)
    constants = [f"float c{i}_{name};" for i, name in code.constants]
    sections = [
        f"// The chain {code.name}.\nconstexpr int PACKS = {code.packs};",
        "struct Chain {" + block([*steps.fields(), *_PARTS, "Cut cut;", *constants]) + "};",
        "\n".join(_columns(code)),
        f"constexpr int ROW_SUMS = {len(code.row_sums)}, COLUMN_SUMS = {len(code.column_sums)};",
        "\n\n".join(expression(name, body) for name, body in steps.functions()),
        *steps.row_operands(),
        *steps.sections(),
        *_sums(code),
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
    """The functions that store the sums which are gradients of operands."""
    rows = [
        f"if (sum == {k}) p.d{i}_{name}[column_{code.depths[i + 1]}_{s}(p.cut, column)] = from_fp32<{t}>(value);"
        for k, (i, name, t, s) in enumerate(code.row_sums)
    ]
    columns = [f"if (sum == {k}) p.d{i}_{name}[row] = from_fp32<{t}>(value);" for k, (i, name, t) in enumerate(code.column_sums)]
    yield function("void store_row_sum(const Chain& p, int sum, long long column, float value)", rows)
    yield function("void store_column_sum(const Chain& p, int sum, long long row, float value)", columns)


# -- pieces of text --------------------------------------------------------------------------------------------------------------


def expression(name: str, body: str) -> str:
    """A function of the variables that a CUDA expression reads, in the order of their names."""
    parameters = ", ".join(f"float {variable}" for variable in sorted(variables(body)))
    return f"OPFUSE_FN float {name}({parameters}) {{ return {body}; }}"


def struct(name: str, fields: Iterable[str], what: str) -> str:
    """A struct of packs of N elements."""
    return f"// {name}: {what}.\ntemplate <int N>\nstruct {name} {{{block(fields)}}};"


def function(head: str, body: Iterable[str]) -> str:
    """A device function."""
    return f"OPFUSE_FN {head} {{{block(body)}}}"


def each(target: str, c_type: str, value: str) -> str:
    """A pack made element by element, with the operands' names in scope."""
    return f"{target} = pack_of<{c_type}, N>([&](int i) {{ return {value}; }});"


def loop(statement: str) -> str:
    """A statement for every element i."""
    return f"#pragma unroll\nfor (int i = 0; i < N; ++i) {statement}"


def block(lines: Iterable[str]) -> str:
    """Statements between braces."""
    lines = list(lines)
    return "\n" + textwrap.indent("\n".join(lines), "    ") + "\n" if lines else ""


# -- statements ------------------------------------------------------------------------------------------------------------------


class _Steps:
    """CUDA text that both directions share: addresses, operands, calls of expressions. Packs are eight neighbouring elements."""

    def __init__(self, code: ChainCode) -> None:
        self.code = code

    def matrix(self, pointer: str, level: int, strand: int) -> str:
        """Arguments for a matrix as wide as the input of stage ``level``: address, columns, and the columns of a strand."""
        depth = self.code.depths[level]
        width = f"p.cut.columns << {depth}" if depth else "p.cut.columns"
        return f"{pointer}, {width}, [&](long long c) {{ return column_{depth}_{strand}(p.cut, c); }}"

    def load(self, target: str, pointer: str, level: int, strand: int) -> str:
        """A statement that loads a pack of the matrix at ``pointer`` into ``target``."""
        return f"{target} = load({self.matrix(pointer, level, strand)}, at);"

    def store(self, pointer: str, value: str, level: int, strand: int) -> str:
        """A statement that stores the pack ``value`` into the matrix at ``pointer``."""
        return f"store({self.matrix(pointer, level, strand)}, at, {value});"

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
        """Fields of the parameter struct for the addresses of operands."""
        return [f"const {t}* o{i}_{name};  // {kind}" for i, name, t, kind in self.code.of_kind("row", "column", "full")]

    def operand_packs(self, kind: str) -> list[tuple[str, int, str, int]]:
        """(name of the pack, stage, C type, strand)."""
        code = self.code
        return [(f"o{i}_{name}", i, t, s) for i, name, t, _ in code.of_kind(kind) for s in code.strands(i + 1)]

    def input_declarations(self) -> list[str]:
        """Members of Inputs for operands that differ from row to row."""
        packs = [f"Pack<{t}, N> {name}_{s};" for name, _, t, s in self.operand_packs("full")]
        return packs + [f"float o{i}_{name};" for i, name, _, _ in self.code.of_kind("column")]

    def input_loads(self) -> list[str]:
        """Statements that load the members of :meth:`input_declarations`."""
        loads = [self.load(f"in.{name}_{s}", f"p.{name}", i + 1, s) for name, i, _, s in self.operand_packs("full")]
        names = [f"o{i}_{name}" for i, name, _, _ in self.code.of_kind("column")]
        return loads + [f"in.{name} = load_of_row(p.{name}, at);" for name in names]

    def row_operands(self) -> Iterator[str]:
        """The packs that all rows share, and how they are loaded."""
        packs = self.operand_packs("row")
        yield struct("RowOperands", [f"Pack<{t}, N> {name}_{s};" for name, _, t, s in packs], "operands of all rows")
        loads = [self.load(f"operands.{name}_{s}", f"p.{name}", i + 1, s) for name, i, _, s in packs]
        body = [*(["at.row = at.down = 0;"] if loads else []), "RowOperands<8> operands;", *loads, "return operands;"]
        yield function("RowOperands<8> load_row_operands(const Chain& p, Place at)", body)

    def load_inputs(self, loads: list[str]) -> str:
        """The function that loads all inputs of eight results: ``loads``, then operands."""
        return function(_LOAD, ["Inputs<8> in;", *loads, *self.input_loads(), "return in;"])

    def run_chain(self, steps: list[str]) -> str:
        """The function that runs ``steps`` on N elements."""
        return "template <int N>\n" + function(_RUN, ["Results<N> out;", *steps, "return out;"])

    def result(self, packs: list[str]) -> str:
        """What flows out of the chain, for kernels that cast it: the pack of each strand, and where its columns lie."""
        code = self.code
        depth = code.depths[code.final]
        values = [f"if constexpr (STRAND == {s}) return rounded<{code.io}>({pack});" for s, pack in enumerate(packs)]
        columns = [f"if constexpr (STRAND == {s}) return column_{depth}_{s}(cut, column);" for s in range(len(packs))]
        return "\n\n".join(
            [
                f"using IO = {code.io};\nconstexpr int STRANDS = {len(packs)};",
                "template <int STRAND>\n" + function("Pack<IO, 8> result(const Inputs<8>& in, const Results<8>& out)", values),
                "template <int STRAND>\n" + function("long long result_column(const Cut& cut, long long column)", columns),
            ]
        )


class Forward(_Steps):
    """Values from the first boundary to the last."""

    def functions(self) -> Iterator[tuple[str, str]]:
        """(name, CUDA expression) of the device functions of all stages."""
        for i, stage in enumerate(self.code.stages):
            yield f"stage{i}_{stage.math.name}", stage.math.forward

    def fields(self) -> list[str]:
        """Fields of the parameter struct for addresses, in the order of the tensors of a call."""
        kept = [f"{t}* kept{i};" for i, t in self.code.saved]
        y = [f"{self.code.io}* y;"] if self.code.stores else []
        return [f"const {self.code.source}* x;", *self.operand_fields(), *y, *kept]

    def boundary(self, level: int, strand: int) -> str:
        """The pack that flows into stage ``level``."""
        direct = level == 0 and self.code.between in (self.code.source, "float")
        return f"in.x_{strand}" if direct else f"out.v{level}_{strand}"

    def sections(self) -> Iterator[str]:
        """The structs and functions of the generated text, in order."""
        code = self.code
        x = [f"Pack<{code.source}, N> x_{s};" for s in code.strands(0)]
        yield struct("Inputs", [*x, *self.input_declarations()], "what N neighbouring results are made from")
        boundaries = [(level, s) for level in range(len(code.stages) + 1) for s in code.strands(level)]
        made = [(level, s) for level, s in boundaries if self.boundary(level, s).startswith("out.")]
        declared = [f"Pack<{code.between}, N> v{level}_{s};" for level, s in made]
        yield struct("Results", [*declared, *_SUMS], "what flows into each stage, and out of the last")
        loads = [self.load(f"in.x_{s}", "p.x", 0, s) for s in code.strands(0)]
        yield self.load_inputs(loads)
        yield self.run_chain([self.step(level, s) for level, s in made])
        kept = [(f"p.kept{i}", i, s) for i, _ in code.saved for s in code.strands(i)]
        last = [("p.y", len(code.stages), 0)] if code.stores else []
        stores = [self.store(at, f"rounded<{code.io}>({self.boundary(i, s)})", i, s) for at, i, s in kept + last]
        yield function(_STORE, stores)
        yield self.result([self.boundary(code.final, 0)])

    def step(self, level: int, strand: int) -> str:
        """The statement that makes the pack at the input of stage ``level``, or the result, from the pack before it."""
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
        return each(target, self.code.between, f"stage{i}_{math.name}({arguments})")

    def addend(self, stage: int, strand: int) -> str | None:
        """The pack that an op adds to its input, if that is all it does and both are of one type."""
        given = self.code.stages[stage]
        types = {f"x + {name}": (name, c_type) for name, c_type in given.operands}
        name, c_type = types.get(given.math.forward, ("", ""))
        flows = self.code.source if self.boundary(stage, 0).startswith("in.") else self.code.between
        if not name or given.math.operands[name] == "column" or {c_type, flows} != {self.code.between}:
            return None
        return f"{'operands' if given.math.operands[name] == 'row' else 'in'}.o{stage}_{name}_{strand}"


class Backward(_Steps):
    """Gradients from the last boundary to the first."""

    def functions(self) -> Iterator[tuple[str, str]]:
        """(name, CUDA expression) of the device functions of all stages."""
        for i, stage in enumerate(self.code.stages):
            math = stage.math
            for name, expression in zip(math.inputs, math.backward):
                yield f"stage{i}_{math.name}_{name}", expression
            for name, _ in stage.grads:
                yield f"stage{i}_{math.name}_{name}", math.operand_backward[name]

    def fields(self) -> list[str]:
        """Fields of the parameter struct for addresses, in the order of the tensors of a call."""
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
        """The structs and functions of the generated text, in order."""
        code = self.code
        saved = [(i, t, s) for i, t in code.saved for s in code.strands(i)]
        packs = [f"Pack<{code.source}, N> dy;", *(f"Pack<{t}, N> x{i}_{s};" for i, t, s in saved)]
        yield struct("Inputs", [*packs, *self.input_declarations()], "what N neighbouring gradients are made from")
        first = 0 if code.stores or code.casts else min((i + 1 for i, stage in enumerate(code.stages) if stage.grads), default=0)
        levels = list(reversed(range(first, len(code.stages) + 1)))
        gradients = [(level, s) for level in levels for s in code.strands(level)]
        made = [(level, s) for level, s in gradients if self.gradient(level, s).startswith("out.")]
        full = [(i, name, t, s) for i, name, t, _ in code.grads_of_kind("full") for s in code.strands(i + 1)]
        declared = [f"Pack<{code.between}, N> g{level}_{s};" for level, s in made]
        declared += [f"Pack<{t}, N> d{i}_{name}_{s};" for i, name, t, s in full]
        yield struct("Results", [*declared, *_SUMS], "gradients of what flows into each stage, and of its operands")
        loads = [self.load("in.dy", "p.dy", len(code.stages), 0)]
        loads += [self.load(f"in.x{i}_{s}", f"p.x{i}", i, s) for i, _, s in saved]
        yield self.load_inputs(loads)
        yield self.run_chain([*self.steps(levels)])
        stores = [self.store("p.dx", f"rounded<{code.io}>({self.gradient(0, s)})", 0, s) for s in code.strands(0) if code.stores]
        stores += [self.store(f"p.d{i}_{name}", f"out.d{i}_{name}_{s}", i + 1, s) for i, name, _, s in full]
        yield function(_STORE, stores)
        if first == 0:
            yield self.result([self.gradient(0, s) for s in code.strands(0)])

    def steps(self, levels: list[int]) -> Iterator[str]:
        """Statements from the last of ``levels`` to the first: sums and gradients of operands, then those of inputs."""
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
                        yield loop(f"out.row_sum[{rows.index((i, name, c_type, s))}][i] = {call};")
                    elif (i, name, c_type) in columns:
                        yield loop(f"out.column_sum[{columns.index((i, name, c_type))}][i] {'+=' if s else '='} {call};")
                    else:
                        yield each(f"out.d{i}_{name}_{s}", c_type, call)
                if i not in levels:
                    continue
                for half, (name, expression) in enumerate(zip(stage.math.inputs, stage.math.backward)):
                    target = self.gradient(i, 2 * s + half if stage.math.is_gated else s)
                    yield each(target, code.between, self.call(i, name, expression, s))

    def call(self, stage: int, name: str, expression: str, strand: int) -> str:
        """A call of the function for the gradient of ``name``, an input or operand of a stage."""
        math = self.code.stages[stage].math
        strands = [2 * strand, 2 * strand + 1] if math.is_gated else [strand]
        inputs = {name: f"value(in.x{stage}_{s}, i)" for name, s in zip(math.inputs, strands)}
        values = {"dy": f"value({self.gradient(stage + 1, strand)}, i)", **inputs, **self.operands(stage, strand)}
        return f"stage{stage}_{math.name}_{name}({self.arguments(expression, values)})"
