"""GroupedLinear: what its calls take, and weight gradients that a backward pass puts off."""

from __future__ import annotations

import copy
import pickle
import re
import sys

import numpy
import pytest
import torch

import opfuse
from opfuse import errors, ops, recipes
from opfuse.config import loads
from opfuse.ops import grouped_linear
from opfuse.tensors.groups import check_sizes, listed_splits
from tests.compiler.harness import randn, recipe_for, same
from tests.ops.test_op_errors import raised

K, N, ROWS = 64, 32, 96
SPLITS = (32, 0, 64)
HIGH = recipes.MXFP8BlockScaling(backward_override="high_precision")

HERE = torch.empty(0).device


def grouped(**options: object) -> ops.GroupedLinear:
    torch.manual_seed(3)
    return ops.GroupedLinear(3, K, N, dtype=torch.bfloat16, **options)


def delayed(**options: object) -> ops.GroupedLinear:
    return grouped(bias=False, delay_wgrad_compute=True, **options)


def splits(*sizes: int) -> torch.Tensor:
    return torch.tensor(sizes or SPLITS)


def output(op: ops.GroupedLinear, x: torch.Tensor, *extras: object, recipe: recipes.Recipe | None = HIGH) -> torch.Tensor:
    with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
        return op(x, *(extras or (splits(),)))


def backward(op: ops.GroupedLinear, x: torch.Tensor, recipe: recipes.Recipe | None = HIGH) -> torch.Tensor:
    """One step, and the gradient of its output."""
    y = output(op, x, recipe=recipe)
    dy = randn(*y.shape, seed=100)
    y.backward(dy)
    return dy


@pytest.mark.parametrize(
    ("name", "cure"),
    [("output", "copy what it returns"), ("out", "copy what it returns"), ("grad_input", "in a hook.*main_grad")],
)
def test_buffers_of_the_caller_are_refused_with_what_to_do_instead(name, cure):
    pipeline, x = ops.Sequential(grouped(), ops.GELU()), randn(ROWS, K)
    for call in (lambda: grouped()(x, splits(), **{name: x}), lambda: pipeline(x, splits(), op_kwargs={0: {name: x}})):
        with raised(errors.PipelineError, ValueError, "GroupedLinear.* forward", "no keyword arguments", name) as refused:
            call()
        assert re.search(cure, str(refused.value))


# -- what a call takes -----------------------------------------------------------------------------------------------------

NO_SPLITS = {
    "floats": ([32.9, 0.5, 62.6], "32.9"),
    "one float": ([32, 0, 64.0], "64.0"),
    "strings": (["32", 0, 64], "'32'"),
    "none": ([None, 0, 96], "None"),
    "bools": ([True, 31, 64], "True"),
    "nested": ([[32, 0, 64]], r"\[32, 0, 64\]"),
    "tensors": ([torch.tensor(32), 0, 64], "tensor"),
    "numpy floats": ([numpy.float32(32), 0, 64], "32.0"),
    "numpy bools": ([numpy.True_, 31, 64], "True"),
    "not an int64": ([2**63, 0, 0], "9223372036854775808"),
}


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("wrong", NO_SPLITS)
def test_a_list_of_anything_but_ints_is_refused(wrong, kind):
    given, got = NO_SPLITS[wrong]
    with raised(errors.DtypeError, TypeError, r"GroupedLinear\(.*split sizes: wants a tensor, or a list of ints", got):
        grouped()(randn(ROWS, K), kind(given))


@pytest.mark.parametrize("sizes", [list(SPLITS), SPLITS, torch.Size(SPLITS), list(numpy.array(SPLITS))])
def test_a_list_of_ints_is_a_tensor_of_split_sizes(sizes):
    op, x = grouped(), randn(ROWS, K)
    assert same(op(x, sizes), op(x, splits()))


def test_a_list_costs_the_host_no_call_for_each_group():
    def calls(groups: int) -> int:
        begun: list[str] = []
        sys.setprofile(lambda _, event, argument: begun.append(event))
        try:
            listed_splits([1] * groups, where="a test")
            check_sizes((1,) * groups, groups, where="a test")
        finally:
            sys.setprofile(None)
        return sum(event in ("call", "c_call") for event in begun)

    assert calls(4) == calls(128)


NO_TENSOR = {"numpy": numpy.array(SPLITS), "none": None, "number": 96, "string": "splits"}


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("wrong", NO_TENSOR)
def test_split_sizes_that_are_neither_a_tensor_nor_a_list_are_refused(wrong, warm):
    op, x = grouped(), randn(ROWS, K)
    if warm:
        op(x, splits())
    with raised(errors.DtypeError, TypeError, r"GroupedLinear\(.*extra input: wants a torch\.Tensor"):
        op(x, NO_TENSOR[wrong])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_split_sizes_of_a_dtype_that_does_not_count_rows_are_refused(dtype):
    with raised(errors.DtypeError, TypeError, r"GroupedLinear\(.*split sizes: wants int64 or int32", str(dtype)):
        grouped()(randn(ROWS, K), splits().to(dtype))


@pytest.mark.parametrize("sizes", [[32, 64], [32, 0, 0, 64], [], *map(torch.tensor, ([32, 64], [list(SPLITS)], 96))], ids=str)
def test_split_sizes_of_another_shape_are_refused(sizes):
    with raised(errors.ShapeError, ValueError, r"GroupedLinear\(.*split sizes: wants shape \(3,\)"):
        grouped()(randn(ROWS, K), sizes)


def test_split_sizes_without_values_are_refused_beside_an_input_that_has_some():
    op, x = grouped(), randn(ROWS, K)
    op(x, splits())
    with raised(errors.PipelineError, ValueError, "extra input 0", f"device {HERE}", "got meta"):
        op(x, splits().to("meta"))
    assert op.to("meta")(x.to("meta"), splits().to("meta")).shape == (ROWS, N)


@pytest.mark.parametrize("warm", [False, True])
def test_scales_in_a_list_are_refused_and_not_taken_for_zeros(warm):
    op, x = grouped(scale_bias=True), randn(ROWS, K)
    if warm:
        op(x, splits(), torch.ones(ROWS))
    with raised(errors.DtypeError, TypeError, r"GroupedLinear\(.*extra input: wants a torch\.Tensor, got list"):
        op(x, splits(), [0.5] * ROWS)


@pytest.mark.parametrize("shape", [(ROWS,), (4, 23), (24, 4), (4, 24, 1), (1,), ()], ids=str)
def test_scales_of_another_shape_than_the_rows_are_refused(shape):
    with raised(errors.ShapeError, ValueError, r"GroupedLinear\(.*scales: wants shape \(4, 24\)"):
        grouped(scale_bias=True)(randn(4, 24, K), splits(), torch.ones(shape))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_scales_of_a_dtype_that_no_op_computes_in_are_refused(dtype):
    with raised(errors.DtypeError, TypeError, r"GroupedLinear\(.*scales: wants a dtype of", str(dtype)):
        grouped(scale_bias=True)(randn(ROWS, K), splits(), torch.ones(ROWS).to(dtype))


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("name", ["none", "mxfp8"])
def test_split_sizes_may_change_once_the_host_has_read_them(name, delay):
    recipe, x, sizes = recipe_for(name), randn(ROWS, K), splits()
    wanted, op = grouped(), grouped(delay_wgrad_compute=delay)
    backward(wanted, x, recipe)
    y = output(op, x, sizes, recipe=recipe)
    sizes.copy_(splits(0, 96, 0))
    y.backward(randn(*y.shape, seed=100))
    sizes.zero_()
    op.backward_dw()
    assert [key for key, p in wanted.named_parameters() if not same(p.grad, op.get_parameter(key).grad)] == []


@pytest.fixture
def only_the_device_knows(monkeypatch):
    """Split sizes as they are on a GPU: the host does not know them."""
    monkeypatch.setattr(grouped_linear, "known_sizes", lambda splits, rows: None)
    monkeypatch.setattr(grouped_linear, "takes_device_splits", lambda x, weights: True)


@pytest.mark.usefixtures("only_the_device_knows")
@pytest.mark.parametrize("delay", [False, True])
def test_split_sizes_that_only_the_device_knows_must_not_change_before_they_are_read_again(delay):
    op, x, sizes = grouped(bias=False, delay_wgrad_compute=delay), randn(ROWS, K), splits()
    y = output(op, x, sizes, recipe=None)
    if delay:
        y.sum().backward()
    sizes.copy_(splits(0, 96, 0))
    with raised(errors.SavedTensorError, RuntimeError, "changed in place"):
        op.backward_dw() if delay else y.sum().backward()


# -- gradients put off -------------------------------------------------------------------------------------------------------

CHANGED = {"input": lambda x, dy: x, "gradient of the output": lambda x, dy: dy}


@pytest.mark.parametrize("recipe", [None, HIGH], ids=["none", "high_precision"])
@pytest.mark.parametrize("name", CHANGED)
def test_what_was_changed_in_place_gives_no_gradient_but_an_error(name, recipe):
    op, x = delayed(), randn(ROWS, K)
    dy = backward(op, x, recipe)
    CHANGED[name](x, dy).zero_()
    with raised(errors.SavedTensorError, RuntimeError, r"GroupedLinear\(.*backward_dw\(\)", name, "changed in place"):
        op.backward_dw()
    assert all(weight.grad is None for weight in op.parameters())
    backward(op, randn(ROWS, K, seed=1), recipe)
    op.backward_dw()  # the lost step is not in the way of the next
    assert same(op.weight0.grad, _now(randn(ROWS, K, seed=1), recipe).weight0.grad)


def _now(x: torch.Tensor, recipe: recipes.Recipe | None = HIGH) -> ops.GroupedLinear:
    op = grouped(bias=False)
    backward(op, x, recipe)
    return op


def test_casts_of_its_own_leave_the_input_to_the_caller():
    recipe, op, x = recipes.MXFP8BlockScaling(), delayed(), randn(ROWS, K)
    wanted = _now(x.clone(), recipe)
    backward(op, x, recipe)
    x.zero_()
    op.backward_dw()
    assert same(op.weight0.grad, wanted.weight0.grad)


def test_only_weights_that_train_are_owed_anything():
    op, x = grouped(delay_wgrad_compute=True), randn(ROWS, K).requires_grad_()
    for name in op.weight_names:
        op.get_parameter(name).requires_grad_(False)
    for _ in range(3):
        backward(op, x)
    assert not op._delayed
    op.weight2.requires_grad_(True)
    backward(op, x)
    assert len(op._delayed) == 1
    op.backward_dw()
    assert [name for name in op.weight_names if op.get_parameter(name).grad is not None] == ["weight2"]
    assert same(op.weight2.grad, _now(x.detach()).weight2.grad)


def test_a_weight_frozen_meanwhile_gets_nothing():
    op, x = delayed(), randn(ROWS, K)
    backward(op, x)
    op.weight0.requires_grad_(False)
    op.backward_dw()
    assert [weight.grad is None for weight in op.parameters()] == [True, False, False]


def test_a_gradient_that_was_put_off_is_no_part_of_a_graph():
    op, x = delayed(), randn(ROWS, K).requires_grad_()
    for _ in range(2):
        backward(op, x)
        op.backward_dw()
    assert all(weight.grad.grad_fn is None and not weight.grad.requires_grad for weight in op.parameters())


@pytest.mark.parametrize("single", [False, True])
def test_a_backward_pass_that_comes_by_no_weight_puts_nothing_off(single):
    op, x = delayed(single_grouped_weight=single), randn(ROWS, K).requires_grad_()
    (dx,) = torch.autograd.grad(output(op, x).sum(), [x])
    output(op, x).sum().backward(inputs=[x])
    assert same(x.grad, dx)
    assert not op._delayed
    output(op, x).sum().backward(inputs=[next(op.parameters())])
    op.backward_dw()
    assert [weight.grad is None for weight in op.parameters()] == [False, *[True] * (len(op.weight_names) - 1)]


@pytest.mark.parametrize("allow_unused", [False, True])
def test_autograd_grad_of_a_weight_is_refused(allow_unused):
    op, x = delayed(), randn(ROWS, K).requires_grad_()
    with raised(errors.UnsupportedError, RuntimeError, r"GroupedLinear\(.*delay_wgrad_compute", r"torch\.autograd\.grad"):
        torch.autograd.grad(output(op, x).sum(), [x, op.weight0], allow_unused=allow_unused)
    assert not op._delayed


@pytest.mark.parametrize("put", ["computed", "replaced"])
def test_weights_that_are_not_the_op_s_own_parameters_are_refused(put):
    op, x = delayed(), randn(ROWS, K)
    if put == "computed":
        y = torch.func.functional_call(op, {"weight0": op.weight0 * 2}, (x, splits()))
    else:
        y = op(x, splits())
        op.weight0 = torch.nn.Parameter(op.weight0.detach().clone())
    with raised(errors.UnsupportedError, RuntimeError, r"GroupedLinear\(.*weight0 with delay_wgrad_compute", "another tensor"):
        y.sum().backward()


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda op: pickle.loads(pickle.dumps(op))])
def test_a_copy_owes_nothing_and_the_op_still_does(copied):
    op, x = delayed(), randn(ROWS, K)
    backward(op, x)
    other = copied(op)
    other.backward_dw()
    assert other.weight0.grad is None
    op.backward_dw()
    assert same(op.weight0.grad, _now(x).weight0.grad)


def test_recomputed_activations_owe_their_gradients_once():
    op, x = delayed(), randn(ROWS, K).requires_grad_()
    with opfuse.autocast(recipe=HIGH):
        y = opfuse.checkpoint(op, x, splits())
    y.backward(randn(*y.shape, seed=100))
    assert len(op._delayed) == 1
    op.backward_dw()
    assert same(op.weight0.grad, _now(x.detach()).weight0.grad)


# -- in a file ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["true", "false"])
def test_a_file_cannot_put_gradients_off_that_nothing_would_compute(value):
    entry = f"{{op: grouped_linear, num_groups: 2, in_features: 8, out_features: 8, delay_wgrad_compute: {value}}}"
    with pytest.raises(errors.ConfigError) as caught:
        loads(f"version: 1\nrecipe: {{kind: none}}\npipeline:\n  ops:\n    - {entry}\n", "f.yaml")
    (finding,) = caught.value.findings
    assert str(finding).startswith("f.yaml:5:76: error[unknown-key]: unknown key 'delay_wgrad_compute'\n")
    assert "backward_dw()" in finding.help


def test_gradients_that_were_put_off_come_in_the_order_of_their_passes():
    op, x = delayed(), randn(ROWS, K)
    found = []
    for scale in (1.0, 4.0):
        output(op, scale * x, recipe=None).sum().backward()
    for _ in range(2):
        op.zero_grad()
        op.backward_dw()
        found.append(op.weight0.grad.clone())
    assert torch.equal(4 * found[0], found[1])


def test_gradients_that_were_put_off_under_autocast_have_the_dtype_of_their_weights():
    torch.manual_seed(3)
    op, x = ops.GroupedLinear(3, K, N, bias=False, delay_wgrad_compute=True), randn(ROWS, K)
    with torch.autocast(HERE.type, torch.bfloat16):
        y = op(x, splits())
    y.sum().backward()
    op.backward_dw()
    assert op.weight0.grad.dtype == torch.float32


def test_autograd_grad_of_a_weight_alone_is_refused_as_well():
    op = delayed()
    with raised(errors.UnsupportedError, RuntimeError, r"GroupedLinear\(.*delay_wgrad_compute", r"torch\.autograd\.grad"):
        torch.autograd.grad(output(op, randn(ROWS, K)).sum(), [op.weight0])
