"""What a comparison found: as plain values, as a JSON file, as a plot."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from opfuse.recipes import Recipe
from opfuse.runtime.plans.trace import process, versions
from opfuse.runtime.plans.written import sealed
from opfuse.train.comparison import Comparison
from opfuse.train.data import Corpus
from opfuse.train.files import PLOT, REPORT, VALUES, can_plot, png, write
from opfuse.train.loop import Curve

SMOOTHING = 0.9
"""Decay of the running mean that the plot draws through the losses."""


def bits(nats: float) -> float:
    """Bits per byte."""
    return nats / math.log(2)


def to_dict(result: Comparison) -> dict[str, Any]:
    """The result as values that JSON has. Losses are in nats per byte where the name does not say bits.

    What is said of the baseline is None without one. A difference is relative to the baseline.
    """
    run, base, recipe, backend = result.run, result.baseline, result.config.recipe, result.backend
    return {
        "name": result.name,
        "config": result.config.path,
        "config_sha256": result.config.sha256,
        "recipe": "none" if recipe is None else recipe.kind,
        "recipe_fields": recipe_fields(recipe),
        "dtype": result.labels[1],
        "device": str(result.device),
        "backend": backend.status,
        "backend_reason": backend.reason,
        "steps": result.settings.steps,
        "seed": result.settings.seed,
        "settings": result.settings.model_dump(),
        **{name: of(run) for name, of in FIGURES.items()},
        **{f"baseline_{name}": None if base is None else of(base) for name, of in FIGURES.items()},
        "loss_difference": None if base is None else run.last / base.last - 1,
        "validation_difference": None if base is None else run.validation[-1][1] / base.validation[-1][1] - 1,
        "fusions": [rule for rule, _, count in run.fusions for _ in range(count)],
        "fusion_counts": [{"rule": rule, "direction": direction, "count": count} for rule, direction, count in run.fusions],
        "plan_cache": run.cache._asdict(),
        "seconds": run.seconds + (0.0 if base is None else base.seconds),
        "data": _data(result.corpus),
        "versions": versions(),
        "process": {name: value for name, value in process().items() if name in ("environment", "settings")},
        "plans": list(run.plans),
    }


FIGURES: dict[str, Callable[[Curve], float]] = {
    "loss_first": lambda curve: curve.losses[0],
    "loss_last": lambda curve: curve.last,
    "loss_last_bits": lambda curve: bits(curve.last),
    "loss_last_steps": lambda curve: curve.last_steps,
    "validation_loss_first": lambda curve: curve.validation[0][1],
    "validation_loss": lambda curve: curve.validation[-1][1],
    "validation_loss_bits": lambda curve: bits(curve.validation[-1][1]),
    "run_seconds": lambda curve: curve.seconds,
}
"""What the report says of each run."""


def recipe_fields(recipe: Recipe | None) -> dict[str, Any]:
    """The fields of a recipe as values that JSON has; none without one."""
    return {} if recipe is None else {name: _plain(value) for name, value in recipe.values().items()}


def _plain(value: Any) -> int | float | str | None:
    return value if isinstance(value, int | float | str | None) else str(value)


def _data(corpus: Corpus) -> dict[str, Any]:
    return {
        "name": corpus.name,
        "sha256": corpus.sha256,
        "train_bytes": len(corpus.train),
        "validation_bytes": len(corpus.validation),
        "unigram_entropy": corpus.unigram_entropy,
    }


def write_report(result: Comparison, directory: Path) -> Path:
    """Write ``report.json`` into ``directory``: the result, and the losses of every step."""
    return write(directory / REPORT, report_text(result).encode())


def write_values(result: Comparison, directory: Path) -> Path | None:
    """Write what casts did into ``directory`` as ``values.jsonl``; None where nobody looked."""
    if not result.watched:
        return None
    lines = "".join(sealed(record) + "\n" for record in result.watched)
    return write(directory / VALUES, lines.encode())


def report_text(result: Comparison) -> str:
    """What ``report.json`` holds. measured: of each curve, in their order."""
    curves = [{"label": label, "losses": c.losses, "validation": c.validation} for label, c in _named(result).items()]
    measured = [curve.measured for curve in _named(result).values()]
    return sealed({**to_dict(result), "curves": curves, "measured": measured}, indent=1) + "\n"


def write_plot(result: Comparison, directory: Path) -> Path | None:
    """Draw the losses into ``directory`` as ``loss.png``; None without matplotlib, which is an extra of the package."""
    if not can_plot():
        return None
    return write(directory / PLOT, _plot(result))


def _named(result: Comparison) -> dict[str, Curve]:
    curves = {result.labels[0]: result.run}
    return curves if result.baseline is None else {**curves, f"{result.labels[1]}, no recipe": result.baseline}


def _plot(result: Comparison) -> bytes:
    """A PNG: the losses above; below, by how much those of the recipe differ from those without it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    for number, (label, curve) in enumerate(_named(result).items()):
        style: dict[str, Any] = {"color": f"C{number}", "linestyle": ("-", "--")[number]}
        for (name, marker), series in zip((("training, running mean", ""), ("validation", "os"[number])), _series(curve)):
            above.plot(*series, marker=marker, markersize=4, label=f"{name}, {label}", **style)
    above.axhline(
        result.corpus.unigram_entropy, color="gray", linewidth=0.8, linestyle=":", label=f"{result.corpus.unit} frequencies alone"
    )
    above.set(ylabel=f"nats per {result.corpus.unit}", title=f"{result.name}: {result.backend.status} on {result.device}")
    above.legend()
    if result.baseline is not None:
        for (steps, losses), (_, others), marker in zip(_series(result.run), _series(result.baseline), ("", "o")):
            difference = [100 * (loss / other - 1) for loss, other in zip(losses, others)]
            below.plot(steps, difference, marker=marker, markersize=4, color="C0")
    below.axhline(0, color="gray", linewidth=0.8, linestyle=":")
    below.set(xlabel="step", ylabel="difference, %")
    return png(figure)


def _series(curve: Curve) -> tuple[tuple[Sequence[int], Sequence[float]], ...]:
    """Steps and losses of training, smoothed, and of the evaluations."""
    steps, losses = zip(*curve.validation)
    return (range(1, len(curve.losses) + 1), smoothed(curve.losses)), (steps, losses)


def smoothed(losses: Sequence[float]) -> list[float]:
    """The running mean of ``losses`` with decaying weights that sum to one at every step."""
    sums = accumulate(losses, lambda total, loss: SMOOTHING * total + (1 - SMOOTHING) * loss, initial=0.0)
    return [total / (1 - SMOOTHING**step) for step, total in enumerate(sums) if step]
