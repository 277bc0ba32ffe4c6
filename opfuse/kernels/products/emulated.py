"""Products of two quantized planes, emulated: the torch definition that every native back end approximates.

Both operands come with the summed dimension along their lines; the result is lines of the left by lines of the right, in
fp32. What an E8M0 or E4M3 block scale multiplies enters the product as one operand value; fp32 scales and global amaxes
multiply the sums. On a GPU the operands are bf16 and the sums fp32. The values are the same, since a code has at most 4
significant bits and an E4M3 scale 4 more, but for one range: E4M3 under E8M0 codes 0-2, E5M2 under codes 0-9. There a value
may need a place below 2^-133, the last of bf16, and errs by at most 2^-134. At the other end bf16 and fp32 overflow alike.

The two fp32 factors of a result multiply its sum as numerics/sums.py says. Block scales multiply each other first, and then the
sum of their block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from opfuse.formats import COLUMNWISE, E2M1, ROWWISE, Usage
from opfuse.kernels.casts.dequantize import dequantize, dequantize_groups
from opfuse.kernels.engine.launch import as_on_gpu, is_recorded
from opfuse.kernels.products.stored import Stored
from opfuse.kernels.products.sums import scaled_sums
from opfuse.kernels.products.tiles import TileCut, in_tiles
from opfuse.numerics.layouts import Layout, ceil_div, lines_of, load_scale, load_values, store_scale
from opfuse.numerics.row_groups import TILE, RowGroups
from opfuse.numerics.sums import Factors
from opfuse.torch_private.dispatch import active_modes


@dataclass(frozen=True, eq=False)
class Lines:
    """Lines to multiply, fp32 or bf16 (lines, length); fp32 ``factor`` / ``unit`` is for the result's lines, ``blocks`` for each
    ``step`` of the length."""

    values: torch.Tensor
    factor: torch.Tensor | None = None
    unit: float = 1.0
    blocks: torch.Tensor | None = None
    step: int = 0


def operand(plane: Stored) -> Lines:
    """A stored plane as an operand."""
    return _OPERANDS[plane.layout.format.family](plane)


def multiply(left: Lines, right: Lines, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """left times right transposed, rounded once to ``dtype``: (left lines, right lines). Blocks of both have one length."""
    if left.blocks is not None and right.blocks is not None:
        return _multiply_blocks(left.values, left.blocks, right.values, right.blocks, left.step).to(dtype)
    factors = Factors(left.factor, right.factor, left.unit, right.unit)
    is_alone = active_modes() <= is_recorded()  # else a mode may hold the sums, as that of a selective checkpoint
    return scaled_sums([_matrix_product(left.values, right.values.t())], [factors], dtype=dtype, overwrites=is_alone)


def multiply_tiles(left: Lines, right: Lines, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """:func:`multiply`, in which a line of the left has the same bits whatever lines are beside it."""
    return in_tiles(len(left.values), left.values.device.type, lambda cut: multiply(_lines(left, cut), right, dtype=dtype))


def _lines(left: Lines, cut: TileCut) -> Lines:
    """The lines of a tile, with those of their scales that are not for all."""
    factor, blocks = (each if each is None or len(each) < len(left.values) else cut(each) for each in (left.factor, left.blocks))
    return replace(left, values=cut(left.values), factor=factor, blocks=blocks)


AT_ONCE = 8
"""Groups that are decoded before the first of them is multiplied: a program makes one launch of as many."""


def multiply_groups(
    lefts: Sequence[Stored], rights: Sequence[Stored], lines: Sequence[int], *, dtype: torch.dtype
) -> torch.Tensor:
    """:func:`multiply` of groups, one below the other, of formats whose block scales are part of the values.

    lines: how many of each left count. Rights have one number of lines, and operands of a side one format and one plane.
    """
    result = torch.empty(sum(lines), rights[0].layout.lines[0], dtype=dtype, device=lefts[0].data.device)
    for start in range(0, len(lefts), AT_ONCE):
        some = slice(start, start + AT_ONCE)
        first = sum(lines[:start])
        _multiply_some(lefts[some], rights[some], lines[some], result[first : first + sum(lines[some])])
    return result


def _multiply_some(lefts: Sequence[Stored], rights: Sequence[Stored], lines: Sequence[int], out: torch.Tensor) -> None:
    rows, columns = _values(lefts, ROWWISE), _values(rights, COLUMNWISE)
    heights = [len(each) for each in rows]
    sums = torch.empty(sum(heights), out.shape[1], dtype=torch.float32, device=out.device).split(heights)
    for pair in zip(rows, columns, sums, strict=True):
        _matrix_product(*pair)
    counted = [each[:count] for each, count in zip(sums, lines, strict=True)]
    factors = [
        Factors(_level(left, count), _level(right), _unit(left.layout), _unit(right.layout))
        for left, right, count in zip(lefts, rights, lines, strict=True)
    ]
    scaled_sums(counted, factors, dtype=out.dtype, out=out, overwrites=True)


def _values(planes: Sequence[Stored], lines: Usage) -> Sequence[torch.Tensor]:
    """Values of planes under their block scales, as matrices whose rows are ``lines`` of this usage; in one memory."""
    whole = dequantize_groups([_without_level(plane) for plane in planes], dtype=_dtype_on(planes[0].data))
    heights = [plane.layout.shape[0] for plane in planes]
    parts: Sequence[torch.Tensor] = whole.split(heights) if planes[0].layout.usage == lines else whole.t().split(heights, 1)
    return parts


def grouped_product(
    lefts: Sequence[Stored],
    rights: Sequence[Stored],
    lines: Sequence[int],
    *,
    out_dtype: torch.dtype,
    fast: bool = False,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
) -> torch.Tensor:
    """The products of groups one below the other, each rounded once to ``out_dtype``: (sum of ``lines``, lines of a right).

    lines: how many of each left count; those after them fill its last block. fast: whether sums may have fewer bits than fp32,
    which those of this definition do not. out: a contiguous matrix on 16 bytes to write the result into.
    accumulate: add the result, in fp32, to what ``out`` holds.
    """
    pairs = zip(map(operand, lefts), map(operand, rights), strict=True)
    result = torch.cat([multiply(*pair)[:count].to(out_dtype) for pair, count in zip(pairs, lines, strict=True)])
    return result if out is None else out.add_(result) if accumulate else out.copy_(result)


def product_of_rows(
    left: Stored, rights: Sequence[Stored], groups: RowGroups, *, out_dtype: torch.dtype, fast: bool = False
) -> torch.Tensor:
    """The rows of each group of ``left`` times the right of the group, rounded once: (rows, lines of a right).

    Scales of the left may be those of a tensor for each group, (groups, 1). fast: as of :func:`grouped_product`.
    """
    ranges = [(first, end, i) for i, (first, end, _) in enumerate(groups.ranges()) if end > first]
    if not ranges:
        return left.data.new_zeros(groups.rows, rights[0].layout.lines[0], dtype=out_dtype)
    lefts = [_part(left, first, end, i) for first, end, i in ranges]
    lines = [end - first for first, end, _ in ranges]
    return grouped_product(lefts, [rights[i] for *_, i in ranges], lines, out_dtype=out_dtype)


def product_over_rows(
    left: Stored, right: Stored, groups: RowGroups, *, out_dtype: torch.dtype, fast: bool = False
) -> torch.Tensor:
    """Both transposed and multiplied, group by group: (groups, lines of the left, lines of the right).

    The planes are columnwise, of matrices in which each group begins on a tile (row_groups.py); that of a group without rows is
    zeros. Scales of a tensor or of its columns are those of each group: (groups, 1), (groups, columns).
    """
    lines, columns = left.layout.lines[0], right.layout.lines[0]
    result = torch.zeros(groups.number, lines, columns, dtype=out_dtype, device=left.data.device)
    products_into(left, right, groups, dict(enumerate(result)), accumulate=False)
    return result


def products_into(
    left: Stored,
    right: Stored,
    groups: RowGroups,
    results: Mapping[int, torch.Tensor],
    *,
    fast: bool = False,
    accumulate: bool = True,
) -> None:
    """Write the products of :func:`product_over_rows` into the results of some groups, by number, rounded once.

    accumulate: add them, in fp32, to results in fp32. Then those of groups without rows keep what they have. No product is -0:
    sums go on over zeros behind the rows.
    """
    for i, (first, end, tile) in enumerate(groups.ranges()):
        if i not in results:
            continue
        if end > first:
            start = tile * TILE
            pair = (_part(plane, start, start + end - first, i) for plane in (left, right))
            product = 0.0 + multiply(*map(operand, pair))
            results[i].add_(product) if accumulate else results[i].copy_(product)
        elif not accumulate:
            results[i].zero_()


def _part(plane: Stored, first: int, end: int, group: int) -> Stored:
    """Rows of the matrix of a plane, which begin on a tile if it is stored by columns; the scale of a group, if each has one."""
    layout = plane.layout.replace(shape=(end - first, plane.layout.shape[1]))
    rows, blocks = slice(first, end), slice(first // TILE, ceil_div(end, TILE))
    if layout.format.family == "mx":  # stored with the rows of the matrix, in either direction
        part = load_scale(plane.scale, plane.layout)
        scale = part[rows] if layout.usage == ROWWISE else part[:, first // layout.block[1] :]
        scale = store_scale(scale[: layout.blocks[0], : layout.blocks[1]], layout)
        return Stored(plane.data[rows].contiguous(), scale, plane.amax, layout)
    by_columns = layout.usage == COLUMNWISE
    data = plane.data[:, rows] if by_columns else plane.data[rows]
    if plane.has_scales_of_groups:
        scale = plane.scale[group]
    elif layout.format.family == "block":
        scale = plane.scale[blocks] if by_columns else plane.scale[:, rows]
    else:
        scale = plane.scale[rows] if layout.format.family == "row" else plane.scale
    return Stored(data.contiguous(), scale.contiguous(), plane.amax, layout)


def _matrix_product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """a times b in fp32, from bf16 operands on a GPU."""
    if not as_on_gpu(a):
        return torch.mm(a, b, out=out)
    a, b, options = a.to(torch.bfloat16), b.to(torch.bfloat16), {"out_dtype": torch.float32}
    return torch.mm(a, b, **options) if out is None else torch.mm(a, b, **options, out=out)  # type: ignore[call-overload]


def _multiply_blocks(a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, step: int) -> torch.Tensor:
    """The sums of each ``step`` are promoted to a scaled fp32 sum."""
    result = a_scale.new_zeros(len(a), len(b))
    steps = 0 if a.is_meta else a_scale.shape[1]  # sizes alone need no sums, of which a rehearsal may have 131072
    for i in range(steps):
        part = slice(i * step, (i + 1) * step)
        result += _matrix_product(a[:, part], b[:, part].t()) * (a_scale[:, i, None] * b_scale[None, :, i])
    return result


def _tensor(plane: Stored) -> Lines:
    return Lines(load_values(plane.data, plane.layout), factor=plane.scale.reshape(1, 1))


def _row(plane: Stored) -> Lines:
    return Lines(load_values(plane.data, plane.layout), factor=load_scale(plane.scale, plane.layout))


def _block(plane: Stored) -> Lines:
    layout = plane.layout
    scales = load_scale(plane.scale, layout).repeat_interleave(layout.block[0], 0)[: layout.lines[0]]
    return Lines(load_values(plane.data, layout), blocks=scales, step=layout.block[1])


def _scaled(plane: Stored) -> Lines:
    """Lines of codes times block scales; the global amaxes, over their unit, are factors."""
    data, scale, level, layout = _without_level(plane)
    values = dequantize(data, scale, level, layout=layout, dtype=_dtype_on(data))
    factor = None if plane.amax is None else plane.amax.reshape(-1, 1)
    return Lines(lines_of(values, layout.usage), factor=factor, unit=_unit(layout))


def _without_level(plane: Stored) -> Stored:
    """What codes and block scales alone say, and as it was rotated."""
    return plane._replace(amax=None, layout=plane.layout.replace(format=plane.layout.format.replace(rht=())))


def _level(plane: Stored, count: int | None = None) -> torch.Tensor | None:
    """The global amax, or those of the first ``count`` lines."""
    return plane.amax[:count] if plane.layout.format.per_row and plane.amax is not None else plane.amax


def _unit(layout: Layout) -> float:
    """The global amax whose factor is 1."""
    return E2M1.max * layout.format.encode_max if layout.amax_shape else 1.0


def _dtype_on(data: torch.Tensor) -> torch.dtype:
    """Of operands on the device of ``data``."""
    return torch.bfloat16 if as_on_gpu(data) else torch.float32


_OPERANDS: dict[str, Callable[[Stored], Lines]] = {"tensor": _tensor, "row": _row, "block": _block, "mx": _scaled, "nv": _scaled}
