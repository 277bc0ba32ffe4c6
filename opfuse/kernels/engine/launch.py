"""From a cubin to work on a GPU: load it once, launch it on torch's stream."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from opfuse.errors import OpfuseWarning, PlanMissError, UnsupportedError, describe
from opfuse.events import HostCallBegan, HostCallEnded, KernelLaunched, emit, listeners, silenced, subscribed
from opfuse.kernels.engine.ahead import compile_together, in_turn, wait_for
from opfuse.kernels.engine.bindings import cupy, driver, runtime, stream_at
from opfuse.kernels.engine.compiling import (
    Resources,
    Variant,
    architecture,
    cubin_path,
    is_compiled,
    resources,
)
from opfuse.kernels.engine.cubins import cubin_cache, location
from opfuse.torch_private.devices import current_device, raw_stream


class Grid(NamedTuple):
    """Blocks of a launch, threads of a block, and bytes of dynamic shared memory."""

    blocks: int
    threads: int
    shared: int = 0


class Loaded(NamedTuple):
    """A kernel on a device.

    kernel: CuPy's RawKernel, which launches it. pointer: the driver's handle of it, for launches that are prepared once and
    repeated: they cost the host half of a call of the RawKernel.
    """

    kernel: Any
    pointer: int


_loaded: dict[tuple[Variant, str, int], Loaded] = {}
"""The kernels that are loaded, which are never unloaded."""


def launch(variant: Variant, entry: str, grid: Grid, layout: struct.Struct, *fields: int | float, device: int) -> None:
    """Queue kernel ``entry`` of ``variant`` on torch's current stream of ``device``, without waiting for anything.

    Its one parameter is a struct passed by value: ``fields`` packed by ``layout``, tensors by their ``data_ptr()``. Only the
    first launch on a device loads the kernel, and compiles it if it must; PlanMissError if a stream is then being captured.
    """
    if _parameters.dry:
        return emit(KernelLaunched(variant, entry, grid, layout, fields, device))
    if current_device() != device:  # torch.cuda.current_device() without its checks
        with torch.cuda.device(device):
            return launch(variant, entry, grid, layout, *fields, device=device)
    if KernelLaunched in listeners():
        emit(KernelLaunched(variant, entry, grid, layout, fields, device))
    kernel = loaded(variant, entry, device).kernel
    layout.pack_into(_parameters.buffer, 0, *fields)
    if device not in _parameters.bound:
        bind(device)
    stream = stream_at(raw_stream(device))
    # RawKernel hands its keywords on to cupy.cuda.Function, which takes a stream; CuPy's current stream stays the user's.
    kernel((grid.blocks,), (grid.threads,), _parameters.arguments, shared_mem=grid.shared, stream=stream)


def load(variant: Variant, entry: str, device: int) -> Loaded:
    """Kernel ``entry`` of a variant, loaded on ``device`` and remembered."""
    if torch.cuda.is_current_stream_capturing():
        where, cure = f"kernel {entry} of {variant.source}", "run the same call once before the capture, with the same sizes"
        raise PlanMissError(describe(where, wanted="a loaded kernel during graph capture", got="its first use", cure=cure))
    arch, cache = architecture(device), cubin_cache(location())
    if (coming := _parameters.coming) is not None and not is_compiled(variant, arch, cache):
        _parameters.coming = None
        compile_together(_one_after_another(variant, coming), arch, cache)
    raw_module = cupy().RawModule  # imported while threads compile
    wait_for(variant, arch, cache)
    path = cubin_path(variant, arch, cache)
    tell_of_spills(variant, arch, resources(variant, arch, cache))
    with torch.cuda.device(device):
        kernel = raw_module(path=path).get_function(entry)
        most = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
        kernel.max_dynamic_shared_size_bytes = most - kernel.shared_size_bytes
        made = _loaded[variant, entry, device] = Loaded(kernel, kernel.kernel.ptr)
    return made


def _one_after_another(variant: Variant, coming: Callable[[], Iterable[Variant]]) -> Iterator[Variant]:
    """``variant``, then those of ``coming``, so that compiling begins while the others are looked for."""
    yield variant
    yield from in_turn(coming())


def tell_of_spills(variant: Variant, arch: str, used: Mapping[str, Resources]) -> None:
    """Warn of kernels that spill on every rung of the ladder, as only a user's own expressions make them."""
    got = ", ".join(f"{each.spills} bytes spilled by {entry}" for entry, each in used.items() if each.spills)
    if not got:
        return
    (what,) = variant.generated.splitlines()[:1] or [variant.source]
    cure = "declare lighter expressions, or give the op a pipeline of its own; results are right as it is, but slower"
    text = describe(f"{what.removeprefix('// ').rstrip('.')} on {arch}", wanted="registers for all of it", got=got, cure=cure)
    warnings.warn(text, OpfuseWarning, stacklevel=2)


def loaded(variant: Variant, entry: str, device: int) -> Loaded:
    """Kernel ``entry`` of a variant on ``device``, loaded if it is not yet."""
    return _loaded.get((variant, entry, device)) or load(variant, entry, device)


def is_recorded() -> bool:
    """Whether a recorder listens, which has to ask functions of the host again at each repetition."""
    return HostCallEnded in listeners()


def host_call(function: Callable[[], Sequence[torch.Tensor]]) -> Sequence[torch.Tensor]:
    """What a function of the host returns, which kernels then read; a repetition has to call it again."""
    if not is_recorded():
        return function()
    tensors = None
    emit(HostCallBegan())
    try:
        tensors = function()
    finally:
        emit(HostCallEnded(function, tensors))
    return tensors


@contextlib.contextmanager
def compiled_ahead(coming: Callable[[], Iterable[Variant]]) -> Iterator[None]:
    """Inside the block, when this thread first has to compile a kernel, those of ``coming`` are compiled beside it."""
    before, _parameters.coming = _parameters.coming, coming
    try:
        yield
    finally:
        _parameters.coming = before


@contextlib.contextmanager
def dry_run() -> Iterator[list[Variant]]:
    """Inside the block, this thread queues no kernel: the list gets their variants, and results stay uninitialized.

    Listeners around it get no events, since nothing that it runs counts.
    """
    variants: list[Variant] = []
    before, _parameters.dry = _parameters.dry, True
    try:
        with silenced(), subscribed(lambda launched: variants.append(launched.variant), KernelLaunched):
            yield variants
    finally:
        _parameters.dry = before


def is_dry() -> bool:
    """Whether this thread queues no kernel: it is inside of :func:`dry_run`."""
    return _parameters.dry


def is_current(device: int) -> bool:
    """Whether ``device`` is the current one of this thread, and its context is bound."""
    return current_device() == device and driver().ctxGetCurrent() != 0


@contextlib.contextmanager
def on_device(device: int) -> Iterator[None]:
    """Inside the block, this thread launches on ``device``."""
    with torch.cuda.device(device):
        bind(device)
        yield


def bind(device: int) -> None:
    """Give this thread the context of ``device``, which must be the current one, if it has none.

    The threads of a backward pass have none, and a kernel's launch does not need one. But without it each call of the runtime
    looks for it anew (``torch.empty`` takes 8 us in place of 2), and torch warns before a product of cuBLAS.
    """
    if driver().ctxGetCurrent() == 0:
        runtime().setDevice(device)
    _parameters.bound.add(device)


MOST_PARAMETERS = 32764
"""How many bytes of parameters a kernel can have, from CUDA 12.1 and compute capability 7.0 on."""


class _Parameters(threading.local):
    """A thread's own buffer: the driver copies parameters during the call, which another thread must not overwrite."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(MOST_PARAMETERS)
        self.dry = False
        self.bound: set[int] = set()
        self.coming: Callable[[], Iterable[Variant]] | None = None

    @functools.cached_property
    def arguments(self) -> tuple[Any]:
        """A kernel's one argument, which lies in the buffer. Of a NumPy scalar, CuPy takes microseconds to find the address."""
        return (cupy().cuda.function.CPointer(ctypes.addressof(self.buffer)),)


_parameters = _Parameters()


# -- tensors without memory ------------------------------------------------------------------------------------------------------
# Meta tensors that stand for those of a GPU, so that a call without memory allocates what it would allocate there. Inside of
# standing_for, the launch of a kernel makes its results and what it needs beside them, and queues nothing; and products are
# native, or in groups, where they are on such a device. Outside, definitions compute meta tensors as those of a CPU.

_stands_for: ContextVar[tuple[tuple[int, int], tuple[int, int]]] = ContextVar("opfuse_stands_for", default=((0, 0), (0, 0)))


@contextlib.contextmanager
def standing_for(arch: tuple[int, int], cuda: tuple[int, int]) -> Iterator[None]:
    """Inside the block, meta tensors of this context stand for those of a GPU of this compute capability, under this CUDA."""
    reset = _stands_for.set((arch, cuda))
    try:
        yield
    finally:
        _stands_for.reset(reset)


stood_for = _stands_for.get
"""Compute capability and CUDA version of what meta tensors stand for; zeros where they stand for nothing."""


def stands_for_gpu() -> bool:
    """Whether meta tensors stand for those of a GPU."""
    return stood_for()[0] > (0, 0)


def as_on_gpu(x: torch.Tensor) -> bool:
    """Whether ``x`` is on a GPU, or stands for a tensor there."""
    return x.is_cuda or (x.is_meta and stands_for_gpu())


def arch_of(device: int) -> tuple[int, int]:
    """The compute capability of a CUDA device; of -1, that of meta tensors, what these stand for."""
    return torch.cuda.get_device_capability(device) if device >= 0 else stood_for()[0]


# -- capture ---------------------------------------------------------------------------------------------------------------------
# A CUDA graph would replay what the host read or made while it was captured.


def is_capturing() -> bool:
    """Whether what is queued now becomes a part of a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def check_capture(where: str, *, got: str, cure: str) -> None:
    """UnsupportedError while a CUDA graph is captured."""
    if is_capturing():
        wanted = "what a CUDA graph repeats with other values"
        raise UnsupportedError(describe(f"{where} during graph capture", wanted=wanted, got=got, cure=cure))
