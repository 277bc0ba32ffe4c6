"""One HTML file that tells of pipelines: graphs before and after fusion, outcomes, products, memory, plans over time, values.

It needs no network: styles, a few lines of script for the filters and the SVG are in it. It is well-formed XML as well, so that a
strict parser reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from opfuse.inspect.writers import WATCHED

PageRows = Sequence[Sequence[object]]


@dataclass(frozen=True)
class PageTable:
    """A table under a heading. filters: whether a field above it narrows the rows."""

    title: str
    head: Sequence[str]
    rows: PageRows
    filters: bool = False


@dataclass(frozen=True)
class Page:
    """What a report tells. facts: first of all. pipelines: as :func:`opfuse.compiler.plain.pipeline` makes them."""

    title: str
    facts: Mapping[str, object]
    pipelines: Sequence[Mapping[str, Any]] = ()
    tables: Sequence[PageTable] = field(default_factory=tuple)

    def html(self) -> str:
        """The file."""
        return "\n".join(_page(self))


STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1180px; padding: 0 1rem; color: #1c1c1c; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; border-bottom: 1px solid #ddd; } h3 { font-size: 1rem; }
table { border-collapse: collapse; width: 100%; } th { text-align: left; background: #f4f4f4; position: sticky; top: 0; }
th, td { padding: .2rem .6rem .2rem .3rem; border-bottom: 1px solid #eee; vertical-align: top; overflow-wrap: anywhere; }
td { font-family: ui-monospace, monospace; font-size: 12px; } input { margin: .4rem 0; padding: .2rem .4rem; width: 20rem; }
.fused, .native { color: #06652e; } .missed, .emulated { color: #9a4b00; } .shadowed { color: #5b3a9e; } .absent { color: #777; }
svg { max-width: 100%; height: auto; } svg text { font: 11px ui-monospace, monospace; }
"""

SCRIPT = """
document.querySelectorAll("input[data-of]").forEach(function (box) {
  box.addEventListener("input", function () {
    var words = box.value.toLowerCase().split(" ");
    document.querySelectorAll("#" + box.dataset.of + " tbody tr").forEach(function (row) {
      var text = row.textContent.toLowerCase();
      row.hidden = !words.every(function (word) { return text.includes(word); });
    });
  });
});
"""


def _page(page: Page) -> Iterator[str]:
    yield "<!DOCTYPE html>"
    yield f'<html lang="en"><head><meta charset="utf-8"/><title>{escape(page.title)}</title><style>{STYLE}</style></head><body>'
    yield f"<h1>{escape(page.title)}</h1>"
    yield _table("facts", ("", ""), list(page.facts.items()))
    for number, pipeline in enumerate(page.pipelines):
        yield f"<h2>{escape(pipeline['name'])}</h2>"
        yield from _pipeline(pipeline, f"pipeline-{number}")
    for number, table in enumerate(page.tables):
        yield f"<h2>{escape(table.title)}</h2>"
        name = f"table-{number}"
        if table.filters:
            yield f'<input data-of="{name}" placeholder="filter: words that a row has" aria-label="filter"/>'
        yield _table(name, table.head, table.rows) if table.rows else "<p>none</p>"
    yield f"<script>{SCRIPT}</script></body></html>"


def _table(name: str, head: Sequence[str], rows: PageRows) -> str:
    top = "".join(f"<th>{escape(each)}</th>" for each in head)
    body = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f'<table id="{name}"><thead><tr>{top}</tr></thead><tbody>\n{body}\n</tbody></table>'


_MARKED = ("fused", "missed", "shadowed", "absent", "native", "emulated")


def _cell(value: object) -> str:
    text = "" if value is None else str(value)
    return f'<td class="{text}">{escape(text)}</td>' if text in _MARKED else f"<td>{escape(text)}</td>"


# -- graphs ------------------------------------------------------------------------------------------------------------------

WIDTH, CHAR, LINE, PAD, GAP = 1120, 6.8, 15, 8, 22
"""Pixels: of the drawing, of a character, of a line, around texts, between boxes."""


@dataclass(frozen=True)
class GraphBox:
    """A box of a drawing: a title where a rule made it, and its lines."""

    title: str | None
    lines: Sequence[str]

    @property
    def width(self) -> float:
        return max(len(text) for text in (*self.lines, self.title or "")) * CHAR + 2 * PAD

    @property
    def height(self) -> float:
        return (len(self.lines) + (self.title is not None)) * LINE + 2 * PAD


def _pipeline(pipeline: Mapping[str, Any], name: str) -> Iterator[str]:
    nodes = pipeline["nodes"]
    drawings = {"before: the lowered graph": [GraphBox(None, [node]) for node in nodes]}
    for side in ("forward", "backward"):
        groups = pipeline[f"{side}_groups"]
        drawings[f"after: {side}"] = [GraphBox(group["fusion"], [nodes[i] for i in group["nodes"]]) for group in groups]
    for title, boxes in drawings.items():
        yield f"<h3>{escape(title)}</h3>"
        yield _drawing(boxes, f"{name} {title}")


def _drawing(boxes: Sequence[GraphBox], label: str) -> str:
    """Boxes from left to right, row under row, each with an arrow to the next."""
    parts: list[str] = []
    x, y, tallest, before = 0.0, 0.0, 0.0, None
    for box in boxes:
        if x and x + box.width > WIDTH:
            x, y, tallest = 0.0, y + tallest + GAP, 0.0
        middle = y + min(box.height, LINE + 2 * PAD) / 2
        if before is not None:
            if before[1] == middle:
                parts.append(f'<path d="M{before[0]:.0f} {middle:.0f} H{x - 4:.0f}" stroke="#888" marker-end="url(#arrow)"/>')
            else:
                parts.append(f'<path d="M{before[0]:.0f} {before[1]:.0f} h8" stroke="#888" stroke-dasharray="2"/>')
        parts.append(_box(box, x, y))
        before = (x + box.width, middle)
        x, tallest = x + box.width + GAP, max(tallest, box.height)
    head = '<path d="M0 0 L6 3 L0 6"/>'
    arrow = f'<defs><marker id="arrow" markerWidth="6" markerHeight="6" refX="4" refY="3" orient="auto">{head}</marker></defs>'
    size = f'viewBox="0 0 {WIDTH} {max(y + tallest, 1):.0f}" width="{WIDTH}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(label)}" {size}>{arrow}{"".join(parts)}</svg>'


def _box(box: GraphBox, x: float, y: float) -> str:
    fill = "#eef7f0" if box.title is not None else "#fafafa"
    parts = [
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{box.width:.0f}" height="{box.height:.0f}" rx="4" fill="{fill}" stroke="#bbb"/>'
    ]
    texts = [(box.title, ' font-weight="bold"')] * (box.title is not None) + [(line, "") for line in box.lines]
    for number, (text, style) in enumerate(texts, 1):
        at = y + PAD + number * LINE - 4
        parts.append(f'<text x="{x + PAD:.0f}" y="{at:.0f}"{style}>{escape(str(text))}</text>')
    return "".join(parts)


# -- tables ------------------------------------------------------------------------------------------------------------------


def outcome_table(outcomes: Iterable[Mapping[str, Any]]) -> PageTable:
    """What became of every rule at every place."""

    def why(outcome: Mapping[str, Any]) -> str:
        if by := outcome.get("by"):
            return f"by {by}"
        return f"{outcome['guard']}: wants {outcome['wanted']}, got {outcome['got']}" if "guard" in outcome else ""

    rows = [
        (outcome["direction"], outcome["rule"], outcome["status"], " ".join(outcome["ops"]), why(outcome)) for outcome in outcomes
    ]
    return PageTable("Rules, place by place", ("pass", "rule", "outcome", "nodes", "why"), rows, filters=True)


def product_table(pipelines: Iterable[Mapping[str, Any]]) -> PageTable:
    """Which products run natively."""
    rows = [
        (product["op"], product["product"], product["left"] or "", product["right"] or "", product["status"], product["reason"])
        for pipeline in pipelines
        for product in pipeline["products"]
    ]
    return PageTable("Products", ("op", "product", "left", "right", "runs", "why"), rows, filters=True)


def value_table(records: Iterable[Mapping[str, Any]]) -> PageTable:
    """What casts did, in steps that were looked at."""

    def cell(value: object) -> object:
        return f"{value:.3g}" if isinstance(value, float) else value

    return PageTable("Values watched", WATCHED, [[cell(record[name]) for name in WATCHED] for record in records], filters=True)
