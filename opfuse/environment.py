"""The environment variables of opfuse: one table, and a word about names that are nearly in it.

Variables of TransformerEngine, which stand in for fields of recipes, are named where those fields are declared.
"""

from __future__ import annotations

import functools
import os
import warnings
from typing import NamedTuple

from opfuse.errors import OpfuseWarning, describe, nearest

PREFIX = "OPFUSE_"

VARIABLES = {
    "OPFUSE_BACKWARD_OVERRIDE": "the backward_override of recipes that are given none: high_precision, dequantized or none",
    "OPFUSE_CACHE_DIR": "where compiled kernels are kept, instead of the user's cache directory",
    "OPFUSE_DEBUG": "1: an error of the command line shows where it came from",
    "OPFUSE_LAUNCH_GRAPHS": "0: what a recorded segment queues on a GPU is queued one by one, and no CUDA graph stands for it",
    "OPFUSE_PROGRAM_BYTES": "bytes of the host's memory that recordings of a process may take before the least recently used are "
    "dropped; 536870912 if it is not set",
    "OPFUSE_PROGRAMS": "0: segments of plans are interpreted at every call, in place of being recorded once and repeated",
    "OPFUSE_TRACE": "a directory into which every process writes its plans, keys and misses, for opfuse cache, report and diff",
    "OPFUSE_TRACE_ARGUMENTS": "1: traces have the arguments of the command line, which may hold secrets, in place of ***",
    "OPFUSE_REFERENCE": "1: the definitions in torch compute everything, in place of CUDA kernels",
}
"""Every variable that is read here, and what it says."""

OTHERS = (
    *("CUBLASLT_WORKSPACE_SIZE", "CUBLAS_WORKSPACE_CONFIG"),
    *("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "CUDA_VISIBLE_DEVICES"),
    *("MKL_NUM_THREADS", "NCCL_ALGO", "NCCL_PROTO", "NVIDIA_TF32_OVERRIDE", "NVIDIA_VISIBLE_DEVICES"),
    *("OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND", "OMP_WAIT_POLICY"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING"),
    *("TORCHDYNAMO_DISABLE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT", "TORCH_COMPILE_DISABLE"),
)
"""Variables of others that may change what is computed, or how fast. Names, not their beginnings: NVIDIA_API_KEY is a secret."""


def variable(name: str) -> str:
    """The text of a variable without spaces around it; empty if it is not set.

    The first call of a process warns of variables that begin like those of opfuse and that nothing reads, and of those
    that are no switch, or no number, where one is wanted.
    """
    _warn_of_faults()
    return os.environ.get(name, "").strip()


SWITCHES = ("OPFUSE_DEBUG", "OPFUSE_LAUNCH_GRAPHS", "OPFUSE_PROGRAMS", "OPFUSE_REFERENCE", "OPFUSE_TRACE_ARGUMENTS")
"""Those that are 0 or 1."""

NUMBERS = {"OPFUSE_PROGRAM_BYTES": 1 << 29}
"""Those that are whole numbers, and what they are if they are not set."""


def number(name: str) -> int:
    """The number that a variable of :data:`NUMBERS` says; the one there if it says none."""
    text = variable(name)
    return int(text) if text.isdecimal() else NUMBERS[name]


class MisreadVariable(NamedTuple):
    """What is wrong with a variable that is set. problem: in a few words."""

    problem: str
    cure: str


def faults() -> dict[str, MisreadVariable]:
    """Variables that begin with ``OPFUSE_`` and are read by nothing, switches that are neither 0 nor 1, and no numbers."""
    found = {}
    for name in sorted(name for name in os.environ if name.startswith(PREFIX)):
        value = os.environ[name].strip()
        if name not in VARIABLES:
            found[name] = MisreadVariable(
                "nothing reads it", f"unset it, or use one of {', '.join(VARIABLES)}{nearest(name, VARIABLES)}"
            )
        elif name in SWITCHES and value not in ("", "0", "1"):
            found[name] = MisreadVariable(f"{value!r} is neither 0 nor 1", f"set it to {VARIABLES[name]}")
        elif name in NUMBERS and value and not value.isdecimal():
            found[name] = MisreadVariable(f"{value!r} is no whole number", f"say {VARIABLES[name]}")
    return found


@functools.cache
def _warn_of_faults() -> None:
    for name, fault in faults().items():
        text = describe("environment", wanted="variables that opfuse reads", got=f"{name}: {fault.problem}", cure=fault.cure)
        warnings.warn(text, OpfuseWarning, stacklevel=3)
