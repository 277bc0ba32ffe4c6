"""R10: which products a device takes. The rules are asked of stored arrays alone, so they are the same on a CPU."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opfuse import formats
from opfuse.kernels.products import emulated
from opfuse.kernels.products import native as gemm_native
from opfuse.kernels.products.emulated import operand
from opfuse.kernels.products.hopper import is_faster
from opfuse.kernels.products.native import (
    BACKENDS,
    Machine,
    Stored,
    invariant_refusal,
    layout_refusal,
    multiply,
    refusal,
)
from opfuse.numerics.layouts import layout_of
from opfuse.numerics.sums import balanced
from opfuse.runtime.replay.recorder import Recorder
from opfuse.tensors.gemm import GEMMS, gemm, gemm_of_groups
from opfuse.tensors.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8RowQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from opfuse.tensors.storage import QuantizedStorage
from tests.tensors.quantized_samples import Blocks64

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
HOPPER = Machine((9, 0), (13, 0))
DTYPES = BACKENDS["tensor"][0].outputs
QUANTIZERS = {
    "tensor": Float8CurrentScalingQuantizer(E4M3),
    "tensor e5m2": Float8CurrentScalingQuantizer(E5M2),
    "row": Float8RowQuantizer(E4M3),
    "row e5m2": Float8RowQuantizer(E5M2),
    "1x128": Float8BlockQuantizer(E4M3, block_scaling_dim=1),
    "1x128 e5m2": Float8BlockQuantizer(E5M2, block_scaling_dim=1),
    "128x128": Float8BlockQuantizer(E4M3, block_scaling_dim=2),
    "mx": MXFP8Quantizer(),
    "nv": NVFP4Quantizer(),
    "1x64": Blocks64(),
}


def stored(kind: str, lines: int, length: int, plane: str = "rowwise") -> Stored:
    shape = (lines, length) if plane == "rowwise" else (length, lines)
    found = QUANTIZERS[kind].quantize(torch.randn(shape, dtype=BF16)).plane(plane)
    return Stored(found.data, found.scale, found.amax, found.layout)


def refused(left: Stored, right: Stored, out_dtype: torch.dtype = BF16, machine: Machine = HOPPER) -> str:
    return refusal(left, right, out_dtype, machine)


@pytest.mark.parametrize("plane", ["rowwise", "columnwise"])
@pytest.mark.parametrize(
    "kinds",
    [
        ("tensor", "tensor"),
        ("tensor e5m2", "tensor"),
        ("row", "row"),
        ("row e5m2", "row"),
        ("1x128", "128x128"),
        ("1x128", "1x128"),
        ("128x128", "1x128"),
    ],
)
@pytest.mark.parametrize("sizes", [(256, 512, 1024), (4, 16, 16), (132, 144, 272), (64, 48, 384)])
def test_r10_sizes_that_the_device_takes(sizes, kinds, plane):
    m, n, k = sizes
    left, right = stored(kinds[0], m, k, plane), stored(kinds[1], n, k, plane)
    assert [refused(left, right, dtype) for dtype in DTYPES] == [""] * 3


@pytest.mark.parametrize(
    ("kinds", "sizes", "reason"),
    [
        (("tensor", "tensor"), (64, 64, 72), "length of the sum: wants a positive multiple of 16, got 72"),
        (("tensor", "tensor"), (64, 72, 64), "right lines: wants a positive multiple of 16, got 72"),
        (("tensor", "tensor"), (0, 64, 64), "left lines: wants at least 1, got 0"),
        (("tensor", "tensor"), (64, 64, 0), "length of the sum: wants a positive multiple of 16, got 0"),
        (("tensor e5m2", "tensor e5m2"), (64, 64, 64), "elements: wants at most one e5m2, got ('e5m2', 'e5m2')"),
        (("row e5m2", "row e5m2"), (64, 64, 64), "elements: wants at most one e5m2, got ('e5m2', 'e5m2')"),
        (("row", "row"), (64, 72, 64), "right lines: wants a positive multiple of 16, got 72"),
        (("1x128", "128x128"), (130, 64, 256), "left lines with scales of their own: wants a multiple of 4, got 130"),
        (("1x128 e5m2", "128x128"), (64, 64, 256), "elements: wants e4m3 twice, got ('e5m2', 'e4m3')"),
        (("1x128", "1x128"), (64, 64, 200), "length of the sum: wants a positive multiple of 16, got 200"),
        (("mx", "mx"), (64, 64, 64), "compute capability: wants >= 10.0 and < 13.0, got 9.0"),
        (("nv", "nv"), (64, 64, 64), "compute capability: wants >= 10.0 and < 13.0, got 9.0"),
        (("1x64", "1x64"), (64, 64, 64), "formats: wants those of opfuse.formats, got blocks64 and blocks64"),
    ],
)
def test_r10_the_reason_names_wanted_and_got(kinds, sizes, reason):
    m, n, k = sizes
    assert refused(stored(kinds[0], m, k), stored(kinds[1], n, k)) == reason


@pytest.mark.parametrize(
    ("kinds", "sizes", "own"),
    [
        (("1x128", "128x128"), (130, 64, 256), ""),
        (("1x128", "1x128"), (3, 16, 16), ""),
        (("tensor e5m2", "tensor"), (5, 48, 272), ""),
        (
            ("128x128", "1x128"),
            (64, 64, 256),
            "blocks: wants 1x128 on the left, 1x128 or 128x128 on the right, got ((128, 128), (1, 128))",
        ),
        (("row", "row e5m2"), (3, 64, 256), ""),
        (("mx", "mx"), (64, 64, 256), "no native product of mx formats"),
        (("tensor", "tensor"), (64, 72, 64), "right lines: wants a positive multiple of 16, got 72"),
    ],
)
def test_r10_what_the_own_product_takes(kinds, sizes, own):
    """Lines with scales of their own in any number, but results of 16 bits alone."""
    m, n, k = sizes
    operands = stored(kinds[0], m, k), stored(kinds[1], n, k)
    assert refusal(*operands, BF16, HOPPER, own=True) == own
    assert own or refusal(*operands, torch.float32, HOPPER, own=True) == "result: wants bfloat16 or float16, got float32"


@pytest.mark.parametrize(
    ("kinds", "sizes", "fast", "faster"),
    [
        (("tensor", "tensor"), (1024, 1792, 256), True, True),
        (("tensor", "tensor"), (1024, 1664, 256), True, False),
        (("tensor", "tensor"), (1024, 512, 256), False, False),
        (("tensor", "tensor"), (1024, 1792, 8208), True, False),
        (("1x128", "128x128"), (2048, 1792, 128), False, True),
        (("1x128", "128x128"), (2048, 1664, 128), False, False),
        (("1x128", "1x128"), (1024, 2048, 128), False, False),
        (("1x128", "128x128"), (128, 8192, 128), False, False),
    ],
)
def test_the_faster_of_two_products_of_the_same_bits_is_made(kinds, sizes, fast, faster):
    m, n, k = sizes
    assert is_faster(stored(kinds[0], m, k), stored(kinds[1], n, k), fast=fast) is faster


def test_sums_are_added_in_place_where_that_is_faster():
    """Not on a CPU, and not for few tiles."""
    left, right = stored("1x128", 2048, 64), stored("1x128", 1792, 64)
    assert is_faster(left, right, fast=False, added=True)
    assert not is_faster(left, stored("1x128", 1664, 64), fast=False, added=True)
    assert not is_faster(left, stored("128x128", 1792, 64), fast=False, added=True)
    out = torch.zeros(2048, 1792)
    assert not gemm_native.accumulate([left], [right], out)
    assert not out.any()


def test_r10_odd_left_lines_need_no_scale_of_their_own():
    assert refused(stored("tensor", 37, 64), stored("tensor", 64, 64)) == ""
    assert refused(stored("row", 37, 64), stored("row", 64, 64)) == ""
    assert refused(stored("128x128", 130, 256), stored("1x128", 64, 256)) == ""


def test_tiles_of_one_number_of_lines_have_whole_scales_at_any_number():
    def why(kind: str, lines: int) -> str:
        return invariant_refusal(stored(kind, lines, 256).layout, stored("1x128", 64, 256).layout, BF16, HOPPER)

    assert refused(stored("1x128", 130, 256), stored("1x128", 64, 256)).startswith("left lines with scales of their own")
    assert why("1x128", 130) == ""
    assert why("128x128", 128) == "tiles: wants scales of single lines on the left, got 128x128 blocks"


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (Machine((0, 0), (0, 0)), "the CPU has no product of this format"),
        (Machine((8, 9), (13, 0)), "compute capability: wants >= 9.0 and < 13.0, got 8.9"),
        (Machine((10, 0), (12, 7)), "CUDA: wants >= 12.8, got 12.7"),
        (Machine((9, 0), (12, 8)), "CUDA: wants >= 12.9, got 12.8"),
    ],
)
def test_machines_that_do_not_have_the_product(machine, reason):
    left, right = stored("1x128", 64, 256), stored("128x128", 64, 256)
    assert refused(left, right, machine=machine) == reason
    assert refused(left, right, machine=Machine((9, 0), (12, 9))) == ""


@pytest.mark.parametrize(
    ("dims", "sizes", "reason"),
    [
        ((1, 2), (130, 64, 160), ""),
        ((2, 1), (64, 272, 96), ""),
        ((1, 2), (64, 64, 48), "length of the sum: wants a positive multiple of 32, got 48"),
        ((1, 0), (64, 64, 256), "block scales: wants powers of two on both sides, got powers of two and any fp32"),
    ],
)
def test_blackwell_takes_blocks_under_powers_of_two(dims, sizes, reason):
    """0: 128x128 blocks under any scales."""
    m, n, k = sizes
    left, right = (
        layout_of(formats.fp8_block(formats.E4M3, each or 2, pow2=each > 0), "rowwise", shape)
        for each, shape in zip(dims, ((m, k), (n, k)))
    )
    assert layout_refusal(left, right, BF16, Machine((10, 0), (13, 0))) == reason


def test_a_result_in_fp64_is_emulated():
    left, right = stored("tensor", 16, 64), stored("tensor", 16, 64)
    assert refused(left, right, torch.float64) == "result: wants float32 or bfloat16 or float16, got float64"


def shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """The same elements, contiguous, ``by`` elements off the start of an allocation."""
    buffer = x.new_empty(x.numel() + by)
    return buffer[by:].view(x.shape).copy_(x)


BROKEN = {
    "misaligned data": lambda p: p._replace(data=shifted(p.data, 8)),
    "strided data": lambda p: p._replace(data=p.data.repeat(1, 2)[:, : p.data.shape[1]]),
    "misaligned scales": lambda p: p._replace(scale=shifted(p.scale, 1)),
    "strided scales": lambda p: p._replace(scale=p.scale.t().contiguous().t()),
    "unpadded scales": lambda p: p._replace(scale=p.scale[:, :-1].contiguous()),
}


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("side", [0, 1])
def test_r10_contiguous_views_can_be_misaligned(broken, side):
    pair = [stored("1x128", 64, 384), stored("128x128", 256, 384)]
    assert refused(*pair) == ""
    pair[side] = BROKEN[broken](pair[side])
    assert refused(*pair).startswith("arrays: wants contiguous ones of their layout's shape on 16 bytes, got")


@pytest.mark.parametrize(
    ("kinds", "shapes"),
    [(("tensor", "tensor"), ((1,), (1,))), (("row", "row"), ((48, 1), (1, 64))), (("1x128", "128x128"), ((48, 2), (4, 1)))],
)
def test_r10_scales_are_given_as_the_library_reads_them(kinds, shapes, monkeypatch):
    given = []
    monkeypatch.setattr(gemm_native, "machine_of", lambda device: HOPPER)
    monkeypatch.setattr(gemm_native.F, "scaled_mm", lambda *args, **_: given.extend((*args[2], *args[4])))
    left, right = stored(kinds[0], 48, 256), stored(kinds[1], 64, 256)
    gemm_native._scaled_mm(left, right._replace(scale=shifted(right.scale, 1)), out_dtype=BF16, fast=False)
    assert tuple(scale.shape for scale in given) == shapes
    assert all(scale.data_ptr() % 16 == 0 for scale in given)


def test_one_scale_may_lie_anywhere():
    """Delayed scaling keeps the scales of several tensors in one array."""
    left = stored("tensor", 64, 64)
    assert refused(left._replace(scale=shifted(left.scale, 1)), stored("tensor", 64, 64)) == ""


@pytest.mark.parametrize("out_dtype", [*DTYPES, torch.float64])
def test_on_a_cpu_every_product_is_emulated_and_rounds_once(out_dtype):
    left, right = stored("tensor", 32, 64), stored("tensor", 48, 64)
    wide = multiply(left, right, out_dtype=torch.float32, fast=True)
    assert torch.equal(multiply(left, right, out_dtype=out_dtype), wide.to(out_dtype))


def test_only_products_per_tensor_and_per_row_can_be_summed_fast():
    assert {family for family, rows in BACKENDS.items() for row in rows if row.fast} == {"tensor", "row"}


@pytest.mark.parametrize("kind", ["mx", "nv"])
@pytest.mark.parametrize("name", GEMMS)
def test_u_operand_values_are_exact_in_bf16(kind, name):
    """What a GPU multiplies in bf16 are the values that the CPU multiplies in fp32."""
    storage: QuantizedStorage = QUANTIZERS[kind].quantize(torch.randn(64, 96).exp2() * torch.logspace(-9, 9, 96))
    plane = storage.plane(GEMMS[name].left_plane)
    values = operand(Stored(plane.data, plane.scale, plane.amax, plane.layout)).values
    assert values.shape == plane.layout.lines
    assert torch.equal(values.to(BF16).float(), values)


def test_u_the_last_places_of_bf16_are_the_only_ones_lost():
    """E8M0 codes 0 to 2 under E4M3: an error of at most 2^-134; the largest codes overflow alike."""
    plane = QUANTIZERS["mx"].quantize(torch.ones(32, 32)).plane("rowwise")
    plane = replace(plane, data=torch.arange(1024).remainder(256).view(32, 32).to(torch.uint8))
    for code in range(255):
        plane.scale.fill_(code)
        values = operand(Stored(plane.data, plane.scale, plane.amax, plane.layout)).values
        finite = values.isfinite()
        rounded = values.to(BF16).float()
        assert torch.equal(rounded.isfinite(), finite)
        lost = float((rounded - values)[finite].abs().max())
        assert (0 < lost <= 2.0**-134) if code < 3 else lost == 0


GROUPED = {"mx": MXFP8Quantizer(), "nv": NVFP4Quantizer(), "nv rotated": NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)}
GROUPED |= {"nv by row": NVFP4Quantizer(row_scaled_nvfp4=True)}


@pytest.mark.parametrize(
    ("name", "kind"), [*itertools.product(GEMMS, ("mx", "nv")), ("wgrad", "nv rotated"), ("fprop", "nv by row")]
)
def test_emulated_products_of_groups_have_the_bits_of_each_alone(name, kind):
    """Of more groups than a launch has; the last lines of each second one only fill a block."""
    quantizer, what = GROUPED[kind], GEMMS[name]
    sizes = [(64, 96, 32)[i % 3] for i in range(11)]
    shapes = {"input": 64, "grad_output": 96}
    pairs = []
    for size in sizes:
        left = quantizer.quantize(torch.randn(size, shapes[what.left], dtype=BF16) * 2.0 ** (size / 8))
        right = (size, 64) if name == "wgrad" else (96, 64)
        pairs.append((left, quantizer.quantize(torch.randn(right, dtype=BF16))))
    lines = [96 if name == "wgrad" else size - 5 * (i % 2) for i, size in enumerate(sizes)]
    for dtype in (BF16, torch.float32):
        got = gemm_of_groups(name, *zip(*pairs), lines, out_dtype=dtype)
        alone = [gemm(name, *pair, dtype=dtype)[:count] for pair, count in zip(pairs, lines)]
        assert torch.equal(got, torch.cat(alone))
    assert gemm_of_groups(name, *zip(*pairs), lines, out_dtype=BF16, invariant=True) is None


def test_u_gemm_asks_for_the_result_type_that_it_returns():
    x = QUANTIZERS["tensor"].quantize(torch.randn(32, 64))
    assert gemm("fprop", x, x, dtype=BF16).dtype == BF16
    assert gemm("fprop", x, x, dtype=BF16, out_dtype=torch.float32).dtype == torch.float32


def test_an_emulated_product_has_one_result_in_fp32_unless_somebody_may_hold_the_sums():
    """Of 8192 x 14336 values a second one is 448 MiB. A recording is no such holder: its tensors end with it."""
    lines = [emulated.Lines(torch.randn(16, 32), factor=torch.full((1, 1), 0.3 + i)) for i in range(2)]
    wanted = lines[0].values @ lines[1].values.t()
    for factor in balanced(lines[0].factor, lines[1].factor.t()):
        wanted = wanted * factor

    class Holder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mm.default:
                held.append((made, made.clone()))
            return made

    with Holder():
        held: list[tuple[torch.Tensor, torch.Tensor]] = []
        assert torch.equal(emulated.multiply(*lines), wanted)
    ((now, then),) = held
    assert torch.equal(now, then)
    sums: list[torch.Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulated, "_matrix_product", lambda a, b: sums.append(a @ b) or sums[-1])
        for recorded in (False, True):
            recorder = Recorder([])
            with recorder.recording() if recorded else contextlib.nullcontext():
                made = emulated.multiply(*lines)
            assert made.data_ptr() == sums[-1].data_ptr()
            assert torch.equal(made, wanted)
