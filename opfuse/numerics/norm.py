"""The torch definition of the normalisations, forward and backward.

Statistics run over the trailing dimensions that the weight covers (the last one where there is none), have the shape of the
leading ones, and are fp32 (fp64 for fp64 tensors), as is all arithmetic. Results are rounded once, to ``dtype`` (None: that of
x); gradients of parameters are summed over the leading dimensions before they are cast to the parameter's dtype. A shape that
does not fit is a ShapeError.

Every operation is correctly rounded and every sum has one order, so that kernels give the same bits. The order of a row's sums
depends only on its length, so the result of a row is the same in any batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from opfuse.errors import ShapeError, describe
from opfuse.numerics.chain import Rounding, boundary_dtype
from opfuse.numerics.layouts import ceil_div
from opfuse.numerics.pointwise import compute_dtype
from opfuse.numerics.scales import divide, reciprocal

EIGHT, LANES, GROUPS = 8, 32, 8
CHUNK = EIGHT * LANES * GROUPS
"""How many columns of a row are added up before the next ones are added to them."""

THREADS, BLOCKS = LANES * GROUPS, 256
"""Threads of a block, and how many blocks, at most, add up gradients of parameters."""

NormKind = Literal["rms_norm", "layer_norm", "l2_normalization"]


class Statistics(NamedTuple):
    """Of each row, fp32 (...). rstd: the factor that normalises it, as :class:`Norm` defines it. mean: if that is subtracted."""

    rstd: Tensor
    mean: Tensor | None = None

    def each(self, f: Callable[[Tensor], Tensor]) -> Statistics:
        """The statistics with ``f`` applied to both tensors."""
        return Statistics(f(self.rstd), None if self.mean is None else f(self.mean))


class NormGradients(NamedTuple):
    """The gradients of the input, and of the parameters in the parameters' dtypes."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class Norm:
    """y = (x - mean) * rstd * gamma + bias, as far as the kind has these terms.

    kind: "rms_norm", rstd = 1 / sqrt(mean(x^2) + eps); "layer_norm", the same of x - mean; "l2_normalization", with the sum in
    place of the mean.
    weight, bias: (trailing dimensions); an L2 normalisation has none, and an RMSNorm no bias.
    zero_centered_gamma: gamma is 1 + weight.
    """

    kind: NormKind
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-5
    zero_centered_gamma: bool = False

    def __post_init__(self) -> None:
        if self.weight is not None and self.bias is not None and self.bias.shape != self.weight.shape:
            raise _shape_error(f"{self.kind} bias", wanted=tuple(self.weight.shape), got=self.bias.shape)

    @property
    def is_centered(self) -> bool:
        """Whether the mean is subtracted."""
        return self.kind == "layer_norm"

    def trailing(self, x: Tensor) -> torch.Size:
        """The dimensions of ``x`` that are normalised."""
        trailing = x.shape[-1:] if self.weight is None else self.weight.shape
        if not trailing or x.shape[-len(trailing) :] != trailing:
            wanted = f"(..., {', '.join(map(str, trailing))})" if trailing else "with at least one normalised dimension"
            raise _shape_error(f"{self.kind} x", wanted=wanted, got=x.shape)
        return trailing

    def matrix(self, x: Tensor) -> tuple[int, int]:
        """Rows and columns of ``x``."""
        trailing = self.trailing(x)
        return math.prod(x.shape[: x.dim() - len(trailing)]), math.prod(trailing)

    def leading(self, x: Tensor) -> torch.Size:
        """The shape of the statistics of ``x``."""
        return x.shape[: x.dim() - len(self.trailing(x))]

    def check_gradient(self, name: str, grad: Tensor, x: Tensor) -> None:
        """ShapeError unless ``grad`` has the shape of ``x``."""
        if grad.shape != x.shape:
            raise _shape_error(f"{self.kind} {name}", wanted=tuple(x.shape), got=grad.shape)


def norm_forward(x: Tensor, norm: Norm, *, dtype: torch.dtype | None = None) -> tuple[Tensor, Statistics]:
    """y, and the statistics that the backward pass reads."""
    rows = _rows(x, norm, x)
    mean = _averaged(norm, rows) if norm.is_centered else None
    centered = rows if mean is None else rows - mean
    square = _averaged(norm, centered.square()) + norm.eps
    rstd = reciprocal(square.double().sqrt().to(square.dtype))  # of fp32, vector libraries may be off in the last place
    y = centered * rstd
    if norm.weight is not None:
        y = y * _gamma(norm, y.dtype)
    if norm.bias is not None:
        y = y + norm.bias.flatten()
    shape = norm.leading(x)
    statistics = Statistics(rstd, mean).each(lambda t: t.reshape(shape))
    return y.to(dtype or x.dtype).reshape(x.shape), statistics


def norm_backward(
    dy: Tensor,
    x: Tensor,
    norm: Norm,
    statistics: Statistics,
    *,
    extra: Tensor | None = None,
    rounding: Rounding = "per_op",
    dtype: torch.dtype | None = None,
) -> NormGradients:
    """The gradients of :func:`norm_forward`.

    extra: what is added to dx, the gradient that an input gets elsewhere. rounding: "per_op" rounds dx to ``dtype`` before that
    sum, as the two ops one by one; "single" rounds the sum only.
    """
    dtype = dtype or x.dtype
    norm.check_gradient("dy", dy, x)
    rows, grad = _rows(x, norm, x), _rows(dy, norm, x)
    rstd = statistics.rstd.reshape(-1, 1)
    normal = (rows if statistics.mean is None else rows - statistics.mean.reshape(-1, 1)) * rstd
    scaled = grad if norm.weight is None else grad * _gamma(norm, grad.dtype)
    dx = scaled - normal * _averaged(norm, scaled * normal)
    if norm.is_centered:
        dx = dx - _averaged(norm, scaled)
    dx = (rstd * dx).reshape(x.shape)
    if extra is not None:
        norm.check_gradient("extra gradient", extra, x)
        dx = dx.to(boundary_dtype(rounding, dtype, dx.dtype)).to(rows.dtype) + extra.to(rows.dtype)
    return NormGradients(dx.to(dtype), _summed(grad * normal, norm.weight), _summed(grad, norm.bias))


def bias_gradient(dy: Tensor, norm: Norm) -> Tensor | None:
    """That of :func:`norm_backward`, which needs neither the input nor its statistics."""
    return _summed(_rows(dy, norm, dy), norm.bias)


# -- sums of one order -------------------------------------------------------------------------------------------------------


@functools.cache
def team(columns: int) -> int:
    """Threads that share a row: enough for four eights each, from a warp to a block."""
    return min(max(power_of_two_above(ceil_div(columns, 4 * EIGHT)), LANES), THREADS)


def row_sums(values: Tensor) -> Tensor:
    """Sums of the rows of (rows, columns), (rows, 1).

    Columns come in eights; eight k belongs to lane k % 32 of group k / 32 % 8. Chunks of 2048 columns are added in turn, then by
    halves what an eight has, what groups have, what lanes have.
    """
    values = _in_turn(values, 1, CHUNK)
    eights = power_of_two_above(ceil_div(values.shape[1], EIGHT))
    if missing := eights * EIGHT - values.shape[1]:
        values = F.pad(values, (0, missing))
    lanes = min(eights, LANES)
    values = by_halves(values.view(-1, eights, EIGHT), 2).view(-1, eights // lanes, lanes)
    return by_halves(by_halves(values, 1), 1).view(-1, 1) + 0  # where all is -0


def column_sums(values: Tensor) -> Tensor:
    """Sums of the columns of (rows, columns), (columns,).

    A block has a team of threads for each row that it has at a time; row r belongs to team r % (256 teams of a block). Rows of a
    team are added in turn, then by halves what a block's teams have, then what blocks have.
    """
    columns = values.shape[1]
    teams = THREADS // team(columns)
    values = _in_turn(values, 0, BLOCKS * teams)
    blocks = power_of_two_above(ceil_div(values.shape[0], teams))
    if missing := blocks * teams - values.shape[0]:
        values = F.pad(values, (0, 0, 0, missing))
    return by_halves(by_halves(values.view(blocks, teams, columns), 1), 0) + 0


def _in_turn(values: Tensor, dim: int, size: int) -> Tensor:
    """Stretches of ``size`` along ``dim``, one added after another."""
    if values.shape[dim] <= size:
        return values
    first, *others = values.split(size, dim)
    total: Tensor = first.clone()
    for each in others:
        total.narrow(dim, 0, each.shape[dim]).add_(each)
    return total


def by_halves(values: Tensor, dim: int) -> Tensor:
    """The sum along ``dim``, whose length is a power of two: its second half is added to its first until one is left."""
    while values.shape[dim] > 1:
        values = torch.add(*values.chunk(2, dim))
    return values.squeeze(dim)


def power_of_two_above(n: int) -> int:
    """The least power of two that is not below ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def _rows(values: Tensor, norm: Norm, x: Tensor) -> Tensor:
    return values.reshape(norm.matrix(x)).to(compute_dtype(x.dtype))


def _averaged(norm: Norm, rows: Tensor) -> Tensor:
    """Means of rows; for an L2 normalisation, sums."""
    sums = row_sums(rows)
    return sums if norm.kind == "l2_normalization" else divide(sums, rows.shape[1])


def _gamma(norm: Norm, dtype: torch.dtype) -> Tensor:
    gamma = norm.weight.flatten().to(dtype)  # type: ignore[union-attr]
    return 1 + gamma if norm.zero_centered_gamma else gamma


def _summed(rows: Tensor, parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else column_sums(rows).reshape(parameter.shape).to(parameter.dtype)


def _shape_error(where: str, *, wanted: object, got: torch.Size) -> ShapeError:
    cure = "make the trailing dimensions of x and dy those of the weight"
    return ShapeError(describe(where, wanted=f"a shape {wanted}", got=tuple(got), cure=cure))
