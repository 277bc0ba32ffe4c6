"""What a program queues on a GPU, as a CUDA graph: one launch in place of all, for calls whose tensors lie where they lay before.

A graph reads and writes fixed addresses, and holds no tensor: a program makes its tensors at each call, before it queues
anything, and torch's allocator gives a step that is like the last one the same addresses. A call with other addresses queues its
launches one by one. So a graph never reads what is not there, and no result is overwritten that somebody still has.

On a host of an H200, nine launches and a product took 45 us one by one, and 4 us as a graph; to capture that took 200 us.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from opfuse.kernels.engine.bindings import runtime
from opfuse.kernels.engine.launch import is_capturing

_log = logging.getLogger("opfuse.programs")

KEPT, SEEN = 4, 8
"""How many graphs a frame has, and of how many calls without one it remembers the addresses; the oldest go first."""

CALLS = 16
"""How many calls of a frame pay for one graph, so that a frame whose addresses change all the time captures few. The first graphs
of a frame, and as many after a time without, need not wait.
"""

QueueFunction = Callable[[Sequence[int], Sequence[int], Sequence[Any], int], None]
"""Queues what a program does. Arguments: addresses by base, those of the launches' parameters, products, and the stream."""


class LaunchGraphs:
    """Queues what one frame of a program has.

    queue: queues it one by one, on a stream. at: the addresses of all that it reads and writes, as they are now.
    """

    def __init__(self, queue: Callable[[int], None], at: Sequence[int]) -> None:
        self._queue, self._at = queue, at
        self._graphs: dict[tuple[int, ...], LaunchGraph] = {}
        self._seen: dict[tuple[int, ...], None] = {}
        self._paid = KEPT * CALLS  # calls that no graph was made for

    def __len__(self) -> int:
        """How many graphs there are."""
        return len(self._graphs)

    def __call__(self, stream: int) -> None:
        """Queue it on ``stream``, that of torch: as a graph, if there is one for these addresses."""
        addresses = (*self._at,)
        graph, capturing = self._graphs.get(addresses), is_capturing()
        self._paid = min(self._paid + 1, KEPT * CALLS)
        if graph is not None and not capturing:
            graph.launch(graph.handle, stream)
            return
        self._queue(stream)
        if graph is None and not capturing:
            if addresses in self._seen and self._paid >= CALLS:
                self._capture(addresses)
            _enter(self._seen, addresses, None, SEEN)

    def _capture(self, addresses: tuple[int, ...]) -> None:
        """Make a graph for addresses that came again."""
        self._paid -= CALLS
        try:
            graph = LaunchGraph(self._queue)
        except Exception as reason:  # of the driver or a library: what is queued one by one is the same
            self._paid = -sys.maxsize
            _log.info("queued one by one at every call, since no CUDA graph could be made: %s", reason)
        else:
            _enter(self._graphs, addresses, graph, KEPT)


def _enter(entries: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    entries.pop(key, None)  # so that it is the latest
    entries[key] = value
    if len(entries) > most:
        del entries[next(iter(entries))]


class LaunchGraph:
    """A CUDA graph of what ``queue`` queues on a stream. handle: the executable graph. launch: its launch, on a stream."""

    def __init__(self, queue: Callable[[int], None]) -> None:
        cuda, graph = runtime(), 0
        stream = _stream(cuda.getDevice())
        try:
            with _LOCK:
                # Relaxed, so that no other thread's call ends it: nothing but launches and copies is queued here.
                cuda.streamBeginCapture(stream, cuda.streamCaptureModeRelaxed)
                try:
                    queue(stream)
                finally:
                    graph = cuda.streamEndCapture(stream)
            self.handle: int = cuda.graphInstantiate(graph)
        finally:
            if graph:
                cuda.graphDestroy(graph)
        self.launch: Callable[[int, int], None] = cuda.graphLaunch
        # One that still runs is freed when it is over. At the end of the process the driver goes first.
        weakref.finalize(self, cuda.graphExecDestroy, self.handle).atexit = False


_LOCK = threading.Lock()
"""Of the stream on which graphs are captured."""


@cache
def _stream(device: int) -> int:
    """A stream of its own: torch shares 32 among all who ask, and what others queue there would become a part of a graph."""
    made: int = runtime().streamCreateWithFlags(runtime().streamNonBlocking)
    return made
