"""``opfuse kernels``: every CUDA kernel, what defines it, and what the compiler made of it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from opfuse.cli.output import Json, echo, echo_json, error
from opfuse.errors import UnsupportedError
from opfuse.kernels.catalogue import kernels as registered
from opfuse.kernels.launch import ARCHITECTURES, Compiled, Variant, architecture, assemble, compile_text
from opfuse.kernels.registry import sources_digest

Arch = Annotated[str, typer.Option(help=f"What to compile for: {', '.join(ARCHITECTURES)}; by default this device, or sm_90a.")]
Digest = Annotated[bool, typer.Option("--digest", help="Print a digest of all sources of kernels, and compile nothing.")]

COLUMNS = ("kernel", "entry", "source", "arch", "tolerance", "cases", "variants", "registers", "spills", "shared")


def kernels(arch: Arch = "", digest: Digest = False, as_json: Json = False) -> None:
    """List the CUDA kernels: sources, tolerances, registers and spilled bytes of the largest variant."""
    if digest:
        echo_json({"digest": sources_digest()}) if as_json else echo(sources_digest())
        return
    arch = arch or (architecture(torch.cuda.current_device()) if torch.cuda.is_available() else "sm_90a")
    rows = table(arch)
    if as_json:
        echo_json({"kernels": rows})
        return
    shown = Table(*COLUMNS, box=None, padding=(0, 2, 0, 0))
    for row in rows:
        shown.add_row(*("-" if row[name] is None else str(row[name]) for name in COLUMNS))
    Console(width=max(120, Console().width)).print(shown)


def table(arch: str) -> list[dict[str, Any]]:
    """One row for each entry of each kernel; what only the compiler knows is None where there is none, and stderr says why."""
    launched = [(kernel, kernel.launches()) for kernel in registered()]
    made = _compiled(sorted({variant for _, launches in launched for variant, _ in launches}), arch)
    rows = []
    for kernel, launches in launched:
        for entry in sorted({entry for _, entry in launches}):
            variants = [variant for variant, name in launches if name == entry]
            used = [made[variant].entries[entry] for variant in variants if variant in made]
            rows.append(
                {
                    "kernel": kernel.name,
                    "entry": entry,
                    "source": kernel.source,
                    "arch": arch,
                    "tolerance": str(kernel.tolerance),
                    "cases": len(kernel.cases),
                    "variants": len(variants),
                    **{
                        name: max((getattr(each, name) for each in used), default=None)
                        for name in ("registers", "spills", "shared")
                    },
                }
            )
    return rows


def _compiled(variants: list[Variant], arch: str) -> dict[Variant, Compiled]:
    """Each variant compiled, on all processors: the compiler lets go of the interpreter."""
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return dict(zip(variants, pool.map(lambda variant: compile_text(assemble(variant), arch, variant.source), variants)))
    except UnsupportedError as missing:
        error(str(missing))
        return {}
