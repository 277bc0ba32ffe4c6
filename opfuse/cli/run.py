"""``opfuse run``: train a configuration's pipeline beside the same pipeline in high precision, and report."""

from __future__ import annotations

import os
import signal
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import typer
from rich.table import Table

from opfuse.cli.output import echo, echo_json, error
from opfuse.cli.progress import reporter
from opfuse.cli.results import device_for, directory_for, print_files, show, write_or_salvage
from opfuse.config import load
from opfuse.errors import number_of
from opfuse.train import Checkpoints, Comparison, Interrupted, compare, to_dict, write_plot, write_report, write_values
from opfuse.train.comparison import data_of, labels, overridden
from opfuse.train.files import PLOT, REPORT, VALUES, sole_writer
from opfuse.train.report import report_text
from opfuse.train.runs import repeats

WIDTH = 100
"""Characters of a plan miss's reason that are printed; the report has all of it."""

INTERRUPTED = 130
"""What the command ends with after Ctrl-C, as shells have it."""


def run(
    config: Path,
    *,
    steps: int | None,
    seed: int | None,
    device: str,
    out: Path | None,
    resume: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Train, and write the report; None: what the configuration says, or ``runs/NAME``.

    OutputError if another run is there, which neither goes on (``resume``) nor may be replaced (``force``).
    """
    chosen = load(config)
    data_of(chosen)  # refuses a file without data before anything is written
    place, directory = device_for(device), directory_for(chosen, out)
    text = Path(chosen.path).read_text(encoding="utf-8")
    settings = overridden(chosen.train, steps=steps, seed=seed)
    same = {"configuration": text, "steps": str(settings.steps), "seed": str(settings.seed), "device": place.type}
    checkpoints = Checkpoints(directory, same, resume, report=error)
    with sole_writer(directory / REPORT):
        if not (resume or force) and repeats(directory, chosen, settings, place):
            error(f"{directory} holds this run already; it is repeated, and replaced")
        for name in (REPORT, VALUES, PLOT) if force else ():
            (directory / name).unlink(missing_ok=True)
        checkpoints.begin(text.encode(), labels(chosen))
        try:
            with reporter() as on_step, asked_to_stop() as stop:
                result = compare(
                    chosen, steps=steps, seed=seed, device=place, on_step=on_step, checkpoints=checkpoints, stop=stop
                )
        except Interrupted as stopped:
            error(f"{stopped}; what there is lies in {directory}, and --resume goes on with it")
            raise typer.Exit(INTERRUPTED) from None
        if as_json:
            echo_json(to_dict(result))
        else:
            print_comparison(result)
        print_files(write_or_salvage(partial(write, result), directory, partial(report_text, result)), as_json=as_json)


@contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Tells whether Ctrl-C, or the signal to end, came; the second one ends the process at once."""
    if threading.current_thread() is not threading.main_thread():  # no other may set handlers
        yield lambda: False
        return
    asked = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handler(number: int, frame: object) -> None:
        asked.set()
        os.write(2, b"stopping after this step; once more stops at once\n")  # no stream: one may be in use just now
        for each, old in before.items():
            signal.signal(each, old)

    for number in before:
        signal.signal(number, handler)
    try:
        yield asked.is_set
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def write(result: Comparison, directory: Path) -> list[Path]:
    """Report and plot; no plot without matplotlib."""
    return [path for make in (write_report, write_values, write_plot) if (path := make(result, directory)) is not None]


def print_comparison(result: Comparison) -> None:
    """The table of losses, and what they stand beside."""
    steps, samples = number_of(result.settings.steps, "step"), number_of(result.settings.batch_size, "sample")
    echo(f"{result.name}: {steps} of {samples} on {result.device}")
    show(table(result))
    for line in notes(result):
        echo(line)


ROWS = (
    ("training loss, first step", "loss_first"),
    ("training loss, mean of last {loss_last_steps}", "loss_last"),
    ("  in bits", "loss_last_bits"),
    ("validation loss", "validation_loss"),
    ("  in bits", "validation_loss_bits"),
)
"""Rows of the table: what they say, and the report's name of it."""


def table(result: Comparison) -> Table:
    """Losses and seconds of both runs, and by how much the losses of the recipe differ."""
    found = to_dict(result)
    prefixes = [""] if result.baseline is None else ["", "baseline_"]
    drawn = Table(f"nats per {result.corpus.unit}", box=None, pad_edge=False)
    for label in (*result.labels, "difference")[: 3 if result.baseline else 1]:
        drawn.add_column(label, justify="right")
    for text, key in ROWS:
        values = [found[prefix + key] for prefix in prefixes]
        differences = [f"{found[key] / value - 1:+.2%}" for value in values[1:]]
        drawn.add_row(text.format(**found), *(f"{value:.4f}" for value in values), *differences)
    drawn.add_row("seconds", *(f"{found[prefix + 'run_seconds']:.1f}" for prefix in prefixes))
    return drawn


def notes(result: Comparison) -> Iterator[str]:
    """What the losses stand beside: the text, the backend, what fused, the plan cache."""
    corpus, cache = result.corpus, result.run.cache
    for label, curve in zip(result.labels, filter(None, (result.run, result.baseline))):
        if curve.last > curve.losses[0]:
            yield f"diverged {label}: its loss rose from {curve.losses[0]:.3f} to {curve.last:.3f}; lower train.learning_rate"
    unit, entropy = corpus.unit, corpus.unigram_entropy
    yield f"text     {corpus.name}, {len(corpus.train)} {unit}s; {unit} frequencies alone give {entropy:.2f}"
    yield f"backend  {result.backend}"
    for direction in ("forward", "backward", "joint"):
        if found := [f"{rule} ×{count}" for rule, side, count in result.run.fusions if side == direction]:
            yield f"{direction:<8} {', '.join(found)}"
    yield f"plans    {cache.plans} alive, {number_of(cache.hits, 'hit')}, {number_of(cache.misses, 'miss')}"
    yield f"         last miss: {textwrap.shorten(cache.last_miss or 'none', WIDTH, placeholder=' …')}"
