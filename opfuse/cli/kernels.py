"""``opfuse kernels``: every CUDA kernel, what defines it, and what this machine has compiled of its source."""

from __future__ import annotations

from collections.abc import Sequence

import opfuse.kernels.casts.figures
import opfuse.ops  # noqa: F401 - importing it and the figures of casts registers every kernel
from opfuse.cli.output import echo, echo_json, error
from opfuse.cli.results import show_rows
from opfuse.errors import UnsupportedError
from opfuse.kernels.engine.cubins import location
from opfuse.kernels.engine.inventory import KeptCubin, inventory
from opfuse.kernels.engine.registry import kernels as registered
from opfuse.kernels.engine.sources import sources_digest

COLUMNS = ("kernel", "source", "definition", "tolerance", "compiled", "registers", "spills")


def kernels(*, digest: bool, as_json: bool) -> None:
    """List the CUDA kernels, or print the digest of their code."""
    if digest:
        echo_json({"digest": sources_digest()}) if as_json else echo(sources_digest())
        return
    made = _compiled()
    rows = [
        {
            "kernel": kernel.name,
            "source": kernel.source,
            "definition": f"{kernel.reference.__module__}.{kernel.reference.__qualname__}",
            "tolerance": str(kernel.tolerance),
            **_most(made.get(kernel.source, ())),
        }
        for kernel in registered()
    ]
    if as_json:
        echo_json({"kernels": rows})
    else:
        show_rows(COLUMNS, [["" if row[name] is None else str(row[name]) for name in COLUMNS] for row in rows])


def _compiled() -> dict[str, list[KeptCubin]]:
    """By source, the variants that the cache has; none, and stderr says why, if others may write there."""
    by_source: dict[str, list[KeptCubin]] = {}
    try:
        for kernel in inventory(location()):
            if kernel.current and not kernel.faults:
                by_source.setdefault(kernel.source, []).append(kernel)
    except UnsupportedError as refused:
        error(str(refused))
    return by_source


def _most(variants: Sequence[KeptCubin]) -> dict[str, int | None]:
    """How many variants there are, and what the largest uses; None of none."""
    used = [resources for kept in variants for resources in kept.entries.values()]
    return {
        "compiled": len(variants),
        **{name: max((each[name] for each in used), default=None) for name in ("registers", "spills")},
    }
