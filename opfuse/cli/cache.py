"""``opfuse cache``: what plans and compiled kernels are kept, by key; why a plan was made; what may go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from opfuse.cli.output import echo, echo_json
from opfuse.cli.results import show_rows
from opfuse.errors import TraceError, describe, differing, nearest, number_of
from opfuse.inspect.trace import Trace, differences, find, odd_ranks, plans_of, read
from opfuse.kernels.engine.cubins import location
from opfuse.kernels.engine.inventory import KeptCubin, inventory, recompiled
from opfuse.kernels.engine.inventory import prune as prune_files

PLANS = ("key", "rank", "pipeline", "call", "ms", "why")
KERNELS = ("key", "source", "kernels", "registers", "spills", "KiB", "days", "state")
_KEY = 12


def ls(trace: Path | None, *, as_json: bool) -> None:
    """The plans of a trace, or the compiled kernels."""
    if trace is not None:
        found = read(trace)
        if as_json:
            echo_json({"plans": [_plan_row(entry, plan) for entry in found for plan in entry.plans], "counts": _counts(found)})
            return
        show_rows(PLANS, [_plan_cells(entry, plan) for entry in found for plan in entry.plans])
        for line in _summary(found):
            echo(line)
        return
    kept = inventory(location())
    if as_json:
        echo_json({"directory": str(location()), "kernels": [entry.record() for entry in kept]})
        return
    show_rows(KERNELS, [_kernel_row(entry) for entry in kept])
    echo(f"{number_of(len(kept), 'key')}, {sum(entry.bytes for entry in kept) / 2**20:.1f} MiB in {location()}")


def show(key: str, trace: Path | None, *, only: str, as_json: bool) -> None:
    """Every value of a plan's key whose path begins with ``only``, with its source, or what is known of a compiled kernel."""
    if trace is None:
        kept = _kernel(key)
        echo_json(kept.record()) if as_json else echo("\n".join(f"{name:<9}{value}" for name, value in kept.record().items()))
        return
    plan = find(read(trace), key)
    if as_json:
        echo_json(plan.model_dump())
        return
    echo(f"{plan.key}  plan {plan.number} of the process, made in {plan.ms:.1f} ms for call {plan.call} of {plan.pipeline}")
    echo(f"why  {plan.why}")
    leaves = [leaf for leaf in plan.leaves if leaf.path.startswith(only)]
    width = max((len(leaf.path) for leaf in leaves), default=0)
    for leaf in leaves:
        echo(f"  {leaf.path:<{width}}  {leaf.value!r:<32} {leaf.source or ''}".rstrip())


def diff(old: str, new: str, trace: Path, *, as_json: bool) -> None:
    """The leaves in which two keys of a trace differ."""
    found = read(trace)
    before, after = find(found, old), find(found, new)
    changed = differences(before, after)
    if as_json:
        echo_json({"old": before.key, "new": after.key, "differences": [difference.model_dump() for difference in changed]})
        return
    echo(f"{before.key} -> {after.key}: {differing(len(changed), len(after.leaves), 'value')}")
    for difference in changed:
        echo(f"  {difference}")


def why(trace: Path, key: str | None, *, as_json: bool) -> None:
    """Why plans were made, whether misses repeat, and which rank disagrees; ends with 1 if a rank does or misses repeat."""
    found = read(trace)
    plans = [find(found, key)] if key else plans_of(found)
    odd = odd_ranks(found)
    thrash = [plan.thrash for plan in plans if plan.thrash]
    if as_json:
        rows = [
            {"key": plan.key, "pipeline": plan.pipeline, "ms": plan.ms, "nearest": plan.nearest, "why": plan.why}
            for plan in plans
        ]
        echo_json(
            {"plans": rows, "thrash": thrash, "odd_ranks": [{**asdict(odd_one), "differences": str(odd_one)} for odd_one in odd]}
        )
    else:
        for plan in plans:
            near = f", nearest {plan.nearest}" if plan.nearest else ""
            echo(f"{plan.pipeline}: plan {plan.key} at call {plan.call}, +{plan.ms:.1f} ms{near}\n  {plan.why}")
        for line in (*thrash, *map(str, odd)):
            echo(line)
        if len({odd_one.process.rank for odd_one in found}) > 1 and not odd:
            echo(f"all {len(found)} ranks made the same plans")
    raise typer.Exit(1 if thrash or odd else 0)


def verify(*, compiling: bool, as_json: bool) -> None:
    """Whether compiled kernels are intact, and which nothing asks for any more; ends with 1 if one is not intact.

    compiling: compile each anew, and compare.
    """
    kept = inventory(location())
    faults = {entry.key: list(entry.faults) for entry in kept if entry.faults}
    if compiling:
        faults |= {entry.key: [fault] for entry in kept if (fault := recompiled(entry)) is not None}
    old = [entry.key for entry in kept if entry.source and not entry.current]
    if as_json:
        echo_json({"keys": len(kept), "faults": faults, "unreachable": old})
    else:
        for key, texts in faults.items():
            echo(f"{key[:_KEY]}: {'; '.join(texts)}")
        anew = f"; {sum(bool(entry.source) for entry in kept)} compiled anew" * compiling
        found = f"{len(faults)} not intact, {len(old)} made from other sources, which nothing asks for{anew}"
        echo(f"{number_of(len(kept), 'key')}: {found}")
        echo("A key holds the whole text that was compiled, the compiler and its flags, so no entry can be stale.")
    raise typer.Exit(1 if faults else 0)


def prune(*, days: float | None, everything: bool, as_json: bool) -> None:
    """Remove compiled kernels that are damaged or that nothing asks for, and, if asked, what is older, or all."""

    def unwanted(kept: KeptCubin) -> bool:
        old = days is not None and kept.days > days
        return everything or old or bool(kept.faults) or (bool(kept.source) and not kept.current)

    gone = prune_files(location(), unwanted)
    freed = sum(entry.bytes for entry in gone)
    if as_json:
        echo_json({"removed": [entry.key for entry in gone], "bytes": freed})
    else:
        echo(f"removed {number_of(len(gone), 'key')}, {freed / 2**20:.1f} MiB, from {location()}")


# -- rows --------------------------------------------------------------------------------------------------------------------


def _plan_row(trace: Trace, plan: Any) -> dict[str, Any]:
    values = (plan.key, trace.process.rank, plan.pipeline, plan.call, plan.ms, plan.why)
    return dict(zip(PLANS, values))


def _plan_cells(trace: Trace, plan: Any) -> tuple[str, ...]:
    return tuple(map(str, ({**_plan_row(trace, plan), "ms": f"{plan.ms:>8.1f}"}).values()))


def _counts(traces: tuple[Trace, ...]) -> list[dict[str, Any]]:
    return [
        {"rank": trace.process.rank, **row.model_dump()} for trace in traces if trace.counts for row in trace.counts.pipelines
    ]


def _summary(traces: tuple[Trace, ...]) -> Iterator[str]:
    for row in _counts(traces):
        alive, hits = f"{number_of(row['plans'], 'plan')} alive", number_of(row["hits"], "hit")
        yield f"rank {row['rank']} {row['pipeline']}: {alive}, {hits}, {number_of(row['misses'], 'miss')}"
    for trace in traces:
        if trace.counts is None:
            yield f"rank {trace.process.rank}: {trace.path.name} ends without counts: the process runs still, or was killed"


def _kernel_row(kept: KeptCubin) -> tuple[str, ...]:
    used = kept.entries.values() if kept.source else ()
    most = [str(max((entry[name] for entry in used), default="")) for name in ("registers", "spills")]
    state = "; ".join(kept.faults) or ("" if kept.current or not kept.source else "of other sources")
    return kept.key[:_KEY], kept.source, ", ".join(kept.entries), *most, f"{kept.bytes / 1024:.1f}", f"{kept.days:.1f}", state


def _kernel(key: str) -> KeptCubin:
    kernels = {each.key: each for each in inventory(location())}
    matching = [each for name, each in kernels.items() if name.startswith(key)]
    if len(matching) != 1:
        got = f"{key!r}, with which {len(matching) or 'none'} begin{'s' if not matching else ''}{nearest(key, kernels)}"
        raise TraceError(
            describe("key", wanted="the first digits of one key", got=got, cure="see `opfuse cache ls`, or name a --trace")
        )
    return matching[0]
