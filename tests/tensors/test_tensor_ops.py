"""What operations do to a quantized tensor: compute, write back, keep the bytes, or refuse."""

import copy
import itertools
import pickle

import pytest
import torch

import opfuse
from opfuse import ops
from opfuse.errors import OpfuseError, QuantizedTensorError, ShapeError
from opfuse.recipes import MXFP8BlockScaling
from opfuse.tensors import QuantizedTensor
from opfuse.tensors.copied_view import CopiedView
from opfuse.tensors.quantizers import Float8BlockQuantizer, HybridQuantizer, IdentityQuantizer, MXFP8Quantizer
from opfuse.tensors.rows import slice_rows
from tests.tensors.quantized_samples import QUANTIZERS, SHAPE, make, parameter, planes, same_bytes, values
from tests.turns import in_turn

every_kind = pytest.mark.parametrize("kind", list(QUANTIZERS))

PURE = {
    "add": lambda t, x: t + x,
    "neg": lambda t, x: -t,
    "matmul": lambda t, x: x @ t.t(),
    "linear": torch.nn.functional.linear,
    "t": lambda t, x: t.t(),
    "permute": lambda t, x: t.permute(1, 0),
    "columns": lambda t, x: t[:, 3:7],
    "step": lambda t, x: t[::2],
    "row": lambda t, x: t[5],
    "mask": lambda t, x: t[t > 0],
    "cat": lambda t, x: torch.cat([t, x, t]),
    "stack": lambda t, x: torch.stack([t, t]),
    "sum": lambda t, x: t.sum(dim=0),
    "where": lambda t, x: torch.where(x > 0, t, 0),
    "view": lambda t, x: t.view(32, 192),
    "reshape": lambda t, x: t.reshape(2, 32, 3, 32),
    "expand": lambda t, x: t.expand(2, *SHAPE),
    "as_strided": lambda t, x: t.as_strided((4, 4), (1, 1), 2),
    "float": lambda t, x: t.float() + 0,
    "foreach": lambda t, x: torch._foreach_mul([t, x], 3)[0],
    "chunk columns": lambda t, x: t.chunk(3, dim=1)[1],
    "embedding": lambda t, x: torch.nn.functional.embedding(torch.tensor([3, 9]), t),
    "norm": lambda t, x: torch.linalg.vector_norm(t),
    "out": lambda t, x: torch.add(t, x, out=torch.empty_like(x)),
    "copy into plain": lambda t, x: torch.zeros_like(x).copy_(t),
    "plain in place": lambda t, x: x.clone().addcmul_(t, t),
}


VIEWS = {"t", "permute", "columns", "step", "row", "view", "reshape", "expand", "as_strided", "chunk columns"}


@pytest.mark.few
@every_kind
@pytest.mark.parametrize("name", PURE)
def test_operations_compute_on_the_decoded_values_and_return_plain_tensors(kind, name):
    t, x = make(kind), values(seed=1)
    before, decoded = planes(t), t.dequantize()
    args = (x, t) if name == "linear" else (t, x)
    result = PURE[name](*args)
    assert type(result) is (CopiedView if name in VIEWS else torch.Tensor)
    if name != "float":
        assert torch.equal(result, PURE[name](*(decoded if a is t else a for a in args)))
    assert same_bytes(planes(t), before)


FRESH = {
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "full_like": lambda t: torch.full_like(t, 3),
    "empty_like": torch.empty_like,
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "new_empty": lambda t: t.new_empty(3, 4),
    "new_ones": lambda t: t.new_ones(3, 4),
    "new_full": lambda t: t.new_full((3, 4), 2),
    "new_tensor": lambda t: t.new_tensor([1.0]),
    "new_zeros of other columns": lambda t: t.new_zeros(3),
    "new_zeros of another dtype": lambda t: t.new_zeros(SHAPE, dtype=torch.float32),
    "zeros_like of another dtype": lambda t: torch.zeros_like(t, dtype=torch.float32),
    "empty_like meta": lambda t: torch.empty_like(t, device="meta"),
}


@pytest.mark.row("H24")
@pytest.mark.parametrize("name", FRESH)
def test_h24_new_tensors_like_a_quantized_one_are_plain(name):
    t = make("mxfp8")
    torch.manual_seed(0)
    made = FRESH[name](t)
    torch.manual_seed(0)
    expected = FRESH[name](t.dequantize())
    assert type(made) is torch.Tensor
    assert (made.shape, made.dtype, made.device) == (expected.shape, expected.dtype, expected.device)
    if "empty" not in name:
        assert torch.equal(made, expected)


@pytest.mark.row("H24")
@every_kind
def test_h24_new_zeros_of_other_rows_keeps_the_format(kind):
    t = make(kind, shape=(256, 96))
    zeros = t.new_zeros((128, 96))
    assert isinstance(zeros, QuantizedTensor)
    assert zeros.signature == t.signature
    for usage in zeros.usages:
        assert torch.equal(zeros.dequantize(usage=usage), torch.zeros(128, 96, dtype=torch.bfloat16))
    before = planes(t)
    zeros.copy_(values((128, 96)))
    assert torch.equal(zeros.dequantize(), make(kind, shape=(128, 96)).dequantize())
    assert same_bytes(planes(t), before)


def test_new_zeros_that_the_format_cannot_have_are_plain():
    assert type(make("mxfp8").new_zeros((48, 96))) is torch.Tensor
    assert type(make("block2d", shape=(256, 96)).new_zeros((100, 96))) is torch.Tensor


# -- writing -----------------------------------------------------------------------------------------------------------

WRITES = {
    "zero_": lambda t, x: t.zero_(),
    "fill_": lambda t, x: t.fill_(2.5),
    "add_": lambda t, x: t.add_(x, alpha=0.5),
    "sub": lambda t, x: t.__isub__(x),
    "mul_": lambda t, x: t.mul_(3),
    "div_": lambda t, x: t.div_(x + 4),
    "addcmul_": lambda t, x: t.addcmul_(x, x, value=2),
    "addcdiv_": lambda t, x: t.addcdiv_(x, x + 4, value=2),
    "lerp_": lambda t, x: t.lerp_(x, 0.25),
    "clamp_": lambda t, x: t.clamp_(-0.5, 0.5),
    "itself": lambda t, x: t.add_(t),
    "out": lambda t, x: torch.mul(x, 2, out=t),
    "uniform_": lambda t, x: torch.nn.init.uniform_(t),
    "masked_fill_": lambda t, x: t.masked_fill_(x > 0, 1.0),
    "index_copy_": lambda t, x: t.index_copy_(0, torch.tensor([3]), x[:1]),
    "setitem row": lambda t, x: t.__setitem__(0, 7.0),
    "setitem column": lambda t, x: t.__setitem__((slice(None), 3), x[:, 0]),
    "setitem rows": lambda t, x: t.__setitem__(slice(3, 40), x[3:40]),
    "setitem mask": lambda t, x: t.__setitem__(x > 0, 0.0),
    "foreach add": lambda t, x: torch._foreach_add_([t], [x], alpha=2),
    "foreach mul": lambda t, x: torch._foreach_mul_([t], 0.5),
    "foreach addcdiv": lambda t, x: torch._foreach_addcdiv_([t], [x], [x + 4], 3),
    "foreach addcmul": lambda t, x: torch._foreach_addcmul_([t], [x], [x], 3),
    "foreach lerp": lambda t, x: torch._foreach_lerp_([t], [x], 0.5),
    "foreach zero": lambda t, x: torch._foreach_zero_([t]),
    "foreach copy": lambda t, x: torch._foreach_copy_([t], [x]),
    "copy_": lambda t, x: t.copy_(x),
    "copy_ broadcast": lambda t, x: t.copy_(x[0]),
    "data": lambda t, x: t.data.copy_(x),
    "detach": lambda t, x: t.detach().mul_(2),
    "view": lambda t, x: t.view(2, 32, 96).mul_(2),
    "flat": lambda t, x: t.view(-1).copy_(x.view(-1)),
    "unsqueeze": lambda t, x: t.unsqueeze(0).mul_(2),
    "detach_": lambda t, x: t.detach_().mul_(2),
}


@pytest.mark.filterwarnings("ignore:a step on weights")
@pytest.mark.few(apart=True)
@pytest.mark.row("U12")
@pytest.mark.parametrize(("kind", "name"), in_turn(QUANTIZERS, WRITES, of=2))
def test_u12_writes_reach_every_plane(kind, name):
    t, x = make(kind), values(seed=1)
    plain = t.dequantize().clone()
    torch.manual_seed(0)
    WRITES[name](t, x)
    torch.manual_seed(0)
    WRITES[name](plain, x)
    expected = QUANTIZERS[kind]()(plain)
    for usage in t.usages:
        assert torch.equal(t.dequantize(usage=usage), expected.dequantize(usage=usage)), usage


@every_kind
def test_quantize_casts_from_the_sources_own_dtype_in_place(kind):
    t = make(kind)
    tensors = t.record.tensors()
    x = values(seed=1, dtype=torch.bfloat16 if kind == "nvfp4_rotated" else torch.float32)
    assert t.quantize_(x) is t
    assert all(a is b for a, b in zip(t.record.tensors(), tensors))
    assert torch.equal(t.dequantize(), QUANTIZERS[kind]()(x).dequantize(torch.bfloat16))
    with pytest.raises(ShapeError):
        t.quantize_(x[0])


@pytest.mark.row("H17")
@every_kind
def test_h17_noop_flag_leaves_the_bytes(kind):
    t = make(kind)
    before = planes(t)
    t.quantize_(values(seed=1), noop_flag=torch.ones(1))
    assert same_bytes(planes(t), before)
    t.quantize_(make(kind, seed=1), noop_flag=torch.ones(1))
    assert same_bytes(planes(t), before)
    t.quantize_(values(seed=1), noop_flag=torch.zeros(1))
    assert same_bytes(planes(t), planes(make(kind, seed=1)))


@every_kind
def test_copy_between_the_same_layout_moves_bytes_and_needs_no_quantizer(kind):
    source = make(kind, seed=1)
    for write in (QuantizedTensor.copy_, QuantizedTensor.quantize_, lambda t, s: torch._foreach_copy_([t], [s])):
        t = QuantizedTensor(make(kind).record)
        write(t, source)
        assert same_bytes(planes(t), planes(source))


def test_copy_between_formats_casts():
    t, source = make("mxfp8"), make("current", seed=1)
    t.copy_(source)
    assert same_bytes(planes(t), planes(MXFP8Quantizer()(source.dequantize())))
    rowwise_only = make("mxfp8", seed=1)
    rowwise_only.update_usage(columnwise_usage=False)
    t.copy_(rowwise_only)
    assert same_bytes(planes(t), planes(MXFP8Quantizer()(rowwise_only.dequantize())))


def test_writes_without_a_quantizer_raise_and_change_nothing():
    t, x = QuantizedTensor(make("mxfp8").record), values(seed=1)
    before = planes(t)
    other = make("mxfp8")
    for name, write in WRITES.items():
        with pytest.raises(QuantizedTensorError, match="quantizer"):
            write(t, x)
        assert same_bytes(planes(t), before), name
    with pytest.raises(QuantizedTensorError, match="quantizer"):
        torch._foreach_mul_([other, t], 2)
    assert same_bytes(planes(other), planes(make("mxfp8")))


@pytest.mark.parametrize(
    "resize",
    [
        lambda t: t.resize_(3, 3),
        lambda t: t.t_(),
        lambda t: t.unsqueeze_(0),
        lambda t: t.set_(torch.zeros(2, dtype=torch.bfloat16)),
        lambda t: t.resize_as_(torch.zeros(2)),
    ],
)
def test_operations_that_change_the_structure_raise(resize):
    t = make("mxfp8")
    before = planes(t)
    with pytest.raises(QuantizedTensorError):
        resize(t)
    assert t.shape == SHAPE
    assert same_bytes(planes(t), before)


def test_a_write_that_the_format_refuses_raises():
    storage = HybridQuantizer(MXFP8Quantizer(), IdentityQuantizer()).quantize(values())
    t = QuantizedTensor(storage, quantizer=MXFP8Quantizer())
    with pytest.raises(OpfuseError, match="identity in the columnwise plane"):
        t.add_(1)


# -- views -------------------------------------------------------------------------------------------------------------


@pytest.mark.row("H24")
@every_kind
@pytest.mark.parametrize("shape", [SHAPE, (2, 32, 96), (1, 64, 96), (-1,), (8, 8, 96)])
def test_h24_views_of_other_leading_dimensions_share_the_bytes(kind, shape):
    t = make(kind)
    view = t.view(shape)
    assert isinstance(view, QuantizedTensor)
    assert view is not t
    assert view.record.tensors() == t.record.tensors()
    assert torch.equal(view.dequantize(), t.dequantize().view(shape))
    assert torch.equal(view + 0, t.dequantize().view(shape))
    assert isinstance(view.view(SHAPE), QuantizedTensor)
    with pytest.raises(RuntimeError, match="invalid for input"):
        t.view(3, 5)


def test_unsqueeze_squeeze_flatten_and_full_slices_are_views():
    t = make("mxfp8")
    for view in (
        t.unsqueeze(0),
        t.unsqueeze(0).squeeze(0),
        t.unsqueeze(1).squeeze(),
        t.view(2, 32, 96).flatten(0, 1),
        t[:],
        t[0:64],
    ):
        assert isinstance(view, QuantizedTensor)
        assert view.rowwise.data is t.rowwise.data
        view.add_(0)
    assert isinstance(t.as_strided(SHAPE, (96, 1)), QuantizedTensor)
    assert isinstance(t.as_strided(SHAPE, (96, 1), 0), QuantizedTensor)


CLONES = {
    "clone": lambda t: t.clone(),
    "clone in a layout": lambda t: t.clone(memory_format=torch.contiguous_format),
    "detached clone": lambda t: t.detach().clone(),
    "of a view": lambda t: t.view(2, 32, 96).clone().view(SHAPE),
    "deepcopy": copy.deepcopy,
    "copy_": lambda t: t.clone().zero_().copy_(t),
}


@pytest.mark.few
@pytest.mark.row("H24")
@every_kind
@pytest.mark.parametrize("name", CLONES)
def test_h24_copies_and_clones_own_their_bytes(kind, name):
    """They have the planes, the values and the quantizer of what they copy, and neither sees what is written into the other."""
    t = make(kind)
    twin = CLONES[name](t)
    assert isinstance(twin, QuantizedTensor)
    assert (twin.usages, twin.signature, twin.quantizer, twin.dtype) == (t.usages, t.signature, t.quantizer, t.dtype)
    assert same_bytes(planes(twin), planes(t))
    assert {each.untyped_storage().data_ptr() for each in twin.record.tensors()}.isdisjoint(
        each.untyped_storage().data_ptr() for each in t.record.tensors()
    )
    for written, other in ((twin, t), (t, twin)):
        before = planes(other)
        written.zero_()
        assert not written.dequantize().any()
        assert same_bytes(planes(other), before)


CUTS = {  # rows that a piece of (256, 96) can start at
    "current": 1, "delayed": 1, "row": 1, "block1d": 128, "block2d": 128, "mxfp8": 32, "mxfp8_swizzled": 32, "mxfp4": 32,
    "nvfp4": 16, "nvfp4_rows": 16, "nvfp4_rotated": 16, "hybrid": 1, "identity": 1,
}  # fmt: skip


@pytest.mark.row("H24")
@every_kind
def test_h24_rows_cut_between_blocks_stay_quantized_and_exact(kind):
    t, unit = make(kind, shape=(256, 96)), CUTS[kind]
    for start, stop in ((0, unit), (unit, 256), (256 - unit, 256), (0, 128), (128, 256)):
        piece = t[start:stop]
        assert isinstance(piece, QuantizedTensor)
        for usage in t.usages:
            assert torch.equal(piece.dequantize(usage=usage), t.dequantize(usage=usage)[start:stop])
        assert same_bytes(planes(piece), planes(piece.new_zeros(piece.shape).copy_(piece)))
    if unit > 1:
        assert type(t[1:unit]) is CopiedView
        assert torch.equal(t[1:unit], t.dequantize()[1:unit])
        assert type(t.split(unit + 1)[0]) is CopiedView
    assert all(isinstance(piece, QuantizedTensor) for piece in t.split(128))
    assert all(isinstance(piece, QuantizedTensor) for piece in (*t.chunk(2), *t.split([128, 128]), t.narrow(0, 0, 128)))
    assert type(t[5:5]) is CopiedView


@pytest.mark.parametrize("kind", ["block1d", "mxfp8", "mxfp8_swizzled", "nvfp4", "nvfp4_rotated", "row", "current"])
def test_rows_are_cut_between_blocks_or_not_at_all(kind):
    """Whatever the first and the last row: with one of them within a block there is no piece."""
    storage = make(kind, shape=(256, 32)).record
    unit, cuts = CUTS[kind], (0, 1, 15, 16, 31, 32, 33, 96, 127, 128, 129, 255, 256)
    for start, stop in itertools.combinations(cuts, 2):
        piece = slice_rows(storage, start, stop)
        assert (piece is not None) == (start % unit == 0 and (stop % unit == 0 or stop == 256)), (start, stop)
        if piece is not None:
            for usage in storage.usages:
                wanted = storage.dequantize(torch.float32, usage)[start:stop]
                assert torch.equal(piece.dequantize(torch.float32, usage), wanted)


@every_kind
def test_ragged_rows_cut_at_the_end(kind):
    rows = 208
    t = make(kind, shape=(rows, 96)) if "mxfp" not in kind and kind != "hybrid" else None
    if t is None:
        quantizer = QUANTIZERS[kind]().wanting(columnwise=False)
        t = quantizer(values((rows, 96)))
    piece = t[128:]
    assert isinstance(piece, QuantizedTensor)
    for usage in t.usages:
        assert torch.equal(piece.dequantize(usage=usage), t.dequantize(usage=usage)[128:])


def test_matrices_of_a_stack_stay_quantized():
    t = MXFP8Quantizer()(values((4, 64, 96)))
    for piece, expected in zip((t[2], *t.unbind(), t.select(0, -1)), t.dequantize()[[2, 0, 1, 2, 3, 3]]):
        assert torch.equal(piece, expected)
    assert isinstance(t[2], QuantizedTensor)
    assert isinstance(t[1:3], QuantizedTensor)
    assert type(t[:, 0]) is CopiedView
    with pytest.raises(IndexError):
        t[4]
    t[2] = 0.0
    assert not t[2].dequantize().any()
    assert t[1].dequantize().any()


@every_kind
@pytest.mark.parametrize("usage", ["rowwise", None])
def test_a_slice_follows_a_write_to_the_whole_or_stays_as_it_was(kind, usage):
    """In all of its planes, whose codes never stand beside scales of another time."""
    t = make(kind, shape=(256, 96))
    if usage is not None:
        t.update_usage(rowwise_usage=True, columnwise_usage=False)
    piece = t[128:]
    before = planes(piece)
    t.copy_(torch.randn(t.shape, generator=torch.Generator().manual_seed(1), device="cpu") * 1000)
    assert same_bytes(planes(piece), before) or same_bytes(planes(piece), planes(t[128:]))


def test_slices_take_no_values_and_their_clones_do():
    t = make("current")
    before = planes(t)
    piece = t[0:32]
    for view in (piece, piece.detach(), piece.view(-1), torch.nn.Parameter(piece).data):
        with pytest.raises(QuantizedTensorError, match="rows cut from a larger tensor"):
            view.zero_()
    with pytest.raises(QuantizedTensorError, match="rows cut from a larger tensor"):
        piece.view(-1).copy_(piece.view(-1).clone())
    assert same_bytes(planes(t), before)
    piece.clone().zero_()
    assert same_bytes(planes(t), before)


VIEW_WRITES = {
    "mul_": lambda view: view.mul_(2),
    "data": lambda view: view.data.zero_(),
    "detach": lambda view: view.detach().fill_(1),
    "a view of it": lambda view: view.unsqueeze(0)[..., :1].add_(1),
    "setitem": lambda view: view.__setitem__(..., 1.0),
    "copy_": lambda view: view.copy_(torch.zeros(view.shape)),
    "out": lambda view: torch.add(torch.ones(view.shape), 1, out=view),
    "foreach": lambda view: torch._foreach_mul_([view], 2.0),
}


@pytest.mark.few
@every_kind
@pytest.mark.parametrize("name", sorted(VIEWS))
def test_a_view_that_is_a_copy_refuses_every_write(kind, name):
    """What is written to it would not reach the tensor."""
    t = make(kind)
    before = planes(t)
    for source in (t, t.data):
        view = PURE[name](source, None)
        values = view.clone()
        for write in VIEW_WRITES.values():
            with pytest.raises(QuantizedTensorError, match="got a view of a QuantizedTensor, which is a copy"):
                write(view)
        assert torch.equal(view, values)
    assert same_bytes(planes(t), before)
    assert type(values) is torch.Tensor
    assert torch.equal(values.clone().mul_(2), view * 2)


@every_kind
def test_pieces_are_written_through_the_whole_or_not_at_all(kind):
    rows = {"a row": 0, "rows inside a block": slice(3, 5), "rows": slice(32, 64), "no rows": slice(5, 5)}
    for index in rows.values():
        t = make(kind, shape=(256, 96))
        before, wanted = planes(t), t.dequantize().clone()
        with pytest.raises(QuantizedTensorError):
            t.data[index].mul_(2)
        assert same_bytes(planes(t), before)
        t[index] = 1.5
        wanted[index] = 1.5
        assert same_bytes(planes(t), planes(make(kind, shape=(256, 96)).copy_(wanted)))


def test_a_view_that_is_a_copy_is_read_like_any_tensor():
    t = make("mxfp8", dtype=torch.float32)
    row, values = t[5], t.dequantize()[5]
    assert row.tolist() == values.tolist()
    assert row[0].item() == float(row[0]) == values[0].item()
    assert repr(row).startswith("CopiedView([")
    assert torch.equal(torch.from_dlpack(row), values)
    array = row.numpy(force=row.is_cuda)
    assert array.tolist() == values.tolist()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 0
    with torch.inference_mode():
        assert type(t[5][1:3]) is CopiedView
        assert torch.equal(t[5][1:3], values[1:3])
    for copied in (copy.deepcopy(row), pickle.loads(pickle.dumps(row)), row.clone(), row.to(torch.float32, copy=True)):
        assert type(copied) is torch.Tensor
        assert torch.equal(copied.mul_(2), values * 2)
    assert torch.equal(row, values)


def test_it_goes_through_ops_as_its_values_do():
    t, linear = make("mxfp8", dtype=torch.float32), ops.Linear(64, 32)
    for recipe in (None, MXFP8BlockScaling()):
        with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
            assert torch.equal(linear(t.t()), linear(t.dequantize().t()))


def test_gradients_flow_through_views_and_slices():
    w = parameter("mxfp8")
    (w.view(2, 32, 96)[1] * 2 + w[32:64] + w.t()[:, :32].t()).sum().backward()
    expected = torch.ones(SHAPE, dtype=torch.bfloat16)
    expected[32:] = 3
    assert type(w.grad) is torch.Tensor
    assert torch.equal(w.grad, expected)


@pytest.mark.parametrize("quantizer", [Float8BlockQuantizer(torch.float8_e4m3fn), MXFP8Quantizer()], ids=["blocks", "mx"])
def test_rows_one_below_the_other_keep_their_bytes(quantizer):
    parts = [
        QuantizedTensor(quantizer.quantize(torch.randn(rows, 160, dtype=torch.bfloat16)), quantizer=quantizer)
        for rows in (128, 256, 96)
    ]
    whole = torch.cat(parts)
    assert isinstance(whole, QuantizedTensor)
    assert torch.equal(whole.dequantize(), torch.cat([part.dequantize() for part in parts]))
    for usage in whole.usages:
        assert torch.equal(whole.dequantize(usage=usage), torch.cat([part.dequantize(usage=usage) for part in parts]))
    assert torch.equal(whole.plane("rowwise").data, torch.cat([part.plane("rowwise").data for part in parts]))
    in_blocks = quantizer.quantize(parts[0]).plane("rowwise").format.family == "mx"
    assert isinstance(torch.cat(parts[::-1]), QuantizedTensor) is in_blocks  # 96 rows end blocks of 32, and none of 128
    assert not isinstance(torch.cat([parts[0], parts[0].dequantize()]), QuantizedTensor)
    assert not isinstance(torch.cat(parts[:1] * 2, dim=1), QuantizedTensor)
