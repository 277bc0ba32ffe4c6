"""NVRTC, CuPy's bindings of the driver and the runtime, and the driver itself, loaded at their first use.

No other module imports CuPy. The package ``cupy`` takes longer to import than a first plan to make;
only kernels of a user need it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from opfuse.errors import UnsupportedError, describe
from opfuse.kernels.engine.nvrtc import Nvrtc, find

SOURCES = Path(__file__).parents[1] / "cuda"
_DEFAULT_MAJOR = "13"  # the CUDA of torch's own wheels; named in advice where torch has none


def require_same_cuda() -> None:
    """UnsupportedError unless CuPy and torch were built for the same major version of CUDA."""
    ours, theirs = torch.version.cuda, runtime().runtimeGetVersion() // 1000
    if ours is not None and int(_major()) != theirs:
        raise UnsupportedError(
            describe("CuPy", wanted=f"a build for CUDA {ours}, as torch's", got=f"CUDA {theirs}", cure=_cure())
        )


def _cure() -> str:
    """What to install for the CUDA of this torch."""
    return f"pip install 'cupy-cuda{_major()}x>=14.2', or set OPFUSE_REFERENCE=1 to compute with torch alone"


def _major() -> str:
    """The major version of the CUDA that torch was built for."""
    return (torch.version.cuda or _DEFAULT_MAJOR).partition(".")[0]


def _import(name: str) -> ModuleType:
    """A module of CuPy's bindings. UnsupportedError if there is none, or if it cannot be imported here."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnsupportedError(describe("CUDA kernels", wanted="CuPy", got=str(error), cure=_cure())) from None


@functools.cache
def nvrtc() -> Nvrtc:
    """The compiler; UnsupportedError, with what to install, if it cannot be loaded."""
    major = _major()
    try:
        return find(major)
    except OSError as error:
        package = "nvidia-cuda-nvrtc-cu12" if major == "12" else f"nvidia-cuda-nvrtc=={major}.*"
        text = describe("CUDA kernels", wanted="NVRTC", got=str(error), cure=f"pip install '{package}'")
        raise UnsupportedError(text) from None


@functools.cache
def driver() -> Any:
    """The driver. CuPy looks its functions up at the first call of one, which is made here."""
    bound: Any = _import("cupy_backends.cuda.api.driver")
    with _cupy_on_demand(), contextlib.suppress(RuntimeError):  # a fault is raised by the first call that needs the driver
        bound.ctxGetCurrent()
    return bound


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


def _cupy_on_demand() -> contextlib.AbstractContextManager[None]:
    """Inside the block, CuPy's bindings do not import the package ``cupy`` only to log the functions that they find."""
    return on_demand("cupy", _environment=SimpleNamespace(_log=lambda message: None))


@functools.cache
def runtime() -> Any:
    """The runtime."""
    return _import("cupy_backends.cuda.api.runtime")


@functools.cache
def cupy() -> Any:
    """The package ``cupy`` with its public names. UnsupportedError if it is missing, or built for another CUDA than torch."""
    package = _import("cupy")
    require_same_cuda()
    return package


@functools.cache
def libcuda() -> ctypes.CDLL:
    """The driver's library, for what CuPy has no binding of."""
    return ctypes.CDLL("libcuda.so.1")
