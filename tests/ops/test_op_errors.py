"""Every wrong use: the type, and a sentence that says where, what was wanted, what came, and the cure."""

import math
import re

import pytest
import torch

import opfuse
from opfuse import errors, ops, recipes
from tests.ops.op_cases import ALL, make

MXFP8 = recipes.MXFP8BlockScaling()
LEVELS = {"fused": None, "unfused": opfuse.RuleSet(())}
every_level = pytest.mark.parametrize("rules", list(LEVELS.values()), ids=list(LEVELS))


def raised(kind, builtin, *words):
    """Expects an error of both kinds whose text has ``words``, in order, and a cure."""
    assert issubclass(kind, builtin)
    return pytest.raises(kind, match="(?s)" + ".*".join([*words, "Cure: "]))


# -- inputs ------------------------------------------------------------------------------------------------------------------

WRONG_SHAPES = {
    "linear": (
        lambda: ops.Linear(8, 4),
        (3, 7),
        r"BasicLinear\(in_features=8, out_features=4\) input",
        r"\(\.\.\., 8\)",
        r"\(3, 7\)",
    ),
    "linear of a scalar": (lambda: ops.Linear(1, 4), (), "BasicLinear", r"\(\.\.\., 1\)", r"got \(\)"),
    "bias": (lambda: ops.Bias(8), (3, 7), r"Bias\(size=8\) input", r"\(\.\.\., 8\)", r"\(3, 7\)"),
    "bias of a scalar": (lambda: ops.Bias(1), (), "Bias", r"\(\.\.\., 1\)", r"got \(\)"),
    "rms norm": (lambda: ops.RMSNorm(8), (3, 7), "RMSNorm", r"trailing dimensions \(8,\)", r"\(3, 7\)"),
    "rms norm of two": (lambda: ops.RMSNorm((3, 8)), (8,), "RMSNorm", r"trailing dimensions \(3, 8\)", r"\(8,\)"),
    "layer norm": (lambda: ops.LayerNorm((2, 8)), (3, 8), "LayerNorm", r"trailing dimensions \(2, 8\)", r"\(3, 8\)"),
    "l2 of a scalar": (ops.L2Normalization, (), "l2_normalization", "at least one normalised dimension", r"got \(\)"),
    "odd halves": (ops.SwiGLU, (3, 7), "^swiglu input", "an even number of columns", r"\(3, 7\)"),
    "groups": (lambda: ops.SwiGLU(glu_interleave_size=4), (3, 12), "swiglu", "a multiple of 8 columns", r"\(3, 12\)"),
    "gated scalar": (ops.GEGLU, (), r"GEGLU\(\) input", "at least one dimension", r"got \(\)"),
    "reshape": (lambda: ops.Reshape((5, -1)), (3, 8), "Reshape", r"24 elements to fit \(5, -1\)", r"\(3, 8\)"),
}


@pytest.mark.parametrize("case", list(WRONG_SHAPES))
def test_a_wrong_shape(case):
    make_op, shape, *words = WRONG_SHAPES[case]
    with raised(errors.ShapeError, ValueError, *words):
        make_op()(torch.randn(shape))


@pytest.mark.parametrize(
    ("op", "cure"),
    [(ops.SwiGLU(), "out_features"), (ops.Bias(8), "size=7"), (ops.RMSNorm(8), r"for \(7,\)"), (ops.Reshape((5,)), "-1")],
    ids=lambda given: getattr(given, "label", ""),
)
def test_the_cure_of_a_wrong_shape_names_what_to_change(op, cure):
    with pytest.raises(errors.ShapeError, match=f"Cure: .*{cure}"):
        op(torch.randn(3, 7))


def test_a_class_in_place_of_an_op():
    with pytest.raises(errors.PipelineError, match=r"got the class GELU\. Cure: write GELU\(\.\.\.\)"):
        ops.Sequential(ops.GELU)


@pytest.mark.parametrize("recipe", [None, MXFP8], ids=["no recipe", "mxfp8"])
@every_level
def test_a_wrong_last_dimension_in_a_pipeline(rules, recipe):
    model = ops.Sequential(ops.RMSNorm(32), ops.Linear(64, 32), ops.GELU(), rules=rules)
    with opfuse.autocast(enabled=recipe is not None, recipe=recipe), raised(errors.ShapeError, ValueError, "BasicLinear"):
        model(torch.randn(32, 32))


ARITHMETIC = [
    (name, case) for name, case in ALL if name.split("-")[0] not in ("identity", "reshape", "quantize", "make_extra_output")
]


@pytest.mark.few
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("case", [case for _, case in ARITHMETIC], ids=[name for name, _ in ARITHMETIC])
def test_a_dtype_that_no_op_computes_in(case, dtype):
    op, x, extras = make(case, torch.float32)
    with raised(errors.DtypeError, TypeError, "input: wants a dtype of", f"got {dtype}"):
        op(x.detach().to(dtype), *extras)


@pytest.mark.parametrize("op", [ops.Linear(32, 32), ops.Quantize()], ids=["linear", "quantize"])
@pytest.mark.parametrize("autocast", [False, True])
def test_integers_under_a_recipe(op, autocast):
    x = torch.ones(32, 32, dtype=torch.int32)
    low = torch.autocast(torch.get_default_device().type, torch.bfloat16, enabled=autocast)
    with opfuse.autocast(recipe=MXFP8), low, raised(errors.DtypeError, ValueError, r"torch\.int32"):
        op(x)


@pytest.mark.parametrize("value", [None, 3.0, [1.0]])
def test_something_that_is_no_tensor(value):
    with pytest.raises(TypeError, match=r"wants a torch\.Tensor"):
        ops.GELU()(value)


@pytest.mark.row("B27")
@pytest.mark.parametrize(
    ("shape", "features", "where"),
    [((24, 48), (48, 32), "input"), ((32, 64), (64, 48), "weight"), ((33, 64), (64, 64), "input")],
    ids=["columns", "weight rows", "rows"],
)
@every_level
def test_b27_sizes_that_a_block_does_not_divide(shape, features, where, rules):
    model = ops.Sequential(ops.Linear(*features), rules=rules)
    x = torch.randn(shape, requires_grad=True)
    with opfuse.autocast(recipe=MXFP8), raised(errors.ShapeError, ValueError, rf"BasicLinear.*{where}", "32"):
        model(x)


@pytest.mark.row("B27")
@pytest.mark.parametrize("recipe", [MXFP8, recipes.NVFP4BlockScaling(disable_rht=True)], ids=["mxfp8", "nvfp4"])
@pytest.mark.parametrize(
    ("shape", "out_features"), [((64, 64), 1041), ((64, 64), 1025), ((64, 65), 64), ((33, 64), 64), ((3, 11, 64), 64)], ids=str
)
def test_b27_the_cure_can_be_typed(shape, out_features, recipe):
    """What the message says to type is evaluated, and the call goes through; so it does under the override that it names."""
    sizes = {"in_features": shape[-1], "out_features": out_features}
    x, op = torch.randn(shape, requires_grad=True), ops.Linear(**sizes)
    with opfuse.autocast(recipe=recipe), pytest.raises(errors.ShapeError) as caught:
        op(x)
    told = str(caught.value).partition("Cure: ")[2]
    for override in re.findall(r"recipe\.replace\(.*?\)", told):
        with opfuse.autocast(recipe=eval(override, {"recipe": recipe})):
            op(x).sum().backward()
    sizes |= {name: int(size) for name, size in re.findall(r"(\w+_features)=(\d+)", told)}
    for padding in re.findall(r"torch\.nn\.functional\.pad\(.*\(0, .*?\)\)", told):
        x = eval(padding, {"torch": torch, "x": x})
    with opfuse.autocast(recipe=recipe):
        y = ops.Linear(**sizes)(x)
    for cut in re.findall(r"y\[.*?\]", told):
        y = eval(cut, {"y": y})
    y.sum().backward()
    assert y.numel() == math.prod(shape[:-1]) * out_features


@pytest.mark.row("B27")
def test_b27_a_stored_weight_of_such_a_size_is_refused_by_the_name_of_its_op():
    with opfuse.quantized_model_init(recipe=MXFP8), raised(errors.ShapeError, ValueError, r"BasicLinear\(.*\) weight") as caught:
        ops.Linear(64, 50257)
    assert str(caught.value).endswith("Cure: build the op with out_features=50272 and cut its result, y[..., :50257].")


@pytest.mark.parametrize(
    ("op", "extras", "got"),
    [(ops.AddExtraInput, 0, 0), (ops.AddExtraInput, 2, 2), (ops.GELU, 1, 1), (ops.ScaledSReLU, 0, 0)],
)
def test_missing_and_surplus_extra_inputs(op, extras, got):
    with raised(errors.PipelineError, ValueError, rf"wants {op.num_extra_inputs} extra inputs?\b", f"got {got}"):
        op()(torch.randn(3), *[torch.randn(3)] * extras)


@pytest.mark.parametrize(("op", "shape"), [(ops.AddExtraInput, (3,)), (ops.ScaledSReLU, (3, 8)), (ops.ScaledSwiGLU, (4,))])
def test_an_extra_input_of_another_shape(op, shape):
    with raised(errors.ShapeError, ValueError, "operand", "wants shape"):
        op()(torch.randn(3, 8), torch.randn(shape))


@pytest.mark.parametrize(
    "name", ["gelu", "basic_linear", "rms_norm", "identity", "quantize", "make_extra_output", "dropout", "bias"]
)
def test_unknown_keyword_arguments(name):
    op, x, extras = make(next(case for n, case in ALL if n.startswith(name)), torch.float32)
    with raised(errors.PipelineError, ValueError, "forward", "no keyword arguments", "colour"):
        op(x, *extras, colour=3)


# -- hyper-parameters --------------------------------------------------------------------------------------------------------

NAN, INF = math.nan, math.inf
WRONG_SPECS = {
    **{f"Linear{sizes}": (lambda sizes=sizes: ops.Linear(*sizes), f"got {min(sizes)}") for sizes in [(0, 4), (4, 0), (-1, 4)]},
    "BasicLinear": (lambda: ops.BasicLinear(0, 1), r"BasicLinear\.in_features: wants a positive integer"),
    "Bias": (lambda: ops.Bias(0), r"Bias\.size: wants a positive integer"),
    **{f"Dropout({p})": (lambda p=p: ops.Dropout(p), r"0 <= p < 1") for p in (-0.1, 1.0, 1.5, NAN)},
    **{f"RMSNorm eps {e}": (lambda e=e: ops.RMSNorm(8, eps=e), r"RMSNorm\.eps") for e in (-1.0, NAN, INF)},
    "LayerNorm eps": (lambda: ops.LayerNorm(8, eps=-1e-5), r"LayerNorm\.eps"),
    "L2Normalization eps": (lambda: ops.L2Normalization(eps=NAN), r"L2Normalization\.eps"),
    "RMSNorm sizes": (lambda: ops.RMSNorm(()), "a positive integer or a list of them"),
    "LayerNorm sizes": (lambda: ops.LayerNorm((8, 0)), "a positive integer or a list of them"),
    **{f"SiTUGLU beta1 {b}": (lambda b=b: ops.SiTUGLU(beta1=b), r"SiTUGLU\.beta1") for b in (0.0, -1.0, NAN, INF)},
    **{f"SiTUGLU beta2 {b}": (lambda b=b: ops.SiTUGLU(beta2=b), r"SiTUGLU\.beta2") for b in (0.0, -1.0, NAN, INF)},
    "ScaledSiTUGLU": (lambda: ops.ScaledSiTUGLU(beta1=0.0), "beta1"),
    "ClampedSwiGLU": (lambda: ops.ClampedSwiGLU(limit=0.0), r"limit"),
    "ScaledTanhSReLU": (lambda: ops.ScaledTanhSReLU(tanh_clamp_scale=-1.0), r"ScaledTanhSReLU\.tanh_clamp_scale"),
    **{f"interleave {g}": (lambda g=g: ops.SwiGLU(glu_interleave_size=g), "glu_interleave_size") for g in (0, -2, 1.5)},
}


@pytest.mark.parametrize("case", list(WRONG_SPECS))
def test_a_hyper_parameter_out_of_range(case):
    make_op, word = WRONG_SPECS[case]
    with raised(errors.SpecError, ValueError, word):
        make_op()


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, torch.complex64])
def test_a_weight_of_no_dtype_to_compute_in(dtype):
    with raised(errors.DtypeError, ValueError, "Linear: wants a dtype of", str(dtype)):
        ops.Linear(8, 8, dtype=dtype)


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (ops.RMSNorm(8), "eps"),
        (ops.BasicLinear(8, 8), "in_features"),
        (ops.Linear(8, 8), "in_features"),
        (ops.Linear(8, 8), "out_features"),
        (ops.ConstantScale(2.0), "scale"),
        (ops.AddExtraInput(), "in_place"),
        (ops.Dropout(0.5), "p"),
        (ops.GELU(), "spec"),
    ],
    ids=lambda v: v if isinstance(v, str) else type(v).__name__,
)
def test_hyper_parameters_are_read_only(op, name):
    before = getattr(op, name)
    with raised(errors.SpecError, AttributeError, rf"\.{name}", "hyper-parameters are frozen", "got 3"):
        setattr(op, name, 3)
    assert getattr(op, name) == before


def test_an_attribute_that_an_op_does_not_have():
    with pytest.raises(AttributeError, match="colour"):
        _ = ops.GELU().colour
    with pytest.raises(AttributeError, match="colour"):
        _ = ops.Linear(8, 8).colour


def test_a_parameter_that_was_taken_away():
    model = ops.Sequential(ops.Linear(8, 8))
    model[0].weight = None
    with raised(errors.PipelineError, ValueError, "weight", "wants a parameter", "None"):
        model(torch.randn(3, 8))


# -- backward ----------------------------------------------------------------------------------------------------------------

PIPELINE = [lambda: ops.RMSNorm(8), lambda: ops.Linear(8, 16), ops.SwiGLU, lambda: ops.Linear(8, 8)]


def pipeline(rules=None):
    return ops.Sequential(*(make_op() for make_op in PIPELINE), rules=rules)


@every_level
def test_a_double_backward_is_refused(rules):
    x = torch.randn(3, 8, requires_grad=True)
    y = pipeline(rules)(x)
    with raised(errors.UnsupportedError, RuntimeError, "create_graph=False", "a double backward"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


WRITES = {
    "x": lambda model, x: x,
    "norm": lambda model, x: model[0].weight,
    "first weight": lambda model, x: model[1].weight,
    "second weight": lambda model, x: model[3].weight,
}


@every_level
@pytest.mark.parametrize(
    "recipe", [None, recipes.Float8CurrentScaling(backward_override="high_precision")], ids=["none", "override"]
)
@pytest.mark.parametrize("target", list(WRITES))
def test_a_write_between_forward_and_backward_is_an_error(target, recipe, rules):
    model, x = pipeline(rules), torch.randn(3, 8, requires_grad=True)
    with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x)
    with torch.no_grad():
        WRITES[target](model, x).copy_(torch.randn_like(WRITES[target](model, x)))
    with raised(errors.SavedTensorError, RuntimeError, "changed in place"):
        y.sum().backward()


def test_a_write_to_what_no_gradient_reads_is_none():
    model, x = ops.Sequential(ops.Linear(8, 8)), torch.randn(3, 8)
    y = model(x)
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.zero_()
    y.sum().backward()
    assert torch.equal(model[0].weight.grad, x.sum(0).expand(8, 8))


@every_level
def test_a_second_backward_needs_retain_graph(rules):
    model, x = pipeline(rules), torch.randn(3, 8, requires_grad=True)
    y = model(x)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()
