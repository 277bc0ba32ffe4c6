"""CuPy, NVRTC and the driver's library, loaded at their first use.

No other module imports CuPy, and this one only by public names: ``RawModule`` and ``RawKernel`` load and launch kernels,
``cuda.driver`` and ``cuda.runtime`` serve programs. CuPy takes longer to import than a first plan to make, so its first kernels
compile meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from opfuse.errors import UnsupportedError, describe
from opfuse.kernels.engine.nvrtc import Nvrtc

SOURCES = Path(__file__).parents[1] / "cuda"
_DEFAULT_MAJOR = "13"  # the CUDA of torch's own wheels; named in advice where torch has none


@functools.cache
def cupy() -> Any:
    """CuPy. UnsupportedError if it is not installed, cannot be imported here, or was built for another CUDA than torch."""
    try:
        import cupy
    except ImportError as error:
        raise UnsupportedError(describe("CUDA kernels", wanted="CuPy", got=str(error), cure=_cure("CuPy"))) from None
    except OSError as error:  # it makes a directory for kernels that it compiles, of which there are none here
        cure = "name a directory that can be written in CUPY_CACHE_DIR"
        raise UnsupportedError(describe("CUDA kernels", wanted="a home for CuPy", got=str(error), cure=cure)) from None
    _require_same_cuda("CuPy", cupy.cuda.runtime.runtimeGetVersion() // 1000)
    return cupy


@functools.cache
def driver() -> Any:
    """CuPy's binding of the driver."""
    return cupy().cuda.driver


@functools.cache
def runtime() -> Any:
    """CuPy's binding of the runtime."""
    return cupy().cuda.runtime


@functools.cache
def nvrtc() -> Nvrtc:
    """The compiler; UnsupportedError if it cannot be loaded, or is of another CUDA than torch."""
    try:
        made = Nvrtc()
    except (ImportError, OSError, RuntimeError) as error:
        raise UnsupportedError(describe("CUDA kernels", wanted="NVRTC", got=str(error), cure=_cure("NVRTC"))) from None
    _require_same_cuda("NVRTC", made.version[0])
    return made


@functools.cache
def nvrtc_version() -> tuple[int, ...]:
    """The compiler's version. Its package tells it, in which the bindings look for the library first: to load that takes as long
    as to import CuPy, which a process that finds its kernels on disk need not do. Without the package the library tells it.
    """
    try:
        found = tuple(map(int, version(_library()).split(".")))
    except (PackageNotFoundError, ValueError):
        return nvrtc().version
    return found if str(found[0]) == _major() else nvrtc().version


_PACKAGES = {"CuPy": ("cupy-cuda{major}x>=14.2",), "NVRTC": ("cuda-bindings=={major}.*", "{nvrtc}")}
"""What to install; NVIDIA's package of NVRTC has the major version in its name before CUDA 13, and as its own since."""


def _cure(what: str) -> str:
    """What to install for the CUDA of this torch."""
    major = _major()
    library = _library() if major == "12" else f"{_library()}=={major}.*"
    wanted = " ".join(f"'{package.format(major=major, nvrtc=library)}'" for package in _PACKAGES[what])
    return f"pip install {wanted}, or set OPFUSE_REFERENCE=1 to compute with torch alone"


def _library() -> str:
    """NVIDIA's package of NVRTC."""
    return "nvidia-cuda-nvrtc-cu12" if _major() == "12" else "nvidia-cuda-nvrtc"


def _require_same_cuda(what: str, major: int) -> None:
    ours = torch.version.cuda
    if ours is not None and int(_major()) != major:
        text = describe(what, wanted=f"a build for CUDA {ours}, as torch's", got=f"CUDA {major}", cure=_cure(what))
        raise UnsupportedError(text)


def _major() -> str:
    """The major version of the CUDA that torch was built for."""
    return (torch.version.cuda or _DEFAULT_MAJOR).partition(".")[0]


class _Address(NamedTuple):
    """A stream by its address, in CUDA's protocol for streams of other libraries, which do not own it."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


@functools.cache
def stream_at(address: int) -> Any:
    """CuPy's view of torch's stream at ``address``."""
    return cupy().cuda.Stream.from_external(_Address(address))


class _OnDemand(ModuleType):
    """Stands in for a package until somebody asks for an attribute that it was not given; then the package is imported."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            sys.modules.pop(self.__name__, None)  # another thread may have
        return getattr(importlib.import_module(self.__name__), name)


@contextlib.contextmanager
def on_demand(*packages: str, **given: object) -> Iterator[None]:
    """Inside the block, modules of ``packages``, the outer named first, can be imported without importing these packages.

    given: attributes that the modules read from their packages. Packages that are imported already stay; importing a module of
    one that is not installed fails as ever.
    """
    made = []
    for name in packages:
        if name in sys.modules or (spec := find_spec(name)) is None:
            continue
        deferred = _OnDemand(name)
        vars(deferred).update(given, __path__=spec.submodule_search_locations)
        made.append((name, sys.modules.setdefault(name, deferred), deferred))
    try:
        yield
    finally:
        for name, found, deferred in made:
            if found is deferred and sys.modules.get(name) is deferred:
                sys.modules.pop(name, None)


@functools.cache
def libcuda() -> ctypes.CDLL:
    """The driver's library, for what CuPy has no binding of."""
    return ctypes.CDLL("libcuda.so.1")
