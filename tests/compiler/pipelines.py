"""Pipelines put together from a table of blocks, for random ones and for those that models are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from opfuse import ops
from tests.compiler.harness import randn, to

ROWS = 32
"""A multiple of every format's block, so that both planes of every operand exist."""


@dataclass
class Pipeline:
    """Ops and shapes of extra inputs so far; ``width`` is that of the last output."""

    width: int = 64
    ops: list[torch.nn.Module] = field(default_factory=list)
    extras: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, op: torch.nn.Module, *, width: int | None = None, extra: tuple[int, ...] | None = None) -> None:
        """Append ``op``, whose output is ``width`` wide (None: as its input)."""
        self.ops.append(op)
        self.width = width or self.width
        if extra is not None:
            self.extras.append(extra)

    def model(self, dtype: torch.dtype = torch.bfloat16) -> ops.Sequential:
        """The ops with parameters that are neither zero nor one."""
        return to(ops.Sequential(*self.ops), dtype)

    def tensors(self, dtype: torch.dtype = torch.bfloat16, *, leading: tuple[int, ...] = (ROWS,)) -> list[torch.Tensor]:
        """Input and extra inputs."""
        shapes = [(64,), *(shape[1:] for shape in self.extras)]
        return [randn(*leading, *shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


def _gated(cls: Callable[..., torch.nn.Module], **options: object) -> Callable[[Pipeline], None]:
    def add(p: Pipeline) -> None:
        if p.width < 64:
            p.add(ops.Linear(p.width, 2 * p.width), width=2 * p.width)
        p.add(cls(**options), width=p.width // 2, extra=(ROWS,) if cls.num_extra_inputs else None)

    return add


def _same_width(make: Callable[[int], torch.nn.Module], *, extra: bool = False) -> Callable[[Pipeline], None]:
    return lambda p: p.add(make(p.width), extra=(ROWS, p.width) if extra else None)


BLOCKS: dict[str, Callable[[Pipeline], None]] = {
    "linear": lambda p: p.add(ops.Linear(p.width, p.width)),
    "linear without bias": lambda p: p.add(ops.Linear(p.width, p.width, bias=False)),
    "wider": lambda p: p.add(ops.Linear(p.width, 64), width=64),
    "narrower": lambda p: p.add(ops.Linear(p.width, 32, bias=False), width=32),
    "rms norm": _same_width(ops.RMSNorm),
    "layer norm": _same_width(ops.LayerNorm),
    "l2 norm": _same_width(lambda _: ops.L2Normalization()),
    "bias": _same_width(ops.Bias),
    "gelu": _same_width(lambda _: ops.GELU()),
    "squared relu": _same_width(lambda _: ops.SReLU()),
    "cached silu": _same_width(lambda _: ops.SiLU(cache_quantized_input=True)),
    "swiglu": _gated(ops.SwiGLU),
    "interleaved geglu": _gated(ops.GEGLU, glu_interleave_size=8),
    "scaled swiglu": _gated(ops.ScaledSwiGLU),
    "scale": _same_width(lambda _: ops.ConstantScale(0.3)),
    "dropout": _same_width(lambda _: ops.Dropout(0.25)),
    "add": _same_width(lambda _: ops.AddExtraInput(), extra=True),
    "add in place": _same_width(lambda _: ops.AddExtraInput(in_place=True), extra=True),
    "tap": _same_width(lambda _: ops.MakeExtraOutput()),
    "tap in place": _same_width(lambda _: ops.MakeExtraOutput(in_place=True)),
    "reshape": _same_width(lambda width: ops.Reshape((-1, width))),
    "identity": _same_width(lambda _: ops.Identity()),
    "quantize": _same_width(lambda _: ops.Quantize()),
    "quantize both": _same_width(lambda _: ops.Quantize(forward=True, backward=True)),
    "quantize gradient": _same_width(lambda _: ops.Quantize(forward=False, backward=True)),
}


def pipeline(names: Iterable[str], width: int = 64) -> Pipeline:
    """The blocks of these names, one after another."""
    made = Pipeline(width)
    for name in names:
        BLOCKS[name](made)
    return made


def residual_block() -> Pipeline:
    """x + linear(gelu(linear(norm(x)))), wired by a channel inside the pipeline."""
    tap, add = ops.MakeExtraOutput(), ops.AddExtraInput()
    tap.set_extra_output_channel(0, "residual", output_to_caller=False)
    add.set_extra_input_channel(0, "residual")
    return Pipeline(64, [tap, ops.RMSNorm(64), ops.Linear(64, 128), ops.GELU(), ops.Linear(128, 64), add])


COMPOSED: dict[str, Callable[[], Pipeline]] = {
    "mlp": lambda: Pipeline(64, [ops.LayerNorm(64), ops.Linear(64, 128), ops.GELU(), ops.Linear(128, 64)]),
    "swiglu mlp": lambda: Pipeline(
        64, [ops.RMSNorm(64), ops.Linear(64, 128, bias=False), ops.SwiGLU(), ops.Linear(64, 64, bias=False)]
    ),
    "residual": residual_block,
    "residual in place": lambda: pipeline(["tap in place", "linear", "gelu", "linear", "add in place"]),
    "dropout": lambda: pipeline(["linear", "gelu", "dropout", "linear", "dropout", "add"]),
    "scaled activation": lambda: pipeline(["rms norm", "linear", "scaled swiglu", "linear without bias", "scale"]),
    "scaled residual": lambda: pipeline(["linear without bias", "scale", "add in place", "rms norm"]),
    "two taps": lambda: pipeline(["tap", "rms norm", "tap in place", "linear", "scale", "add"]),
    "explicit casts": lambda: pipeline(["quantize", "linear", "quantize both", "linear without bias", "quantize gradient"]),
}
