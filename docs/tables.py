"""Writes the tables of README and pages from the code: ``python docs/tables.py`` rewrites them, ``--check`` only compares."""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import opfuse
from opfuse.compiler.rules import Fusion, printed
from opfuse.environment import VARIABLES
from opfuse.errors import MissingPlaneError
from opfuse.formats import COLUMNWISE, E4M3
from opfuse.kernels.engine.certificates import is_recorded_arch
from opfuse.kernels.engine.registry import OLDEST
from opfuse.kernels.products.backends import BACKENDS, Machine, backend_of
from opfuse.ops import OPS
from opfuse.recipes import RECIPES, zoo
from opfuse.recipes.recipe import OVERRIDES
from opfuse.tensors.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8RowQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP4Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from opfuse.tensors.rows import row_unit
from opfuse.train.study_report import markdown

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = (README, *(ROOT / "docs" / f"{name}.md" for name in ("api", "recipes", "ops", "fusions", "cli")))
"""Pages with tables between marks."""
STUDIES = {name: ROOT / "benchmarks" / "results" / f"{name}_cpu.json" for name in ("overrides", "keep")}
"""What `opfuse study NAME configs/quickstart.yaml` wrote, without the single measurements."""
RECORD = ROOT / "benchmarks" / "results" / "h200.json"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def support() -> str:
    """Recipe by hardware: native or emulated."""
    rows = opfuse.support_matrix()
    archs = list(dict.fromkeys(row.arch for row in rows))
    names = ["CPU" if arch == (0, 0) else f"sm_{arch[0]}{arch[1]}" for arch in archs]
    status = {(row.kind, row.arch): row.status for row in rows}
    body = [[f"`{cls.__name__}`", kind, *(status[kind, arch] for arch in archs)] for kind, cls in RECIPES.items()]
    return table(["recipe", "kind", *names], body)


GPUS: Mapping[str, tuple[tuple[int, int], ...]] = {
    "H100, H200 (9.0)": ((9, 0),),
    "B200, B300, GB300 (10.x), Thor (11.0), RTX 50 (12.x)": ((10, 0), (10, 3), (11, 0), (12, 0), (12, 1)),
    "L4, L40S, RTX 40 (8.9)": ((8, 9),),
    "A100, A40, RTX 30 (8.0, 8.6)": ((8, 0), (8, 6)),
    "older GPUs, CPU": ((7, 5), (0, 0)),
}
"""Compute capabilities by the devices that have them, those of a line alike."""

FAMILIES = {"FP8 per tensor, per row": ("tensor", "row"), "FP8 blocks": ("block",), "MXFP8, NVFP4": ("mx", "nv")}


def hardware() -> str:
    """What runs natively on which GPU, and on what evidence."""
    rows = []
    for name, archs in GPUS.items():
        cells = []
        for families in (*FAMILIES.values(), ()):
            (cell,) = {_products(family, arch) for arch in archs for family in families} or {_kernels(arch) for arch in archs}
            cells.append(cell)
        rows.append([name, *cells])
    return table(["GPU (compute capability)", *FAMILIES, "casts, chains, norms"], rows)


def _products(family: str, arch: tuple[int, int]) -> str:
    found = backend_of(BACKENDS[family], Machine(arch, (99, 0)))
    if isinstance(found, str):
        return "emulated"
    exact = " (scales that are powers of two)" if any(rule.what == "block scales" for rule in found.rules) else ""
    return f"native{exact}, {'recorded' if found.recorded else 'certified'}"


def _kernels(arch: tuple[int, int]) -> str:
    if arch < OLDEST:
        return "torch"
    return f"kernels, {'recorded' if is_recorded_arch(arch) else 'certified'}"


FORMATS: Sequence[Quantizer] = (
    Float8CurrentScalingQuantizer(E4M3.dtype),
    Float8RowQuantizer(E4M3.dtype),
    Float8BlockQuantizer(E4M3.dtype, block_scaling_dim=1),
    Float8BlockQuantizer(E4M3.dtype),
    MXFP8Quantizer(),
    MXFP4Quantizer(),
    NVFP4Quantizer(),
)
"""A quantizer of every format."""


def formats() -> str:
    """Element, block, scale and columnwise layout of every format."""
    head = [
        "format",
        "element",
        "scale shared by",
        "scale",
        "columnwise data",
        "columnwise from rowwise bytes",
        "rows of a shard",
    ]
    return table(head, map(_format_row, FORMATS))


def columnwise_from_rowwise(quantizer: Quantizer) -> bool:
    """Whether a tensor that was made with rowwise data alone can be read columnwise."""
    try:
        quantizer.wanting(columnwise=False).make_empty((256, 256)).derived(COLUMNWISE)
    except MissingPlaneError:
        return False
    return True


def shard_rows(quantizer: Quantizer) -> int:
    """What the rows of a shard of a stored parameter are a multiple of."""
    return row_unit(quantizer.make_empty((256, 256)))


def _format_row(quantizer: Quantizer) -> list[object]:
    format, unit = quantizer.formats[0], shard_rows(quantizer)
    element = format.element.name.upper() if format.element else ""
    block = {None: "the tensor", (1, 0): "a row"}.get(format.block) or "x".join(map(str, format.block or ()))
    scale = format.scale.upper() if format.family != "nv" else "E4M3 under a global fp32 amax"
    layout = "transposed" if format.transposed else "same shape"
    derived = "yes" if columnwise_from_rowwise(quantizer) else "no: cast both"
    return [
        format.name.replace("_e4m3", ""),
        element,
        block,
        scale,
        layout,
        derived,
        f"a multiple of {unit}" if unit > 1 else "any",
    ]


def presets() -> str:
    """Factories of opfuse.recipes.zoo."""
    rows = ([f"`{name}`", _summary(preset.__doc__)] for name, preset in zoo.PRESETS.items())
    return table(["qfactory", "what it chooses"], rows)


def quantizers_of_factories() -> str:
    """What a factory may return for a role, with what it is made with beside the keywords of all."""
    of_all = inspect.signature(Quantizer).parameters.keys() | OF_RANKS
    rows = []
    for kind in (*dict.fromkeys(map(type, FORMATS)), HybridQuantizer, IdentityQuantizer):
        found = [each for each in inspect.signature(kind).parameters.values() if each.name not in of_all]
        first, named = ([each for each in found if (each.kind is each.KEYWORD_ONLY) == by_name] for by_name in (False, True))
        made = inspect.Signature([each.replace(annotation=each.empty) for each in first])
        rows.append([f"`{kind.__name__}{made}`", ", ".join(f"`{each.name}`" for each in named), _summary(kind.__doc__)])
    return table(["quantizer", "by keyword", "what it makes"], rows)


OF_RANKS = {"device", "with_amax_reduction", "amax_reduction_group"}
"""Arguments of quantizers that recipes and shards give."""


def overrides() -> str:
    """What a backward override saves and computes in."""
    return table(
        ["backward_override", "saved for backward", "backward products"],
        [[f"`{name}`", policy.saved, policy.backward.replace("_", " ")] for name, policy in OVERRIDES.items()],
    )


def ops() -> str:
    """Ops by configuration name."""
    return table(
        ["op", "class", "what it computes"],
        [[f"`{name}`", f"`{cls.__name__}`", _summary(cls.__doc__)] for name, cls in sorted(OPS.items())],
    )


def rules() -> str:
    """Fusion rules in the order in which they claim."""
    return table(["rule", "direction", "pattern", "what it runs"], map(_rule_row, opfuse.fusions.RULES.rules))


def _rule_row(rule: Fusion) -> list[str]:
    return [f"`{rule.name}`", rule.direction, f"`{printed(rule.pattern)}`", _summary(rule.doc)]


def variables() -> str:
    """Environment variables."""
    return table(["variable", "what it sets"], ([f"`{name}`", says] for name, says in VARIABLES.items()))


def study(name: str) -> str:
    """Gradients beside the exact ones, as recorded; of ``keep`` also the bytes that are saved."""
    return markdown(json.loads(STUDIES[name].read_text(encoding="utf-8")))


def names() -> str:
    """The names of the package in their groups, with signatures."""
    return "\n\n".join(f"### {title}\n\n{_signed(group)}" for title, group in opfuse.GROUPS.items())


def _signed(group: Iterable[str]) -> str:
    public = {name: getattr(opfuse, name) for name in group}
    return table(["name", "what it does"], [[f"`{name}{signature(it)}`", _summary(it.__doc__)] for name, it in public.items()])


def signature(function: Callable[..., object]) -> str:
    """The arguments of a function or class: without types, without long defaults, and without what catches unknown keywords."""
    found = inspect.signature(function)
    shown = [each for each in found.parameters.values() if each.annotation != "Never"]
    without = (each.replace(annotation=each.empty, default=_Shown.of(each.default)) for each in shown)
    return str(found.replace(parameters=[*without], return_annotation=found.empty))


class _Shown(str):
    """A default as a signature shows it."""

    __repr__ = str.__str__

    @classmethod
    def of(cls, default: object) -> object:
        short = default is inspect.Parameter.empty or (len(repr(default)) <= 24 and not repr(default).startswith("<"))
        return default if short else cls("...")


def _summary(doc: str | None) -> str:
    first = " ".join((doc or "").strip().split("\n\n")[0].split())
    return re.sub(r":\w+:`(?:~[\w.]*\.)?", "`", first).replace("``", "`")


def speed() -> str:
    """Training steps of a converted model, from the record of an H200; nothing where the record has none."""
    llama = llama_speeds(_recorded())
    return f"{OF_LLAMA}\n\n{_faster(CONVERTED, llama)}" if llama else ""


def pipeline() -> str:
    """Training steps of one pipeline from the record of an H200, times in one process, in turns."""
    took = {f["name"]: f["value"] for f in _recorded() if f["unit"] == "ms"}
    return _faster(SPEED, _speeds({name: took[f"B, {name}, training"] for name in SPEED}))


def _recorded() -> list[dict[str, Any]]:
    """The figures of the record of an H200."""
    return json.loads(RECORD.read_text(encoding="utf-8"))["results"]


class StepSpeed(NamedTuple):
    """A training step: its milliseconds, and how many times as fast it is as the same in bf16, eager and compiled."""

    ms: float
    over_eager: float
    over_compiled: float


def llama_speeds(results: Sequence[Mapping[str, Any]]) -> dict[str, StepSpeed]:
    """Steps of the converted layers, by recipe and way of calling; none where a record has none.

    Layers of a recipe, and eager ones, took turns with compiled ones in bf16. A speed over those is the median over the turns, as
    the record has it, and a speed over eager ones the quotient of two: times of layers that took no turns are not divided.
    """
    names = {f"{LLAMA}, {name}, with AdamW": name for name in CONVERTED}
    found = [(names[f["name"]], f["unit"], f["value"]) for f in results if f["name"] in names]
    ms, over = ({name: value for name, of, value in found if of == unit} for unit in ("ms", f"x {COMPILED}"))
    return {name: StepSpeed(ms[name], faster / over[EAGER], faster) for name, faster in over.items()}


def _speeds(took: Mapping[str, float]) -> dict[str, StepSpeed]:
    """Speeds of steps that all took turns, by their milliseconds."""
    return {name: StepSpeed(ms, took[EAGER] / ms, took[COMPILED] / ms) for name, ms in took.items()}


def host() -> str:
    """Where a step gains little or loses: small layers, for which the host decides, few tokens, and small experts."""
    eager, compiled = ({f["name"]: f["value"] for f in _recorded() if f["unit"] == f"x {of}"} for of in (EAGER, COMPILED))
    small = {name: eager[f"host, A 256x256, {name}, forward + backward"] for name in ("none", *FP8, "mxfp8", "nvfp4")}
    few = [small[name] for name in ("none", *FP8)]
    decoder = [1 / eager[f"host, decoder of 4 layers 2048x4096, {name}, step, wall"] for name in FP8]
    of_experts = {name: faster for name, faster in compiled.items() if name.startswith(f"{EXPERTS}, fp8_")}
    graphs, experts = ([of_experts[name] for name in of_experts if name.endswith(GRAPH) == graph] for graph in (True, False))
    called, graph = ([compiled[f"{FEW}, {name} packed{how}, with AdamW"] for name in FP8[:2]] for how in ("", GRAPH))
    return (
        "- Not for small layers or few tokens. With 256 tokens of hidden size 256 Python takes longer than the GPU: a training\n"
        f"  step takes {min(few):.1f} to {max(few):.1f} times as long as in eager bf16 without a recipe and in FP8, "
        f"{small['mxfp8']:.1f} times in MXFP8 and {small['nvfp4']:.1f} times\n"
        "  in NVFP4, which are emulated. With 2048 tokens of hidden size 4096 FP8 has "
        f"{min(decoder):.2f} to {max(decoder):.2f} times the speed of eager\n"
        f"  bf16. Compiled Llama layers have {min(called):.2f} to {max(called):.2f} times the speed of compiled bf16 with 512\n"
        f"  tokens, and {min(graph):.2f} to {max(graph):.2f} times with [whole steps as a CUDA\n"
        "  graph](docs/torch.md#a-whole-step); layers with the\n"
        f"  128 small experts of Qwen3-30B-A3B and 8192 tokens {min(experts):.2f} to {max(experts):.2f} times, and "
        f"{min(graphs):.2f} to {max(graphs):.2f} as a graph."
    )


def _faster(called: Mapping[str, str], speeds: Mapping[str, StepSpeed]) -> str:
    """Milliseconds, and how many times as fast as eager and compiled bf16 each is. called: what each is called."""
    rows = [
        (what, f"{speeds[name].ms:.1f}", f"{speeds[name].over_eager:.2f}", f"{speeds[name].over_compiled:.2f}")
        for name, what in called.items()
    ]
    return table(["", "ms", "x eager", "x torch.compile"], rows)


EAGER, COMPILED = "eager bf16", "torch.compile bf16"
SPEED = {
    EAGER: "`nn` modules, bf16",
    COMPILED: "the same, `torch.compile`",
    "none": "opfuse, no recipe",
    "fp8_block": "opfuse, `Float8BlockScaling`",
    "fp8_current": "opfuse, `Float8CurrentScaling`",
    "delayed": "opfuse, `DelayedScaling`",
}
"""What is shown of the record, and what it is called."""

FP8 = ("fp8_block", "fp8_current", "delayed")
EXPERTS = "two layers of Qwen3-30B-A3B, 8192 tokens"
FEW = "libraries, Llama of 4 layers 512x4096"
GRAPH = " as a graph"

LLAMA = "converted, Llama of 4 layers 8192x4096"
CONVERTED = {
    EAGER: "bf16",
    COMPILED: "the same, `torch.compile`",
    "fp8_block called": "`fuse_` with `Float8BlockScaling`",
    "fp8_block compiled": "`fuse_` with `Float8BlockScaling`, then `torch.compile`",
    "fp8_current called": "`fuse_` with `Float8CurrentScaling`",
    "fp8_current compiled": "`fuse_` with `Float8CurrentScaling`, then `torch.compile`",
    "delayed called": "`fuse_` with `DelayedScaling`",
    "delayed compiled": "`fuse_` with `DelayedScaling`, then `torch.compile`",
}
OF_LLAMA = (
    "A training step (forward, backward, AdamW) of four Llama 3 8B layers of transformers, two sequences of 4096 tokens, on an\n"
    "NVIDIA H200. Speeds are medians of turns with bf16 under `torch.compile`, not quotients of the times."
)


TABLES = {
    "speed": speed,
    "pipeline": pipeline,
    "host": host,
    "hardware": hardware,
    "names": names,
    "support": support,
    "formats": formats,
    "presets": presets,
    "quantizers": quantizers_of_factories,
    "overrides": overrides,
    "ops": ops,
    "rules": rules,
    "variables": variables,
    **{f"study_{name}": functools.partial(study, name) for name in STUDIES},
}


def rendered(text: str) -> str:
    """``text`` with every marked table replaced by a fresh one."""
    for name, make in TABLES.items():
        marks = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text = marks.sub(lambda match, make=make: f"{match[1]}{make()}\n{match[2]}", text)
    return text


def main(arguments: Sequence[str]) -> int:
    """0 if the tables are, or now are, as the code says; 1 if ``--check`` found a difference."""
    stale = [path for path in PAGES if rendered(path.read_text(encoding="utf-8")) != path.read_text(encoding="utf-8")]
    if "--check" in arguments:
        return int(bool(stale))
    for path in stale:
        path.write_text(rendered(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
