"""Rows of experts that are spread over ranks: where they go, and their values or codes on the way.

Rows lie expert by expert on both sides. A rank has equal parts of the experts, in order, so what it sends to another rank lies
together. What it receives lies rank by rank, and is then ordered by expert, and within one by rank: the order in which one rank
would have the rows of all.

Codes travel with their scales: about half the bytes of values. Each row of a row-wise format is cast by itself, so any rank
casts it alike. Per tensor, an expert has one scale, from the largest of its amaxes over the ranks.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, NamedTuple, cast

import torch
from torch.nn.functional import pad

from opfuse.formats import ROWWISE
from opfuse.kernels.casts.groups import row_groups
from opfuse.kernels.casts.scaled_groups import cast_current_groups, group_amaxes
from opfuse.kernels.engine.launch import check_capture
from opfuse.numerics.layouts import layout_of, load_scale, store_scale
from opfuse.numerics.row_groups import MOST_GROUPS, RowGroups
from opfuse.tensors.groups import GroupedPlane, Sizes, offsets
from opfuse.tensors.quantizers import Float8CurrentScalingQuantizer, Quantizer
from opfuse.tensors.quantizers.base import is_repeatable
from opfuse.tensors.quantizers.ranks import reduce_amax
from opfuse.tensors.ragged import RaggedPlane, copied_to
from opfuse.tensors.row_collectives import exchanged
from opfuse.tensors.rows import join_rows, row_parts
from opfuse.tensors.storage import Plane, QuantizedStorage, matrix_shape


class Exchange(NamedTuple):
    """Rows that this rank sends to each rank of ``group``, and receives from each.

    own: int64 (experts of this rank,), the rows of each, and of the last one also the rows of zeros behind them. order: int64
    (received rows,), by expert: where each row is among those received, rank by rank. rank: this one in the group.
    """

    own: torch.Tensor
    sent: list[int]
    received: list[int]
    order: torch.Tensor
    group: Any
    rank: int

    @property
    def room(self) -> int:
        """How many rows this rank's experts get."""
        return room_for(len(self.order), len(self.sent), self.order.device)


def exchange_of(splits: torch.Tensor, ranks: int, group: Any, *, where: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How many rows each expert of this rank gets, int64 (experts of a rank,); how many rows are sent to each rank and received
    from each, int64 (2, ranks) on the CPU; and their order.

    splits: int64, the rows of each of all experts. The host waits for the device once, as the collective wants numbers.
    """
    check_capture(f"{where} split sizes", got="rows that go to other ranks", cure="capture what is before and behind it apart")
    splits = splits.long().contiguous()
    each = [len(splits) // ranks] * ranks
    incoming = exchanged(splits, each, each, group) if ranks > 1 else splits
    on_host = torch.stack((splits, incoming)).cpu().view(2, ranks, -1)
    own, rows = incoming.view(ranks, -1).sum(0), int(on_host[1].sum())
    own[-1] += room_for(rows, ranks, splits.device) - rows
    return own, on_host.sum(2), _by_expert(incoming.view(ranks, -1), rows)


ROUNDED = ("cuda",)
"""Kinds of devices on which numbers of rows are rounded up."""


def room_for(rows: int, ranks: int, device: torch.device) -> int:
    """How many rows there are with those of zeros: the next of 32 to 64 steps between powers of two.

    Routes change in every call, and a program is for one number of rows: of a layer of 64 experts it takes the host 8 ms beside
    an H200, and the same without a program 45. Rows of zeros, at most a 32nd part, add nothing to any sum.
    """
    if ranks == 1 or device.type not in ROUNDED:
        return rows
    step = max(128, 1 << max(0, rows.bit_length() - 6))
    return -(-rows // step) * step


def _by_expert(counts: torch.Tensor, rows: int) -> torch.Tensor:
    """int64 (rows,): the places of rows that lie rank by rank, in the order of experts. counts: (ranks, experts)."""
    flat = counts.flatten()
    starts, sizes = (flat.cumsum(0) - flat).view_as(counts).t().flatten(), counts.t().flatten()
    shifts = starts - (sizes.cumsum(0) - sizes)
    return torch.arange(rows, device=counts.device) + shifts.repeat_interleave(sizes, output_size=rows)


def to_experts(rows: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """The rows that this rank's experts get, from ``rows`` (sent rows, ...) of every rank."""
    if len(exchange.sent) == 1:
        return rows.clone()
    received, order, room = exchanged(rows, exchange.received, exchange.sent, exchange.group), exchange.order, exchange.room
    if room == len(order):
        return received.index_select(0, order)
    made = received.new_empty(room, *received.shape[1:])
    torch.index_select(received, 0, order, out=made[: len(order)])
    made[len(order) :].zero_()
    return made


def to_tokens(rows: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """``rows``, as many as :func:`to_experts` gave, back where they came from."""
    if len(exchange.sent) == 1:
        return rows.clone()
    order = exchange.order
    by_rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return exchanged(rows.index_select(0, by_rank), exchange.sent, exchange.received, exchange.group)


def why_values(quantizer: Quantizer, experts: int) -> str:
    """Why rows that ``quantizer`` casts for a product of that many ``experts`` travel as values; empty: their codes travel.

    They do if they are the same cast before they travel, and those by columns are codes of the same format: what is kept in high
    precision, or in another format, is made of values.
    """
    fmt, columns = quantizer.formats
    if fmt.element is None or columns.as_stored != fmt.as_stored:
        return "products of the backward pass read another format, or the values themselves"
    if not is_repeatable(quantizer):
        return "the cast draws random numbers, reduces amaxes, or is not the library's"
    if quantizer.wanting(columnwise=False).row_local:
        return ""
    if not isinstance(quantizer, Float8CurrentScalingQuantizer) or quantizer.runs_in_torch:
        return "rows share a scale that the ranks do not find together"
    return "" if experts <= MOST_GROUPS else f"kernels find the scales of at most {MOST_GROUPS} experts"


def cast_for_experts(
    quantizer: Quantizer, x: torch.Tensor, splits: torch.Tensor, exchange: Exchange, index: torch.Tensor | None = None
) -> QuantizedStorage:
    """The rowwise plane of the rows of this rank's experts, in groups, from ``x`` of every rank, cast there.

    quantizer: one that :func:`why_values` is empty for. splits: the rows of each of all experts. index: int64; then the rows are
    ``x[index]``.
    """
    rowwise = quantizer.wanting(rowwise=True, columnwise=False)
    if rowwise.row_local:
        piece = rowwise.quantize(x)
        parts = row_parts(piece)
        if index is not None:  # a row that goes to several experts is cast once
            parts = [_as_bytes(part).index_select(0, index).view(part.dtype) for part in parts]
    else:
        piece = _cast_groups(rowwise, x, copied_to(splits, x.device), exchange, index)
        parts = row_parts(piece)  # codes alone: rows share scales
    received = [to_experts(_as_bytes(part), exchange).view(part.dtype) for part in parts]
    rows = exchange.room
    plane = join_rows(piece, received, (rows, *piece.shape[1:])).plane(ROWWISE)
    if not rowwise.row_local:
        plane = replace(plane, scale=cast(torch.Tensor, plane.scale).chunk(len(exchange.sent))[exchange.rank])
    groups = RowGroups(row_groups(copied_to(exchange.own, x.device), rows), rows, len(exchange.own))
    made = RaggedPlane(**{each.name: getattr(plane, each.name) for each in fields(plane)}, groups=groups)
    return QuantizedStorage(torch.Size(plane.shape), x.dtype, made, None, _WHY)


_WHY = "rows came from other ranks in one direction"


def _as_bytes(part: torch.Tensor) -> torch.Tensor:
    """An array of codes as bytes, which collectives and indices take; scales as they are."""
    return part.view(torch.uint8) if part.itemsize == 1 else part


def _cast_groups(
    quantizer: Any, x: torch.Tensor, splits: torch.Tensor, exchange: Exchange, index: torch.Tensor | None
) -> QuantizedStorage:
    """A cast under a scale for each expert, fp32 (experts,), from its largest amax over the ranks."""
    rows = len(x) if index is None else len(index)
    groups = RowGroups(row_groups(splits, rows), rows, len(splits))
    amaxes = group_amaxes(x, groups, index=index) if rows else torch.zeros(len(splits), device=x.device)
    amaxes = reduce_amax(amaxes, exchange.group) if len(exchange.sent) > 1 else amaxes
    shape = torch.Size((rows, x.shape[1]))
    (layout,), options = quantizer._layouts(shape), quantizer._options(quantizer.amax_epsilon)
    (data,), scales = cast_current_groups(x, groups, amaxes, [layout], index=index, **options)
    return QuantizedStorage(shape, x.dtype, Plane(ROWWISE, layout.format, matrix_shape(shape), data, scales), None)


def in_parts(plane: RaggedPlane, sizes: Sizes) -> GroupedPlane:
    """The plane of each group of a rowwise plane, over parts of its arrays. sizes: the rows of each."""
    return GroupedPlane([_part(plane, number, *ends) for number, ends in enumerate(offsets(sizes))], sizes)


def _part(plane: RaggedPlane, number: int, start: int, stop: int) -> Plane:
    shape, scale = (stop - start, plane.shape[1]), cast(torch.Tensor, plane.scale)
    if plane.format.family == "tensor":
        scale = scale[number : number + 1]
    else:
        lines = load_scale(scale, plane.layout)[start:stop]
        scale = store_scale(lines, layout_of(plane.format, ROWWISE, shape, plane.swizzled))
    amax = None if plane.amax is None else plane.amax[start:stop]
    return Plane(ROWWISE, plane.format, shape, plane.data[start:stop], scale, amax, plane.swizzled)


def mirrored_parts(plane: GroupedPlane, multiple: int) -> GroupedPlane:
    """The columnwise plane of a rowwise one per tensor; rows of zeros fill each group up to a multiple of rows."""
    filled = []
    for member, size in zip(plane.members, plane.sizes):
        data = pad(_as_bytes(member.data), (0, 0, 0, -size % multiple))
        filled.append(replace(member, shape=(len(data), member.shape[1]), data=data.view(member.data.dtype)))
    return GroupedPlane([member.transposed() for member in filled], plane.sizes)
