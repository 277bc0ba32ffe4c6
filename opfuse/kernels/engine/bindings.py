"""CuPy's bindings of NVRTC, the driver and the runtime, and the driver itself, loaded at their first use.

No other module imports CuPy.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from opfuse.errors import UnsupportedError, describe
from opfuse.kernels.engine.cubins import make, private, root

SOURCES = Path(__file__).parents[1] / "cuda"
_CUPY_CACHE = "CUPY_CACHE_DIR"
_DEFAULT_MAJOR = "13"  # the CUDA of torch's own wheels; named in advice where torch has none


def require_same_cuda() -> None:
    """UnsupportedError unless CuPy and torch were built for the same major version of CUDA."""
    ours, theirs = torch.version.cuda, nvrtc().getVersion()[0]
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
def nvrtc() -> Any:
    """The compiler; UnsupportedError, with what to install, if it cannot be loaded."""
    _import("cupy")  # which the bindings import at their first use, with whatever is wrong with it
    bound = _import("cupy_backends.cuda.libs.nvrtc")
    try:
        bound.getVersion()
    except (RuntimeError, OSError, ImportError) as error:
        major = (torch.version.cuda or _DEFAULT_MAJOR).partition(".")[0]
        package = "nvidia-cuda-nvrtc-cu12" if major == "12" else f"nvidia-cuda-nvrtc=={major}.*"
        reason = str(error).strip().partition("\n")[0]
        raise UnsupportedError(describe("CUDA kernels", wanted="NVRTC", got=reason, cure=f"pip install '{package}'")) from None
    return bound


@functools.cache
def driver() -> Any:
    """The driver."""
    return _import("cupy_backends.cuda.api.driver")


@functools.cache
def runtime() -> Any:
    """The runtime."""
    return _import("cupy_backends.cuda.api.runtime")


@functools.cache
def libcuda() -> ctypes.CDLL:
    """The driver's library, for what CuPy has no binding of."""
    return ctypes.CDLL("libcuda.so.1")
