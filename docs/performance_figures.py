"""Figures of a record: those of a script, and how one is shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LARGE, SMALL = ", 16384x8192 bf16", ", 4096x4096 bf16"


def of_script(record: Mapping[str, Any], *scripts: str) -> dict[str, dict[str, Mapping[str, Any]]]:
    """The figures of these scripts, by name and unit."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for figure in record["results"]:
        if figure["script"] in scripts:
            found.setdefault(figure["name"], {})[figure["unit"]] = figure
    return found


def shown(figure: Mapping[str, Any] | None, digits: int = 1) -> str:
    """A value, with its limit where it has one; bold if it misses that."""
    if figure is None:
        return ""
    value = f"{figure['value']:.{digits}f}"
    if figure["limit"] is None:
        return value
    return f"{value} ({figure['limit']:.{digits}f})" if figure["met"] else f"**{value}** ({figure['limit']:.{digits}f})"
