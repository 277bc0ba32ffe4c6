"""Sequential: a list of modules, runs of fusible ops as pipelines, checkpoints, parameters that come and go."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import opfuse
from opfuse import ops, recipes
from opfuse.errors import OpfuseWarning, PipelineError
from opfuse.runtime.fuser import OperationFuser
from tests.plans import plans_used


def mlp():
    return ops.Sequential(ops.RMSNorm(8), ops.Linear(8, 16), ops.SwiGLU(), ops.Linear(8, 8))


def x_of(*shape, **options):
    return torch.randn(*shape, **options)


def kinds(model):
    return [type(module).__name__ for module in model]


# -- a list --------------------------------------------------------------------------------------------------------------


def test_indices_and_length():
    model = mlp()
    assert len(model) == 4
    assert model[0] is model[-4] is next(iter(model))
    assert model[-1] in model
    for index in (4, -5):
        with pytest.raises(IndexError, match="Cure"):
            model[index]


@pytest.mark.parametrize("index", [slice(1, 3), slice(None, None, 2), slice(-1, None), slice(0, 0)])
def test_slices_share_modules(index):
    model = mlp()
    part = model[index]
    assert isinstance(part, ops.Sequential)
    assert [id(m) for m in part] == [id(m) for m in list(model)[index]]


def test_a_slice_computes_its_part():
    model, x = mlp(), x_of(3, 8)
    assert torch.equal(model[2:](model[:2](x)), model(x))


def test_every_list_operation():
    a, b, c, d = ops.GELU(), ops.ReLU(), ops.SiLU(), ops.Identity()
    model = ops.Sequential()
    assert model.append(a) is model
    assert model.extend([b, c]) is model
    model.insert(1, d)
    assert list(model) == [a, d, b, c]
    assert model.pop(1) is d
    assert model.pop() is c
    model += [c, d]
    assert list(model) == [a, b, c, d]
    assert list(model + [a]) == [a, b, c, d, a]
    assert list(model) == [a, b, c, d]
    del model[1]
    del model[1:]
    assert list(model) == [a]
    model[0] = b
    assert list(model) == [b]
    assert list(model.state_dict()) == []


def test_insert_at_either_end_and_beyond():
    model = ops.Sequential(ops.GELU())
    model.insert(0, ops.ReLU()).insert(-1, ops.SiLU()).insert(99, ops.Identity())
    assert kinds(model) == ["ReLU", "SiLU", "GELU", "Identity"]


def test_only_modules_go_in():
    for action in (
        lambda m: m.append(3),
        lambda m: m.insert(0, "gelu"),
        lambda m: m.__setitem__(0, None),
        lambda m: m.extend([torch.tanh]),
        lambda m: ops.Sequential(torch.tanh),
    ):
        with pytest.raises(PipelineError, match=r"wants an nn\.Module"):
            action(mlp())


LENT = {
    "an op": lambda linear: linear.basic_ops[1],
    "a fused op": lambda linear: ops.FusedOperation((*linear.basic_ops, ops.GELU())),
    "a list of torch": lambda linear: nn.Sequential(nn.Tanh(), linear.basic_ops[0]),
}
"""Modules whose parameters a Linear outside of them holds."""


@pytest.mark.parametrize("lent", LENT.values(), ids=LENT)
@pytest.mark.parametrize(
    "put",
    [
        lambda module: ops.Sequential(ops.GELU(), module),
        lambda module: ops.Sequential({"first": module}),
        lambda module: ops.Sequential(ops.GELU()).insert(0, module),
        lambda module: ops.Sequential(ops.GELU()).__setitem__(0, module),
        lambda module: put_as_attribute(ops.Sequential(ops.GELU()), module)(x_of(3, 8)),
    ],
    ids=["argument", "name", "insert", "item", "attribute"],
)
def test_ops_whose_parameters_the_list_would_not_have_are_refused(lent, put):
    linear = ops.Linear(8, 8)
    with pytest.raises(PipelineError, match=r"whose (weight|bias) a Linear outside of the list holds\. Cure: put that Linear"):
        put(lent(linear))


def put_as_attribute(model, module):
    model.last = module
    return model


def test_a_module_that_has_the_linear_too_may_have_its_ops():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = ops.Linear(8, 8)
            self.again = ops.FusedOperation(self.linear.basic_ops)

        def forward(self, x):
            return self.again(self.linear(x))

    model, x = ops.Sequential(Tied()), x_of(3, 8)
    assert torch.equal(model(x), model[0].linear(model[0].linear(x)))
    assert len([*model.parameters()]) == 2


def test_a_dictionary_names_the_modules():
    model = ops.Sequential({"norm": ops.RMSNorm(8), "up": ops.Linear(8, 4, bias=False)})
    assert [name for name, _ in model.named_parameters()] == ["norm.weight", "up.weight"]
    assert model.norm is model[0]
    x = x_of(3, 8)
    assert torch.equal(model(x), model.up(model.norm(x)))


def test_a_module_added_by_name_or_attribute_takes_part():
    model, x = ops.Sequential(ops.Linear(8, 8)), x_of(3, 8)
    before = model(x)
    model.add_module("act", ops.ReLU())
    assert torch.equal(model(x), torch.relu(before))
    model.act = ops.ConstantScale(2.0)
    assert torch.equal(model(x), 2 * before)
    del model.act
    assert torch.equal(model(x), before)


def test_no_modules_is_the_identity():
    x = x_of(3)
    assert ops.Sequential()(x) is x


# -- runs ----------------------------------------------------------------------------------------------------------------


def test_maximal_runs_become_pipelines():
    model = ops.Sequential(ops.Linear(8, 8), ops.GELU(), nn.Tanh(), nn.Dropout(0.0), ops.Linear(8, 8), nn.Identity())
    assert [type(run) for run in model.runs()] == [OperationFuser, nn.Tanh, nn.Dropout, OperationFuser, nn.Identity]
    x = x_of(3, 8)
    y = x
    for module in model:
        y = module(y)
    torch.testing.assert_close(model(x), y)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.append(ops.ReLU()),
        lambda m: m.insert(1, ops.ReLU()),
        lambda m: m.pop(1),
        lambda m: m.__setitem__(1, ops.SiLU()),
        lambda m: m.__delitem__(0),
        lambda m: m.__iadd__([nn.Tanh()]),
        lambda m: m.extend([ops.Linear(8, 8), ops.ReLU()]),
        lambda m: setattr(m, "1", nn.Sigmoid()),
    ],
)
def test_a_change_of_the_list_is_seen(change):
    model, x = ops.Sequential(ops.Linear(8, 8), ops.GELU(), ops.Linear(8, 8)), x_of(3, 8)
    model(x)
    change(model)
    y = x
    for module in model:
        y = module(y)
    torch.testing.assert_close(model(x), y)


@pytest.mark.row("B20", "X01")
def test_b20_x01_train_and_eval_keep_their_plans():
    model, x = ops.Sequential(ops.Linear(8, 8), ops.Dropout(0.5), ops.Linear(8, 8)), x_of(3, 8)
    for _ in range(3):
        model.train()
        model(x)
        model.eval()
        with torch.no_grad():
            model(x)
    assert model.cache_info()[:3] == (2, 4, 2)


def test_a_rule_set_of_its_own():
    none = opfuse.RuleSet(())
    model, x = ops.Sequential(ops.Linear(8, 8), ops.GELU(), rules=none), x_of(3, 8)
    with plans_used() as plans:
        model(x)
        ops.Sequential(*model)(x)
    assert [plan.fusions[:1] for plan in plans] == [(), ("epilogue",)]
    assert model[:1].rules is (model + [nn.Tanh()]).rules is none


def test_the_same_op_twice():
    linear = ops.Linear(8, 8)
    model, x = ops.Sequential(linear, ops.GELU(), linear), x_of(3, 8)
    model(x).sum().backward()
    got = linear.weight.grad.clone()
    linear.zero_grad()
    linear(ops.GELU()(linear(x))).sum().backward()
    torch.testing.assert_close(got, linear.weight.grad)


# -- extra tensors and keyword arguments -----------------------------------------------------------------------------------


def extras_model():
    return ops.Sequential(
        ops.MakeExtraOutput(),
        ops.AddExtraInput(),
        nn.Tanh(),
        ops.ScaledSReLU(),
        ops.MakeExtraOutput(),
        ops.AddExtraInput(),
        ops.MakeExtraOutput(),
    )


def test_extra_inputs_run_by_run_and_extra_outputs_in_op_order():
    x, a, s, b = x_of(3, 8), x_of(3, 8), x_of(3), x_of(3, 8)
    y, *outputs = extras_model()(x, a, s, b)
    inner = torch.relu(torch.tanh(x + a)) ** 2 * s[:, None]
    for got, want in zip((y, *outputs), (inner + b, x, inner, inner + b), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("count", [0, 2, 4])
def test_a_wrong_number_of_extra_inputs_stops_before_anything_runs(count):
    model, seen = extras_model(), []
    model[2].register_forward_hook(lambda *_: seen.append(1))
    with pytest.raises(PipelineError, match=f"wants 3 extra inputs, got {count}") as error:
        model(x_of(3, 8), *[x_of(3, 8)] * count)
    assert isinstance(error.value, ValueError)
    assert not seen


class Changes(nn.Module):
    """Changes another module's list, once, in the middle of a call."""

    def __init__(self, change):
        super().__init__()
        self.changes = [change]

    def forward(self, x):
        if self.changes:
            self.changes.pop()()
        return x


def test_a_list_that_is_changed_in_a_call_is_counted_again():
    x, later = torch.ones(2, 4), ops.Sequential(nn.Identity())
    model = ops.Sequential(Changes(lambda: later.append(ops.Sequential(ops.ConstantScale(2.0)))), later)
    for _ in range(2):
        assert torch.equal(model(x), 2 * x)
    model[0].changes.append(lambda: later.append(ops.AddExtraInput()))
    with pytest.raises(PipelineError, match="wants 1 extra input, got 0"):
        model(x)
    assert torch.equal(model(x, x), 3 * x)
    model[0].changes.append(later.pop)
    with pytest.raises(PipelineError, match="wants 0 extra inputs, got 1"):
        model(x, x)
    assert torch.equal(model(x), 2 * x)


def test_a_sequential_inside_takes_and_gives_its_extra_tensors_in_order():
    x, a, s, b, c = x_of(3, 8), x_of(3, 8), x_of(3), x_of(3, 8), x_of(3, 8)
    outer = ops.Sequential(ops.AddExtraInput(), ops.MakeExtraOutput(), nn.Tanh(), extras_model(), ops.AddExtraInput())
    y, *outputs = outer(x, c, a, s, b, c)
    inner_y, *inner_outputs = extras_model()(torch.tanh(x + c), a, s, b)
    for got, want in zip((y, *outputs), (inner_y + c, x + c, *inner_outputs), strict=True):
        torch.testing.assert_close(got, want)
    with pytest.raises(PipelineError, match="wants 5 extra inputs, got 4"):
        outer(x, c, a, s, b)


@pytest.mark.row("X01")
def test_x01_cache_info_tells_the_latest_miss_of_all_pipelines():
    inner = ops.Sequential(ops.Linear(8, 8), ops.Dropout(0.1))
    model = ops.Sequential(ops.ReLU(), nn.Identity(), inner, nn.Identity(), ops.SiLU())
    model(x_of(3, 8))
    model(x_of(3, 8))
    assert model.cache_info()[:4] == (3, 3, 3, "first plan: the cache was empty")
    inner.eval()(x_of(3, 8))
    assert "training" in model.cache_info().last_miss
    with torch.no_grad():
        model(x_of(3, 8))
    assert model.cache_info().last_miss == model.runs()[-1].cache_info().last_miss != inner.cache_info().last_miss
    model.train()
    inner(x_of(64, 8))
    assert model.cache_info().last_miss == inner.cache_info().last_miss
    assert "rows_class: 1 -> 64" in model.cache_info().last_miss
    model.append(ops.ReLU())
    assert model.cache_info().plans == inner.cache_info().plans  # a change of the list starts with empty caches


@pytest.mark.parametrize("recipe", [None, recipes.MXFP8BlockScaling(), recipes.DelayedScaling(amax_history_len=2)])
def test_torch_compile_leaves_pipelines_as_they_are(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Tanh(), ops.Sequential(ops.Linear(64, 64), ops.GELU()), nn.Tanh())
    eager, compiled = copy.deepcopy(model), torch.compile(model, backend="eager")
    for _ in range(3):
        x = x_of(32, 64)
        with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
            got, want = compiled(x), eager(x)
        got.sum().backward()
        want.sum().backward()
        assert torch.equal(got, want)
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), eager.parameters(), strict=True))
    assert model[1].cache_info()[:4] == eager[1].cache_info()[:4]


class Power(ops.BasicOperation):
    """x ** exponent with the exponent of the call."""

    def op_forward(self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer, exponent=1):
        ctx.save_for_backward(input_)
        ctx.exponent = exponent
        return input_**exponent

    def op_backward(self, ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output * ctx.exponent * x ** (ctx.exponent - 1), ()


def test_op_kwargs_by_index_and_by_op():
    first, second = Power(), Power()
    model, x = ops.Sequential(first, nn.Identity(), ops.ReLU(), second), x_of(3, 8, requires_grad=True)
    y = model(x, op_kwargs={0: {"exponent": 2}, second: {"exponent": 3}})
    torch.testing.assert_close(y, x**6)
    y.sum().backward()
    torch.testing.assert_close(x.grad, 6 * x.detach() ** 5)
    torch.testing.assert_close(model(x, op_kwargs={-1: {"exponent": 3}}), torch.relu(x) ** 3)
    torch.testing.assert_close(model(x), torch.relu(x))


def test_op_kwargs_alone_and_under_a_plan_of_another_call():
    op, x = Power(), x_of(3)
    assert torch.equal(op(x, exponent=2), x**2)
    assert torch.equal(op(x, exponent=3), x**3)


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        (lambda m: {1: {}}, "a BasicOperation of this Sequential"),
        (lambda m: {2: {}}, "a BasicOperation of this Sequential"),
        (lambda m: {ops.GELU(): {"x": 1}}, "a BasicOperation of this Sequential"),
        (lambda m: {"0": {}}, "a BasicOperation of this Sequential"),
        (lambda m: {0: {"exponents": 3}}, "no keyword arguments"),
        (lambda m: {m[1].basic_ops[0]: {"output": 3}}, "no keyword arguments"),
    ],
    ids=["composite", "plain module", "another op", "a name", "unknown name", "unknown name of a part"],
)
def test_op_kwargs_that_nobody_takes(keys, wanted):
    model = ops.Sequential(ops.GELU(), ops.Linear(8, 8), nn.Tanh())
    with pytest.raises(PipelineError, match=wanted) as error:
        model(x_of(3, 8), op_kwargs=keys(model))
    assert isinstance(error.value, ValueError)


def test_an_unknown_keyword_of_a_users_op():
    with pytest.raises(TypeError, match="exponents"):
        Power()(x_of(3), exponents=3)


# -- copies and checkpoints --------------------------------------------------------------------------------------------------


def full_model():
    model = ops.Sequential(
        ops.LayerNorm(8), ops.Linear(8, 16), ops.GEGLU(), nn.Linear(8, 8), ops.Bias(8), ops.BasicLinear(8, 8), ops.Quantize()
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1, 1)
    return model


KEYS = ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias", "4.bias", "5.weight"]


def test_state_dict_keys():
    assert list(full_model().state_dict()) == KEYS


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("called", [False, True])
def test_copies_are_independent(copier, called):
    model, x = full_model(), x_of(3, 8)
    if called:
        model(x).sum().backward()
    other = copier(model)
    assert [name for name, _ in other.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert torch.equal(other(x), model(x))
    with torch.no_grad():
        other[1].weight.zero_()
    assert not torch.equal(other(x), model(x))
    assert other.cache_info().plans > 0
    model.zero_grad()
    other.zero_grad()
    other(x).sum().backward()
    assert model[1].weight.grad is None
    assert other[1].weight.grad is not None


def test_a_copy_may_get_other_channels():
    op = ops.MakeExtraOutput()
    op(x_of(3))
    copy.deepcopy(op).set_extra_output_channel(0, "h")


def test_state_dict_round_trip_through_a_file():
    model, other, x = full_model(), full_model(), x_of(3, 8)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    assert not torch.equal(model(x), other(x))
    result = other.load_state_dict(torch.load(buffer, weights_only=True))
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert torch.equal(model(x), other(x))


def test_state_dicts_of_torch_modules_load():
    x = x_of(3, 8)
    linear = nn.Linear(8, 8)
    mine = ops.Linear(8, 8)
    mine.load_state_dict(linear.state_dict())
    torch.testing.assert_close(mine(x), linear(x))
    plain = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8, bias=False))
    with torch.no_grad():
        plain[0].weight.uniform_()
    model = ops.Sequential(ops.LayerNorm(8), ops.Linear(8, 16), ops.ReLU(), ops.Linear(16, 8, bias=False))
    model.load_state_dict(plain.state_dict())
    torch.testing.assert_close(model(x), plain(x))


EMPTY = torch.empty(0, dtype=torch.uint8)


def te_state(extra=EMPTY):
    """What te.ops saves for Linear, GELU, BasicLinear: fused ops list their parts, every op has a pickled extra state."""
    return {
        "0.basic_ops.0.weight": torch.randn(16, 8),
        "0.basic_ops.0._extra_state": extra,
        "0.basic_ops.1.bias": torch.randn(16),
        "0.basic_ops.1._extra_state": EMPTY,
        "1._extra_state": EMPTY,
        "2.weight": torch.randn(4, 16),
        "2._extra_state": EMPTY,
    }


def te_model():
    return ops.Sequential(ops.Linear(8, 16), ops.GELU(), ops.BasicLinear(16, 4))


def test_te_ops_state_dicts_load():
    model, state = te_model(), te_state()
    result = model.load_state_dict(dict(state))
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert torch.equal(model[0].weight, state["0.basic_ops.0.weight"])
    assert torch.equal(model[0].bias, state["0.basic_ops.1.bias"])
    assert torch.equal(model[2].weight, state["2.weight"])


def test_te_ops_pickled_scaling_state_is_refused_aloud():
    with pytest.warns(OpfuseWarning, match="delayed scaling starts anew"):
        te_model().load_state_dict(te_state(torch.ones(5, dtype=torch.uint8)))


def test_missing_and_unexpected_keys_are_still_reported():
    model = te_model()
    state = model.state_dict()
    del state["0.bias"]
    state["1.scale"] = torch.ones(())
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*0\.bias.*Unexpected key.*1\.scale"):
        model.load_state_dict(state)


def test_delayed_scaling_state_travels():
    model, x = ops.Sequential(ops.Linear(32, 32), ops.GELU(), ops.Linear(32, 32)), x_of(32, 32)
    recipe = recipes.DelayedScaling(amax_history_len=4)
    for _ in range(3):
        with opfuse.autocast(recipe=recipe):
            model(x).sum().backward()
    other = ops.Sequential(ops.Linear(32, 32), ops.GELU(), ops.Linear(32, 32))
    other.load_state_dict(model.state_dict())
    outputs = []
    for each in (model, other, copy.deepcopy(model)):
        with opfuse.autocast(recipe=recipe):
            outputs.append(each(x))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


# -- parameters --------------------------------------------------------------------------------------------------------------


def test_parameters_are_listed_once_with_short_names():
    model = full_model()
    assert [name for name, _ in model.named_parameters()] == KEYS
    assert len(list(model.parameters())) == len(KEYS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_to_dtype_takes_effect_after_a_call(dtype):
    model, x = mlp(), x_of(3, 8)
    model(x)
    model.to(dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model(x.to(dtype)).dtype == dtype


def test_a_replaced_parameter_takes_effect():
    model, x = mlp(), x_of(3, 8)
    before = model(x)
    old = model[1].weight
    model[1].weight = nn.Parameter(torch.zeros(16, 8))
    model[1].bias = nn.Parameter(torch.zeros(16))
    y = model(x)
    assert not torch.equal(before, y)
    assert torch.equal(y, model[3].bias.expand(3, 8))
    y.sum().backward()
    assert old.grad is None
    assert model[1].weight.grad is not None
    model[1].weight.data = torch.ones(16, 8)
    assert not torch.equal(model(x), y)


def test_parameters_swapped_in_by_functional_call():
    model, x = mlp(), x_of(3, 8)
    swapped = {name: torch.randn_like(parameter).requires_grad_() for name, parameter in model.named_parameters()}
    y = torch.func.functional_call(model, swapped, (x,))
    other = copy.deepcopy(model)
    other.load_state_dict(swapped, strict=False)
    assert torch.equal(y, other(x))
    y.sum().backward()
    assert model[1].weight.grad is None
    assert swapped["1.weight"].grad is not None


def test_tied_parameters_sum_their_gradients():
    model = ops.Sequential(ops.Linear(8, 8, bias=False), ops.GELU(), ops.Linear(8, 8, bias=False))
    model[2].weight = model[0].weight
    x = x_of(3, 8)
    assert len(list(model.parameters())) == 1
    model(x).sum().backward()
    weight = model[0].weight.detach().clone().requires_grad_()
    (torch.nn.functional.gelu(x @ weight.T, approximate="tanh") @ weight.T).sum().backward()
    torch.testing.assert_close(model[0].weight.grad, weight.grad)


def test_requires_grad_toggles_take_effect():
    model, x = mlp(), x_of(3, 8)
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()
    model[1].requires_grad_(False)
    model(x).sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is None} == {"1.weight", "1.bias"}
    model.requires_grad_(False)
    assert not model(x).requires_grad
    model.requires_grad_(True)
    assert model(x).requires_grad


def test_reset_parameters():
    model = full_model()
    for module in model:
        getattr(module, "reset_parameters", lambda: None)()
    assert torch.equal(model[0].weight, torch.ones(8))
    assert torch.equal(model[4].bias, torch.zeros(8))
    torch.manual_seed(0)
    model[1].reset_parameters()
    torch.manual_seed(0)
    assert torch.equal(model[1].weight, nn.Linear(8, 16).weight)
    assert torch.equal(model[1].bias, _bias_of_linear())


def _bias_of_linear():
    torch.manual_seed(0)
    return nn.Linear(8, 16).bias


def test_pop_takes_a_slice_and_a_list_may_be_added_to_itself():
    first, second, third = ops.GELU(), ops.ReLU(), ops.SiLU()
    model = ops.Sequential(first, second, third)
    popped = model.pop(slice(0, 2))
    assert (list(popped), list(model)) == ([first, second], [third])
    popped.extend(popped)
    assert list(popped) == [first, second, first, second]
