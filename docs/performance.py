"""Writes docs/performance.md from the records of GPUs: ``python -m docs.performance``; ``--check`` only compares.

The page says of each section whether its kernels were those of the package when the page was written.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import profiles
from benchmarks.converted import COMPILED
from benchmarks.sanitizer import TOOLS
from docs import performance_text as prose
from docs import pretraining
from docs.performance_figures import LARGE, SMALL, of_script, shown
from docs.performance_gains import gains
from docs.performance_reasons import beside_products, experts, least_of_b
from docs.tables import table
from opfuse.kernels.engine.sources import sources_digest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "performance.md"
RECORD = ROOT / "benchmarks" / "results" / "h200.json"
RANKS = ROOT / "benchmarks" / "results" / "h200x2.json"
H100 = ROOT / "benchmarks" / "results" / "h100.json"


def kernels(record: Mapping[str, Any]) -> str:
    figures = of_script(record, "casts", "epilogues", "norms")
    names = [name.removesuffix(LARGE) for name in figures if name.endswith(LARGE)]
    rows = [
        (name, shown(figures[name + LARGE].get("% of copy")), shown(figures.get(name + SMALL, {}).get("us")))
        for name in dict.fromkeys(names)
        if name != "copy"
    ]
    return prose.KERNELS + table(("kernel", "16384 x 8192, % of copy (at least)", "4096 x 4096, µs (at most)"), rows)


def peers(record: Mapping[str, Any]) -> str:
    found: dict[str, dict[str, str]] = {}
    for name, units in of_script(record, "peers").items():
        kernel, peer = name.removesuffix(LARGE).rsplit(", ", 1)
        found.setdefault(kernel, {})[peer] = shown(units["x time"])
    rows = [(kernel, each.get("eager torch", ""), each.get("torch.compile", "")) for kernel, each in found.items()]
    return prose.PEERS + table(("kernel", "eager torch", "torch.compile"), rows)


def products(record: Mapping[str, Any]) -> str:
    found: dict[str, dict[str, str]] = {}
    for name, units in of_script(record, "gemm").items():
        (kind, product), sizes = name.split(", ")[0].rsplit(" ", 1), name.split(", ")[1]
        cell = f"{shown(units['TFLOP/s'], 0)} ({shown(units['x bf16'], 2)})"
        found.setdefault(f"{product}, {sizes}", {})[kind] = cell
    kinds = list(dict.fromkeys(kind for cells in found.values() for kind in cells))
    rows = [(product, *(cells.get(kind, "") for kind in kinds)) for product, cells in found.items()]
    return prose.PRODUCTS + table(("product, tokens x inputs x outputs", *kinds), rows)


def own_products(record: Mapping[str, Any], script: str = "products") -> str:
    """For each kind what the package's own product reaches, problems across."""
    found: dict[str, dict[str, str]] = {}
    for name, units in of_script(record, script).items():
        kind, problem = name.split(": ", 1)
        cell = "; ".join(f"{shown(figure, 2 if unit.startswith('x ') else 0)} {unit}" for unit, figure in units.items())
        found.setdefault(kind, {})[problem] = cell
    problems = list(dict.fromkeys(problem for cells in found.values() for problem in cells))
    rows = [(kind, *(cells.get(problem, "") for problem in problems)) for kind, cells in found.items()]
    return prose.OWN + table(("product", *problems), rows)


def pipelines(record: Mapping[str, Any]) -> str:
    found: dict[str, dict[str, Mapping[str, Mapping[str, Any]]]] = {}
    for name, units in of_script(record, "pipelines").items():
        setting, what = name.rsplit(", ", 1)
        found.setdefault(setting, {})[what] = units
    units = {"ms": "ms", "x products": "x products (at most)", "ms of wall time": "wall, ms"}
    kinds = ("forward", "training")
    rows = [
        (setting, *(shown(each[what][unit], 2) if unit in each.get(what, {}) else "" for what in kinds for unit in units))
        for setting, each in found.items()
    ]
    head = ("pipeline, recipe, override", *(f"{what}, {told}" for what in kinds for told in units.values()))
    return f"{prose.PIPELINES}{table(head, rows)}\n\n{beside_products(record)}\n\n{least_of_b(record)}"


def traces(record: Mapping[str, Any]) -> str:
    """For each step its kernels down, variants across."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for name, units in of_script(record, "profiles").items():
        step, variant, kernel = name.rsplit(", ", 2)
        launches = f" ({shown(units['launches'], 0)})" if "launches" in units else ""
        found.setdefault(step, {}).setdefault(kernel, {})[variant] = shown(units["ms"], 2) + launches
    last = (profiles.ALL, profiles.SPAN)
    tables = []
    for step, kernels in found.items():
        inorder = {
            **{kernel: kernels[kernel] for kernel in kernels if kernel not in last},
            **{each: kernels[each] for each in last},
        }
        tables.append(f"{step}:\n\n{_by_what(inorder, 'kernel')}")
    return "\n\n".join((prose.PROFILES.rstrip(), *tables))


SPEEDS = {
    "x torch bf16": "torch's bf16 layers, one for each group",
    "x bf16 grouped": "torch's grouped bf16 product, one launch for all groups",
    "x apart": "copying the rows first and casting them then",
    "x two launches": "the activation and the cast of its result, one after the other",
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
        others = ", and over ".join(SPEEDS[unit] for unit in told[what])
        yield f"{what.capitalize()}, in ms, and the speedup (at least) over {others}:\n"
        rows = [(variant, *(cells.get(problem, "") for problem in problems)) for variant, cells in variants.items()]
        yield table(("recipe, override", *problems), rows) + "\n"


def memory(record: Mapping[str, Any]) -> str:
    figures = of_script(record, "memory")
    settings = dict.fromkeys(name.rsplit(", ", 1)[0] for name in figures)
    rows = []
    for setting in settings:
        saved, peak = figures[f"{setting}, saved"], figures.get(f"{setting}, peak", {})
        cells = [shown(each.get(unit)) for each in (saved, peak) for unit in ("MiB", "% of bf16")]
        rows.append((setting, *cells))
    head = ("saved, MiB (formula)", "% of bf16 (at most)", "peak, MiB (at most)", "% of bf16 (at most)")
    return prose.MEMORY + table(("pipeline, recipe, override", *head), rows)


def problems(record: Mapping[str, Any], script: str) -> str:
    """For each problem models down, what they do across."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for name, units in of_script(record, script).items():
        _, problem, model, what = name.split(", ", 3)
        cell = ", ".join(f"{shown(figure, _digits(unit))} {unit.removesuffix(' bf16')}" for unit, figure in units.items())
        found.setdefault(problem, {}).setdefault(model, {})[what] = cell
    return "\n\n".join(f"{problem[:1].upper()}{problem[1:]}:\n\n{_by_what(models)}" for problem, models in found.items())


_DIGITS = {
    "us": 0,
    "Python calls": 0,
    "x eager bf16": 2,
    "x torch.compile bf16": 2,
    "x torchao compiled": 2,
    "graph breaks": 0,
    "recompilations": 0,
    "s": 0,
    "MiB between the passes": 0,
    **dict.fromkeys(("MiB saved", "MiB peak", "% saved", "% peak"), 0),
    "MiB a step": 0,
    "% of torch.compile bf16": 0,
    "% of copies beside kernels": 0,
}


def _digits(unit: str) -> int:
    return _DIGITS.get(unit, 2 if unit.startswith("x ") else 1)


def mixtures(record: Mapping[str, Any]) -> str:
    """For each mixture and number of tokens what a step takes, whole and by part, models across."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for name, units in of_script(record, "mixtures").items():
        layers, tokens, model, *part = name.split(", ")
        speed = f", x {shown(units[BESIDE], 2)}" if BESIDE in units else ""
        launches = f" ({shown(units['launches'], 0)})" if "launches" in units else ""
        parts = {"ms": 1, "MiB": 0, f"% of {COMPILED}": 0}
        amounts = (f"{shown(units[unit], digits)} {unit}".removesuffix(" ms") for unit, digits in parts.items() if unit in units)
        cell = f"{', '.join(amounts)}{speed}{launches}"
        found.setdefault(f"{layers}, {tokens}", {}).setdefault(part[0] if part else "wall time", {})[model] = cell
    tables = (f"{problem.capitalize()}:\n\n{_by_what(parts, 'ms')}" for problem, parts in found.items())
    return "\n\n".join((prose.MIXTURES.rstrip(), *tables))


BESIDE = f"x {COMPILED}"
"""The unit of speeds over the layers in bf16 that are compiled."""


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
    return prose.OVERHEAD + _by_what(found, "setting")


def inside(record: Mapping[str, Any]) -> str:
    """What graphs, compiled code and offload do, one row for each way to run a step."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, units in of_script(record, "pytorch").items():
        what, model, way = name.split(", ", 2)
        cell = ", ".join(f"{shown(figure, _DIGITS.get(unit, 2))} {unit}" for unit, figure in units.items())
        found.setdefault(f"{what}, {model}", []).append((way, cell))
    return "\n\n".join([prose.INSIDE, *(table((what.capitalize(), "figures (at most)"), rows) for what, rows in found.items())])


def others(record: Mapping[str, Any], *scripts: str) -> str:
    figures = of_script(record, *scripts)
    rows = [(name, shown(figure, 3), unit) for name, units in figures.items() for unit, figure in units.items()]
    return table(("what", "figure (at most)", "unit"), rows)


def choices(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Each choice, and the speed of the package's own way."""
    return [(name, shown(figure, 2)) for name, units in of_script(record, "choices").items() for figure in units.values()]


def sections(record: Mapping[str, Any], today: str) -> Sequence[tuple[str, str]]:
    """(heading, text) of each section whose script has run. today: as :func:`code` wants it."""
    made = {
        "casts": ("Kernels", kernels),
        "peers": ("Kernels compared with PyTorch, 16384 x 8192", peers),
        "gemm": ("Matrix products of a linear layer", products),
        "products": (
            "FP8 products: opfuse's kernel compared with cuBLASLt",
            lambda record: f"{own_products(record)}\n\n{prose.TWICE}",
        ),
        "chained": (
            "FP8 products with elementwise ops and cast in one kernel",
            lambda record: prose.CHAINED + own_products(record, "chained"),
        ),
        "choices": (
            "Thresholds between kernels",
            lambda record: prose.CHOICES + table(("choice", "x alternative (at least)"), choices(record)),
        ),
        "pipelines": ("Pipelines compared with their products, 8192 tokens, 4096 wide, 14336 inside", pipelines),
        "profiles": ("Where the time of these steps goes", traces),
        "invariance": ("Batch-invariant forward passes", lambda record: prose.INVARIANCE + others(record, "invariance")),
        "grouped": (
            "Mixtures of experts, 7168 features in, 2048 out",
            lambda record: prose.GROUPED + "\n".join([*groups(record), experts(record)]),
        ),
        "host": ("CPU time", lambda record: prose.HOST + problems(record, "host")),
        "pytorch": ("CUDA graphs, torch.compile, offload", inside),
        "overhead": ("Cost of watching and tracing", overhead),
        "converted": ("Llama converted with fuse_", lambda record: prose.CONVERTED + problems(record, "converted")),
        "libraries": ("Llama beside torchao", lambda record: prose.LIBRARIES + problems(record, "libraries")),
        "small": ("Small Llama layers", lambda record: prose.SMALL + problems(record, "small")),
        "mixtures": ("Mixtures converted with fuse_", mixtures),
        "steps": ("Whole training steps", lambda record: prose.STEPS + problems(record, "steps")),
        "adapters": ("Adapters over stored weights", lambda record: prose.ADAPTERS + problems(record, "adapters")),
        "rollout": ("Rollout and training with equal bits", lambda record: prose.ROLLOUT + problems(record, "rollout")),
        "memory": ("Memory", memory),
        "memory_estimates": ("Estimated memory", lambda record: prose.ESTIMATES + others(record, "memory_estimates")),
        "training": ("Training", lambda record: prose.TRAINING + others(record, "training")),
        "compiling": ("Compiling kernels", lambda record: prose.COMPILING + others(record, "compiling")),
        "memcheck": ("compute-sanitizer", lambda record: f"{others(record, *TOOLS)}\n\n{prose.SANITIZER}"),
    }
    run = record["measured"]
    there = [(script, *each) for script, each in made.items() if script in run]
    return [(heading, f"{code(run[script], today)}.\n\n{text(record)}") for script, heading, text in there]


def code(moment: Mapping[str, Any], today: str) -> str:
    """When something was measured, and of which code. today: how the digest of the kernels' sources begins."""
    sources = "these" if moment["kernels_digest"].startswith(today) else "earlier"
    kernels, package = (moment[f"{what}_digest"][:SHOWN] for what in ("kernels", "package"))
    return f"On {moment['date']}: kernels {kernels}, of {sources} sources; package {package}"


SHOWN = 12
"""Digits of a digest."""


def digest_of(page: str) -> str:
    """How the digest of the kernels' sources began when ``page`` was written."""
    found = re.search(rf"`([0-9a-f]{{{SHOWN}}})`", page)
    return found[1] if found else ""


def counted(tests: Mapping[str, Any]) -> str:
    """What became of tests."""
    return ", ".join(f"{tests[state]} {state}" for state in ("passed", "failed", "skipped") if state in tests)


def ranks(record: Mapping[str, Any], today: str) -> str:
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
        f"{code(record, today)}. By `{record['script']}`, {count} ranks, one a GPU: {versions}; "
        f"tests/distributed over NCCL: {counted(record['tests'])}.\n\n"
    )
    spread = of_script(record, "experts")
    speeds = [
        (
            name,
            shown(units.get("x bytes to experts"), 2),
            shown(units["ms, forward and backward"], 1),
            shown(units["x the speed of torch"], 2),
        )
        for name, units in spread.items()
    ]
    mixtures = (
        prose.SPREAD + table(("experts", "bytes to experts, x bf16", "ms", "x the speed of torch"), speeds) if spread else ""
    )
    return origin + prose.SEVERAL + table(("layers", *columns), rows) + mixtures


def trained(record: Mapping[str, Any], today: str) -> str:
    """Pre-training, whose runs may be of several days."""
    origins = ".\n".join(dict.fromkeys(code(run, today) for run in record["runs"]))
    return f"{origins}.\n\n{pretraining.section(record)}"


def document(
    record: Mapping[str, Any],
    several: Mapping[str, Any],
    h100: Mapping[str, Any],
    today: str,
    *,
    runs: Mapping[str, Any] | None = None,
) -> str:
    """The page of the records of an H200, of several, and of an H100. today: as :func:`code` wants it. runs: of pre-training."""
    device, *versions = (f"{name} {version}" for name, version in record["versions"].items())
    head = prose.HEAD.format(
        device=f"one {device.removeprefix('device ')}",
        script=record["script"],
        versions=", ".join(versions),
        today=today,
        code=code(record["tests"], today),
        tests=counted(record["tests"]),
    )
    made = [
        ("What you gain", gains(record, several, h100).rstrip()),
        ("How the records were made", head.rstrip()),
        *sections(record, today),
        *([(pretraining.HEADING, trained(runs, today))] if runs else []),
        ("Several GPUs", ranks(several, today)),
    ]
    return prose.TITLE + "".join(f"\n## {heading}\n\n{text}\n" for heading, text in made)


def main() -> int:
    """Write the page, or compare it under ``--check``."""
    record, several, h100 = (json.loads(file.read_text(encoding="utf-8")) for file in (RECORD, RANKS, H100))
    runs = pretraining.record()
    if "--check" in sys.argv[1:]:
        page = DOCUMENT.read_text(encoding="utf-8")
        return int(page != document(record, several, h100, digest_of(page), runs=runs))
    DOCUMENT.write_text(document(record, several, h100, sources_digest()[:SHOWN], runs=runs), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
