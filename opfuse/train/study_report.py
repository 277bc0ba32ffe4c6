"""What a study found: as plain values, as a Markdown table, as a plot."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from opfuse.formats import dtype_name
from opfuse.runtime.plans.trace import versions
from opfuse.train.files import can_plot, png, write
from opfuse.train.study import KEPT, OVERRIDE, Agreement, Key, Measurement, Study, mean, over_steps, recipes_of

FULL = "float32"
"""The dtype in which nothing but the casts of a recipe rounds visibly."""

NAMES: Mapping[str, str] = {OVERRIDE: "overrides", KEPT: "keep"}
"""What files, and the command line, call a study of a field."""

HEAD = ("recipe", "{field}", "saved", "exact gradient, {dtype}", "exact gradient, float32", "without a recipe", "cosine with it")


def to_dict(study: Study) -> dict[str, Any]:
    """The study as values that JSON has: every measurement, and the means over the steps. SQNR in dB."""
    return {
        "name": study.name,
        "config": study.config.path,
        "recipe": "none" if study.config.recipe is None else study.config.recipe.kind,
        "field": study.field,
        "dtype": dtype_of(study),
        "device": str(study.device),
        "steps": study.settings.steps,
        "seed": study.settings.seed,
        "points": sorted({one.step for one in study.measurements}),
        "loss_first": study.curve.losses[0],
        "loss_last": study.curve.last,
        "summary": summary(study),
        "refused": refused(study),
        "measurements": [_plain(one, study.field) for one in study.measurements],
        "seconds": study.seconds,
        "versions": versions(),
    }


def dtype_of(study: Study) -> str:
    """The name of the pipeline's dtype."""
    return dtype_name(study.config.dtype)


def _plain(one: Measurement, field: str) -> dict[str, Any]:
    return {
        "step": one.step,
        "dtype": one.dtype,
        "recipe": one.kind,
        field: one.override,
        "exact": one.exact._asdict(),
        "plain": None if one.plain is None else one.plain._asdict(),
    }


def refused(study: Study) -> list[dict[str, Any]]:
    """The settings that could not be measured at some point: the first such step, and why."""
    first: dict[tuple[str, Key], dict[str, Any]] = {}
    for one in study.refusals:
        values = {"step": one.step, "dtype": one.dtype, "recipe": one.kind, study.field: one.override}
        first.setdefault((one.dtype, (one.kind, one.override)), values | {"reason": one.reason})
    return list(first.values())


def summary(study: Study) -> list[dict[str, Any]]:
    """A row for no recipe, then for each recipe and override: means over the steps, in the pipeline's dtype and in fp32.

    None where the setting was refused, and where there is nothing to compare: no recipe with itself.
    """
    dtype = dtype_of(study)
    exact, full = (_means(study, each, lambda one: one.exact) for each in (dtype, FULL))
    plain = _means(study, dtype, lambda one: one.plain)
    columns = {"exact": exact, "exact_float32": full, "plain": plain}
    return [
        {"recipe": kind, study.field: value}
        | ({"saved_bytes": study.saved.get((kind, value))} if study.saved else {})
        | {name: means[kind, value]._asdict() if (kind, value) in means else None for name, means in columns.items()}
        for kind, value in study.keys
    ]


def _means(study: Study, dtype: str, of: Callable[[Measurement], Agreement | None]) -> dict[Key, Agreement]:
    return {key: mean(found) for key, found in over_steps(study, dtype, of).items()}


FIGURES = (("exact", "sqnr", ".1f"), ("exact_float32", "sqnr", ".1f"), ("plain", "sqnr", ".1f"), ("plain", "cosine", ".5f"))
"""What the last cells of a row show, and how: SQNR in dB, and the cosine with the gradient without a recipe."""


def rows(dtype: str, summary: Sequence[Mapping[str, Any]], field: str = OVERRIDE) -> list[list[str]]:
    """The cells of the table, its head first; without a second column of float32, and without bytes that nobody counted."""
    head = [cell.format(dtype=dtype, field=field) for cell in HEAD]
    base = next((row["saved_bytes"] for row in summary if row.get("saved_bytes")), 0)
    shown = [i for i, cell in enumerate(head) if cell not in head[:i] and (base or cell != "saved")]
    return [[line[i] for i in shown] for line in (head, *(list(_cells(row, field, base)) for row in summary))]


def _cells(row: Mapping[str, Any], field: str, base: int) -> Iterator[str]:
    kind, saved = row["recipe"], row.get("saved_bytes")
    yield f"`{kind}`" if kind else "none"
    yield f"`{row[field]}`" if kind else ""
    yield f"{saved / base:.0%}" if saved and base else "refused" if kind else ""
    for name, figure, form in FIGURES:
        yield format(row[name][figure], form) if row[name] else "refused" if kind else ""


def reasons(found: Iterable[Mapping[str, Any]], field: str = OVERRIDE) -> list[str]:
    """A line for each setting of :func:`refused` and each reason: in which dtypes, and why."""
    dtypes: dict[tuple[str, str, str], list[str]] = {}
    for one in found:
        dtypes.setdefault((one["recipe"], str(one[field]), one["reason"]), []).append(one["dtype"])
    return [f"{kind}, {value}, in {' and '.join(names)}: {reason}" for (kind, value, reason), names in dtypes.items()]


def markdown(found: Mapping[str, Any]) -> str:
    """The table of a study as :func:`to_dict` gives it."""
    head, *body = rows(found["dtype"], found["summary"], found.get("field", OVERRIDE))
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_study(study: Study, directory: Path) -> list[Path]:
    """Write ``overrides.json``, ``overrides.md`` and, with matplotlib, ``overrides.png`` into ``directory``; or ``keep.*``."""
    found = to_dict(study)
    values, table, plot = (directory / f"{NAMES[study.field]}.{suffix}" for suffix in ("json", "md", "png"))
    write(values, study_text(study).encode())
    notes = "".join(f"- refused: {reason}\n" for reason in reasons(found["refused"], study.field))
    write(table, ("\n\n".join(filter(None, (_title(found), markdown(found), notes.rstrip()))) + "\n").encode())
    if not can_plot():
        return [values, table]
    return [values, table, write(plot, _plot(study))]


def study_text(study: Study) -> str:
    """What the file of JSON holds."""
    return json.dumps(to_dict(study), indent=1, allow_nan=False) + "\n"


def _title(found: Mapping[str, Any]) -> str:
    points = ", ".join(map(str, found["points"]))
    return (
        f"Gradients of `{found['name']}` on {found['device']}: means over points after {points} updates. SQNR in dB, against\n"
        "the exact gradient of the forward pass that ran, straight through every rounding, and against the gradient without a\n"
        "recipe." + (" Saved: bytes kept for the backward pass, of those without a recipe." if found["field"] == KEPT else "")
    )


# -- plot ----------------------------------------------------------------------------------------------------------------

STYLES: dict[str | None, str] = {
    None: "-",
    "dequantized": "--",
    "high_precision": ":",
    "all": "-.",
    "recompute": "--",
    "quantized": ":",
}


def _colors(study: Study) -> dict[str | None, dict[str, Any]]:
    """Earlier recipes have broader lines, so that equal figures show under each other."""
    kinds = tuple(recipes_of(study.config))
    styles: dict[str | None, dict[str, Any]] = {None: {"color": "gray"}}
    styles |= {kind: {"color": f"C{i}", "linewidth": 4 - 2.5 * i / len(kinds)} for i, kind in enumerate(kinds)}
    return styles


def _plot(study: Study) -> bytes:
    """A PNG: SQNR over the steps: against the exact gradient in both dtypes, and against the gradient without a recipe."""
    from matplotlib.figure import Figure

    dtype = dtype_of(study)
    panels: Sequence[tuple[str, str, Callable[[Measurement], Agreement | None]]] = (
        (f"exact gradient, {dtype}", dtype, lambda one: one.exact),
        ("exact gradient, float32", FULL, lambda one: one.exact),
        (f"gradient without a recipe, {dtype}", dtype, lambda one: one.plain),
    )
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    steps, colors = sorted({one.step for one in study.measurements}), _colors(study)
    for axes, (title, of_dtype, of) in zip(figure.subplots(1, len(panels)), panels):
        series = over_steps(study, of_dtype, of)
        for (kind, override), found in series.items():
            style: dict[str, Any] = {"linestyle": STYLES[override], **colors[kind]}
            label = f"{kind}, {override}" if kind else "no recipe"
            axes.plot(steps, [figures.sqnr for figures in found], marker="o", markersize=3, label=label, **style)
        axes.set(title=title, xlabel="step")
    figure.axes[0].set_ylabel("SQNR, dB")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8)
    return png(figure)
