"""``opfuse kernels``: every CUDA kernel, and what defines it."""

from __future__ import annotations

import opfuse.kernels.casts.figures
import opfuse.ops  # noqa: F401 - importing it and the figures of casts registers every kernel
from opfuse.cli.output import echo, echo_json
from opfuse.cli.results import show_rows
from opfuse.kernels.engine.registry import kernels as registered
from opfuse.kernels.engine.sources import sources_digest

COLUMNS = ("kernel", "source", "definition", "tolerance")


def kernels(*, digest: bool, as_json: bool) -> None:
    """List the CUDA kernels, or print the digest of their code."""
    if digest:
        echo_json({"digest": sources_digest()}) if as_json else echo(sources_digest())
        return
    rows = [
        (kernel.name, kernel.source, f"{kernel.reference.__module__}.{kernel.reference.__qualname__}", str(kernel.tolerance))
        for kernel in registered()
    ]
    if as_json:
        echo_json({"kernels": [dict(zip(COLUMNS, row)) for row in rows]})
    else:
        show_rows(COLUMNS, rows)
