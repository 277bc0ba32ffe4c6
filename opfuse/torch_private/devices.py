"""The current device, its stream and its allocator, without the checks that cost the host more than the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opfuse.torch_private.names import private

_GPU_ONLY: dict[str, Any] = {"needs": "CUDA", "tried": ("2.11",)}
"""Of names that were tried on a GPU alone."""


def _is_current_stream(stream: Callable[[int], int]) -> bool:
    device = torch.cuda.current_device()
    with torch.cuda.stream(torch.cuda.Stream()):
        inside = stream(device) == torch.cuda.current_stream().cuda_stream != 0
    return inside and stream(device) == torch.cuda.current_stream().cuda_stream


raw_stream: Callable[[int], int] = private(
    "torch._C._cuda_getCurrentRawStream",
    _is_current_stream,
    use="launching kernels on torch's current stream",
    breaks="kernels would run on another stream than the operations around them",
    **_GPU_ONLY,
)
"""The address of the current stream of a device."""

current_device: Callable[[], int] = private(
    "torch._C._cuda_getDevice",
    lambda device: bool(device() == torch.cuda.current_device()),
    use="launching kernels on the device of their tensors",
    breaks="each launch would take a microsecond more, or fail",
    **_GPU_ONLY,
)
"""The number of the current CUDA device."""


def _allocates(guards: Any) -> bool:
    made = guards._empty_strided_cpu((2, 3), (1, 2), torch.bfloat16)
    return bool(made.shape == (2, 3) and made.stride() == (1, 2) and made.dtype == torch.bfloat16)


_guards: Any = private(
    "torch._C._dynamo.guards",
    _allocates,
    use="allocating the tensors of a repeated call by _empty_strided_cuda",
    breaks="each allocation would take the host four times as long",
)


def empty_on(device: torch.device) -> Callable[..., torch.Tensor] | None:
    """Torch's function that allocates on the current device of a type, by shape, strides and dtype; None if it has none.

    Code of torch.compile calls it; it takes the host a quarter of the time of ``torch.empty``.
    """
    found: Callable[..., torch.Tensor] | None = getattr(_guards, f"_empty_strided_{device.type}", None)
    return found
