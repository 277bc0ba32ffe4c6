"""``opfuse kernels``: every CUDA kernel, what defines it, and what the compiler made of it."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from opfuse import formats
from opfuse.cli.output import echo, echo_json, error
from opfuse.cli.progress import progress
from opfuse.cli.results import show_rows
from opfuse.errors import ConfigError, UnsupportedError, describe, nearest
from opfuse.kernels.catalogue import CASES
from opfuse.kernels.engine.compiling import ARCHITECTURES, Resources, Variant, architecture, architectures, cache_key, resources
from opfuse.kernels.engine.cubins import FACTS, cubin_cache, location
from opfuse.kernels.engine.registry import Kernel
from opfuse.kernels.engine.sources import sources_digest

COLUMNS = ("kernel", "entry", "source", "arch", "tolerance", "cases", "variants", "registers", "spills", "shared")


def kernels(arch: str, *, digest: bool, as_json: bool) -> None:
    """List the CUDA kernels: sources, tolerances, registers and spilled bytes of the largest variant."""
    if digest:
        echo_json({"digest": sources_digest()}) if as_json else echo(sources_digest())
        return
    arch = known(arch) if arch else (architecture(torch.cuda.current_device()) if torch.cuda.is_available() else "sm_90a")
    rows = table(arch)
    if as_json:
        echo_json({"kernels": rows})
        return
    show_rows(COLUMNS, [["-" if row[name] is None else str(row[name]) for name in COLUMNS] for row in rows])


def known(arch: str) -> str:
    """``arch`` itself. ConfigError, with the nearest, if the compiler does not know it."""
    try:
        among = architectures()
    except UnsupportedError:
        among = ARCHITECTURES
    if arch not in among:
        cure = f"name one of {', '.join(among)}{nearest(arch, among)}"
        raise ConfigError(describe("--arch", wanted="an architecture that the compiler knows", got=repr(arch), cure=cure))
    return arch


def table(arch: str) -> list[dict[str, Any]]:
    """One row for each entry of each kernel; what only the compiler knows is None where there is none, and stderr says why.

    The rows are kept in the cache of compiled kernels, which has every variant afterwards: no process compiles one again.
    """
    listed = [*CASES]
    try:
        cache = cubin_cache(location())
        formats_source = inspect.getsource(formats)
        key = cache_key("table", sources_digest(), formats_source, torch.__version__, arch, *(kernel.name for kernel in listed))
    except UnsupportedError as missing:
        error(str(missing))
        return _rows(listed, arch, lambda variant: {})
    found = cache.find(key, FACTS)
    if found is not None:
        kept: list[dict[str, Any]] = json.loads(found)
        return kept
    rows = _rows(listed, arch, lambda variant: resources(variant, arch, cache))
    cache.store(key, json.dumps(rows).encode(), FACTS)
    return rows


def _rows(listed: Sequence[Kernel[Any, Any]], arch: str, ask: Callable[[Variant], dict[str, Resources]]) -> list[dict[str, Any]]:
    launched = []
    with progress("kernels whose cases were run", len(listed)) as done:
        for kernel in listed:
            launched.append((kernel, kernel.launches(CASES[kernel])))
            done()
    variants = sorted({variant for _, launches in launched for variant, _ in launches})

    def asked(variant: Variant) -> dict[str, Resources]:
        used = ask(variant)
        done()
        return used

    with progress("variants found or compiled", len(variants)) as done, ThreadPoolExecutor(os.cpu_count()) as pool:
        made = dict(zip(variants, pool.map(asked, variants)))  # the compiler lets go of the interpreter
    rows = []
    for kernel, launches in launched:
        for entry, source in sorted({(entry, variant.source) for variant, entry in launches}):
            used = [made[variant].get(entry) for variant, name in launches if (name, variant.source) == (entry, source)]
            rows.append(_row(kernel, entry, source, used) | {"arch": arch})
    return rows


def _row(kernel: Kernel[Any, Any], entry: str, source: str, used: Sequence[Resources | None]) -> dict[str, Any]:
    most = {name: max((getattr(each, name) for each in used if each is not None), default=None) for name in Resources._fields}
    return {
        "kernel": kernel.name,
        "entry": entry,
        "source": source,
        "tolerance": str(kernel.tolerance),
        "cases": len(CASES[kernel]),
        "variants": len(used),
        **most,
    }
