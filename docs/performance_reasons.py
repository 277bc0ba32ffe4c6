"""Why steps take as long as they do: bytes that they move at least, and what traces of them have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks import grouped, profiles
from benchmarks.bandwidth import BF16, FP8, SHAPES
from benchmarks.models import LARGE as SIZES
from docs import performance_text as prose
from docs.performance_figures import LARGE, of_script
from docs.tables import table


def beside_products(record: Mapping[str, Any]) -> str:
    """What A moves under current scaling and `dequantized` beside its products, and the ratio that this alone would make."""
    x, inside, weights = SIZES.tokens * SIZES.hidden, SIZES.tokens * SIZES.ffn, 2 * SIZES.hidden * SIZES.ffn
    moved = {
        "for the amaxes of input and, in both passes, weights": BF16 * (x + 2 * weights),
        "for their casts": (BF16 + FP8) * (x + 2 * weights),
        "for bias and GELU with the amax and what the derivative reads": 2 * BF16 * inside,
        "for the codes of the result": (BF16 + FP8) * inside,
        "for the last bias": 2 * BF16 * x,
        "for operands that are dequantized": (BF16 + FP8) * (x + inside + weights),
        "for the derivative and the bias gradients": 3 * BF16 * inside + BF16 * x,
    }
    total = sum(moved.values())
    alone, products = at_copy(record, total), products_alone(record, "A, fp8_current, dequantized, training")
    terms = ", ".join(f"{size / 1e9:.2f} {what}" for what, size in moved.items())
    return (
        f"{prose.BYTES_OF_A}{terms}; together {total / 1e9:.2f}. At the speed of copy that is {alone:.2f} ms, in addition to "
        f"{products:.2f} ms of products: {1 + alone / products:.2f} times the products."
    )


def at_copy(record: Mapping[str, Any], count: int) -> float:
    """Milliseconds for so many bytes at the speed of a copy."""
    rows, columns = SHAPES[0]
    return count / (2 * BF16 * rows * columns) * float(of_script(record, "casts")["copy" + LARGE]["us"]["value"]) / 1e3


def products_alone(record: Mapping[str, Any], name: str) -> float:
    """Milliseconds of the products that a pipeline was measured beside."""
    took = of_script(record, "pipelines")[name]
    return float(took["ms"]["value"] / took["x products"]["value"])


def least_of_b(record: Mapping[str, Any]) -> str:
    """What B moves beside its products at least, and the ratio that this alone would make."""
    x, inside, weights = SIZES.tokens * SIZES.hidden, SIZES.tokens * SIZES.ffn, 3 * SIZES.hidden * SIZES.ffn
    wide, rows = 2 * inside, []
    for kind in ("delayed", "fp8_current", "fp8_block"):
        again = kind == "fp8_current"  # what decides its scale is read once more, and stored before unless it is made anew
        read = BF16 * (x + wide) + again * BF16 * (x + 2 * inside)
        inference, casts = read + FP8 * (x + inside), (BF16 + FP8 + again * BF16) * weights
        backward = BF16 * (x + inside + wide) + 2 * FP8 * (x + wide) + again * BF16 * (x + 2 * wide) + 3 * BF16 * x
        training = inference + 2 * casts + FP8 * (x + inside) + backward  # weights are cast in both passes
        alone = {what: products_alone(record, f"B, {kind}, {what}") for what in ("forward", "training")}
        cells = ((inference, "forward"), (inference + casts, "forward"), (training, "training"))
        of_each = ((f"{count / 1e9:.2f}", f"{1 + at_copy(record, count) / alone[what]:.2f}") for count, what in cells)
        rows.append((kind, *(cell for pair in of_each for cell in pair)))
    head = ("B", "inference, weights kept, GB", "x products", "inference, GB", "x products", "training, GB", "x products")
    return f"{prose.BYTES_OF_B}{table(head, rows)}\n\n{prose.LESS_THAN_BYTES}"


def experts(record: Mapping[str, Any]) -> str:
    """Why limits of experts are missed: by traces of single steps, and by what users wait for."""
    traces, waited, step = of_script(record, "profiles"), of_script(record, "grouped"), "forward + backward"

    def traced(problem: str, variant: str, kernel: str = profiles.ALL) -> float:
        name = f"{problem} rows, {step}, {variant.replace(', ', ' with ')}, {kernel}"
        return float(traces[name]["ms"]["value"])

    def wall(problem: str, variant: str) -> float:
        return float(waited[f"{problem} rows, {variant}, {step} by wall time"]["ms"]["value"])

    some, large, many = "8 x 8192", "4 x 24576", "128 x 1024, 2048 to 768"
    fp8, bf16, weights = traced(many, grouped.BLOCKS), traced(many, grouped.GROUPED), traced(many, grouped.BLOCKS, "cast_block")
    return prose.EXPERTS.format(
        some=traced(some, grouped.BLOCKS),
        some_bf16=traced(some, grouped.TORCH),
        some_speed=traced(some, grouped.TORCH) / traced(some, grouped.BLOCKS),
        some_products=traced(some, grouped.BLOCKS, "product"),
        some_wall=wall(some, grouped.BLOCKS),
        some_bf16_wall=wall(some, grouped.TORCH),
        large=traced(large, grouped.BLOCKS),
        large_bf16=traced(large, grouped.TORCH),
        large_wall=wall(large, grouped.BLOCKS),
        large_bf16_wall=wall(large, grouped.TORCH),
        many_products=traced(many, grouped.BLOCKS, "product"),
        many_rows=traced(many, grouped.BLOCKS, "cast_block_groups"),
        many_weights=weights,
        many_bf16=bf16,
        many_speed=bf16 / fp8,
        many_speed_kept=bf16 / (fp8 - weights),
        read=spread(waited, "mixture forward + backward", grouped.APART),
        together=spread(waited, "mixture forward + backward", grouped.TWO_LAUNCHES),
        activation=spread(waited, "activation and cast", grouped.TWO_LAUNCHES),
        derivative=spread(waited, "derivative and cast", grouped.TWO_LAUNCHES),
    )


def spread(figures: Mapping[str, Any], what: str, unit: str) -> str:
    """The least and the most of the figures in ``unit`` whose names end so."""
    found = [float(units[unit]["value"]) for name, units in figures.items() if name.endswith(f", {what}") and unit in units]
    return " to ".join(dict.fromkeys((f"{min(found):.2f}", f"{max(found):.2f}")))
