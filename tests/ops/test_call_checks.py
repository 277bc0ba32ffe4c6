"""What a pipeline refuses at its first call, and what an op or a fusion of a user's own must hand back."""

import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import opfuse
from opfuse import errors, ops, recipes
from opfuse.compiler.graph import BACKWARD
from tests.ops.test_op_errors import raised

# -- the call ----------------------------------------------------------------------------------------------------------------

HERE = torch.empty(0).device


@pytest.mark.parametrize("extra", [3, None, [1.0]])
def test_an_extra_input_that_is_no_tensor(extra):
    with raised(errors.DtypeError, TypeError, r"AddExtraInput\(\) extra input", r"wants a torch\.Tensor", type(extra).__name__):
        ops.AddExtraInput()(torch.randn(3), extra)


def test_weights_on_another_device_than_the_input():
    model = ops.Sequential(ops.GELU(), ops.Linear(8, 8))
    with raised(errors.PipelineError, ValueError, "BasicLinear.* weight", "the input's device meta", f"got {HERE}"):
        model(torch.randn(3, 8, device="meta"))
    with raised(errors.PipelineError, ValueError, "extra input 0", f"device {HERE}", "got meta"):
        ops.AddExtraInput()(torch.randn(3), torch.randn(3, device="meta"))
    assert model.cache_info().plans == 0


def test_sparse_tensors_and_scalars_are_refused():
    with raised(errors.UnsupportedError, RuntimeError, "strided tensors", "sparse"):
        ops.Linear(8, 8)(torch.eye(8).to_sparse())
    with raised(errors.UnsupportedError, RuntimeError, "strided tensors", "sparse"):
        ops.AddExtraInput()(torch.eye(8), torch.eye(8).to_sparse())
    for recipe in (opfuse.recipes.MXFP8BlockScaling(), opfuse.recipes.DelayedScaling()):
        with raised(errors.ShapeError, ValueError, "at least one dimension", "scalar"), opfuse.autocast(recipe=recipe):
            ops.GroupedLinear(1, 8, 8)(torch.tensor(1.0), [1])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("make_op", [ops.AddExtraInput, ops.ScaledSwiGLU], ids=lambda op: op.__name__)
def test_an_extra_input_that_fp32_does_not_hold(make_op, dtype):
    """The imaginary part of a complex one was lost."""
    extra = torch.ones((3, 8) if make_op is ops.AddExtraInput else 3).to(dtype)
    with raised(errors.DtypeError, TypeError, rf"{make_op.__name__}\(\) extra input: wants a dtype of", f"got {dtype}"):
        ops.Sequential(ops.Bias(8), make_op())(torch.randn(3, 8), extra)


@pytest.mark.parametrize("make_op", [ops.Bias, ops.RMSNorm, ops.LayerNorm], ids=lambda op: op.__name__)
def test_a_model_that_became_complex(make_op):
    model, x = ops.Sequential(make_op(8)), torch.randn(3, 8)
    model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, that complex modules are new
        model.to(torch.complex64)
    with raised(errors.DtypeError, TypeError, f"{make_op.__name__}.* (bias|weight): wants a dtype of", "got torch.complex64"):
        model(x)


def test_a_tensor_that_moved_after_a_call_is_refused_as_at_the_first():
    model, x, extra = ops.Sequential(ops.Bias(8), ops.AddExtraInput()), torch.randn(3, 8), torch.randn(3, 8)
    model(x, extra)
    with raised(errors.PipelineError, ValueError, "extra input 0", f"device {HERE}", "got meta"):
        model(x, extra.to("meta"))
    model(x, extra)
    model.to("meta")
    with raised(errors.PipelineError, ValueError, "Bias.* bias", f"device {HERE}", "got meta") as refused:
        model(x, extra)
    assert "to_empty" in str(refused.value)


def test_an_op_of_ones_own_decides_on_its_devices():
    class Elsewhere(ops.BasicOperation):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.zeros(3, device="meta"))

        def op_forward(self, ctx, x, **kwargs):
            return x * 2

    with torch.no_grad():
        assert ops.Sequential(Elsewhere(), ops.GELU())(torch.ones(3)).shape == (3,)


@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_a_torch_func_transform_is_refused(transform):
    op, x = ops.Sequential(ops.Linear(8, 8)), torch.randn(2, 8)
    with raised(errors.UnsupportedError, RuntimeError, "plain tensors", r"torch\.func"):
        torch.func.grad(lambda x: op(x).sum())(x) if transform == "grad" else torch.func.vmap(op)(x)


def test_a_transform_of_the_parameters_is_refused():
    model, x = ops.Sequential(ops.Linear(8, 8)), torch.randn(2, 8)
    model(x)

    def loss(params):
        return torch.func.functional_call(model, params, (x,)).sum()

    with raised(errors.UnsupportedError, RuntimeError, r"torch\.func"):
        torch.func.grad(loss)(dict(model.named_parameters()))


MOVED = {
    "weight norm": (lambda: ops.Linear(8, 8), nn.utils.parametrizations.weight_norm),
    "parametrized norm": (
        lambda: ops.RMSNorm(8),
        lambda op: nn.utils.parametrize.register_parametrization(op, "weight", nn.Softplus()),
    ),
    "pruning": (lambda: ops.BasicLinear(8, 8), lambda op: prune.l1_unstructured(op, "weight", 0.5)),
}


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("case", list(MOVED))
def test_a_parameter_that_a_parametrization_computes(case, called_before):
    make_op, move = MOVED[case]
    model = ops.Sequential(make_op())
    if called_before:
        model(torch.randn(2, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.OpfuseWarning)  # pruning works by a hook
        move(model[0])
    with raised(errors.PipelineError, ValueError, "parameters of its own", "computed by a parametrization"):
        model(torch.randn(2, 8))


def test_hooks_on_an_op_of_a_pipeline_warn_once():
    model = ops.Sequential(ops.Linear(8, 8), ops.GELU())
    model[0].register_forward_hook(lambda *_: None)
    model[1].register_full_backward_hook(lambda *_: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.randn(2, 8))
        model(torch.randn(2, 8, requires_grad=True))
    assert {w.category for w in caught} == {errors.OpfuseWarning}
    texts = sorted(str(w.message) for w in caught)
    assert [text.partition("(")[0] for text in texts] == ["GELU", "Linear"]
    assert all("hooks that never run" in text and "register them on the Sequential" in text for text in texts)


def test_hooks_that_run_do_not_warn():
    seen, op = [], ops.Linear(8, 8)
    model = ops.Sequential(ops.Linear(8, 8))
    for module in (op, model):
        module.register_forward_hook(lambda module, *_: seen.append(module))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        op(torch.randn(2, 8))
        model(torch.randn(2, 8))
    assert seen == [op, model]


def test_an_input_that_another_pipeline_quantized_for_the_forward_only():
    recipe = recipes.MXFP8BlockScaling()
    first, second = ops.Sequential(ops.Linear(64, 64), ops.Quantize()), ops.Sequential(ops.Linear(64, 64))
    with opfuse.autocast(recipe=recipe):
        y = first(torch.randn(64, 64))
        with raised(errors.MissingPlaneError, RuntimeError, "BasicLinear.* input", "columnwise data"):
            second(y)
        second(y.dequantize()).sum().backward()


SIZES = {
    "Linear(64.5, 10)": (lambda: ops.Linear(64.5, 10), "64.5"),
    "RMSNorm('64')": (lambda: ops.RMSNorm("64"), "'64'"),
    "RMSNorm(64.5)": (lambda: ops.RMSNorm(64.5), "64.5"),
    "LayerNorm((8, 2.0))": (lambda: ops.LayerNorm((8, 2.0)), "2.0"),
    "Bias('8')": (lambda: ops.Bias("8"), "'8'"),
}


@pytest.mark.parametrize("case", list(SIZES))
def test_a_size_that_is_no_whole_number(case):
    make_op, got = SIZES[case]
    with raised(errors.SpecError, ValueError, "positive", got):
        make_op()


# -- what a user's code hands back -------------------------------------------------------------------------------------------


@pytest.mark.cpu  # kernels run the declared expression, and call no function
@pytest.mark.parametrize(
    ("grad", "got"),
    [(lambda dy, x: 2 * dy, "got Tensor"), (lambda dy, x: (dy, dy), "got 2 of them"), (lambda dy, x: (), "got 0 of them")],
    ids=["a tensor", "two", "none"],
)
def test_an_activation_whose_grad_is_no_tuple_of_one(grad, got):
    class Twice(ops.Activation):
        math = ops.Pointwise("twice", forward="2.0f * x", backward=("2.0f * dy",), value=lambda x: 2 * x, grad=grad)

    y = Twice()(torch.randn(2, 8, requires_grad=True))
    with raised(errors.SpecError, ValueError, "Pointwise 'twice' grad", "a tuple of 1", got):
        y.sum().backward()


class Half(ops.BasicOperation):
    """y = x / 2 with a gradient of a wrong shape."""

    def op_forward(self, ctx, input_, **kwargs):
        return input_ / 2

    def op_backward(self, ctx, grad_output):
        return grad_output[:, :4] / 2, ()


@pytest.mark.parametrize("before", [(), (ops.GELU,)], ids=["first", "inside"])
def test_an_input_gradient_of_another_shape(before):
    model = ops.Sequential(*(make_op() for make_op in before), Half(), ops.Linear(8, 8))
    y = model(torch.randn(2, 8, requires_grad=True))
    with raised(errors.PipelineError, ValueError, r"Half\(\) gradient of the input", r"\(2, 8\)", r"\(2, 4\)"):
        y.sum().backward()


def with_rule(**parts):
    rule = opfuse.fusion("halved", {"linear": "basic_linear", "act": "gelu"}, **parts)
    return opfuse.RuleSet(()).with_rule(rule)


def test_a_forward_only_rule_that_saves_nothing():
    def forward(x, *, linear, act):
        return torch.nn.functional.gelu(x @ linear.op.parameter("weight").t())

    model = ops.Sequential(ops.BasicLinear(8, 8), ops.GELU(), rules=with_rule(forward=forward))
    with torch.no_grad():
        model(torch.randn(2, 8))
    with raised(errors.FusionError, RuntimeError, "halved", r"BasicLinear\(", r"exactly \('x', 'w'\)", r"got \(\)"):
        model(torch.randn(2, 8, requires_grad=True))


def test_a_rule_that_returns_no_tensor():
    model = ops.Sequential(ops.BasicLinear(8, 8), ops.GELU(), rules=with_rule(forward=lambda x, *, linear, act: None))
    with raised(errors.FusionError, RuntimeError, "halved forward", "a tensor", "NoneType"):
        model(torch.randn(2, 8))
    rules = with_rule(backward=lambda dy, *, linear, act: None)
    assert rules.rules[0].direction == BACKWARD
    y = ops.Sequential(ops.BasicLinear(8, 8), ops.GELU(), rules=rules)(torch.randn(2, 8, requires_grad=True))
    with raised(errors.FusionError, RuntimeError, "halved backward", "a tensor", "NoneType"):
        y.sum().backward()


@pytest.mark.parametrize(("output", "word"), [(None, "a tensor"), (torch.ones(2, 8), "exactly")], ids=["none", "nothing saved"])
def test_a_fused_op_with_a_forward_alone(output, word):
    class Forgetful(ops.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **kwargs):
            return output, [(), ()]

    model = ops.Sequential(Forgetful([ops.BasicLinear(8, 8), ops.GELU()]))
    with raised(errors.FusionError, RuntimeError, "Forgetful", word):
        model(torch.randn(2, 8, requires_grad=True))


def test_an_error_that_no_check_explains_is_the_callers():
    class Freed(torch.Tensor):
        def data_ptr(self):
            raise RuntimeError("its storage was freed")

    with pytest.raises(RuntimeError, match="its storage was freed"):
        ops.Sequential(ops.GELU())(torch.randn(2, 8).as_subclass(Freed))


@pytest.mark.parametrize("recipe", [None, recipes.MXFP8BlockScaling(), recipes.NVFP4BlockScaling(disable_rht=True)])
def test_another_number_of_features_is_told_before_any_format_has_its_say(recipe):
    """A size that no block of the recipe divides is wrong because the op has another one: the cure is not to pad."""
    model = ops.Sequential(ops.Linear(64, 64))
    told = r"shape \(\.\.\., 64\), got \(32, 63\)\. Cure: .* in_features=63"
    with opfuse.autocast(enabled=recipe is not None, recipe=recipe), pytest.raises(errors.ShapeError, match=told):
        model(torch.randn(32, 63))


def test_ops_that_ask_for_extra_inputs_are_named():
    x, add = torch.randn(4, 8), ops.AddExtraInput()
    inner = ops.Sequential(ops.Sequential(add), nn.Tanh(), ops.ScaledSwiGLU())
    each = r"for each of AddExtraInput\(\), ScaledSwiGLU\(\), in this order"
    for model, given, told in (
        (inner, (), each),
        (add, (), r"for each of AddExtraInput\(\), in this order"),
        (ops.Sequential(ops.GELU()), (x,), "pass x alone"),
    ):
        with pytest.raises(errors.PipelineError, match=told):
            model(x, *given)


REPLACED = {
    "Linear weight": (lambda: ops.Linear(64, 64, bias=False), "weight", (64,)),
    "Linear bias": (lambda: ops.Linear(64, 64), "bias", (1,)),
    "RMSNorm": (lambda: ops.RMSNorm(64), "weight", (32, 64)),
    "LayerNorm": (lambda: ops.LayerNorm(64), "bias", (1,)),
    "GroupedLinear weight": (lambda: ops.GroupedLinear(2, 64, 64), "weight1", (1, 64)),
    "GroupedLinear bias": (lambda: ops.GroupedLinear(2, 64, 64), "bias0", (1,)),
    "GroupedLinear in one": (lambda: ops.GroupedLinear(2, 64, 64, single_grouped_weight=True), "weight", (1, 64, 64)),
    "TokenDispatch": (lambda: ops.TokenDispatch(4, 64), "weight", (1, 64)),
}


@pytest.mark.parametrize(("make", "name", "shape"), REPLACED.values(), ids=list(REPLACED))
def test_a_parameter_of_another_shape_is_refused(make, name, shape):
    """It would broadcast, or normalise other dimensions; also after calls that found the right one."""
    op = make()
    model, x = ops.Sequential(op), torch.randn(32, 64)
    extras = (torch.tensor([16, 16]),) if isinstance(op, ops.GroupedLinear) else ()
    model(x, *extras)
    model(x, *extras)
    wanted = tuple(getattr(op, name).shape)
    setattr(op, name, torch.nn.Parameter(torch.ones(shape)))
    with pytest.raises(errors.ShapeError, match=re.escape(f"{name}: wants shape {wanted}, got {shape}")):
        model(x, *extras)
