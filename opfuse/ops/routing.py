"""Tokens to experts and back: what stands before and behind grouped layers in a mixture of experts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from opfuse.core.cast import Cast
from opfuse.core.context import Context, Value, values_of
from opfuse.core.grouped_cast import GroupedCast
from opfuse.core.operation import BasicOperation
from opfuse.core.spec import Size, hyper_parameters, new_parameter
from opfuse.core.watched import METHODS
from opfuse.errors import DtypeError, ShapeError, SpecError, describe, number_of
from opfuse.kernels.combine import combine_rows, combine_rows_backward
from opfuse.numerics import pointwise
from opfuse.ops.pointwise import remake_chain
from opfuse.tensors.gemm import gemm


class Route(NamedTuple):
    """Where tokens go: ``rows``, int64 (tokens * top_k,), says which rows of ``x`` (tokens, features) the output is, ``weights``
    (tokens * top_k,) their weights, if it has any.
    """

    x: torch.Tensor
    rows: torch.Tensor
    extra_outputs: tuple[torch.Tensor, ...]
    weights: torch.Tensor | None = None


class Sorted(NamedTuple):
    """Tokens by the groups that they go to, and within one as they came. ``order``, int64 (tokens * top_k,): the places among
    ``chosen``, flattened, group by group. ``places``, int64 (tokens, top_k): where each stands in that order. ``splits``, int64
    (groups,): how many each group has.
    """

    order: torch.Tensor
    places: torch.Tensor
    splits: torch.Tensor


def by_group(chosen: torch.Tensor, groups: int) -> Sorted:
    """Sort the groups that tokens go to, integers (tokens, top_k) from 0 to ``groups`` - 1. Nothing waits for the device.

    What is no group is counted for none, so splits do not add up to the rows.
    """
    ids, order = chosen.flatten().sort(stable=True)
    rows = torch.arange(order.numel(), device=order.device)
    places = torch.empty_like(order).scatter_(0, order, rows).view_as(chosen)
    # A search finds where groups begin: bincount waits for the device, and a one-hot matrix has each number once for every group.
    begins = torch.searchsorted(ids, torch.arange(groups + 1, dtype=ids.dtype, device=ids.device))
    return Sorted(order, places, begins[1:] - begins[:-1])


class _Routing(BasicOperation):
    """An op whose output are rows of its input, by the groups that they go to, and which saves the input where the backward pass
    makes these rows anew.
    """

    forward_kwargs = ()
    speaks_for = (*METHODS, "route")  # rows are made anew without it

    def op_forward(self, ctx: Context, input_: torch.Tensor, **_: Any) -> tuple[torch.Tensor, ...]:
        route = self.route(ctx, input_)
        return route.x.index_select(0, route.rows), *route.extra_outputs

    @abstractmethod
    def route(self, ctx: Context, input_: torch.Tensor) -> Route:
        """All but the copies of rows, with what the backward pass needs kept in ``ctx``."""

    def remakes(self, ctx: Context) -> Literal["", "saved", "input"]:
        return "saved"

    def remake(self, contexts: Sequence[Context], cast: Cast | None) -> Value:
        ctx, *others = contexts
        x = values_of(ctx.saved.x)
        x = x.to(ctx.dtype_of(x))
        if isinstance(cast, GroupedCast) and not others:
            return cast(x, None, ctx.saved.rows)
        rows = x.index_select(0, ctx.saved.rows)
        if others:
            return remake_chain(rows, others, cast)
        return rows if cast is None else cast(rows)


class TokenDispatch(_Routing):
    """Rows of x (tokens, features) once for each of the ``top_k`` groups that a learned gate chooses for them, group by group.

    p = softmax(x W^T) with ``weight`` W (num_groups, features), in fp32 of x as it came, under torch.autocast too; the largest
    ``top_k`` of a token are its groups. The output is (tokens * top_k, features), by group, then by token. Extra outputs: split
    sizes, int64 (num_groups,); the p of each row, in the dtype of the output; and the place of each token's rows in the output,
    int64 (tokens, top_k), for :class:`TokenCombine`. The gradient flows through the rows and through p.

    Before a :class:`~opfuse.ops.GroupedLinear` that takes the split sizes, the rows are cast as they are read (rule
    ``dispatch_cast``), and exist in their format alone.
    """

    traits = frozenset(("routes",))
    saves = ("x", "rows", "weight", "probabilities", "chosen", "places")
    num_extra_outputs = 3

    @hyper_parameters
    def __init__(
        self, num_groups: Size, features: Size, *, top_k: Size = 1, device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        if top_k > num_groups:
            cure = "choose as many groups as there are, or fewer"
            raise SpecError(describe("TokenDispatch.top_k", wanted=f"at most num_groups={num_groups}", got=top_k, cure=cure))
        self.weight = new_parameter("TokenDispatch", self.parameter_shape("weight"), device=device, dtype=dtype)
        self.reset_parameters()

    def parameter_shape(self, name: str) -> tuple[int, ...]:
        return self.spec.num_groups, self.spec.features

    def reset_parameters(self) -> None:
        """Values as ``nn.Linear`` draws them."""
        if not self.weight.is_meta:
            nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    def route(self, ctx: Context, input_: torch.Tensor) -> Route:
        weight = self.weight
        _check_rows(self.label, input_, self.features)
        ctx.input_dtype, x = input_.dtype, input_.to(ctx.dtype_of(input_))
        wide = pointwise.compute_dtype(input_.dtype)
        # The gate reads the input itself, and a product of its own: torch.autocast would round both.
        options = ctx.env.product("fprop")  # a gate of other bits chooses other groups
        probabilities = gemm("fprop", input_.to(wide), weight.to(wide), dtype=wide, **options).softmax(-1)
        picked, chosen = probabilities.topk(self.top_k)
        order, places, splits = by_group(chosen.to(_narrowest(self.num_groups)), self.num_groups)
        trains, routed = "weight" in ctx.needs, "input" in ctx.needs
        rows = order // self.top_k
        ctx.save(
            x=input_ if trains or ctx.is_remade else None,
            rows=rows if ctx.is_remade else None,
            weight=weight if routed else None,
            probabilities=probabilities if ctx.needs else None,
            chosen=chosen if ctx.needs else None,
            places=places if ctx.needs else None,
        )
        weights = picked.flatten().index_select(0, order).to(x.dtype)
        return Route(x, rows, (splits, weights, places), weights)

    def op_backward(self, ctx: Context, grad_output: torch.Tensor | None) -> tuple[torch.Tensor | None, Any]:
        saved, wide = ctx.saved, ctx.saved.probabilities.dtype
        _, d_picked, _ = ctx.grad_extras
        dx = None if grad_output is None else combine_rows(grad_output, saved.places, dtype=wide)
        d_weight = None
        if d_picked is not None:
            d_chosen = d_picked.to(wide).index_select(0, saved.places.flatten()).view_as(saved.places)
            chosen = torch.zeros_like(saved.probabilities).scatter_(1, saved.chosen, d_chosen)
            p = saved.probabilities
            d_logits = p * (chosen - (p * chosen).sum(-1, keepdim=True))
            d_weight = gemm("wgrad", d_logits, saved.x.to(wide), dtype=wide) if "weight" in ctx.needs else None
            if "input" in ctx.needs:
                gate = gemm("dgrad", d_logits, saved.weight.to(wide), dtype=wide)
                dx = gate if dx is None else dx + gate
        dx = None if dx is None or "input" not in ctx.needs else dx.to(ctx.input_dtype)
        return dx, (None if d_weight is None else d_weight.to(self.weight.dtype),)


class TokenPermute(_Routing):
    """Rows of x (tokens, features) once for each group that a router of your own chose for them, by group, then by token.

    Extra input: ``chosen``, integers (tokens, top_k) from 0 to ``num_groups`` - 1; another dtype is a DtypeError, another shape a
    ShapeError. Extra outputs: split sizes, int64 (num_groups,); and the place of each token's rows in the output, int64 (tokens,
    top_k), for :class:`TokenCombine`. A choice that is no group, as routers write for one on another device, gets a row of the
    first or last group, and ~place, a negative number, which sums leave out. The gradient of a token is the sum of those of its
    rows, in fp32, rounded once.

    weighted: one more extra input, ``weights``, floating point (tokens, top_k), and one more extra output, the weight of each row
    (tokens * top_k,), in their dtype, for ops such as :class:`~opfuse.ops.ScaledSwiGLU`; 0 for a choice that is no group.

    Before a :class:`~opfuse.ops.GroupedLinear` that takes the split sizes, the rows are cast as they are read (rule
    ``dispatch_cast``), and exist in their format alone.
    """

    traits = frozenset(("routes",))
    saves = ("x", "rows", "places")
    num_extra_inputs = 1
    most_extra_inputs = 2
    num_extra_outputs = 2

    @hyper_parameters
    def __init__(self, num_groups: Size, *, weighted: bool = False) -> None:
        if weighted:
            self.__dict__.update(num_extra_inputs=2, num_extra_outputs=3)
        super().__init__()

    def route(self, ctx: Context, input_: torch.Tensor) -> Route:
        chosen, *weights = ctx.extras
        _check_rows(self.label, input_, None)
        _check_chosen(self.label, chosen, len(input_))
        for each in weights:
            _check_weights(self, each, chosen.shape)
        ctx.input_dtype, x = input_.dtype, input_.to(ctx.dtype_of(input_))
        ctx.extra_dtypes = [extra.dtype for extra in ctx.extras]
        chosen = chosen.long()  # narrow integers may not hold the last group
        group = chosen.clamp(0, self.num_groups - 1)
        order, places, splits = by_group(group.to(_narrowest(self.num_groups)), self.num_groups)
        counts, rows = group == chosen, order // chosen.shape[1]
        places = places.where(counts, ~places)
        read = not ctx.needs.isdisjoint(("input", "extra1"))
        ctx.save(
            x=input_ if ctx.is_remade else None,
            rows=rows if ctx.is_remade else None,
            places=places if read else None,
        )
        # A row that no sum has shares its group's scale, and its gradient of 0 is multiplied by what stands here.
        of_rows = [each.where(counts, 0).flatten().index_select(0, order) for each in weights]
        return Route(x, rows, (splits, places, *of_rows), *of_rows)

    def op_backward(
        self, ctx: Context, grad_output: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, tuple[()], tuple[torch.Tensor | None, ...]]:
        places, dx, d_weights = ctx.saved.places, None, None
        if grad_output is not None and "input" in ctx.needs:
            dx = combine_rows(grad_output, places, dtype=ctx.input_dtype)
        if self.spec.weighted and ctx.grad_extras[2] is not None and "extra1" in ctx.needs:
            counts = places >= 0
            d_rows = ctx.grad_extras[2].index_select(0, places.where(counts, ~places).flatten())
            d_weights = d_rows.view_as(places).where(counts, 0).to(ctx.extra_dtypes[1])
        return dx, (), (None, d_weights)[: self.num_extra_inputs]


class TokenCombine(BasicOperation):
    """y (tokens, features): the sum of the rows that belong to each token, in fp32, rounded once.

    Extra input: ``places``, int64 or int32 (tokens, top_k), which :class:`TokenDispatch` and :class:`TokenPermute` give out: each
    row stands there once, or its gradient is undefined; ~place, a negative number, adds nothing. Another dtype is a DtypeError,
    another shape a ShapeError.

    weighted: a second extra input, ``weights``, floating point (tokens, top_k), by which rows are multiplied in fp32. Their
    gradient reads the rows, which are saved for it; weights that :class:`TokenPermute` hands to an activation before the last
    product have theirs without that. typed: one more extra input, ``tokens``, floating point, of any shape: y has its dtype, also
    under torch.autocast; its values are not read.
    """

    saves = ("rows", "places", "weights")
    forward_kwargs = ()
    num_extra_inputs = 1
    most_extra_inputs = 3

    @hyper_parameters
    def __init__(self, *, weighted: bool = False, typed: bool = False) -> None:
        self.__dict__["num_extra_inputs"] = 1 + weighted + typed
        super().__init__()

    def op_forward(self, ctx: Context, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        places, *others = ctx.extras
        weights = others.pop(0) if self.spec.weighted else None
        _check_rows(self.label, input_, None)
        _check_places(self.label, places)
        if input_.shape[0] != places.numel():
            wanted = f"{number_of(places.numel(), 'row')}, one for each place"
            cure = "pass the places of the TokenDispatch that made the rows"
            raise ShapeError(describe(f"{self.label} input", wanted=wanted, got=tuple(input_.shape), cure=cure))
        if weights is not None:
            _check_weights(self, weights, places.shape)
        ctx.input_dtype, x = input_.dtype, input_.to(ctx.dtype_of(input_))
        ctx.extra_dtypes = [extra.dtype for extra in ctx.extras]
        routed, scored = "input" in ctx.needs, weights is not None and "extra1" in ctx.needs
        ctx.save(
            rows=x if scored else None,
            places=places if routed or scored else None,
            weights=weights if routed else None,
        )
        dtype = self.checked_dtype("tokens", others[0].dtype) if self.spec.typed else None
        return combine_rows(x, places.long(), weights, dtype=dtype)

    def gradient_rows(self, ctx: Context, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A matrix (tokens + 1, features), the last row 0, and the numbers, int64, of its rows that are the gradients of rows
        without weights.
        """
        places = ctx.saved.places.long()
        counts, zeros = places >= 0, dy.new_zeros(1, dy.shape[1])
        tokens = torch.arange(len(places), device=places.device).unsqueeze(1).expand_as(places).where(counts, len(places))
        index = places.new_full((places.numel(),), len(places))  # a kernel reads where it points, also for a row without a place
        index.scatter_(0, places.where(counts, ~places).flatten(), tokens.flatten())
        return torch.cat((dy, zeros)).to(ctx.input_dtype), index

    def op_backward(self, ctx: Context, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, tuple[()], tuple[Any, ...]]:
        routed, scored, saved = "input" in ctx.needs, self.spec.weighted and "extra1" in ctx.needs, ctx.saved
        if not (routed or scored):
            return None, (), (None,) * self.num_extra_inputs
        places, weights = saved.places.long(), None
        if self.spec.weighted:  # their own gradients read the dtype of weights alone
            weights = saved.weights if routed else torch.ones(places.shape, dtype=ctx.extra_dtypes[1], device=places.device)
        options = {"rows": saved.rows if scored else None, "dtype": ctx.input_dtype}
        d_rows, d_weights = combine_rows_backward(grad_output, places, weights, **options)
        d_extras = (None, *((d_weights,) if self.spec.weighted else ()), *((None,) if self.spec.typed else ()))
        return d_rows if routed else None, (), d_extras


def _check_weights(op: BasicOperation, weights: torch.Tensor, shape: torch.Size) -> None:
    """DtypeError or ShapeError unless ``weights`` are floating point of ``shape``, (tokens, top_k)."""
    op.checked_dtype("weights", weights.dtype)
    if weights.shape != shape:
        wanted, cure = f"shape {tuple(shape)}", "pass a weight for each group that a token goes to"
        raise ShapeError(describe(f"{op.label} weights", wanted=wanted, got=tuple(weights.shape), cure=cure))


def _narrowest(most: int) -> torch.dtype:
    """The integers with the fewest bytes that hold ``most``: a GPU sorts numbers byte by byte."""
    return next(t for t in (torch.uint8, torch.int16, torch.int32, torch.int64) if most <= torch.iinfo(t).max)


def _check_rows(label: str, x: torch.Tensor, features: int | None) -> None:
    """ShapeError unless ``x`` is a matrix, of ``features`` columns where these are given."""
    if x.ndim != 2 or features not in (None, x.shape[-1]):
        wanted = "shape (rows, features)" if features is None else f"shape (tokens, {features})"
        raise ShapeError(describe(f"{label} input", wanted=wanted, got=tuple(x.shape), cure="flatten the leading dimensions"))


def _check_places(label: str, places: torch.Tensor) -> None:
    """DtypeError or ShapeError unless ``places`` are integers (tokens, top_k): one row for all would be the sum over features."""
    cure = "pass the places of a TokenDispatch, of shape (tokens, 1) for one group each"
    if places.dtype not in (torch.int64, torch.int32):
        raise DtypeError(describe(f"{label} places", wanted="int64 or int32", got=places.dtype, cure=cure))
    if places.ndim != 2:
        raise ShapeError(describe(f"{label} places", wanted="shape (tokens, top_k)", got=tuple(places.shape), cure=cure))


def _check_chosen(label: str, chosen: torch.Tensor, tokens: int) -> None:
    """DtypeError or ShapeError unless ``chosen`` are integers (tokens, top_k)."""
    cure = "pass the numbers of the groups that a router chose, of shape (tokens, 1) for one group each"
    if chosen.is_floating_point() or chosen.is_complex() or chosen.dtype is torch.bool:
        raise DtypeError(describe(f"{label} chosen", wanted="integers", got=chosen.dtype, cure=cure))
    if chosen.ndim != 2 or len(chosen) != tokens or not chosen.shape[1]:
        raise ShapeError(describe(f"{label} chosen", wanted=f"shape ({tokens}, top_k)", got=tuple(chosen.shape), cure=cure))
