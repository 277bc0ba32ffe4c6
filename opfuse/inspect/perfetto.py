"""Traces as trace events of Chrome, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

A JSON object with ``traceEvents``: each rank is a process; its steps and the plans of each pipeline are slices in threads of
their own; losses, memory and all other figures of a step are counters. Times are microseconds since the first process began. The
format is https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from opfuse.inspect.trace import StepLine, Trace


def trace_events(traces: Sequence[Trace]) -> dict[str, Any]:
    """The object, as values that JSON has."""
    starts = [datetime.fromisoformat(trace.process.started).timestamp() for trace in traces]
    events = [event for trace, start in zip(traces, starts) for event in _events(trace, 1e6 * (start - min(starts)))]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(trace: Trace, shift: float) -> Iterator[dict[str, Any]]:
    process = trace.process
    threads = {"steps": 0}
    for plan in trace.plans:
        threads.setdefault(f"plans of {plan.pipeline}", len(threads))
    pid = process.rank
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"rank {process.rank} of {process.ranks}"}}
    for name, tid in threads.items():
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
    for plan in trace.plans:
        slot = {"pid": pid, "tid": threads[f"plans of {plan.pipeline}"], "cat": "plan", "name": f"plan {plan.key[:6]}"}
        yield {"ph": "X", **slot, **_span(plan.seconds, plan.ms, shift), "args": {"call": plan.call, "why": plan.why}}
    for step in trace.steps:
        yield from _step(step, pid, shift)


def _step(step: StepLine, pid: int, shift: float) -> Iterator[dict[str, Any]]:
    if step.ms is not None:
        slot = {"pid": pid, "tid": 0, "cat": "step", "name": f"step {step.step}"}
        yield {"ph": "X", **slot, **_span(step.seconds, step.ms, shift), "args": {"step": step.step}}
    for name, value in {**step.figures, "memory": step.memory}.items():
        if math.isfinite(value):
            yield {"ph": "C", "pid": pid, "name": name, "ts": shift + step.seconds * 1e6, "args": {name: value}}


def _span(end: float, ms: float, shift: float) -> dict[str, float]:
    """Where a slice that ended at ``end`` seconds lies, in microseconds."""
    return {"ts": shift + max(0.0, end * 1e6 - ms * 1e3), "dur": ms * 1e3}
