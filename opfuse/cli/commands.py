"""The commands: what each takes, and what its help says. What does the work is imported when a command runs, not for its help."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer

_CONFIG = "A YAML file, or the name of a configuration of the package, such as quickstart."
ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help=_CONFIG, show_default=False)]
_TRANSFORMERS = "the folder of a transformers model, or its config.json."
StepsOption = Annotated[int | None, typer.Option(min=1, help="Number of steps; replaces the file's.", show_default=False)]
SeedOption = Annotated[int | None, typer.Option(min=0, help="Seed; replaces the file's.", show_default=False)]
_AUTO = "auto: a GPU if there is one."
Device = Annotated[str, typer.Option(help=f"Device to train on; {_AUTO}")]
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


class ReportFormat(enum.StrEnum):
    """What a report is written as."""

    html = "html"
    perfetto = "perfetto"


class Subject(enum.StrEnum):
    """What is studied."""

    overrides = "overrides"
    keep = "keep"
    layers = "layers"


def run(
    config: ConfigPath,
    *,
    steps: StepsOption = None,
    seed: SeedOption = None,
    device: Device = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Directory for report, plot and checkpoints.", show_default="runs/NAME")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoints in the directory.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Begin anew, and replace another run in the directory.")] = False,
    as_json: Json = False,
) -> None:
    """Train a configuration's pipeline with and without its recipe, and report losses and what fused."""
    if resume and force:
        raise typer.BadParameter("--resume goes on with the run in the directory, --force replaces it; choose one")
    from opfuse.cli.run import run

    run(config, steps=steps, seed=seed, device=device, out=out, resume=resume, force=force, as_json=as_json)


def study(
    subject: Annotated[
        Subject, typer.Argument(help="The field to vary, backward_override or keep; or layers of a model.", show_default=False)
    ],
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help=f"{_CONFIG} layers: {_TRANSFORMERS}", show_default=False)],
    *,
    steps: StepsOption = None,
    points: Annotated[int, typer.Option(min=1, help="How many points of the run to compare gradients at.")] = 6,
    kind: Annotated[str, typer.Option(help="layers: the kind of recipe.")] = "fp8_current",
    plain: Annotated[
        int | None, typer.Option(min=0, help="layers: how many stay plain in the policy.", show_default="a tenth")
    ] = None,
    seed: SeedOption = None,
    device: Device = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Directory for table and plot, or for the policy.", show_default="runs/NAME")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure how far gradients are from exact ones along a training run, under every backward_override or every keep.

    It covers the built-in recipes that take a backward override, and the file's own. layers: rank the layers of a model by what
    quantizing each alone costs, on text that the model itself says, and write a policy for opfuse.load_policy.
    """
    from opfuse.cli.study import study, study_layers

    if subject is Subject.layers:
        study_layers(config, kind=kind, plain=plain, seed=seed, device=device, out=out, as_json=as_json)
        return
    study(config, subject=subject.value, steps=steps, points=points, seed=seed, device=device, out=out, as_json=as_json)


def explain(
    config: ConfigPath,
    *,
    why_not: Annotated[
        str | None, typer.Option(metavar="RULE", help="Show why this rule did or did not fire, and what fuses.")
    ] = None,
    all_of_it: Annotated[
        bool, typer.Option("--all", help="Also show every rule at every place, every product and saved value.")
    ] = False,
    format: Annotated[GraphFormat, typer.Option(help="Output format.")] = GraphFormat.text,
    device: Annotated[str, typer.Option(help="Device to run the pipeline on, once.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Show what fuses, what does not, and why, in one training call of a configuration's pipeline."""
    from opfuse.cli.explain import explain

    explain(config, why_not=why_not, format="json" if as_json else format.value, device=device, all_of_it=all_of_it)


def check(
    configs: Annotated[list[Path] | None, typer.Argument(metavar="CONFIG...", help=_CONFIG, show_default=False)] = None,
    *,
    format: Annotated[FindingFormat, typer.Option(help="Output format.")] = FindingFormat.text,
    values: Annotated[bool, typer.Option("--values", help="Also show every setting and where it was given.")] = False,
    rule: Annotated[
        str | None, typer.Option(metavar="MODULE:RULE", help="Run a fusion rule of yours against its ops.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help=f"Device to run --rule on; {_AUTO}")] = "auto",
    as_json: Json = False,
) -> None:
    """Report all errors in configurations, with line and column; or compare a fusion rule with the ops that it takes."""
    if bool(configs) == (rule is not None):
        raise typer.BadParameter("name a CONFIG, or a fusion rule by --rule MODULE:RULE, not both")
    if rule is None:
        from opfuse.cli.check import check

        check(configs or [], format="json" if as_json else format.value, values=values)
        return
    if values or format is FindingFormat.github:
        raise typer.BadParameter("--rule prints text, or JSON under --json")
    from opfuse.cli.check_rule import check_rule

    check_rule(rule, device=device, as_json=as_json or format is FindingFormat.json)


def parity(
    model: Annotated[Path, typer.Argument(help="Weights as trained: a file or a directory.", show_default=False)],
    checkpoint: Annotated[Path, typer.Argument(help="Weights to compare with: a file or a directory.", show_default=False)],
    *,
    source: Annotated[
        Path | None, typer.Option(help="High-precision weights from which both were cast.", show_default=False)
    ] = None,
    cast: Annotated[bool, typer.Option("--cast", help="MODEL casts its high-precision weights in each call.")] = False,
    plain: Annotated[
        list[str] | None, typer.Option(help="With --cast: modules that are not cast.", show_default="heads and routers")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints tensor by tensor: which tensors are quantized, which bytes differ, and by which scale rule."""
    from opfuse.cli.parity import parity

    parity(model, checkpoint, source=source, cast=cast, plain=plain, as_json=as_json)


def schema(
    policy: Annotated[bool, typer.Option("--policy", help="Schema of policies, which say how fuse_ converts a model.")] = False,
    as_json: Json = True,
) -> None:
    """Print the JSON schema of configurations."""
    from opfuse.cli.output import echo_json
    from opfuse.config.schema import configuration_schema, policy_schema

    echo_json(policy_schema() if policy else configuration_schema())


def kernels(
    digest: Annotated[bool, typer.Option("--digest", help="Print a digest of the code of all kernels alone.")] = False,
    as_json: Json = False,
) -> None:
    """List the CUDA kernels: source, definition, tolerance, and what this machine has compiled of each source."""
    from opfuse.cli.kernels import kernels

    kernels(digest=digest, as_json=as_json)


class DoctorSection(enum.StrEnum):
    """What doctor tells of."""

    machine = "machine"
    torch = "torch"
    environment = "environment"
    wrong = "wrong"
    recipes = "recipes"
    matrix = "matrix"


def doctor(
    only: Annotated[DoctorSection | None, typer.Option(help="Show this section alone.", show_default=False)] = None,
    certified: Annotated[
        bool, typer.Option("--certify", help="Try every native product and kernel on this GPU, and time products beside bf16.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show versions and hardware, and which recipes run natively or emulated here."""
    from opfuse.cli.doctor import doctor

    if certified:
        from opfuse.cli.certify import certify

        raise typer.Exit(0 if certify(as_json=as_json) else 1)
    doctor(only=None if only is None else only.value, as_json=as_json)


_TRACE = "A file or directory that OPFUSE_TRACE or opfuse.dump() wrote"
TracePath = Annotated[Path | None, typer.Option(help=f"{_TRACE}; without it, the cache of compiled kernels.", show_default=False)]
OfTrace = Annotated[Path, typer.Argument(metavar="TRACE", help=f"{_TRACE}.", show_default=False)]
KeyDigits = Annotated[str, typer.Argument(metavar="KEY", help="The first digits of the key.", show_default=False)]


def cache_ls(trace: TracePath = None, as_json: Json = False) -> None:
    """List plans and why each was made; without --trace, compiled kernels."""
    from opfuse.cli.cache import ls

    ls(trace, as_json=as_json)


def cache_show(
    key: KeyDigits,
    trace: TracePath = None,
    only: Annotated[
        str, typer.Option(help="Only values whose path begins like this, such as env.recipe.", show_default=False)
    ] = "",
    as_json: Json = False,
) -> None:
    """Show every value of a plan's key and its source; without --trace, a compiled kernel."""
    from opfuse.cli.cache import show

    show(key, trace, only=only, as_json=as_json)


def cache_diff(old: KeyDigits, new: KeyDigits, trace: OfTrace, as_json: Json = False) -> None:
    """Show the values in which two keys differ, with their sources."""
    from opfuse.cli.cache import diff

    diff(old, new, trace, as_json=as_json)


def cache_why(
    trace: OfTrace, key: Annotated[str | None, typer.Option(help="Only the plan with this key.")] = None, as_json: Json = False
) -> None:
    """Explain why plans were made, which misses repeat, and which rank disagrees with the others."""
    from opfuse.cli.cache import why

    why(trace, key, as_json=as_json)


def cache_verify(
    compiling: Annotated[bool, typer.Option("--recompile", help="Recompile each kernel, and compare.")] = False,
    as_json: Json = False,
) -> None:
    """Check that compiled kernels are intact, and count those that are no longer used."""
    from opfuse.cli.cache import verify

    verify(compiling=compiling, as_json=as_json)


def cache_prune(
    days: Annotated[
        float | None, typer.Option(min=0, help="Also remove what is older than this many days.", show_default=False)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove everything.")] = False,
    as_json: Json = False,
) -> None:
    """Remove compiled kernels that are damaged or no longer used."""
    from opfuse.cli.cache import prune

    prune(days=days, everything=everything, as_json=as_json)


RunPath = Annotated[
    Path, typer.Argument(metavar="RUN", help="A directory of opfuse run, a trace, or a configuration.", show_default=False)
]


def diff(
    old: RunPath,
    new: RunPath,
    *,
    localize: Annotated[bool, typer.Option("--localize", help="Rerun the step where losses diverge, op by op.")] = False,
    bound: Annotated[float, typer.Option(min=0, help="Largest difference to ignore, relative to the largest value.")] = 0.0,
    as_json: Json = False,
) -> None:
    """Show what changed between two runs, the first step whose losses differ, and the first op whose values do."""
    from opfuse.cli.diff import diff

    diff(old, new, localize=localize, bound=bound, as_json=as_json)


def report(
    subject: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG|RUN|TRACE", help="A configuration, a directory of opfuse run, or a trace.", show_default=False
        ),
    ],
    *,
    out: Annotated[Path | None, typer.Option(help="File to write.", show_default="NAME.html")] = None,
    format: Annotated[
        ReportFormat, typer.Option(help="html; perfetto: a trace, as ui.perfetto.dev reads it.")
    ] = ReportFormat.html,
    as_json: Json = False,
) -> None:
    """Write an HTML report: training curves, values by layer, fusions, graphs, products, memory, plans over time, environment."""
    from opfuse.cli.report import report

    report(subject, out=out, format=format.value, as_json=as_json)


_BUDGET = "such as 80GiB"


def advise(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A configuration, or a config.json of transformers.", show_default=False)
    ],
    *,
    kind: Annotated[str, typer.Option(help="The kind of recipe.")] = "fp8_current",
    rows: Annotated[int, typer.Option(min=1, help="Tokens of a step.")] = 8192,
    budget: Annotated[
        str | None,
        typer.Option(
            help=f"Memory of a GPU, {_BUDGET}: also say what to change to fit, as opfuse memory does.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Recommend low precision or bf16 for each layer, by speeds measured on an H200; and what to change to fit in memory."""
    from opfuse.cli.advise import advise

    advise(model, kind=kind, rows=rows, budget=budget, as_json=as_json)


class CheckpointedParts(enum.StrEnum):
    """What runs again in the backward pass."""

    none = "none"
    layers = "layers"


class LossForm(enum.StrEnum):
    """How a model computes its loss."""

    own = "own"
    fused = "fused"


def memory(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="The config.json of a transformers model, or its folder.", show_default=False)
    ],
    *,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a step on each GPU.")] = 1,
    sequence: Annotated[int, typer.Option(min=1, help="Tokens of each sequence.")] = 8192,
    recipe: Annotated[str, typer.Option(help="The kind of recipe; none: bf16.")] = "none",
    keep: Annotated[str | None, typer.Option(help="What the recipe keeps for the backward pass.", show_default=False)] = None,
    policy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A YAML file with recipe and policy, in their place.", show_default=False)
    ] = None,
    optimizer: Annotated[
        str, typer.Option(help="none, sgd, sgd_momentum, adamw, adamw_foreach, adamw_masters or adamw8bit.")
    ] = "adamw",
    world: Annotated[int, typer.Option(min=1, help="GPUs over which FSDP2 shards.")] = 1,
    checkpointing: Annotated[CheckpointedParts, typer.Option(help="What is recomputed.")] = CheckpointedParts.none,
    loss: Annotated[LossForm, typer.Option(help="fused: without the logits of all tokens.")] = LossForm.own,
    main_grads: Annotated[bool, typer.Option("--main-grads", help="Sum gradients in fp32 buffers.")] = False,
    budget: Annotated[
        str | None, typer.Option(help=f"Memory of a GPU, {_BUDGET}: say what to change to fit.", show_default=False)
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Also write a page to this file.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Estimate what a training step of a transformers model in bf16 takes of each GPU's memory; needs no GPU."""
    from opfuse.cli.memory import memory

    how = {"checkpointing": checkpointing.value, "loss": loss.value, "main_grads": main_grads, "budget": budget}
    chosen = {"recipe": recipe, "keep": keep, "policy": policy}
    step = {"batch": batch, "sequence": sequence, "optimizer": optimizer, "world": world, **chosen, **how}
    memory(model, html=html, as_json=as_json, **step)


def init(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.")] = Path("opfuse.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    as_json: Json = False,
) -> None:
    """Write a commented configuration to start from."""
    from opfuse.cli.init import init

    init(path, force=force, as_json=as_json)


GROUPS: Mapping[str, tuple[str, Mapping[str, Callable[..., None]]]] = {
    "cache": (
        "Explain why plans were made; list, check and remove compiled kernels.",
        {"ls": cache_ls, "show": cache_show, "diff": cache_diff, "why": cache_why, "verify": cache_verify, "prune": cache_prune},
    )
}
"""Commands of commands, by name, and what they are about."""

COMMANDS = (init, run, study, explain, check, parity, schema, kernels, doctor, diff, report, advise, memory)
"""In the order in which they are listed."""
