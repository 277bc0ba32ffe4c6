"""Small calls of chains, on which kernels are compared with their definitions on a device that this project has not recorded.

Chains without exponentials have the bits of the definition; those with them are as near as a kernel's tolerance says.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from opfuse.formats import E4M3, NumberFormat, fp8_block, fp8_tensor, mxfp8
from opfuse.kernels.casts.encoding import Blocks, Encoding, Microscaled, RecordingScale, RowScaled
from opfuse.kernels.casts.trials import ODD, Draw, layouts, moved
from opfuse.kernels.engine.registry import Arguments, Case
from opfuse.numerics.activations import POINTWISE
from opfuse.numerics.chain import Stage, forward_chain
from opfuse.numerics.layouts import Layout

_EXACT: Sequence[tuple[Sequence[str], Draw]] = (
    (("bias", "relu"), Draw(nonfinite=True)),
    (("reglu", "constant_scale"), Draw(torch.float32)),
    (("relu", "constant_scale"), Draw(torch.float16, nonfinite=True, shape=ODD)),
)
_NEAR: Sequence[tuple[Sequence[str], Draw]] = (
    (("bias", "gelu"), Draw()),
    (("swiglu",), Draw()),
    (("add", "silu"), Draw()),
)
"""Of bf16, whose rounding hides what a derivative near its zero loses; no sum stands behind an exponential, for it may cancel."""

_NORMAL = 8.0
"""The largest magnitude of what an exponential is taken of: beyond it the sum of two results may cancel."""

_CASTS: Sequence[NumberFormat] = (fp8_tensor(E4M3), fp8_block(E4M3, 1), fp8_block(E4M3, 2), mxfp8(E4M3))


def _stages(names: Sequence[str], shape: tuple[int, int], dtype: torch.dtype) -> tuple[tuple[int, int], list[Stage]]:
    """The shape of the input of a chain whose result has ``shape``, and its stages; operands on the CPU."""
    stages: list[Stage] = []
    random = torch.Generator().manual_seed(3)
    for name in reversed(names):
        math = POINTWISE[name]
        sizes = {"row": shape[-1:], "column": shape[:-1], "full": shape}
        operands = {each: torch.randn(sizes[kind], generator=random).to(dtype) for each, kind in math.operands.items()}
        stages.insert(0, Stage(math, operands, dict.fromkeys(math.constants, 1.25)))
        shape = (shape[0], 2 * shape[1]) if math.is_gated else shape
    return shape, stages


def _on(stages: Sequence[Stage], device: torch.device) -> list[Stage]:
    return [Stage(stage.math, moved(dict(stage.operands), device), stage.constants) for stage in stages]


def _values(draw: Draw, shape: tuple[int, int], names: Sequence[str]) -> torch.Tensor:
    x = draw._replace(shape=shape).matrix()
    return x if (names, draw) in _EXACT else x.clamp(-_NORMAL, _NORMAL)


def _forward(names: Sequence[str], draw: Draw, device: torch.device, **options: Any) -> Arguments:
    shape, stages = _stages(names, draw.shape, draw.dtype)
    return Arguments((_values(draw, shape, names).to(device), _on(stages, device)), options)


def _backward(names: Sequence[str], draw: Draw, device: torch.device, **options: Any) -> Arguments:
    shape, stages = _stages(names, draw.shape, draw.dtype)
    x = _values(draw, shape, names)
    _, kept = forward_chain(x, stages, keep=[i for i, stage in enumerate(stages) if stage.math.needs_input])
    dy = torch.rand(draw.shape, generator=torch.Generator().manual_seed(9)).to(draw.dtype)  # positive: sums do not cancel
    return Arguments((dy.to(device), _on(stages, device), moved(kept, device)), options)


def _named(make: Any) -> dict[str, Case]:
    calls = [*(("exact", *each) for each in _EXACT), *(("near", *each) for each in _NEAR)]
    return {f"{kind} {' '.join(names)} {draw}": functools.partial(make, names, draw) for kind, names, draw in calls}


def forward() -> Mapping[str, Case]:
    """Chains whose result is stored."""
    return _named(_forward)


def backward() -> Mapping[str, Case]:
    """Gradients, of which those of operands are sums: near, since only their order is the definition's."""
    return {name.replace("exact bias", "near bias"): case for name, case in _named(_backward).items()}


def _recording(planes: Sequence[Layout], device: torch.device) -> Encoding:
    scale, amax = (torch.full((1,), value).to(device) for value in (3.7, 2.0**-20))
    return RecordingScale(scale, amax, planes)


_BY_FAMILY: Mapping[str, Callable[[Sequence[Layout], torch.device], Encoding]] = {
    "tensor": _recording,
    "row": lambda planes, _: RowScaled(planes),
    "block": lambda planes, _: Blocks(planes),
    "mx": lambda planes, _: Microscaled(planes),
}


def encoding_of(fmt: NumberFormat, shape: tuple[int, int], device: torch.device) -> Encoding:
    """The cast of a matrix to both planes of a format, in which trials of chains and of norms end."""
    return _BY_FAMILY[fmt.family](layouts(fmt, shape), device)


def _cast_forward(fmt: NumberFormat, names: Sequence[str], draw: Draw, device: torch.device) -> Arguments:
    args, options = _forward(names, draw, device)
    return Arguments((*args, encoding_of(fmt, draw.shape, device)), options)


def _cast_backward(fmt: NumberFormat, names: Sequence[str], draw: Draw, device: torch.device) -> Arguments:
    args, options = _backward(names, draw, device)
    shape, _ = _stages(names, draw.shape, draw.dtype)
    return Arguments((*args, encoding_of(fmt, shape, device)), options)


_CAST_DRAWS = (Draw(), Draw(), Draw(torch.float32))


def _cast(make: Any, chains: Sequence[tuple[str, Sequence[str]]]) -> Mapping[str, Case]:
    """Every cast of two chains."""
    turns = zip((*_CASTS, *_CASTS), itertools.cycle(_CAST_DRAWS), itertools.cycle(chains))
    return {
        f"{kind} {' '.join(names)} {draw} {fmt}": functools.partial(make, fmt, names, draw) for fmt, draw, (kind, names) in turns
    }


def cast_forward() -> Mapping[str, Case]:
    """Chains whose result is cast: of one without exponentials codes and scales are the definition's."""
    return _cast(_cast_forward, (("exact", ("bias", "relu")), ("near", ("swiglu",)), ("exact", ("reglu", "constant_scale"))))


def cast_backward() -> Mapping[str, Case]:
    """Chains whose gradient is cast."""
    exact = ("exact", ("relu", "constant_scale")), ("exact", ("reglu", "constant_scale"))
    return _cast(_cast_backward, (exact[0], ("near", ("swiglu",)), exact[1]))
