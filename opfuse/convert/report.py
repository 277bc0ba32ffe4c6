"""The report of a conversion: what became of each module, as a table in text and in notebooks."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from opfuse.errors import ConversionError, describe, nearest
from opfuse.inspect.alike import aligned, alike, common, counted, spanned, starred

Status = Literal["fused", "joined", "parts", "kept", "refused"]
STATUSES: tuple[Status, ...] = ("fused", "joined", "parts", "kept", "refused")

COLUMNS = ("module", "class", "recipe", "becomes")
"""Columns of the table; the one that may be long comes last."""

NONE = "none is needed"
"""The cure of a module that stays as it is for good reason."""

ANY = "autocast's"
"""The recipe of a module that has none of its own."""

INFERENCE = "eval() and generate() run under these recipes; with opfuse.autocast(enabled=False) they give the original numbers"
"""What ends a report on modules with recipes of their own."""


@dataclass(frozen=True)
class Conversion:
    """What became of one module.

    status: "fused"; "joined", its op is in the pipeline of the module that reads it; "parts", it stays as it is, and its
    submodules have entries of their own; "kept", on request or by default; "refused", it cannot be fused. became: the ops that it
    runs as now. weights: how many elements the matrices have that it multiplies with. got: why it is not fused; of "parts" and
    "refused" what was found where ``wanted`` was needed. cure: what to do about it.
    """

    path: str
    kind: str
    status: Status
    became: str = ""
    recipe: str = ""
    weights: int = 0
    wanted: str = ""
    got: str = ""
    cure: str = ""

    @property
    def why(self) -> str:
        """Why it is not fused, and the cure; empty if it is."""
        where = self.path or "model"
        cure = "" if self.cure == NONE else f" {self.cure[:1].upper()}{self.cure[1:]}."
        match self.status:
            case _ if self.became:
                return ""
            case "kept":
                return f"{where} is not converted: {self.got}.{cure}"
            case "parts":
                return f"{where} is converted submodule by submodule: as one pipeline it {self.problem}."
        return describe(where, wanted=self.wanted, got=self.got, cure=self.cure)

    @property
    def problem(self) -> str:
        """What :attr:`why` says but for the cure."""
        return f"wants {self.wanted}, got {self.got}" if self.wanted else self.got

    @property
    def told(self) -> str:
        """What the table says of a module that is not fused; :attr:`why` says more."""
        parts = "" if self.status == "parts" else self.problem, "" if self.cure == NONE else self.cure
        return f"{self.status}: {'; '.join(part for part in parts if part)}"


@dataclass(frozen=True)
class Report:
    """What :func:`opfuse.fuse_` did, module by module in the order of the model. ``print`` shows it; notebooks show a table."""

    entries: tuple[Conversion, ...] = field(default_factory=tuple)

    def of(self, status: Status) -> tuple[Conversion, ...]:
        """The entries of one status."""
        return tuple(entry for entry in self.entries if entry.status == status)

    @property
    def fused(self) -> dict[str, str]:
        """The ops that each fused module runs as, by path."""
        return {entry.path: entry.became for entry in self.of("fused")}

    @property
    def counts(self) -> Counter[str]:
        """How many modules run as which ops."""
        return Counter(self.fused.values())

    @property
    def share(self) -> float:
        """The share, 0 to 1, of all matrix elements that fused modules have; in a dense model, their share of the FLOPs."""
        total = sum(entry.weights for entry in self.entries)
        return sum(entry.weights for entry in self.of("fused")) / total if total else 0.0

    def __iter__(self) -> Iterator[Conversion]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, path: object) -> bool:
        return any(entry.path == path for entry in self.entries)

    def __getitem__(self, path: str) -> Conversion:
        found = next((entry for entry in self.entries if entry.path == path), None)
        if found is None:
            got = f"{path!r}{nearest(path, [entry.path for entry in self.entries])}"
            wanted, cure = "the path of a module in the report", "print(report) lists them"
            raise ConversionError(describe("report", wanted=wanted, got=got, cure=cure))
        return found

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._numbers()})"

    def __str__(self) -> str:
        rows = [COLUMNS, *(row[:4] for row in self.rows())]
        return "\n".join((*aligned(rows), self._summary()))

    def _repr_html_(self) -> str:
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row[:4]) + "</tr>" for row in self.rows())
        head = "".join(f"<th>{name}</th>" for name in COLUMNS)
        summary = html.escape(self._summary()).replace("\n", "<br>")
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{summary}</p>"

    def _numbers(self) -> str:
        return ", ".join(f"{len(self.of(status))} {status}" for status in STATUSES)

    def _summary(self) -> str:
        numbers = f"{self._numbers()}; fused modules hold {self.share:.1%} of the matrix weights"
        return f"{numbers}\n{INFERENCE}" if any(entry.recipe not in ("", ANY) for entry in self.entries) else numbers

    def rows(self) -> Iterator[tuple[str, str, str, str, Status]]:
        """The rows of the table, each with its status; modules that differ only by numbers in their paths share one, with these
        numbers if there is another row of such paths.
        """

        def told(entry: Conversion, path: str) -> tuple[str, str, str]:
            """Its cells, with ``path`` for its own where a text quotes that, which a part of a model quotes from the whole."""
            text = entry.became or entry.told
            if path != entry.path:
                text = re.sub(rf"(?<=['.]){re.escape(entry.path)}(?=')", path, text)
            return entry.kind, entry.recipe, text

        groups = alike(self.entries, lambda entry: (starred(entry.path), *told(entry, starred(entry.path))))
        names = [[entry.path for entry in same] for same in groups]
        rows = Counter(starred(paths[0]) for paths in names)
        for same, paths in zip(groups, names):
            name = spanned(paths) if rows[starred(paths[0])] > 1 else counted(paths)
            yield name or "(model)", *told(same[0], common(paths)), same[0].status
