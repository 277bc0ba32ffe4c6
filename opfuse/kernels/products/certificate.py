"""Certifies native products on devices that this project has not recorded: each family is tried before its first use.

A trial multiplies two planes of random codes by the product in question, and compares with the exact product of their values in
fp64 on the CPU. Trials have tails, every usage and order of elements that the rules allow, zeros, NaN, and the largest codes;
those of groups have groups of one row, of none, and of several tiles.
Scales differ from block to block, so that an operand that is read in the wrong order, or a scale that is left out, is far outside
of the bound:

    |got - exact| <= 2^-13 (length max |left| max |right| + (1 + length / 32) sum |left| |right|)  +  2^-b |exact|

That is of a unit with 13 fraction bits, the coarsest that is known (compute capability 9.0): in each step of 32 it cuts every
product off at 2^-13 of the largest, and then the sum of what it has. The last part is one rounding to the ``b`` bits of the
result's dtype. Maxima are those of a line.

A family that passes is native from then on; one that fails, or raises, is emulated (engine/certificates.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F

from opfuse.formats import (
    COLUMNWISE,
    E4M3,
    E5M2,
    NVFP4,
    ROWWISE,
    USAGES,
    Element,
    NumberFormat,
    Usage,
    dtype_name,
    fp8_block,
    fp8_row,
    fp8_tensor,
    mxfp8,
)
from opfuse.kernels.engine.certificates import Certificate, Tried, certificate_of, certified
from opfuse.kernels.engine.registry import wrong_kernels
from opfuse.kernels.products.backends import BACKENDS, MX_GROUPS, Backend, Machine, backend_of
from opfuse.kernels.products.emulated import operand
from opfuse.kernels.products.library_groups import RunOperands
from opfuse.kernels.products.stored import Stored
from opfuse.numerics.layouts import Layout, layout_of, load_scale, round_up, store_data, store_scale
from opfuse.numerics.row_groups import TILE, RowGroups, row_groups


class PairOperands(NamedTuple):
    """The operands of a product of two planes."""

    left: Stored
    right: Stored

    def to(self, device: torch.device | str) -> PairOperands:
        """The same planes on another device."""
        return PairOperands(self.left.to(device), self.right.to(device))


Multiply = Callable[[Backend, PairOperands | RunOperands, torch.dtype, bool], torch.Tensor]
"""The products of operands by a back end in a dtype, with fast sums or without: one result, or those of all groups."""


class Trial(NamedTuple):
    """Operands on the CPU. name: what is tried. pairs: the planes whose products, one below the other, make the result."""

    name: str
    operands: PairOperands | RunOperands
    pairs: Sequence[PairOperands]

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        """Those of both sides, of groups of the first right."""
        operands = self.operands
        right = operands.rights[0] if isinstance(operands, RunOperands) else operands.right
        return operands.left.layout, right.layout


# -- trials ----------------------------------------------------------------------------------------------------------------------

_BLOCKS = tuple((pow2, one, other) for pow2 in (True, False) for one, other in ((1, 2), (2, 1), (1, 1)))
_FORMATS: dict[str, tuple[tuple[NumberFormat, NumberFormat], ...]] = {
    "tensor": tuple((fp8_tensor(one), fp8_tensor(other)) for one, other in ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2))),
    "row": tuple((fp8_row(one), fp8_row(other)) for one, other in ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2))),
    "block": (
        *((fp8_block(E4M3, one, pow2=pow2), fp8_block(E4M3, other, pow2=pow2)) for pow2, one, other in _BLOCKS),
        (fp8_block(E5M2, 1, pow2=True), fp8_block(E4M3, 2, pow2=True)),
        (fp8_block(E4M3, 1, pow2=True), fp8_block(E5M2, 1, pow2=True)),
    ),
    "mx": tuple((mxfp8(one), mxfp8(other)) for one, other in ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2))),
    "nv": ((NVFP4, NVFP4), (replace(NVFP4, encode_max=256), NVFP4)),
}
"""Formats of the left and of the right."""

_SHAPES = ((1, 16, 32), (4, 48, 96), (12, 80, 208), (132, 144, 288), (256, 128, 512), (64, 272, 160), (300, 16, 1056))
"""Lines of the left, lines of the right, length: less than a tile, tiles with tails, long sums of small results."""

_USAGES: tuple[tuple[Usage, Usage], ...] = ((ROWWISE, ROWWISE), (ROWWISE, COLUMNWISE), (COLUMNWISE, COLUMNWISE))
"""Planes that fprop, dgrad and wgrad read."""

_SEED = 20250731


def trials(family: str, backend: Backend) -> Iterator[Trial]:
    """What a product of ``family`` is tried on, as far as the rules of ``backend`` take it."""
    random = torch.Generator().manual_seed(_SEED)
    every = _runs(random) if family == MX_GROUPS else _pairs(family, random)
    return (trial for trial in every if not any(rule.miss(*trial.layouts) for rule in backend.rules))


def _pairs(family: str, random: torch.Generator) -> Iterator[Trial]:
    for name, left, right in _planes(family, random):
        pair = PairOperands(left, right)
        yield Trial(name, pair, [pair])


def _planes(family: str, random: torch.Generator) -> Iterator[tuple[str, Stored, Stored]]:
    for left_lines, right_lines, length in _SHAPES:
        for left_usage, right_usage in _USAGES:
            for one, other in _FORMATS[family]:
                left = random_plane(one, left_usage, left_lines, length, random)
                right = random_plane(other, right_usage, right_lines, length, random)
                yield _name(left, right), left, right
    one, other = _FORMATS[family][0]
    left, right = (random_plane(fmt, ROWWISE, lines, 256, random) for fmt, lines in ((one, 128), (other, 64)))
    yield "zeros", left._replace(data=torch.zeros_like(left.data)), right
    yield "outliers", _planted(left, _largest(left.layout.element)), right
    if (nan := left.layout.element.nan_code) is not None:
        yield "NaN", _planted(left, nan), right
    largest = [plane._replace(data=torch.full_like(plane.data, _largest(plane.layout.element))) for plane in (left, right)]
    yield "largest codes", largest[0], largest[1]
    if one.scale == "e8m0" or one.pow2:
        yield "smallest scales on the left", _under(left, -127), _under(right, 110)
        yield "smallest scales on the right", _under(left, 110), _under(right, -127)


_SIZES: tuple[tuple[tuple[int, ...], int, int], ...] = (
    ((1, 0, 130, 128, 5, 0), 384, 144),
    ((0, 300, 7), 128, 16),
    ((64, 33, 0, 0, 96), 640, 272),
)
"""Rows of groups; the length of the sum, over rows the lines of the left; lines of the right."""


def _runs(random: torch.Generator) -> Iterator[Trial]:
    """Products of rows and over rows, of planes that are made of those of each group."""
    fmt = mxfp8(E4M3)
    for sizes, length, lines in _SIZES:
        for usage in USAGES:
            rights = [random_plane(fmt, usage, lines, length, random) for _ in sizes]
            lefts = [random_plane(fmt, ROWWISE, size, length, random) for size in sizes]
            yield _of_rows(f"{sizes} rows x {lines} x {length}, {usage} rights", lefts, rights)
        lefts, rights = ([_on_tiles(fmt, count, size, random) for size in sizes] for count in (length, lines))
        yield _over_rows(f"{length} x {lines} over {sizes} rows", lefts, rights, sizes)
    rights = [random_plane(fmt, ROWWISE, 64, 256, random) for _ in range(2)]
    left, other = (random_plane(fmt, ROWWISE, size, 256, random) for size in (96, 160))
    yield _of_rows("groups: zeros", [each._replace(data=torch.zeros_like(each.data)) for each in (left, other)], rights)
    yield _of_rows("groups: outliers", [left, _planted(other, _largest(E4M3))], rights)
    yield _of_rows("groups: NaN", [left, _planted(other, cast(int, E4M3.nan_code))], rights)


def _of_rows(name: str, lefts: Sequence[Stored], rights: Sequence[Stored]) -> Trial:
    sizes = [left.layout.lines[0] for left in lefts]
    runs = RunOperands(_joined(lefts, sum(sizes)), rights, _groups(sizes))
    return Trial(name, runs, [PairOperands(*pair) for pair, size in zip(zip(lefts, rights), sizes) if size])


def _over_rows(name: str, lefts: Sequence[Stored], rights: Sequence[Stored], sizes: Sequence[int]) -> Trial:
    groups = _groups(sizes)
    left, right = (_joined(planes, groups.padded_rows) for planes in (lefts, rights))
    return Trial(name, RunOperands(left, [right], groups), [PairOperands(*pair) for pair in zip(lefts, rights)])


def _on_tiles(fmt: NumberFormat, lines: int, rows: int, random: torch.Generator) -> Stored:
    """The columnwise plane of a group, with zeros behind its rows as a cast leaves them."""
    plane = random_plane(fmt, COLUMNWISE, lines, round_up(rows, TILE), random)
    plane.data[rows:] = 0
    return plane


def _groups(sizes: Sequence[int]) -> RowGroups:
    return RowGroups(row_groups(torch.tensor(sizes), sum(sizes)), sum(sizes), len(sizes))


def _joined(planes: Sequence[Stored], rows: int) -> Stored:
    """The plane of a matrix of so many rows, which begin with those of ``planes``, one below the other; zeros follow."""
    first = planes[0].layout
    layout = first.replace(shape=(rows, first.shape[1]))
    along = 0 if first.usage == ROWWISE else 1
    scale = torch.cat([load_scale(plane.scale, plane.layout) for plane in planes], along)
    lines, length = layout.blocks
    data, missing = torch.cat([plane.data for plane in planes]), (0, length - scale.shape[1], 0, lines - scale.shape[0])
    data = F.pad(data, (0, 0, 0, rows - len(data)))
    return Stored(data, store_scale(F.pad(scale, missing), layout), None, layout)


def _under(plane: Stored, exponent: int) -> Stored:
    """The plane with all scales of one power of two."""
    exponents = torch.full(plane.layout.blocks, exponent)
    return plane._replace(scale=_stored_scales(plane.layout, exponents, torch.ones_like(exponents)))


def _planted(plane: Stored, byte: int) -> Stored:
    """The plane with other bytes in two places."""
    data = plane.data.clone()
    data[3, 5] = data[100, 77] = byte
    return plane._replace(data=data)


def _largest(element: Element) -> int:
    return element.max_code | element.max_code << 4 if element.bits == 4 else element.max_code


def _name(left: Stored, right: Stored) -> str:
    sizes = f"{left.layout.lines[0]} x {right.layout.lines[0]} x {left.layout.lines[1]}"
    return f"{sizes}, {left.layout.format} {left.layout.usage} times {right.layout.format} {right.layout.usage}"


def random_plane(fmt: NumberFormat, usage: Usage, lines: int, length: int, random: torch.Generator) -> Stored:
    """A plane of random finite codes, whose scales are of seven powers of two, times 4 to 7 where a scale can have a mantissa."""
    layout = layout_of(fmt, usage, (lines, length) if usage == ROWWISE else (length, lines))
    element = layout.element
    magnitude = torch.randint(0, element.max_code + 1, layout.lines, generator=random, dtype=torch.uint8)
    sign = torch.randint(0, 2, layout.lines, generator=random, dtype=torch.uint8) << (element.bits - 1)
    return Stored(store_data(magnitude | sign, layout), _scales(layout, random), _amax(layout, random), layout)


def _scales(layout: Layout, random: torch.Generator) -> torch.Tensor:
    exponents = torch.randint(-3, 4, layout.blocks, generator=random)
    mantissas = torch.randint(4, 8, layout.blocks, generator=random)
    return _stored_scales(layout, exponents, torch.ones_like(mantissas) if layout.format.pow2 else mantissas)


def _stored_scales(layout: Layout, exponents: torch.Tensor, mantissas: torch.Tensor) -> torch.Tensor:
    """Scales ``mantissas`` times 2^``exponents`` as a plane stores them; E8M0 has no mantissas."""
    if layout.format.scale == "e8m0":
        return store_scale((exponents + 127).to(torch.uint8), layout)
    if layout.format.scale == "e4m3":
        return store_scale(((exponents + 7 << 3) | mantissas).to(torch.uint8), layout)
    scales = (mantissas * exponents.double().exp2()).float()
    return scales.reshape(1) if layout.format.family == "tensor" else store_scale(scales, layout)


def _amax(layout: Layout, random: torch.Generator) -> torch.Tensor | None:
    return None if layout.amax_shape is None else 1 + 500 * torch.rand(layout.amax_shape, generator=random)


# -- comparing -------------------------------------------------------------------------------------------------------------------

_OUT_BITS = {torch.bfloat16: 8, torch.float32: 20, torch.float16: 11}
"""Bits of a result that a product has to keep: of fp32 fewer than it has, since its factors are rounded as well."""

_STEP, _STEP_BITS = 32, 13


def exact_values(plane: Stored) -> torch.Tensor:
    """What a plane on the CPU says, in fp64: (lines, length)."""
    lines = operand(plane)
    values = lines.values.double()
    if lines.blocks is not None:
        values *= lines.blocks.double().repeat_interleave(lines.step, 1)[:, : values.shape[1]]
    return values if lines.factor is None else values * (lines.factor.double() / lines.unit)


class Exact(NamedTuple):
    """The exact product of two planes in fp64, and how far the sums of a unit may be from it."""

    product: torch.Tensor
    bound: torch.Tensor

    @staticmethod
    def of(trial: Trial) -> Exact:
        """That of a trial; products over the rows of groups one after another, (groups, left lines, right lines)."""
        found = [Exact.of_planes(*pair) for pair in trial.pairs]
        over_rows = isinstance(trial.operands, RunOperands) and trial.operands.left.layout.usage == COLUMNWISE
        join = torch.stack if over_rows else torch.cat
        return Exact(*(join(parts) for parts in zip(*found)))

    @staticmethod
    def of_planes(*planes: Stored) -> Exact:
        """That of two planes."""
        left, right = map(exact_values, planes)
        length, one, other = left.shape[1], left.abs(), right.abs()
        most = [lines.amax(1) if length else lines.sum(1) for lines in (one, other)]
        cut = length * torch.outer(*most) + (1 + length / _STEP) * (one @ other.t())
        return Exact(left @ right.t(), 2.0**-_STEP_BITS * cut)

    def fault(self, got: torch.Tensor) -> str:
        """The first element of ``got`` that is not within the bound of its dtype; an empty string if there is none."""
        if got.shape != self.product.shape:
            return f"wants the shape {tuple(self.product.shape)}, got {tuple(got.shape)}"
        bound = self.bound + 2.0 ** -_OUT_BITS[got.dtype] * self.product.abs()
        overflows = self.product.abs() + bound > torch.finfo(got.dtype).max
        got = got.double()
        right = ((got - self.product).abs() <= bound) | (got.isnan() & self.product.isnan())
        right |= overflows & got.isinf()
        if right.all():
            return ""
        at = tuple((~right).nonzero()[0].tolist())
        return f"element {at} is {got[at].item():g}, wants {self.product[at].item():g} within {bound[at].item():g}"


def examine(family: str, backend: Backend, product: Multiply, device: torch.device) -> Certificate:
    """Try ``product`` on every trial, in every dtype, with fast sums where the back end has them, on ``device``; waits for it."""
    for trial in trials(family, backend):
        exact = Exact.of(trial)
        operands = trial.operands.to(device)
        for out_dtype, fast in itertools.product(backend.outputs, (False, True)[: 1 + backend.fast]):
            try:
                fault = exact.fault(product(backend, operands, out_dtype, fast).cpu())
            except torch.OutOfMemoryError:  # of the moment, and no verdict to be kept
                raise
            except Exception as error:  # whatever the library raises: it does not multiply these here
                fault = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            if fault:
                return Certificate(f"{trial.name}, {dtype_name(out_dtype)}{', fast sums' * fast}: {fault}")
    return Certificate("")


# -- certificates ----------------------------------------------------------------------------------------------------------------


def certified_product(family: str, device: int, machine: Machine, product: Multiply) -> Certificate:
    """The certificate of the library's product of ``family`` on a CUDA device, which is found if it is not known.

    PlanMissError if a stream is being captured and the product was never tried: trials wait for the device.
    """
    backend = backend_of(BACKENDS[family], machine)
    if isinstance(backend, str):
        return Certificate(backend)
    if backend.recorded:
        return Certificate("")
    return certified(tried(family, backend), device, lambda: examine(family, backend, product, torch.device("cuda", device)))


def tried(family: str, backend: Backend) -> Tried:
    """The library's product of a family, as certificates have it."""
    return Tried(family, backend.name, "the exact product", "products of this format are emulated here, and right")


def standing(family: str, machine: Machine) -> str:
    """How far the library's product of a family can be trusted on a machine that has it: for what people read."""
    backend = backend_of(BACKENDS[family], machine)
    if isinstance(backend, str) or backend.recorded:
        return ""
    return "certified here" if known_certificate(family, machine) else "certified on first use"


def known_certificate(family: str, machine: Machine) -> Certificate | None:
    """The certificate of a family on the current CUDA device, if that is such a machine and somebody has asked for it before."""
    backend = backend_of(BACKENDS[family], machine)
    if isinstance(backend, str) or backend.recorded or not _is_here(machine):
        return None
    return certificate_of(family, torch.cuda.current_device())


def wrong_product(family: str, machine: Machine) -> str:
    """Why the library's product of a family is not used here, if this is such a machine and it was found to be wrong."""
    known = known_certificate(family, machine)
    return "" if known is None or known.passed else f"wrong here: {known.fault}"


def wrong_here(machine: Machine) -> dict[str, str]:
    """By name, the products and kernels that were found to be wrong on the current CUDA device, if that is such a machine."""
    if not _is_here(machine):
        return {}
    products = {}
    for family, rows in BACKENDS.items():
        backend, known = backend_of(rows, machine), known_certificate(family, machine)
        if isinstance(backend, Backend) and known is not None and not known.passed:
            products[backend.name] = known.fault
    return products | wrong_kernels_here(machine)


def wrong_kernels_here(machine: Machine) -> dict[str, str]:
    """The same of kernels alone."""
    return wrong_kernels(torch.cuda.current_device()) if _is_here(machine) else {}


def _is_here(machine: Machine) -> bool:
    """Asked of the CPU, it does not start CUDA."""
    return machine.arch != (0, 0) and torch.cuda.is_available() and torch.cuda.get_device_capability() == machine.arch
