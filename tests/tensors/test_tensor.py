"""QuantizedTensor: its interface, and what it must survive."""

import copy
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

from opfuse.errors import MissingPlaneError, QuantizedTensorError, ShapeError
from opfuse.tensors import QuantizedTensor
from opfuse.tensors.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from tests.processes import ran
from tests.tensors.quantized_samples import QUANTIZERS, SHAPE, make, parameter, planes, same_bytes, values

KINDS = list(QUANTIZERS)
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.row("H02")
@every_kind
def test_quantizer_call_returns_a_tensor_of_its_values(kind):
    quantizer, x = QUANTIZERS[kind](), values()
    t = quantizer(x)
    assert isinstance(t, QuantizedTensor)
    assert (t.shape, t.dtype, t.device) == (x.shape, x.dtype, x.device)
    assert t.is_contiguous()
    assert not t.requires_grad
    for usage in t.usages:
        assert torch.equal(t.dequantize(usage=usage), QUANTIZERS[kind]().quantize(x).dequantize(usage=usage))


@pytest.mark.row("U07")
@every_kind
def test_u07_dequantize_without_quantizer(kind):
    t = make(kind)
    bare = QuantizedTensor(t.record)
    assert bare.quantizer is None
    for usage in t.usages:
        assert torch.equal(bare.dequantize(torch.float32, usage), t.dequantize(torch.float32, usage))


@pytest.mark.row("U02")
def test_u02_the_quantizer_kept_is_a_copy():
    quantizer = MXFP8Quantizer()
    t = quantizer(values())
    assert t.quantizer is not quantizer
    assert t.quantizer == quantizer
    assert torch.nn.Parameter(t).quantizer == quantizer


@pytest.mark.cpu
@pytest.mark.row("H02")
def test_planes_usages_format_signature_and_repr():
    t = MXFP8Quantizer(columnwise=False)(values())
    assert t.usages == ("rowwise",)
    assert t.columnwise is None
    assert t.rowwise is t.plane("rowwise") is t.record.rowwise
    assert t.format.name == "mxfp8_e4m3"
    assert t.signature == ("rowwise=mxfp8_e4m3",)
    text = "QuantizedTensor(shape=(64, 96), dtype=torch.bfloat16, rowwise=mxfp8_e4m3, device=cpu"
    assert repr(t) == text + ")"
    assert repr(torch.nn.Parameter(t)) == text + ", requires_grad=True)"
    assert "grad_fn=CloneBackward0" in repr(torch.nn.Parameter(t).clone())


TURNED = {"current", "delayed", "row", "block1d", "block2d", "mxfp8", "mxfp8_swizzled", "nvfp4"}
"""Kinds whose columnwise plane is the rowwise one of the transpose."""


def test_another_quantizer_makes_later_casts_and_is_copied():
    """So what is set on it later changes no tensor that has it."""
    t, quantizer = make("mxfp8"), QUANTIZERS["mxfp8"]().wanting(columnwise=False)
    assert t.usages == ("rowwise", "columnwise")
    t.quantizer = quantizer
    assert t.quantizer == quantizer
    assert t.quantizer is not quantizer


@pytest.mark.row("H30")
@every_kind
def test_h30_columnwise_only_tensor_describes_and_dequantizes_itself(kind):
    """With the values of a tensor that was cast from the transpose, or near what was cast: no plane is read that is not there."""
    x, t = values(), make(kind)
    t.update_usage(rowwise_usage=False)
    assert (t.usages, t.rowwise) == (("columnwise",), None)
    text = repr(t)
    assert text.startswith(f"QuantizedTensor(shape=(64, 96), dtype=torch.bfloat16, columnwise={t.plane('columnwise').format}")
    assert "rowwise" not in text
    assert (t.size(), t.stride(), t.numel(), t.dtype) == (SHAPE, (96, 1), 64 * 96, x.dtype)
    assert t.format == t.plane("columnwise").format
    if kind in TURNED:
        turned = QUANTIZERS[kind]().wanting(rowwise=True, columnwise=False)(x.t().contiguous())
        assert torch.equal(t.dequantize(), turned.dequantize().t())
    got = t.dequantize()
    assert (got.shape, got.dtype) == (SHAPE, torch.bfloat16)
    assert (got - x).float().norm() < 0.15 * x.float().norm()
    assert torch.equal(t + 0, got)
    with pytest.raises(MissingPlaneError, match="dropped by update_usage"):
        t.plane("rowwise")


def test_wants_a_storage():
    with pytest.raises(QuantizedTensorError, match="QuantizedStorage, got Tensor"):
        QuantizedTensor(torch.zeros(2))


@every_kind
def test_update_usage_can_drop_a_plane_and_keeps_the_other(kind):
    t = make(kind)
    before = t.dequantize(usage="columnwise")
    t.update_usage(rowwise_usage=False, columnwise_usage=True)
    assert t.usages == ("columnwise",)
    assert torch.equal(t.dequantize(), before)


@pytest.mark.row("H29")
@every_kind
def test_h29_update_usage_is_atomic(kind):
    t = make(kind)
    t.update_usage(rowwise_usage=False)
    before = planes(t)
    with pytest.raises(MissingPlaneError, match="rowwise data"):
        t.update_usage(rowwise_usage=True, columnwise_usage=False)
    with pytest.raises(QuantizedTensorError, match="at least one plane"):
        t.update_usage(columnwise_usage=False)
    assert t.usages == ("columnwise",)
    assert same_bytes(planes(t), before)


@pytest.mark.row("H29")
@every_kind
def test_h29_dropping_both_planes_is_refused_before_either_is(kind):
    t = make(kind)
    before, usages = planes(t), t.usages
    assert usages == ("rowwise", "columnwise")
    with pytest.raises(QuantizedTensorError, match="at least one plane"):
        t.update_usage(False, False)
    assert t.usages == usages
    assert same_bytes(planes(t), before)


@pytest.mark.row("U09")
def test_u09_columnwise_data_is_derived_where_it_has_the_same_bytes_and_others_say_why_not():
    for quantizer in (Float8CurrentScalingQuantizer(torch.float8_e4m3fn), Float8BlockQuantizer(torch.float8_e4m3fn)):
        t = quantizer.wanting(columnwise=False)(values())
        t.update_usage(columnwise_usage=True)
        assert t.usages == ("rowwise", "columnwise")
        assert same_bytes(planes(t), planes(quantizer(values())))
    t = MXFP8Quantizer(columnwise=False)(values())
    with pytest.raises(MissingPlaneError, match="was asked for rowwise data only"):
        t.update_usage(columnwise_usage=True)


def test_update_usage_of_one_tensor_leaves_others_over_the_same_bytes():
    t = make("mxfp8")
    other = t.detach()
    t.update_usage(columnwise_usage=False)
    assert other.usages == ("rowwise", "columnwise")


@every_kind
def test_dequantize_gradient_passes_straight_through(kind):
    w = parameter(kind)
    y = w.dequantize(torch.float32)
    assert y.dtype == torch.float32
    assert type(y) is torch.Tensor
    y.backward(torch.arange(y.numel()).reshape(y.shape).float())
    assert type(w.grad) is torch.Tensor
    assert w.grad.dtype == torch.bfloat16
    assert torch.equal(w.grad, torch.arange(y.numel()).reshape(y.shape).bfloat16())


def test_identity_planes_are_not_the_callers_memory():
    for quantizer in (IdentityQuantizer(), HybridQuantizer(MXFP8Quantizer(), IdentityQuantizer())):
        x = values()
        t = quantizer(x)
        x.zero_()
        assert t.dequantize(usage="columnwise").abs().sum() > 0
        t.zero_()
        assert t.dequantize(usage="columnwise").abs().sum() == 0


# -- what it survives --------------------------------------------------------------------------------------------------


@every_kind
def test_parameter(kind):
    t = make(kind)
    w = torch.nn.Parameter(t)
    assert isinstance(w, torch.nn.Parameter)
    assert isinstance(w, QuantizedTensor)
    assert w.requires_grad
    assert w.is_leaf
    assert not torch.nn.Parameter(t, requires_grad=False).requires_grad
    module = torch.nn.Module()
    module.weight = w
    assert dict(module.named_parameters()) == {"weight": w}
    assert QuantizedTensor(t.record, requires_grad=True).requires_grad


@every_kind
def test_deepcopy_owns_its_bytes(kind):
    w = parameter(kind)
    w.sequence_parallel = True
    w.grad = torch.ones(SHAPE, dtype=torch.bfloat16)
    twin = copy.deepcopy(w)
    assert isinstance(twin, torch.nn.Parameter)
    assert twin.sequence_parallel
    assert torch.equal(twin.grad, w.grad)
    assert twin.grad is not w.grad
    assert same_bytes(planes(twin), planes(w))
    before = planes(twin)
    with torch.no_grad():
        w.zero_()
    assert same_bytes(planes(twin), before)
    pair = copy.deepcopy([w, w])
    assert pair[0] is pair[1]
    with pytest.raises(QuantizedTensorError, match="leaf"):
        copy.deepcopy(w.clone())


def holder(kind, **kwargs):
    module = torch.nn.Module()
    module.weight = parameter(kind, **kwargs)
    return module


@pytest.mark.row("H28")
@every_kind
@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_round_trip_is_bitwise(kind, assign):
    source, target = holder(kind), holder(kind, seed=1)
    state = source.state_dict()
    assert isinstance(state["weight"], QuantizedTensor)
    assert target.load_state_dict(state, assign=assign).missing_keys == []
    assert isinstance(target.weight, torch.nn.Parameter)
    assert same_bytes(planes(target.weight), planes(source.weight))


@every_kind
def test_load_state_dict_of_plain_values_casts_them(kind):
    target = holder(kind)
    target.load_state_dict({"weight": values(seed=1)})
    assert isinstance(target.weight, QuantizedTensor)
    assert same_bytes(planes(target.weight), planes(make(kind, seed=1)))


LOAD = """
import sys, torch
import opfuse.tensors
state = torch.load(sys.argv[1], weights_only=True)
for name, tensor in state.items():
    values = torch.load(sys.argv[2], weights_only=True)[name]
    assert type(tensor) is opfuse.tensors.QuantizedTensor, type(tensor)
    assert all(torch.equal(tensor.dequantize(usage=usage), values[usage]) for usage in tensor.usages), name
    assert isinstance(tensor, torch.nn.Parameter) == ("param" in name), name
    tensor.detach().zero_()
    assert not tensor.dequantize().any()
print(len(state))
"""


@pytest.mark.row("H28")
def test_torch_load_weights_only_in_a_fresh_process(tmp_path):
    tensors = {kind: make(kind) for kind in KINDS} | {f"{kind}.param": parameter(kind) for kind in KINDS}
    decoded = {name: {usage: t.dequantize(usage=usage).detach() for usage in t.usages} for name, t in tensors.items()}
    torch.save(tensors, tmp_path / "quantized.pt")
    torch.save(decoded, tmp_path / "values.pt")
    done = ran(LOAD, tmp_path / "quantized.pt", tmp_path / "values.pt")
    assert done.stdout.strip() == str(len(tensors))


class Own(MXFP8Quantizer):
    """A quantizer of the user's own."""


@pytest.mark.row("H28")
def test_h28_a_quantizer_of_ones_own_is_declared_safe_to_load(tmp_path):
    t, path = Own()(values()), tmp_path / "own.pt"
    torch.save(t, path)
    with pytest.raises(pickle.UnpicklingError, match="add_safe_globals"):
        torch.load(path, weights_only=True)
    with torch.serialization.safe_globals([Own]):
        loaded = torch.load(path, weights_only=True)
    assert loaded.quantizer == Own()
    assert same_bytes(planes(loaded), planes(t))


@pytest.mark.row("H28")
@every_kind
def test_h28_pickle_round_trip_is_bitwise(kind):
    w = parameter(kind)
    w.tag = "first"
    twin = pickle.loads(pickle.dumps(w))
    assert isinstance(twin, torch.nn.Parameter)
    assert (twin.tag, twin.quantizer, twin.requires_grad) == ("first", w.quantizer, True)
    assert same_bytes(planes(twin), planes(w))
    with torch.no_grad():
        twin.mul_(2)


def test_saved_planes_that_share_a_tensor_share_it_again(tmp_path):
    t = make("nvfp4")
    assert t.rowwise.amax is t.columnwise.amax
    for twin in (pickle.loads(pickle.dumps(t)), copy.deepcopy(t), t.clone(), t.to("meta")):
        assert twin.rowwise.amax is twin.columnwise.amax
    assert t.record.nbytes < sum(tensor.nbytes for tensor in t.record.tensors())


@every_kind
def test_meta_device_and_back(kind):
    module = holder(kind).to("meta")
    assert isinstance(module.weight, QuantizedTensor)
    assert module.weight.is_meta
    assert all(tensor.is_meta for tensor in module.weight.record.tensors())
    assert (module.weight @ torch.empty(96, 4, dtype=torch.bfloat16, device="meta")).shape == (64, 4)
    module.to_empty(device=torch.get_default_device())
    assert isinstance(module.weight, QuantizedTensor)
    assert isinstance(module.weight, torch.nn.Parameter)
    module.load_state_dict({"weight": values()})
    assert same_bytes(planes(module.weight), planes(make(kind)))


def test_meta_tensor_pickles():
    twin = pickle.loads(pickle.dumps(make("mxfp8").to("meta")))
    assert twin.is_meta
    assert twin.signature == make("mxfp8").signature


def test_to_dtype_and_the_dtype_methods_give_plain_values():
    t = make("mxfp8")
    exact = t.record.dequantize(torch.float32)
    for plain in (t.float(), t.to(torch.float32), t.type(torch.float32)):
        assert type(plain) is torch.Tensor
        assert torch.equal(plain, exact)
    assert type(t.double()) is type(t.half()) is type(t.to(torch.float64)) is torch.Tensor
    assert t.to(torch.bfloat16) is t
    assert type(t.bfloat16()) is torch.Tensor
    w = torch.nn.Parameter(t)
    w.to(torch.float32).sum().backward()
    assert torch.equal(w.grad, torch.ones_like(w))


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_module_to_dtype_keeps_the_bytes_and_changes_the_nominal_dtype(kind, dtype):
    module = holder(kind)
    parameter, before = module.weight, planes(module.weight)
    module.to(torch.get_default_device(), dtype)
    assert module.weight is parameter
    assert isinstance(parameter, QuantizedTensor)
    assert parameter.dtype == parameter.dequantize().dtype == dtype
    assert same_bytes(planes(parameter), before)


@pytest.mark.row("H24")
def test_h24_detach_and_data_are_new_tensors_over_the_same_bytes():
    w = parameter("mxfp8")
    for alias in (w.detach(), w.data, torch.ops.aten.alias(w)):
        assert isinstance(alias, QuantizedTensor)
        assert alias is not w
        assert alias.rowwise.data is w.rowwise.data
    w.data.zero_()
    assert not w.dequantize().any()


@pytest.mark.row("H36")
def test_h36_replacing_the_storage_of_one_leaves_the_detached_one():
    t = make("hybrid")
    other, expected = t.detach(), t.dequantize()
    t.data = make("hybrid", seed=1)
    t.update_usage(rowwise_usage=False)
    assert torch.equal(other.dequantize(), expected)
    assert other.usages == ("rowwise", "columnwise")


def test_assigning_data():
    w = parameter("mxfp8")
    new = make("current", seed=1)
    w.data = new
    assert w.signature == new.signature
    assert torch.equal(w.dequantize(), new.dequantize())
    w.data = values(seed=2)
    assert torch.equal(w.dequantize(), make("current", seed=2).dequantize())
    with pytest.raises(ShapeError, match="write into a QuantizedTensor"):
        w.data = torch.zeros(3, 3)


def test_swap_tensors():
    a, b = parameter("mxfp8"), parameter("current", seed=1)
    expected = [b.dequantize().detach(), a.dequantize().detach()]
    torch.utils.swap_tensors(a, b)
    assert torch.equal(a.dequantize(), expected[0])
    assert torch.equal(b.dequantize(), expected[1])
    assert a.format.family == "tensor"


@every_kind
def test_flatten_and_unflatten(kind):
    t = make(kind)
    names, context = t.__tensor_flatten__()
    inner = {name: getattr(t, name) for name in names}
    twin = QuantizedTensor.__tensor_unflatten__(inner, context, t.shape, t.stride())
    assert same_bytes(planes(twin), planes(t))
    for usage in t.record.usages:
        assert torch.equal(twin.dequantize(usage=usage), t.dequantize(usage=usage))
    assert (twin.quantizer, twin.record.why) == (t.quantizer, t.record.why)
    assert twin.__tensor_flatten__()[1] == context
    assert torch.utils._python_dispatch.is_traceable_wrapper_subclass(t)


@pytest.mark.row("H28")
@pytest.mark.filterwarnings("ignore")  # torch's own, of a checkpoint without process group
@every_kind
def test_distributed_checkpoint_round_trip_is_bitwise(kind, tmp_path):
    t, other = make(kind), make(kind, seed=1)
    dcp.save({"weight": t}, checkpoint_id=tmp_path, no_dist=True)
    dcp.load({"weight": other}, checkpoint_id=tmp_path, no_dist=True)
    assert same_bytes(planes(other), planes(t))


def test_deepcopy_of_a_delayed_scaling_tensor_has_a_state_of_its_own():
    w = make("delayed")
    twin = copy.deepcopy(w)
    twin.fill_(300)
    assert (twin.quantizer.amax.item(), w.quantizer.amax.item()) == (300, values().abs().max().item())


def test_dlpack_and_shared_memory_do_not_touch_a_null_pointer():
    t = make("identity", dtype=torch.float32)
    assert torch.equal(torch.from_dlpack(t), t.dequantize())
    assert t.share_memory_() is t
    assert t.is_shared()


def test_who_writes_arrays_to_files_is_told_what_to_save(tmp_path):
    """safetensors asks for ``untyped_storage().data_ptr()``, and for ``storage()`` where that fails."""
    t = make("mxfp8")
    with pytest.raises(RuntimeError):
        t.untyped_storage().data_ptr()
    with pytest.raises(QuantizedTensorError, match=r"wants a plain tensor.*Cure: save opfuse\.to_planes\(state_dict\)"):
        t.storage()
    safetensors = pytest.importorskip("safetensors.torch")
    with pytest.raises(QuantizedTensorError, match="wants a plain tensor"):
        safetensors.save_file({"t": t}, tmp_path / "t.safetensors")
    safetensors.save_file({"t": t.dequantize()}, tmp_path / "t.safetensors")
    assert torch.equal(safetensors.load_file(tmp_path / "t.safetensors")["t"].to(t.device), t.dequantize())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("nominal", [torch.float32, torch.bfloat16])
@pytest.mark.cpu
def test_every_way_to_plain_values_rounds_what_the_planes_hold_once(nominal, dtype):
    x = torch.randn(32, 32).to(nominal)
    shorthand = {torch.float32: "float", torch.bfloat16: "bfloat16", torch.float16: "half", torch.float64: "double"}[dtype]
    for quantizer in (
        Float8CurrentScalingQuantizer(torch.float8_e4m3fn),
        MXFP8Quantizer(),
        NVFP4Quantizer(),
        IdentityQuantizer(dtype=torch.float32),
    ):
        q = quantizer(x)
        wanted = q.dequantize(dtype)
        ways = (q.to(dtype), getattr(q, shorthand)(), q.type(dtype), q.to("cpu", dtype), q.to(torch.empty(0, dtype=dtype)))
        assert all(torch.equal(way, wanted) and way.dtype == dtype for way in ways)
        assert torch.equal(q.dequantize(), q.dequantize(nominal))
