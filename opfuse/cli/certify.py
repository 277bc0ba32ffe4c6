"""``opfuse doctor --certify``: tries every native product and kernel on this device, and times products beside bf16.

Products are compared with exact ones (:mod:`opfuse.kernels.products.certificate`), kernels of casts, chains and norms with their
definitions on the CPU: bit for bit, or, with exponentials, as near as a tolerance says. What this project has not recorded
gets a new certificate, in the place of one that a fault of the moment may have left.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch

import opfuse
import opfuse.inspect.casts
import opfuse.ops
from opfuse.cli.output import echo, echo_json
from opfuse.cli.results import show_rows
from opfuse.errors import UnsupportedError, describe
from opfuse.formats import E4M3, NVFP4, ROWWISE, fp8_block, fp8_row, fp8_tensor, mxfp8
from opfuse.kernels.engine.certificates import facts, is_recorded_arch, keep
from opfuse.kernels.engine.registry import Kernel, kernels
from opfuse.kernels.engine.registry import examine as examine_kernel
from opfuse.kernels.engine.registry import tried as kernel_tried
from opfuse.kernels.products.backends import BACKENDS, Backend, backend_of
from opfuse.kernels.products.certificate import PairOperands, examine, random_plane
from opfuse.kernels.products.certificate import tried as product_tried
from opfuse.kernels.products.native import library_product, machine, native_refusal
from opfuse.recipes.availability import device_arch

_TIMED = 4096
_REPEATS = 20


def certify(*, as_json: bool) -> bool:
    """Tell what is right and how fast it is on the current CUDA device; whether all was right. UnsupportedError without one."""
    if not torch.cuda.is_available():
        cure = "run it on the machine that you will train on; without a GPU everything is emulated, and right"
        raise UnsupportedError(describe("doctor --certify", wanted="a CUDA device", got="none", cure=cure))
    rows = [*chain(_products(), _kernels())]
    if as_json:
        echo_json({"device": _device(), "rows": rows})
    else:
        echo(", ".join(f"{name} {value}" for name, value in _device().items()))
        shown = [(row["what"], row["result"], row.get("x bf16", "")) for row in rows]
        show_rows(("what", "result", f"x bf16 at {_TIMED}"), shown, title="certified here; paste this into a report of a fault")
    return all(row["right"] for row in rows)


def _device() -> dict[str, Any]:
    return {"opfuse": opfuse.__version__, **facts(torch.cuda.current_device())}


def _row(what: str, fault: str, **more: Any) -> dict[str, Any]:
    return {"what": what, "result": fault or "right", "right": not fault, **more}


# -- products --------------------------------------------------------------------------------------------------------------------

_FORMATS = {
    "tensor": (fp8_tensor(E4M3), fp8_tensor(E4M3)),
    "row": (fp8_row(E4M3), fp8_row(E4M3)),
    "block": (fp8_block(E4M3, 1, pow2=True), fp8_block(E4M3, 2, pow2=True)),
    "mx": (mxfp8(E4M3), mxfp8(E4M3)),
    "nv": (NVFP4, NVFP4),
}
"""The formats of the left and right operand of each product that is timed."""


def _products() -> Iterator[dict[str, Any]]:
    device = torch.device("cuda", torch.cuda.current_device())
    for family, rows in BACKENDS.items():
        backend = backend_of(rows, machine(device_arch()))
        if isinstance(backend, str):
            yield {"what": rows[0].name, "result": f"emulated: {backend}", "right": True}
            continue
        found = examine(family, backend, library_product, device)
        if not backend.recorded:
            keep(product_tried(family, backend), device.index, found)
        yield _row(backend.name, found.fault, **({} if found.fault else {"x bf16": _speed(family, backend)}))


def _speed(family: str, backend: Backend) -> str:
    """How many times as fast as bf16 a square product is, casts not counted; of groups nothing is timed."""
    if family not in _FORMATS:
        return ""
    random = torch.Generator().manual_seed(0)
    left, right = (random_plane(fmt, ROWWISE, _TIMED, _TIMED, random).to("cuda") for fmt in _FORMATS[family])
    if native_refusal(left.layout, right.layout, torch.bfloat16, machine(device_arch())):
        return ""
    x, w = (torch.randn(_TIMED, _TIMED, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    ours = _milliseconds(lambda: library_product(backend, PairOperands(left, right), torch.bfloat16, backend.fast))
    return f"{_milliseconds(lambda: x @ w.t()) / ours:.2f}"


def _milliseconds(call: Callable[[], object]) -> float:
    """The median of several calls on the device."""
    times = []
    for _ in range(_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(statistics.median(times[_REPEATS // 4 :]))


# -- kernels ---------------------------------------------------------------------------------------------------------------------


def _kernels() -> Iterator[dict[str, Any]]:
    device = torch.device("cuda", torch.cuda.current_device())
    recorded = is_recorded_arch(torch.cuda.get_device_capability(device))
    for kernel in certified_kernels():
        found = examine_kernel(kernel, device)
        if not recorded:
            keep(kernel_tried(kernel), device.index, found)
        yield _row(f"kernel {kernel.name}, {kernel.tolerance}", found.fault)


def certified_kernels() -> Iterator[Kernel[Any, Any]]:
    """Those of casts, chains and norms."""
    return (kernel for kernel in kernels() if kernel.trials is not None)
