"""Cases of chains of elementwise ops: every built-in op, every kind of operand, layouts, addresses without vectors."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from opfuse.kernels.chains import chain as launches
from opfuse.kernels.engine.registry import Arguments, Case, CaseTable
from opfuse.numerics.activations import ARITHMETIC, POINTWISE
from opfuse.numerics.chain import Rounding, Stage, forward_chain
from opfuse.numerics.pointwise import Pointwise

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

CONSTANTS = {
    "limit": 1.5,
    "alpha": 1.702,
    "glu_linear_offset": 1.0,
    "beta1": 4.0,
    "beta2": 25.0,
    "scale": 1.1,
    "tanh_clamp_scale": 2.5,
}

SOFTSIGN = Pointwise(
    "softsign",
    forward="x / (1.0f + fabsf(x))",
    backward=("dy / ((1.0f + fabsf(x)) * (1.0f + fabsf(x)))",),
    value=lambda x: x / (1 + x.abs()),
    grad=lambda dy, x: (dy / ((1 + x.abs()) * (1 + x.abs())),),
)
"""An op such as a user declares."""

OPS = {**POINTWISE, "softsign": SOFTSIGN}

EXACT = (*ARITHMETIC, "relu", "srelu", "reglu", "sreglu", "scaled_srelu", "softsign")
"""Ops without exponentials: equal to the definition bit for bit."""

Values = Literal["normal", "nonfinite"]


@dataclass(frozen=True)
class ChainCase:
    """A chain of ``ops`` with a result of ``shape``; its tensors have dtype ``io``, but input and dy have ``source``, if given.

    misaligned: tensors start one element behind an address from which vectors can be loaded. values: "nonfinite" puts NaN,
    infinities and the largest magnitudes into a few places of the input and of dy.
    """

    ops: tuple[str, ...]
    shape: tuple[int, ...]
    io: torch.dtype = BF16
    source: torch.dtype | None = None
    rounding: Rounding = "per_op"
    interleave: int | None = None
    misaligned: bool = False
    values: Values = field(default="normal", repr=False)  # repr seeds the values, which stay what they are elsewhere

    def stages(self, device: torch.device, generator: torch.Generator) -> tuple[tuple[int, ...], list[Stage]]:
        """The shape of the chain's input, and its stages."""
        shape = self.shape
        stages: list[Stage] = []
        for name in reversed(self.ops):
            op = OPS[name]
            operands = {n: self.operand(n, kind, shape, device, generator) for n, kind in op.operands.items()}
            constants = {constant: CONSTANTS[constant] for constant in op.constants}
            stages.insert(0, Stage(op, operands, constants, self.interleave if op.is_gated else None))
            shape = (*shape[:-1], 2 * shape[-1]) if op.is_gated else shape
        return shape, stages

    def operand(
        self, name: str, kind: str, shape: tuple[int, ...], device: torch.device, generator: torch.Generator
    ) -> torch.Tensor:
        wanted = {"row": shape[-1:], "column": shape[:-1], "full": shape}[kind]
        values = torch.randn(wanted, generator=generator)
        return self.place(values.gt(0).to(torch.uint8) if name == "mask" else values.to(self.io), device)

    def drawn(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """``x`` in the dtype of an input; nonfinite values, if the case has them, each in a row and a column of its own."""
        x = x.to(self.source or self.io)
        if self.values == "nonfinite":
            largest = torch.finfo(self.io).max
            values = torch.tensor([torch.nan, torch.inf, -torch.inf, largest, -largest]).to(x.dtype)
            places = (torch.randperm(size, generator=generator)[: len(values)] for size in x.shape)
            x[tuple(places)] = values
        return x

    def place(self, x: torch.Tensor, device: torch.device) -> torch.Tensor:
        """``x`` on a device, in a storage of its own."""
        start = int(self.misaligned)
        storage = torch.empty(x.numel() + start, dtype=x.dtype, device=device)
        return storage[start:].view(x.shape).copy_(x)

    def forward(self, device: torch.device) -> Arguments:
        """A call that keeps the input of every stage."""
        generator = self.generator()
        shape, stages = self.stages(device, generator)
        x = self.place(self.drawn(torch.randn(shape, generator=generator), generator), device)
        return Arguments((x, stages), {**self.options, "keep": range(len(stages))})

    def backward(self, device: torch.device) -> Arguments:
        """A call whose gradients are positive, so that their sums do not cancel."""
        generator = self.generator()
        shape, stages = self.stages(device, generator)
        x = self.drawn(torch.randn(shape, generator=generator), generator).to(self.io)
        _, here = self.stages(torch.device("cpu"), self.generator())
        _, kept = forward_chain(x, here, **self.options, keep=[i for i, s in enumerate(stages) if s.math.needs_input])
        dy = self.place(self.drawn(torch.rand(self.shape, generator=generator), generator), device)
        return Arguments((dy, stages, {i: self.place(v, device) for i, v in kept.items()}), self.options)

    @property
    def name(self) -> str:
        """What tells this chain from others."""
        dtypes = (str(dtype).removeprefix("torch.") for dtype in (self.io, self.source or self.io))
        parts = [*self.ops, self.shape, *dtypes, self.rounding, self.interleave or "halves", *["misaligned"] * self.misaligned]
        return " ".join(map(str, (*parts, *["nonfinite"] * (self.values == "nonfinite"))))

    @property
    def options(self) -> dict[str, Any]:
        return {"rounding": self.rounding, "dtype": self.io}

    def generator(self) -> torch.Generator:
        """A generator that depends on the case alone; the name of the class is left out, so that it may change."""
        return torch.Generator().manual_seed(zlib.crc32(f"Chain{repr(self).removeprefix(type(self).__name__)}".encode()))


_ALONE = [ChainCase((name,), (3, 67, 40)) for name in OPS]
_ARITHMETIC = tuple(ARITHMETIC)
_MIXED = [
    ChainCase(("bias", "gelu"), (300, 264)),
    ChainCase(("bias", "gelu"), (300, 264), source=FP32),
    ChainCase(("bias", "gelu"), (300, 264), source=FP32, rounding="single"),
    ChainCase(("bias", "gelu"), (5, 67)),
    ChainCase(("bias", "gelu"), (33, 64), misaligned=True),
    ChainCase(("bias", "softsign", "dropout"), (130, 520), FP16),
    ChainCase(_ARITHMETIC, (65, 136), FP32),
    ChainCase(_ARITHMETIC, (65, 136), FP16, FP32),
    ChainCase(_ARITHMETIC, (7,), BF16),
    ChainCase(_ARITHMETIC, (2, 3, 11), FP32, misaligned=True),
    ChainCase(("constant_scale", "add"), (9, 2104), FP32),
    ChainCase(("add", "relu"), (3, 1), FP16),
    ChainCase(("bias", "swiglu"), (257, 128)),
    ChainCase(("bias", "swiglu", "add"), (30, 64), interleave=32),
    ChainCase(("bias", "reglu", "bias"), (30, 36), FP16, interleave=6),
    ChainCase(("bias", "scaled_srelu", "sreglu", "constant_scale"), (70, 24), FP16),
    ChainCase(("bias", "reglu", "bias", "reglu", "bias"), (70, 48), FP16, interleave=8),
    ChainCase(("bias", "reglu", "scaled_srelu", "reglu", "bias"), (21, 10), FP32),
]


def _cases(direction: str, chains: Sequence[ChainCase]) -> dict[str, Case]:
    return {chain.name: functools.partial(_call, chain, direction) for chain in chains}


def _call(chain: ChainCase, direction: str, device: torch.device) -> Arguments:
    return getattr(chain, direction)(device)


_UNSTORED = (
    ChainCase(("bias", "gelu"), (300, 264)),
    ChainCase(("bias", "gelu"), (5, 67)),
    ChainCase(("bias", "swiglu"), (257, 128)),
    ChainCase(("bias", "softsign", "dropout"), (130, 520), FP16),
)


def _unstored(chain: ChainCase, keep: Sequence[int], device: torch.device) -> Arguments:
    """A call that finds the amax of a result that it does not store."""
    args, kwargs = chain.forward(device)
    return Arguments(args, {**kwargs, "keep": keep, "stores": False})


_FORWARD_AMAX = _cases("forward", _MIXED) | {
    f"{chain.name} not stored{', kept' * bool(keep)}": functools.partial(_unstored, chain, keep)
    for chain in _UNSTORED
    for keep in ((), range(1, len(chain.ops)))
}
_HAS_GRADIENTS = [chain for chain in (*_ALONE, *_MIXED) if chain.ops != ("add",)]  # whose gradients are all dy

CASES: CaseTable = {
    launches.forward_chain: _cases("forward", (*_ALONE, *_MIXED)),
    launches.backward_chain: _cases("backward", _HAS_GRADIENTS),
    launches.forward_chain_amax: _FORWARD_AMAX,
    launches.backward_chain_amax: _cases("backward", _MIXED),
}
