"""What outlives the forward pass: counted through autograd's own hooks, against what the gradients read."""

from itertools import product

import pytest
import torch

import opfuse
from opfuse import ops, recipes
from tests.ops.op_cases import ALL, make, tuple_of

ROWS, K, N = 64, 32, 96
FP32, BF16 = 4, 2


def saved_by(model, x, *extras, recipe=None):
    """Tensors that one call saves: name of what they share memory with, or their bytes."""
    known = {"x": x, **dict(model.named_parameters()), **{f"extra{i}": e for i, e in enumerate(extras)}}
    pointers = {t.data_ptr(): name for name, t in known.items() if type(t) in (torch.Tensor, torch.nn.Parameter)}
    found = []

    def pack(tensor):
        if isinstance(tensor, opfuse.tensors.QuantizedTensor):
            found.append(next(name for name, t in known.items() if t is tensor))
        else:
            found.append(pointers.get(tensor.data_ptr(), tensor.nbytes))
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, opfuse.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x, *extras)
    y = y[0] if isinstance(y, tuple) else y
    if y.requires_grad:
        (y.dequantize() if isinstance(y, opfuse.tensors.QuantizedTensor) else y).sum().backward()
    return sorted(found, key=str)


COMBINATIONS = [(x, w) for x in (False, True) for w in (False, True)]


def mxfp8(rows, columns, *, rowwise):
    """Bytes of one plane: elements, and one scale byte for 32 of them, padded to tiles of 128 x 4."""
    outer, inner = (rows, columns) if rowwise else (columns, rows)
    return [rows * columns, -(-outer // 128) * 128 * -(-(inner // 32) // 4) * 4]


def expected(recipe, x, w):
    override = None if recipe is None else recipe.backward_override
    if recipe is None or override == "high_precision":
        return ["x"] * w + ["weight"] * x
    rowwise = override == "dequantized"
    weight = mxfp8(N, K, rowwise=rowwise) if recipe.keep == "all" else ["weight"]
    return mxfp8(ROWS, K, rowwise=rowwise) * w + weight * x


@pytest.mark.row("B12")
@pytest.mark.parametrize(("x", "w"), COMBINATIONS)
@pytest.mark.parametrize(
    "recipe",
    [
        None,
        *(recipes.MXFP8BlockScaling(backward_override=o) for o in (None, "dequantized", "high_precision")),
        *(recipes.MXFP8BlockScaling(backward_override=o, keep="all") for o in (None, "dequantized", "high_precision")),
    ],
    ids=str,
)
def test_b12_a_product_saves_x_for_dw_and_w_for_dx(recipe, x, w):
    model = ops.BasicLinear(K, N)
    model.weight.requires_grad_(w)
    found = saved_by(model, torch.randn(ROWS, K, requires_grad=x), recipe=recipe)
    assert found == sorted(expected(recipe, x, w), key=str)


@pytest.mark.row("B12")
@pytest.mark.parametrize(("x", "w"), COMBINATIONS)
def test_b12_a_quantized_parameter_is_saved_as_itself(x, w):
    recipe = recipes.MXFP8BlockScaling()
    with opfuse.quantized_model_init(recipe=recipe):
        model = ops.BasicLinear(K, N)
    model.weight.requires_grad_(w)
    found = saved_by(model, torch.randn(ROWS, K, requires_grad=x), recipe=recipe)
    assert found == sorted(mxfp8(ROWS, K, rowwise=False) * w + ["weight"] * x, key=str)


NOTHING = {
    "identity": (ops.Identity, 0),
    "reshape": (lambda: ops.Reshape((-1,)), 0),
    "constant_scale": (lambda: ops.ConstantScale(2.0), 0),
    "bias": (lambda: ops.Bias(K), 0),
    "add_extra_input": (ops.AddExtraInput, 1),
    "add_extra_input in place": (lambda: ops.AddExtraInput(in_place=True), 1),
    "make_extra_output": (ops.MakeExtraOutput, 0),
    "quantize": (ops.Quantize, 0),
    "quantize the gradient": (lambda: ops.Quantize(False, True), 0),
    "dropout in evaluation": (lambda: ops.Dropout(0.5).eval(), 0),
}


@pytest.mark.row("B12")
@pytest.mark.parametrize("recipe", [None, recipes.MXFP8BlockScaling()], ids=str)
@pytest.mark.parametrize("name", list(NOTHING))
def test_b12_ops_whose_derivative_is_constant_save_nothing(name, recipe):
    make, extras = NOTHING[name]
    extra = [torch.randn(ROWS, K) for _ in range(extras)]
    assert saved_by(make(), torch.randn(ROWS, K, requires_grad=True), *extra, recipe=recipe) == []


@pytest.mark.row("B12")
@pytest.mark.parametrize("make", [ops.GELU, ops.ReLU, ops.SwiGLU, ops.SiTUGLU, ops.ClampedSwiGLU], ids=lambda c: c.__name__)
def test_b12_an_activation_saves_its_input_itself(make):
    assert saved_by(make(), torch.randn(ROWS, K, requires_grad=True)) == ["x"]
    assert saved_by(make(), torch.randn(ROWS, K)) == []


def test_an_activation_may_save_one_byte_an_element():
    assert saved_by(ops.GELU(cache_quantized_input=True), torch.randn(ROWS, K, requires_grad=True)) == sorted(
        [ROWS * K, FP32], key=str
    )


def test_dropout_saves_one_byte_an_element():
    assert saved_by(ops.Dropout(0.5), torch.randn(ROWS, K, requires_grad=True)) == [ROWS * K]


@pytest.mark.row("B12")
@pytest.mark.parametrize(("x", "s"), COMBINATIONS)
def test_b12_a_scaled_activation(x, s):
    found = saved_by(ops.ScaledSwiGLU(), torch.randn(ROWS, K, requires_grad=x), torch.randn(ROWS, requires_grad=s))
    assert found == ["extra0"] * x + ["x"] * (x or s)


def norm_cases():
    yield ops.RMSNorm, (True, True), ["weight", "x", ROWS * FP32]
    yield ops.RMSNorm, (False, True), ["x", ROWS * FP32]
    yield ops.RMSNorm, (True, False), ["weight", "x", ROWS * FP32]
    yield ops.RMSNorm, (False, False), []
    yield ops.LayerNorm, (True, True), ["weight", "x", ROWS * FP32, ROWS * FP32]
    yield ops.LayerNorm, (False, True), ["x", ROWS * FP32, ROWS * FP32]
    yield ops.LayerNorm, (False, False), []


@pytest.mark.row("B12")
@pytest.mark.parametrize(("make", "wants", "wanted"), list(norm_cases()))
def test_b12_a_norm_saves_its_input_and_statistics(make, wants, wanted):
    model = make(K)
    model.requires_grad_(wants[1])
    assert saved_by(model, torch.randn(ROWS, K, requires_grad=wants[0])) == sorted(wanted, key=str)


@pytest.mark.row("B12")
def test_b12_a_norm_of_which_only_the_bias_trains_saves_nothing():
    model = ops.LayerNorm(K)
    model.weight.requires_grad_(False)
    x = torch.randn(ROWS, K)
    assert saved_by(model, x) == []
    assert torch.equal(model.bias.grad, torch.full((K,), float(ROWS)))


@pytest.mark.row("B12")
def test_b12_a_pipeline_saves_what_its_ops_save():
    model = ops.Sequential(ops.RMSNorm(K), ops.Linear(K, N), ops.GELU(), ops.Linear(N, K, bias=False)).to(torch.bfloat16)
    found = saved_by(model, torch.randn(ROWS, K, dtype=torch.bfloat16, requires_grad=True))
    plain = [ROWS * K * BF16, ROWS * N * BF16, ROWS * N * BF16]  # normal, GELU's input and output
    assert found == sorted(["0.weight", "x", ROWS * FP32, "1.weight", "3.weight", *plain], key=str)


@pytest.mark.row("B12")
def test_b12_frozen_layers_save_no_input():
    model = ops.Sequential(ops.Linear(K, N), ops.GELU(), ops.Linear(N, K))
    model.requires_grad_(False)
    assert saved_by(model, torch.randn(ROWS, K)) == []
    assert saved_by(model, torch.randn(ROWS, K, requires_grad=True)) == sorted(["0.weight", "2.weight", ROWS * N * FP32], key=str)
    model[2].requires_grad_(True)
    assert saved_by(model, torch.randn(ROWS, K)) == [ROWS * N * FP32]


def test_nothing_is_saved_without_gradients():
    model, x = ops.Sequential(ops.RMSNorm(K), ops.Linear(K, N), ops.GELU()), torch.randn(ROWS, K, requires_grad=True)
    with torch.no_grad():
        assert saved_by(model, x) == []
    with torch.inference_mode():
        assert saved_by(model, x) == []


def spoiled(tensor, attempt):
    """Other values of the same dtype: places of a permutation stay places."""
    if tensor.dtype == torch.uint8:
        return 1 - tensor
    if not tensor.dtype.is_floating_point:
        return tensor.reshape(-1).roll(1 + attempt).reshape(tensor.shape)
    return torch.full_like(tensor, float("nan")) if attempt == 0 else -tensor - 1


def gradients(op, x, extras, *, spoil=None, attempt=0):
    """Gradients of all leaves, and how many tensors were saved; saved tensor number ``spoil`` comes back with other values."""
    count = 0

    def pack(tensor):
        nonlocal count
        count += 1
        return tensor, count - 1

    hooks = torch.autograd.graph.saved_tensors_hooks(
        pack, lambda packed: spoiled(packed[0].detach(), attempt) if packed[1] == spoil else packed[0]
    )
    leaves = [leaf for leaf in (x, *extras, *op.parameters()) if leaf.requires_grad]
    torch.manual_seed(5)
    with hooks:
        outputs = tuple_of(op(x, *extras))
    torch.manual_seed(6)
    return torch.autograd.grad(outputs, leaves, [torch.randn_like(y) for y in outputs], materialize_grads=True), count


ELSEWHERE = ("grouped_linear", "token_combine-0")
"""Cases with a group without rows, whose saved state nobody reads, and with a product of torch's own between two ops."""
PLAIN = {name: case for name, case in ALL if not name.startswith(ELSEWHERE)}


@pytest.mark.row("B12")
@pytest.mark.parametrize("case", PLAIN.values(), ids=PLAIN)
def test_b12_every_saved_tensor_changes_a_gradient_that_is_wanted(case):
    op, x, extras = make(case, torch.float32)
    leaves = [x, *extras, *op.parameters()]
    for wanted in product((False, True), repeat=len(leaves)):
        for leaf, requires_grad in zip(leaves, wanted):
            leaf.requires_grad_(requires_grad)
        if not any(wanted):
            continue
        want, count = gradients(op, x, extras)
        for spoil in range(count):
            others = [gradients(op, x, extras, spoil=spoil, attempt=attempt)[0] for attempt in range(2)]
            assert any(not torch.equal(a, b) for other in others for a, b in zip(want, other)), (wanted, spoil)


class Shifted(ops.PointwiseOperation):
    """SReLU(x) + shift: the gradient of the shift reads neither."""

    kind = "shifted"
    math = ops.Pointwise(
        "shifted",
        forward="(x > 0.0f ? x * x : 0.0f) + shift",
        backward=("2.0f * dy * fmaxf(x, 0.0f)",),
        value=lambda x, shift: x.clamp_min(0).square() + shift,
        grad=lambda dy, x, shift: (2 * dy * x.clamp_min(0),),
        operands={"shift": "row"},
        operand_backward={"shift": "dy"},
        operand_grad=lambda dy, x, shift: {"shift": dy},
    )
    sources = {"shift": "shift"}

    def __init__(self):
        super().__init__(None)
        self.shift = torch.nn.Parameter(torch.randn(K))


@pytest.mark.row("B12")
def test_b12_an_input_that_only_an_unwanted_gradient_reads_is_not_saved():
    op, x = Shifted(), torch.randn(ROWS, K)
    assert saved_by(op, x) == []
    assert torch.equal(op.shift.grad, torch.full((K,), float(ROWS)))
    assert saved_by(op, x.requires_grad_()) == ["x"]


@pytest.mark.row("B12")
@pytest.mark.parametrize("recipe", [None, recipes.MXFP8BlockScaling()], ids=str)
@pytest.mark.parametrize("kind", ["scaled_swiglu", "scaled_srelu"])
def test_b12_a_scale_alone_gets_the_gradient_it_gets_beside_others(kind, recipe):
    """Behind frozen layers, and in one fused backward with a bias."""
    tail = [ops.Bias(K), ops.Linear(K, N)]
    width = 2 * K if kind == "scaled_swiglu" else K
    model = ops.Sequential(ops.Linear(K, width), ops.OPS[kind](), *tail).requires_grad_(False)
    scale, x = torch.randn(ROWS, requires_grad=True), torch.randn(ROWS, K)
    found = []
    for everything in (True, False):
        model.requires_grad_(everything)
        with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x, scale)
        found.append(torch.autograd.grad(y, scale, torch.ones_like(y))[0])
    assert torch.equal(*found)
