"""Ops in autograd: parts of the gradients, repeated passes, torch.autocast, odd inputs, quantized inputs and parameters."""

import pytest
import torch
from torch import nn

import opfuse
from opfuse import ops, recipes
from opfuse.errors import OpfuseError
from opfuse.recipes import RECIPES
from tests.ops.op_cases import ALL, Scored, make, tuple_of
from tests.turns import in_turn

LEVELS = {"fused": None, "unfused": opfuse.RuleSet(())}
every_level = pytest.mark.parametrize("rules", list(LEVELS.values()), ids=list(LEVELS))
NAMES = [name for name in RECIPES if name not in ("custom", "none")]


def mlp(rules=None, width=8):
    return ops.Sequential(ops.LayerNorm(width), ops.Linear(width, 2 * width), ops.GEGLU(), ops.Linear(width, width), rules=rules)


def autocast(recipe):
    return opfuse.autocast(enabled=recipe is not None, recipe=recipe)


# -- parts and repetitions -----------------------------------------------------------------------------------------------------


@every_level
def test_gradients_of_any_subset_equal_those_of_all(rules):
    model, x = mlp(rules), torch.randn(3, 8, requires_grad=True)
    leaves = {"x": x, **dict(model.named_parameters())}
    every = dict(zip(leaves, torch.autograd.grad(model(x).sum(), list(leaves.values()))))
    for name, leaf in leaves.items():
        (grad,) = torch.autograd.grad(model(x).sum(), [leaf])
        assert torch.equal(grad, every[name])
    for wanted, grad in every.items():
        for name, leaf in leaves.items():
            leaf.requires_grad_(name == wanted)
            leaf.grad = None
        model(x).sum().backward()
        assert torch.equal(leaves[wanted].grad, grad)
        assert all(leaf.grad is None for name, leaf in leaves.items() if name != wanted)


@pytest.mark.parametrize("recipe", [None, *(RECIPES[name]() for name in ("fp8_current", "fp8_block", "mxfp8"))], ids=str)
@every_level
def test_a_retained_graph_gives_the_same_gradients_twice(rules, recipe):
    model, x = mlp(rules, 32), torch.randn(32, 32, requires_grad=True)
    with autocast(recipe):
        y = model(x)
    leaves = [x, *model.parameters()]
    first = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
    second = torch.autograd.grad(y.sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("case", [case for _, case in ALL], ids=[name for name, _ in ALL])
def test_no_grad_and_inference_mode_compute_the_same(case):
    op, x, extras = make(case, torch.float32)
    results = []
    for scope in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        torch.manual_seed(5)
        with scope():
            results.append(tuple_of(op(x, *extras)))
    for got in results[1:]:
        assert all(y.grad_fn is None for y in got)
        assert all(torch.equal(a, b) for a, b in zip(got, results[0], strict=True))


def test_tensors_of_inference_mode_cannot_be_saved_but_a_clone_can():
    model = mlp()
    with torch.inference_mode():
        x = model(torch.randn(3, 8))
    with pytest.raises(OpfuseError, match=r"made in torch\.inference_mode"):
        model(x)
    model(x.clone()).sum().backward()


def test_hooks_on_tensors_and_parameters():
    model, x, seen = mlp(), torch.randn(3, 8, requires_grad=True), []
    model[1].weight.register_hook(lambda grad: seen.append(grad.shape))
    y = model(x)
    y.register_hook(lambda grad: grad * 2)
    y.sum().backward()
    twice = x.grad
    x.grad = None
    model(x).sum().backward()
    torch.testing.assert_close(twice, 2 * x.grad)
    assert seen == [(16, 8)] * 2


# -- torch.autocast ------------------------------------------------------------------------------------------------------------


@pytest.mark.few
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [case for _, case in ALL], ids=[name for name, _ in ALL])
def test_torch_autocast_sets_the_compute_dtype(case, dtype):
    """fp32 in, ``dtype`` out (losses are fp32), as if the input had been cast; gradients come back in the leaves' fp32."""
    op, x, extras = make(case, torch.float32)
    with torch.autocast(torch.get_default_device().type, dtype):
        torch.manual_seed(5)
        outputs = tuple_of(op(x, *extras))
    moves = isinstance(op, (ops.Identity, ops.Reshape, ops.MakeExtraOutput))
    assert {y.dtype for y in outputs} == {torch.float32 if moves or isinstance(op, Scored) else dtype}
    torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    assert all(leaf.grad.dtype == torch.float32 for leaf in (x, *extras, *op.parameters()))


@pytest.mark.parametrize(
    "recipe",
    [None, recipes.MXFP8BlockScaling(), recipes.MXFP8BlockScaling(rounding="single"), recipes.Float8CurrentScaling()],
    ids=["none", "mxfp8", "mxfp8, one rounding", "fp8"],
)
@every_level
def test_a_pipeline_under_torch_autocast_equals_one_in_that_dtype(rules, recipe):
    """Casting fp32 weights on the fly gives the outputs of weights cast beforehand, and their gradients."""
    model = ops.Sequential(ops.Linear(32, 64), ops.SiLU(), ops.Linear(64, 32), rules=rules)
    other = ops.Sequential(ops.Linear(32, 64), ops.SiLU(), ops.Linear(64, 32), rules=rules).to(torch.bfloat16)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), other.parameters()):
            if mine.dim() == 1:  # a bias is added as it is, not cast
                mine.copy_(theirs)
    x = torch.randn(32, 32)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16), autocast(recipe):
        y = model(x)
    with autocast(recipe):
        wanted = other(x.to(torch.bfloat16))
    assert torch.equal(y, wanted)
    dy = torch.randn_like(y)
    y.backward(dy)
    wanted.backward(dy)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad.float(), rtol=2**-7, atol=2**-7 * theirs.grad.abs().max().item())


# -- odd inputs ----------------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "transposed": lambda x: x.t().contiguous().t(),
    "every other column": lambda x: torch.stack([x, x], -1).flatten(1)[:, ::2],
    "every other row": lambda x: torch.cat([x, x], 1).view(-1, x.shape[1])[::2],
    "misaligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "one row expanded": None,
}


@pytest.mark.parametrize("recipe", [None, recipes.MXFP8BlockScaling(), recipes.Float8CurrentScaling()], ids=str)
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_r10_the_layout_of_x_does_not_matter(layout, recipe):
    model, x = mlp(width=32), torch.randn(32, 32)
    if layout == "one row expanded":
        x, odd = x[:1].repeat(32, 1), x[:1].expand(32, 32)
    else:
        odd = LAYOUTS[layout](x)
    assert torch.equal(odd, x)
    results = []
    for value in (x, odd):
        model.zero_grad()
        leaf = value.detach().requires_grad_()
        with autocast(recipe):
            y = model(leaf)
        y.backward(torch.ones(32, 32).t())
        results.append([y, leaf.grad, *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_r10_gradients_of_odd_layouts():
    model, x, dy = mlp(), torch.randn(3, 8, requires_grad=True), torch.randn(8, 3)
    (wanted,) = torch.autograd.grad(model(x), x, dy.t().contiguous())
    for odd in (dy.t(), torch.stack([dy.t()] * 2, -1)[..., 0]):
        (got,) = torch.autograd.grad(model(x), x, odd)
        torch.testing.assert_close(got, wanted)
    (wanted,) = torch.autograd.grad(model(x), x, torch.ones(3, 8))
    (got,) = torch.autograd.grad(model(x).sum(), x)
    torch.testing.assert_close(got, wanted)


# -- quantized inputs ------------------------------------------------------------------------------------------------------------


def quantized(recipe, x, *, rules=None):
    with autocast(recipe):
        return ops.Sequential(ops.Identity(), ops.Quantize(), rules=rules)(x)


TAKERS = {
    "linear": lambda: ops.Linear(32, 32),
    "bias": lambda: ops.Bias(32),
    "gelu": ops.GELU,
    "swiglu": ops.SwiGLU,
    "rms norm": lambda: ops.RMSNorm(32),
    "layer norm": lambda: ops.LayerNorm(32),
    "l2": ops.L2Normalization,
    "scale": lambda: ops.ConstantScale(0.3),
    "reshape": lambda: ops.Reshape((4, -1)),
    "dropout": lambda: ops.Dropout(0.5),
    "extra": ops.MakeExtraOutput,
    "identity": ops.Identity,
    "quantize": ops.Quantize,
    "mlp": lambda: mlp(width=32),
}


@pytest.mark.parametrize("recipe", [recipes.MXFP8BlockScaling(), recipes.Float8CurrentScaling()], ids=str)
@pytest.mark.parametrize("name", list(TAKERS))
def test_a_quantized_input_is_its_dequantized_values(name, recipe):
    """Outside a region, an op takes the output of a pipeline that ends in Quantize; the gradient passes straight through."""
    op, x = TAKERS[name](), torch.randn(32, 32, requires_grad=True)
    q = quantized(recipe, x)
    assert isinstance(q, opfuse.tensors.QuantizedTensor)
    plain = q.detach().dequantize().requires_grad_()
    results = []
    for given in (q, plain):
        torch.manual_seed(5)
        outputs = [y.dequantize() if isinstance(y, opfuse.tensors.QuantizedTensor) else y for y in tuple_of(op(given))]
        torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
        results.append(outputs)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.equal(x.grad, plain.grad)


def test_a_product_reads_the_planes_of_a_quantized_input():
    recipe = recipes.Float8CurrentScaling()
    model, x = ops.Sequential(ops.Linear(32, 32)), torch.randn(32, 32)
    q = quantized(recipe, x)
    with autocast(recipe), torch.no_grad():
        assert torch.equal(model(q), model(x))


def test_a_plane_that_a_quantized_input_lacks_is_named():
    recipe = recipes.MXFP8BlockScaling()
    q = quantized(recipe, torch.randn(32, 32))
    with (
        autocast(recipe),
        pytest.raises(opfuse.errors.MissingPlaneError, match=r"columnwise data of a \(32, 32\) tensor was not made"),
    ):
        ops.Linear(32, 32)(q)


@pytest.mark.row("B16")
@every_level
@pytest.mark.parametrize("position", ["first", "last", "alone", "between"])
def test_b16_an_explicit_quantize_lets_the_gradient_through(position, rules):
    linear = ops.Linear(32, 32)
    modules = {
        "first": [ops.Quantize(), linear],
        "last": [linear, ops.Quantize()],
        "alone": [ops.Quantize()],
        "between": [linear, ops.Quantize(), ops.GELU()],
    }[position]
    x = torch.randn(32, 32, requires_grad=True)
    with autocast(recipes.MXFP8BlockScaling(backward_override="dequantized")):
        y = ops.Sequential(*modules, rules=rules)(x)
    (y.dequantize() if position in ("last", "alone") else y).sum().backward()
    assert x.grad is not None
    assert position == "alone" or linear.weight.grad is not None
    if position == "alone":
        assert torch.equal(x.grad, torch.ones(32, 32))


@pytest.mark.row("B16")
def test_b16_without_a_recipe_quantize_is_nothing():
    x = torch.randn(3, 7, requires_grad=True)
    for op in (ops.Quantize(), ops.Quantize(False, True), ops.Quantize(True, True)):
        assert op(x) is x
        assert ops.Sequential(op)(x) is x


def mxfp8_of(dy):
    role = recipes.QuantizerRole(module_type="quantize", tensor_type="grad_output")
    return recipes.MXFP8BlockScaling().quantizer(role).quantize(dy).dequantize()


@pytest.mark.row("B16")
@pytest.mark.parametrize("override", ["dequantized", "high_precision"])
def test_b16_an_override_leaves_the_gradient_alone(override):
    x, dy = torch.randn(32, 32, requires_grad=True), torch.randn(32, 32)
    with autocast(recipes.MXFP8BlockScaling(backward_override=override)):
        y = ops.Quantize(False, True)(x)
    y.backward(dy)
    assert torch.equal(x.grad, dy)
    x.grad = None
    with autocast(recipes.MXFP8BlockScaling()):
        y = ops.Quantize(False, True)(x)
    y.backward(dy)
    assert torch.equal(x.grad, mxfp8_of(dy))


# -- quantized parameters --------------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=10, momentum=0.5),
    "SGD one by one": lambda p: torch.optim.SGD(p, lr=8, foreach=False),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02, foreach=False),
}


@pytest.mark.filterwarnings("ignore:a step on weights")
@pytest.mark.few(apart=True)
@pytest.mark.parametrize(("name", "optimizer"), in_turn(NAMES, OPTIMIZERS, of=2))
def test_quantized_parameters_train(name, optimizer):
    recipe = RECIPES[name]()
    with opfuse.quantized_model_init(recipe=recipe):
        model = ops.Sequential(ops.Linear(64, 64, dtype=torch.bfloat16), ops.SiLU(), ops.Linear(64, 64, dtype=torch.bfloat16))
    weights = [model[0].weight, model[2].weight]
    assert all(isinstance(w, opfuse.tensors.QuantizedTensor) and isinstance(w, nn.Parameter) for w in weights)
    before = [w.detach().dequantize().clone() for w in weights]
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    x = torch.randn(128, 64, dtype=torch.bfloat16)
    target = torch.roll(x, 1, dims=1).float()
    losses = []
    for _ in range(8):
        with autocast(recipe):
            loss = (model(x).float() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert model[0].weight is weights[0]
    assert model[2].weight is weights[1]
    assert all(not torch.equal(w.detach().dequantize(), b) for w, b in zip(weights, before))
    assert losses[-1] < 0.7 * losses[0], losses


@pytest.mark.row("U12")
@pytest.mark.parametrize("name", NAMES)
def test_u12_a_write_to_a_quantized_parameter_before_backward_is_an_error(name):
    recipe = RECIPES[name]()
    with opfuse.quantized_model_init(recipe=recipe):
        model = ops.Sequential(ops.Linear(64, 64, dtype=torch.bfloat16))
    x = torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True)
    with autocast(recipe):
        y = model(x)
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(64, 64, dtype=torch.bfloat16))
    with pytest.raises(opfuse.errors.SavedTensorError, match="changed in place"):
        y.sum().backward()
