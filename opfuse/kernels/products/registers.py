"""Which chains have registers beside the sums of a product: those that no compilation for sm_90a spilled.

A thread loads all operands of half of a tile before the chain runs there: one of the result's size takes 16 registers in 16 bits,
a bias 8, and an activation some for what it computes with. What a compiler makes of more ops is found for each chain alone, so
longer chains run apart from their product.

Sums are rounded to 16 bits before the chain, since in fp32 they leave a thread no registers. Three ops fit, no two alike, one
of them an activation; with two operands of the result's size there is no room for an activation, and less where no value of the
chain is stored. Beyond that compiled kernels spilled up to 824 bytes of registers, the exact GELU with dropout most.
"""

from __future__ import annotations

from collections.abc import Sequence

from opfuse.numerics.activations import ARITHMETIC
from opfuse.numerics.chain import Stage

LONGEST = 3
"""Ops of a chain, no two alike, of which at most one is an activation."""

MOST_FULL = {"arithmetic": 2, "activation": 1, "nothing stored": 0}
"""Operands of the result's size, in 16 bits: beside arithmetic, beside an activation, for an end of :data:`FULL`."""

FULL = (("TENSOR", True), ("BLOCKS", False))
"""Casts (product_chain.cu), and whether they make a transpose, that leave least room where no value of the chain is stored.

A store keeps the compiler from loading operands of the other half of a tile beside those of the first.
"""

EXACT_GELU = ["bias", "gelu_erf"]
"""The only chain of the exact GELU, whose registers other ops take: erfc is the longest expression."""


def crowded(stages: Sequence[Stage], cast: str, *, turned: bool, stores: bool) -> str:
    """Why a chain has no registers beside the sums of a product; an empty string if it has.

    cast, turned: CAST and TURNED of product_chain.cu. stores: whether a value of the chain is stored.
    """
    names = [stage.math.name for stage in stages]
    own = [name for name in names if name not in ARITHMETIC]
    full = (cast, turned) in FULL and not stores
    if len(names) > LONGEST or len(own) > 1 or len({*names}) < len(names):
        return f"registers: wants at most {LONGEST} ops, no two alike and one an activation, got {', '.join(names)}"
    if "gelu_erf" in names and (names != EXACT_GELU or (full and turned)):
        return "registers: the exact GELU has them only behind a bias, and for a transpose only if a value is stored"
    room = MOST_FULL["nothing stored" if full else "activation" if own else "arithmetic"]
    operands = (t for stage in stages for name, t in stage.operands.items() if stage.math.operands[name] == "full")
    needed = sum(max(t.element_size(), 2) // 2 for t in operands)
    if needed <= room:
        return ""
    return f"registers: wants at most {room} operands of the result's size, of 16 bits, beside these ops, got {needed}"
