"""Graphs of a page: a pipeline's nodes before fusion, and its groups after, in the order in which they run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from opfuse.inspect.alike import alike, counted, starred
from opfuse.inspect.page import PageFold

SIDES = {"forward_groups": "After fusion, forward", "backward_groups": "After fusion, backward"}


@dataclass(frozen=True)
class FlowBox:
    """Nodes that run together. rule: which took them, if one did."""

    rule: str | None
    nodes: tuple[str, ...]

    @property
    def kind(self) -> FlowBox:
        """The same, without numbers of nodes."""
        return FlowBox(self.rule, tuple(re.sub(r"^\d+:", "", node) for node in self.nodes))

    def html(self) -> str:
        """An entry of a list."""
        lines = "".join(f"<code>{escape(node)}</code>" for node in self.nodes)
        return f"<li>{lines}</li>" if self.rule is None else f'<li class="rule"><b>{escape(self.rule)}</b>{lines}</li>'


@dataclass(frozen=True)
class PageFlow:
    """Boxes one after another; those that repeat are shown once, with how often."""

    title: str
    boxes: Sequence[FlowBox]

    def html(self, name: str) -> Iterator[str]:
        yield f'<h3 id="{name}-title">{escape(self.title)}</h3><ol class="flow" aria-labelledby="{name}-title">'
        for at, length, times in repeats([box.kind for box in self.boxes]):
            shown = "".join(box.html() for box in self.boxes[at : at + length])
            yield shown if times == 1 else f'<li class="times"><b>{times} times</b><ol>{shown}</ol></li>'
        yield "</ol>"


def repeats(kinds: Sequence[object]) -> Iterator[tuple[int, int, int]]:
    """Where ``kinds`` repeat: first, length and times of each stretch. Two or more in a row count, or one three times."""
    at, alone = 0, 0
    while at < len(kinds):
        lengths = range(1, (len(kinds) - at) // 2 + 1)
        found = [(covered, -length) for length in lengths if (covered := _covered(kinds, at, length)) >= max(3, 2 * length)]
        if not found:
            at, alone = at + 1, alone + 1
            continue
        covered, length = max(found)  # of those that cover most the shortest
        if alone:
            yield at - alone, alone, 1
        yield at, -length, covered // -length
        at, alone = at + covered, 0
    if alone:
        yield at - alone, alone, 1


def _covered(kinds: Sequence[object], at: int, length: int) -> int:
    """How many kinds from ``at`` on repeat the first ``length``, these included."""
    times = 1
    while kinds[at : at + length] == kinds[at + times * length : at + (times + 1) * length]:
        times += 1
    return times * length


def pipeline_folds(pipelines: Sequence[Mapping[str, Any]]) -> list[PageFold]:
    """Each pipeline, as :func:`opfuse.compiler.plain.pipeline` has it, behind its name; those alike as one."""

    def key(pipeline: Mapping[str, Any]) -> str:
        return repr((starred(pipeline["name"]), [pipeline[part] for part in ("nodes", *SIDES)]))

    folds = []
    for number, same in enumerate(alike(pipelines, key)):
        nodes = same[0]["nodes"]
        flows = [PageFlow("Before fusion", [FlowBox(None, (node,)) for node in nodes])]
        for part, title in SIDES.items():
            groups = same[0][part]
            if groups:
                boxes = [FlowBox(group["fusion"], tuple(nodes[i] for i in group["nodes"])) for group in groups]
                flows.append(PageFlow(title, boxes))
        folds.append(PageFold(counted([each["name"] for each in same]), flows, opened=number == 0))
    return folds
