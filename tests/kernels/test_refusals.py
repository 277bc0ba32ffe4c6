"""What kernels would misread is refused before anything is launched, by the same error as the definition's on a CPU."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from opfuse.errors import DtypeError, QuantizerError, ShapeError
from opfuse.formats import COLUMNWISE, E4M3, E5M2, NVFP4, ROWWISE, USAGES, fp8_block, fp8_row, fp8_tensor, mxfp8
from opfuse.kernels.casts import tensor as cast
from opfuse.kernels.casts.block import _work as block_work
from opfuse.kernels.casts.block import cast_block
from opfuse.kernels.casts.delayed import delayed_update
from opfuse.kernels.casts.dequantize import dequantize
from opfuse.kernels.casts.encoding import Blocks, Microscaled, RecordingScale
from opfuse.kernels.casts.nvfp4 import amaxes_nv, cast_nv
from opfuse.kernels.casts.row import cast_lines, cast_row
from opfuse.kernels.chains.chain import forward_chain
from opfuse.kernels.engine import registry
from opfuse.kernels.norms.cast import norm_cast
from opfuse.kernels.norms.norm import norm_forward
from opfuse.numerics.delayed import UpdateRule
from opfuse.numerics.hadamard import SIGNS
from opfuse.numerics.layouts import SCALE_DTYPES, Layout
from opfuse.numerics.norm import Norm
from opfuse.tensors.quantizers import Float8Quantizer

SHAPE = (64, 64)
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def one(dtype=FP32, size=1):
    return torch.ones(size, dtype=dtype)


ONE = one()


def planes(fmt, shape=SHAPE, usages=USAGES, **fields):
    return [Layout(fmt, usage, shape, **fields) for usage in usages]


def mixed(fmt, other, **fields):
    return [Layout(fmt, ROWWISE, SHAPE), Layout(other, COLUMNWISE, SHAPE, **fields)]


CALLS = {
    "tensor_amax": lambda run, x, layouts, **options: run(x, **options),
    "cast_current": lambda run, x, layouts, amax=ONE, **options: run(x, amax, layouts, **options),
    "cast_recording": lambda run, x, layouts, scale=ONE, amax=ONE: run(x, scale, amax, layouts),
    "cast_row": lambda run, x, layouts, **options: run(x, layouts, **options),
    "cast_lines": lambda run, x, layouts, amaxes=None: run(
        x, [one(size=64)] * len(layouts) if amaxes is None else amaxes, layouts
    ),
    "cast_block": lambda run, x, layouts, **options: run(x, layouts, **options),
    "cast_mx": lambda run, x, layouts, **options: run(x, layouts, **options),
    "amaxes_nv": lambda run, x, layouts: run(x, layouts),
    "cast_nv": lambda run, x, layouts, amaxes=None, **options: run(
        x, [one()] * len(layouts) if amaxes is None else amaxes, layouts, **options
    ),
}
KERNELS = {
    "tensor_amax": (cast.tensor_amax, fp8_tensor(E4M3)),
    "cast_current": (cast.cast_current, fp8_tensor(E4M3)),
    "cast_recording": (cast.cast_recording, fp8_tensor(E4M3)),
    "cast_row": (cast_row, fp8_row(E4M3)),
    "cast_lines": (cast_lines, fp8_row(E4M3)),
    "cast_block": (cast_block, fp8_block(E4M3, 1)),
    "cast_mx": (cast.cast_mx, mxfp8(E4M3)),
    "amaxes_nv": (amaxes_nv, NVFP4),
    "cast_nv": (cast_nv, NVFP4),
}
CASTS = [name for name in KERNELS if name != "tensor_amax"]


def unlaunched(*_, **__):
    raise AssertionError("launched")


def refused(kernel, error, match, call):
    """The launch function and the definition refuse with one message."""
    for run in (lambda *args, **kwargs: kernel.run(unlaunched, *args, **kwargs), kernel.reference, kernel):
        with pytest.raises(error, match=match):
            call(run)


@pytest.mark.parametrize("dtype", [FP64, torch.int32, torch.uint8], ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_a_dtype_that_kernels_do_not_read_is_refused(name, dtype):
    kernel, fmt = KERNELS[name]
    x = torch.ones(SHAPE, dtype=dtype)
    refused(kernel, DtypeError, f"got {dtype}", lambda run: CALLS[name](run, x, planes(fmt)))


@pytest.mark.parametrize("shape", [(32, 32), (32, 64), (64, 32), (128, 64)], ids=str)
@pytest.mark.parametrize("name", CASTS)
def test_layouts_of_another_matrix_are_refused(name, shape):
    kernel, fmt = KERNELS[name]
    x = torch.ones(SHAPE, dtype=BF16)
    match = rf"wants planes of \(64, 64\), got a layout of \({shape[0]}, {shape[1]}\)"
    refused(kernel, QuantizerError, match, lambda run: CALLS[name](run, x, planes(fmt, shape)))
    refused(kernel, QuantizerError, match, lambda run: CALLS[name](run, x, [*planes(fmt)[:1], *planes(fmt, shape)[1:]]))


@pytest.mark.parametrize("shape", [(4, 16, 64), (4096,)], ids=str)
@pytest.mark.parametrize("name", CASTS)
def test_what_is_no_matrix_is_refused(name, shape):
    kernel, fmt = KERNELS[name]
    refused(kernel, QuantizerError, "wants a matrix", lambda run: CALLS[name](run, torch.ones(shape), planes(fmt)))


@pytest.mark.parametrize("name", CASTS)
def test_no_planes_and_planes_of_one_usage_are_refused(name):
    kernel, fmt = KERNELS[name]
    x = torch.ones(SHAPE)
    refused(kernel, QuantizerError, "wants one plane or two, got none", lambda run: CALLS[name](run, x, []))
    twice = planes(fmt, usages=(ROWWISE, ROWWISE))
    refused(kernel, QuantizerError, "wants one plane for each usage", lambda run: CALLS[name](run, x, twice))


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("cast_current", mixed(fp8_tensor(E4M3), fp8_tensor(E5M2))),
        ("cast_recording", mixed(fp8_tensor(E4M3), fp8_tensor(E5M2))),
        ("cast_row", mixed(fp8_row(E4M3), fp8_row(E5M2))),
        ("cast_lines", mixed(fp8_row(E4M3), fp8_row(E5M2))),
        ("cast_block", mixed(fp8_block(E4M3, 1), fp8_block(E4M3, 2))),
        ("cast_mx", mixed(mxfp8(E4M3), mxfp8(E5M2))),
        ("cast_mx", mixed(mxfp8(E4M3), mxfp8(E4M3), swizzled=True)),
        ("cast_nv", mixed(NVFP4, NVFP4.replace(encode_max=256))),
        ("cast_nv", mixed(NVFP4, NVFP4, swizzled=True)),
        ("amaxes_nv", mixed(NVFP4, NVFP4.replace(per_row=True))),
    ],
)
def test_planes_of_two_formats_or_orders_are_refused(name, layouts):
    match = "wants planes of one format and one order of scales"
    refused(KERNELS[name][0], QuantizerError, match, lambda run: CALLS[name](run, torch.ones(SHAPE), layouts))


def test_one_plane_alone_may_be_rotated():
    x = torch.randn(SHAPE).bfloat16()
    layouts = mixed(NVFP4, NVFP4.replace(rht=SIGNS))
    launched = []
    cast_nv.run(lambda *call, **_: launched.append(call[1]), x, [one(), one()], layouts)
    assert launched == ["cast_tile"]
    cast_nv(x, amaxes_nv(x, layouts), layouts)


@pytest.mark.parametrize("name", CASTS)
def test_planes_of_another_family_are_refused(name):
    kernel, fmt = KERNELS[name]
    other = NVFP4 if fmt.family != "nv" else mxfp8(E4M3)
    refused(
        kernel,
        QuantizerError,
        f"planes of the family '{fmt.family}'",
        lambda run: CALLS[name](run, torch.ones(SHAPE), planes(other)),
    )


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("cast_mx", {"rows": 7}, "cast_mx rows: wants one of 1, 32, got 7"),
        ("cast_mx", {"rows": 16}, "cast_mx rows: wants one of 1, 32, got 16"),
        ("cast_mx", {"rounding": "up"}, "cast_mx rounding: wants one of 'ceil', 'floor', got 'up'"),
        ("cast_nv", {"rows": 7}, "cast_nv rows: wants one of 1, 16, got 7"),
        ("cast_nv", {"error": "BAD"}, "cast_nv error: wants one of None, 'MAE', 'MSE', got 'BAD'"),
        ("cast_nv", {"error": "NEAREST"}, "cast_nv error"),
        ("cast_nv", {"amaxes": [one()]}, "wants 2 amaxes, one for each plane, got 1"),
        ("cast_nv", {"amaxes": [one(), one(size=2)]}, r"cast_nv amax: wants torch.float32 \(1,\) on cpu, contiguous"),
        ("cast_nv", {"amaxes": [one(), one(FP64)]}, "cast_nv amax: .* got torch.float64"),
        ("cast_nv", {"seed": one(torch.int32)}, "cast_nv seed: wants torch.int64"),
        ("cast_current", {"amax": one(FP64)}, "cast_current amax: wants fp32 .* got torch.float64"),
        ("cast_recording", {"scale": one(size=2)}, r"cast_recording scale: wants fp32 .* got torch.float32 \(2,\)"),
        ("cast_recording", {"amax": one(torch.int32)}, "cast_recording amax: wants fp32 .* got torch.int32"),
        ("cast_recording", {"scale": torch.ones(1, device="meta")}, "cast_recording scale: wants fp32 .* on meta"),
    ],
)
def test_other_options_are_refused(name, options, match):
    kernel, fmt = KERNELS[name]
    refused(kernel, QuantizerError, match, lambda run: CALLS[name](run, torch.ones(SHAPE), planes(fmt), **options))


def test_a_refused_cast_leaves_the_amax_as_it_is():
    amax = torch.zeros(1)
    with pytest.raises(QuantizerError):
        cast.cast_recording(torch.ones(SHAPE), one(), amax, planes(fp8_tensor(E4M3), (32, 32)))
    assert amax.item() == 0


def test_rows_that_are_too_long_for_words_are_refused():
    """Only where there are several: the kernel multiplies the width by the number of a row."""
    wide = 1 << 31
    for rows, shape in ((1, (1, wide)), (2, (2, wide - 128))):
        assert (
            block_work(tuple(planes(fp8_block(E4M3, 1), shape, USAGES[:1])), shape, BF16, True, pow2=True)[1].blocks
            == shape[1] // 128
        ), rows
    with pytest.raises(ShapeError, match="cast_block: wants rows of less than 2147483648 columns, got 2147483648"):
        block_work(tuple(planes(fp8_block(E4M3, 1), (2, wide))), (2, wide), BF16, True, pow2=True)


# -- normalisations that end in a cast ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encode", "match"),
    [
        (RecordingScale(one(FP64), one(), planes(fp8_tensor(E4M3))[:1]), "fp32"),
        (RecordingScale(one(), one(FP32, 2), planes(fp8_tensor(E4M3))[:1]), "fp32"),
        (RecordingScale(one(), one(), planes(mxfp8(E4M3))[:1]), "planes of the family 'tensor'"),
        (Blocks(planes(mxfp8(E4M3))[:1]), "planes of the family 'block'"),
        (Microscaled(planes(mxfp8(E4M3))[:1], rounding="up"), "rounding: wants one of 'ceil', 'floor', got 'up'"),
        (Microscaled(planes(mxfp8(E4M3))[:1], rows=7), "rows: wants one of 1, 32, got 7"),
    ],
)
def test_a_normalisation_refuses_casts_that_its_kernel_would_misread(encode, match):
    def launch(variant, *_, **__):
        assert variant.source == "norm_forward.cu", "cast"

    for run in (lambda *args: norm_cast.run(launch, *args), norm_cast.reference):
        with pytest.raises(QuantizerError, match=match):
            run(torch.ones(SHAPE), Norm("l2_normalization"), encode)


# -- delayed scaling ---------------------------------------------------------------------------------------------------------

RULE = UpdateRule(448.0, 0, "max")


def count(dtype=torch.int32, size=1):
    return torch.zeros(size, dtype=dtype)


@pytest.mark.parametrize(
    ("histories", "scales", "counts", "rules", "match"),
    [
        ([torch.zeros(4, 3)[:, 0]], [one()], [count()], [RULE], r"contiguous.*strides \(3,\)"),
        ([torch.zeros(4, dtype=FP64)], [one()], [count()], [RULE], "torch.float64"),
        ([torch.zeros(2, 2)], [one()], [count()], [RULE], r"\(2, 2\)"),
        ([torch.zeros(0)], [one()], [count()], [RULE], r"\(0,\)"),
        ([torch.zeros(4)], [one(FP64)], [count()], [RULE], "torch.float64"),
        ([torch.zeros(4)], [one(size=2)], [count()], [RULE], r"\(2,\)"),
        ([torch.zeros(4)], [one()], [count(torch.int64)], [RULE], "torch.int64"),
        ([torch.zeros(4)], [one()], [count(size=2)], [RULE], r"\(2,\)"),
        ([torch.zeros(4)], [one()], [count()], [RULE._replace(algorithm="least")], "one of max, most_recent, got least"),
        ([torch.zeros(4)], [one()], [count()], [], "as many histories as scales, counts and rules, got 1, 1, 1 and 0"),
        ([torch.zeros(4)], [], [count()], [], "got 1, 0, 1 and 0"),
        ([torch.zeros(4)], [one()], [], [RULE], "got 1, 1, 0 and 1"),
        ([], [one()], [count()], [RULE], "got 0, 1, 1 and 1"),
    ],
)
def test_an_update_refuses_states_that_its_kernel_would_misread(histories, scales, counts, rules, match):
    calls = [delayed_update, delayed_update.reference]
    calls += [lambda *args: delayed_update.run(unlaunched, *args)]
    for call in calls:
        with pytest.raises(QuantizerError, match=match):
            call(histories, scales, counts, rules)


def test_an_update_takes_any_sequence_and_none_at_all():
    assert delayed_update([], [], [], []) is None
    assert delayed_update((), (), (), ()) is None
    history, scale = torch.tensor([2.0, 1.0]), one()
    delayed_update((history,), (scale,), (count(),), (RULE,))
    assert (history.tolist(), scale.item()) == ([0.0, 2.0], 224.0)
    delayed_update(histories=(history,), scales=(scale,), left_out=(count(),), rules=(RULE._replace(fp8_max=8.0),))
    assert (history.tolist(), scale.item()) == ([0.0, 0.0], 4.0)


@pytest.mark.parametrize("bad", [one(FP64), one(BF16), one(size=2), torch.ones(1, device="meta")], ids=str)
def test_a_quantizer_refuses_scales_that_its_kernel_would_misread(bad):
    with pytest.raises(QuantizerError, match="Float8Quantizer amax: wants fp32"):
        Float8Quantizer(one(), bad, torch.float8_e4m3fn)
    if bad.device.type == "cpu":
        with pytest.raises(QuantizerError, match="Float8Quantizer scale: wants fp32"):
            Float8Quantizer(bad, one(), torch.float8_e4m3fn)


# -- formats of a user's own -------------------------------------------------------------------------------------------------

CHANGES = {
    "block": lambda fmt: {"block": (1, 48) if fmt.block else (8, 64)},
    "square": lambda fmt: {"block": (64, 64)},
    "transposed": lambda fmt: {"transposed": not fmt.transposed},
    "element": lambda fmt: {"element": replace(fmt.element, name="own")},
}
"""Facts of a format that kernels have built in."""


def flat(result):
    """The tensors of a result."""
    return [result] if isinstance(result, torch.Tensor) else [tensor for each in result for tensor in flat(each)]


@pytest.mark.parametrize("usages", [USAGES[:1], USAGES[1:], USAGES], ids="+".join)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", CASTS)
def test_planes_of_a_format_of_a_users_own_are_cast_by_the_definition(name, change, usages):
    """Kernels would make other scales than the layout has room for, or put bytes where it does not look for them."""
    kernel, fmt = KERNELS[name]
    x, layouts = torch.randn(SHAPE).bfloat16(), planes(fmt.replace(**CHANGES[change](fmt)), usages=usages)
    got, wanted = (CALLS[name](run, x, layouts) for run in (partial(kernel.run, unlaunched), kernel.reference))
    assert all(torch.equal(a, b) for a, b in zip(flat(got), flat(wanted), strict=True))


DECODED = [
    (fmt, change) for fmt in (fp8_tensor(E4M3), fp8_row(E4M3), fp8_block(E4M3, 1), mxfp8(E4M3), NVFP4) for change in CHANGES
]
DECODED.remove((NVFP4, "transposed"))  # two codes of a byte are neighbours on a line


@pytest.mark.parametrize(("fmt", "change"), DECODED, ids=str)
def test_planes_of_a_format_of_a_users_own_are_decoded_by_the_definition(fmt, change):
    for layout in planes(fmt.replace(**CHANGES[change](fmt))):
        data, scale = torch.ones(layout.data_shape, dtype=torch.uint8), torch.ones(layout.scale_shape)
        amax = None if layout.amax_shape is None else torch.ones(layout.amax_shape)
        arrays, options = (data, scale.to(SCALE_DTYPES[layout.format.scale]), amax), {"layout": layout, "dtype": FP32}
        assert torch.equal(dequantize.run(unlaunched, *arrays, **options), dequantize.reference(*arrays, **options))


# -- where a call runs -------------------------------------------------------------------------------------------------------


class Reported:
    """A kernel's launch function that says that it ran."""

    def __init__(self, monkeypatch):
        self.ran = 0
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        monkeypatch.setattr(registry, "_enabled", lambda device: True)

    def of(self, kernel):
        def run(launch, *args, **kwargs):
            self.ran += 1

        return registry.Kernel(kernel.name, kernel.source, run, kernel.reference, kernel.tolerance)


@pytest.mark.parametrize("kernel", [forward_chain, norm_forward, cast.tensor_amax], ids=lambda kernel: kernel.name)
def test_parameters_run_on_kernels_as_tensors_do(kernel, monkeypatch):
    reported = Reported(monkeypatch)
    kernel = reported.of(kernel)
    for x in (torch.ones(2, 8), torch.nn.Parameter(torch.ones(2, 8))):
        kernel(x)
    assert reported.ran == 2


def test_the_first_argument_may_have_its_name(monkeypatch):
    assert cast.tensor_amax(x=torch.tensor([-3.0])).item() == 3.0
    reported = Reported(monkeypatch)
    reported.of(cast.tensor_amax)(x=torch.ones(2, 8))
    reported.of(delayed_update)(histories=(torch.ones(2),), scales=(one(),), left_out=(count(),), rules=(RULE,))
    assert reported.ran == 2


def test_other_tensors_than_dense_ones_run_on_the_definition(monkeypatch):
    class Own(torch.Tensor):
        pass

    reported = Reported(monkeypatch)
    reported.of(cast.tensor_amax)(torch.ones(2, 8).as_subclass(Own))
    assert reported.ran == 0
    assert not registry.is_dense(torch.ones(2).as_subclass(Own))
    assert registry.is_dense(torch.nn.Parameter(torch.ones(2)))
