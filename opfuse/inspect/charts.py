"""Charts of a page as SVG: lines over steps, a strip of shades for a figure over steps, marks of events over time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from opfuse.inspect.page import PageTable, folded, rounded, rounded_bytes

Points = Sequence[tuple[float, float]]
"""Places along and values."""

WIDTH, HEIGHT = 480, 220
LEFT, RIGHT, TOP, BOTTOM = 76, 28, 10, 30
"""Pixels: of a chart, and around what it draws."""

POINTS = 600
"""Points of a line; of more, the least and the greatest of each of half as many stretches."""

VALUES = 24
"""Rows of the table below a chart, taken evenly, the first and the last among them."""

STEEP = 10
"""The largest value over the median from which on the scale is logarithmic."""

SHADES = 6
SVG = '<svg xmlns="http://www.w3.org/2000/svg"'


@dataclass(frozen=True)
class PageChart:
    """Values over steps, a line for each name, which no two may share. unit: of the values; "bytes" are told in binary units."""

    title: str
    lines: dict[str, Points]
    unit: str = ""
    along: str = "step"

    def html(self, name: str) -> Iterator[str]:
        finite = {line: [(x, y) for x, y in points if math.isfinite(y)] for line, points in self.lines.items()}
        finite = {line: points for line, points in finite.items() if points}
        unit = f" ({self.unit})" if self.unit not in ("", "bytes") else ""
        scale = " on a logarithmic scale" if finite and self._up(finite).log else ""
        yield f"<figure><figcaption><b>{escape(self.title + unit)}</b>{scale}"
        for number, line in enumerate(self.lines):
            key = f'{SVG} class="key" viewBox="0 0 28 8" aria-hidden="true"><path class="line s{number % 4}" d="M0 4H28"/></svg>'
            yield f"<br/>{key if len(self.lines) > 1 else ''} {escape(self._ends(line))}"
        yield "</figcaption>"
        if finite:
            yield from self._drawing(finite)
        yield from folded("values", self._table().html(f"{name}-values"))
        yield "</figure>"

    def _up(self, lines: Mapping[str, Points]) -> ChartScale:
        return ChartScale.of([y for points in lines.values() for _, y in points], curved=True)

    def told(self, value: float) -> str:
        """A value with its unit."""
        return rounded_bytes(round(value)) if self.unit == "bytes" else f"{rounded(value)} {self.unit}".rstrip()

    def _ends(self, line: str) -> str:
        """The line by its ends."""
        points = self.lines[line]
        return f"{f'{line}: ' if len(self.lines) > 1 else ''}{self._short(points[0][1])} → {self._short(points[-1][1])}"

    def _said(self, line: str) -> str:
        """The line in words."""
        points = self.lines[line]
        least, most = (of((y for _, y in points if math.isfinite(y)), default=math.nan) for of in (min, max))
        where = f"from {self.along} {rounded(points[0][0])} to {rounded(points[-1][0])}"
        return f"{self._ends(line)} {where}, least {self.told(least)}, most {self.told(most)}"

    def _table(self) -> PageTable:
        along = sorted({x for points in self.lines.values() for x, _ in points})
        chosen = along if len(along) <= VALUES else [along[round(i * (len(along) - 1) / (VALUES - 1))] for i in range(VALUES)]
        values = [dict(points) for points in self.lines.values()]
        rows = [(rounded(x), *(self.told(each[x]) if x in each else None for each in values)) for x in chosen]
        return PageTable("", (self.along, *(self.lines if len(values) > 1 else (self.title,))), rows)

    def _drawing(self, lines: dict[str, list[tuple[float, float]]]) -> Iterator[str]:
        across, up = ChartScale.of([x for points in lines.values() for x, _ in points]), self._up(lines)
        label = f"{self.title} over {self.along}s. {'. '.join(map(self._said, lines))}."
        yield f'{SVG} role="img" aria-label="{escape(label)}" viewBox="0 0 {WIDTH} {HEIGHT}">'

        def x_of(value: float) -> float:
            return LEFT + across.share(value) * (WIDTH - LEFT - RIGHT)

        def y_of(value: float) -> float:
            return HEIGHT - BOTTOM - up.share(value) * (HEIGHT - TOP - BOTTOM)

        for tick in up.ticks(1024.0 if self.unit == "bytes" else 1.0):
            y = y_of(tick)
            yield f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
            yield f'<text x="{LEFT - 6}" y="{y + 5:.1f}" text-anchor="end">{escape(self._short(tick))}</text>'
        for tick in across.ticks():
            yield f'<text x="{x_of(tick):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(rounded(tick))}</text>'
        yield f'<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>'
        for line, points in lines.items():
            style = f"s{[*self.lines].index(line) % 4}"
            places = [f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in thinned(points)]
            if len(places) == 1:
                left, _, top = places[0].partition(",")
                yield f'<circle class="dot {style}" cx="{left}" cy="{top}" r="3"/>'
            else:
                yield f'<polyline class="line {style}" points="{" ".join(places)}"/>'
        yield "</svg>"

    def _short(self, value: float) -> str:
        return rounded_bytes(round(value)) if self.unit == "bytes" else rounded(value)


@dataclass(frozen=True)
class ChartScale:
    """From values to shares of an axis. log: whether equal ratios are equally far."""

    least: float
    most: float
    log: bool

    @classmethod
    def of(cls, values: Sequence[float], *, curved: bool = False) -> ChartScale:
        """The scale that holds ``values``. curved: of values that differ much, a logarithmic one."""
        least, most = min(values), max(values)
        log = curved and least > 0 and most / sorted(values)[len(values) // 2] > STEEP
        room = 0.0 if log else 0.05 * (most - least) * curved
        if least == most:
            room = abs(least) / 2 or 1.0
        below = least - room
        return cls(max(below, 0.0) if least >= 0 and not log else below, most + room, log)

    def share(self, value: float) -> float:
        """0 for the least, 1 for the most."""
        least, most, value = (math.log(each) if self.log else each for each in (self.least, self.most, value))
        return (value - least) / (most - least)

    def ticks(self, kilo: float = 1.0) -> Iterator[float]:
        """Round values, four or so; on a logarithmic scale powers of ten, or both ends where there are less than two. kilo: what
        units are powers of, each of which is round.
        """
        if self.log:
            low, high = math.ceil(math.log10(self.least)), math.floor(math.log10(self.most))
            powers = [10.0**power for power in range(low, high + 1, max(1, (high - low) // 4))]
            yield from powers if len(powers) > 1 else (self.least, self.most)
            return
        whole = kilo ** math.floor(math.log(self.most, kilo)) if kilo > 1 and self.most > 1 else 1.0
        rough = (self.most - self.least) / whole / 4
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * times for times in (1, 2, 5, 10) if unit * times >= rough)
        first, last = math.ceil(self.least / whole / step), math.floor(self.most / whole / step)
        yield from (round(number * step, 12) * whole for number in range(first, last + 1))


def thinned(points: Points) -> Points:
    """``points``, or the least and the greatest of each stretch where there are many."""
    if len(points) <= POINTS:
        return points
    length = math.ceil(len(points) / (POINTS // 2))
    stretches = [points[at : at + length] for at in range(0, len(points), length)]
    ends = [{min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])} for part in stretches]
    return [point for pair in ends for point in sorted(pair)]


@dataclass(frozen=True)
class PageStrip:
    """Shades for values over steps, light for the first of ``span`` and dark for the second; none for None. label: in words."""

    values: Sequence[float | None]
    span: tuple[float, float]
    label: str

    def cell(self) -> str:
        shades = [None if value is None else shade_of(value, self.span) for value in self.values]
        parts, at = [], 0
        for shade, same in groupby(shades):
            width = len([*same])
            parts.append("" if shade is None else f'<rect class="c{shade}" x="{at}" width="{width}" height="1"/>')
            at += width
        head = f'{SVG} class="strip" role="img" aria-label="{escape(self.label)}" preserveAspectRatio="none"'
        return f'{head} viewBox="0 0 {max(at, 1)} 1">{"".join(parts)}</svg>'


def shade_of(value: float, span: tuple[float, float]) -> int:
    """The number of a shade, from 0."""
    light, dark = span
    return 0 if light == dark else min(SHADES - 1, max(0, int((value - light) / (dark - light) * SHADES)))


@dataclass(frozen=True)
class PageScale:
    """What light and dark shades mean."""

    light: str
    dark: str

    def html(self, name: str) -> Iterator[str]:
        shades = "".join(f'<rect class="c{i}" x="{i}" width="1" height="1"/>' for i in range(SHADES))
        drawn = f'{SVG} class="strip" aria-hidden="true" preserveAspectRatio="none" viewBox="0 0 {SHADES} 1">{shades}</svg>'
        yield f'<p class="scale">{escape(self.light)} {drawn} {escape(self.dark)}</p>'


@dataclass(frozen=True)
class PageEvents:
    """Marks at the times of events, (seconds at which each began, seconds that it took), of ``total`` seconds."""

    events: Sequence[tuple[float, float]]
    total: float
    label: str

    def cell(self) -> str:
        width = 1000
        rects = (
            f'<rect class="c4" x="{min(began / self.total * width, width - 6):.0f}" '
            f'width="{max(took / self.total * width, 6):.0f}" height="1"/>'
            for began, took in self.events
        )
        head = f'{SVG} class="strip" role="img" aria-label="{escape(self.label)}" preserveAspectRatio="none"'
        return f'{head} viewBox="0 0 {width} 1">{"".join(dict.fromkeys(rects))}</svg>'
