"""Normalisations: statistics and parameter gradients in fp32, over the trailing dimensions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from opfuse.core.context import Context
from opfuse.core.operation import BasicOperation
from opfuse.core.signature import checked_sizes
from opfuse.errors import ShapeError, SpecError, describe
from opfuse.kernels import norm
from opfuse.kernels.epilogue import Rounding
from opfuse.kernels.pointwise import compute_dtype


@dataclass(frozen=True)
class NormSpec:
    """Hyper-parameters of a normalisation with parameters."""

    normalized_shape: tuple[int, ...]
    eps: float = 1e-5
    zero_centered_gamma: bool = False


class _Norm(BasicOperation):
    """A normalisation with a weight. ``produce`` gives the result in any dtype, for an epilogue that rounds later.

    The weight is saved, too, where dx reads it, so that autograd notices a change before the backward pass.
    """

    traits = frozenset(("norm", "producer"))
    forward_kwargs = ()

    def __init__(
        self,
        normalized_shape: int | Iterable[int],
        *,
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = normalized_shape if isinstance(normalized_shape, Iterable) else (normalized_shape,)
        shape = checked_sizes(type(self).__name__, sizes, wanted="positive sizes", cure="give the trailing dimensions as ints")
        _check_eps(type(self).__name__, eps)
        super().__init__(NormSpec(shape, float(eps), zero_centered_gamma))
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """gamma 1 (0 if zero-centered)."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)

    def op_forward(self, ctx: Context, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.produce(ctx, input_)

    def _save(self, ctx: Context, **values: torch.Tensor) -> None:
        """Keep the input and its statistics if the gradient of the input or of the weight is wanted."""
        wanted = not ctx.needs.isdisjoint(("input", "weight"))
        kept = {name: value if wanted else None for name, value in values.items()}
        ctx.save(weight=self.weight if "input" in ctx.needs else None, **kept)

    def _weight(self, ctx: Context) -> torch.Tensor:
        """The weight of the forward pass; where nothing reads its values, any of its shape and dtype."""
        return self.weight if ctx.saved.weight is None else ctx.saved.weight

    def _check_input(self, x: torch.Tensor) -> None:
        if x.shape[-len(self.normalized_shape) :] != self.normalized_shape:
            raise ShapeError(
                describe(
                    f"{self.label} input",
                    wanted=f"trailing dimensions {self.normalized_shape}",
                    got=tuple(x.shape),
                    cure="check the preceding op's size",
                )
            )


class RMSNorm(_Norm):
    """y = x * rsqrt(mean(x^2) + eps) * gamma, where gamma is the weight, or 1 + weight if zero-centered."""

    kind = "rms_norm"
    saves = ("x", "weight", "rstd")

    def produce(self, ctx: Context, x: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """The normalised input in the I/O dtype, or in ``out_dtype``."""
        self._check_input(x)
        dtype = ctx.dtype(x)
        y, rstd = norm.rms_norm(
            x, self.weight, eps=self.eps, zero_centered_gamma=self.zero_centered_gamma, dtype=out_dtype or dtype
        )
        self._save(ctx, x=x, rstd=rstd)
        return y

    def op_backward(self, ctx: Context, grad_output: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        saved, weight = ctx.saved, self._weight(ctx)
        dx, dweight = norm.rms_norm_backward(
            grad_output, saved.x, weight, saved.rstd, zero_centered_gamma=self.zero_centered_gamma
        )
        return dx, (dweight,)

    def backward_add(
        self, ctx: Context, dy: torch.Tensor, d_extra: torch.Tensor, *, rounding: Rounding
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The gradient of an input that is normalised and also used elsewhere."""
        saved, weight = ctx.saved, self._weight(ctx)
        dx, dweight = norm.rms_norm_backward_add(
            dy, d_extra, saved.x, weight, saved.rstd, zero_centered_gamma=self.zero_centered_gamma, rounding=rounding
        )
        return dx, (dweight,)


class LayerNorm(_Norm):
    """y = (x - mean) * rstd * gamma + beta, where gamma is the weight, or 1 + weight if zero-centered."""

    kind = "layer_norm"
    saves = ("x", "weight", "mean", "rstd")

    def __init__(self, normalized_shape: int | Iterable[int], **options: Any) -> None:
        super().__init__(normalized_shape, **options)
        self.bias = nn.Parameter(torch.zeros_like(self.weight))

    def reset_parameters(self) -> None:
        """gamma 1 (0 if zero-centered), beta 0."""
        super().reset_parameters()
        if "bias" in self._parameters:
            nn.init.zeros_(self.bias)

    def produce(self, ctx: Context, x: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """The normalised input in the I/O dtype, or in ``out_dtype``."""
        self._check_input(x)
        dtype = ctx.dtype(x)
        y, mean, rstd = norm.layer_norm(
            x, self.weight, self.bias, eps=self.eps, zero_centered_gamma=self.zero_centered_gamma, dtype=out_dtype or dtype
        )
        self._save(ctx, x=x, mean=mean, rstd=rstd)
        return y

    def op_backward(self, ctx: Context, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, tuple[torch.Tensor | None, ...]]:
        saved, weight = ctx.saved, self._weight(ctx)
        if saved.x is None:
            summed = grad_output.to(compute_dtype(grad_output.dtype)).sum_to_size(weight.shape)
            return None, (None, summed.to(weight.dtype))
        dx, dweight, dbias = norm.layer_norm_backward(
            grad_output, saved.x, weight, saved.mean, saved.rstd, zero_centered_gamma=self.zero_centered_gamma
        )
        return dx, (dweight, dbias)


@dataclass(frozen=True)
class L2NormalizationSpec:
    """Hyper-parameters of an L2 normalisation."""

    eps: float = 1e-6


class L2Normalization(BasicOperation):
    """y = x * rsqrt(sum(x^2) + eps) over the last dimension."""

    kind = "l2_normalization"
    traits = frozenset(("norm", "producer"))
    saves = ("x", "rstd")
    forward_kwargs = ()

    def __init__(self, *, eps: float = 1e-6) -> None:
        _check_eps("L2Normalization", eps)
        super().__init__(L2NormalizationSpec(float(eps)))

    def op_forward(self, ctx: Context, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.produce(ctx, input_)

    def produce(self, ctx: Context, x: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """The normalised input in the I/O dtype, or in ``out_dtype``."""
        dtype = ctx.dtype(x)
        y, rstd = norm.l2_normalization(x, eps=self.eps, dtype=out_dtype or dtype)
        ctx.save(x=x if ctx.requires_grad else None, rstd=rstd if ctx.requires_grad else None)
        return y

    def op_backward(self, ctx: Context, grad_output: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        return norm.l2_normalization_backward(grad_output, ctx.saved.x, ctx.saved.rstd), ()


def _check_eps(where: str, eps: float) -> None:
    if not (math.isfinite(eps) and eps >= 0):
        raise SpecError(describe(f"{where}.eps", wanted="a finite number not below 0", got=eps, cure="choose another eps"))
