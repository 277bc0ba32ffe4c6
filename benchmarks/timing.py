"""Device time by events over rotating buffers, host time with an idle device, wall time of both."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

Call = Callable[[], object]


class Timing(NamedTuple):
    """Microseconds: the median of the repeats, the shortest, the longest."""

    median: float
    shortest: float
    longest: float


def device_time(calls: Sequence[Call], *, launches: int = 24, repeats: int = 7, waits: bool = False) -> Timing:
    """Time of one call, between two events around ``launches`` calls that take turns, so that none finds its data in a cache.

    The last result of each call is kept, so that results take turns in memory as inputs do: the allocator would otherwise hand
    out the block that was given back just before, which is in the cache still. waits: the host of a call waits for the device,
    so that nobody can queue ahead, and the time is that of both.
    """
    kept: list[object] = [None] * len(calls)

    def run(count: int) -> None:
        for i in range(count):
            kept[i % len(calls)] = calls[i % len(calls)]()

    def once(lead: float) -> float | None:
        """None if the device had to wait for the host. lead: microseconds that the device sleeps while the host queues ahead."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(int(lead * _cycles()))
        start.record()
        run(launches)
        waited = start.query()
        end.record()
        end.synchronize()
        return None if waited and not waits else start.elapsed_time(end) / launches * 1e3

    run(2 * len(calls))  # kernels are loaded, and the memory of all results is there
    torch.cuda.synchronize()
    lead, times = 1000.0, list[float]()
    while len(times) < repeats:
        took = once(lead)
        if took is not None:
            times.append(took)
        elif (lead := 2 * lead) > MOST_LEAD:
            raise RuntimeError(f"the device waits for the host, which takes more than {MOST_LEAD / launches} us a call")
    return Timing(statistics.median(times), min(times), max(times))


MOST_LEAD = 1e6
"""Microseconds."""


class Compared(NamedTuple):
    """Microseconds of two calls, medians over rounds; and the median over rounds of the first in times the second."""

    one: float
    other: float
    ratio: float


def compared(one: Call, other: Call, *, rounds: int = 10, launches: int = 6) -> Compared:
    """Of two calls in turns. The chip is faster after a pause, and slower once it is warm: so ratios are those within a round,
    and every second round begins with the other call.
    """
    times = []
    for order in (1, -1) * (rounds // 2):
        took = [device_time([call], launches=launches, repeats=1).median for call in (one, other)[::order]]
        times.append(took[::order])
    return Compared(*map(statistics.median, zip(*times)), statistics.median(first / second for first, second in times))


def cool(call: Call, *, launches: int = 4, repeats: int = 3, idle: float = 0.08) -> float:
    """Microseconds of a call in a few launches after ``idle`` seconds, before power limits the clock: the median of repeats."""
    call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        time.sleep(idle)
        times.append(_launched(call, launches))
    return statistics.median(times)


def alone(call: Call, *, seconds: float = 0.9) -> float:
    """Microseconds of a call that alone runs for so many ``seconds``, of which the last two thirds count."""
    launches = max(3, round(seconds * 1e6 / cool(call, repeats=1, idle=0.0)))
    return _launched(call, launches - launches // 3, before=launches // 3)


def _launched(call: Call, launches: int, *, before: int = 0) -> float:
    """Microseconds of a call, in so many launches after ``before`` others. The device sleeps until the first are queued."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(int(500 * _cycles()))
    for i in range(before + launches):
        if i == before:
            start.record()
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / launches * 1e3


@functools.cache
def _cycles() -> float:
    """Cycles of ``torch.cuda._sleep`` in a microsecond."""
    count, (start, end) = 20_000_000, [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda._sleep(count)
    start.record()
    torch.cuda._sleep(count)
    end.record()
    end.synchronize()
    return count / (start.elapsed_time(end) * 1e3)


def host_time(call: Call, *, calls: int = 200, repeats: int = 7) -> Timing:
    """Time for the host to queue one call."""
    for _ in range(min(20, calls)):
        call()
    torch.cuda.synchronize()

    def once() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        elapsed = time.perf_counter() - start
        torch.cuda.synchronize()
        return elapsed / calls * 1e6

    times = [once() for _ in range(repeats)]
    return Timing(statistics.median(times), min(times), max(times))


def wall_time(call: Call, *, calls: int = 4) -> float:
    """Microseconds a call, of ``calls`` that a user makes one after another and waits for in the end."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls * 1e6
