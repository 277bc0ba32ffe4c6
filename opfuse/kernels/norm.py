"""The torch definition of the normalisations, forward and backward.

x has shape (..., *weight.shape); statistics run over the trailing dimensions that ``weight`` covers, have the shape of the
leading ones, and are fp32 (fp64 for fp64 tensors), as is all arithmetic. Results are rounded once, to ``dtype`` (None: that of
x); gradients of parameters are summed over the leading dimensions before they are cast to the parameter's dtype.
``zero_centered_gamma`` multiplies by 1 + weight. A shape that does not fit is a ShapeError.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from opfuse.errors import ShapeError, describe
from opfuse.kernels.epilogue import Rounding, boundary_dtype
from opfuse.kernels.pointwise import compute_dtype


def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float = 1e-5, zero_centered_gamma: bool = False, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """y = x * rstd * gamma with rstd = 1 / sqrt(mean(x^2) + eps); returns (y, rstd)."""
    rows = _rows("rms_norm x", x, weight.shape)
    rstd = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    y = rows * rstd * _gamma(weight, zero_centered_gamma)
    return y.reshape(x.shape).to(dtype or x.dtype), rstd.reshape(_leading(x, weight))


def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, *, zero_centered_gamma: bool = False, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """(dx, dweight) of :func:`rms_norm`."""
    dx, dweight = _rms_norm_backward(dy, x, weight, rstd, zero_centered_gamma)
    return dx.to(dtype or x.dtype), dweight


def rms_norm_backward_add(
    dy: Tensor,
    d_extra: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    *,
    zero_centered_gamma: bool = False,
    rounding: Rounding = "per_op",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(dx + d_extra, dweight): the gradient of an input that is normalised and also used elsewhere.

    rounding: "per_op" rounds dx to ``dtype`` before the sum, as the two ops one by one; "single" rounds the sum only.
    """
    dtype = dtype or x.dtype
    dx, dweight = _rms_norm_backward(dy, x, weight, rstd, zero_centered_gamma)
    if d_extra.shape != x.shape:
        raise _shape_error("rms_norm_backward_add d_extra", wanted=tuple(x.shape), got=d_extra.shape)
    wide = dx.dtype
    dx = dx.to(boundary_dtype(rounding, dtype, wide)).to(wide)
    return (dx + d_extra.to(wide)).to(dtype), dweight


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """y = (x - mean) * rstd * gamma + bias with rstd = 1 / sqrt(mean((x - mean)^2) + eps); returns (y, mean, rstd)."""
    if bias.shape != weight.shape:
        raise _shape_error("layer_norm bias", wanted=tuple(weight.shape), got=bias.shape)
    rows = _rows("layer_norm x", x, weight.shape)
    mean = rows.mean(-1, keepdim=True)
    centered = rows - mean
    rstd = torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
    y = centered * rstd * _gamma(weight, zero_centered_gamma) + bias.flatten()
    leading = _leading(x, weight)
    return y.reshape(x.shape).to(dtype or x.dtype), mean.reshape(leading), rstd.reshape(leading)


def layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    zero_centered_gamma: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias) of :func:`layer_norm`."""
    rows, grad = _rows("layer_norm x", x, weight.shape), _rows("layer_norm dy", dy, weight.shape, like=x)
    rstd = rstd.reshape(-1, 1)
    normal = (rows - mean.reshape(-1, 1)) * rstd
    scaled = grad * _gamma(weight, zero_centered_gamma)
    dx = rstd * (scaled - scaled.mean(-1, keepdim=True) - normal * (scaled * normal).mean(-1, keepdim=True))
    dweight, dbias = _parameter_gradient(grad * normal, weight), _parameter_gradient(grad, weight)
    return dx.reshape(x.shape).to(dtype or x.dtype), dweight, dbias


def l2_normalization(x: Tensor, *, eps: float = 1e-6, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """y = x * rstd with rstd = 1 / sqrt(sum(x^2) + eps) over the last dimension; returns (y, rstd)."""
    rows = _rows("l2_normalization x", x, x.shape[-1:])
    rstd = torch.rsqrt(rows.square().sum(-1, keepdim=True) + eps)
    return (rows * rstd).reshape(x.shape).to(dtype or x.dtype), rstd.reshape(x.shape[:-1])


def l2_normalization_backward(dy: Tensor, x: Tensor, rstd: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """dx of :func:`l2_normalization`."""
    rows, grad = _rows("l2_normalization x", x, x.shape[-1:]), _rows("l2_normalization dy", dy, x.shape[-1:], like=x)
    rstd = rstd.reshape(-1, 1)
    normal = rows * rstd
    dx = rstd * (grad - normal * (grad * normal).sum(-1, keepdim=True))
    return dx.reshape(x.shape).to(dtype or x.dtype)


def _rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, zero_centered: bool) -> tuple[Tensor, Tensor]:
    """dx before its rounding, and dweight."""
    rows, grad = _rows("rms_norm x", x, weight.shape), _rows("rms_norm dy", dy, weight.shape, like=x)
    rstd = rstd.reshape(-1, 1)
    normal = rows * rstd
    scaled = grad * _gamma(weight, zero_centered)
    dx = rstd * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
    return dx.reshape(x.shape), _parameter_gradient(grad * normal, weight)


def _rows(where: str, x: Tensor, trailing: torch.Size, *, like: Tensor | None = None) -> Tensor:
    """x as (rows, columns) in the compute dtype, after its shape was checked."""
    if not trailing:
        raise _shape_error(where, wanted="with at least one normalised dimension", got=trailing)
    leading = x.shape[: x.dim() - len(trailing)]
    wanted = torch.Size((*leading, *trailing)) if like is None else like.shape
    if x.shape != wanted:
        raise _shape_error(where, wanted=tuple(wanted), got=x.shape)
    return x.reshape(math.prod(leading), math.prod(trailing)).to(compute_dtype(x.dtype))


def _leading(x: Tensor, weight: Tensor) -> torch.Size:
    return x.shape[: x.dim() - weight.dim()]


def _gamma(weight: Tensor, zero_centered: bool) -> Tensor:
    gamma = weight.flatten().to(compute_dtype(weight.dtype))
    return 1 + gamma if zero_centered else gamma


def _parameter_gradient(rows: Tensor, weight: Tensor) -> Tensor:
    return rows.sum(0).reshape(weight.shape).to(weight.dtype)


def _shape_error(where: str, *, wanted: object, got: torch.Size) -> ShapeError:
    cure = "make the trailing dimensions of x and dy those of the weight"
    return ShapeError(describe(where, wanted=f"a shape {wanted}", got=tuple(got), cure=cure))
