"""One way from a .cu file to work on a GPU: assemble one text, compile it, keep the cubin, launch it on torch's stream.

The text that is compiled holds everything: the definitions, the headers and the kernel. NVRTC is called with flags of our own,
since CuPy's own compilation always flushes subnormals, which E8M0 scales need. Compiling needs no GPU. This is the only module
that imports CuPy, and it does so at the first use: its bindings of NVRTC, the driver and the runtime are all that is used of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import json
import os
import re
import struct
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch

from opfuse.errors import KernelError, OpfuseWarning, PlanMissError, UnsupportedError, describe
from opfuse.kernels.engine.cubins import CUBIN, FACTS, CubinCache, cubin_cache, location, make, private, root
from opfuse.kernels.engine.ladder import rungs

SOURCES = Path(__file__).parents[1] / "cuda"
ARCHITECTURES = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a")
"""What every kernel is compiled for in the tests; a device of another architecture gets its own."""

FLAGS = (
    "-ftz=false",
    "-fmad=false",
    "-prec-div=true",
    "-prec-sqrt=true",
    "--std=c++17",
    "-default-device",
    "--ptxas-options=-v",
)
UNCACHED = "--no-cache"
"""From CUDA 13 on NVRTC keeps results of its own, without their logs; what is kept is ours to decide, and logs are read."""

_INCLUDE = re.compile(r'#include "(\w+\.cuh)"')
_ENTRY = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers([^\n]*)", re.S
)
_SHARED = re.compile(r"(\d+) bytes smem")
_GENERATED = "generated.cuh"
_CUPY_CACHE = "CUPY_CACHE_DIR"
_DEFAULT_MAJOR = "13"  # the CUDA of torch's own wheels; named in advice where torch has none


class Variant(NamedTuple):
    """One compilation of a .cu file: the file's name, definitions ``NAME=value`` of its free names, and text written for it.

    The text takes the place of ``#include "generated.cuh"``.
    """

    source: str
    defines: tuple[str, ...] = ()
    generated: str = ""


class Resources(NamedTuple):
    """What one thread or block of a kernel uses: registers, spilled bytes, bytes of static shared memory."""

    registers: int
    spills: int
    shared: int


@dataclass(frozen=True)
class Compiled:
    """What NVRTC made of one text. ``entries`` has the resources of each kernel in it, by name."""

    arch: str
    cubin: bytes
    ptx: str
    log: str
    text: str

    @property
    def entries(self) -> dict[str, Resources]:
        found = {}
        for name, stores, loads, registers, rest in _ENTRY.findall(self.log):
            shared = _SHARED.search(rest)
            found[name] = Resources(int(registers), int(stores) + int(loads), int(shared[1]) if shared else 0)
        return found

    @property
    def spills(self) -> int:
        """Bytes that the threads of all kernels spill."""
        return sum(used.spills for used in self.entries.values())


class Grid(NamedTuple):
    """Blocks of a launch, threads of a block, and bytes of dynamic shared memory."""

    blocks: int
    threads: int
    shared: int = 0


# -- compiling ---------------------------------------------------------------------------------------------------------------


@functools.cache
def assemble(variant: Variant) -> str:
    """The one text of a variant: definitions, then the file with every header in place of its first #include.

    ``#line`` makes messages speak of the files.
    """
    seen: set[str] = set()

    def paste(name: str) -> list[str]:
        lines = [f'#line 1 "{name}"']
        text = variant.generated if name == _GENERATED else (SOURCES / name).read_text()
        for number, line in enumerate(text.splitlines(), 1):
            include = _INCLUDE.match(line)
            if include is None:
                lines.append("" if line == "#pragma once" else line)
            elif include[1] not in seen:
                seen.add(include[1])
                lines += [*paste(include[1]), f'#line {number + 1} "{name}"']
            else:
                lines.append("")
        return lines

    defines = [f"#define {define.replace('=', ' ', 1)}" for define in variant.defines]
    return "\n".join([*defines, *paste(variant.source), ""])


def compile_text(text: str, arch: str, name: str = "kernel.cu") -> Compiled:
    """``text`` for ``arch``, such as ``"sm_90a"``; no GPU is needed. KernelError with the compiler's messages if it refuses."""
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(text, name, (), ())
    try:
        nvrtc.compileProgram(program, (f"-arch={arch}", *FLAGS, *([UNCACHED] if nvrtc.getVersion() >= (13, 0) else [])))
        return Compiled(arch, nvrtc.getCUBIN(program), nvrtc.getPTX(program).decode(), nvrtc.getProgramLog(program), text)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program) or str(error)
        raise KernelError(f"{name} for {arch} does not compile.\n{log}") from None
    finally:
        nvrtc.destroyProgram(program)


def architectures() -> tuple[str, ...]:
    """What this NVRTC compiles for, with the targets of one device (a) and of a family (f); UnsupportedError without NVRTC."""
    oldest = {"": 0, "a": 90, "f": 100}
    numbers = sorted(_nvrtc().getSupportedArchs())
    return tuple(f"sm_{number}{suffix}" for number in numbers for suffix, first in oldest.items() if number >= first)


def compile_variant(variant: Variant, arch: str) -> Compiled:
    """The variant for ``arch`` on the first of its :func:`rungs` whose kernels spill nothing; else on that which spills least."""
    tried: list[Compiled] = []
    for defines in rungs(variant.defines):
        tried.append(compile_text(assemble(variant._replace(defines=defines)), arch, variant.source))
        if not tried[-1].spills:
            return tried[-1]
    return min(tried, key=lambda made: made.spills)


def cubin(variant: Variant, arch: str, cache: CubinCache) -> bytes:
    """The variant's cubin, compiled if the cache does not have it."""
    return _made(variant, arch, cache, CUBIN)


def resources(variant: Variant, arch: str, cache: CubinCache) -> dict[str, Resources]:
    """What each kernel of the variant uses, by entry; compiled if the cache does not know."""
    found = json.loads(_made(variant, arch, cache, FACTS))
    return {entry: Resources(**used) for entry, used in found.items()}


def cache_key(*parts: str) -> str:
    """The name in the cache of what is made from ``parts`` by this compiler and these flags."""
    return hashlib.sha256("\0".join([*parts, *FLAGS, *map(str, _nvrtc().getVersion())]).encode()).hexdigest()


def _made(variant: Variant, arch: str, cache: CubinCache, kind: str) -> bytes:
    key = cache_key(assemble(variant), arch, *map(" ".join, rungs(variant.defines)))
    found = cache.find(key, kind)
    if found is not None:
        return found
    made = compile_variant(variant, arch)
    facts = {entry: used._asdict() for entry, used in made.entries.items()}
    contents = {FACTS: json.dumps(facts).encode(), CUBIN: made.cubin}
    cache.store_source(key, made.text)
    for each, content in contents.items():
        cache.store(key, content, each)
    return contents[kind]


def architecture(device: int) -> str:
    """The target of a CUDA device, with its own instructions where it has any of its own."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


# -- launching ---------------------------------------------------------------------------------------------------------------


_functions: dict[tuple[Variant, str, int], int] = {}
"""The driver's handles of the kernels that are loaded, which are never unloaded."""


def launch(variant: Variant, entry: str, grid: Grid, layout: struct.Struct, *fields: int | float, device: int) -> None:
    """Queue kernel ``entry`` of ``variant`` on torch's current stream of ``device``, without waiting for anything.

    Its one parameter is a struct passed by value: ``fields`` packed by ``layout``, tensors by their ``data_ptr()``. Only the
    first launch on a device loads the kernel, and compiles it if it must; PlanMissError if a stream is then being captured.
    """
    if torch._C._cuda_getDevice() != device:  # torch.cuda.current_device() without its checks
        with torch.cuda.device(device):
            return launch(variant, entry, grid, layout, *fields, device=device)
    if _parameters.listener is not None:
        _parameters.listener.launched(Launch(variant, entry, grid, layout, fields, device))
    handle = function(variant, entry, device)
    layout.pack_into(_parameters.buffer, 0, *fields)
    bind(device)
    stream = torch._C._cuda_getCurrentRawStream(device)
    driver().launchKernel(handle, grid.blocks, 1, 1, grid.threads, 1, 1, grid.shared, stream, _parameters.address, 0)


def load(variant: Variant, entry: str, device: int) -> int:
    """The driver's handle of kernel ``entry`` of a variant on ``device``, which must be the current one; remembered."""
    if torch.cuda.is_current_stream_capturing():
        where, cure = f"kernel {entry} of {variant.source}", "run the same call once before the capture, with the same sizes"
        raise PlanMissError(describe(where, wanted="a loaded kernel during graph capture", got="its first use", cure=cure))
    require_same_cuda()
    arch, cache = architecture(device), cubin_cache(location())
    image = cubin(variant, arch, cache)
    tell_of_spills(variant, arch, resources(variant, arch, cache))
    bind(device)
    cuda = driver()
    handle: int = cuda.moduleGetFunction(cuda.moduleLoadData(image), entry)
    most = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    static = cuda.funcGetAttribute(cuda.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, handle)
    cuda.funcSetAttribute(handle, cuda.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, most - static)
    _functions[variant, entry, device] = handle
    return handle


def tell_of_spills(variant: Variant, arch: str, used: Mapping[str, Resources]) -> None:
    """Warn of kernels that spill on every rung of the ladder: exotic ones, whose expressions are their user's own."""
    got = ", ".join(f"{each.spills} bytes spilled by {entry}" for entry, each in used.items() if each.spills)
    if not got:
        return
    (what,) = variant.generated.splitlines()[:1] or [variant.source]
    cure = "declare lighter expressions, or give the op a pipeline of its own; results are right as it is, but slower"
    text = describe(f"{what.removeprefix('// ').rstrip('.')} on {arch}", wanted="registers for all of it", got=got, cure=cure)
    warnings.warn(text, OpfuseWarning, stacklevel=2)


def function(variant: Variant, entry: str, device: int) -> int:
    """The driver's handle of kernel ``entry`` of a variant on ``device``, loaded if it is not yet."""
    return _functions.get((variant, entry, device)) or load(variant, entry, device)


class Launch(NamedTuple):
    """The arguments of :func:`launch`."""

    variant: Variant
    entry: str
    grid: Grid
    layout: struct.Struct
    fields: Sequence[int | float]
    device: int


class Listener(Protocol):
    """Who is told of launches."""

    def launched(self, launch: Launch) -> None:
        """A kernel is about to be queued."""

    def call(self, function: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Call a function of the host whose tensors kernels read."""


@contextlib.contextmanager
def listening(to: Listener) -> Iterator[None]:
    """Inside the block, tell of what this thread launches."""
    before, _parameters.listener = _parameters.listener, to
    try:
        yield
    finally:
        _parameters.listener = before


def listener() -> Listener | None:
    """Who is told of what this thread launches."""
    return _parameters.listener


def is_current(device: int) -> bool:
    """Whether this thread would launch on ``device``, and has its context."""
    return torch._C._cuda_getDevice() == device and driver().ctxGetCurrent() != 0


@contextlib.contextmanager
def on_device(device: int) -> Iterator[None]:
    """Inside the block, this thread launches on ``device``."""
    with torch.cuda.device(device):
        bind(device)
        yield


def bind(device: int) -> None:
    """Give this thread the context of ``device``, which must be the current one, if it has none.

    The threads of a backward pass have none, and without one each call of the runtime looks for it anew: ``torch.empty`` takes
    8 us in place of 2 there.
    """
    if driver().ctxGetCurrent() == 0:
        _runtime().setDevice(device)


class _Parameters(threading.local):
    """A thread's own buffer: the driver copies parameters during the call, which another thread must not overwrite."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(4096)
        self.pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.buffer))
        self.address = ctypes.addressof(self.pointers)
        self.listener: Listener | None = None


_parameters = _Parameters()


# -- CuPy --------------------------------------------------------------------------------------------------------------------


def require_same_cuda() -> None:
    """UnsupportedError unless CuPy and torch were built for the same major version of CUDA."""
    ours, theirs = torch.version.cuda, _nvrtc().getVersion()[0]
    if ours is not None and int(ours.partition(".")[0]) != theirs:
        raise UnsupportedError(
            describe("CuPy", wanted=f"a build for CUDA {ours}, as torch's", got=f"CUDA {theirs}", cure=_cure())
        )


def _cure() -> str:
    """What to install for the CUDA of this torch."""
    major = (torch.version.cuda or _DEFAULT_MAJOR).partition(".")[0]
    return f"pip install 'cupy-cuda{major}x>=14.2', or set OPFUSE_REFERENCE=1 to compute with torch alone"


def _import(name: str) -> ModuleType:
    """A module of CuPy. UnsupportedError if there is none, or if it cannot be imported here."""
    _give_cupy_a_directory()
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnsupportedError(describe("CUDA kernels", wanted="CuPy", got=str(error), cure=_cure())) from None
    except OSError as error:
        wanted, cure = "a directory that CuPy can make", f"set {_CUPY_CACHE} to a directory of yours"
        raise UnsupportedError(describe("import of CuPy", wanted=wanted, got=str(error), cure=cure)) from None


@functools.cache
def _give_cupy_a_directory() -> None:
    """See that CuPy can make its cache directory, without which it cannot be imported; nothing of ours is kept there.

    Where neither the caller nor the home directory has one for it, it gets one beside our own, or one that is there already and
    can be trusted as the code in it is.
    """
    if os.environ.get(_CUPY_CACHE) or "cupy" in sys.modules:
        return
    with contextlib.suppress(OSError):
        return make(Path(os.path.expanduser("~/.cupy/kernel_cache")))
    directory = root() / "cupy"
    with contextlib.suppress(OSError):
        make(directory)
    os.environ[_CUPY_CACHE] = str(SOURCES if private(directory) or not directory.is_dir() else directory)


@functools.cache
def _nvrtc() -> Any:
    _import("cupy")  # which the bindings import at their first use, with whatever is wrong with it
    nvrtc = _import("cupy_backends.cuda.libs.nvrtc")
    try:
        nvrtc.getVersion()
    except (RuntimeError, OSError, ImportError) as error:
        major = (torch.version.cuda or _DEFAULT_MAJOR).partition(".")[0]
        package = "nvidia-cuda-nvrtc-cu12" if major == "12" else f"nvidia-cuda-nvrtc=={major}.*"
        reason = str(error).strip().partition("\n")[0]
        raise UnsupportedError(describe("CUDA kernels", wanted="NVRTC", got=reason, cure=f"pip install '{package}'")) from None
    return nvrtc


@functools.cache
def driver() -> Any:
    """CuPy's binding of the driver."""
    return _import("cupy_backends.cuda.api.driver")


@functools.cache
def _runtime() -> Any:
    return _import("cupy_backends.cuda.api.runtime")
