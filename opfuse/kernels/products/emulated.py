"""Products of two quantized planes, emulated: the torch definition that every native back end approximates.

Both operands come with the summed dimension along their lines; the result is lines of the left by lines of the right, in
fp32. What an E8M0 or E4M3 block scale multiplies enters the product as one operand value; fp32 scales and global amaxes
multiply the sums. On a GPU the operands are bf16 and the sums fp32. The values are the same, since a code has at most 4
significant bits and an E4M3 scale 4 more, but for one range: E4M3 under E8M0 codes 0-2, E5M2 under codes 0-9. There a value
may need a place below 2^-133, the last of bf16, and errs by at most 2^-134. At the other end bf16 and fp32 overflow alike.

The two fp32 factors of a result multiply its sum one after the other, left first, each product rounded to 24 bits whatever its
exponent: a result overflows or vanishes where it must, never because a sum times one factor does. Block scales multiply each
other first, and then the sum of their block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from opfuse.formats import COLUMNWISE, E2M1, NumberFormat
from opfuse.kernels.casts.dequantize import dequantize
from opfuse.kernels.engine.launch import listener
from opfuse.kernels.products.stored import Stored
from opfuse.kernels.products.tiles import TileCut, in_tiles
from opfuse.numerics.layouts import Layout, ceil_div, lines_of, load_data, load_scale
from opfuse.numerics.row_groups import TILE, RowGroups
from opfuse.numerics.scalars import decode


@dataclass(frozen=True, eq=False)
class Lines:
    """Lines to multiply, fp32 or bf16 (lines, length); fp32 ``factor`` is for the result's lines, ``blocks`` for each ``step`` of
    the length."""

    values: torch.Tensor
    factor: torch.Tensor | None = None
    blocks: torch.Tensor | None = None
    step: int = 0


def operand(data: torch.Tensor, scale: torch.Tensor | None, amax: torch.Tensor | None, *, layout: Layout) -> Lines:
    """A stored plane as an operand."""
    return _OPERANDS[layout.format.family](data, scale, amax, layout)


def multiply(left: Lines, right: Lines) -> torch.Tensor:
    """left times right transposed, fp32 (left lines, right lines). Blocks of both have one length."""
    if left.blocks is not None and right.blocks is not None:
        return _multiply_blocks(left.values, left.blocks, right.values, right.blocks, left.step)
    result = _sums(left.values, right.values)
    if left.factor is not None and right.factor is not None:
        alone = _is_alone()
        for factor in balanced(left.factor, right.factor.t()):
            result = result.mul_(factor) if alone else result * factor  # in fp32, of which a second one is the peak of a step
    return result


def multiply_tiles(left: Lines, right: Lines) -> torch.Tensor:
    """:func:`multiply`, in which a line of the left has the same bits whatever lines are beside it."""
    return in_tiles(len(left.values), left.values.device.type, lambda cut: multiply(_lines(left, cut), right))


def _lines(left: Lines, cut: TileCut) -> Lines:
    """The lines of a tile, with those of their scales that are not for all."""
    factor, blocks = (each if each is None or len(each) < len(left.values) else cut(each) for each in (left.factor, left.blocks))
    return Lines(cut(left.values), factor, blocks, left.step)


def _is_alone() -> bool:
    """Whether nobody holds what an op here has made: a mode may, as that of a selective checkpoint; a recording does not."""
    return torch._C._len_torch_dispatch_stack() <= (listener() is not None)


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
    pairs = ([operand(p.data, p.scale, p.amax, layout=p.layout) for p in pair] for pair in zip(lefts, rights, strict=True))
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
            product = 0.0 + multiply(*(operand(p.data, p.scale, p.amax, layout=p.layout) for p in pair))
            results[i].add_(product) if accumulate else results[i].copy_(product)
        elif not accumulate:
            results[i].zero_()


def _part(plane: Stored, first: int, end: int, group: int) -> Stored:
    """Rows of the matrix of a plane, which begin on a tile if it is stored by columns; the scale of a group, if each has one."""
    layout = plane.layout.replace(shape=(end - first, plane.layout.shape[1]))
    rows, blocks = slice(first, end), slice(first // TILE, ceil_div(end, TILE))
    by_columns = layout.usage == COLUMNWISE
    data = plane.data[:, rows] if by_columns else plane.data[rows]
    if plane.has_scales_of_groups:
        scale = plane.scale[group]
    elif layout.format.family == "block":
        scale = plane.scale[blocks] if by_columns else plane.scale[:, rows]
    else:
        scale = plane.scale[rows] if layout.format.family == "row" else plane.scale
    return Stored(data.contiguous(), scale.contiguous(), plane.amax, layout)


def balanced(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two fp32 factors with the powers of two in them shared evenly; those of lines are broadcast against each other.

    A sum times the first, then times the second, has the bits that it has with the given factors, as long as those keep to the
    normal fp32 range. With these it leaves the range only where the result does: sums of codes lie between 2^-32 and 2^46.
    """
    (left, left_power), (right, right_power) = torch.frexp(left), torch.frexp(right)
    both = left_power + right_power
    half = both >> 1
    return left * _power_of_two(half), right * _power_of_two(both - half)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """fp32 2^exponent by its bits, cut off at the normal range: two factors that are further out give 0 in any case."""
    return ((exponent.clamp(-126, 127) + 127) << 23).view(torch.float32)


def _sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a times b transposed in fp32, from bf16 operands on a GPU."""
    if a.is_cuda:
        return torch.mm(a.to(torch.bfloat16), b.to(torch.bfloat16).t(), out_dtype=torch.float32)
    return a @ b.t()


def _multiply_blocks(a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, step: int) -> torch.Tensor:
    """The sums of each ``step`` are promoted to a scaled fp32 sum."""
    result = a_scale.new_zeros(len(a), len(b))
    steps = 0 if a.is_meta else a_scale.shape[1]  # sizes alone need no sums, of which a rehearsal may have 131072
    for i in range(steps):
        part = slice(i * step, (i + 1) * step)
        result += _sums(a[:, part], b[:, part]) * (a_scale[:, i, None] * b_scale[None, :, i])
    return result


def _tensor(data: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor | None, layout: Layout) -> Lines:
    return Lines(_codes(data, layout), factor=scale.reshape(1, 1))


def _row(data: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor | None, layout: Layout) -> Lines:
    return Lines(_codes(data, layout), factor=load_scale(scale, layout))


def _block(data: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor | None, layout: Layout) -> Lines:
    scales = load_scale(scale, layout).repeat_interleave(layout.block[0], 0)[: layout.lines[0]]
    return Lines(_codes(data, layout), blocks=scales, step=layout.block[1])


def _mx(data: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor | None, layout: Layout) -> Lines:
    return Lines(_scaled(data, scale, layout))


def _nv(data: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor, layout: Layout) -> Lines:
    # full_like: torch divides by a Python number through its reciprocal on some devices.
    levels = amax / torch.full_like(amax, _unit(layout.format))
    return Lines(_scaled(data, scale, layout), factor=levels.reshape(-1, 1))


def _codes(data: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Lines of what the codes alone say."""
    return decode(load_data(data, layout), layout.element)


def _scaled(data: torch.Tensor, scale: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Lines of codes times block scales: as dequantize gives them, at a global factor of 1 and without turning them back."""
    amax = None
    if layout.amax_shape is not None:
        amax = torch.full(layout.amax_shape, _unit(layout.format), dtype=torch.float32, device=data.device)
    layout = layout.replace(format=layout.format.replace(rht=()))
    dtype = torch.bfloat16 if data.is_cuda else torch.float32
    return lines_of(dequantize(data, scale, amax, layout=layout, dtype=dtype), layout.usage)


def _unit(format: NumberFormat) -> float:
    """The global amax whose factor is 1."""
    return E2M1.max * format.encode_max


_OPERANDS: dict[str, Callable[..., Lines]] = {"tensor": _tensor, "row": _row, "block": _block, "mx": _mx, "nv": _nv}
