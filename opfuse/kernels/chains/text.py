"""The CUDA text of a chain of elementwise ops, written from their declared expressions.

The text has the same parts in both directions: a device function for each expression; ``Chain``, the kernel's parameter;
``load_inputs``, which loads the inputs of eight neighbouring results; ``run_chain``, which computes with them from boundary to
boundary and knows no addresses; and functions that store results. Shapes, pointers and constants are parameters.
"""

from __future__ import annotations

from collections.abc import Iterator

from opfuse.kernels.chains.pieces import block, expression, function
from opfuse.kernels.chains.steps import Backward, Forward
from opfuse.kernels.chains.structure import ChainCode

_PARTS = ("float *row_parts, *column_parts;  // sums of each tile", "long long row_pieces, column_pieces;")


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
