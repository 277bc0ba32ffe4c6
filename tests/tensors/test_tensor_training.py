"""Quantized parameters in training: autograd, hooks, checkpointing, optimizers."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import opfuse
from opfuse.errors import OpfuseWarning, QuantizedTensorError
from opfuse.tensors import QuantizedTensor
from tests.tensors.quantized_samples import QUANTIZERS, SHAPE, make, parameter, planes, same_bytes, values
from tests.turns import in_turn

every_kind = pytest.mark.parametrize("kind", list(QUANTIZERS))


class Linear(torch.autograd.Function):
    """A user's linear that saves the quantized parameter itself, and reads one plane a direction."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.dequantize(usage="rowwise").t()

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        assert isinstance(w, QuantizedTensor)
        return dy @ w.dequantize(usage="columnwise"), dy.t() @ x


def gradients(w, x):
    """(dx, dw) of the formula, on decoded values."""
    dy = torch.ones(x.shape[0], w.shape[0], dtype=x.dtype)
    return dy @ w.detach().dequantize(usage="columnwise"), dy.t() @ x


@every_kind
def test_a_parameter_saved_for_backward_comes_back_as_itself(kind):
    w, x = parameter(kind), values((8, 96), seed=1).requires_grad_()
    y = Linear.apply(x, w)
    assert y.grad_fn.saved_tensors[1] is w
    y.sum().backward()
    dx, dw = gradients(w, x.detach())
    assert torch.equal(x.grad, dx)
    assert torch.equal(w.grad, dw)


IN_PLACE = {
    "copy_": lambda w, x: w.copy_(x),
    "copy_ of the same layout": lambda w, x: w.copy_(w.clone()),
    "mul_": lambda w, x: w.mul_(2),
    "data.view": lambda w, x: w.detach().view(-1).zero_(),
    "view": lambda w, x: w.view(2, 32, 96).copy_(x.view(2, 32, 96)),
    "setitem": lambda w, x: w.__setitem__(0, 1.0),
    "foreach": lambda w, x: torch._foreach_mul_([w], 2.0),
    "foreach copy": lambda w, x: torch._foreach_copy_([w], [x]),
    "out": lambda w, x: torch.mul(x, 2, out=w),
    "quantize_": lambda w, x: w.quantize_(x),
    "optimizer": lambda w, x: torch.optim.SGD([w], lr=0.1).step(),
}


@pytest.mark.row("U12")
@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.filterwarnings("ignore:a step on weights")
def test_u12_a_write_between_forward_and_backward_is_noticed(name):
    w, x = parameter("mxfp8"), values((8, 96), seed=1)
    w.grad = torch.ones_like(w)
    y = Linear.apply(x.requires_grad_(), w)
    before = w._version
    with torch.no_grad():
        IN_PLACE[name](w, values(seed=2))
    assert w._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("name", sorted(set(IN_PLACE) - {"optimizer"}))
def test_writes_bump_the_versions_of_planes(name):
    """Who saves the planes instead of the tensor is warned as well."""
    w = parameter("mxfp8")
    before = [t._version for t in w.record.tensors()]
    with torch.no_grad():
        IN_PLACE[name](w, values(seed=2))
    assert all(t._version > old for t, old in zip(w.record.tensors(), before))


def test_torch_saves_and_checks_the_parameter_too():
    w = parameter("mxfp8")
    x = values((8, 96), seed=1).requires_grad_()
    y = torch.nn.functional.linear(x, w) + (x * w[0]).sum()
    w.data = w.data.clone()
    y.sum().backward()
    y = (x.unsqueeze(1) * w).sum()
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_in_place_on_a_leaf_that_requires_grad_raises_as_for_any_tensor():
    w = parameter("mxfp8")
    for write in (lambda: w.add_(1), lambda: w.__setitem__(0, 1.0), lambda: w.copy_(values())):
        with pytest.raises(RuntimeError, match="leaf Variable"):
            write()
    assert same_bytes(planes(w), planes(make("mxfp8")))


def test_in_place_on_a_non_leaf_is_differentiated():
    w = parameter("identity", dtype=torch.float32)
    y = w.clone()
    y.mul_(3)
    y[0] = 0.0
    y.view(-1).mul_(2)
    y.sum().backward()
    expected = torch.full(SHAPE, 6.0)
    expected[0] = 0
    assert torch.equal(w.grad, expected)


@every_kind
def test_double_use_sums_the_gradients(kind):
    w, x = parameter(kind), values((8, 96), seed=1)
    (Linear.apply(x, w) + 2 * Linear.apply(x, w)).sum().backward()
    assert torch.equal(w.grad, gradients(w, x)[1] * 3)
    assert type(w.grad) is torch.Tensor


def test_hooks():
    w, seen = parameter("mxfp8"), []
    w.register_hook(lambda grad: seen.append("tensor") or grad * 2)
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p is w))
    y = w.dequantize()
    y.register_hook(lambda grad: seen.append(type(grad)))
    y.sum().backward()
    assert seen == [torch.Tensor, "tensor", True]
    assert torch.equal(w.grad, torch.full(SHAPE, 2, dtype=torch.bfloat16))


@pytest.mark.filterwarnings("ignore:a step on weights")
def test_optimizer_step_in_a_post_accumulate_hook():
    w = parameter("mxfp8")
    optimizer = torch.optim.SGD([w], lr=1.0)
    w.register_post_accumulate_grad_hook(lambda p: optimizer.step() or optimizer.zero_grad())
    before = w.dequantize().detach()
    w.dequantize().sum().backward()
    assert w.grad is None
    assert torch.equal(w.dequantize().detach(), make("mxfp8").quantize_(before - 1).dequantize())


def test_torch_autograd_grad_and_accumulation():
    w = parameter("mxfp8")
    (grad,) = torch.autograd.grad(w.dequantize().sum(), w)
    assert torch.equal(grad, torch.ones(SHAPE, dtype=torch.bfloat16))
    for _ in range(2):
        w.dequantize().sum().backward()
    assert torch.equal(w.grad, 2 * grad)


@pytest.mark.row("H25")
@every_kind
def test_save_on_cpu(kind):
    w, x = parameter(kind), values((8, 96), seed=1).requires_grad_()
    with torch.autograd.graph.save_on_cpu():
        y = Linear.apply(x, w)
    y.sum().backward()
    dx, dw = gradients(w, x.detach())
    assert torch.equal(x.grad, dx)
    assert torch.equal(w.grad, dw)


def test_saved_tensors_hooks_may_copy():
    w, x = parameter("mxfp8"), values((8, 96), seed=1).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        y = Linear.apply(x, w)
    y.sum().backward()
    assert torch.equal(x.grad, gradients(w, x.detach())[0])


@every_kind
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpoint(kind, use_reentrant):
    w, x = parameter(kind), values((8, 96), seed=1).requires_grad_()
    checkpoint(lambda x: Linear.apply(x, w).relu(), x, use_reentrant=use_reentrant).sum().backward()
    got, x.grad, w.grad = (x.grad, w.grad), None, None
    Linear.apply(x, w).relu().sum().backward()
    assert torch.equal(got[0], x.grad)
    assert torch.equal(got[1], w.grad)


def test_torch_autocast_casts_the_values():
    w, x = torch.nn.Parameter(make("mxfp8", dtype=torch.float32)), values((8, 96), seed=1, dtype=torch.float32)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        y = torch.nn.functional.linear(x, w)
    assert torch.equal(y, x.bfloat16() @ w.dequantize().detach().bfloat16().t())
    y.float().sum().backward()
    assert w.grad.dtype == torch.float32


def test_inference_mode():
    w, x = parameter("mxfp8"), values((8, 96))
    with torch.inference_mode():
        made = make("mxfp8")
        made.mul_(2)
        assert torch.equal(made + 0, make("mxfp8").quantize_(2 * w.dequantize()).dequantize())
        assert isinstance(w.view(-1), QuantizedTensor)
        assert isinstance(w.detach(), QuantizedTensor)
        assert isinstance(w[:32], QuantizedTensor)
        assert torch.equal(w.t(), w.dequantize().t())
        assert torch.equal(w.split(32, dim=1)[1], w.dequantize()[:, 32:64])
        assert torch.equal(torch.nn.functional.linear(x, w), torch.nn.functional.linear(x, w.dequantize()))
    assert torch.equal(made + 0, made.dequantize())
    w.t().sum().backward()


def test_casting_a_tensor_that_requires_grad_is_differentiable():
    x = values().requires_grad_()
    t = QUANTIZERS["mxfp8"]()(x)
    (t.dequantize() * 3).sum().backward()
    assert torch.equal(x.grad, torch.full(SHAPE, 3, dtype=torch.bfloat16))


def test_torch_compile_traces_through_the_planes():
    w, x = torch.nn.Parameter(make("mxfp8", dtype=torch.float32)), values((8, 96), seed=1, dtype=torch.float32)
    compiled = torch.compile(lambda x, w: torch.nn.functional.linear(x, w).relu(), backend="aot_eager")
    y = compiled(x, w)
    y.sum().backward()
    expected, grad, w.grad = torch.nn.functional.linear(x, w).relu(), w.grad, None
    expected.sum().backward()
    assert torch.equal(y, expected)
    assert torch.equal(grad, w.grad)


# -- optimizers --------------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda params, **kwargs: torch.optim.SGD(params, lr=0.3, **kwargs),
    "momentum": lambda params, **kwargs: torch.optim.SGD(params, lr=0.3, momentum=0.9, weight_decay=0.1, nesterov=True, **kwargs),
    "adam": lambda params, **kwargs: torch.optim.Adam(params, lr=0.3, **kwargs),
    "amsgrad": lambda params, **kwargs: torch.optim.Adam(params, lr=0.3, amsgrad=True, weight_decay=0.1, **kwargs),
    "adamw": lambda params, **kwargs: torch.optim.AdamW(params, lr=0.3, **kwargs),
    "adagrad": lambda params, **kwargs: torch.optim.Adagrad(params, lr=0.3, **kwargs),
    "rmsprop": lambda params, **kwargs: torch.optim.RMSprop(params, lr=0.3, **kwargs),
}


def plain_tensors(state):
    for value in state.values():
        if isinstance(value, dict):
            yield from plain_tensors(value)
        elif isinstance(value, torch.Tensor):
            yield value


@pytest.mark.filterwarnings("ignore:a step on weights")
@pytest.mark.few(apart=True)
@pytest.mark.parametrize(("kind", "foreach", "name"), in_turn(QUANTIZERS, (False, True), OPTIMIZERS, of=2))
def test_optimizers_move_the_decoded_values_and_keep_plain_state(kind, foreach, name):
    w, target = parameter(kind), values(seed=5).float()
    optimizer = OPTIMIZERS[name]([w], foreach=foreach)
    losses = []
    for _ in range(4):
        before = w.dequantize(usage="columnwise").detach()
        loss = (w.dequantize(torch.float32) - target).square().mean() * 500  # steps that four bits see
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert not torch.equal(w.dequantize(usage="columnwise").detach(), before)
    assert losses[-1] < losses[0]
    assert all(type(tensor) is torch.Tensor for tensor in plain_tensors(optimizer.state))
    assert isinstance(w, QuantizedTensor)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.filterwarnings("ignore:a step on weights")
def test_sgd_step_is_the_cast_of_the_plain_step(foreach):
    w = parameter("mxfp8")
    plain = w.dequantize().detach().clone().requires_grad_()
    for p in (w, plain):
        p.grad = values(seed=3)
        torch.optim.SGD([p], lr=0.25, foreach=foreach).step()
    assert same_bytes(planes(w), planes(QUANTIZERS["mxfp8"]()(plain.detach())))


@pytest.mark.filterwarnings("ignore:a step on weights")
def test_fused_adam_writes_back():
    w = parameter("mxfp8", dtype=torch.float32)
    w.grad = torch.ones(SHAPE)
    before = w.dequantize().detach()
    torch.optim.Adam([w], lr=0.5, fused=True).step()
    assert torch.allclose(w.dequantize().detach(), before - 0.5, atol=0.2)
    assert not torch.equal(w.dequantize().detach(), before)


def step(optimizer, kind="mxfp8", masters=False, **options):
    w = parameter(kind, dtype=torch.float32)
    w.grad = torch.ones(SHAPE)
    made = optimizer([w], **options)
    (opfuse.with_masters(made) if masters else made).step()


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.Adam, {"foreach": True}),
        (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
        (torch.optim.Adagrad, {"foreach": True}),
        (torch.optim.Adam, {"fused": True}),
        (torch.optim.Adam, {"fused": True, "lr": torch.tensor(1e-3)}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"fused": True, "lr": torch.tensor(1e-3)}),
        (torch.optim.SGD, {"foreach": False}),
        (torch.optim.SGD, {"foreach": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adafactor, {}),
        (torch.optim.NAdam, {}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else " ".join(value) or "plain",
)
def test_a_step_without_masters_warns(optimizer, options):
    with pytest.warns(OpfuseWarning, match="with_masters") as found:
        step(optimizer, **options)
    assert len(found) == 1


def test_a_step_with_masters_or_on_values_that_are_not_quantized_does_not_warn():
    """Warnings are errors here."""
    for optimizer in (torch.optim.AdamW, torch.optim.SGD):
        step(optimizer, masters=True)
        step(optimizer, "identity")
    with torch.no_grad():
        parameter("mxfp8").add_(1)  # by no optimizer


def test_optimizer_on_a_parameter_without_quantizer_raises_instead_of_doing_nothing():
    for foreach in (False, True):
        w = torch.nn.Parameter(QuantizedTensor(make("mxfp8").record))
        w.grad = torch.ones_like(w)
        with pytest.raises(QuantizedTensorError, match="quantizer"):
            torch.optim.SGD([w], lr=1.0, foreach=foreach).step()


@pytest.mark.filterwarnings("ignore:a step on weights")
def test_optimizer_state_dict_round_trip(tmp_path):
    w = parameter("mxfp8")
    optimizer = torch.optim.Adam([w])
    w.grad = values(seed=3)
    optimizer.step()
    torch.save({"w": w.detach(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    v = torch.nn.Parameter(state["w"])
    other = torch.optim.Adam([v])
    other.load_state_dict(state["optimizer"])
    for p, o in ((w, optimizer), (v, other)):
        p.grad = values(seed=4)
        o.step()
    assert same_bytes(planes(w), planes(v))


def test_clip_grad_norm_and_ema():
    w = parameter("mxfp8")
    w.grad = torch.ones_like(w)
    torch.nn.utils.clip_grad_norm_([w], 1.0)
    assert w.grad.norm().item() == pytest.approx(1, rel=1e-2)
    average = torch.optim.swa_utils.AveragedModel(module := torch.nn.ParameterList([w]))
    with torch.no_grad():
        module[0].zero_()
    average.update_parameters(module)
    average.update_parameters(module)
    assert isinstance(average.module[0], QuantizedTensor)
    assert torch.nn.utils.parameters_to_vector([w]).shape == (w.numel(),)
