"""The commands: what each takes, and what its help says. What does the work is imported when a command runs, not for its help."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer

_CONFIG = "A file, or an example of the package by name, such as quickstart."
ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help=_CONFIG, show_default=False)]
Configs = Annotated[list[Path], typer.Argument(metavar="CONFIG...", help=_CONFIG, show_default=False)]
StepsOption = Annotated[int | None, typer.Option(min=1, help="Steps, instead of the file's.", show_default=False)]
SeedOption = Annotated[int | None, typer.Option(min=0, help="Seed, instead of the file's.", show_default=False)]
Device = Annotated[str, typer.Option(help="Where to train.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class FindingFormat(enum.StrEnum):
    """How findings are printed."""

    text = "text"
    json = "json"
    github = "github"


class GraphFormat(enum.StrEnum):
    """How an explanation is printed."""

    text = "text"
    json = "json"
    mermaid = "mermaid"


class Subject(enum.StrEnum):
    """What is studied."""

    overrides = "overrides"
    keep = "keep"


def run(
    config: ConfigPath,
    *,
    steps: StepsOption = None,
    seed: SeedOption = None,
    device: Device = "cpu",
    out: Annotated[Path | None, typer.Option(help="Where report, plot and checkpoints go.", show_default="runs/NAME")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the checkpoints that are there.")] = False,
    as_json: Json = False,
) -> None:
    """Train the pipeline of a configuration, beside the same pipeline without a recipe, and report what fused."""
    from opfuse.cli.run import run

    run(config, steps=steps, seed=seed, device=device, out=out, resume=resume, as_json=as_json)


def generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A directory that `opfuse run` wrote.", show_default=False)],
    *,
    prompt: Annotated[str, typer.Option(help="What the text begins with.")] = "The ",
    length: Annotated[int, typer.Option(min=1, help="Bytes to write.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest byte each time.")] = 0.7,
    seed: Annotated[int, typer.Option(min=0, help="Of what is drawn.")] = 0,
    device: Annotated[str, typer.Option(help="Where to compute.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Write text with the model that a run has trained, under its recipe."""
    from opfuse.cli.generate import generate

    generate(run, prompt=prompt, length=length, temperature=temperature, seed=seed, device=device, as_json=as_json)


def study(
    subject: Annotated[Subject, typer.Argument(help="The field that is varied: backward_override, or keep.", show_default=False)],
    config: ConfigPath,
    *,
    steps: StepsOption = None,
    points: Annotated[int, typer.Option(min=1, help="Points of the run at which gradients are compared.")] = 6,
    seed: SeedOption = None,
    device: Device = "cpu",
    out: Annotated[Path | None, typer.Option(help="Where table and plot go.", show_default="runs/NAME")] = None,
    as_json: Json = False,
) -> None:
    """Compare gradients along a training run with the exact ones, under every override; or, with bytes saved, every keep.

    Studied are the built-in recipes that take a backward override, and the file's own.
    """
    from opfuse.cli.study import study

    study(config, subject=subject.value, steps=steps, points=points, seed=seed, device=device, out=out, as_json=as_json)


def explain(
    config: ConfigPath,
    *,
    why_not: Annotated[str | None, typer.Option(metavar="RULE", help="Only what fuses, and what became of this rule.")] = None,
    all_of_it: Annotated[bool, typer.Option("--all", help="Also each rule, product and saved value, place by place.")] = False,
    format: Annotated[GraphFormat, typer.Option(help="How to print.")] = GraphFormat.text,
    device: Annotated[str, typer.Option(help="Where to run the pipeline once.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Show what fuses, what does not, and why: one training call of the pipeline, forward and backward."""
    from opfuse.cli.explain import explain

    explain(config, why_not=why_not, format="json" if as_json else format.value, device=device, all_of_it=all_of_it)


def check(
    configs: Configs,
    format: Annotated[FindingFormat, typer.Option(help="How to print findings.")] = FindingFormat.text,
    values: Annotated[bool, typer.Option("--values", help="Also what each setting comes to, and where it was given.")] = False,
    as_json: Json = False,
) -> None:
    """Find what is wrong in configurations."""
    from opfuse.cli.check import check

    check(configs, format="json" if as_json else format.value, values=values)


def parity(
    model: Annotated[Path, typer.Argument(help="Weights as they are trained: a file or a directory.", show_default=False)],
    checkpoint: Annotated[Path, typer.Argument(help="Weights as others read them.", show_default=False)],
    *,
    source: Annotated[
        Path | None, typer.Option(help="Weights in high precision that both are casts of.", show_default=False)
    ] = None,
    cast: Annotated[bool, typer.Option("--cast", help="Plain weights of MODEL are cast in each call.")] = False,
    plain: Annotated[
        list[str] | None, typer.Option(help="With --cast: modules that are not.", show_default="heads and routers")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints tensor by tensor: what is quantized on which side, whose bytes differ, and by which scale rule."""
    from opfuse.cli.parity import parity

    parity(model, checkpoint, source=source, cast=cast, plain=plain, as_json=as_json)


def schema(
    policy: Annotated[bool, typer.Option("--policy", help="That of policies, which say how fuse_ converts a model.")] = False,
    as_json: Json = True,
) -> None:
    """Print the JSON schema of configurations."""
    from opfuse.cli.schema import schema

    schema(policy=policy)


def kernels(
    arch: Annotated[str, typer.Option(help="What to compile for, as sm_90a; by default this device, or sm_90a.")] = "",
    digest: Annotated[bool, typer.Option("--digest", help="Print a digest of all sources, and compile nothing.")] = False,
    as_json: Json = False,
) -> None:
    """List the CUDA kernels: sources, tolerances, registers and spilled bytes of the largest variant.

    Compiles every variant that the cache of kernels does not have, with or without a GPU: minutes, the first time.
    """
    from opfuse.cli.kernels import kernels

    kernels(arch, digest=digest, as_json=as_json)


class DoctorSection(enum.StrEnum):
    """What doctor tells of."""

    machine = "machine"
    environment = "environment"
    recipes = "recipes"
    matrix = "matrix"


def doctor(
    only: Annotated[DoctorSection | None, typer.Option(help="Of this alone.", show_default=False)] = None, as_json: Json = False
) -> None:
    """Tell what this machine runs natively, and what it emulates."""
    from opfuse.cli.doctor import doctor

    doctor(only=None if only is None else only.value, as_json=as_json)


_TRACE = "A file or directory that OPFUSE_TRACE or opfuse.dump() wrote"
TracePath = Annotated[Path | None, typer.Option(help=f"{_TRACE}; without it, the cache of compiled kernels.", show_default=False)]
OfTrace = Annotated[Path, typer.Argument(metavar="TRACE", help=f"{_TRACE}.", show_default=False)]
KeyDigits = Annotated[str, typer.Argument(metavar="KEY", help="Its first digits.", show_default=False)]


def cache_ls(trace: TracePath = None, as_json: Json = False) -> None:
    """List plans and why each was made, or compiled kernels."""
    from opfuse.cli.cache import ls

    ls(trace, as_json=as_json)


def cache_show(
    key: KeyDigits,
    trace: TracePath = None,
    only: Annotated[str, typer.Option(help="Values whose path begins so, such as env.recipe.", show_default=False)] = "",
    as_json: Json = False,
) -> None:
    """Show every value of a plan's key and where it came from, or what is known of a compiled kernel."""
    from opfuse.cli.cache import show

    show(key, trace, only=only, as_json=as_json)


def cache_diff(old: KeyDigits, new: KeyDigits, trace: OfTrace, as_json: Json = False) -> None:
    """Show in which values two keys differ, and where both came from."""
    from opfuse.cli.cache import diff

    diff(old, new, trace, as_json=as_json)


def cache_why(
    trace: OfTrace, key: Annotated[str | None, typer.Option(help="Of this plan alone.")] = None, as_json: Json = False
) -> None:
    """Tell why plans were made, whether misses repeat, and which rank disagrees with the others."""
    from opfuse.cli.cache import why

    why(trace, key, as_json=as_json)


def cache_verify(
    compiling: Annotated[bool, typer.Option("--recompile", help="Compile each kernel anew, and compare.")] = False,
    as_json: Json = False,
) -> None:
    """Check that compiled kernels are what was stored, and count those that nothing asks for any more."""
    from opfuse.cli.cache import verify

    verify(compiling=compiling, as_json=as_json)


def cache_prune(
    days: Annotated[float | None, typer.Option(min=0, help="Also what is older than so many days.", show_default=False)] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of it.")] = False,
    as_json: Json = False,
) -> None:
    """Remove compiled kernels that are damaged, or that nothing asks for any more."""
    from opfuse.cli.cache import prune

    prune(days=days, everything=everything, as_json=as_json)


RunPath = Annotated[
    Path, typer.Argument(metavar="RUN", help="A directory of opfuse run, a trace, or a configuration.", show_default=False)
]


def diff(
    old: RunPath,
    new: RunPath,
    *,
    localize: Annotated[bool, typer.Option("--localize", help="Run the step where losses part again, op by op.")] = False,
    bound: Annotated[float, typer.Option(min=0, help="What values may differ by, in parts of the largest.")] = 0.0,
    as_json: Json = False,
) -> None:
    """Tell what changed between two runs, from which step on losses differ, and the first op whose values do."""
    from opfuse.cli.diff import diff

    diff(old, new, localize=localize, bound=bound, as_json=as_json)


def report(
    subject: Annotated[Path, typer.Argument(metavar="CONFIG|RUN|TRACE", help="What to tell of.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="Where it goes.", show_default="NAME.html")] = None,
    as_json: Json = False,
) -> None:
    """Write one HTML file: graphs before and after, rules place by place, products, bytes saved, plans, values, environment."""
    from opfuse.cli.report import report

    report(subject, out=out, as_json=as_json)


def advise(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A configuration, or a config.json of transformers.", show_default=False)
    ],
    *,
    kind: Annotated[str, typer.Option(help="The kind of recipe.")] = "fp8_current",
    rows: Annotated[int, typer.Option(min=1, help="Tokens of a step.")] = 8192,
    as_json: Json = False,
) -> None:
    """Advise low precision or bf16 for each layer, by what was measured on an H200."""
    from opfuse.cli.advise import advise

    advise(model, kind=kind, rows=rows, as_json=as_json)


def init(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Where it goes.")] = Path("opfuse.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
    as_json: Json = False,
) -> None:
    """Write a configuration to begin with, with comments."""
    from opfuse.cli.init import init

    init(path, force=force, as_json=as_json)


GROUPS: Mapping[str, tuple[str, Mapping[str, Callable[..., None]]]] = {
    "cache": (
        "What plans and compiled kernels are kept, why they were made, and what may go.",
        {"ls": cache_ls, "show": cache_show, "diff": cache_diff, "why": cache_why, "verify": cache_verify, "prune": cache_prune},
    )
}
"""Commands of commands, by name, and what they are about."""

COMMANDS = (init, run, generate, study, explain, check, parity, schema, kernels, doctor, diff, report, advise)
"""In the order in which they are listed."""
