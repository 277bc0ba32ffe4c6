"""The CUDA text of a chain in the registers of a product: beside the chain's own, what takes two neighbours at a time."""

from __future__ import annotations

from collections.abc import Iterator

from opfuse.kernels.chains.structure import ChainCode
from opfuse.kernels.chains.text import Forward, function, text_of

MOST_STORED = 2
"""Values of a chain that a thread has registers for beside its sums."""


def stored(code: ChainCode) -> list[tuple[int, str]]:
    """(level, pointer) of the values that are stored: inputs that are kept, then the result."""
    kept = [(i, f"p.kept{i}") for i, _ in code.saved]
    return [*kept, *([(len(code.stages), "p.y")] if code.stores else [])]


def fits(code: ChainCode) -> bool:
    """Whether registers suffice for a chain beside the sums of a product, which are rounded first: in fp32 they take all."""
    return code.source == code.io and not code.depths[0] and len(stored(code)) <= MOST_STORED


def fragments_of(code: ChainCode) -> str:
    """The text in place of generated.cuh, for a source that includes product.cuh and chain.cuh before it."""
    return "\n\n".join([text_of(code), *_sections(code)]) + "\n"


def _sections(code: ChainCode) -> Iterator[str]:
    steps, kept = Forward(code), stored(code)
    yield f"constexpr int STORED = {len(kept)};"
    yield _PAIR
    rows = [f"operands.{name}_0 = pair_at(p.{name} + column);" for name, *_ in steps.operand_packs("row")]
    head = "RowOperands<2> row_operands_at(const Chain& p, u32 column)"
    yield function(head, ["RowOperands<2> operands;", *rows, "return operands;"])
    full = [f"in.{name}_0 = pair_at(p.{name} + u64(row) * columns + column);" for name, *_ in steps.operand_packs("full")]
    columns = [f"in.o{i}_{name} = value(p.o{i}_{name}[row]);" for i, name, _, _ in code.of_kind("column")]
    head = "Inputs<2> inputs_at(const Chain& p, u32 columns, u32 row, u32 column)"
    yield function(head, ["Inputs<2> in = {};", *full, *columns, "return in;"])
    values = [f"rounded<IO>({steps.boundary(level, 0)})" for level, _ in (*kept, (code.final, ""))]
    yield function("Pack<IO, 2> result_of(const Inputs<2>& in, const Results<2>& out)", [f"return {values.pop()};"])
    head = "void stored_of(const Inputs<2>& in, const Results<2>& out, Keep keep)"
    yield "template <class Keep>\n" + function(head, [f"keep({k}, {value});" for k, value in enumerate(values)])
    places = [f"if (k == {k}) return {pointer};" for k, (_, pointer) in enumerate(kept)]
    yield function("IO* stored_at(const Chain& p, u32 k)", [*places, "return nullptr;"])


_PAIR = """// Two neighbours, on their size, of what nobody writes while this runs.
template <class T>
OPFUSE_FN Pack<T, 2> pair_at(const T* x) {
    Pack<T, 2> v;
    if constexpr (sizeof(T) == 4) {
        uint2 two = __ldg(reinterpret_cast<const uint2*>(x));
        v.word[0] = two.x, v.word[1] = two.y;
    } else if constexpr (sizeof(T) == 2) {
        v.word[0] = __ldg(reinterpret_cast<const u32*>(x));
    } else {
        v.word[0] = __ldg(reinterpret_cast<const u16*>(x));
    }
    return v;
}"""
