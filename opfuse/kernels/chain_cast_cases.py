"""The chains with casts that the kernels are compared with their definition on."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from opfuse.formats import COLUMNWISE, E4M3, E5M2, ROWWISE, Element, Usage, fp8_block, fp8_tensor
from opfuse.kernels.chain_cases import FP16, FP32, Chain
from opfuse.kernels.encoding import Blocks, Recording
from opfuse.kernels.layouts import Layout
from opfuse.kernels.registry import Arguments, Case

_FORWARD = (
    Chain(("bias", "gelu"), (272, 200)),
    Chain(("bias", "gelu"), (300, 264), source=FP32),
    Chain(("bias", "gelu"), (3, 67, 40), source=FP32, rounding="single"),
    Chain(("bias", "gelu"), (5, 67)),
    Chain(("glu",), (129, 9)),
    Chain(("bias", "swiglu"), (257, 128)),
    Chain(("bias", "swiglu"), (144, 192), interleave=64),
    Chain(("bias", "reglu"), (65, 48), FP16, interleave=8),
    Chain(("bias", "softsign", "dropout"), (130, 520), FP16, misaligned=True),
    Chain(("bias", "constant_scale", "add"), (65, 136), FP32),
    Chain(("scaled_srelu",), (512, 64)),
)
_BACKWARD = (
    *_FORWARD,
    Chain(("bias",), (300, 264)),
    Chain(("add", "bias"), (16, 64), FP32),
    Chain(("bias", "scaled_swiglu", "bias"), (300, 64), interleave=64),
    Chain(("bias", "reglu", "relu", "reglu"), (65, 48), FP16),
)
_PLANES: tuple[tuple[Usage, ...], ...] = ((ROWWISE, COLUMNWISE), (ROWWISE,), (COLUMNWISE,))
_ELEMENTS = (E4M3, E5M2)


class _Planes(NamedTuple):
    """What is made of the result."""

    usages: tuple[Usage, ...]
    element: Element
    stores: bool


def _call(chain: Chain, direction: str, planes: _Planes, device: torch.device) -> Arguments:
    args, kwargs = getattr(chain, direction)(device)
    shape = args[0].shape
    if direction == "backward":
        shape, _ = chain.stages(device, chain.generator())
    elif args[1][-1].math.is_gated:
        shape = chain.shape
    matrix = (torch.Size(shape[:-1]).numel(), shape[-1])
    layouts = [Layout(fp8_tensor(planes.element), usage, matrix) for usage in planes.usages]
    encode = Recording(torch.full((1,), 3.7, device=device), torch.full((1,), 2.0**-20, device=device), layouts)
    return Arguments((*args, encode), {**kwargs, "stores": planes.stores})


def _cases(direction: str, chains: Sequence[Chain]) -> dict[str, Case]:
    turns = zip(itertools.cycle(_PLANES), itertools.cycle(_ELEMENTS), itertools.cycle((False, False, True, False)))
    made = [(chain, _Planes(*turn)) for chain, turn in zip((*chains, *chains), turns)]
    return {
        f"{chain.name}, {planes.element.name}, {'+'.join(planes.usages)}{', stored' * planes.stores}": functools.partial(
            _call, chain, direction, planes
        )
        for chain, planes in made
    }


FORWARD, BACKWARD = _cases("forward", _FORWARD), _cases("backward", _BACKWARD)


def _blocks(chain: Chain, planes: _Planes, dims: int, device: torch.device) -> Arguments:
    args, kwargs = chain.forward(device)
    matrix = (torch.Size(chain.shape[:-1]).numel(), chain.shape[-1])
    layouts = [Layout(fp8_block(planes.element, dims), usage, matrix) for usage in planes.usages]
    return Arguments((*args, Blocks(layouts, pow2=dims == 1)), {**kwargs, "stores": planes.stores})


BLOCKS: dict[str, Case] = {
    f"{chain.name}, {'+'.join(usages)}, {dims}D": functools.partial(_blocks, chain, _Planes(usages, E4M3, dims == 2), dims)
    for (chain, usages), dims in itertools.product(zip(_FORWARD, itertools.cycle(_PLANES)), (1, 2))
}
