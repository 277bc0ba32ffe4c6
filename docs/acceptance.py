"""Writes docs/acceptance.md: ``python docs/acceptance.py`` rewrites it, ``--check`` only compares.

The page has a row for each promise of the package, with the tests that fail if the promise is broken. A test names its rows in
the marker ``row``; ``pytest --row B06`` runs the tests of one row. Rows of reliability, R01 and on, may stand in a test's name.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "acceptance.md"
TESTS = ROOT / "tests"

OVERRIDE = {
    "B01": "Every recipe has `backward_override`: None by default; two more values, which delayed scaling refuses; nothing else",
    "B02": "The environment gives its default when a recipe is built, not at import; an empty variable is no value",
    "B03": "An outdated value, or a pair of switches, is refused with the value to write instead",
    "B04": "Delayed scaling refuses an override with a real exception that names both, under `python -O` too",
    "B05": "`high_precision`: the output is that of the quantized forward pass; every gradient is that of its op at these values",
    "B06": "`dequantized`: gradients follow by the chain rule from the rowwise operands of the forward pass; dy is not cast",
    "B07": "The output has the same bits under all three settings, fused or not",
    "B08": "Under an override no cast makes a columnwise plane; a stored quantized parameter keeps its planes",
    "B09": "Under an override the plan holds no backward cast, and no quantizer for dy",
    "B10": "`high_precision` saves the caller's tensor, the same object",
    "B11": "Each setting saves what it should: columnwise planes, rowwise planes, or plain tensors in the compute dtype",
    "B12": "Nothing is saved that no gradient of this call reads",
    "B13": "The result of a norm before a product is saved once: as planes or as values, never as both",
    "B14": "Operands with tiled scales give the bits of compact ones, also in the backward pass under an override",
    "B15": "Scales are tiled only in formats that are known to have tiles; any other stays compact",
    "B16": "An explicit `Quantize` casts no gradient under an override, and is the identity without a recipe",
    "B17": "The fused backward of activation and bias does not fire under an override, and the report names the guard",
    "B18": "A guard can keep a rule from firing under overrides, and the report says so",
    "B19": "One list of guards holds for both passes of a rule: no plan fuses one and refuses the other",
    "B20": "Another override is another plan; earlier plans stay, and hits and misses are counted",
    "B21": "Every built-in fusion honours every override: it fires, and equals its ops run one by one, bit for bit",
    "B22": "The bias gradient is the fp32 sum of dy, cast once",
    "B23": "Norm, linear, activation, linear runs as one pipeline under every override",
    "B24": "Groups without rows work under overrides; their weight gradient is exactly zero",
    "B25": "A grouped linear honours overrides group by group: values, saved operands, planes",
    "B26": "Recipes of a user's own class have the field as well",
    "B27": "A size that a format cannot take is refused by shape, format and multiple, with the cure",
    "B28": "Two to four dimensions, ragged and empty rows, with and without a bias; gradients accumulate",
    "B29": "A disabled region computes in high precision, whatever its recipe says",
    "B30": "Linear, bias and activation in one pipeline equal the ops called one after another",
    "B31": "The bytes kept for backward are told for each setting, and equal the formula",
    "B32": "A setting from the environment does what the argument does; an unset one changes nothing",
    "B33": "Argument over file over environment over default; the recipe knows which it was",
    "B34": "An override does not change the tiled layout of the forward operands",
    "B35": "`keep` makes casts and activations anew in the backward pass: `recompute` bit for bit, `quantized` from E4M3 codes",
}
USAGES = {
    "U01": "Training and inference alternate on one quantized weight: no error, and the gradients of a fresh run",
    "U02": "A parameter keeps a quantizer of its own, which a change of the op's quantizer does not reach",
    "U03": "A stored weight has the planes it was made with; it has a columnwise one if it trains",
    "U04": "The same holds for grouped weights, in one parameter or in several",
    "U05": "A weight that is quantized already is never cast again",
    "U06": "A stored weight under a recipe of another format is an error that names both, unless a policy says otherwise",
    "U07": "A quantized tensor dequantizes from its own fields, also when its quantizer has changed or is gone",
    "U08": "Dequantizing depends neither on how values were rounded nor on how scales were found",
    "U09": "Made without gradients and trained later: the missing plane is derived, or its absence is an error that says why",
    "U10": "Another history length keeps scales and history",
    "U11": "The quantizer of an op's input is known before its first call",
    "U12": "A write to a quantized parameter reaches every plane; one between forward and backward is noticed",
    "U13": "All of this holds with and without a bias",
}
HYBRID = {
    "H01": "A hybrid quantizer has a format for each direction: the forward reads one, both gradients the other",
    "H02": "What it makes is one tensor: shape, dtype, rowwise values first, a readable repr",
    "H03": "Only the directions asked of the hybrid are cast",
    "H04": "Each of its quantizers makes planes of its own direction only",
    "H05": "What is no quantizer, one object for both, and an unknown source are refused",
    "H06": "The columnwise plane is cast from the original, or from what the rowwise plane holds",
    "H07": "High precision is a format too: an identity plane is the tensor itself",
    "H08": "A custom recipe asks its factory for each role; an answer that is no quantizer is refused",
    "H09": "Which plane of which operand a product reads is one table",
    "H10": "A product cannot emit hybrid or identity data",
    "H11": "Formats that cannot meet in a product are refused when the plan is made, by product and roles",
    "H12": "A hybrid of equal formats is the plain recipe bit for bit: output and all gradients",
    "H13": "Three formats in three products equal the explicit formula",
    "H14": "Directions exchanged, and hybrid operands beside plain ones",
    "H15": "Grouped: casting after the split equals casting group by group, in the compute dtype",
    "H16": "A model made with hybrid weights computes what casting on the fly does",
    "H17": "An update rewrites both planes in place; a no-op flag leaves every byte",
    "H18": "Casting master weights: per-tensor formats can, block formats are refused by direction",
    "H19": "After a gather, data can be exchanged under the same values",
    "H20": "Sharded parameters gather to the planes of the whole, or to the values of their shards",
    "H21": "Scale padding is stripped before a gather and made anew after it",
    "H22": "A per-tensor columnwise plane is gathered as rowwise bytes and transposed",
    "H23": "Shards that cut a block are refused, or kept plain, with the multiple they need",
    "H24": "Views, slices, copies, clones, detach and new tensors behave as documented",
    "H25": "Saved planes may leave the device and come back with the same bits",
    "H26": "Recomputed activations have the bits of the first pass, random rounding included",
    "H27": "A gather over ranks moves cast planes, or both directions are cast after it; a gather that fails changes nothing",
    "H28": "Pickle and checkpoints keep every bit; state that cannot be written is refused",
    "H29": "Dropping planes is checked before anything changes",
    "H30": "A tensor of any format with a columnwise plane alone describes and dequantizes itself",
    "H31": "Hybrid training with Adam follows the plain recipe, and the loss falls",
    "H32": "Delayed scaling inside a hybrid, and another recipe in mid-training, work or say why not",
    "H33": "`dequantized` equals a hybrid recipe bit for bit, run for run",
    "H34": "A kept cast of a weight is made again when other planes or formats are asked for",
    "H35": "A table by format says what is supported",
    "H36": "Saving keeps the order of planes; clearing a detached copy leaves the original",
}
DEQUANTIZE = {
    "D01": "MXFP8, both directions, to fp32, bf16 and fp16, against fp64",
    "D02": "NVFP4, both directions, against the formula",
    "D03": "Tiled scales dequantize to the bits of compact ones",
    "D04": "Empty tensors have shape and dtype, and launch nothing",
    "D05": "The definition at every listed size, ragged ones too, in three dtypes and two layouts; launches equal it",
    "D06": "Padding of scales is never read, and is zero when tiled",
    "D07": "Extreme scale codes: 2^-127 and not zero, NaN and not a number",
    "D08": "The tiled layout stays under `dequantized`",
    "D09": "Scales and amaxes are in the tensor alone: there is no copy on the host that could differ",
    "D10": "Grouped mixture-of-experts shapes are measured, forward and backward",
}
ACROSS = {
    "X01": "What a plan key holds, hits and misses, and why the last miss was one",
    "X02": "Every rule has an outcome at every place, with the first guard that failed",
    "X03": "Ready-made hybrid recipes equal their explicit formulas",
    "X04": "`dequantized` equals a hybrid whose columnwise plane is the dequantized rowwise data, over random pipelines",
    "X05": "`high_precision` equals a hybrid whose columnwise plane is the original tensor, over random pipelines",
    "X06": "Row-scaled activations train only under an override or a hybrid",
    "X07": "Under `batch_invariant` a row of a forward pass has the same bits in any batch, of any number of rows",
    "X08": "FP8 products of the package's own kernel, one or many in a launch, have the bits of cuBLASLt's",
    "X09": "A product, its elementwise ops and the cast of the result have in one launch the bits of one after the other",
    "X10": "A product that adds to `main_grad` has the bits of a product in fp32 and an addition",
    "X11": "Sizes of groups may stay on the device: nothing waits, one program repeats all sizes, bits stay the same",
    "X12": "Rows for experts are cast as they are read, with the bits of copies that are cast",
    "X16": "`invariant`: a log-probability has the same bits in prefill, decode with a KV cache, any batch and in training",
}
RELIABILITY = {
    "R01": "Every bf16 and fp16 input, by every format and scale rule: bit for bit what the oracles say, on every backend",
    "R02": "fp32 by patterns of exponent and mantissa, subnormals, zeros, infinities and NaN; all of them in the slow tests",
    "R03": "Two oracles that share no code with each other or with the package agree on everything",
    "R04": "Fused equals unfused, forward, backward and in every saved tensor, bit for bit where sums have one order",
    "R05": "Quantized products are no further from fp64 of the same values than their sums must be",
    "R06": "Every op passes gradcheck in fp64",
    "R07": "compute-sanitizer finds nothing, with each of its tools, over every kernel and case",
    "R08": "No byte around a result is written, and no byte of padding is read",
    "R09": "Whatever a plan depends on is in its key: cached runs equal fresh runs over thousands of random sequences",
    "R10": "No rows, one row, ragged tails, misaligned and strided views, more than 2^31 elements: a result or a typed error",
    "R11": "The same bits from run to run, from process to process, with a cold and with a warm cache",
    "R12": "A captured graph replays on new values as an eager call would run; nothing compiles and nothing waits meanwhile",
    "R13": "Streams, threads and devices at once give no wrong result",
    "R14": "The cache of kernels survives racing, killed and damaged writers, and runs nothing that others could have written",
    "R15": "Ten thousand mutated configurations: no traceback, every error at its line and column",
    "R16": "Nothing in the package turns data into code",
    "R17": "Sharded training equals that of one process bit for bit where sums have one order",
    "R18": "A NaN or infinity in the input shows in the output, as far as the format can show it",
}
SECTIONS: dict[str, Mapping[str, str]] = {
    "Backward override": OVERRIDE,
    "Usages of quantized weights": USAGES,
    "Hybrid quantization": HYBRID,
    "Dequantize": DEQUANTIZE,
    "Across": ACROSS,
    "Reliability": RELIABILITY,
}
ROWS = {row: promise for section in SECTIONS.values() for row, promise in section.items()}

LATER: frozenset[str] = frozenset()
"""Rows that have no test yet."""

COMMANDS = {"R07": "`make sanitize`"}
"""Rows that a command proves, not a test."""

HEAD = """# Acceptance

What the package must do, and the tests that prove it. `python docs/acceptance.py` writes this page from the markers of the
tests. To run the tests of a row: `pytest --row B06`; of a row in R: `pytest -k r10_`. tests/gpu needs a GPU.
"""

_NAMED = re.compile(r"(?<![a-z0-9])r(\d+)(?=_)")
_OTHERS = "recipes"
"""The folder where R in names of tests counts traps of recipes, and no rows."""


def proofs(tests: Path = TESTS) -> dict[str, list[str]]:
    """The tests of each row that a test names, as ``file::test``, in the order of their files."""
    found: dict[str, list[str]] = {}
    for path in sorted(tests.rglob("test_*.py")):
        for name, rows in marked(path.read_text(encoding="utf-8")):
            named = [f"R{int(number):02d}" for number in _NAMED.findall(name) if path.parent.name != _OTHERS]
            for row in dict.fromkeys((*rows, *named)):
                found.setdefault(row, []).append(f"{path.relative_to(tests.parent)}::{name}")
    return found


@functools.cache
def marked(source: str) -> list[tuple[str, tuple[str, ...]]]:
    """The tests of a module, and the rows that the markers of each name."""
    return [
        (node.name, tuple(row for decorator in node.decorator_list for row in _rows(decorator)))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


def _rows(decorator: ast.expr) -> Iterator[str]:
    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.row":
        yield from (ast.literal_eval(argument) for argument in decorator.args)


def document() -> str:
    """The text of docs/acceptance.md."""
    found = proofs()
    parts = [HEAD]
    for title, section in SECTIONS.items():
        lines = [f"## {title}", "", "| row | what must hold | tests |", "| --- | --- | --- |"]
        lines += [f"| {row} | {promise} | {_cell(found.get(row, []), row)} |" for row, promise in section.items()]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _cell(tests: Sequence[str], row: str) -> str:
    proved = [*(f"`{test}`" for test in tests), *([COMMANDS[row]] if row in COMMANDS else [])]
    return "<br>".join(proved) or "not yet"


def main(arguments: Sequence[str]) -> int:
    """Write the page, or with ``--check`` compare it; returns 1 if it differs, else 0."""
    if "--check" in arguments:
        return int(not DOCUMENT.exists() or DOCUMENT.read_text(encoding="utf-8") != document())
    DOCUMENT.write_text(document(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
