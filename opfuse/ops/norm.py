"""Normalisations: statistics and parameter gradients in fp32, over the trailing dimensions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from opfuse.core.cast import Cast
from opfuse.core.context import Context, Value, values_of
from opfuse.core.operation import BasicOperation
from opfuse.core.spec import NonNegative, SizesLike, hyper_parameters, new_parameter
from opfuse.core.watched import METHODS
from opfuse.errors import ShapeError, describe
from opfuse.kernels.norms.cast import norm_cast
from opfuse.kernels.norms.norm import norm_backward, norm_forward
from opfuse.numerics.chain import Rounding
from opfuse.numerics.norm import Norm, NormGradients, NormKind, Statistics, bias_gradient
from opfuse.ops.pointwise import remake_chain
from opfuse.tensors.masters import stored_in
from opfuse.tensors.storage import QuantizedStorage


class _Normalization(BasicOperation):
    """A normalisation. ``produce`` gives the result in any dtype, for an epilogue that rounds later."""

    traits = frozenset(("norm", "producer"))
    speaks_for = (*METHODS, "produce", "produce_cast")  # the one runs without the other, and what is made anew without both
    forward_kwargs = ()
    computes: ClassVar[NormKind]
    saves: ClassVar[tuple[str, ...]]

    def reads_saved(self, ctx: Context) -> Collection[str]:
        return [name for name in self.saves if name != "weight" or "input" in ctx.needs] if self._reads_input(ctx) else ()

    def op_forward(self, ctx: Context, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.produce(ctx, input_)

    def op_backward(self, ctx: Context, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, tuple[torch.Tensor | None, ...]]:
        if ctx.saved.x is None:
            return None, self._without_input(ctx, grad_output)
        return self._filed(norm_backward(grad_output, values_of(ctx.saved.x), self._norm(ctx), _statistics(ctx)))

    def remakes(self, ctx: Context) -> Literal["", "saved", "input"]:
        saved = frozenset(self.reads_saved(ctx))
        return "saved" if saved.issuperset(("x", *self.parameter_names)) else ""

    def remake(self, contexts: Sequence[Context], cast: Cast | None) -> Value:
        ctx, *others = contexts
        x, norm = values_of(ctx.saved.x), self._norm(ctx)
        dtype = ctx.dtype_of(x)
        fused = None if cast is None or others else cast.fused(x.shape, dtype, x.device)
        if fused is not None:
            return fused.storage(norm_cast(x, norm, fused.encoding, dtype=dtype)[0])
        y = norm_forward(x, norm, dtype=dtype)[0]
        if others:
            return remake_chain(y, others, cast)
        return y if cast is None else cast(y)

    def _without_input(self, ctx: Context, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the parameters where none depends on the input."""
        return (None,) * len(self.parameter_names)

    def produce(self, ctx: Context, x: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """The normalised input in the I/O dtype, or in ``out_dtype``."""
        self._check_input(x)
        y, statistics = norm_forward(values_of(x), self._norm(), dtype=out_dtype or ctx.dtype_of(x))
        self._save(ctx, x, statistics)
        return y

    def produce_cast(self, ctx: Context, x: torch.Tensor, cast: Cast) -> QuantizedStorage:
        """The cast of the normalised input, by the kernel that makes it where there is one for the cast."""
        self._check_input(x)
        dtype = ctx.dtype_of(x)
        fused = cast.fused(x.shape, dtype, x.device)
        if fused is None:
            return cast(self.produce(ctx, x))
        encoded, statistics = norm_cast(values_of(x), self._norm(), fused.encoding, dtype=dtype)
        self._save(ctx, x, statistics)
        return fused.storage(encoded)

    def backward_add(
        self, ctx: Context, dy: torch.Tensor, d_extra: torch.Tensor, *, rounding: Rounding
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        """The gradient of an input that is normalised and also used elsewhere, and those of the parameters."""
        norm, statistics = self._norm(ctx), _statistics(ctx)
        return self._filed(norm_backward(dy, values_of(ctx.saved.x), norm, statistics, extra=d_extra, rounding=rounding))

    @abstractmethod
    def _norm(self, ctx: Context | None = None) -> Norm:
        """This op as a value; with a context, as it was in that forward pass."""

    def _save(self, ctx: Context, x: torch.Tensor, statistics: Statistics, **parameters: torch.Tensor | None) -> None:
        """Keep what the backward pass reads: the statistics are always those of the input that was normalised.

        Codes have few bits, which a mean that is large beside the deviations from it would take: theirs are those of the input
        less that mean in its dtype, and what is left of the mean is saved with them.
        """
        kept: dict[str, Value | None] = {}
        if self._reads_input(ctx):
            if statistics.mean is not None and ctx.keeps_codes(x):
                mean = statistics.mean.to(x.dtype)
                x = x - mean.reshape(*mean.shape, *[1] * (x.dim() - mean.dim()))
                statistics = statistics._replace(mean=statistics.mean - mean)
            kept = {"x": ctx.kept_input(x), **statistics._asdict()}
        ctx.save(**{name: (parameters | kept).get(name) for name in self.saves})

    def _reads_input(self, ctx: Context) -> bool:
        """Whether some gradient depends on the input."""
        return ctx.requires_grad

    def _filed(self, gradients: NormGradients) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        """The gradient of the input, and those of the parameters in their order."""
        by_name = {"weight": gradients.weight, "bias": gradients.bias}
        return gradients.x, tuple(map(by_name.get, self.parameter_names))

    def _check_input(self, x: torch.Tensor) -> None:
        """ShapeError unless the op can take ``x``."""


def _statistics(ctx: Context) -> Statistics:
    return Statistics(ctx.saved.rstd, vars(ctx.saved).get("mean"))


class _LearnedNorm(_Normalization):
    """A normalisation with a weight.

    It is saved, too, where dx reads it, so that autograd notices a change before the backward pass. learned: the parameters,
    gamma first.
    """

    learned: ClassVar[tuple[str, ...]] = ("weight",)

    @hyper_parameters
    def __init__(
        self,
        normalized_shape: SizesLike,
        *,
        eps: NonNegative = 1e-5,
        zero_centered_gamma: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name in self.learned:
            setattr(self, name, new_parameter(type(self).__name__, self.parameter_shape(name), device=device, dtype=dtype))
        self.reset_parameters()

    def parameter_shape(self, name: str) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.spec.normalized_shape
        return shape

    def reset_parameters(self) -> None:
        """gamma 1 (0 if zero-centered), beta 0."""
        for name, value in zip(self.learned, (0.0 if self.spec.zero_centered_gamma else 1.0, 0.0)):
            nn.init.constant_(self.parameter(name), value)

    def _norm(self, ctx: Context | None = None) -> Norm:
        """The weight of the forward pass; where nothing reads its values, any of its shape and dtype."""
        weight = self.weight if ctx is None or ctx.saved.weight is None else ctx.saved.weight
        plain = [None if parameter is None else stored_in(parameter) for parameter in (weight, getattr(self, "bias", None))]
        return Norm(self.computes, plain[0], plain[1], self.eps, self.zero_centered_gamma)

    def _save(self, ctx: Context, x: torch.Tensor, statistics: Statistics, **_: torch.Tensor | None) -> None:
        super()._save(ctx, x, statistics, weight=self.weight if "input" in ctx.needs else None)

    def _reads_input(self, ctx: Context) -> bool:
        return not ctx.needs.isdisjoint(("input", "weight"))

    def _check_input(self, x: torch.Tensor) -> None:
        if (found := tuple(x.shape[-len(self.normalized_shape) :])) != self.normalized_shape:
            wanted = f"trailing dimensions {self.normalized_shape}"
            cure = f"pass so many features, or have the op before it make them, or build the op for {found}"
            raise ShapeError(describe(f"{self.label} input", wanted=wanted, got=tuple(x.shape), cure=cure))


class RMSNorm(_LearnedNorm):
    """y = x * rsqrt(mean(x^2) + eps) * gamma, where gamma is the weight, or 1 + weight if zero-centered."""

    kind = computes = "rms_norm"
    saves = ("x", "weight", "rstd")


class LayerNorm(_LearnedNorm):
    """y = (x - mean) * rstd * gamma + beta, where gamma is the weight, or 1 + weight if zero-centered."""

    kind = computes = "layer_norm"
    saves = ("x", "weight", "mean", "rstd")
    learned = ("weight", "bias")

    def _without_input(self, ctx: Context, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        bias = bias_gradient(grad_output, self._norm(ctx))
        return tuple(bias if name == "bias" else None for name in self.parameter_names)


class L2Normalization(_Normalization):
    """y = x * rsqrt(sum(x^2) + eps) over the last dimension."""

    kind = computes = "l2_normalization"
    saves = ("x", "rstd")

    @hyper_parameters
    def __init__(self, *, eps: NonNegative = 1e-6) -> None:
        super().__init__()

    def _norm(self, ctx: Context | None = None) -> Norm:
        return Norm(self.computes, eps=self.eps)
