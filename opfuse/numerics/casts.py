"""The definition of every cast: from an (M, K) matrix of fp32, bf16 or fp16 to the data and scales of one or two planes.

Kernels must equal it. Each cast works on lines (see layouts.py), so the columnwise plane is the rowwise plane of the transpose;
both come from the original values. Arithmetic is fp32, rounded to nearest even. Errors are those of the checks in layouts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import torch

from opfuse.formats import COLUMNWISE, E2M1, E4M3, ROWWISE, Element, Usage
from opfuse.numerics.hadamard import rotate
from opfuse.numerics.layouts import (
    Layout,
    check_amaxes,
    check_array,
    check_cast,
    check_choice,
    check_dtype,
    check_matrix,
    from_tiles,
    lines_of,
    require_number,
    store_data,
    store_scale,
    to_tiles,
)
from opfuse.numerics.philox import STREAMS, random_bytes
from opfuse.numerics.row_groups import RowGroups, padded, rows_read
from opfuse.numerics.scalars import (
    FLT_MAX,
    decode,
    e8m0_multiplier,
    encode,
    encode_e2m1_stochastic,
    encode_nonfinite,
    is_nonfinite,
)
from opfuse.numerics.scales import (
    E4M3_NAN,
    ScaleRounding,
    amax,
    decode_scale,
    divide,
    e8m0_from_amax,
    nvfp4_block_scale,
    nvfp4_global_scale,
    nvfp4_multiplier,
    reciprocal,
    scale_from_amax,
)

ErrorMode = Literal["MAE", "MSE"]
Encoded = tuple[torch.Tensor, torch.Tensor]
"""(data, scale) of one plane."""

MX_ROWS, NV_ROWS = (1, 32), (1, 16)
"""Lines that may share a block scale of MXFP8, and of NVFP4."""

_EXPAND_TO_4 = 1.5  # a block scale 6/4 times as large maps the block's largest value to 4 in place of 6


def cast_tensor(x: torch.Tensor, scale: torch.Tensor, layouts: Sequence[Layout]) -> list[torch.Tensor]:
    """Data of per-tensor planes: saturated ``x * scale``, with fp32 ``scale`` (1,). The planes hold the same bytes."""
    element = layouts[0].element
    codes = encode(x.to(torch.float32) * scale, element)
    return [store_data(lines_of(codes, layout.usage), layout) for layout in layouts]


def cast_delayed(x: torch.Tensor, scale: torch.Tensor, layouts: Sequence[Layout]) -> list[torch.Tensor]:
    """As :func:`cast_tensor`, under a scale that was not found from ``x``, so nonfinite elements must show in the codes.

    They become NaN in E4M3, and ±inf or NaN in E5M2; finite elements saturate.
    """
    element = layouts[0].element
    wide = x.to(torch.float32)
    codes = torch.where(is_nonfinite(wide), encode_nonfinite(wide, element), encode(wide * scale, element))
    return [store_data(lines_of(codes, layout.usage), layout) for layout in layouts]


def tensor_amax(x: torch.Tensor) -> torch.Tensor:
    """fp32 (1,), the largest ``|x|``; inf and NaN propagate."""
    check_dtype(x.dtype, where="tensor_amax")
    return amax(x).reshape(1)


def cast_current(
    x: torch.Tensor, amax: torch.Tensor, layouts: Sequence[Layout], *, eps: float = 0.0, pow2: bool = False
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Data of per-tensor planes under the scale of ``amax`` fp32 (1,), by :func:`scale_from_amax`, and the decode scale (1,)."""
    check_cast(x.shape, x.dtype, layouts, family="tensor", where="cast_current")
    require_number(amax, x.device, where="cast_current amax")
    scale = scale_from_amax(amax, layouts[0].element.max, eps=eps, pow2=pow2)
    return cast_tensor(x, scale, layouts), decode_scale(scale, amax)


def cast_recording(
    x: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor, layouts: Sequence[Layout]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """As :func:`cast_delayed`, with the decode scale (1,); raises ``amax`` fp32 (1,) in place to the largest ``|x|``."""
    check_cast(x.shape, x.dtype, layouts, family="tensor", where="cast_recording")
    require_number(scale, x.device, where="cast_recording scale")
    require_number(amax, x.device, where="cast_recording amax")
    amax.copy_(torch.maximum(amax, tensor_amax(x)))
    return cast_delayed(x, scale, layouts), reciprocal(scale)


def cast_row(x: torch.Tensor, layouts: Sequence[Layout], *, eps: float = 0.0, pow2: bool = False) -> list[Encoded]:
    """Planes with an fp32 scale for each line, by :func:`scale_from_amax`.

    A line with a non-finite element is cast with scale 1 and decoded with NaN.
    """
    check_cast(x.shape, x.dtype, layouts, family="row", where="cast_row")
    return cast_lines(x, line_amaxes(x, [layout.usage for layout in layouts]), layouts, eps=eps, pow2=pow2)


def line_amaxes(x: torch.Tensor, usages: Sequence[Usage]) -> list[torch.Tensor]:
    """fp32 (lines,) for each usage: the largest magnitude of each row, and of each column; inf and NaN propagate."""
    check_matrix(x.shape, x.dtype, where="line_amaxes")
    return [amax(lines_of(x, usage), 1) for usage in usages]


def cast_lines(
    x: torch.Tensor, amaxes: Sequence[torch.Tensor], layouts: Sequence[Layout], *, eps: float = 0.0, pow2: bool = False
) -> list[Encoded]:
    """As :func:`cast_row`, under amaxes of lines that are known, fp32 (lines,) for each plane."""
    check_cast(x.shape, x.dtype, layouts, family="row", where="cast_lines")
    check_amaxes(amaxes, layouts, x.device, where="cast_lines")

    def plane(layout: Layout, line_amax: torch.Tensor) -> Encoded:
        scale = scale_from_amax(line_amax, layout.element.max, eps=eps, pow2=pow2)
        codes = encode(lines_of(x, layout.usage).to(torch.float32) * scale[:, None], layout.element)
        return store_data(codes, layout), decode_scale(scale, line_amax)

    return [plane(layout, line_amax) for layout, line_amax in zip(layouts, amaxes)]


def cast_block(x: torch.Tensor, layouts: Sequence[Layout], *, eps: float = 0.0, pow2: bool = True) -> list[Encoded]:
    """Planes of fp32-scaled blocks, 1x128 or 128x128; blocks at the edges are partial.

    A block with a non-finite element is cast with scale 1 and decoded with NaN.
    """
    check_cast(x.shape, x.dtype, layouts, family="block", where="cast_block")
    wide, inf_value = x.to(torch.float32), min(torch.finfo(x.dtype).max, FLT_MAX)

    def scales(block_amax: torch.Tensor, element: Element) -> Scales:
        scale = scale_from_amax(block_amax, element.max, eps=eps, pow2=pow2, inf_value=inf_value)
        return Scales(decode_scale(scale, block_amax), lambda tiles: tiles * over(scale))

    return [cast_tiles(wide, layout, scales) for layout in layouts]


def cast_block_groups(
    x: torch.Tensor,
    groups: RowGroups,
    layouts: Sequence[Layout],
    *,
    index: torch.Tensor | None = None,
    eps: float = 0.0,
    pow2: bool = True,
) -> list[Encoded]:
    """:func:`cast_block` of groups of rows, each by itself: 1x128 blocks, of which none has rows of two groups.

    Rowwise planes do not depend on groups. Columnwise planes are those of the matrix in which each group begins on a tile
    (:func:`padded`). index: int64 (rows,), the matrix has the rows ``x[index]``; None: the matrix is ``x``.
    """
    x = rows_read(x, index)
    return [
        cast_block(padded(x, groups) if layout.usage == COLUMNWISE else x, [layout], eps=eps, pow2=pow2)[0] for layout in layouts
    ]


def cast_mx(x: torch.Tensor, layouts: Sequence[Layout], *, rows: int = 1, rounding: ScaleRounding = "ceil") -> list[Encoded]:
    """Planes of E8M0-scaled blocks of ``rows`` x 32. rows: 1, or 32; the scale of such a square is stored for each of its lines.

    The scale of a block with a nonfinite element is code 255, and every element of the block is NaN.
    """
    check_cast(x.shape, x.dtype, layouts, family="mx", where="cast_mx")
    check_choice(rows, MX_ROWS, where="cast_mx rows")
    check_choice(rounding, get_args(ScaleRounding), where="cast_mx rounding")
    wide = x.to(torch.float32)

    def scales(block_amax: torch.Tensor, element: Element) -> Scales:
        code = e8m0_from_amax(block_amax, element, rounding)
        return Scales(code, lambda tiles: tiles * over(e8m0_multiplier(code)))

    return [cast_tiles(wide, layout, scales, rows=rows) for layout in layouts]


def amax_nv(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Global amax of one NVFP4 plane, fp32 (1,), or (lines,) for a row-scaled format; after the rotation if there is one."""
    lines = _nv_lines(x, layout)
    return amax(lines, 1) if layout.format.per_row else amax(lines).reshape(1)


def amaxes_nv(x: torch.Tensor, layouts: Sequence[Layout]) -> list[torch.Tensor]:
    """:func:`amax_nv` of each plane."""
    check_cast(x.shape, x.dtype, layouts, family="nv", where="an NVFP4 cast")
    return [amax_nv(x, layout) for layout in layouts]


def cast_nv(
    x: torch.Tensor,
    amaxes: Sequence[torch.Tensor],
    layouts: Sequence[Layout],
    *,
    rows: int = 1,
    seed: torch.Tensor | None = None,
    error: ErrorMode | None = None,
) -> list[Encoded]:
    """Planes of E2M1 blocks of ``rows`` x 16 with two levels of scales: E4M3 for each block, fp32 for each plane or line.

    rows: 1, or 16; the scale of such a square is stored for each of its lines. Squares are cast once, as the matrix lies, and the
    columnwise plane is the transpose, random bits and choices included. amaxes: the global amax of each plane. seed: int64 (1,),
    for stochastic rounding. error: choose block by block whether the largest value becomes 4 or 6, whichever has the lower sum of
    absolute (MAE) or squared (MSE) errors. A block with a nonfinite element has scale 0x7f and every element +6; a nonfinite
    global amax leaves the first level at 1.
    """
    check_cast(x.shape, x.dtype, layouts, family="nv", where="an NVFP4 cast")
    check_nv(rows, error)
    check_amaxes(amaxes, layouts, x.device, where="cast_nv")
    if seed is not None:
        check_array(seed, (1,), torch.int64, x.device, where="cast_nv seed")

    def plane(layout: Layout, global_amax: torch.Tensor) -> Encoded:
        turned = rows > 1 and layout.usage == COLUMNWISE
        lines = x if turned else _nv_lines(x, layout)
        tiles = to_tiles(lines.to(torch.float32), (rows, layout.block[1]))
        random = None if seed is None else _random_tiles(seed, lines, tiles, ROWWISE if turned else layout.usage)
        level = _Level(global_amax.reshape(-1, 1), layout.format.encode_max)
        codes, scale = _map_to_six(tiles, level, random) if error is None else _map_to_four_or_six(tiles, level, error)
        codes = from_tiles(codes, lines.shape)
        if turned:
            codes, scale = codes.t(), scale.t()
        return store_data(codes, layout), store_scale(_repeat(scale, rows, layout), layout)

    return [plane(layout, global_amax) for layout, global_amax in zip(layouts, amaxes)]


def check_nv(rows: int, error: ErrorMode | None) -> None:
    """QuantizerError unless these are options of :func:`cast_nv`."""
    check_choice(rows, NV_ROWS, where="cast_nv rows")
    check_choice(error, (None, *get_args(ErrorMode)), where="cast_nv error")


class _Level(NamedTuple):
    """The first level of NVFP4: the global amax, (1, 1) or (lines, 1), and the block scale that it should map to."""

    amax: torch.Tensor
    encode_max: int

    @property
    def scale(self) -> torch.Tensor:
        return nvfp4_global_scale(self.amax, self.encode_max)


def _map_to_six(tiles: torch.Tensor, level: _Level, random: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """E2M1 codes of tiles and their E4M3 block scales (row blocks, column blocks), with the block's largest value at 6."""
    scale = nvfp4_block_scale(amax(tiles, (1, 3)), level.scale)
    scaled = tiles * over(nvfp4_multiplier(scale, level.scale))
    return (encode(scaled, E2M1) if random is None else encode_e2m1_stochastic(scaled, random)), scale


def _map_to_four_or_six(tiles: torch.Tensor, level: _Level, error: ErrorMode) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`_map_to_six`, with the block's largest value at 4 where that errs strictly less (arXiv:2512.02010)."""
    block_amax = amax(tiles, (1, 3))
    base = divide(block_amax, E2M1.max) * level.scale

    def candidate(expand: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scale = encode(base * expand, E4M3).masked_fill_(is_nonfinite(block_amax), E4M3_NAN)
        codes = encode(tiles * over(nvfp4_multiplier(scale, level.scale)), E2M1)
        decoded = decode(codes, E2M1) * over(decode(scale, E4M3))
        decoded = divide(decoded * over(level.amax), E2M1.max * level.encode_max)
        return codes, scale, _block_error(decoded - tiles, error)

    codes4, scale4, error4 = candidate(_EXPAND_TO_4)
    codes6, scale6, error6 = candidate(1.0)
    four = error4 < error6
    return torch.where(over(four), codes4, codes6), torch.where(four, scale4, scale6)


def _block_error(difference: torch.Tensor, error: ErrorMode) -> torch.Tensor:
    """Sum over each tile of |d| or d², in fp32: one element after another along a row, then rows i and i + n/2 pairwise."""
    each = difference.abs() if error == "MAE" else difference * difference
    rows = torch.zeros_like(each[..., 0])
    for i in range(each.shape[-1]):
        rows = rows + each[..., i]
    while (half := rows.shape[1] // 2) > 0:
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]


def _random_tiles(seed: torch.Tensor, lines: torch.Tensor, tiles: torch.Tensor, stream: Usage) -> torch.Tensor:
    """Random bytes of the elements of ``lines``, numbered row by row, in the shape of ``tiles``."""
    octets = random_bytes(seed, lines.numel(), STREAMS[stream]).reshape(lines.shape)
    return to_tiles(octets, (tiles.shape[1], tiles.shape[3]))


def _nv_lines(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The lines that an NVFP4 plane holds: rotated if its format says so."""
    lines = lines_of(x, layout.usage)
    return rotate(lines, layout.format.rht) if layout.format.rht else lines


class Scales(NamedTuple):
    """The scales of blocks, (row blocks, column blocks).

    stored: decode scales, fp32 or E8M0 codes. values: maps the fp32 values of blocks (row blocks, rows, column blocks, columns)
    to the values that are encoded.
    """

    stored: torch.Tensor
    values: Callable[[torch.Tensor], torch.Tensor]


def over(block: torch.Tensor) -> torch.Tensor:
    """Numbers of blocks, in a shape that broadcasts with the values of the blocks."""
    return block[:, None, :, None]


def cast_tiles(x: torch.Tensor, layout: Layout, scales: Callable[[torch.Tensor, Element], Scales], *, rows: int = 1) -> Encoded:
    """The plane of fp32 ``x`` whose blocks have the ``scales`` that follow from their fp32 amaxes.

    rows: how many lines share a scale, which is stored for each of them, where that is not a matter of the format.
    """
    # Codes and scales are turned, and not the matrix: torch finds maxima at a tenth of the speed against the order of memory.
    block = max(rows, layout.block[0]), layout.block[1]
    tiles = to_tiles(x, block[::-1] if layout.usage == COLUMNWISE else block)
    stored, values = scales(amax(tiles, (1, 3)), layout.element)
    codes = from_tiles(encode(values(tiles), layout.element), x.shape)
    scale = _repeat(lines_of(stored, layout.usage), rows, layout)
    return store_data(lines_of(codes, layout.usage), layout), store_scale(scale, layout)


def _repeat(scale: torch.Tensor, rows: int, layout: Layout) -> torch.Tensor:
    """The scale of each tile for each of its lines."""
    return scale if rows == 1 else scale.repeat_interleave(rows, dim=0)[: layout.lines[0]]
