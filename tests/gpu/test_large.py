"""More than 2^31 elements: what chains, norms and casts make of the first and the last block is what they make of it alone."""

import pytest
import torch

from opfuse.formats import E4M3, ROWWISE, USAGES, fp8_block, fp8_row, fp8_tensor, mxfp8
from opfuse.kernels.casts.dequantize import dequantize
from opfuse.kernels.casts.encoding import Blocks, Microscaled, RecordingScale
from opfuse.kernels.casts.row import cast_lines, cast_row, line_amaxes
from opfuse.kernels.casts.tensor import cast_current, cast_mx, tensor_amax
from opfuse.kernels.chains.cast import backward_chain_cast, forward_chain_cast
from opfuse.kernels.chains.chain import backward_chain, forward_chain
from opfuse.kernels.norms.cast import norm_cast
from opfuse.kernels.norms.norm import norm_backward, norm_forward
from opfuse.numerics.chain import Stage
from opfuse.numerics.layouts import Layout
from opfuse.numerics.norm import Norm
from tests.kernels.cases.chains import OPS

pytestmark = pytest.mark.slow

SHAPES = [(2**21 + 32, 1024), (1040, 2**21 + 32)]
FORMATS = {"tensor": fp8_tensor(E4M3), "blocks": fp8_block(E4M3, 1), "mx": mxfp8(E4M3)}
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_usage = pytest.mark.parametrize("usage", USAGES)
each_format = pytest.mark.parametrize("kind", FORMATS)
each_norm = pytest.mark.parametrize("kind", ["rms_norm", "layer_norm", "l2_normalization"])


def matrix(shape, device):
    """4096 times the same values, which is fast to make; the last one is larger than all others."""
    x = torch.randn(shape[0] * shape[1] // 4096 + 1, device=device, dtype=torch.bfloat16).clamp_(-4, 4)
    x = x.repeat(4096)[: shape[0] * shape[1]].view(shape)
    x[-1, -1] = 5.0
    return x


def ends(shape):
    """The first and the last block of 128 x 128."""
    return (slice(0, 128),) * 2, tuple(slice((n - 1) // 128 * 128, n) for n in shape)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def same(got, wanted):
    return got.dtype == wanted.dtype and got.shape == wanted.shape and torch.equal(bits(got), bits(wanted))


def encoding(kind, usage, shape, device):
    layouts = [Layout(FORMATS[kind], usage, tuple(shape))]
    if kind == "tensor":
        return RecordingScale(torch.full((1,), 60.0, device=device), torch.zeros(1, device=device), layouts)
    return Blocks(layouts) if kind == "blocks" else Microscaled(layouts)


def assert_same_part(whole, layout, part, small, inner):
    """Codes of ``part``, and what they stand for, of a plane of the whole and of one of the part alone."""
    here = part if layout.usage == ROWWISE or layout.across else part[::-1]
    assert same(whole[0][here], small[0])
    values, wanted = (dequantize(*each, None, layout=of, dtype=torch.bfloat16) for each, of in ((whole, layout), (small, inner)))
    assert same(values[part], wanted)


@each_shape
@each_usage
def test_r10_microscaled_cast_past_2_31(usage, shape, device):
    x, layout = matrix(shape, device), Layout(FORMATS["mx"], usage, shape)
    (plane,) = cast_mx(x, [layout])
    for part in ends(shape):
        alone = x[part].contiguous()
        inner = Layout(FORMATS["mx"], usage, tuple(alone.shape))
        (small,) = cast_mx.reference(alone, [inner])
        assert_same_part(plane, layout, part, small, inner)


@each_shape
@each_usage
def test_r10_current_cast_past_2_31(usage, shape, device):
    x, layout = matrix(shape, device), Layout(FORMATS["tensor"], usage, shape)
    amax = tensor_amax(x)
    assert amax.item() == 5.0
    (data,), scale = cast_current(x, amax, [layout])
    for part in ends(shape):
        alone = x[part].contiguous()
        inner = Layout(FORMATS["tensor"], usage, tuple(alone.shape))
        (codes,), small_scale = cast_current.reference(alone, amax, [inner])
        assert_same_part((data, scale), layout, part, (codes, small_scale), inner)


@each_shape
@each_usage
def test_r10_row_cast_past_2_31(usage, shape, device):
    x, layout = matrix(shape, device), Layout(fp8_row(E4M3), usage, shape)
    (amax,) = line_amaxes(x, [usage])
    assert torch.equal(amax, x.abs().amax(1 if usage == ROWWISE else 0).float())
    (known,), (plane,) = cast_lines(x, [amax], [layout]), cast_row(x, [layout])
    assert all(same(*both) for both in zip(known, plane))
    for part in ends(shape):
        alone = x[part].contiguous()
        inner, lines = Layout(fp8_row(E4M3), usage, tuple(alone.shape)), part[usage != ROWWISE]
        ((codes, scale),) = cast_lines.reference(alone, [amax[lines].contiguous()], [inner])
        assert_same_part(plane, layout, part, (codes, scale), inner)


def chain(bias):
    """Exact, so that the definition gives the same bits."""
    return [Stage(OPS["bias"], {"bias": bias}), Stage(OPS["relu"])]


@each_shape
def test_r10_chain_past_2_31(shape, device):
    """Forward and backward; the bias gradient against fp64."""
    x, dy = matrix(shape, device), matrix(shape, device).abs_()
    bias = torch.randn(shape[1], device=device, dtype=torch.bfloat16)
    y, kept = forward_chain(x, chain(bias), keep=(1,))
    dx, (of_bias, _) = backward_chain(dy, chain(bias), kept)
    for part in ends(shape):
        wanted, wanted_kept = forward_chain.reference(x[part].contiguous(), chain(bias[part[1]].contiguous()), keep=(1,))
        assert same(y[part], wanted)
        assert same(kept[1][part], wanted_kept[1])
        wanted, _ = backward_chain.reference(dy[part].contiguous(), chain(bias[part[1]].contiguous()), wanted_kept)
        assert same(dx[part], wanted)
    torch.testing.assert_close(of_bias["bias"].double(), dx.sum(0, dtype=torch.float64), rtol=2**-7, atol=0)


@each_shape
@each_usage
@each_format
def test_r10_chain_and_cast_past_2_31(kind, usage, shape, device):
    x, bias = matrix(shape, device), torch.randn(shape[1], device=device, dtype=torch.bfloat16)
    encode = encoding(kind, usage, shape, device)
    (plane,), _, _ = forward_chain_cast(x, chain(bias), encode)
    for part in ends(shape):
        inner = encoding(kind, usage, [s.stop - s.start for s in part], device)
        (small,), _, _ = forward_chain_cast.reference(x[part].contiguous(), chain(bias[part[1]].contiguous()), inner)
        assert_same_part(plane, encode.layouts[0], part, small, inner.layouts[0])


@each_shape
@each_usage
@each_format
def test_r10_backward_chain_and_cast_past_2_31(kind, usage, shape, device):
    x = matrix(shape, device)
    dy, bias = x.flip(0), torch.zeros(shape[1], device=device, dtype=torch.bfloat16)
    encode = encoding(kind, usage, shape, device)
    (plane,), _, _ = backward_chain_cast(dy, chain(bias), {1: x}, encode)
    for part in ends(shape):
        inner = encoding(kind, usage, [s.stop - s.start for s in part], device)
        args = dy[part].contiguous(), chain(bias[part[1]].contiguous()), {1: x[part].contiguous()}
        (small,), _, _ = backward_chain_cast.reference(*args, inner)
        assert_same_part(plane, encode.layouts[0], part, small, inner.layouts[0])


def norm_of(kind, columns, device):
    if kind == "l2_normalization":
        return Norm(kind)
    weight, bias = torch.randn(2, columns, device=device, dtype=torch.bfloat16)
    return Norm(kind, weight, bias if kind == "layer_norm" else None)


@each_shape
@each_norm
def test_r10_norm_past_2_31(kind, shape, device):
    """Forward and backward, by whole rows; the weight gradient against fp64, added up in pieces."""
    x, dy, norm = matrix(shape, device), matrix(shape, device).abs_(), norm_of(kind, shape[1], device)
    y, statistics = norm_forward(x, norm)
    grads = norm_backward(dy, x, norm, statistics)
    for rows, _ in ends(shape):
        wanted, small = norm_forward(x[rows].clone(), norm)
        assert same(y[rows], wanted)
        assert same(statistics.rstd[rows], small.rstd)
        assert same(grads.x[rows], norm_backward(dy[rows].clone(), x[rows].clone(), norm, small).x)
    if norm.weight is not None:
        exact = torch.zeros(shape[1], device=device, dtype=torch.float64)
        step = max(1, 2**27 // shape[1])
        for start in range(0, shape[0], step):
            rows = slice(start, start + step)
            mean = 0 if statistics.mean is None else statistics.mean[rows, None].double()
            exact += (dy[rows].double() * (x[rows].double() - mean) * statistics.rstd[rows, None].double()).sum(0)
        assert (grads.weight.double() - exact).norm() < 2**-7 * exact.norm()


@each_shape
@each_usage
@each_norm
def test_r10_norm_and_cast_past_2_31(kind, usage, shape, device):
    x, norm = matrix(shape, device), norm_of(kind, shape[1], device)
    encode = encoding("tensor", usage, shape, device)
    ((data, _),), statistics = norm_cast(x, norm, encode)
    for rows, _ in ends(shape):
        inner = encoding("tensor", usage, (rows.stop - rows.start, shape[1]), device)
        ((codes, _),), small = norm_cast(x[rows].clone(), norm, inner)
        assert same(data[rows] if usage == ROWWISE else data[:, rows], codes)
        assert same(statistics.rstd[rows], small.rstd)
