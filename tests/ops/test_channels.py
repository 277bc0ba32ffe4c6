"""Extra tensors by name: from one op of a Sequential to later ones, within a run and across modules that do not fuse."""

import itertools

import pytest
import torch
from torch import nn

import opfuse
from opfuse import ops, recipes
from opfuse.errors import ChannelError, PipelineError, PipelineIndexError, PipelineTypeError, QuantizerTypeError
from tests.plans import plans_used


def tap(name, *, to_caller=False, in_place=False):
    op = ops.MakeExtraOutput(in_place=in_place)
    op.set_extra_output_channel(0, name, output_to_caller=to_caller)
    return op


def add(name, *, in_place=False):
    op = ops.AddExtraInput(in_place=in_place)
    op.set_extra_input_channel(0, name)
    return op


# -- names -------------------------------------------------------------------------------------------------------------------


def test_names_are_set_and_cleared():
    op = ops.MakeExtraOutput()
    assert op.extra_output_channels[0].name is None
    assert op.extra_output_channels[0].to_caller
    op.set_extra_output_channel(0, "h", output_to_caller=False)
    assert (op.extra_output_channels[0].name, op.extra_output_channels[0].to_caller) == ("h", False)
    op.set_extra_output_channel(0, None)
    assert op.extra_output_channels[0].to_caller


@pytest.mark.parametrize("index", [-1, 1, 7])
def test_an_index_out_of_range(index):
    with pytest.raises(PipelineIndexError, match="wants an index below 1"):
        ops.AddExtraInput().set_extra_input_channel(index, "h")
    with pytest.raises(IndexError, match="wants an index below 0"):
        ops.AddExtraInput().set_extra_output_channel(index, "h")


@pytest.mark.parametrize("index", ["0", 0.0, True, None, torch.zeros(2)])
def test_an_index_that_is_none(index):
    """A TypeError of ours for each; ints of torch and numpy count."""
    for call in (ops.AddExtraInput().set_extra_input_channel, ops.MakeExtraOutput().set_extra_output_channel):
        with pytest.raises(PipelineTypeError, match="channel: wants an integer, got "):
            call(index, "h")
    with pytest.raises(QuantizerTypeError, match="wants an integer"):
        ops.BasicLinear(8, 8).get_quantizer("forward", index)
    op = ops.AddExtraInput()
    op.set_extra_input_channel(torch.tensor(0), "h")
    assert op.extra_input_channels[0].name == "h"


@pytest.mark.parametrize("name", ["", 3, b"h", ("h",)])
def test_a_name_that_is_none(name):
    with pytest.raises(PipelineError, match="a non-empty string or None") as error:
        ops.AddExtraInput().set_extra_input_channel(0, name)
    assert isinstance(error.value, ValueError)


def test_output_to_caller_is_a_bool():
    with pytest.raises(TypeError, match="output_to_caller: wants True or False"):
        ops.MakeExtraOutput().set_extra_output_channel(0, "h", output_to_caller=1)


@pytest.mark.parametrize("call", [lambda op: op(torch.randn(3)), lambda op: ops.Sequential(op)(torch.randn(3))])
def test_channels_are_locked_once_an_op_ran(call):
    op = ops.MakeExtraOutput()
    call(op)
    with pytest.raises(ChannelError, match="captured") as error:
        op.set_extra_output_channel(0, "h")
    assert isinstance(error.value, RuntimeError)


# -- producers and consumers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (lambda: [add("h")], "an earlier op that produces channel 'h', got none that produces any"),
        (lambda: [add("h"), tap("h")], "an earlier op that produces channel 'h'"),
        (lambda: [add("h"), nn.Tanh(), tap("h")], "an earlier op that produces channel 'h'"),
        (lambda: [tap("h"), tap("h"), add("h")], "one producer a channel"),
        (lambda: [tap("h"), nn.Tanh(), tap("h"), add("h")], "one producer a channel"),
        (lambda: [tap("skips"), add("skip")], r"channel 'skip', got only 'skips'; did you mean 'skips'\? Cure: "),
    ],
    ids=["missing", "late", "late, in another run", "two", "two, in two runs", "misspelt"],
)
def test_channels_without_exactly_one_earlier_producer(modules, message):
    with pytest.raises(PipelineError, match=message):
        ops.Sequential(*modules())(torch.randn(3, 8))


def test_a_consumer_alone_has_no_producer():
    with pytest.raises(PipelineError, match="an earlier op that produces"):
        add("h")(torch.randn(3))


@pytest.mark.parametrize("to_caller", [False, True])
def test_output_to_caller(to_caller):
    x = torch.randn(3, 8)
    result = ops.Sequential(tap("h", to_caller=to_caller), ops.ConstantScale(2.0), add("h"))(x)
    y = result[0] if to_caller else result
    assert torch.equal(y, 2 * x + x)
    if to_caller:
        assert torch.equal(result[1], x)


def test_an_extra_output_that_nobody_reads_is_dropped():
    x = torch.randn(3, 8, requires_grad=True)
    y = ops.Sequential(tap("h"), ops.ConstantScale(2.0))(x)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))


# -- training ------------------------------------------------------------------------------------------------------------------


def compare(model, formula, x, *extras):
    """Outputs and all gradients against plain torch autograd of ``formula(x, parameters by name, *extras)``, in fp64."""
    params = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    ours = [t.detach().clone().requires_grad_() for t in (x, *extras)]
    theirs = [t.detach().clone().requires_grad_() for t in (x, *extras)]
    got, want = model(*ours), formula(theirs[0], params, *theirs[1:])
    got, want = (value if isinstance(value, tuple) else (value,) for value in (got, want))
    grads = [torch.randn_like(y) for y in want]
    torch.autograd.backward(got, grads)
    torch.autograd.backward(want, grads)
    pairs = [*zip(got, want, strict=True), *((a.grad, b.grad) for a, b in zip(ours, theirs))]
    pairs += [(p.grad, params[name].grad) for name, p in model.named_parameters()]
    for mine, reference in pairs:
        torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-12)


def linear(x, params, name):
    return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]


def gelu(x):
    return torch.nn.functional.gelu(x, approximate="tanh")


def residual_formula(x, p):
    normal = x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-5) * p["1.weight"]
    return linear(gelu(linear(normal, p, "2")), p, "4") + x


@pytest.mark.parametrize(("tap_in_place", "add_in_place"), [*itertools.product([False, True], repeat=2)])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_residual_by_channel_trains(tap_in_place, add_in_place, level):
    rules = opfuse.active_rules()
    model = ops.Sequential(
        tap("h", in_place=tap_in_place),
        ops.RMSNorm(8),
        ops.Linear(8, 16),
        ops.GELU(),
        ops.Linear(16, 8),
        add("h", in_place=add_in_place),
        rules=opfuse.RuleSet(rules.rules, level=level),
    ).double()
    compare(model, residual_formula, torch.randn(2, 3, 8, dtype=torch.float64))


@pytest.mark.parametrize("in_place", [False, True])
def test_in_place_adds_never_write_into_a_channel(in_place):
    model = ops.Sequential(tap("h", to_caller=True), ops.Linear(8, 8), add("h", in_place=in_place))
    base = torch.randn(3, 8, requires_grad=True)
    x = base * 1
    before = x.detach().clone()
    y, h = model(x)
    assert torch.equal(x.detach(), before)
    assert torch.equal(h.detach(), before)
    (y.sum() + h.sum()).backward()
    torch.testing.assert_close(base.grad, 2 + torch.ones(3, 8) @ model[1].weight.detach())


def test_fan_out_within_a_run():
    model = ops.Sequential(tap("h"), ops.Linear(8, 8), add("h"), ops.GELU(), add("h"), ops.Linear(8, 8), add("h")).double()

    def formula(x, p):
        return linear(gelu(linear(x, p, "1") + x) + x, p, "5") + x

    compare(model, formula, torch.randn(3, 8, dtype=torch.float64))


def test_fan_out_to_consumers_and_to_the_caller():
    model = ops.Sequential(tap("h", to_caller=True), ops.Linear(8, 8), add("h"), ops.SiLU(), add("h")).double()

    def formula(x, p):
        return torch.nn.functional.silu(linear(x, p, "1") + x) + x, x * 1

    compare(model, formula, torch.randn(3, 8, dtype=torch.float64))


def test_two_channels_that_cross():
    model = ops.Sequential(tap("a"), ops.Linear(8, 8), tap("b"), ops.GELU(), add("a"), ops.Linear(8, 8), add("b")).double()

    def formula(x, p):
        b = linear(x, p, "1")
        return linear(gelu(b) + x, p, "5") + b

    compare(model, formula, torch.randn(3, 8, dtype=torch.float64))


def test_channels_beside_extra_inputs_of_the_caller():
    model = ops.Sequential(tap("h"), ops.AddExtraInput(), ops.Linear(8, 8), add("h"), ops.ScaledSReLU()).double()

    def formula(x, p, residual, scale):
        return torch.relu(linear(x + residual, p, "2") + x) ** 2 * scale[:, None]

    compare(model, formula, *(torch.randn(3, *n, dtype=torch.float64) for n in [(8,), (8,), ()]))


# -- across modules that do not fuse -------------------------------------------------------------------------------------------


def test_g14_a_residual_around_a_plain_module_trains():
    model = ops.Sequential(tap("h"), ops.Linear(8, 8), nn.Tanh(), ops.Linear(8, 8), add("h")).double()

    def formula(x, p):
        return linear(torch.tanh(linear(x, p, "1")), p, "3") + x

    compare(model, formula, torch.randn(2, 3, 8, dtype=torch.float64))


def test_g14_fan_out_over_several_runs_and_to_the_caller():
    model = ops.Sequential(
        ops.ConstantScale(0.5),
        tap("h", to_caller=True),
        nn.Tanh(),
        add("h"),
        ops.AddExtraInput(),
        nn.Sigmoid(),
        add("h"),
        add("h"),
    ).double()

    def formula(x, p, extra):
        h = 0.5 * x
        return torch.sigmoid(torch.tanh(h) + h + extra) + h + h, h

    compare(model, formula, *(torch.randn(3, 8, dtype=torch.float64) for _ in range(2)))


def test_g14_the_exported_value_is_returned_once_in_op_order():
    model = ops.Sequential(
        tap("a", to_caller=True), nn.Identity(), tap("b"), ops.MakeExtraOutput(), nn.Identity(), add("b"), add("a")
    )
    x = torch.randn(3)
    y, *extra = model(x)
    assert torch.equal(y, 3 * x)
    assert len(extra) == 2


def test_g14_a_list_that_changes_carries_channels_anew():
    model, x = ops.Sequential(tap("h"), ops.ConstantScale(2.0), add("h")), torch.randn(3, 8)
    assert torch.equal(model(x), 3 * x)
    model.insert(1, nn.Tanh())
    assert torch.equal(model(x), 2 * torch.tanh(x) + x)
    with pytest.raises(PipelineError, match="an earlier op"):
        model[1:](x)


def test_channels_are_part_of_the_plan_key():
    x, first, second = (
        torch.randn(3),
        ops.Sequential(ops.MakeExtraOutput(), ops.AddExtraInput()),
        ops.Sequential(tap("h"), add("h")),
    )
    with plans_used() as plans:
        first(x, x)
        second(x)
    assert plans[0].key.ops != plans[1].key.ops


@pytest.mark.parametrize("recipe", [recipes.MXFP8BlockScaling(), recipes.Float8CurrentScaling()])
def test_a_residual_by_channel_under_a_recipe(recipe):
    """The channel carries high precision: x itself comes back, and its gradient is dy plus that of the branch."""
    model = ops.Sequential(tap("h"), ops.Linear(32, 32, bias=False), add("h"))
    branch = ops.Sequential(model[1])
    x, dy = torch.randn(32, 32), torch.randn(32, 32)
    grads, outputs = [], []
    for each in (model, branch):
        leaf = x.clone().requires_grad_()
        with opfuse.autocast(recipe=recipe):
            y = each(leaf)
        y.backward(dy)
        outputs.append(y.detach())
        grads.append(leaf.grad)
    assert torch.equal(outputs[0], outputs[1] + x)
    assert torch.equal(grads[0], grads[1] + dy)
