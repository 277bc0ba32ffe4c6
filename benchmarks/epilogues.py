"""Chains of elementwise ops and their casts against a copy in the same process: ``python -m benchmarks.epilogues [--peers]``.

Bytes are counted for each element of the chain's result; in a backward pass, of the gradient that comes in. Under current scaling
the result decides its scale: what it is made from is read twice, or it is stored and read back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from benchmarks.bandwidth import BF16, BLOCKS, FP8, MX, Make, Peer, Shape, Table, command, random
from benchmarks.encodings import Encode, blocks, current, delayed, mx, mx_swizzled
from benchmarks.timing import Call
from opfuse.formats import E4M3, ROWWISE, USAGES, Usage
from opfuse.kernels.chains.cast import backward_chain_encoded, forward_chain_encoded
from opfuse.kernels.chains.chain import backward_chain, backward_chain_amax, forward_chain, forward_chain_amax
from opfuse.numerics.activations import POINTWISE
from opfuse.numerics.chain import Stage


def stages(names: str, shape: Shape) -> list[Stage]:
    """Stages of the ops for a result of ``shape``, none gated but a last SwiGLU."""
    made = []
    for name in names.split():
        op = POINTWISE[name]
        columns = shape[1] if op.is_gated else wide(names, shape)[1]
        shapes = {"row": (columns,), "full": (shape[0], columns), "column": shape[:1]}
        operands = {n: random(*shapes[kind]) for n, kind in op.operands.items()}
        made.append(Stage(op, operands, dict.fromkeys(op.constants, 1.1)))
    return made


def wide(names: str, shape: Shape) -> Shape:
    return (shape[0], shape[1] * (2 if "swiglu" in names else 1))


# -- chains --------------------------------------------------------------------------------------------------------------------


def forward(names: str, *keep: int, amax: bool = False) -> Make:
    run = forward_chain_amax if amax else forward_chain

    def make(shape: Shape) -> Call:
        x, ops = random(*wide(names, shape)), stages(names, shape)
        return lambda: run(x, ops, keep=keep)

    return make


def backward(names: str, *, amax: bool = False) -> Make:
    run = backward_chain_amax if amax else backward_chain

    def make(shape: Shape) -> Call:
        dy, x, ops = random(*shape), random(*wide(names, shape)), stages(names, shape)
        saved = {i: x for i, stage in enumerate(ops) if stage.math.needs_input}
        return lambda: run(dy, ops, saved)

    return make


def forward_cast(names: str, encode: Encode, *keep: int, usages: Sequence[Usage] = USAGES) -> Make:
    def make(shape: Shape) -> Call:
        x, ops, encoding = random(*wide(names, shape)), stages(names, shape), encode(shape, usages)
        return lambda: forward_chain_encoded(x, ops, encoding, keep=keep)

    return make


def backward_cast(names: str, encode: Encode, usages: Sequence[Usage] = USAGES) -> Make:
    def make(shape: Shape) -> Call:
        dy, x, ops = random(*shape), random(*wide(names, shape)), stages(names, shape)
        saved = {i: x for i, stage in enumerate(ops) if stage.math.needs_input}
        encoding = encode(wide(names, shape), usages)
        return lambda: backward_chain_encoded(dy, ops, saved, encoding)

    return make


CHAINS: Table = {
    "constant_scale": (2 * BF16, forward("constant_scale")),
    "bias": (2 * BF16, forward("bias")),
    "bias, GELU": (2 * BF16, forward("bias gelu")),
    "bias, GELU, amax": (2 * BF16, forward("bias gelu", amax=True)),
    "bias, GELU, input of GELU kept": (3 * BF16, forward("bias gelu", 1)),
    "GELU, add": (3 * BF16, forward("gelu add")),
    "SwiGLU": (3 * BF16, forward("swiglu")),
    "bias, SwiGLU": (3 * BF16, forward("bias swiglu")),
    "d bias alone": (BF16, backward("bias")),
    "d GELU": (3 * BF16, backward("gelu")),
    "d GELU, d bias": (3 * BF16, backward("bias gelu")),
    "d GELU, d bias, amax": (3 * BF16, backward("bias gelu", amax=True)),
    "d SwiGLU": (5 * BF16, backward("swiglu")),
    "d SwiGLU, d bias": (5 * BF16, backward("bias swiglu")),
    "bias, GELU, cast both": (BF16 + 2 * FP8, forward_cast("bias gelu", delayed)),
    "bias, GELU, cast row": (BF16 + FP8, forward_cast("bias gelu", delayed, usages=(ROWWISE,))),
    "bias, GELU, kept, cast both": (2 * BF16 + 2 * FP8, forward_cast("bias gelu", delayed, 1)),
    "bias, GELU, current row": (2 * BF16 + FP8, forward_cast("bias gelu", current, usages=(ROWWISE,))),
    "bias, GELU, current both": (2 * BF16 + 2 * FP8, forward_cast("bias gelu", current)),
    "bias, GELU, kept, current both": (3 * BF16 + 2 * FP8, forward_cast("bias gelu", current, 1)),
    "bias, GELU, blocks both": (BF16 + 2 * BLOCKS, forward_cast("bias gelu", blocks)),
    "bias, GELU, MXFP8 both": (BF16 + 2 * MX, forward_cast("bias gelu", mx)),
    "bias, GELU, MXFP8 swizzled both": (BF16 + 2 * MX, forward_cast("bias gelu", mx_swizzled)),
    "SwiGLU, cast both": (2 * BF16 + 2 * FP8, forward_cast("swiglu", delayed)),
    "SwiGLU, current both": (4 * BF16 + 2 * FP8, forward_cast("swiglu", current)),
    "SwiGLU, blocks both": (2 * BF16 + 2 * BLOCKS, forward_cast("swiglu", blocks)),
    "SwiGLU, MXFP8 both": (2 * BF16 + 2 * MX, forward_cast("swiglu", mx)),
    "d bias, cast both": (BF16 + 2 * FP8, backward_cast("bias", delayed)),
    "d GELU, cast both": (2 * BF16 + 2 * FP8, backward_cast("gelu", delayed)),
    "d GELU, d bias, cast both": (2 * BF16 + 2 * FP8, backward_cast("bias gelu", delayed)),
    "d GELU, d bias, current both": (4 * BF16 + 2 * FP8, backward_cast("bias gelu", current)),
    "d GELU, d bias, blocks both": (2 * BF16 + 2 * BLOCKS, backward_cast("bias gelu", blocks)),
    "d GELU, d bias, MXFP8 both": (2 * BF16 + 2 * MX, backward_cast("bias gelu", mx)),
    "d SwiGLU, cast both": (3 * BF16 + 4 * FP8, backward_cast("swiglu", delayed)),
    "d SwiGLU, d bias, cast both": (3 * BF16 + 4 * FP8, backward_cast("bias swiglu", delayed)),
    "d SwiGLU, d bias, blocks both": (3 * BF16 + 4 * BLOCKS, backward_cast("bias swiglu", blocks)),
    "d SwiGLU, d bias, MXFP8 both": (3 * BF16 + 4 * MX, backward_cast("bias swiglu", mx)),
}

# -- peers ---------------------------------------------------------------------------------------------------------------------


def fp8_both(y: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Codes of ``y`` and of its transpose under a given scale, and the amax so far."""
    codes = (y.float() * scale).clamp(-E4M3.max, E4M3.max).to(torch.float8_e4m3fn)
    return codes, codes.t().contiguous(), torch.maximum(amax, y.abs().amax().float())


def bias_gelu(scale: torch.Tensor, amax: torch.Tensor, x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return fp8_both(F.gelu(x + bias, approximate="tanh"), scale, amax)


def swiglu(scale: torch.Tensor, amax: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a, b = x.chunk(2, -1)
    return fp8_both(F.silu(a) * b, scale, amax)


def bias_gelu_backward(scale: torch.Tensor, amax: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    dx = torch.ops.aten.gelu_backward(dy, x, approximate="tanh")
    return *fp8_both(dx, scale, amax), dx.sum(0)


def bias_swiglu_backward(scale: torch.Tensor, amax: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a, b = x.chunk(2, -1)
    dx = torch.cat([torch.ops.aten.silu_backward(dy * b, a), dy * F.silu(a)], -1)
    return *fp8_both(dx, scale, amax), dx.sum(0)


def _scaling() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((1,), 3.7, device="cuda"), torch.zeros(1, device="cuda")


PEERS: Mapping[str, Peer] = {
    "bias, GELU, cast both": Peer(bias_gelu, lambda s: (*_scaling(), random(*s), random(s[1]))),
    "SwiGLU, cast both": Peer(swiglu, lambda s: (*_scaling(), random(*wide("swiglu", s)))),
    "d GELU, d bias, cast both": Peer(bias_gelu_backward, lambda s: (*_scaling(), random(*s), random(*s))),
    "d SwiGLU, d bias, cast both": Peer(bias_swiglu_backward, lambda s: (*_scaling(), random(*s), random(*wide("swiglu", s)))),
}

if __name__ == "__main__":
    command(__doc__, CHAINS, PEERS)
