"""The commands: what each takes, and what its help says. What does the work is imported when a command runs, not for its help."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

_CONFIG = "A file, or an example of the package by name, such as quickstart."
Config = Annotated[Path, typer.Argument(metavar="CONFIG", help=_CONFIG, show_default=False)]
Configs = Annotated[list[Path], typer.Argument(metavar="CONFIG...", help=_CONFIG, show_default=False)]
Steps = Annotated[int | None, typer.Option(min=1, help="Steps, instead of the file's.", show_default=False)]
Seed = Annotated[int | None, typer.Option(min=0, help="Seed, instead of the file's.", show_default=False)]
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


def run(
    config: Config,
    *,
    steps: Steps = None,
    seed: Seed = None,
    device: Device = "cpu",
    out: Annotated[Path | None, typer.Option(help="Where report and plot go.", show_default="runs/NAME")] = None,
    as_json: Json = False,
) -> None:
    """Train the pipeline of a configuration, beside the same pipeline without a recipe, and report what fused."""
    from opfuse.cli.run import run

    run(config, steps=steps, seed=seed, device=device, out=out, as_json=as_json)


def study(
    subject: Annotated[Subject, typer.Argument(help="overrides: how far gradients are from the exact ones.", show_default=False)],
    config: Config,
    *,
    steps: Steps = None,
    points: Annotated[int, typer.Option(min=1, help="Points of the run at which gradients are compared.")] = 6,
    seed: Seed = None,
    device: Device = "cpu",
    out: Annotated[Path | None, typer.Option(help="Where table and plot go.", show_default="runs/NAME")] = None,
    as_json: Json = False,
) -> None:
    """Compare gradients along a training run with the exact ones, under every override.

    Studied are the built-in recipes that take a backward override, and the file's own.
    """
    from opfuse.cli.study import study

    study(config, steps=steps, points=points, seed=seed, device=device, out=out, as_json=as_json)


def explain(
    config: Config,
    why_not: Annotated[str | None, typer.Option(metavar="RULE", help="Only what fuses, and what became of this rule.")] = None,
    format: Annotated[GraphFormat, typer.Option(help="How to print.")] = GraphFormat.text,
    device: Annotated[str, typer.Option(help="Where to run the pipeline once.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Show what fuses, what does not, and why: one training call of the pipeline, forward and backward."""
    from opfuse.cli.explain import explain

    explain(config, why_not=why_not, format="json" if as_json else format.value, device=device)


def check(
    configs: Configs,
    format: Annotated[FindingFormat, typer.Option(help="How to print findings.")] = FindingFormat.text,
    as_json: Json = False,
) -> None:
    """Find what is wrong in configurations."""
    from opfuse.cli.check import check

    check(configs, format="json" if as_json else format.value)


def schema(as_json: Json = True) -> None:
    """Print the JSON schema of configurations."""
    from opfuse.cli.schema import schema

    schema()


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


def doctor(as_json: Json = False) -> None:
    """Tell what this machine runs natively, and what it emulates."""
    from opfuse.cli.doctor import doctor

    doctor(as_json=as_json)


COMMANDS = (run, study, explain, check, schema, kernels, doctor)
"""In the order in which they are listed."""
