"""The head and the loss in one op: numbers against fp64 within what fp32 sums may lose, memory, and where the op may stand."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import opfuse
from opfuse import ops, recipes
from opfuse.compiler.plain import products
from opfuse.config import loads
from opfuse.errors import DtypeError, GemmError, QuantizerError, RecipeError, ShapeError, UnsupportedError
from opfuse.formats import COLUMNWISE, ROWWISE
from opfuse.numerics import cross_entropy as definition
from opfuse.numerics.cross_entropy import room_in
from opfuse.recipes import zoo
from opfuse.runtime.replay.dispatch import interpreted
from opfuse.tensors import quantizers
from opfuse.tensors.gemm import gemm
from tests.compiler.harness import recipe_for
from tests.turns import in_turn

K, V = 24, 53
U = 2.0**-24
"""What one operation in fp32 may lose, relative to its result."""

OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": True},
    {"label_smoothing": 0.1},
    {"label_smoothing": 1.0, "bias": True},
    {"z_loss": 1e-2},
    {"softcap": 3.0},
    {"bias": True, "label_smoothing": 0.2, "z_loss": 1e-3, "softcap": 2.0, "ignore_index": 7},
]


def made(rows, *, dtype=torch.float32, chunk=8, **options):
    """The op, x and targets, of which every fifth is ignored."""
    torch.manual_seed(0)
    op = ops.LinearCrossEntropy(K, V, chunk=chunk, dtype=dtype, **options)
    with torch.no_grad():
        op.weight.normal_()
    x = torch.randn(rows, K).to(dtype).requires_grad_()
    targets = torch.randint(0, V, (rows,))
    targets[4::5] = op.ignore_index
    return op, x, targets


def row_losses(op, logits, targets):
    """The losses of rows by torch and the published formulas."""
    options = {"ignore_index": op.ignore_index, "label_smoothing": op.label_smoothing, "reduction": "none"}
    kept = targets != op.ignore_index
    return F.cross_entropy(logits, targets, **options) + op.z_loss * logits.logsumexp(-1).square() * kept


def exact(op, x, targets, incoming=1.0):
    """Loss and gradients in fp64, and what each may be off."""
    kept = targets != op.ignore_index
    leaves = [p.detach().double().requires_grad_() for p in (x, *op.parameters())]
    x64, w, *bias = leaves
    raw = F.linear(x64, w, *bias)
    logits = raw if op.softcap is None else op.softcap * torch.tanh(raw / op.softcap)
    logits.retain_grad()
    raw.retain_grad()
    rows = row_losses(op, logits, targets)
    loss = {"none": rows, "sum": rows.sum(), "mean": rows.sum() / kept.sum()}[op.reduction]
    grads = torch.autograd.grad(loss, [raw, *leaves], torch.full_like(loss, incoming))
    with torch.no_grad():
        # Products of K terms and a bias; a softcap has a slope of at most 1, and three operations of its own.
        off = (K + 2) * U * F.linear(x64.abs(), w.abs(), *[b.abs() for b in bias]).amax(-1) + 4 * U * logits.abs().amax(-1)
        size = logits.logsumexp(-1).abs() + logits.abs().amax(-1)
        off_loss = 2 * off + (V + 16) * U * (1 + size) + 2 * op.z_loss * size * (off + (V + 8) * U * (1 + size))
        p, dy, unit = logits.softmax(-1), grads[0], torch.finfo(op.weight.dtype).eps / 2
        share = abs(incoming) / (kept.sum() if op.reduction == "mean" else 1)
        relative = (2 * off + (V + 16) * U)[:, None] * (1 + 2 * op.z_loss * (1 + size))[:, None]
        off_dy = (share * (relative * (p + 2 * U) + 4 * U) + unit * dy.abs()) * kept[:, None]
        if op.softcap is not None:  # its slope is off by what the logits are, relative to c
            off_dy += share * 2 * (off / op.softcap + 4 * U)[:, None] * (1 + 2 * op.z_loss * size)[:, None] * kept[:, None]
        sums = [(off_dy + (V + 4) * U * dy.abs()) @ w.abs(), (off_dy + (len(x) + 4) * U * dy.abs()).T @ x64.abs()]
        sums += [(off_dy + (len(x) + 4) * U * dy.abs()).sum(0)] * len(bias)
        bounds = [part + 2 * unit * grad.abs() for part, grad in zip(sums, grads[1:])]
        total = {"none": off_loss * kept, "sum": (off_loss * kept).sum(), "mean": (off_loss * kept).sum() / kept.sum()}
        total = total[op.reduction] + (len(x) + 2) * U * loss.abs()
    return (loss.detach(), *grads[1:]), (total, *bounds)


@pytest.mark.few
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("rows", "dtype"), [(19, torch.float32), (19, torch.bfloat16), (1, torch.float32), (16, torch.bfloat16)])
def test_loss_and_gradients_are_those_of_fp64(rows, dtype, options, reduction):
    op, x, targets = made(rows, dtype=dtype, reduction=reduction, **options)
    loss = op(x, targets)
    assert loss.dtype == torch.float32
    loss.backward(torch.full_like(loss, 3.0))
    wanted, bounds = exact(op, x, targets, 3.0)
    for got, want, most in zip((loss.detach(), x.grad, *(p.grad for p in op.parameters())), wanted, bounds, strict=True):
        worst = ((got.double() - want).abs() / most.clamp(min=1e-30)).max().item()
        assert worst <= 1, f"{worst:.3g} of what it may be off"


def test_leading_dimensions_and_the_loss_of_each_row():
    op, x, targets = made(24, reduction="none")
    assert torch.equal(op(x.reshape(2, 3, 4, K), targets.reshape(2, 3, 4)), op(x, targets).reshape(2, 3, 4))


@pytest.mark.row("X07")
def test_a_loss_has_the_same_bits_in_any_chunk_under_a_batch_invariant_recipe():
    """Without one they are those of torch's products, which sum in an order that depends on the number of rows."""
    recipe = recipes.MXFP8BlockScaling(batch_invariant=True)
    op, x, targets = made(150, reduction="none")
    others = [ops.LinearCrossEntropy(K, V, chunk=chunk, reduction="none") for chunk in (1, 7, 64, 1000)]
    for other in others:
        other.weight = op.weight
    with opfuse.autocast(recipe=recipe):
        whole = op(x, targets)
        assert all(torch.equal(other(x, targets), whole) for other in others)
        assert torch.equal(torch.cat([op(x[i : i + 1], targets[i : i + 1]) for i in range(9)]), whole[:9])
    assert all(torch.allclose(other(x, targets), whole, rtol=1e-5, atol=1e-5) for other in others)


@pytest.mark.parametrize(
    ("words", "of", "rows"),
    [
        *(
            (128256, of, rows)
            for of, rows in ((512, 2048), (8192, 2048), (16384, 2048), (20000, 2432), (32768, 4096), (10**6, 4096))
        ),
        *((words, 8192, rows) for words, rows in ((32768, 4096), (65536, 4096), (151936, 1664), (262144, 1024), (10**6, 1024))),
        (53, 8, 4096),
    ],
)
def test_a_chunk_has_a_gibibyte_of_logits_or_an_eighth_of_all_unless_it_is_given(words, of, rows):
    assert ops.LinearCrossEntropy(8, words, device="meta").rows_at_a_time(of) == rows
    assert ops.LinearCrossEntropy(8, words, chunk=100, device="meta").rows_at_a_time(of) == 100


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(("rows", "words"), [(1, V), (37, V), (128, 1001)])
def test_products_take_a_gradient_where_its_logits_were(rows, words, dtype):
    """Rows of 16 bits have gaps between them, with any bits: those of NaN here."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    dy = room_in(torch.full((rows, words), torch.nan, dtype=wide), dtype).copy_(torch.randn(rows, words))
    assert dy.is_contiguous() is (dtype == wide or rows == 1)
    x, weight = torch.randn(rows, K).to(dtype), torch.randn(words, K).to(dtype)
    for name, other in (("dgrad", weight), ("wgrad", x)):
        for out_dtype in (dtype, wide):
            found, wanted = (gemm(name, each, other, dtype=dtype, out_dtype=out_dtype) for each in (dy, dy.contiguous()))
            torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_where_all_rows_are_ignored(reduction):
    op, x, targets = made(9, reduction=reduction, z_loss=0.1, label_smoothing=0.1, softcap=2.0, bias=True)
    targets.fill_(-100)
    loss = op(x, targets)
    own = F.cross_entropy(F.linear(x, op.weight), targets, reduction=reduction)
    assert torch.equal(loss.isnan(), own.isnan())
    assert loss.isnan().all() if reduction == "mean" else torch.equal(loss, own)
    loss.sum().backward()
    assert all(torch.equal(leaf.grad, torch.zeros_like(leaf)) for leaf in (x, *op.parameters()))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_r10_no_rows_give_what_torch_gives(reduction):
    op, x, targets = made(0, reduction=reduction)
    loss = op(x, targets)
    wanted = F.cross_entropy(F.linear(x, op.weight), targets, reduction=reduction)
    torch.testing.assert_close(loss, wanted, equal_nan=True)
    loss.sum().backward()
    assert torch.equal(op.weight.grad, torch.zeros_like(op.weight))


@pytest.mark.row("R18")
def test_r18_what_is_not_finite_shows_where_torch_shows_it():
    """An ignored row adds nothing to the loss, but its gradient is not finite: 0 times what is not."""
    op, x, targets = made(10, reduction="none")
    bad = x.detach().clone()
    bad[1, 3], bad[4, 0] = float("inf"), float("nan")  # row 4 is ignored
    bad.requires_grad_()
    loss = op(bad, targets)
    assert loss.isnan().nonzero().flatten().tolist() == [1]
    own = bad.detach().clone().requires_grad_()
    F.cross_entropy(F.linear(own, op.weight), targets, reduction="none").sum().backward()
    loss.sum().backward()
    assert own.grad.isnan().all(-1).nonzero().flatten().tolist() == [1, 4]
    assert torch.equal(bad.grad.isnan(), own.grad.isnan())


@pytest.mark.row("R18")
def test_r18_a_word_that_is_masked_out_leaves_rows_finite():
    """A logit of -inf, of word 0 too, to which ignored rows point, under a z-loss."""
    op, x, targets = made(10, bias=True, z_loss=1e-2)
    targets[targets == 0] = 1
    with torch.no_grad():
        op.bias[0] = -float("inf")
    op(x, targets).backward()
    leaves = [p.detach().double().requires_grad_() for p in (x, *op.parameters())]
    kept = targets != op.ignore_index
    (row_losses(op, F.linear(*leaves), targets).sum() / kept.sum()).backward()
    for got, want in zip((x, *op.parameters()), leaves, strict=True):
        torch.testing.assert_close(got.grad, want.grad.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("wrong", [-1, V, 2**40, -101])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_target_that_is_no_word_makes_its_row_nan(reduction, wrong):
    op, x, targets = made(10, reduction=reduction, label_smoothing=0.1)
    targets[2] = wrong
    loss = op(x, targets)
    assert loss.isnan().nonzero().flatten().tolist() == ([2] if reduction == "none" else [0]) or loss.isnan()
    loss.sum().backward()
    assert x.grad.isnan().all(-1).nonzero().flatten().tolist() == [2]
    assert op.weight.grad.isnan().all()


def test_what_is_no_target_is_refused():
    op, x, targets = made(10)
    for wrong in (targets.float(), targets.int()):
        with pytest.raises(DtypeError, match="targets: wants int64"):
            op(x, wrong)
    for wrong in (targets[:9], targets[:, None], targets[0]):
        with pytest.raises(ShapeError, match=r"targets: wants shape \(10,\)"):
            op(x, wrong)
    with pytest.raises(ShapeError, match="input"):
        op(x[:, :8], targets)


class Largest(TorchDispatchMode):
    """The most elements that a tensor had that was made, but for gradients of the weight."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(made, torch.Tensor) and not func.is_view:
                self.most = max(self.most, made.numel())
        return result


@pytest.mark.few
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("trains", [True, False])
def test_logits_of_all_rows_are_never_there(reduction, trains):
    op, x, targets = made(200, reduction=reduction, softcap=2.0, label_smoothing=0.1, z_loss=0.1)
    kept: list[int] = []

    def pack(tensor):
        kept.append(tensor.numel())
        return tensor

    with Largest() as largest, torch.set_grad_enabled(trains), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = op(x, targets)
        if trains:
            loss.sum().backward()
    assert largest.most <= max(200 * K, K * V) < 200 * V
    assert sum(kept) <= (200 * K + K * V + 200) * trains


@pytest.mark.row("B12")
def test_b12_gradients_that_nobody_wants_are_not_made():
    op, x, targets = made(20, bias=True)
    for wanted in itertools.product((False, True), repeat=3):
        leaves = (x, op.weight, op.bias)
        for leaf, wants in zip(leaves, wanted):
            leaf.requires_grad_(wants)
            leaf.grad = None
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: (sizes.append(t.numel()), t)[1], lambda t: t):
            loss = op(x, targets)
        assert sorted(sizes) == sorted([n for n, wants in zip((20 * K, K * V, V), wanted) if wants] + [1] * any(wanted))
        if any(wanted):
            loss.backward()
        assert [leaf.grad is not None for leaf in leaves] == list(wanted)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_program_repeats_what_is_interpreted(reduction):
    op, x, targets = made(19, reduction=reduction, bias=True, softcap=3.0)

    def step():
        loss = op(x, targets)
        loss.sum().backward()
        found = [loss.detach().clone(), x.grad, *(p.grad for p in op.parameters())]
        x.grad = None
        op.zero_grad()
        return found

    with interpreted():
        wanted = step()
    for _ in range(3):
        assert all(map(torch.equal, step(), wanted))


@pytest.mark.cpu
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_it_is_one_op_of_a_graph_of_torch_compile(reduction):
    op, x, targets = made(19, reduction=reduction)
    model = ops.Sequential(ops.RMSNorm(K), op)
    found = []
    for call in (model, torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)):
        x.grad = None
        loss = call(x, targets)
        (loss * 3).sum().backward()
        parameters = dict(call.named_parameters())
        found.append([loss.detach(), x.grad, *(parameters[name].grad for name in sorted(parameters))])
    assert all(map(torch.equal, *found))


def test_it_ends_a_sequential_from_a_file():
    options = "softcap: 30.0, label_smoothing: 0.1, reduction: sum, chunk: 4"
    text = f"""
version: 1
recipe: {{kind: none}}
pipeline:
  ops:
    - {{op: rms_norm, size: {K}}}
    - {{op: linear_cross_entropy, in_features: {K}, vocabulary: {V}, {options}}}
"""
    model = loads(text).build()
    _, x, targets = made(9)
    other = ops.Sequential(
        ops.RMSNorm(K), ops.LinearCrossEntropy(K, V, softcap=30.0, label_smoothing=0.1, reduction="sum", chunk=4)
    )
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(x, targets), other(x, targets))


def test_its_state_is_that_of_nn_linear():
    for bias in (False, True):
        head = nn.Linear(K, V, bias=bias)
        op = ops.LinearCrossEntropy(K, V, bias)
        op.load_state_dict(head.state_dict())
        assert [*op.state_dict()] == [*head.state_dict()]
        head.load_state_dict(op.state_dict())


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_weight_tied_to_an_embedding_gets_both_gradients(reduction):
    op, _, targets = made(19, reduction=reduction)
    table = nn.Embedding(V, K)
    op.weight = table.weight
    tokens = torch.randint(0, V, (19,))
    op(torch.tanh(table(tokens)), targets).sum().backward()
    weight = table.weight.detach().double().requires_grad_()
    F.cross_entropy(torch.tanh(weight[tokens]) @ weight.T, targets, reduction="sum").backward()
    wanted = weight.grad / ((targets != -100).sum() if reduction == "mean" else 1)
    torch.testing.assert_close(table.weight.grad.double(), wanted, rtol=1e-4, atol=1e-5)


def test_a_second_derivative_is_refused():
    op, x, targets = made(9)
    with pytest.raises(UnsupportedError, match="wants create_graph=False"):
        torch.autograd.grad(op(x, targets), x, create_graph=True)


def test_two_backward_passes_of_one_forward_add_up():
    op, x, targets = made(19)
    loss = op(x, targets)
    loss.backward(retain_graph=True)
    once = op.weight.grad.clone()
    loss.backward()
    assert torch.equal(op.weight.grad, 2 * once)


@pytest.mark.parametrize("recipe", [recipes.Float8CurrentScaling(), recipes.MXFP8BlockScaling()], ids=str)
def test_no_recipe_casts_the_head(recipe):
    op, x, targets = made(32)
    wanted = op(x, targets)
    with opfuse.autocast(recipe=recipe):
        assert torch.equal(op(x, targets), wanted)
    with opfuse.quantized_model_init(recipe=recipe):
        assert type(ops.LinearCrossEntropy(32, 64).weight) is nn.Parameter


# -- quantized products --------------------------------------------------------------------------------------------------------


def mxfp8_backward(role):
    """Scales of tensors in the forward product, MXFP8 in the others."""
    mxfp8 = quantizers.MXFP8Quantizer()
    if role.tensor_type == "grad_output":
        return mxfp8
    return quantizers.HybridQuantizer(quantizers.Float8CurrentScalingQuantizer(torch.float8_e4m3fn), mxfp8)


def mxfp8_weight(role):
    """Formats that meet in the product of dW alone."""
    current = quantizers.Float8CurrentScalingQuantizer(torch.float8_e4m3fn)
    return quantizers.MXFP8Quantizer() if role.tensor_type == "weight" else current


CAST = {
    **{kind: recipe_for(kind) for kind in ("delayed", "fp8_current", "fp8_block", "mxfp8")},
    "fp8_row_scaled": recipes.CustomRecipe(qfactory=zoo.fp8_row_scaled),
    "mxfp8_backward": recipes.CustomRecipe(qfactory=mxfp8_backward),
    "mxfp8_weight": recipes.CustomRecipe(qfactory=mxfp8_weight, allow_mixed_emulation=True),
    "nvfp4": recipe_for("nvfp4", disable_stochastic_rounding=True),
}
OVERRIDDEN = {
    f"{kind}, {override}": recipe.replace(backward_override=override)
    for kind, recipe in CAST.items()
    for override in ("dequantized", "high_precision")
    if kind != "delayed"
}


def quantized(rows=160, *, dtype=torch.float32, **options):
    """An op whose products are quantized, x and targets; the last of its chunks is shorter."""
    torch.manual_seed(0)
    op = ops.LinearCrossEntropy(128, 256, chunk=64, quantized=True, dtype=dtype, **options)
    x = torch.randn(rows, 128).to(dtype).requires_grad_()
    targets = torch.randint(0, 256, (rows,))
    targets[4::5] = op.ignore_index
    return op, x, targets


def by_definition(op, x, targets, recipe):
    """The sum of the losses, dx, dW and db: products in fp64 of what each chunk's operands are cast to."""
    casts = {role: op.stored_quantizer(role, recipe) for role in ("input", "weight", "grad_output")}
    override, fp32, weight, found = recipe.backward_override, torch.float32, casts["weight"].quantize(op.weight), []

    def read(operand, plain):
        if override is None:
            return operand.dequantize(fp32, COLUMNWISE).double()
        return (plain if override == "high_precision" else operand.dequantize(fp32, ROWWISE)).double()

    for piece, aims in zip(*(each.split(op.rows_at_a_time(len(x))) for each in (x, targets))):
        rows = casts["input"].quantize(piece)
        logits = gemm("fprop", rows, weight, dtype=fp32, mixed=True) + op.bias
        wide = not override and fp32 in casts["grad_output"].input_dtypes
        losses, dy = definition.row_losses(logits, aims, op.loss, gradient=fp32 if wide else x.dtype)
        cast = casts["grad_output"].quantize(dy)
        left, right = (dy if override else cast.dequantize(fp32, plane) for plane in (ROWWISE, COLUMNWISE))
        dx, dw = left.double() @ read(weight, op.weight), right.double().t() @ read(rows, piece)
        found.append((losses.sum(), dx, dw, dy.double().sum(0)))
    losses, dx, dw, db = zip(*found)
    return sum(losses), torch.cat(dx), sum(dw), sum(db)


@torch.no_grad()
@pytest.mark.row("R05")
@pytest.mark.parametrize("kind", [*CAST, *in_turn(OVERRIDDEN, of=3)])
@pytest.mark.cpu
def test_quantized_products_are_those_of_the_casts(kind):
    recipe = {**CAST, **OVERRIDDEN}[kind]
    dtype = torch.bfloat16 if "nvfp4" in kind or kind == "fp8_block" else torch.float32
    op, x, targets = quantized(reduction="sum", dtype=dtype, bias=True)
    wanted = by_definition(op, x, targets, recipe)
    first = None
    for _ in range(4):  # interpreted, recorded, repeated twice
        with opfuse.autocast(recipe=recipe), torch.enable_grad():
            loss = op(x, targets)
        got = loss, *torch.autograd.grad(loss, (x, op.weight, op.bias))
        for one, other in zip(got, wanted, strict=True):
            assert (one - other).norm() <= (1e-5 if dtype == torch.float32 else 2**-8) * other.norm()
        first = first or got
        assert all(map(torch.equal, got, first))


QUANTIZED, PLAIN = "emulated", "high precision"


@pytest.mark.parametrize(
    ("kind", "trained", "told"),
    [
        ("fp8_current", ("input", "weight"), {"fprop": QUANTIZED, "dgrad": QUANTIZED, "wgrad": QUANTIZED}),
        ("mxfp8", ("weight",), {"fprop": QUANTIZED, "wgrad": QUANTIZED}),
        ("fp8_block, high_precision", ("input",), {"fprop": QUANTIZED, "dgrad": PLAIN}),
    ],
)
@pytest.mark.cpu
def test_an_explanation_tells_how_the_head_is_multiplied(kind, trained, told):
    op, x, targets = quantized(dtype=torch.bfloat16)
    x.requires_grad_("input" in trained)
    op.weight.requires_grad_("weight" in trained)
    with opfuse.autocast(recipe={**CAST, **OVERRIDDEN}[kind]):
        (plan,) = opfuse.explain(op, x, targets).plans
    assert {each.name for each in plan.graph.products} == set(told)
    assert {each["product"]: each["status"] for each in products(plan)} == told
    formats = {each.name: (each.left, each.right) for each in plan.graph.products}
    assert all(None not in formats[name] for name, status in told.items() if status == QUANTIZED)


@pytest.mark.parametrize(
    ("chunk", "words", "name", "status"),
    [(64, 256, "fprop", "native"), (64, 256, "wgrad", "native"), (8, 256, "wgrad", "emulated"), (64, 264, "fprop", "emulated")],
)
def test_an_explanation_tells_what_a_gpu_multiplies_of_chunks(chunk, words, name, status):
    """Of 128 rows in all: the rows of a chunk, and the words, have to be multiples of 16."""
    op = ops.LinearCrossEntropy(128, words, chunk=chunk, quantized=True, dtype=torch.bfloat16)
    with opfuse.autocast(recipe=CAST["fp8_current"]):
        (plan,) = opfuse.explain(op, torch.randn(128, 128).bfloat16(), torch.zeros(128, dtype=torch.int64)).plans
    key = plan.key._replace(env=plan.key.env._replace(device="cuda", arch=(9, 0)))
    assert {each["product"]: each["status"] for each in products(replace(plan, key=key))}[name] == status


@torch.no_grad()
@pytest.mark.row("R05")
@pytest.mark.parametrize("kind", ["fp8_current", "mxfp8", "fp8_block, dequantized", "mxfp8, high_precision"])
@pytest.mark.cpu
def test_quantized_products_in_bf16_have_gradients_of_parameters_in_fp32_under_autocast(kind):
    """Of chunks that are summed in fp32: nothing is rounded to bf16 in between."""
    recipe = {**CAST, **OVERRIDDEN}[kind]
    op, x, targets = quantized(reduction="sum", dtype=torch.bfloat16, bias=True)
    wanted = by_definition(op, x, targets, recipe)
    op.float()
    for _ in range(3):
        with opfuse.autocast(recipe=recipe), torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
            loss = op(x, targets)
        got = loss, *torch.autograd.grad(loss, (x, op.weight, op.bias))
        for one, other, most in zip(got, wanted, (1e-5, 2**-8, 1e-5, 1e-5), strict=True):
            assert (one - other).norm() <= most * other.norm()


def test_quantized_losses_of_rows_have_the_gradients_of_their_sum():
    """Of casts whose scales are powers of two, so that a factor of two in a gradient changes no code."""
    found = []
    for reduction in ("sum", "none"):
        op, x, targets = quantized(reduction=reduction)
        with opfuse.autocast(recipe=CAST["mxfp8"]):
            loss = op(x, targets)
        found.append([loss.detach().sum(), *torch.autograd.grad(loss, (x, op.weight), torch.full_like(loss, 2.0))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.row("B12")
@pytest.mark.parametrize("trained", ["input", "weight"])
def test_quantized_gradients_that_nobody_wants_are_not_made(trained):
    op, x, targets = quantized()
    leaf, other = (x, op.weight) if trained == "input" else (op.weight, x)
    with opfuse.autocast(recipe=CAST["fp8_block"]):
        wanted = torch.autograd.grad(op(x, targets), leaf)[0]
        other.requires_grad_(False)
        assert torch.equal(torch.autograd.grad(op(x, targets), leaf)[0], wanted)


def test_without_a_recipe_nothing_is_quantized():
    op, x, targets = quantized()
    plain = ops.LinearCrossEntropy(128, 256, chunk=64)
    plain.load_state_dict(op.state_dict())
    assert torch.equal(op(x, targets), plain(x, targets))


class Own(quantizers.Float8CurrentScalingQuantizer):
    """A quantizer of one's own."""


UNFIT = {
    "of one's own": Own(torch.float8_e4m3fn),
    "it draws": quantizers.NVFP4Quantizer(stochastic_rounding=True),
    "a part draws": quantizers.HybridQuantizer(quantizers.NVFP4Quantizer(), quantizers.NVFP4Quantizer(stochastic_rounding=True)),
    "it reduces amaxes": quantizers.Float8CurrentScalingQuantizer(torch.float8_e4m3fn, with_amax_reduction=True),
}


@pytest.mark.parametrize("kind", UNFIT)
@pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
def test_quantizers_that_chunks_cannot_be_cast_by_are_refused(role, kind):
    library = quantizers.Float8CurrentScalingQuantizer(torch.float8_e4m3fn)
    recipe = recipes.CustomRecipe(qfactory=lambda asked: UNFIT[kind] if asked.tensor_type == role else library)
    op, x, targets = quantized(dtype=torch.bfloat16)
    refused = rf"{role}: wants .* draws no random numbers.*Cure: set disable_sto"
    with opfuse.autocast(recipe=recipe), pytest.raises(QuantizerError, match=refused):
        op(x, targets)


def test_a_recipe_that_draws_for_gradients_is_refused_where_they_are_cast():
    op, x, targets = quantized(dtype=torch.bfloat16)
    with opfuse.autocast(recipe=recipes.NVFP4BlockScaling()), pytest.raises(QuantizerError, match="grad_output: wants"):
        op(x, targets)


@pytest.mark.row("R05")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4", "fp8_block"])
@pytest.mark.cpu
def test_rows_that_fill_no_block_are_those_of_a_batch_with_ignored_rows(kind, reduction):
    """The last chunk has 11 rows of 32, or of 16."""
    op, x, targets = quantized(75, dtype=torch.bfloat16, reduction=reduction, bias=True, ignore_index=7)
    found = []
    for spare in (0, 21):
        more = F.pad(x.detach(), (0, 0, 0, spare)).requires_grad_()
        with opfuse.autocast(recipe=CAST[kind]):
            loss = op(more, F.pad(targets, (0, spare), value=op.ignore_index))
        incoming = F.pad(torch.linspace(-1, 2, 75), (0, spare), value=5.0) if reduction == "none" else torch.tensor(3.0)
        dx, *rest = torch.autograd.grad(loss, (more, op.weight, op.bias), incoming)
        found.append([loss.detach()[:75] if reduction == "none" else loss.detach(), dx[:75], *rest])
    assert all(map(torch.equal, *found))
    assert found[0][0].isfinite().all()


def test_a_chunk_that_fills_no_block_is_a_batch_of_its_own():
    op, x, targets = quantized(100, reduction="sum")
    other = ops.LinearCrossEntropy(128, 256, chunk=50, quantized=True, reduction="sum")
    other.weight = op.weight
    found = []
    for call, size in ((other, 100), (op, 50)):
        with opfuse.autocast(recipe=CAST["mxfp8"]):
            losses = [call(each, aims) for each, aims in zip(x.split(size), targets.split(size))]
        found.append([sum(losses), *torch.autograd.grad(sum(losses), (x, op.weight))])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_what_the_backward_pass_cannot_cast_is_refused_before_it(reduction):
    op = ops.LinearCrossEntropy(128, 1000, quantized=True, reduction=reduction)
    x, targets = torch.randn(32, 128).requires_grad_(), torch.zeros(32, dtype=torch.int64)
    wanted = r"LinearCrossEntropy.* weight: wants .* by 32 .*Cure: build the op with vocabulary=1024, .* the last 24"
    with opfuse.autocast(recipe=CAST["mxfp8"]), pytest.raises(ShapeError, match=wanted):
        op(x, targets)
    with torch.no_grad(), opfuse.autocast(recipe=CAST["mxfp8"]):
        assert op(x, targets).isfinite().all()

    def factory(role):
        of_gradients = role.tensor_type == "grad_output"
        return quantizers.MXFP8Quantizer() if of_gradients else quantizers.Float8CurrentScalingQuantizer(torch.float8_e4m3fn)

    op, x, targets = quantized(reduction=reduction)
    recipe = recipes.CustomRecipe(qfactory=factory)
    with opfuse.autocast(recipe=recipe), pytest.raises(GemmError, match=r"LinearCrossEntropy.* dgrad of grad_output and weight"):
        op(x, targets)
    with opfuse.autocast(recipe=recipe.replace(allow_mixed_emulation=True)):
        op(x, targets).sum().backward()


def test_a_dtype_that_no_cast_takes_is_that_of_the_parameters():
    op, x, targets = quantized(dtype=torch.float64)
    with opfuse.autocast(recipe=CAST["mxfp8"]), pytest.raises(DtypeError, match=r"Cure: call model\.to\(torch\.float32\)"):
        op(x.float(), targets)


@pytest.mark.row("X07")
def test_x07_the_quantized_loss_of_a_row_depends_on_no_other_row_under_a_batch_invariant_recipe():
    op, x, targets = quantized(75, reduction="none")
    with opfuse.autocast(recipe=recipes.MXFP8BlockScaling(batch_invariant=True)):
        whole = op(x, targets)
        assert torch.equal(op(x[70:], targets[70:]), whole[70:])
    with (
        opfuse.autocast(recipe=recipes.DelayedScaling(batch_invariant=True)),
        pytest.raises(RecipeError, match=r"LinearCrossEntropy.* input under DelayedScaling: wants inputs cast row by row"),
    ):
        op(x, targets)


def test_a_recipe_that_draws_for_gradients_alone_serves_where_it_casts_none():
    draws, plain = recipes.NVFP4BlockScaling(), CAST["nvfp4"]
    op, x, targets = quantized(dtype=torch.bfloat16)
    found = []
    for recipe in (draws, plain):
        with opfuse.autocast(recipe=recipe), torch.no_grad():
            found.append([op(x, targets)])
        with opfuse.autocast(recipe=recipe.replace(backward_override="dequantized")):
            loss = op(x, targets)
        found[-1] += [loss, *torch.autograd.grad(loss, (x, op.weight))]
    assert all(map(torch.equal, *found))


@pytest.mark.cpu
def test_quantized_it_is_one_op_of_a_graph_of_torch_compile():
    op, x, targets = quantized()
    pipeline = ops.Sequential(op)
    compiled = torch.compile(pipeline, fullgraph=True)
    found = []
    for call in (pipeline, compiled, compiled):
        with opfuse.autocast(recipe=CAST["fp8_current"]):
            loss = call(x, targets)
        found.append([loss.detach(), *torch.autograd.grad(loss, (x, op.weight))])
    assert all(torch.equal(one, other) for each in found[1:] for one, other in zip(each, found[0], strict=True))
