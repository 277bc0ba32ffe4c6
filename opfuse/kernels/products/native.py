"""Products of two quantized planes by the library, through torch's scaled_mm, where the device takes them; else emulated.

backends.py says which those are. Products of groups run in one launch of opfuse's own kernel, if it takes all of them.

Accuracy. FP8 units of compute capability 9.0 sum with about 13 fraction bits. Split accumulation adds the sums of 128 products
in fp32: the error, relative to the norm of the result, was 2^-12.9 at every length (random normal values). Fast accumulation
stays in the unit: below 2^-11.5 sqrt(length / 128), once the length exceeds 128. In a 16-bit result split accumulation is hidden
by the rounding of the result.

A batch-invariant product has one order of sums for any number of lines of the left: that of the package's own kernel, which takes
each sum in one piece, or that of a library which is only ever asked for one number of lines (tiles.py).

The two scales are multiplied first, in fp32, whatever the sum: where their product is not finite or vanishes, so is the result.
Those of rows multiply the sum one after the other, the right one first, each product rounded; the definition has the left one
first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F

from opfuse.formats import NumberFormat, dtype_name
from opfuse.kernels.engine.launch import stood_for
from opfuse.kernels.engine.registry import on_kernels
from opfuse.kernels.engine.variants import on_bytes
from opfuse.kernels.products import emulated as emulation
from opfuse.kernels.products.backends import (
    ALL_E4M3,
    BACKENDS,
    MX_GROUPS,
    ONE_E5M2,
    SHAPES,
    AsOperand,
    Backend,
    Machine,
    Rule,
    Version,
    backend_of,
)
from opfuse.kernels.products.certificate import PairOperands, certified_product, standing, wrong_product
from opfuse.kernels.products.hopper import FASTER, SCALING, grouped_product, is_faster
from opfuse.kernels.products.library_groups import RunOperands, multiply_runs
from opfuse.kernels.products.runs import product_of_rows, product_over_rows
from opfuse.kernels.products.stored import Stored
from opfuse.kernels.products.tiles import lines_from, rows_of
from opfuse.numerics.layouts import Layout, are_known, load_scale, store_scale
from opfuse.numerics.row_groups import RowGroups
from opfuse.torch_private.operations import scaled_mm_into

OWN_OUTPUTS = (torch.bfloat16, torch.float16)

_TILED_RIGHT = Rule(
    "blocks",
    "1x128 on the left, 1x128 or 128x128 on the right",
    lambda left, right: (left.block, right.block),
    lambda blocks: blocks[0] == (1, 128),
)
_HOPPER: Any = {"since": (9, 0), "below": (10, 0), "cuda": (12, 9), "recorded": True, "outputs": OWN_OUTPUTS}

OWN: Mapping[str, tuple[Backend, ...]] = {
    "tensor": (Backend("product.cu, per tensor", **_HOPPER, rules=(*SHAPES, ONE_E5M2)),),
    "row": (Backend("product.cu, per row", **_HOPPER, rules=(*SHAPES, ONE_E5M2)),),
    "block": (Backend("product.cu, 1x128 and 128x128 blocks of E4M3", **_HOPPER, rules=(*SHAPES, ALL_E4M3, _TILED_RIGHT)),),
}
"""Products of the package's own (hopper.py), of groups above all; their bits are those of the library."""

_ARRAYS = "arrays: wants contiguous ones of their layout's shape on 16 bytes, got strided, misaligned ones or another shape"


def refusal(left: Stored, right: Stored, out_dtype: torch.dtype, machine: Machine, *, own: bool = False) -> str:
    """Why the product of two planes of one family is emulated on ``machine``; an empty string if it is native.

    own: why it is not one of :data:`OWN`.
    """
    why = layout_refusal(left.layout, right.layout, out_dtype, machine, own=own)
    return why or ("" if left.in_place and right.in_place else _ARRAYS)


@functools.lru_cache(maxsize=4096)
def layout_refusal(left: Layout, right: Layout, out_dtype: torch.dtype, machine: Machine, *, own: bool = False) -> str:
    """:func:`refusal` of planes in these layouts whose arrays lie as the device wants them."""
    return _refusal(left, right, out_dtype, (OWN if own else BACKENDS).get(left.format.family), machine)


def _refusal(left: Layout, right: Layout, out_dtype: torch.dtype, rows: tuple[Backend, ...] | None, machine: Machine) -> str:
    """Why none of ``rows`` multiplies planes in these layouts; an empty string if one does."""
    if rows is None:
        return f"no native product of {left.format.family} formats"
    if not are_known((left, right)):
        return f"formats: wants those of opfuse.formats, got {left.format} and {right.format}"
    backend = backend_of(rows, machine)
    if isinstance(backend, str):
        return backend
    if out_dtype not in backend.outputs:
        return f"result: wants {' or '.join(map(dtype_name, backend.outputs))}, got {dtype_name(out_dtype)}"
    return next((miss for rule in backend.rules if (miss := rule.miss(left, right))), "")


def multiply(
    left: Stored,
    right: Stored,
    *,
    out_dtype: torch.dtype,
    fast: bool = False,
    out: torch.Tensor | None = None,
    invariant: bool = False,
) -> torch.Tensor:
    """left times right transposed, in ``out_dtype``, rounded once from the sums: (left lines, right lines).

    fast: whether sums may stay in the matrix unit, where the back end can do so. out: where a back end may put the result.
    invariant: whether a line of the left shall have the same bits whatever lines are beside it. Queued, without waiting for the
    device.
    """
    if invariant:
        return _invariant(left, right, out_dtype=out_dtype, fast=fast, out=out)
    if on_kernels(left.data):
        own = not own_refusal(left, right, out_dtype)
        if own and is_faster(left, right, fast=fast):
            return _own(left, right, out_dtype=out_dtype, fast=fast, out=out)
        if _library_takes(left, right, out_dtype):
            return _scaled_mm(left, right, out_dtype=out_dtype, fast=fast, out=out)
        if own:
            return _own(left, right, out_dtype=out_dtype, fast=fast, out=out)
    return emulation.multiply(emulation.operand(left), emulation.operand(right), dtype=out_dtype)


def _library_takes(left: Stored, right: Stored, out_dtype: torch.dtype) -> bool:
    """Whether the library multiplies two planes on their device, and is known to do so rightly there."""
    index = left.data.get_device()
    return not refusal(left, right, out_dtype, machine_of(index)) and is_certified(left.layout.format.family, index)


def _library(family: str, machine: Machine) -> Backend:
    """The product of the library for a family, on a machine that has it."""
    return cast(Backend, backend_of(BACKENDS[family], machine))


def is_certified(family: str, device: int) -> bool:
    """Whether the library's product of a family that it takes on a CUDA device is right there (certificate.py)."""
    return certified_product(family, device, machine_of(device), library_product).passed


def library_product(backend: Backend, operands: PairOperands | RunOperands, out_dtype: torch.dtype, fast: bool) -> torch.Tensor:
    """The product ``backend`` of the library, whatever is known of it; the other arguments are those of :func:`multiply`."""
    if isinstance(operands, RunOperands):
        return multiply_runs(operands, out_dtype=out_dtype)
    return _scaled_mm(*operands, out_dtype=out_dtype, fast=fast, library=backend)


def native_refusal(left: Layout, right: Layout, out_dtype: torch.dtype, machine: Machine) -> str:
    """:func:`layout_refusal`, or why the product was found to be wrong on the device at hand, if that is such a machine."""
    return layout_refusal(left, right, out_dtype, machine) or wrong_product(left.format.family, machine)


def library_name(family: str, machine: Machine) -> str:
    """What people call the library's product of a family on a machine that has it."""
    return _library(family, machine).name


def native_name(left: NumberFormat, right: NumberFormat, machine: Machine) -> str:
    """Who makes native products of two formats: the library (``scaled_mm``), or it or the package's own kernel (``product.cu``),
    as is faster for their sizes (:data:`~opfuse.kernels.products.hopper.FASTER`).
    """
    notes = filter(None, (library_name(left.family, machine), standing(left.family, machine)))
    library, scaling = ", ".join(notes), SCALING.get((left.block, right.block))
    own = backend_of(OWN.get(left.family, ()), machine)
    if isinstance(own, str) or not any(scaling == each for each, _ in FASTER):
        return library
    ours, _, _ = own.name.partition(",")
    return f"{ours} or {library}"


def accumulate(lefts: Sequence[Stored], rights: Sequence[Stored], out: torch.Tensor, *, fast: bool = False) -> bool:
    """Add the products of groups, each left times its right transposed, to ``out``, fp32: one below the other, in one launch.

    False, and nothing is done, where that is not faster. The bits are those of products in fp32 and of an addition.
    """
    pairs = [*zip(lefts, rights, strict=True)]
    first, other = pairs[0]
    if not on_kernels(first.data) or any(own_refusal(*pair, torch.bfloat16) for pair in pairs):
        return False
    counts, width = [left.layout.lines[0] for left in lefts], other.layout.lines[0]
    fits = out.dtype == torch.float32 and tuple(out.shape) == (sum(counts), width)
    faster = is_faster(first, other, fast=fast, added=True, groups=len(pairs))
    if not fits or not out.is_contiguous() or not on_bytes(out, 16) or not faster:
        return False
    grouped_product(lefts, rights, counts, out_dtype=torch.float32, fast=fast, out=out, accumulate=True)
    torch.autograd.graph.increment_version(out)
    return True


def _invariant(left: Stored, right: Stored, *, out_dtype: torch.dtype, fast: bool, out: torch.Tensor | None) -> torch.Tensor:
    """The product by a back end that multiplies any number of lines in one way; its choice does not depend on their number."""
    if on_kernels(left.data):
        left, right, device = left.moved_in_place(), right.moved_in_place(), left.data.get_device()
        if not own_refusal(left, right, out_dtype):
            return _own(left, right, out_dtype=out_dtype, fast=fast, out=out)
        refused = invariant_refusal(left.layout, right.layout, out_dtype, machine_of(device))
        if not refused and is_certified(left.layout.format.family, device):
            return _in_tiles(left, right, out_dtype=out_dtype, fast=fast, out=out)
    return emulation.multiply_tiles(emulation.operand(left), emulation.operand(right), dtype=out_dtype)


def invariant_refusal(left: Layout, right: Layout, out_dtype: torch.dtype, machine: Machine) -> str:
    """Why the library makes no product of tiles of ``left``; an empty string if it does."""
    if left.format.family == "block" and not left.scale_across:
        return "tiles: wants scales of single lines on the left, got 128x128 blocks"
    if left.tiled and left.across:
        return "tiles: wants lines of the left one after the other, got a columnwise plane that keeps the matrix"
    return layout_refusal(left.replace(shape=(rows_of("cuda"), left.lines[1])), right, out_dtype, machine)


TILE_START = 256
"""Bytes on which operands start that a library takes for aligned ones, which is part of how it chooses."""


def _in_tiles(left: Stored, right: Stored, *, out_dtype: torch.dtype, fast: bool, out: torch.Tensor | None) -> torch.Tensor:
    """The product by the library, in tiles in place, all on one alignment. Lines that fill no whole tile are copied."""
    (lines, _), columns = left.layout.lines, right.layout.lines[0]
    if not on_bytes(left.data, TILE_START):
        left = left._replace(data=left.data.clone())
    if out is None or tuple(out.shape) != (lines, columns) or not (out.is_contiguous() and on_bytes(out, TILE_START)):
        out = torch.empty(lines, columns, dtype=out_dtype, device=left.data.device)
    rows = rows_of("cuda")
    for start in range(0, lines, rows):
        tile, part = _tile(left, start, rows), out[start : start + rows]
        if len(part) == rows:
            _scaled_mm(tile, right, out_dtype=out_dtype, fast=fast, out=part)
        else:
            part.copy_(_scaled_mm(tile, right, out_dtype=out_dtype, fast=fast)[: len(part)])
    return out


def _tile(plane: Stored, start: int, rows: int) -> Stored:
    """Lines of a rowwise plane from ``start`` on, with their scales, where these are not for all; zeros fill the last tile."""
    layout = plane.layout
    of_tile = layout.replace(shape=(rows, layout.lines[1]), swizzled=False)
    if layout.scale_across:
        scale = lines_from(plane.scale.t()[: layout.lines[0]], start, rows).t().contiguous()
    elif layout.tiled:
        scale = store_scale(load_scale(plane.scale, layout)[start : start + rows], of_tile)
    else:
        scale = plane.scale if layout.format.family == "tensor" else lines_from(plane.scale, start, rows)
    return Stored(lines_from(plane.data, start, rows), scale, plane.amax, of_tile)


def _own(left: Stored, right: Stored, *, out_dtype: torch.dtype, fast: bool, out: torch.Tensor | None) -> torch.Tensor:
    """The product by the package's own kernel."""
    lines, columns = left.layout.lines[0], right.layout.lines[0]
    fits = out is not None and tuple(out.shape) == (lines, columns) and out.is_contiguous() and on_bytes(out, 16)
    return grouped_product([left], [right], [lines], out_dtype=out_dtype, fast=fast, out=out if fits else None)


def multiply_groups(
    lefts: Sequence[Stored],
    rights: Sequence[Stored],
    lines: Sequence[int],
    *,
    out_dtype: torch.dtype,
    fast: bool = False,
    invariant: bool = False,
) -> torch.Tensor | None:
    """The products of groups together, one below the other: (sum of ``lines``, lines of a right); None if they are made apart.

    In one launch where that takes all of them, which sums each in one piece and so is invariant; emulated together where the
    family has no native product. lines: how many of each left count, at least one. Rights have one number of lines, and operands
    of a side one format.
    """
    first = lefts[0].data
    on_device = on_kernels(first)
    if lefts[0].layout.format.family not in OWN:
        native = on_device and all(_library_takes(*pair, out_dtype) for pair in zip(lefts, rights, strict=True))
        return None if invariant or native else emulation.multiply_groups(lefts, rights, lines, dtype=out_dtype)
    if not on_device:
        return None
    if any(own_refusal(*pair, out_dtype) for pair in zip(lefts, rights, strict=True)):
        return None
    return grouped_product(lefts, rights, lines, out_dtype=out_dtype, fast=fast)


def _scaled_mm(
    left: Stored,
    right: Stored,
    *,
    out_dtype: torch.dtype,
    fast: bool,
    out: torch.Tensor | None = None,
    library: Backend | None = None,
) -> torch.Tensor:
    """The product by the library, or by one that is tried. library: the row; None: that of the planes' device."""
    library = library or _library(left.layout.format.family, machine_of(left.data.get_device()))
    operand = cast(AsOperand, library.operand)
    a, b, fast = operand(left, False), operand(right, True), fast and library.fast
    if out is not None and (tuple(out.shape) != (len(a.codes), len(b.codes)) or not on_bytes(out, 16)):
        out = None
    if a.codes.is_meta:  # torch's function of sizes refuses sums of fewer elements than a block, which the library takes
        return a.codes.new_empty(len(a.codes), len(b.codes), dtype=out_dtype) if out is None else out
    if out is None:
        return F.scaled_mm(
            a.codes,
            b.codes.t(),
            a.scales,
            a.scaling,
            b.scales,
            b.scaling,
            a.swizzle,
            b.swizzle,
            output_dtype=out_dtype,
            use_fast_accum=fast,
        )
    levels = ((each.scales, [kind.value for kind in each.scaling], [order.value for order in each.swizzle]) for each in (a, b))
    return scaled_mm_into(a.codes, b.codes.t(), *next(levels), *next(levels), None, out_dtype, [], fast, out=out)


def own_refusal(left: Stored, right: Stored, out_dtype: torch.dtype) -> str:
    """Why kernels of the package's own do not multiply two planes on their device; an empty string if they do."""
    return refusal(left, right, out_dtype, machine_of(left.data.get_device()), own=True)


def runs_refusal(left: Layout, right: Layout, out_dtype: torch.dtype, machine: Machine) -> str:
    """Why products of groups whose sizes only the device knows are not made on ``machine``; an empty string if they are."""
    if left.format.family == "mx":
        return _refusal(left, right, out_dtype, BACKENDS[MX_GROUPS], machine)
    if (left.format.block, right.format.block) not in SCALING:
        return f"blocks: wants those of products in groups, got {left.format.block} and {right.format.block}"
    return layout_refusal(left, right, out_dtype, machine, own=True)


def wrong_runs(fmt: NumberFormat, machine: Machine) -> str:
    """What was found to be wrong with such products in a format, if this is such a machine; an empty string if nothing was."""
    return wrong_product(MX_GROUPS, machine) if fmt.family == "mx" else ""


def runs_are_right(fmt: NumberFormat, device: int) -> bool:
    """Whether such products in a format, which nothing refuses on a CUDA device, are right there (certificate.py)."""
    return fmt.family != "mx" or is_certified(MX_GROUPS, device)


def adds_runs(fmt: NumberFormat) -> bool:
    """Whether products over rows of groups in a format can be added to buffers in fp32: the library's have results in bf16."""
    return fmt.family != "mx"


def multiply_rows(
    left: Stored, rights: Sequence[Stored], groups: RowGroups, *, out_dtype: torch.dtype, fast: bool = False
) -> torch.Tensor:
    """:func:`~opfuse.kernels.products.runs.product_of_rows`, by who multiplies the family so."""
    if left.layout.format.family == "mx":
        return _mx_runs(RunOperands(left, rights, groups), out_dtype, emulation.product_of_rows, rights)
    return product_of_rows(left, rights, groups, out_dtype=out_dtype, fast=fast)


def multiply_over_rows(
    left: Stored, right: Stored, groups: RowGroups, *, out_dtype: torch.dtype, fast: bool = False
) -> torch.Tensor:
    """:func:`~opfuse.kernels.products.runs.product_over_rows`, by who multiplies the family so."""
    if left.layout.format.family == "mx":
        return _mx_runs(RunOperands(left, [right], groups), out_dtype, emulation.product_over_rows, right)
    return product_over_rows(left, right, groups, out_dtype=out_dtype, fast=fast)


def _mx_runs(runs: RunOperands, out_dtype: torch.dtype, emulate: Callable[..., torch.Tensor], rights: Any) -> torch.Tensor:
    """The products of MXFP8 by the library, or by ``emulate``, for which the host waits for the sizes."""
    (left, (right, *_), groups), data = runs, runs.left.data
    if on_kernels(data):
        device = data.get_device()
        if not runs_refusal(left.layout, right.layout, out_dtype, machine_of(device)) and is_certified(MX_GROUPS, device):
            return multiply_runs(runs, out_dtype=out_dtype)
    return emulate(left, rights, groups, out_dtype=out_dtype)


def machine_of(device: int) -> Machine:
    """A CUDA device by its number; -1: the CPU, or what meta tensors stand for."""
    return _machine_of(device) if device >= 0 else Machine(*stood_for())


@functools.cache
def _machine_of(device: int) -> Machine:
    return machine(torch.cuda.get_device_capability(device))


def machine(arch: Version) -> Machine:
    """A device of compute capability ``arch`` under the CUDA of this torch."""
    major, minor, *_ = (torch.version.cuda or "0.0").split(".")
    return Machine(arch, (int(major), int(minor)))
