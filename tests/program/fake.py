"""A device for programs that is the CPU: its launches run Python functions over the addresses in their parameter."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from opfuse.events import KernelLaunched, emit, listeners
from opfuse.kernels.engine import launch as launching
from opfuse.kernels.engine.compiling import Variant
from opfuse.kernels.engine.joining import JOINED
from opfuse.kernels.engine.launch import Grid, Loaded
from opfuse.kernels.engine.registry import Kernel as AnyKernel
from opfuse.runtime.replay import codegen as line
from opfuse.runtime.replay import packing
from opfuse.runtime.replay.codegen import plain_room
from opfuse.runtime.replay.instructions import Step
from opfuse.runtime.replay.recorder import Recorder

LAYOUT = struct.Struct("PPq")
"""Where floats come from, where they go, how many."""

VARIANT = Variant("none.cu", (f"PARAMETER_BYTES={LAYOUT.size}",))

Kernel = Callable[[np.ndarray], np.ndarray]
KERNELS: dict[str, Kernel] = {"double": lambda x: 2 * x, "square": lambda x: x * x, "negate": lambda x: -x}


ADDS = "add"
"""A kernel that adds ``x`` to what is in ``out``, as one that raises an amax does."""


def floats(address: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


def launch(entry: str, x: Tensor, out: Tensor, *, threads: int = 32) -> Tensor:
    """``out`` becomes what kernel ``entry`` makes of ``x``, both fp32 and contiguous; recorders listen."""
    fields = x.data_ptr(), out.data_ptr(), x.numel()
    emit(KernelLaunched(VARIANT, entry, Grid(1, threads), LAYOUT, fields, 0))
    _run(entry, *fields)
    return out


def _run(entry: str, x: int, out: int, count: int) -> None:
    made = floats(out, count)
    made[:] = made + floats(x, count) if entry == ADDS else KERNELS[entry](floats(x, count))


class FakeCuda:
    """What programs call of the driver and the runtime. A graph holds what was queued on a stream, with its addresses.

    captures, replays: how many graphs were made, and launched.
    """

    streamNonBlocking, streamCaptureModeRelaxed, memcpyDeviceToDevice = 1, 2, 3

    def __init__(self) -> None:
        self._captured: list[Callable[[], None]] | None = None
        self._graphs: list[list[Callable[[], None]]] = [[]]  # no graph is 0
        self._destroyed = 0
        self._gone: set[int] = set()
        self.captures = self.replays = 0

    def _queue(self, stream: int, work: Callable[[], None]) -> None:
        assert stream in (STREAM, CAPTURING)
        if stream == CAPTURING:
            assert self._captured is not None
            self._captured.append(work)
        else:
            work()

    def launchKernel(self, kernel: tuple[Variant, str], blocks: int, *arguments: int) -> None:
        *_, stream, address, _ = arguments
        size = int(dict(define.split("=") for define in kernel[0].defines)["PARAMETER_BYTES"])
        parameter = ctypes.string_at(ctypes.c_void_p.from_address(address).value or 0, size)
        self._queue(stream, partial(launch_kernel, kernel, blocks, parameter))

    def memsetAsync(self, address: int, value: int, size: int, stream: int) -> None:
        self._queue(stream, lambda: ctypes.memset(address, value, size) and None)

    def memcpyAsync(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        assert kind == self.memcpyDeviceToDevice
        self._queue(stream, lambda: ctypes.memmove(target, source, size) and None)

    @property
    def destroyed(self) -> int:
        """How many executable graphs are gone."""
        return len(self._gone)

    @property
    def left(self) -> int:
        """How many captured graphs were not destroyed."""
        return self.captures - self._destroyed

    def getDevice(self) -> int:
        return 0

    def streamCreateWithFlags(self, flags: int) -> int:
        return CAPTURING

    def streamBeginCapture(self, stream: int, mode: int) -> None:
        assert (stream, mode, self._captured) == (CAPTURING, self.streamCaptureModeRelaxed, None)
        self._captured = []

    def streamEndCapture(self, stream: int) -> int:
        assert self._captured is not None
        self._graphs.append(self._captured)
        self._captured, self.captures = None, self.captures + 1
        return len(self._graphs) - 1

    def graphInstantiate(self, graph: int) -> int:
        return graph

    def graphDestroy(self, graph: int) -> None:
        self._destroyed += 1

    def graphExecDestroy(self, handle: int) -> None:
        self._gone.add(handle)

    def graphLaunch(self, handle: int, stream: int) -> None:
        assert handle not in self._gone
        self.replays += 1
        for work in self._graphs[handle]:
            self._queue(stream, work)


SPARE = 1 << 28
"""Bytes that a program may hold longer for the sake of a CUDA graph."""

CAPTURING, STREAM = 1, 7
"""The stream on which graphs are captured, and that of torch, which runs what is queued at once."""


def launch_kernel(kernel: tuple[Variant, str], blocks: int, parameter: bytes) -> None:
    """What a kernel does with its parameter; of a joined launch each part."""
    variant, entry = kernel
    firsts = struct.unpack(f"{JOINED}I", parameter[LAYOUT.size * JOINED :]) if variant != VARIANT else (0,)
    for part, first in enumerate(firsts):
        if first < blocks:
            _run(entry, *LAYOUT.unpack_from(parameter, part * LAYOUT.size))


@contextmanager
def launches_seen(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside the block, tapes of runs on a CPU have the launches that a device would have; results are the definitions'."""

    def call(self: AnyKernel, *args: Any, **kwargs: Any) -> Any:
        heard = [getattr(listener, "__self__", None) for listener in listeners().get(KernelLaunched, ())]
        recorder = next((each for each in heard if isinstance(each, Recorder)), None)
        if recorder is None or recorder.refusal or recorder._paused:  # a definition may call kernels
            return self.reference(*args, **kwargs)

        def launched(variant: Variant, entry: str, grid: Grid, layout: struct.Struct, *fields: int | float, device: int) -> None:
            emit(KernelLaunched(variant, entry, grid, layout, fields, 0))

        made = self.run(launched, *args, **kwargs)
        with patch.context() as paused:
            paused.setattr(recorder, "_paused", 1)
            for room, result in zip(tree_leaves(made), tree_leaves(self.reference(*args, **kwargs)), strict=True):
                if isinstance(room, Tensor):  # None stands for what was not asked for
                    room.copy_(result)
        return made

    with patch.context() as patched:
        patched.setattr(AnyKernel, "__call__", call)
        yield


@contextmanager
def fake_device(patch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """Inside the block, programs take the CPU for their device."""
    cuda = FakeCuda()
    with patch.context() as patched:
        patched.setattr(launching, "loaded", lambda variant, entry, device: Loaded(None, (variant, entry)))
        patched.setattr(launching, "is_current", lambda device: True)
        for name in ("codegen.driver", "codegen.runtime", "launch_graph.runtime"):
            patched.setattr(f"opfuse.runtime.replay.{name}", lambda: cuda)
        patched.setattr("opfuse.runtime.replay.launch_graph._stream", lambda device: CAPTURING)
        patched.setattr("opfuse.runtime.replay.codegen.empty_on", lambda device: torch._C._dynamo.guards._empty_strided_cpu)
        for module in (line, packing):
            patched.setattr(module, "plain_room", _plain_room)
        patched.setattr("opfuse.runtime.replay.program._size_on", lambda tensor, _: tensor.size)
        patched.setattr("opfuse.runtime.replay.program.spare_bytes", lambda device: SPARE)
        patched.setattr("opfuse.runtime.replay.program.raw_stream", lambda device: STREAM)
        yield cuda


def _plain_room(step: Step, device: torch.device | None) -> tuple[Sequence[int], torch.dtype] | None:
    return plain_room(step, device and torch.device("cpu"))
