"""Whole planes of every bf16 and fp16 value, cast and dequantized by the package, against the integer oracle block by block."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch

from opfuse.formats import COLUMNWISE, FP8_ELEMENTS, NVFP4, ROWWISE, USAGES, fp8_block, fp8_row, fp8_tensor, mxfp8
from opfuse.numerics import casts as definition
from opfuse.numerics.dequantize import dequantize
from opfuse.numerics.layouts import Layout, load_data, load_scale
from tests.oracles import inputs, integer
from tests.oracles.rules import check_equal, mx, nvfp4, scaled

SHAPE = (256, 256)
FP8 = tuple(FP8_ELEMENTS.values())
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SEED = 0xFEDCBA9876543210


def matrix(source: str, order: str) -> np.ndarray:
    """All 65 536 values of a type as a square of fp32 bits. Sorted, a block holds neighbours; shuffled, many blocks hold NaN."""
    x = inputs.ALL[source]()
    if order == "finite":
        x = np.where((x & np.uint32(integer.MAGNITUDE)) < integer.INF, x, np.uint32(0))
    return (x if order == "sorted" else np.random.default_rng(17).permutation(x)).reshape(SHAPE)


def tensor(bits: np.ndarray, source: str) -> torch.Tensor:
    """The values in their own dtype."""
    return torch.from_numpy(bits.view(np.int32).copy()).view(torch.float32).to(DTYPES[source])


def along(bits: np.ndarray, usage: str) -> np.ndarray:
    """Lines of a plane as rows."""
    return np.ascontiguousarray(bits.T if usage == COLUMNWISE else bits)


@dataclass(frozen=True)
class Given:
    """The plane ``usage`` of a matrix of every value."""

    source: str
    order: str
    usage: str

    def __str__(self) -> str:
        return f"{self.source}-{self.order}-{self.usage}"

    @property
    def x(self) -> torch.Tensor:
        return tensor(matrix(self.source, self.order), self.source)

    @property
    def lines(self) -> np.ndarray:
        return along(matrix(self.source, self.order), self.usage)


def planes(*orders: str) -> pytest.MarkDecorator:
    """A test of both planes of both types in each of ``orders``."""
    return pytest.mark.parametrize("given", [Given(*case) for case in product(DTYPES, orders, USAGES)], ids=str)


SOURCES = pytest.mark.parametrize("source", DTYPES)
ELEMENTS = pytest.mark.parametrize("element", FP8, ids=[element.name for element in FP8])


def tile_amax(lines: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """For each element the largest magnitude of its tile."""
    tiles = (lines & np.uint32(integer.MAGNITUDE)).reshape(lines.shape[0] // rows, rows, lines.shape[1] // cols, cols)
    return np.broadcast_to(tiles.max(axis=(1, 3), keepdims=True), tiles.shape).reshape(lines.shape)


def stored(x: torch.Tensor) -> np.ndarray:
    """The bits of an fp32 tensor, or the bytes of a uint8 one."""
    return x.contiguous().numpy() if x.dtype == torch.uint8 else x.contiguous().view(torch.int32).numpy().view(np.uint32)


def check_plane(data: torch.Tensor, scale: torch.Tensor, layout: Layout, codes: np.ndarray, scales: np.ndarray) -> None:
    """The stored codes and scales against those of each element, lines as rows."""
    check_equal(stored(load_data(data, layout)), codes)
    rows, cols = layout.block
    check_equal(stored(load_scale(scale, layout)), scales[::rows, ::cols])


def check_dequantized(plane: tuple, layout: Layout, values: np.ndarray) -> None:
    """The package's dequantize against fp32 bits (lines as rows), rounded to each output dtype."""
    data, scale, amax = plane
    want = along(values, layout.usage)
    check_equal(stored(dequantize(data, scale, amax, layout=layout, dtype=torch.float32)), want)
    for name, dtype in DTYPES.items():
        got = dequantize(data, scale, amax, layout=layout, dtype=dtype).to(torch.float32)
        check_equal(stored(got), integer.decode(integer.encode(want, name), name), want)


def tensor_of(scales: np.ndarray) -> torch.Tensor:
    """One scale of many equal ones, fp32 (1,)."""
    return torch.from_numpy(scales.ravel()[:1].view(np.float32).copy())


@pytest.mark.few(2)
@SOURCES
@ELEMENTS
@pytest.mark.parametrize("pow2", [False, True])
def test_r1_per_tensor_casts_of_every_input(source, element, pow2):
    bits = matrix(source, "finite")
    layouts = [Layout(fp8_tensor(element), usage, SHAPE) for usage in USAGES]
    for amax in (inputs.LARGEST[source], integer.ONE, 0x3FE00000, 0x00010000, 0):
        scale, inverse, codes = scaled(integer, bits, np.full(SHAPE, amax, np.uint32), element.name, pow2=pow2)
        values = integer.multiply(integer.decode(codes, element.name), inverse)
        for data, layout in zip(definition.cast_tensor(tensor(bits, source), tensor_of(scale), layouts), layouts):
            check_equal(stored(load_data(data, layout)), along(codes, layout.usage))
            check_dequantized((data, tensor_of(inverse), None), layout, along(values, layout.usage))


@SOURCES
@ELEMENTS
def test_r1_r18_delayed_casts_of_every_input_show_what_is_not_finite(source, element):
    bits = matrix(source, "shuffled")
    scale = np.full(SHAPE, integer.fp32_bits(11), np.uint32)
    sign = (bits >> np.uint32(24) & np.uint32(0x80)).astype(np.uint8)
    infinite = {"e4m3": np.full(SHAPE, 0x7F, np.uint8), "e5m2": 0x7C | sign}[element.name]
    codes = integer.encode(integer.multiply(bits, scale), element.name)
    codes = np.where((bits & np.uint32(integer.MAGNITUDE)) == integer.INF, infinite, codes)
    layout = Layout(fp8_tensor(element), ROWWISE, SHAPE)
    (data,) = definition.cast_delayed(tensor(bits, source), tensor_of(scale), [layout])
    check_equal(stored(load_data(data, layout)), codes, bits)


@pytest.mark.few(2)
@planes("sorted", "shuffled", "finite")
@ELEMENTS
@pytest.mark.parametrize("pow2", [False, True])
def test_r1_row_casts_of_every_input(given, element, pow2):
    layout = Layout(fp8_row(element), given.usage, SHAPE)
    _, inverse, codes = scaled(integer, given.lines, tile_amax(given.lines, *layout.block), element.name, pow2=pow2)
    ((data, scale),) = definition.cast_row(given.x, [layout], pow2=pow2)
    check_plane(data, scale, layout, codes, inverse)
    check_dequantized((data, scale, None), layout, integer.multiply(integer.decode(codes, element.name), inverse))


@pytest.mark.few(2)
@planes("sorted", "shuffled", "finite")
@ELEMENTS
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("dims", [1, 2])
def test_r1_block_casts_of_every_input(given, element, pow2, dims):
    layout = Layout(fp8_block(element, dims), given.usage, SHAPE)
    lines = given.lines
    amax = tile_amax(lines, *layout.format.block)
    _, inverse, codes = scaled(integer, lines, amax, element.name, pow2=pow2, inf_value=inputs.LARGEST[given.source])
    ((data, scale),) = definition.cast_block(given.x, [layout], pow2=pow2)
    check_plane(data, scale, layout, codes, inverse)
    check_dequantized((data, scale, None), layout, integer.multiply(integer.decode(codes, element.name), inverse))


@pytest.mark.few(2)
@planes("sorted", "shuffled", "finite")
@ELEMENTS
@pytest.mark.parametrize("rounding", ["ceil", "floor"])
@pytest.mark.parametrize("rows", [1, 32])
def test_r1_mxfp8_casts_of_every_input(given, element, rounding, rows):
    layout = Layout(mxfp8(element), given.usage, SHAPE)
    lines = given.lines
    byte, value, _, codes = mx(integer, lines, tile_amax(lines, rows, 32), element.name, rounding=rounding)
    ((data, scale),) = definition.cast_mx(given.x, [layout], rows=rows, rounding=rounding)
    check_plane(data, scale, layout, codes, byte)
    check_dequantized((data, scale, None), layout, integer.multiply(integer.decode(codes, element.name), value))


def nvfp4_values(codes: np.ndarray, byte: np.ndarray, amax: np.ndarray, encode_max: int) -> np.ndarray:
    """(q * block scale) * (amax * fl32(1 / (6 E)))."""
    level = integer.multiply(amax, np.uint32(integer.fp32_bits(Fraction(1, 6 * encode_max))))
    return integer.multiply(integer.multiply(integer.decode(codes, "e2m1"), integer.decode(byte, "e4m3")), level)


@pytest.mark.few
@planes("sorted", "shuffled", "finite")
@pytest.mark.parametrize(
    ("form", "rows"),
    [(NVFP4, 1), (NVFP4, 16), (NVFP4.replace(encode_max=256), 1), (NVFP4.replace(per_row=True), 1)],
    ids=["1d", "2d", "256", "per_row"],
)
def test_r1_nvfp4_casts_of_every_input(given, form, rows):
    layout = Layout(form, given.usage, SHAPE)
    lines = given.lines
    amax = tile_amax(lines, 1 if form.per_row else SHAPE[0], SHAPE[1])
    options = {"encode_max": form.encode_max, "block_amax": tile_amax(lines, rows, 16)}
    _, byte, _, codes = nvfp4(integer, lines, amax, "e2m1", **options)
    global_amax = definition.amax_nv(given.x, layout)
    ((data, scale),) = definition.cast_nv(given.x, [global_amax], [layout], rows=rows)
    check_plane(data, scale, layout, codes, byte)
    check_dequantized((data, scale, global_amax), layout, nvfp4_values(codes, byte, amax, form.encode_max))


@planes("finite")
def test_r1_stochastic_nvfp4_casts_of_every_input(given):
    layout = Layout(NVFP4, given.usage, SHAPE)
    lines = given.lines
    # A global amax far below the largest values: most blocks have a scale that is neither 0 nor subnormal.
    amax = np.full(SHAPE, integer.fp32_bits(10), np.uint32)
    _, byte, multiplier, _ = nvfp4(integer, lines, amax, "e2m1", encode_max=448, block_amax=tile_amax(lines, 1, 16))
    octets = [integer.random_bytes(SEED, USAGES.index(given.usage), block) for block in range(lines.size // 16)]
    codes = integer.encode_e2m1_stochastic(integer.multiply(lines, multiplier), np.array(octets).reshape(lines.shape))
    ((data, scale),) = definition.cast_nv(given.x, [tensor_of(amax)], [layout], seed=torch.tensor([SEED - 2**64]))
    check_plane(data, scale, layout, codes, byte)
