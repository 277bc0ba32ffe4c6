"""A product, its chain and its cast in one launch beside one after the other, same bits: ``python -m benchmarks.chained``.

Needs compute capability 9.0. One after the other is what runs otherwise: the faster product of both, and the chain's own kernel.
They take turns; the chain with limits is also timed cool and alone, as products are (benchmarks/products.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from benchmarks.products import KINDS, SIZES, STATES, figure, operand
from benchmarks.timing import Call, compared
from opfuse.formats import COLUMNWISE, E4M3, ROWWISE, Usage
from opfuse.kernels.products.chained import multiply_then_chain, product_chain
from opfuse.numerics.chain import Stage
from tests.kernels.cases.chain_casts import encoding_of
from tests.kernels.cases.chains import OPS

BF16 = torch.bfloat16
LIMITED, LEAST = "bias, GELU, delayed", {2048: 1.12, 4096: 1.05, 7168: 1.03}
"""Of the one launch for GELU and a delayed cast, times the speed of the others, by the length of the sums."""


class What(NamedTuple):
    """Kind of product, ops, cast and planes ("": none), stages whose input is kept."""

    kind: str
    ops: tuple[str, ...]
    cast: str = ""
    usages: tuple[Usage, ...] = (ROWWISE,)
    keep: tuple[int, ...] = ()


_GELU, _BOTH, _TENSOR, _BLOCK = ("bias", "gelu"), (ROWWISE, COLUMNWISE), "per tensor, fast", "1x128 by 128x128"
CHAINS = {
    LIMITED: What(_TENSOR, _GELU, "delayed"),
    "bias, GELU, delayed, input kept": What(_TENSOR, _GELU, "delayed", keep=(1,)),
    "bias, GELU, delayed both, input kept": What(_TENSOR, _GELU, "delayed", _BOTH, (1,)),
    "bias, GELU, current": What(_TENSOR, _GELU, "current"),
    "bias, GELU, current both, input kept": What(_TENSOR, _GELU, "current", _BOTH, (1,)),
    "bias": What(_TENSOR, ("bias",)),
    "bias, residual": What(_TENSOR, ("bias", "add")),
    "bias, GELU, 1x128": What(_BLOCK, _GELU, "1x128"),
    "bias, GELU, 1x128, input kept": What(_BLOCK, _GELU, "1x128", keep=(1,)),
    "bias, 1x128 product": What(_BLOCK, ("bias",)),
}


def calls(what: What, sizes: tuple[int, int, int], device: str) -> tuple[Call, Call]:
    """One after the other, and in one launch."""
    lines, length, columns = sizes
    kind = KINDS[what.kind]
    left, right = operand(kind.left, lines, length, device), operand(kind.right, columns, length, device)
    for side in (left, right):
        side.scale.mul_(length**-0.25)
    shapes = {"row": (columns,), "full": (lines, columns)}
    stages = [
        Stage(OPS[op], {name: torch.randn(shapes[k], dtype=BF16, device=device) for name, k in OPS[op].operands.items()})
        for op in what.ops
    ]
    matrix = lines, columns
    encode = encoding_of(what.cast, E4M3, what.usages, matrix, torch.device(device)) if what.cast else None
    options = {"shape": torch.Size(matrix), "dtype": BF16, "keep": what.keep, "fast": kind.fast}
    return (
        lambda: multiply_then_chain(left, right, stages, encode, **options),
        lambda: product_chain(left, right, stages, encode, **options),
    )


def measure(device: str = "cuda") -> Iterator[dict[str, Any]]:
    """One row for each chain and problem: microseconds of both, which take turns, and the speed of one launch."""
    for name, what in CHAINS.items():
        for sizes in SIZES:
            both = calls(what, sizes, device)
            apart, one, ratio = compared(*both)
            least = LEAST.get(sizes[1]) if name == LIMITED else None
            yield {
                "chain": name,
                "problem": "x".join(map(str, sizes)),
                "apart": apart,
                "one": one,
                "ratio": ratio,
                "least": least,
            }


def in_states(device: str = "cuda") -> Iterator[dict[str, Any]]:
    """The chain with limits, cool and alone: microseconds of one launch, and its speed in that of the others."""
    for sizes in SIZES:
        apart, one = calls(CHAINS[LIMITED], sizes, device)
        for state, timed in STATES.items():
            took = timed(one)
            speeds = {"one": took, "ratio": timed(apart) / took, "least": LEAST.get(sizes[1])}
            yield {"chain": LIMITED, "problem": "x".join(map(str, sizes)), "state": state, **speeds}


def records(device: str = "cuda") -> Iterator[dict[str, Any]]:
    """Figures for the record."""
    for row in (*measure(device), *in_states(device)):
        name, state = f"{row['chain']}: {row['problem']}", f" {row['state']}" if "state" in row else ""
        yield figure(name, row["one"], f"us{state}")
        yield figure(name, row["ratio"], f"x apart{state}", row["least"])


def main() -> None:
    """Print a table."""
    for row in measure():
        print(f"{row['chain']:40s}{row['problem']:18s}{row['one']:8.1f} us {row['ratio']:6.3f} x apart", flush=True)
    for row in in_states():
        print(
            f"{row['chain']:40s}{row['problem']:18s}{row['one']:8.1f} us {row['ratio']:6.3f} x apart {row['state']}", flush=True
        )


if __name__ == "__main__":
    main()
