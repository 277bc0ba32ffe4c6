"""A user's CUDA text as ``cupy.RawKernel``: compiled by CuPy at its first launch, queued on torch's current stream."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from opfuse.errors import PlanMissError, describe
from opfuse.kernels.engine.bindings import cupy, stream_at
from opfuse.kernels.engine.launch import on_device
from opfuse.torch_private.devices import raw_stream


@dataclass(frozen=True)
class KernelText:
    """CUDA text with a forward and a backward kernel, and how they are launched.

    forward, backward: names of ``extern "C" __global__`` functions. dtypes: the C type that the macro ``scalar_t`` stands for,
    by the dtype that the op computes in. grid: ``"elements"``, a thread for each element; ``"rows"``, a block for each row.
    block: threads of a block. options: further options of the compiler, such as ``-I``.
    """

    code: str
    forward: str
    backward: str
    dtypes: Mapping[torch.dtype, str]
    grid: Literal["elements", "rows"] = "elements"
    block: int = 256
    options: tuple[str, ...] = ()

    def launch(self, entry: str, *tensors: torch.Tensor, constants: tuple[int | float, ...] = ()) -> None:
        """Queue kernel ``entry`` on torch's current stream of the tensors' device, without waiting for it.

        tensors: contiguous, of one shape, dtype and device, not empty. The kernel gets their addresses, the numbers of rows and
        of columns as ``long long``, and the constants. PlanMissError if it would be compiled while a stream is captured.
        """
        x = tensors[0]
        device, columns = x.get_device(), x.shape[-1] if x.dim() else 1
        rows = x.numel() // columns
        blocks = rows if self.grid == "rows" else -(-x.numel() // self.block)
        with on_device(device):
            kernel = _kernel(self.code, entry, (f"-Dscalar_t={self.dtypes[x.dtype]}", *self.options), device)
            arguments = (*(t.data_ptr() for t in tensors), rows, columns, *constants)
            kernel((blocks,), (self.block,), arguments, stream=stream_at(raw_stream(device)))


@functools.cache
def _kernel(code: str, entry: str, options: tuple[str, ...], device: int) -> Any:
    """The compiled kernel, loaded on ``device``, which must be the current one."""
    if torch.cuda.is_current_stream_capturing():
        where, cure = f"kernel {entry}", "run the same call once before the capture, with the same dtype"
        raise PlanMissError(describe(where, wanted="a loaded kernel during graph capture", got="its first use", cure=cure))
    kernel = cupy().RawKernel(code, entry, options)
    kernel.compile()
    return kernel
