"""Where the bytes of one plane lie: shapes of data, scales and amax, padding, tile order; and checks of what casts are given.

Scale blocks run along *lines*: the rows of the matrix in a rowwise plane, its columns in a columnwise plane. Every cast is
written for lines; this module turns lines into stored arrays and back, so that no cast knows a layout.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import torch
import torch.nn.functional as F

from opfuse.errors import DtypeError, QuantizerError, describe
from opfuse.formats import (
    COLUMNWISE,
    FP8_ELEMENTS,
    MXFP4,
    NVFP4,
    SCALE_TILE,
    Element,
    NumberFormat,
    Usage,
    fp8_block,
    fp8_row,
    fp8_tensor,
    mxfp8,
)
from opfuse.numerics.scalars import decode, pack_e2m1, unpack_e2m1

SCALE_DTYPES = {"fp32": torch.float32, "e8m0": torch.uint8, "e4m3": torch.uint8}
_FP32_SCALE_ALIGNMENT = 4  # elements: rows of fp32 block scales start on 16 bytes


def _storage(fmt: NumberFormat) -> tuple[object, ...]:
    """The fields of a format that decide where its bytes lie, and what they mean."""
    return fmt.family, fmt.element, fmt.block, fmt.scale, fmt.transposed


_KNOWN = {_storage(make(element)) for element in FP8_ELEMENTS.values() for make in (fp8_tensor, fp8_row, mxfp8)}
_KNOWN |= {_storage(fp8_block(element, dims)) for element in FP8_ELEMENTS.values() for dims in (1, 2)}
_KNOWN |= {_storage(NVFP4)}
_DECODED = _KNOWN | {_storage(MXFP4)}


def ceil_div(n: int, d: int) -> int:
    """n / d rounded up."""
    return -(-n // d)


def round_up(n: int, multiple: int) -> int:
    """The next multiple of ``multiple`` at or above n."""
    return ceil_div(n, multiple) * multiple


@dataclass(frozen=True)
class Layout:
    """The plane ``usage`` of an (M, K) matrix ``shape`` in ``format``, with compact or swizzled scales."""

    format: NumberFormat
    usage: Usage
    shape: tuple[int, int]
    swizzled: bool = False

    def __hash__(self) -> int:  # casts and products are looked up by their layouts
        return hash((self.usage, self.shape, self.swizzled))

    @functools.cached_property
    def lines(self) -> tuple[int, int]:
        """(number of lines, their length)."""
        return self.shape[::-1] if self.usage == COLUMNWISE else self.shape

    @property
    def across(self) -> bool:
        """Whether data and compact scales are stored with lines as columns (columnwise MXFP8)."""
        return self.usage == COLUMNWISE and not self.format.transposed

    @property
    def element(self) -> Element:
        """The element of the format; QuantizerError for identity, whose data is not encoded."""
        if self.format.element is None:
            raise QuantizerError(f"{self.format} data is the caller's own tensor: it has no codes and no scales.")
        return self.format.element

    @property
    def block(self) -> tuple[int, int]:
        """(rows, columns) of lines that share a scale."""
        rows, columns = self.format.block or self.lines
        return rows, columns or max(self.lines[1], 1)

    @functools.cached_property
    def is_known(self) -> bool:
        """Whether bytes and scales lie as in a format of formats.py; kernels take no others, which the torch definition casts."""
        return _storage(self.format) in _KNOWN

    @functools.cached_property
    def is_decoded(self) -> bool:
        """Whether kernels decode such planes: all that they cast, and MXFP4, which torch casts."""
        return _storage(self.format) in _DECODED

    @property
    def tiled(self) -> bool:
        """Whether the format has a swizzled layout: one byte a scale, in arrays padded to whole tiles."""
        return SCALE_DTYPES.get(self.format.scale) is torch.uint8

    @functools.cached_property
    def blocks(self) -> tuple[int, int]:
        """(rows, columns) of the array with one scale for each block, lines as rows."""
        rows, cols = self.block
        return ceil_div(self.lines[0], rows), ceil_div(self.lines[1], cols)

    @functools.cached_property
    def data_shape(self) -> tuple[int, int]:
        """Shape of the uint8 data."""
        lines, length = self.lines
        if self.across:
            return length, lines
        return lines, length * self.element.bits // 8

    @functools.cached_property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of the stored scales with their padding; the same for compact and swizzled."""
        if self.format.family == "tensor":
            return (1,)
        if self.format.family == "row":
            return self.lines[:1]
        if self.format.family == "block":
            rows, cols = self.blocks[::-1] if self.scale_across else self.blocks
            return rows, round_up(cols, _FP32_SCALE_ALIGNMENT)
        return self.tiled_shape[::-1] if self.across else self.tiled_shape

    @property
    def scale_across(self) -> bool:
        """Whether scales are stored with lines as columns although data is not (1x128 FP8 blocks)."""
        return self.format.family == "block" and self.block[0] == 1

    @property
    def tiled_shape(self) -> tuple[int, int]:
        """Lines by blocks, padded to whole tiles: the array whose tile order is the swizzled layout."""
        return round_up(self.blocks[0], SCALE_TILE[0]), round_up(self.blocks[1], SCALE_TILE[1])

    @property
    def amax_shape(self) -> tuple[int] | None:
        """Shape of the stored fp32 amax, for a format that has one."""
        if self.format.family != "nv":
            return None
        return (self.lines[0],) if self.format.per_row else (1,)

    def replace(self, **changes: object) -> Layout:
        """The same layout with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=4096)
def layout_of(fmt: NumberFormat, usage: Usage, shape: tuple[int, int], swizzled: bool = False) -> Layout:
    """The layout of these fields, with what follows from them worked out once: casts and products repeat shapes."""
    return Layout(fmt, usage, shape, swizzled)


def are_known(layouts: Sequence[Layout]) -> bool:
    """Whether kernels know all of them."""
    return all(map(attrgetter("is_known"), layouts))


def lines_of(x: torch.Tensor, usage: Usage) -> torch.Tensor:
    """The (M, K) matrix with the lines of a plane as rows; a view. It is its own inverse."""
    return x.t() if usage == COLUMNWISE else x


def transposed(x: torch.Tensor) -> torch.Tensor:
    """The matrix with its rows as columns, in memory of its own."""
    return x.t().contiguous()


def store_data(codes: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Codes, one a byte, ``layout.lines`` as rows, to the data that a plane stores."""
    data = pack_e2m1(codes) if layout.element.bits == 4 else codes.t() if layout.across else codes
    return data.contiguous()


def load_data(data: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The inverse of :func:`store_data`."""
    if layout.element.bits == 4:
        return unpack_e2m1(data)
    return data.t() if layout.across else data


def load_values(data: torch.Tensor, layout: Layout) -> torch.Tensor:
    """fp32 lines of what the codes alone say."""
    if layout.across:
        return decode(data, layout.element).t()  # codes are read in the order in which they lie
    return decode(load_data(data, layout), layout.element)


def store_scale(scale: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Scales ``layout.blocks``, lines as rows, to the array that a plane stores; its padding is 0."""
    shape = layout.scale_shape
    if layout.format.family == "row":
        return scale.reshape(shape)
    if layout.format.family == "block":
        return _pad(scale.t() if layout.scale_across else scale, shape)
    tiled = _pad(scale, layout.tiled_shape)
    if layout.swizzled:
        return swizzle(tiled).reshape(shape)
    return tiled.t().contiguous() if layout.across else tiled


def load_scale(stored: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The inverse of :func:`store_scale`: scales ``layout.blocks``, whatever the padding holds."""
    if layout.format.family == "row":
        return stored.reshape(-1, 1)
    if layout.format.family == "block":
        scale = stored.t() if layout.scale_across else stored
    elif layout.swizzled:
        scale = unswizzle(stored, layout.tiled_shape)
    else:
        scale = stored.t() if layout.across else stored
    rows, cols = layout.blocks
    return scale[:rows, :cols]


def relayout_scale(stored: torch.Tensor, layout: Layout, *, swizzled: bool) -> torch.Tensor:
    """Stored E8M0 or E4M3 scales in the compact or the swizzled layout, with zero padding."""
    return store_scale(load_scale(stored, layout), layout.replace(swizzled=swizzled))


def to_tiles(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """(M, K) to (row blocks, rows, column blocks, columns), edge blocks filled with 0."""
    (m, k), (rows, cols) = x.shape, block
    padded = F.pad(x, (0, -k % cols, 0, -m % rows)) if k % cols or m % rows else x
    return padded.reshape(ceil_div(m, rows), rows, ceil_div(k, cols), cols)


def from_tiles(tiles: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The inverse of :func:`to_tiles`, cropped to ``shape``."""
    a, rows, b, cols = tiles.shape
    return tiles.reshape(a * rows, b * cols)[: shape[0], : shape[1]]


def _pad(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """``x`` in the top left corner of a new zeroed array of ``shape``."""
    if x.shape == shape:
        return x.clone(memory_format=torch.contiguous_format)
    out = x.new_zeros(shape)
    out[: x.shape[0], : x.shape[1]] = x
    return out


# -- the tile order of scales ----------------------------------------------------------------------------------------------------

_TILE_ROWS, _TILE_COLUMNS = SCALE_TILE
_TILE_GROUP = 32  # rows i and i + 32 of a tile are neighbours, so that a tile is 32 runs of 16 bytes


def swizzle(scale: torch.Tensor) -> torch.Tensor:
    """A padded (R, C) array in the order that block-scaled products read, as R * C flat bytes: 128x4 tiles of 512 bytes each.

    All entries move, the padding's too. Entry (i, j), R a multiple of 128 and C of 4, lies at byte
    ``((i // 128) * (C // 4) + j // 4) * 512 + (i % 32) * 16 + (i % 128 // 32) * 4 + j % 4``
    (cuBLAS documentation, "1D block scaling factors layout"): a permutation of the axes of the tiles below.
    """
    rows, cols = scale.shape
    tiles = scale.reshape(rows // _TILE_ROWS, _TILE_ROWS // _TILE_GROUP, _TILE_GROUP, cols // _TILE_COLUMNS, _TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle(flat: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """The (R, C) array of ``shape`` whose tile order is ``flat``; the inverse of :func:`swizzle`."""
    rows, cols = shape
    tiles = flat.reshape(rows // _TILE_ROWS, cols // _TILE_COLUMNS, _TILE_GROUP, _TILE_ROWS // _TILE_GROUP, _TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, cols)


# -- checks ----------------------------------------------------------------------------------------------------------------------
# Of what casts are given, before a kernel reads or writes it: a kernel computes addresses from layouts, and reads memory as fp32
# whatever is there. So it would write outside of a plane if a layout were wrong, and read another number if a dtype were.

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that casts read."""


def check_planes(shape: Sequence[int], layouts: Sequence[Layout], *, where: str) -> None:
    """QuantizerError unless ``layouts`` are planes of a tensor (..., columns) of ``shape``, seen as a matrix (rows, columns).

    One plane or two, of different usages, of one format and one order of scales; only one of them may be rotated. where: names
    the cast in the error.
    """
    matrix = (math.prod(shape[:-1]), shape[-1]) if len(shape) else ()
    if not layouts:
        raise _refused(where, "one plane or two", "none", "name the planes to make")
    first, usages = layouts[0], {layout.usage for layout in layouts}
    for layout in layouts:
        if layout.shape != matrix:
            raise _refused(where, f"planes of {matrix}", f"a layout of {layout.shape}", "make it for the tensor's shape")
        alike = layout.format == first.format or layout.format.replace(rht=()) == first.format.replace(rht=())
        if not alike or layout.swizzled != first.swizzled:
            got = " and ".join(f"{each.format}{' swizzled' * each.swizzled}" for each in (first, layout))
            raise _refused(where, "planes of one format and one order of scales", got, "cast once for each")
    if len(usages) != len(layouts):
        raise _refused(where, "one plane for each usage", [layout.usage for layout in layouts], "ask for each plane once")


def check_cast(shape: Sequence[int], dtype: torch.dtype, layouts: Sequence[Layout], *, family: str, where: str) -> None:
    """:func:`check_planes` of a matrix, in formats of ``family``; DtypeError unless the matrix is fp32, bf16 or fp16."""
    check_matrix(shape, dtype, where=where)
    check_planes(shape, layouts, where=where)
    if layouts[0].format.family != family:
        raise _refused(where, f"planes of the family {family!r}", layouts[0].format, "use the cast of that format")


def check_matrix(shape: Sequence[int], dtype: torch.dtype, *, where: str) -> None:
    """QuantizerError unless ``shape`` is that of a matrix, DtypeError unless kernels read ``dtype``."""
    check_dtype(dtype, where=where)
    if len(shape) != 2:
        raise _refused(where, "a matrix", f"the shape {tuple(shape)}", "flatten its leading dimensions")


def check_dtype(dtype: torch.dtype, *, where: str) -> None:
    """DtypeError unless kernels read ``dtype``."""
    if dtype not in DTYPES:
        raise DtypeError(describe(where, wanted=", ".join(map(str, DTYPES)), got=dtype, cure="convert the tensor first"))


def check_choice(value: object, known: Collection[object], *, where: str) -> None:
    """QuantizerError unless ``value`` is one of ``known``."""
    if value not in known:
        raise _refused(where, f"one of {', '.join(map(repr, known))}", repr(value), "pass one of these")


def check_array(value: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, where: str) -> None:
    """QuantizerError unless ``value`` is a contiguous array of this shape and dtype on ``device``."""
    if value.dtype != dtype or value.shape != shape or value.device != device or not value.is_contiguous():
        layout = "" if value.is_contiguous() else ", not contiguous"
        got = f"{value.dtype} {tuple(value.shape)} on {value.device}{layout}"
        raise _refused(where, f"{dtype} {tuple(shape)} on {device}, contiguous", got, "pass an array made for this call")


def check_amaxes(amaxes: Sequence[torch.Tensor], layouts: Sequence[Layout], device: torch.device, *, where: str) -> None:
    """QuantizerError unless there are the global amax of each plane, or those of its lines, fp32, contiguous, on ``device``."""
    if len(amaxes) != len(layouts):
        source = "line_amaxes" if layouts[0].amax_shape is None else "amaxes_nv"
        raise _refused(where, f"{len(layouts)} amaxes, one for each plane", len(amaxes), f"take what {source} gives")
    for amax, layout in zip(amaxes, layouts):
        check_array(amax, layout.amax_shape or layout.lines[:1], torch.float32, device, where=f"{where} amax")


def require_number(value: torch.Tensor, device: torch.device, *, where: str) -> None:
    """QuantizerError unless ``value`` is one fp32 number on ``device``: a kernel would misread anything else."""
    if value.dtype != torch.float32 or value.numel() != 1 or value.device != device:
        got, cure = f"{value.dtype} {tuple(value.shape)} on {value.device}", f"make it with torch.ones(1, device={str(device)!r})"
        raise _refused(where, f"fp32 (1,) on {device}", got, cure)


def check_number(value: torch.Tensor, device: torch.device, *, where: str) -> int:
    """The address of one fp32 number on ``device``, as by :func:`require_number`."""
    require_number(value, device, where=where)
    return value.data_ptr()


def _refused(where: str, wanted: object, got: object, cure: str) -> QuantizerError:
    return QuantizerError(describe(where, wanted=wanted, got=got, cure=cure))
