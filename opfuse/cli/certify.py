"""``opfuse doctor --certify``: tries every native product and kind of kernel on this device, and times products beside bf16.

Products are compared with exact ones (:mod:`opfuse.kernels.products.certificate`), casts bit for bit with their definition on the
CPU. Chains and norms are compared with their definition on the device, whose exponential is not CUDA's: within 4 units in the
last place, as their kernels are tested.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch

import opfuse
from opfuse import ops
from opfuse.cli.output import echo, echo_json
from opfuse.cli.results import show_rows
from opfuse.core.operation import BasicOperation
from opfuse.errors import OpfuseWarning, RecipeError, UnsupportedError, describe
from opfuse.formats import E4M3, NVFP4, ROWWISE, fp8_block, fp8_row, fp8_tensor, mxfp8
from opfuse.kernels.engine.registry import BITWISE, Tolerance, definitions_alone
from opfuse.kernels.products.backends import BACKENDS, Backend, backend_of
from opfuse.kernels.products.certificate import PairOperands, examine, random_plane
from opfuse.kernels.products.native import library_product, machine, native_refusal
from opfuse.recipes import RECIPES, Recipe
from opfuse.recipes.availability import device_arch
from opfuse.tensors import QuantizedTensor
from opfuse.tensors.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8RowQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)

QUANTIZERS: dict[str, Quantizer] = {
    "FP8 per tensor": Float8CurrentScalingQuantizer(E4M3.dtype),
    "FP8 per row": Float8RowQuantizer(E4M3.dtype),
    "FP8 in 1x128 blocks": Float8BlockQuantizer(E4M3.dtype, block_scaling_dim=1),
    "FP8 in 128x128 blocks": Float8BlockQuantizer(E4M3.dtype, block_scaling_dim=2),
    "MXFP8": MXFP8Quantizer(),
    "MXFP8, scales in tiles": MXFP8Quantizer(optimize_for_gemm=True),
    "NVFP4": NVFP4Quantizer(),
    "NVFP4, rotated": NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
}
OPS: dict[str, Callable[[], BasicOperation]] = {
    "GELU": ops.GELU,
    "SwiGLU": ops.SwiGLU,
    "RMSNorm": lambda: ops.RMSNorm(512),
    "LayerNorm": lambda: ops.LayerNorm(512),
}
_SHAPES = ((32, 32), (96, 512), (288, 1056), (1024, 2048))
_TIMED = 4096
_REPEATS = 20


def certify(*, as_json: bool) -> bool:
    """Tell what is right and how fast it is on the current CUDA device; whether all was right. UnsupportedError without one."""
    if not torch.cuda.is_available():
        cure = "run it on the machine that you will train on; without a GPU everything is emulated, and right"
        raise UnsupportedError(describe("doctor --certify", wanted="a CUDA device", got="none", cure=cure))
    rows = [*chain(_products(), _casts(), _chains())]
    if as_json:
        echo_json({"device": _device(), "rows": rows})
    else:
        echo(_device())
        shown = [(row["what"], row["result"], row.get("x bf16", "")) for row in rows]
        show_rows(("what", "result", f"x bf16 at {_TIMED}"), shown, title="certified here; paste this into a report of a fault")
    return all(row["right"] for row in rows)


def _device() -> str:
    major, minor = device_arch()
    name = torch.cuda.get_device_name()
    return f"opfuse {opfuse.__version__}, torch {torch.__version__}, {name}, compute capability {major}.{minor}"


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


# -- casts and chains ------------------------------------------------------------------------------------------------------------


def _casts() -> Iterator[dict[str, Any]]:
    for name, quantizer in QUANTIZERS.items():
        faults = (_cast_fault(quantizer, shape) for shape in _SHAPES)
        yield _row(f"cast to {name}", next(filter(None, faults), ""))


def _cast_fault(quantizer: Quantizer, shape: tuple[int, int]) -> str:
    x = _hard(shape)
    planes = zip(*(quantizer.quantize(each).tensors() for each in (x, x.cuda())), strict=True)
    return _first(planes, f"{shape[0]} x {shape[1]}")


def _hard(shape: tuple[int, int]) -> torch.Tensor:
    """Random bf16 values of many sizes, with zeros and outliers."""
    random = torch.Generator().manual_seed(shape[0])
    x = torch.randn(shape, generator=random) * torch.randn(shape, generator=random).exp2()
    x[::7, ::5] = 0
    x[shape[0] // 2, shape[1] // 3] = 3e4
    return x.to(torch.bfloat16)


def _chains() -> Iterator[dict[str, Any]]:
    for kind in (None, *RECIPES):
        recipe = None if kind is None else _recipe(kind)
        if kind is not None and recipe is None:
            continue
        for name, make in OPS.items():
            yield _row(f"{name}, forward and backward{'' if kind is None else f', under {kind}'}", _op_fault(make, recipe))


def _recipe(kind: str) -> Recipe | None:
    """The recipe of a kind with its defaults; None for one that has none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OpfuseWarning)
        try:
            return RECIPES[kind]()
        except RecipeError:
            return None


def _op_fault(make: Callable[[], BasicOperation], recipe: Recipe | None) -> str:
    results = []
    for computed in (definitions_alone(), nullcontext()):
        pipeline = ops.Sequential(make(), ops.Quantize()).to("cuda", torch.bfloat16)
        x = _hard((128, 512)).cuda().requires_grad_()
        with computed, opfuse.autocast(enabled=recipe is not None, recipe=recipe):
            y = pipeline(x)
            y = y.dequantize() if isinstance(y, QuantizedTensor) else y
            y.backward(torch.ones_like(y))
        results.append([y.detach(), x.grad, *[p.grad for p in pipeline.parameters()]])
    return _first(zip(*results, strict=True), "128 x 512", Tolerance(ulp=4))


def _first(pairs: Iterator[tuple[torch.Tensor | None, torch.Tensor | None]], where: str, tolerance: Tolerance = BITWISE) -> str:
    faults = (tolerance.mismatch(got, wanted) for wanted, got in pairs if wanted is not None and got is not None)
    return next((f"{where}: {fault}" for fault in faults if fault), "")
