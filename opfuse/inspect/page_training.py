"""Sections of a page on training: figures over steps, and what casts did to values, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from opfuse.formats import ROWWISE
from opfuse.inspect.alike import alike, counted, starred
from opfuse.inspect.charts import PageChart, PageScale, PageStrip, Points
from opfuse.inspect.page import Cell, PageBytes, PageFold, PagePart, PageSection, PageTable, PageText, rounded
from opfuse.inspect.trace import StepLine, Trace

NAMED = {"loss": "Loss", "learning_rate": "Learning rate"}
"""Titles of figures that come first; others go by their names."""

TIME, MEMORY = "Time of a step", "Memory"
ORDINARY, LOOKED_AT = "ordinary steps", "steps whose casts were looked at"
"""Lines of times: the latter run op by op."""


@dataclass(frozen=True)
class PageCharts:
    """Charts beside each other, as many as fit."""

    charts: Sequence[PageChart]

    def html(self, name: str) -> Iterator[str]:
        yield '<div class="charts">'
        for number, chart in enumerate(self.charts):
            yield from chart.html(f"{name}-{number}")
        yield "</div>"


LINES = 4
"""Runs that charts draw."""


class TrainedRun(NamedTuple):
    """The steps of a rank or of another run, each as the last process that made it recorded it. every: which are looked at."""

    label: str
    steps: dict[int, StepLine]
    every: int

    def points(self, of: Callable[[StepLine], float | None]) -> Points:
        """A figure over the steps that have it."""
        return [(step, value) for step, line in self.steps.items() if (value := of(line)) is not None]


def trained_runs(traces: Iterable[Trace]) -> list[TrainedRun]:
    """The ranks that recorded steps."""
    found: dict[int, TrainedRun] = {}
    for trace in traces:
        every = trace.models[-1].every if trace.models else 0
        run = found.setdefault(trace.process.rank, TrainedRun(f"rank {trace.process.rank}", {}, every))
        run.steps.update((line.step, line) for line in trace.steps)
    return [run._replace(steps=dict(sorted(run.steps.items()))) for run in found.values() if run.steps]


def training_facts(runs: Sequence[TrainedRun]) -> dict[str, Cell]:
    """What training came to, of the first run."""
    if not runs:
        return {}
    lines = [*runs[0].steps.values()]
    losses = [line.figures["loss"] for line in lines if "loss" in line.figures]
    times = [line.ms for line in lines if line.ms is not None and not _is_looked_at(line.step, runs[0].every)]
    peak = max(line.peak for line in lines)
    facts: dict[str, Cell | bool] = {
        "steps": lines[-1].step,
        "loss": bool(losses) and f"{rounded(losses[0])} at first, {rounded(losses[-1])} at last",
        "a step takes": bool(times) and f"{rounded(median(times))} ms (median)",
        "peak of memory": bool(peak) and PageBytes(peak),
    }
    return {name: told for name, told in facts.items() if told is not False}


def training_charts(runs: Sequence[TrainedRun]) -> list[PageChart]:
    """All figures over steps, with a line for each of the first :data:`LINES` runs."""
    runs = runs[:LINES]
    names = [name for run in runs for line in run.steps.values() for name in line.figures]
    charts = []
    for name in dict.fromkeys(name for name in (*NAMED, *names) if name in names):
        lines = _drawn({run.label: run.points(partial(_figure_of, name)) for run in runs})
        title = NAMED.get(name, name)
        first, *others = lines.values()
        charts.append(PageChart(title, {title: first} if all(each == first for each in others) else lines))
    times, memory = {}, {}
    for run in runs:
        of = f", {run.label}" if len(runs) > 1 else ""
        ms = run.points(lambda line: line.ms)
        times[f"{ORDINARY}{of}"] = [point for point in ms if not _is_looked_at(point[0], run.every)]
        times[f"{LOOKED_AT}{of}"] = [point for point in ms if _is_looked_at(point[0], run.every)]
        memory[f"in use{of}"] = run.points(lambda line: line.memory or None)
        memory[f"at most so far{of}"] = run.points(lambda line: line.peak or None)
    measured = PageChart(TIME, _drawn(times), "ms"), PageChart(MEMORY, _drawn(memory), "bytes")
    return [*charts, *(chart for chart in measured if chart.lines)]


def _figure_of(name: str, line: StepLine) -> float | None:
    return line.figures.get(name)


def _drawn(lines: Mapping[str, Points]) -> dict[str, Points]:
    """The lines that have points."""
    return {line: points for line, points in lines.items() if points}


def _is_looked_at(step: float, every: int) -> bool:
    return every > 0 and (step - 1) % every == 0


# -- values ------------------------------------------------------------------------------------------------------------------


class WatchedFigure(NamedTuple):
    """A figure of casts. worst: of several values the one that matters, which is dark. quiet: the value that needs no picture.

    room: how far apart light and dark are at least, so that what hardly changes has one shade; of ``log``, powers of two.
    """

    title: str
    unit: str
    worst: Callable[[Iterable[float]], float]
    quiet: float | None
    room: float
    log: bool = False

    def at(self, value: float) -> float:
        """The place of a value on the scale of shades."""
        return math.log2(max(value, _LEAST)) if self.log else value

    def told(self, value: float | None) -> str:
        """A value with its unit."""
        if value is None:
            return "nothing lost"
        return f"{rounded(100 * value)} %" if self.unit == "%" else f"{rounded(value)} {self.unit}".rstrip()

    def worst_of(self, values: Iterable[float | None]) -> float | None:
        """The worst of those that are known."""
        known = [value for value in values if value is not None]
        return self.worst(known) if known else None

    def ends(self, values: Sequence[float]) -> tuple[float, float]:
        """The values that are light and dark."""
        light = max(values) if self.worst is min else min(values)
        least = light * 2**self.room if self.log else light - self.room if self.worst is min else light + self.room
        return light, self.worst((*values, least))


_LEAST = 2.0**-149
"""The least number above zero in fp32."""

FIGURES = {
    "sqnr": WatchedFigure("Signal-to-noise ratio", "dB", min, None, room=6.0),
    "amax": WatchedFigure("Largest magnitude (amax)", "", max, None, room=4.0, log=True),
    "saturated": WatchedFigure("Saturated", "%", max, 0.0, room=0.0),
    "flushed": WatchedFigure("Became zero", "%", max, 0.0, room=0.0),
    "nonfinite": WatchedFigure("Not finite", "%", max, 0.0, room=0.0),
}
"""What is shown of casts, by its name in a record."""

COLUMNS = 60
"""Shades of a strip; of more steps, each is the worst of a stretch."""

Place = tuple[str, str, str, str]
"""Op, tensor, plane, format."""

Series = dict[Place, dict[int, float | None]]
"""A figure over steps."""


def values_section(records: Sequence[Mapping[str, Any]]) -> list[PageSection]:
    """What casts did, in steps that were looked at; none where none was."""
    if not records:
        return []
    steps = sorted({record["step"] for record in records})
    parts: list[PagePart] = []
    for name, figure in FIGURES.items():
        series: Series = {}
        for record in records:
            place = (record["op"], record["tensor"], record["plane"], record["format"])
            series.setdefault(place, {})[record["step"]] = record[name]
        parts.extend(_figure(figure, series, steps))
    looked = f"{len(steps)} steps, {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    note = f"Casts in {looked}. A line is one kind of layer, with its worst value, over steps as well; open it for all layers."
    return [PageSection("Values by layer", parts, note)]


def _figure(figure: WatchedFigure, series: Series, steps: Sequence[int]) -> Iterator[PagePart]:
    known = [value for each in series.values() for value in each.values() if value is not None and math.isfinite(value)]
    if not known or all(value == figure.quiet for value in known):
        yield PageText(f"{figure.title}: {figure.told(known[0] if known else None)} in every cast.")
        return
    tensors = alike(series, lambda place: place[1])
    parts = [part for places in tensors for part in _tensor(figure, {place: series[place] for place in places}, steps)]
    yield PageFold(figure.title, parts, opened=figure.quiet is None)


def _tensor(figure: WatchedFigure, series: Series, steps: Sequence[int]) -> Iterator[PagePart]:
    """One role of tensors, whose casts share a scale."""
    known = [value for each in series.values() for value in each.values() if value is not None and math.isfinite(value)]
    tensor = next(iter(series))[1]
    if not known:
        yield PageText(f"{tensor}: nothing lost")
        return
    ends = figure.ends(known)
    span = figure.at(ends[0]), figure.at(ends[1])
    yield PageScale(f"{tensor}: {figure.told(ends[0])}", figure.told(ends[1]))
    for same in alike(series, lambda place: (starred(place[0]), *place[1:])):
        op, (_, _, plane, fmt) = counted([place[0] for place in same]), same[0]
        worst = {step: figure.worst_of(series[place].get(step) for place in same) for step in steps}
        name = f"{op}, {fmt}{'' if plane == ROWWISE else f', {plane}'}"
        strip = _strip(figure, worst, steps, span, name)
        rows: list[tuple[Cell, ...]] = []
        for place in sorted(same, key=lambda place: _numbers(place[0])):
            values = [*series[place].values()]
            found = map(figure.told, (values[0], values[-1], figure.worst_of(values)))
            layer = ".".join(map(str, _numbers(place[0]))) if len(same) > 1 else place[0]
            rows.append((layer, _strip(figure, series[place], steps, span, place[0]), *found))
        table = PageTable("", ("layer", "over steps", "first", "last", "worst"), rows)
        yield PageFold(name, [table], (figure.told(figure.worst_of(worst.values())), strip))


def _numbers(op: str) -> list[int]:
    """The steps of a path that are numbers, by which alike layers differ."""
    return [int(step) for step in op.split("+", maxsplit=1)[0].split(".") if step.isdecimal()]


def _strip(
    figure: WatchedFigure, values: Mapping[int, float | None], steps: Sequence[int], span: tuple[float, float], name: str
) -> PageStrip:
    length = math.ceil(len(steps) / COLUMNS)
    over = [figure.worst_of(map(values.get, steps[at : at + length])) for at in range(0, len(steps), length)]
    first, last = values.get(steps[0]), values.get(steps[-1])
    label = f"{figure.title} of {name}: {figure.told(first)} at step {steps[0]}, {figure.told(last)} at step {steps[-1]}"
    return PageStrip([None if value is None else figure.at(value) for value in over], span, label)
