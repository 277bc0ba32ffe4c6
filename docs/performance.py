"""Writes docs/performance.md from the records of GPUs: ``python -m docs.performance``; ``--check`` only compares."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bandwidth import BF16, FP8, SHAPES
from benchmarks.models import LARGE as SIZES
from benchmarks.sanitizer import TOOLS
from docs.tables import table

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "performance.md"
RECORD = ROOT / "benchmarks" / "results" / "h200.json"
RANKS = ROOT / "benchmarks" / "results" / "h200x2.json"

Figures = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Of one script: the records by name, then by unit."""

LARGE, SMALL = ", 16384x8192 bf16", ", 4096x4096 bf16"


def of_script(record: Mapping[str, Any], *scripts: str) -> dict[str, dict[str, Mapping[str, Any]]]:
    """The figures of these scripts, by name and unit."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for figure in record["results"]:
        if figure["script"] in scripts:
            found.setdefault(figure["name"], {})[figure["unit"]] = figure
    return found


def shown(figure: Mapping[str, Any] | None, digits: int = 1) -> str:
    """A value, with its limit where it has one; bold if it misses that."""
    if figure is None:
        return ""
    value = f"{figure['value']:.{digits}f}"
    if figure["limit"] is None:
        return value
    return f"{value} ({figure['limit']:.{digits}f})" if figure["met"] else f"**{value}** ({figure['limit']:.{digits}f})"


def kernels(record: Mapping[str, Any]) -> str:
    figures = of_script(record, "casts", "epilogues", "norms")
    names = [name.removesuffix(LARGE) for name in figures if name.endswith(LARGE)]
    rows = [
        (name, shown(figures[name + LARGE].get("% of copy")), shown(figures.get(name + SMALL, {}).get("us")))
        for name in dict.fromkeys(names)
        if name != "copy"
    ]
    return KERNELS + table(("kernel", "16384 x 8192, % of copy (at least)", "4096 x 4096, µs (at most)"), rows)


KERNELS = (
    "100 % of copy is the bandwidth of torch's copy of a bf16 matrix of that shape. A cast writes the plane that products "
    "read along rows, `row`, along columns, `col`, or `both`; `delayed`, and `cast` after an activation: FP8 under a scale "
    "that is known; `current`: with the pass that finds the amax; `measured`: the same for NVFP4, beside `known amax`; "
    "`blocks`: 1x128; `swizzled`, `swz`: scales in the order in which hardware with such products reads them; `decode`: "
    "back to bf16; `kept`: the input of the activation is written too, for the backward pass; `d`: a derivative.\n\n"
)


def peers(record: Mapping[str, Any]) -> str:
    found: dict[str, dict[str, str]] = {}
    for name, units in of_script(record, "peers").items():
        kernel, peer = name.removesuffix(LARGE).rsplit(", ", 1)
        found.setdefault(kernel, {})[peer] = shown(units["x time"])
    rows = [(kernel, each.get("eager torch", ""), each.get("torch.compile", "")) for kernel, each in found.items()]
    return table(("kernel", "eager torch takes, times", "torch.compile takes, times"), rows)


def products(record: Mapping[str, Any]) -> str:
    found: dict[str, dict[str, str]] = {}
    for name, units in of_script(record, "gemm").items():
        (kind, product), sizes = name.split(", ")[0].rsplit(" ", 1), name.split(", ")[1]
        cell = f"{shown(units['TFLOP/s'], 0)} ({shown(units['x bf16'], 2)})"
        found.setdefault(f"{product}, {sizes}", {})[kind] = cell
    kinds = list(dict.fromkeys(kind for cells in found.values() for kind in cells))
    rows = [(product, *(cells.get(kind, "") for kind in kinds)) for product, cells in found.items()]
    told = (
        "TFLOP/s, and times the speed of bf16, of operands that are cast already, with a result in bf16. Sums of fprop are fast, "
        "those of the gradients split. MXFP8 and NVFP4 are emulated.\n\n"
    )
    return told + table(("product, tokens x inputs x outputs", *kinds), rows)


def own_products(record: Mapping[str, Any], script: str = "products") -> str:
    """For each kind what the package's own product reaches, problems across."""
    found: dict[str, dict[str, str]] = {}
    for name, units in of_script(record, script).items():
        kind, problem = name.split(": ", 1)
        cell = "; ".join(f"{shown(figure, 2 if unit.startswith('x ') else 0)} {unit}" for unit, figure in units.items())
        found.setdefault(kind, {})[problem] = cell
    problems = list(dict.fromkeys(problem for cells in found.values() for problem in cells))
    rows = [(kind, *(cells.get(problem, "") for problem in problems)) for kind, cells in found.items()]
    told = "Lines x length of the sum x columns: what it reaches, and times the speed (at least) of what stands behind it.\n\n"
    return told + table(("product", *problems), rows)


TWICE = (
    "Why 1x128 by 1x128 is behind 1x128 by 128x128, cuBLASLt's product as well: each sum of 128 products is multiplied by one "
    "scale and added, times the other, by an fma, where the other product has the fma alone. The same kernel without that "
    "multiplication reached 1185 to 1269 TFLOP/s on an H200, in place of 923 to 1006. Tried, with the same bits: tiles of "
    "128x128, in which each consumer adds while the matrix unit makes its own next sums, at 0.95 to 1.02 of the speed, so what "
    "is added is not hidden however it is queued; no scales of columns read, which gave that form 7 to 9 %; one arrival for "
    "each warp in place of one for each thread, none."
)


def pipelines(record: Mapping[str, Any]) -> str:
    found: dict[str, dict[str, Mapping[str, Mapping[str, Any]]]] = {}
    for name, units in of_script(record, "pipelines").items():
        setting, what = name.rsplit(", ", 1)
        found.setdefault(setting, {})[what] = units
    rows = [
        (setting, *(shown(each[what][unit], 2) for what in ("forward", "training") for unit in ("ms", "x products")))
        for setting, each in found.items()
    ]
    head = ("pipeline, recipe, override", "forward, ms", "x products (at most)", "training, ms", "x products (at most)")
    return f"{PIPELINES}{table(head, rows)}\n\n{beside_products(record)}\n\n{least_of_b(record)}"


PIPELINES = (
    "`x products`: how many times as long as its matrix products alone, which run in turns with it, forward ones in the "
    "recipe's format, backward ones too, or in bf16 under an override. Forward is inference; training is one forward and "
    "backward pass.\n\n"
)


def beside_products(record: Mapping[str, Any]) -> str:
    """What A moves under current scaling and `dequantized` beside its products, and the ratio that this alone would make."""
    x, inside, weights = SIZES.tokens * SIZES.hidden, SIZES.tokens * SIZES.ffn, 2 * SIZES.hidden * SIZES.ffn
    moved = {
        "for the amaxes of input and weights": BF16 * (x + weights),
        "for their casts": (BF16 + FP8) * (x + weights),
        "for bias and GELU, of which the amax is taken and what the derivative reads is kept": 2 * BF16 * inside,
        "for the codes of the result": (BF16 + FP8) * inside,
        "for the last bias": 2 * BF16 * x,
        "for operands that are dequantized": (BF16 + FP8) * (x + inside + weights),
        "for the derivative and the sums of the bias gradients": 3 * BF16 * inside + BF16 * x,
    }
    total = sum(moved.values())
    alone, products = at_copy(record, total), products_alone(record, "A, fp8_current, dequantized, training")
    terms = ", ".join(f"{size / 1e9:.2f} {what}" for what, size in moved.items())
    return (
        "What stands beside the products is bytes. In a training step of A under `fp8_current` and `dequantized`, in GB: "
        f"{terms}; together {total / 1e9:.2f}. At the speed of copy that is {alone:.2f} ms beside {products:.2f} ms of products, "
        f"{1 + alone / products:.2f} times these."
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
        training = inference + casts + FP8 * (x + inside + weights) + backward
        alone = {what: products_alone(record, f"B, {kind}, {what}") for what in ("forward", "training")}
        cells = ((inference, "forward"), (inference + casts, "forward"), (training, "training"))
        of_each = ((f"{count / 1e9:.2f}", f"{1 + at_copy(record, count) / alone[what]:.2f}") for count, what in cells)
        rows.append((kind, *(cell for pair in of_each for cell in pair)))
    head = ("B", "inference, weights kept, GB", "x products", "inference, GB", "x products", "training, GB", "x products")
    return (
        "B, inference: a norm that casts, SwiGLU that casts, and casts of weights where none are kept. Training: both planes of "
        "all casts, the gradient's cast, derivatives of SwiGLU, cast as well, and of the norm. At the speed of copy this takes, "
        "beside the products:\n\n"
        f"{table(head, rows)}\n\n"
        "A training step took less: its products run between kernels that wait for memory, and find more power left than back "
        "to back. SwiGLU in the registers of its product would spare inference two thirds of its bytes, and was slower: "
        "[architecture.md](architecture.md#decisions-worth-their-reasons)."
    )


SPEEDS = {
    "x torch bf16": "torch's bf16 layers, one a group",
    "x bf16 grouped": "bf16 in torch's grouped product, one launch for all groups; 7168 features in and 2048 out, or as it says",
    "x apart": "the same with rows that are copied first and then cast",
}
"""What experts are compared with, by the unit of the figure."""


def groups(record: Mapping[str, Any]) -> Iterator[str]:
    found: dict[str, dict[str, dict[str, str]]] = {}
    told: dict[str, dict[str, None]] = {}
    for name, units in of_script(record, "grouped").items():
        problem, rest = name.split(" rows, ")
        variant, what = rest.rsplit(", ", 1)
        speeds = [unit for unit in SPEEDS if unit in units]
        beside = f" ({', '.join(shown(units[unit], 2) for unit in speeds)})" if speeds else ""
        found.setdefault(what, {}).setdefault(variant, {})[problem] = shown(units["ms"], 2) + beside
        told.setdefault(what, {}).update(dict.fromkeys(speeds))
    for what, variants in found.items():
        problems = list(dict.fromkeys(problem for cells in variants.values() for problem in cells))
        others = ", and of ".join(SPEEDS[unit] for unit in told[what])
        yield f"{what.capitalize()}, groups x rows of each, or a mixture: ms, and times the speed (at least) of {others}.\n"
        rows = [(variant, *(cells.get(problem, "") for problem in problems)) for variant, cells in variants.items()]
        yield table(("recipe, override", *problems), rows) + "\n"


TOOLS_SAY = (
    "Initcheck does not see what the engine of Hopper stores, so two cases in which a cast reads what a product stored are "
    "left out of it. `python -m benchmarks.sanitizer --unseen` shows it of a short program that stores the same values by "
    "threads and by the engine. Racecheck reported products of 1x128 by 1x128 as long as one lane told the loader for its "
    "warp that a stage may be filled again, also when the lanes met before. Each lane tells for itself now. Racecheck has "
    "not run over all cases since; of these products it reports nothing."
)


EXPERTS = (
    "Where blocks stay behind: of a step of 8 x 8192 rows on an H200, by torch.profiler, three products took 4.74 ms for 5.77"
    " TFLOP, as fast as the library's for blocks, casts of rows 0.63 ms for 2.42 GB, casts of weights 0.12 ms for 0.47 GB, "
    "tables of groups 0.01 ms: together 5.50 ms, where torch's three bf16 products took 7.39 ms. Casts at the speed of copy "
    "would make 1.36 times the speed of bf16 of 1.34, and none at all 1.56. Of 128 experts of 1024 rows, 2048 to 768, "
    "products took 1.21 ms for 1.24 TFLOP, beside 1.83 ms in bf16, casts of rows 0.41 ms for 1.48 GB, of weights 0.24 ms for "
    "0.81 GB in 16 launches, tables 0.02 ms: together 1.87 ms, 0.98 times the speed of bf16. So many weights and so short "
    "sums leave a byte that is cast few products; at the speed of copy it would be 1.04. It is 1.13 where casts of weights "
    "are kept, as over microbatches of a step, and 1.11 as a user waits. With a tensor for each of so many experts the host "
    "is what takes the time: one tensor for all has a launch for all."
)


def memory(record: Mapping[str, Any]) -> str:
    figures = of_script(record, "memory")
    settings = dict.fromkeys(name.rsplit(", ", 1)[0] for name in figures)
    rows = []
    for setting in settings:
        saved, peak = figures[f"{setting}, saved"], figures.get(f"{setting}, peak", {})
        rows.append((setting, shown(saved["MiB"]), shown(saved["% of bf16"]), shown(peak.get("MiB"))))
    return table(("pipeline, recipe, override", "saved, MiB (formula)", "% of bf16", "peak, MiB (at most)"), rows)


def problems(record: Mapping[str, Any], script: str) -> str:
    """For each problem models down, what they do across."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for name, units in of_script(record, script).items():
        _, problem, model, what = name.split(", ", 3)
        cell = ", ".join(f"{shown(figure, _DIGITS.get(unit, 1))} {unit.removesuffix(' bf16')}" for unit, figure in units.items())
        found.setdefault(problem, {}).setdefault(model, {})[what] = cell
    return "\n\n".join(f"{problem.capitalize()}:\n\n{_by_what(models)}" for problem, models in found.items())


_DIGITS = {
    "us": 0,
    "Python calls": 0,
    "x eager bf16": 2,
    "x torch.compile bf16": 2,
    "graph breaks": 0,
    "recompilations": 0,
    "s": 0,
    "MiB between the passes": 0,
    "MiB a step": 0,
    "% of copies beside kernels": 0,
}


def _by_what(models: Mapping[str, Mapping[str, str]], head: str = "recipe") -> str:
    columns = list(dict.fromkeys(what for cells in models.values() for what in cells))
    return table((head, *columns), [(model, *(cells.get(what, "") for what in columns)) for model, cells in models.items()])


def overhead(record: Mapping[str, Any]) -> str:
    found: dict[str, dict[str, str]] = {}
    for name, units in of_script(record, "overhead").items():
        _, what, rest = name.split(", ", 2)
        kind, setting = rest.split(", ", 1) if what.startswith(("step", "host")) else ("", rest)
        cell = ", ".join(f"{shown(figure, 2 if unit == 'ms' else 1)} {unit}" for unit, figure in units.items())
        found.setdefault(setting, {})[", ".join(filter(None, (what, kind)))] = cell
    return OVERHEAD + _by_what(found, "setting")


OVERHEAD = (
    "What it costs to be asked, as more of the same without. `watch(every=100)` looks at one step in a hundred, which runs op by "
    "op, `watch(every=1)` at every step. Tracing is `OPFUSE_TRACE`; without sources, nobody looks for the lines of code that "
    "values come from. Both queue nothing on the device. Wall time of a step of B, where the device decides; time of the host "
    "for a step, and for a plan, of A.\n\n"
)


def inside(record: Mapping[str, Any]) -> str:
    """What graphs, compiled code and offload do, one row for each way to run a step."""
    told = (
        "Medians of rounds in which the ways of one table take turns. Compiled: the whole model in one graph, all recipes in the "
        "same. Offload: what autograd saves goes to pinned memory of the host and comes back; of the time of these copies, the "
        "part in which a kernel ran as well, by torch.profiler."
    )
    found: dict[str, list[tuple[str, str]]] = {}
    for name, units in of_script(record, "pytorch").items():
        what, model, way = name.split(", ", 2)
        cell = ", ".join(f"{shown(figure, _DIGITS.get(unit, 2))} {unit}" for unit, figure in units.items())
        found.setdefault(f"{what}, {model}", []).append((way, cell))
    return "\n\n".join([told, *(table((what.capitalize(), "figures (at most)"), rows) for what, rows in found.items())])


def others(record: Mapping[str, Any], *scripts: str) -> str:
    figures = of_script(record, *scripts)
    rows = [(name, shown(figure, 3), unit) for name, units in figures.items() for unit, figure in units.items()]
    return table(("what", "figure (at most)", "unit"), rows)


def sections(record: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    """(heading, text) of each section whose script has run."""
    made = {
        "casts": ("Kernels", kernels),
        "peers": ("Kernels beside PyTorch, 16384 x 8192", peers),
        "gemm": ("Matrix products of a linear layer", products),
        "products": ("Products of the package's own beside cuBLASLt's", lambda record: f"{own_products(record)}\n\n{TWICE}"),
        "chained": ("Products, their chains and casts in one launch", lambda record: own_products(record, "chained")),
        "pipelines": ("Pipelines beside their matrix products, 8192 tokens, 4096 wide, 14336 inside", pipelines),
        "invariance": ("Batch-invariant forward passes beside others", lambda record: others(record, "invariance")),
        "grouped": ("Mixtures of experts, 7168 features in, 2048 out", lambda record: "\n".join([*groups(record), EXPERTS])),
        "host": (
            "Time of the host while the device has nothing to do, and what a user waits",
            lambda record: HOST + problems(record, "host"),
        ),
        "pytorch": ("CUDA graphs, compiled code, offload", inside),
        "overhead": ("Being asked: watching, tracing, sources", overhead),
        "converted": ("A model of transformers, converted", lambda record: CONVERTED + problems(record, "converted")),
        "memory": ("Memory", memory),
        "training": ("Training", lambda record: others(record, "training")),
        "compiling": ("Compiling", lambda record: COMPILING + others(record, "compiling")),
        "memcheck": ("compute-sanitizer", lambda record: f"{others(record, *TOOLS)}\n\n{TOOLS_SAY}"),
    }
    run = record["measured"]
    return [(heading, f"{code(run[script])}.\n\n{text(record)}") for script, (heading, text) in made.items() if script in run]


HOST = "Infer is a forward pass under `torch.no_grad`; in parentheses, what it may be at most.\n\n"

COMPILING = (
    "A first training step is a forward and a backward pass of a process that has made a step of the same layers in plain "
    "bf16. So what torch does at its own first step, and imports then for two seconds, is done. The figures are medians of "
    "processes, from the call on, with imports, the plan, and kernels that are compiled or loaded. No record has them yet.\n\n"
)

CONVERTED = (
    "Layers of Llama 3 8B, random weights, one sequence; and how many times as fast as the plain layers under torch.compile. "
    "Converted layers are called as they are, with torch.compile around them, and the latter as a CUDA graph. AdamW is torch's "
    "fused one.\n\n"
)


def code(moment: Mapping[str, Any]) -> str:
    """When something was measured, and of which code."""
    return f"On {moment['date']}: kernels {moment['kernels_digest'][:12]}, package {moment['package_digest'][:12]}"


def counted(tests: Mapping[str, Any]) -> str:
    """What became of tests."""
    return ", ".join(f"{tests[state]} {state}" for state in ("passed", "failed", "skipped") if state in tests)


def ranks(record: Mapping[str, Any]) -> str:
    """Training over the GPUs of a machine."""
    count, figures = record["ranks"], of_script(record, "distributed")
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    columns = {
        "gathered, MB": (("MB given to gathers a step", 0), ("x bytes of bf16", 2)),
        "forward and backward, ms": (("ms, forward and backward", 1), ("x torch, forward and backward", 2)),
        "with AdamW, ms": (("ms, with AdamW", 1), ("x torch, with AdamW", 2)),
        "gathers, ms": (("ms of gathers a step", 1),),
        "beside kernels, %": (("% of gathers beside kernels", 0),),
        "waits of the host": (("waits of the host in a step", 0),),
    }
    rows = [
        (name, *(", x ".join(shown(units.get(unit), digits) for unit, digits in cell) for cell in columns.values()))
        for name, units in figures.items()
    ]
    origin = (
        f"{code(record)}. By `{record['script']}`, {count} ranks, one a GPU: {versions}; "
        f"tests/distributed over NCCL: {counted(record['tests'])}.\n\n"
    )
    return origin + SEVERAL + table(("layers", *columns), rows)


SEVERAL = (
    "Four layers shaped as those of an 8B model (4096 wide, 14336 inside, 32 heads, 8 of keys), 4096 tokens a rank, FSDP2, each "
    "layer sharded by itself and freed between the passes. Bytes are those that a rank gives in a step, with their part of bf16; "
    "times are medians of the slowest rank, with their part of eager torch. Of the time of gathers, the part in which other "
    "kernels ran as well, by torch.profiler. AdamW steps on fp32 masters of weights that live quantized, else on weights in bf16."
    "\n\n"
)


def document(record: Mapping[str, Any], several: Mapping[str, Any]) -> str:
    """The page of the records of one GPU and of several."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    head = (
        "# Measured\n\n"
        f"By `{record['script']}`, each table in one process: {versions}. Random data, fewest bytes counted; limits in "
        "parentheses, what misses its limit in bold. A digest that `opfuse kernels --digest` prints as well says which kernels "
        "were measured. Two pipelines come back, with inputs and weights in bf16: A is Linear, GELU, Linear, with biases; B is "
        "RMSNorm, Linear to twice the inner width, SwiGLU, Linear, without biases, the step that the README shows.\n\n"
        f"{code(record['tests'])}. tests/gpu: {counted(record['tests'])}.\n"
    )
    made = [*sections(record), ("Several GPUs", ranks(several))]
    return head + "".join(f"\n## {heading}\n\n{text}\n" for heading, text in made)


def main() -> int:
    """Write the page, or compare it under ``--check``."""
    text = document(*(json.loads(file.read_text(encoding="utf-8")) for file in (RECORD, RANKS)))
    if "--check" in sys.argv[1:]:
        return int(DOCUMENT.read_text(encoding="utf-8") != text)
    DOCUMENT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
