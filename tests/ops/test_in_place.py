"""Ops that write into a tensor of the caller, and what autograd then knows of it."""

import gc
import weakref

import pytest
import torch

import opfuse
from opfuse import ops
from opfuse.errors import PipelineError, SavedTensorError, UnsupportedError
from tests.plans import plans_used

NONE = opfuse.RuleSet(())
every_level = pytest.mark.parametrize("rules", [None, NONE], ids=["fused", "unfused"])
PRODUCERS = {
    "linear": (lambda: [ops.Linear(8, 8)], "linear_add"),
    "linear without bias": (lambda: [ops.Linear(8, 8, bias=False)], "linear_add"),
    "scaled linear": (lambda: [ops.Linear(8, 8, bias=False), ops.ConstantScale(0.5)], "linear_scale_add"),
    "activation": (lambda: [ops.GELU()], None),
    "nothing": (list, None),
}


def build(producer, rules):
    make, rule = PRODUCERS[producer]
    return ops.Sequential(*make(), ops.AddExtraInput(in_place=True), rules=rules), rule


@every_level
@pytest.mark.parametrize("producer", list(PRODUCERS))
def test_the_extra_tensor_is_overwritten_and_is_the_output(producer, rules):
    model, rule = build(producer, rules)
    x, base = (torch.randn(3, 8, requires_grad=True) for _ in range(2))
    extra, wanted = base * 1, model[:-1](x) + base
    version = extra._version
    with plans_used() as plans:
        y = model(x, extra)
    assert (rules is None and rule in plans[0].fusions) or rule is None or rules is NONE
    assert y.data_ptr() == extra.data_ptr()
    assert extra._version > version
    torch.testing.assert_close(extra, wanted)
    assert extra.grad_fn is not None


@every_level
@pytest.mark.parametrize("producer", list(PRODUCERS))
@pytest.mark.parametrize("through", ["output", "extra tensor", "both"])
def test_gradients_flow_through_the_output_and_the_changed_tensor(producer, rules, through):
    model, _ = build(producer, rules)
    results = []
    for in_place in (True, False):
        torch.manual_seed(1)
        x, base = (torch.randn(3, 8, requires_grad=True) for _ in range(2))
        model.zero_grad()
        extra = base * 2
        if in_place:
            y = model(x, extra)
        else:
            y = extra = model[:-1](x) + extra
        used = {"output": [y], "extra tensor": [extra], "both": [y, extra]}[through]
        sum(tensor.square().sum() for tensor in used).backward()
        results.append([x.grad, base.grad, *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@every_level
@pytest.mark.parametrize("producer", list(PRODUCERS))
def test_the_extra_tensor_may_be_a_view(producer, rules):
    model, _ = build(producer, rules)
    results = []
    for in_place in (True, False):
        torch.manual_seed(1)
        x, leaf = torch.randn(3, 8, requires_grad=True), torch.randn(2, 3, 8, requires_grad=True)
        model.zero_grad()
        base = leaf * 2
        if in_place:
            y = model(x, base[1])
        else:
            y = model[:-1](x) + base[1]
            base = torch.stack([base[0], y])
        (y.square().sum() + base.sin().sum()).backward()
        results.append([base.detach(), x.grad, leaf.grad, *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


class AddTwice(ops.BasicOperation):
    """Overwrites both of its extra inputs."""

    num_extra_inputs = 2

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **_):
        for extra in basic_op_extra_inputs[0]:
            extra.add_(input_)
            basic_op_ctxs[0].dirty.append(extra)
        return input_ * 1, [()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **_):
        return grad_output, [()], [(None, None)]


def test_views_that_autograd_cannot_follow_are_refused():
    base = torch.randn(2, 3, 8, requires_grad=True) * 1
    with pytest.raises(UnsupportedError, match="wants a tensor to overwrite that is no view"):
        AddTwice()(torch.randn(3, 8, requires_grad=True), base[0], base[1])
    model = ops.Sequential(ops.MakeExtraOutput(in_place=True), ops.Linear(8, 8), ops.AddExtraInput(in_place=True))
    with pytest.raises(UnsupportedError, match="a view beside other outputs"):
        model(torch.randn(3, 8, requires_grad=True), base[0])


@every_level
def test_autograd_notices_that_a_saved_tensor_was_overwritten(rules):
    model, _ = build("linear", rules)
    base = torch.randn(3, 8, requires_grad=True)
    extra = base.exp()  # the exponential saves its result
    model(torch.randn(3, 8), extra)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        extra.sum().backward()


@every_level
@pytest.mark.parametrize(
    "extra", [lambda leaf: leaf, lambda leaf: leaf[:3], lambda leaf: leaf.view(4, 8)[1:]], ids=["leaf", "slice", "view"]
)
def test_a_leaf_that_wants_a_gradient_is_refused_unchanged(extra, rules):
    model, _ = build("linear", rules)
    leaf = torch.randn(4, 8, requires_grad=True)
    given, before = extra(leaf), leaf.detach().clone()
    with pytest.raises(PipelineError, match="wants a tensor to overwrite, got a leaf that requires grad"):
        model(torch.randn(*given.shape), given)
    assert torch.equal(leaf, before)
    with torch.no_grad():
        model(torch.randn(*given.shape), given)
    assert not torch.equal(leaf, before)


@every_level
def test_a_leaf_without_gradient_is_overwritten(rules):
    model, _ = build("linear", rules)
    x, extra = torch.randn(3, 8, requires_grad=True), torch.zeros(3, 8)
    y = model(x, extra)
    assert torch.equal(y, extra)
    assert extra.requires_grad
    extra.sum().backward()
    torch.testing.assert_close(x.grad, model[0].weight.detach().sum(0).expand(3, 8))


@every_level
def test_another_dtype_is_refused(rules):
    model, _ = build("linear", rules)
    extra = torch.zeros(3, 8, dtype=torch.bfloat16)
    with pytest.raises(PipelineError, match=r"wants dtype torch\.float32, that of the sum, got torch\.bfloat16"):
        model(torch.randn(3, 8), extra)
    assert not extra.any()


@every_level
@pytest.mark.parametrize("alias", [lambda h: h, lambda h: h.view(3, 8)], ids=["itself", "a view"])
def test_overwriting_what_the_product_saved_is_an_error(alias, rules):
    model, _ = build("linear", rules)
    h = torch.randn(3, 8, requires_grad=True) * 1
    with pytest.raises(SavedTensorError, match="in place"):
        model(h, alias(h)).sum().backward()


def test_what_a_later_op_of_the_same_node_saves_is_the_new_value():
    fused = ops.Sequential(ops.Linear(8, 8), ops.AddExtraInput(in_place=True), ops.GELU())
    results = []
    for rules in (None, NONE):
        torch.manual_seed(2)
        x, extra = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8)
        fused.zero_grad()
        ops.Sequential(*fused, rules=rules)(x, extra).sum().backward()
        results.append([x.grad, *(p.grad for p in fused.parameters())])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@every_level
def test_no_cycle_keeps_the_tensors_of_a_call_alive(rules):
    model, _ = build("linear", rules)
    gc.disable()
    try:
        extra = torch.randn(3, 8)
        y = model(torch.randn(3, 8, requires_grad=True), extra)
        alive = [weakref.ref(y), weakref.ref(extra), weakref.ref(y.grad_fn)]
        del y, extra
        assert [ref() for ref in alive] == [None, None, None]
    finally:
        gc.enable()


@every_level
@pytest.mark.parametrize("in_place", [False, True])
def test_make_extra_output_never_writes_the_callers_tensors(in_place, rules):
    model = ops.Sequential(ops.MakeExtraOutput(in_place=in_place), ops.Linear(8, 8, bias=False), rules=rules)
    x, weight = torch.randn(3, 8, requires_grad=True), model[1].weight.detach()
    with plans_used() as plans:
        y, extra = model(x)
    assert ("backward_linear_add" in plans[0].fusions) == (in_place and rules is None)
    dy, d_extra = torch.randn(3, 8), torch.randn(3, 8)
    kept = d_extra.clone()
    torch.autograd.backward([y, extra], [dy, d_extra])
    assert torch.equal(d_extra, kept)
    torch.testing.assert_close(x.grad, dy @ weight + d_extra)
    torch.testing.assert_close(model[1].weight.grad, dy.T @ x.detach())


@every_level
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("used", ["main", "extra"])
def test_make_extra_output_with_one_gradient_only(in_place, used, rules):
    model = ops.Sequential(ops.MakeExtraOutput(in_place=in_place), ops.Linear(8, 8, bias=False), rules=rules)
    x = torch.randn(3, 8, requires_grad=True)
    y, extra = model(x)
    (y if used == "main" else extra).sum().backward()
    wanted = torch.ones(3, 8) @ model[1].weight.detach() if used == "main" else torch.ones(3, 8)
    torch.testing.assert_close(x.grad, wanted)
