"""Products of two quantized planes by cuBLASLt, through torch's scaled_mm, where the device takes them; else emulated.

Products of groups run in one launch of opfuse's own kernel, if it takes all of them.

A back end multiplies one family of formats on some devices. Its rules are the device's, which torch's CPU product does not
enforce, so they are checked here, on the stored arrays, whatever device these are on.

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
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType

from opfuse.formats import E4M3, E5M2
from opfuse.kernels.engine.registry import runs_kernels
from opfuse.kernels.engine.variants import on_bytes
from opfuse.kernels.products import emulated as emulation
from opfuse.kernels.products.hopper import SCALING, grouped_product, is_faster
from opfuse.kernels.products.stored import Stored
from opfuse.kernels.products.tiles import lines_from, rows_of
from opfuse.numerics.layouts import Layout, are_known
from opfuse.torch_private.operations import scaled_mm_into

Version = tuple[int, int]

OUTPUTS = (torch.float32, torch.bfloat16, torch.float16)
"""Types of a result that the device rounds its sums to, once."""

_SCALING = {
    None: ScalingType.TensorWise,
    (1, 0): ScalingType.RowWise,
    (1, 128): ScalingType.BlockWise1x128,
    (128, 128): ScalingType.BlockWise128x128,
}


class Machine(NamedTuple):
    """A device's compute capability and the CUDA version of its torch."""

    arch: Version
    cuda: Version


class Rule(NamedTuple):
    """What a product asks of its operands' layouts: ``wanted`` of what ``got`` reads from them."""

    what: str
    wanted: str
    got: Callable[[Layout, Layout], Any]
    holds: Callable[[Any], bool]

    def miss(self, left: Layout, right: Layout) -> str:
        """What is wrong, or an empty string."""
        got = self.got(left, right)
        return "" if self.holds(got) else f"{self.what}: wants {self.wanted}, got {got}"


Given = Callable[[torch.Tensor], torch.Tensor]


class Backend(NamedTuple):
    """A native product of one family: devices from ``since`` up to, not including, ``below``.

    fast: whether the library can sum fast; the package's own product says so by scaling (hopper.py). scales: how the stored
    scales of the left and of the right are given to the library.
    """

    name: str
    since: Version
    below: Version
    rules: tuple[Rule, ...]
    cuda: Version = (0, 0)
    fast: bool = False
    scales: tuple[Given, Given] = (torch.t, torch.t)


def _elements(left: Layout, right: Layout) -> tuple[str, ...]:
    return left.element.name, right.element.name


_SHAPES = (
    Rule("left lines", "at least 1", lambda left, _: left.lines[0], lambda n: n > 0),
    Rule("right lines", "a positive multiple of 16", lambda _, right: right.lines[0], lambda n: n > 0 and n % 16 == 0),
    Rule("length of the sum", "a positive multiple of 16", lambda left, _: left.lines[1], lambda n: n > 0 and n % 16 == 0),
)
_ARRAYS = "arrays: wants contiguous ones of their layout's shape on 16 bytes, got strided, misaligned ones or another shape"
_ONE_E5M2 = Rule("elements", "at most one e5m2", _elements, lambda names: names != (E5M2.name,) * 2)
_ALL_E4M3 = Rule("elements", "e4m3 twice", _elements, lambda names: names == (E4M3.name,) * 2)
_UNPADDED_SCALES = Rule(
    "left lines with scales of their own",
    "a multiple of 4",
    lambda left, _: left.lines[0] if left.scale_across else 0,
    lambda n: n % 4 == 0,
)

_HOPPER: Any = {"since": (9, 0), "below": (10, 0)}
_CUBLAS_12_9: Any = {**_HOPPER, "cuda": (12, 9)}
"""From this CUDA version on, the library handles scales of lines."""

BACKENDS: Mapping[str, Backend] = {
    "tensor": Backend("scaled_mm, per tensor", **_HOPPER, fast=True, rules=(*_SHAPES, _ONE_E5M2)),
    "row": Backend(
        "scaled_mm, per row",
        **_CUBLAS_12_9,
        fast=True,
        scales=(lambda scale: scale[:, None], lambda scale: scale[None, :]),
        rules=(*_SHAPES, _ONE_E5M2),
    ),
    "block": Backend(
        "scaled_mm, 1x128 and 128x128 blocks of E4M3",
        **_CUBLAS_12_9,
        rules=(*_SHAPES, _ALL_E4M3, _UNPADDED_SCALES),
    ),
}
"""Native products by family of formats, where they have been checked; a family without one is emulated."""

_TILED_RIGHT = Rule(
    "blocks",
    "1x128 on the left, 1x128 or 128x128 on the right",
    lambda left, right: (left.block, right.block),
    lambda blocks: blocks[0] == (1, 128),
)

OWN: Mapping[str, Backend] = {
    "tensor": Backend("product.cu, per tensor", **_CUBLAS_12_9, rules=(*_SHAPES, _ONE_E5M2)),
    "row": Backend("product.cu, per row", **_CUBLAS_12_9, rules=(*_SHAPES, _ONE_E5M2)),
    "block": Backend("product.cu, 1x128 and 128x128 blocks of E4M3", **_CUBLAS_12_9, rules=(*_SHAPES, _ALL_E4M3, _TILED_RIGHT)),
}
"""Products of the package's own (hopper.py), of groups above all; their bits are those of the back ends above."""

ON_CPU = "the CPU has no product of this format"

OWN_OUTPUTS = (torch.bfloat16, torch.float16)


def refusal(left: Stored, right: Stored, out_dtype: torch.dtype, machine: Machine, *, own: bool = False) -> str:
    """Why the product of two planes of one family is emulated on ``machine``; an empty string if it is native.

    own: why it is not one of :data:`OWN`.
    """
    why = layout_refusal(left.layout, right.layout, out_dtype, machine, own=own)
    return why or ("" if left.in_place and right.in_place else _ARRAYS)


@functools.lru_cache(maxsize=4096)
def layout_refusal(left: Layout, right: Layout, out_dtype: torch.dtype, machine: Machine, *, own: bool = False) -> str:
    """:func:`refusal` of planes in these layouts whose arrays lie as the device wants them."""
    backend = (OWN if own else BACKENDS).get(left.format.family)
    if backend is None:
        return f"no native product of {left.format.family} formats"
    if not are_known((left, right)):
        return f"formats: wants those of opfuse.formats, got {left.format} and {right.format}"
    if missing := _missing(backend, machine):
        return missing
    if out_dtype not in (OWN_OUTPUTS if own else OUTPUTS):
        return f"result: wants {'' if own else 'fp32, '}bf16 or fp16, got {out_dtype}"
    return next((miss for rule in backend.rules if (miss := rule.miss(left, right))), "")


def _missing(backend: Backend, machine: Machine) -> str:
    """What ``machine`` lacks for a product; an empty string if nothing."""
    if machine.arch == (0, 0):
        return ON_CPU
    if not backend.since <= machine.arch < backend.below:
        return f"compute capability: wants {_range(backend)}, got {_dotted(machine.arch)}"
    return "" if machine.cuda >= backend.cuda else f"CUDA: wants >= {_dotted(backend.cuda)}, got {_dotted(machine.cuda)}"


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
    if left.data.is_cuda and runs_kernels(left.data):
        device = _machine(left.data.get_device())
        own = not refusal(left, right, out_dtype, device, own=True)
        if own and is_faster(left, right, fast=fast):
            return _own(left, right, out_dtype=out_dtype, fast=fast, out=out)
        if not refusal(left, right, out_dtype, device):
            return _scaled_mm(left, right, out_dtype=out_dtype, fast=fast, out=out)
        if own:
            return _own(left, right, out_dtype=out_dtype, fast=fast, out=out)
    return emulation.multiply(*_operands(left, right), dtype=out_dtype)


def accumulate(lefts: Sequence[Stored], rights: Sequence[Stored], out: torch.Tensor, *, fast: bool = False) -> bool:
    """Add the products of groups, each left times its right transposed, to ``out``, fp32: one below the other, in one launch.

    False, and nothing is done, where that is not faster. The bits are those of products in fp32 and of an addition.
    """
    pairs = [*zip(lefts, rights, strict=True)]
    first, other = pairs[0]
    if not first.data.is_cuda or not runs_kernels(first.data) or any(own_refusal(*pair, torch.bfloat16) for pair in pairs):
        return False
    counts, width = [left.layout.lines[0] for left in lefts], other.layout.lines[0]
    fits = out.dtype == torch.float32 and tuple(out.shape) == (sum(counts), width)
    faster = is_faster(first, other, fast=fast, added=True, groups=len(pairs))
    if not fits or not out.is_contiguous() or not on_bytes(out, 16) or not faster:
        return False
    grouped_product(lefts, rights, counts, out_dtype=torch.float32, fast=fast, out=out, accumulate=True)
    torch.autograd.graph.increment_version(out)
    return True


def _operands(*planes: Stored) -> list[emulation.Lines]:
    return [emulation.operand(p.data, p.scale, p.amax, layout=p.layout) for p in planes]


def _invariant(left: Stored, right: Stored, *, out_dtype: torch.dtype, fast: bool, out: torch.Tensor | None) -> torch.Tensor:
    """The product by a back end that multiplies any number of lines in one way; its choice does not depend on their number."""
    if left.data.is_cuda and runs_kernels(left.data):
        device, (left, right) = _machine(left.data.get_device()), (plane.moved_in_place() for plane in (left, right))
        if not refusal(left, right, out_dtype, device, own=True):
            return _own(left, right, out_dtype=out_dtype, fast=fast, out=out)
        if not invariant_refusal(left.layout, right.layout, out_dtype, device):
            return _in_tiles(left, right, out_dtype=out_dtype, fast=fast, out=out)
    return emulation.multiply_tiles(*_operands(left, right), dtype=out_dtype)


def invariant_refusal(left: Layout, right: Layout, out_dtype: torch.dtype, machine: Machine) -> str:
    """Why the library makes no product of tiles of ``left``; an empty string if it does."""
    if left.format.family == "block" and not left.scale_across:
        return "tiles: wants scales of single lines on the left, got 128x128 blocks"
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
    if layout.scale_across:
        scale = lines_from(plane.scale.t()[: layout.lines[0]], start, rows).t().contiguous()
    else:
        scale = plane.scale if layout.format.family == "tensor" else lines_from(plane.scale, start, rows)
    return Stored(lines_from(plane.data, start, rows), scale, plane.amax, layout.replace(shape=(rows, layout.lines[1])))


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
    if lefts[0].layout.format.family not in BACKENDS:
        return None if invariant else emulation.multiply_groups(lefts, rights, lines, dtype=out_dtype)
    if not first.is_cuda or not runs_kernels(first):
        return None
    device = _machine(first.get_device())
    if any(refusal(left, right, out_dtype, device, own=True) for left, right in zip(lefts, rights, strict=True)):
        return None
    return grouped_product(lefts, rights, lines, out_dtype=out_dtype, fast=fast)


def _scaled_mm(
    left: Stored, right: Stored, *, out_dtype: torch.dtype, fast: bool, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Scales of blocks go in as their stored arrays transposed: (lines, blocks) for 1x128, (padded blocks, blocks of lines) for
    128x128. Those of rows are a column on the left and a row on the right.

    The scale of a tensor and those of rows may be a part of a larger array; cuBLASLt wants 16 bytes, so they are copied then.
    """
    backend = BACKENDS[left.layout.format.family]
    a, b = (p.data.view(p.layout.element.dtype) for p in (left, right))
    scale_a, scale_b = (
        turn(p.scale if on_bytes(p.scale, 16) else p.scale.clone()) for turn, p in zip(backend.scales, (left, right))
    )
    scaling_a, scaling_b = (_SCALING[p.layout.format.block] for p in (left, right))
    fast = fast and backend.fast
    if out is None or tuple(out.shape) != (len(a), len(b)) or not on_bytes(out, 16):
        return F.scaled_mm(a, b.t(), scale_a, scaling_a, scale_b, scaling_b, output_dtype=out_dtype, use_fast_accum=fast)
    left_scale: Any = [scale_a], [scaling_a.value], []
    right_scale: Any = [scale_b], [scaling_b.value], []
    return scaled_mm_into(a, b.t(), *left_scale, *right_scale, None, out_dtype, [], fast, out=out)


def own_refusal(left: Stored, right: Stored, out_dtype: torch.dtype) -> str:
    """Why kernels of the package's own do not multiply two planes on their device; an empty string if they do."""
    return refusal(left, right, out_dtype, _machine(left.data.get_device()), own=True)


def multiplies_runs(left: Layout, right: Layout, out_dtype: torch.dtype, device: int) -> bool:
    """Whether products of groups whose sizes only the device knows (runs.py) are made there, of planes in these layouts."""
    meet = (left.format.block, right.format.block) in SCALING
    return meet and not layout_refusal(left, right, out_dtype, _machine(device), own=True)


@functools.cache
def _machine(device: int) -> Machine:
    return machine(torch.cuda.get_device_capability(device))


def machine(arch: Version) -> Machine:
    """A device of compute capability ``arch`` under the CUDA of this torch."""
    major, minor, *_ = (torch.version.cuda or "0.0").split(".")
    return Machine(arch, (int(major), int(minor)))


def _range(backend: Backend) -> str:
    return f">= {_dotted(backend.since)} and < {_dotted(backend.below)}"


def _dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
