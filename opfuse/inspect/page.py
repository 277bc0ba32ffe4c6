"""One HTML file: a title, facts, and sections of tables, charts and graphs, with their contents at the left.

It needs no network, and is refused any: styles (``page.css``), the few lines of script for filters (``page.js``) and the charts
are in it. It is well-formed XML as well, so that a strict parser reads it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from importlib import resources
from typing import Protocol

from opfuse.errors import number_of

LONGEST = 40
"""Rows that a table shows; a longer one is folded."""

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""What a browser may do with a page: nothing but what stands in it."""

STATUSES = ("fused", "missed", "shadowed", "absent", "native", "emulated", "joined", "parts", "kept", "refused")
"""Cells that stand out."""


class PagePart(Protocol):
    """What a section has."""

    def html(self, name: str) -> Iterator[str]:
        """Its lines. name: an id that no other part has."""


class PageMark(Protocol):
    """A cell that draws."""

    def cell(self) -> str:
        """Its HTML."""


Cell = str | int | float | PageMark | None


@dataclass(frozen=True)
class PageBytes:
    """A number of bytes, told in a binary unit."""

    number: int

    def cell(self) -> str:
        exact = number_of(self.number, "byte")
        return f'<span title="{exact}">{rounded_bytes(self.number)}</span>'


@dataclass(frozen=True)
class PageText:
    """A paragraph."""

    text: str

    def html(self, name: str) -> Iterator[str]:
        yield f'<p class="note">{escape(self.text)}</p>'


@dataclass(frozen=True)
class PageTable:
    """A table. title: above it, where a section has several. by: the column whose values are buttons that filter; with an empty
    one words alone do. Numbers are rounded, and stand at the right.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    by: str | None = None

    def html(self, name: str) -> Iterator[str]:
        if self.title:
            yield f'<h3 id="{name}-title">{escape(self.title)}</h3>'
        if not self.rows:
            yield '<p class="note">none</p>'
            return
        told = ", ".join(f"{number} {escape(value)}" for value, number in self._counts.items()) or f"{len(self.rows)} rows"
        yield from folded(told, self._table(name)) if len(self.rows) > LONGEST else self._table(name)

    @property
    def _counts(self) -> Mapping[str, int]:
        """How many rows have each value of the column that filters."""
        at = self.head.index(self.by) if self.by else None
        return Counter(str(row[at]) for row in self.rows) if at is not None else {}

    def _table(self, name: str) -> Iterator[str]:
        if self.by is not None:
            yield from self._filters(name)
        label = f'aria-labelledby="{name}-title"' if self.title else 'aria-label="table"'
        yield f'<div class="wide" role="region" tabindex="0" {label}><table id="{name}"><thead><tr>'
        at = self.head.index(self.by) if self.by else None
        kinds = [_kind([row[i] for row in self.rows]) for i in range(len(self.head))]
        yield "".join(f'<th scope="col"{kind}>{escape(head)}</th>' for head, kind in zip(self.head, kinds))
        yield "</tr></thead><tbody>"
        for row in self.rows:
            of = "" if at is None else f' data-is="{escape(str(row[at]))}"'
            yield f"<tr{of}>{''.join(f'<td{kind}>{_content(cell)}</td>' for cell, kind in zip(row, kinds))}</tr>"
        yield "</tbody></table></div>"

    def _filters(self, name: str) -> Iterator[str]:
        yield f'<div class="filters" data-of="{name}" hidden="hidden">'
        yield '<input type="search" placeholder="words that a row has" aria-label="filter rows by words"/>'
        for value, count in self._counts.items():
            yield f'<button type="button" aria-pressed="false" data-is="{escape(value)}">{escape(value)} {count}</button>'
        yield '<output aria-live="polite"></output></div>'


@dataclass(frozen=True)
class PageFold:
    """Parts behind a line that opens them. more: cells beside the words of that line."""

    summary: str
    parts: Sequence[PagePart]
    more: Sequence[Cell] = ()
    opened: bool = False

    def html(self, name: str) -> Iterator[str]:
        inside = (line for i, part in enumerate(self.parts) for line in part.html(f"{name}-{i}"))
        line = (
            "".join(f"<span>{_content(cell)}</span>" for cell in (self.summary, *self.more))
            if self.more
            else escape(self.summary)
        )
        yield from folded(line, inside, opened=self.opened)


@dataclass(frozen=True)
class PageSection:
    """Parts under a heading, which the contents name. note: what it shows, in a sentence."""

    title: str
    parts: Sequence[PagePart]
    note: str = ""

    @property
    def id(self) -> str:
        """Where the contents lead."""
        return re.sub(r"\W+", "-", self.title.lower()).strip("-")


@dataclass(frozen=True)
class Page:
    """What a report tells. facts: first of all. Titles of sections differ."""

    title: str
    facts: Mapping[str, Cell]
    sections: Sequence[PageSection] = field(default_factory=tuple)

    def html(self) -> str:
        """The file."""
        return "\n".join(_page(self))


@cache
def _asset(name: str) -> str:
    return resources.files("opfuse.inspect").joinpath(name).read_text(encoding="utf-8")


def _page(page: Page) -> Iterator[str]:
    title = escape(page.title)
    yield "<!DOCTYPE html>"
    yield f'<html lang="en"><head><meta charset="utf-8"/><title>{title}</title>'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
    yield f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"/><style>{_asset("page.css")}</style></head><body>'
    yield '<nav aria-label="contents"><a class="skip" href="#top">Skip the contents</a><strong>Contents</strong><ul>'
    yield from (f'<li><a href="#{section.id}">{escape(section.title)}</a></li>' for section in page.sections)
    yield f'</ul></nav><main id="top" tabindex="-1"><h1>{title}</h1><dl>'
    yield from (f"<dt>{escape(name)}</dt><dd>{_content(value)}</dd>" for name, value in page.facts.items())
    yield "</dl>"
    for section in page.sections:
        yield f'<section aria-labelledby="{section.id}"><h2 id="{section.id}">{escape(section.title)}</h2>'
        if section.note:
            yield f'<p class="note">{escape(section.note)}</p>'
        for number, part in enumerate(section.parts):
            yield from part.html(f"{section.id}-{number}")
        yield "</section>"
    yield f"</main><script>{_asset('page.js')}</script></body></html>"


_OPEN = ' open="open"'


def folded(summary: str, inside: Iterator[str], *, opened: bool = False) -> Iterator[str]:
    """Lines behind one that opens them. summary: HTML."""
    row = ' class="row"' if summary.startswith("<span>") else ""
    yield f"<details{_OPEN * opened}><summary{row}>{summary}</summary><div>"
    yield from inside
    yield "</div></details>"


def _kind(cells: Sequence[Cell]) -> str:
    """The class of a column: of numbers, of long texts, of long names, or none."""
    if all(cell is None or isinstance(cell, int | float | PageBytes) for cell in cells):
        return ' class="n"'
    texts = [cell for cell in cells if isinstance(cell, str)]
    if any(len(text.split()) > _WORDS for text in texts):
        return ' class="t"'
    return ' class="w"' if any(len(text) > _NAME for text in texts) else ""


_WORDS, _NAME = 5, 24
"""Words of a cell from which on a column keeps room for sentences, and characters from which on it may break names."""


def _content(value: Cell) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return f'<span class="tag {value}">{value}</span>' if value in STATUSES else escape(value)
    if isinstance(value, int | float):
        return escape(rounded(value))
    return value.cell()


# -- figures -----------------------------------------------------------------------------------------------------------------


def rounded(value: float) -> str:
    """A number in at most four digits that count, an integer in all of them."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e7 else f"{value:.4g}"


def rounded_bytes(number: int) -> str:
    """A number of bytes in three digits that count: ``1.93 MiB``."""
    value, unit = float(number), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return number_of(number, "byte") if unit == "bytes" else f"{value:.{max(0, 3 - len(str(int(value))))}f} {unit}"
