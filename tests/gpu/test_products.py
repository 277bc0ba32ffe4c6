"""Grouped products of the package's own against cuBLASLt's, bit for bit, on random values; what stands around them."""

from __future__ import annotations

import pytest
import torch

from opfuse.kernels.products.hopper import grouped_product, is_faster
from opfuse.kernels.products.native import _scaled_mm, multiply, multiply_groups
from opfuse.kernels.products.stored import Stored
from opfuse.recipes import availability
from opfuse.tensors.gemm import GEMMS
from opfuse.tensors.quantizers import Float8BlockQuantizer, Float8CurrentScalingQuantizer, Float8RowQuantizer

pytestmark = pytest.mark.skipif(availability.device_arch() != (9, 0), reason="products of compute capability 9.0")

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
KINDS = {
    "tensors": (Float8CurrentScalingQuantizer(E4M3), Float8CurrentScalingQuantizer(E4M3)),
    "tensors, e5m2": (Float8CurrentScalingQuantizer(E5M2), Float8CurrentScalingQuantizer(E4M3)),
    "1x128, 128x128": (Float8BlockQuantizer(E4M3, block_scaling_dim=1), Float8BlockQuantizer(E4M3, block_scaling_dim=2)),
    "1x128, 1x128": (Float8BlockQuantizer(E4M3, block_scaling_dim=1), Float8BlockQuantizer(E4M3, block_scaling_dim=1)),
    "rows": (Float8RowQuantizer(E4M3), Float8RowQuantizer(E4M3)),
}
# Results are large where sums are long: the library parts the sums of a few tiles among blocks, which adds in another order.
GROUPS = {
    "even": (384, [(256, 512)] * 4),
    "small": (144, [(132, 272), (4, 272), (256, 272), (60, 272)]),
    "of their own lengths": (528, [(400, 16), (400, 1040), (400, 128), (400, 2064), (400, 48)]),
    "long": (4096, [(1024, 4096), (1028, 4096)]),
    "many": (128, [(4 * (1 + i % 9), 144) for i in range(140)]),
}


def planes(quantizer, lines: int, length: int, generator: torch.Generator, device: torch.device) -> Stored:
    x = torch.randn(lines, length, generator=generator, device=device) * torch.randn(lines, 1, generator=generator, device=device)
    made = quantizer.wanting(rowwise=True, columnwise=False).quantize(x.to(BF16)).plane(GEMMS["fprop"].left_plane)
    scale = made.scale * (0.5 + torch.rand(made.scale.shape, generator=generator, device=device))  # no power of two
    return Stored(made.data, scale, made.amax, made.layout)


def operands(kind: str, groups: str, device: torch.device) -> tuple[list[Stored], list[Stored], list[int]]:
    generator = torch.Generator(device).manual_seed(len(groups))
    columns, sizes = GROUPS[groups]
    left, right = KINDS[kind]
    lefts = [planes(left, lines, length, generator, device) for lines, length in sizes]
    return lefts, [planes(right, columns, length, generator, device) for _, length in sizes], [lines for lines, _ in sizes]


@pytest.mark.row("X08")
@pytest.mark.parametrize("fast", [False, True], ids=["split", "fast"])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("kind", KINDS)
def test_r5_groups_have_the_bits_of_the_library(kind, groups, fast, device):
    lefts, rights, lines = operands(kind, groups, device)
    for out_dtype in (BF16, torch.float16):
        wanted = [_scaled_mm(left, right, out_dtype=out_dtype, fast=fast) for left, right in zip(lefts, rights)]
        got = multiply_groups(lefts, rights, lines, out_dtype=out_dtype, fast=fast)
        assert torch.equal(got.view(torch.int16), torch.cat(wanted).view(torch.int16))


@pytest.mark.row("X08")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fast", [False, True], ids=["split", "fast"])
def test_r5_a_plain_product_has_the_bits_of_the_library(kind, fast, device):
    (left, _), (right, _), (lines, _) = operands(kind, "long", device)
    assert is_faster(left, right, fast=fast) == (kind not in ("1x128, 1x128", "rows"))
    wanted, out = _scaled_mm(left, right, out_dtype=BF16, fast=fast), torch.zeros(lines, 4096, dtype=BF16, device=device)
    assert torch.equal(multiply(left, right, out_dtype=BF16, fast=fast), wanted)
    assert multiply(left, right, out_dtype=BF16, fast=fast, out=out) is out
    assert torch.equal(out, wanted)


@pytest.mark.parametrize(
    ("lines", "length", "columns"), [(2**19 + 260, 4112, 144), (2**20 + 132, 144, 2064)], ids=["left", "result"]
)
@pytest.mark.parametrize("kind", ["tensors", "rows", "1x128, 128x128", "1x128, 1x128"])
def test_r10_products_past_2_31(kind, lines, length, columns, device):
    """The last lines are what they are alone."""
    generator = torch.Generator(device).manual_seed(1)
    (left, right), last = KINDS[kind], slice(lines - 388, lines)
    left, right = planes(left, lines, length, generator, device), planes(right, columns, length, generator, device)
    scale = {"tensors": left.scale, "rows": left.scale[last]}.get(
        kind, left.scale[:, last] if left.scale.ndim == 2 else left.scale
    )
    alone = Stored(left.data[last], scale.contiguous(), None, left.layout.replace(shape=(388, length)))
    got, wanted = (grouped_product([each], [right], [n], out_dtype=BF16, fast=True) for each, n in ((left, lines), (alone, 388)))
    assert torch.equal(got[last], wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_r11_r12_no_sync_same_bits_and_the_same_in_a_graph(kind, device):
    lefts, rights, lines = operands(kind, "small", device)
    first = grouped_product(lefts, rights, lines, out_dtype=BF16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = [grouped_product(lefts, rights, lines, out_dtype=BF16) for _ in range(20)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = grouped_product(lefts, rights, lines, out_dtype=BF16)
    graph.replay()
    assert all(torch.equal(each, first) for each in (*again, captured))


def test_r18_nan_shows_in_its_line_alone(device):
    lefts, rights, lines = operands("1x128, 128x128", "small", device)
    lefts[2].data[3, 5] = 0x7F
    got = grouped_product(lefts, rights, lines, out_dtype=BF16)
    row = sum(lines[:2]) + 3
    assert got[row].isnan().all()
    assert got.isnan().sum() == 144


@pytest.mark.slow
def test_r10_an_operand_of_more_than_2_31_bytes(device):
    generator, rows = torch.Generator(device).manual_seed(0), 2**31 // 8192 + 300
    few, right = (planes(KINDS["tensors"][0], lines, 8192, generator, device) for lines in (512, 256))
    many = few._replace(data=few.data.repeat(rows // 512 + 1, 1)[:rows], layout=few.layout.replace(shape=(rows, 8192)))
    got = grouped_product([many], [right], [rows], out_dtype=BF16, fast=True)
    part = grouped_product([few], [right], [512], out_dtype=BF16, fast=True)
    assert all(torch.equal(piece, part[: len(piece)]) for piece in got.split(512))
