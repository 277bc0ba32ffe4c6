"""A product that is made with the chain behind it leaves what the product and the chain leave, one after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import opfuse
from opfuse import ops
from opfuse.errors import ShapeError
from opfuse.events import ProductChosen, collected
from opfuse.fusions import RULES
from opfuse.kernels.products.chained import product_chain
from opfuse.tensors import gemm
from opfuse.tensors.quantizers import Float8CurrentScalingQuantizer, MXFP8Quantizer
from tests.compiler.harness import UNFUSED, Step, differences, randn, recipe_for, run, to

WIDTH, ROWS = 128, 64


def mlp():
    torch.manual_seed(0)
    return to(ops.Sequential(ops.Linear(WIDTH, 2 * WIDTH), ops.GELU(), ops.Linear(2 * WIDTH, WIDTH)), torch.bfloat16)


@pytest.mark.row("X09")
@pytest.mark.parametrize(
    ("name", "override"), [("delayed", None), ("fp8_current", None), ("fp8_block", None), ("fp8_block", "high_precision")]
)
def test_bias_gelu_and_cast_follow_the_product(name, override, monkeypatch):
    calls = []

    def chained(left, right, stages, encode, **options):
        calls.append(([stage.math.name for stage in stages], encode is not None, options["keep"]))
        return product_chain(left, right, stages, encode, **options)

    def step():
        x = randn(2, ROWS // 2, WIDTH, dtype=torch.bfloat16)
        return run(mlp(), x, step=Step(recipe_for(name, override), RULES))

    apart = step()
    monkeypatch.setattr(gemm, "why_apart", lambda *_, **__: "")
    monkeypatch.setattr(gemm, "product_chain", chained)
    assert differences(step().tensors, apart.tensors) == []
    assert calls == [(["bias", "gelu"], True, [1]), (["bias"], False, [])]


@pytest.mark.cpu
def test_products_with_chains_emit_how_they_are_made():
    x = randn(ROWS, WIDTH, dtype=torch.bfloat16)
    with collected(ProductChosen) as chosen:
        run(mlp(), x, step=Step(recipe_for("fp8_current"), RULES))
    run(mlp(), x, step=Step(recipe_for("fp8_current"), RULES))  # to which nobody listens
    assert [(tuple(each.shape), each.ops) for each in chosen] == [
        ((ROWS, 2 * WIDTH), ("bias", "gelu")),
        ((ROWS, WIDTH), ("bias",)),
    ]
    assert {each.apart for each in chosen} == {"no GPU whose kernels are used"}
    with opfuse.autocast(recipe=recipe_for("fp8_current")):
        found = opfuse.explain(mlp(), x)
    assert found.chains == ()
    text = str(replace(found, chains=(chosen[0], replace(chosen[1], apart=""))))
    assert "chain    bias gelu behind a product (64, 256): apart, no GPU whose kernels are used\n" in text
    assert "chain    bias behind a product (64, 128): one launch\n" in text
    derivatives = "         derivatives run apart from the dgrad before them: one launch took 1.00 to 1.15 times as long\n"
    assert derivatives in text
    with torch.no_grad(), opfuse.autocast(recipe=recipe_for("fp8_current")):
        assert derivatives not in str(replace(opfuse.explain(mlp(), x), chains=tuple(chosen)))
    with opfuse.autocast(recipe=recipe_for("fp8_current", "dequantized")):  # whose dgrad is in high precision
        assert derivatives not in str(replace(opfuse.explain(mlp(), x), chains=tuple(chosen)))


@pytest.mark.parametrize(
    ("act", "inner", "wanted"),
    [
        (ops.ScaledSwiGLU, 2 * WIDTH, "a gated activation behind them is slower in one launch"),
        (ops.SReLU, WIDTH, "the one launch of a product and its chain is made of one group"),
    ],
)
def test_products_of_experts_emit_how_they_are_made(act, inner, wanted):
    layers = ops.GroupedLinear(2, WIDTH, inner, bias=False), act(), ops.GroupedLinear(2, WIDTH, WIDTH, bias=False)
    model, sizes = to(ops.Sequential(*layers), torch.bfloat16), torch.tensor([ROWS // 2] * 2)
    extras = (sizes, torch.rand(ROWS), sizes) if act is ops.ScaledSwiGLU else (sizes, sizes)
    with collected(ProductChosen) as chosen, Step(recipe_for("fp8_current"), RULES).scope():
        model(randn(ROWS, WIDTH, dtype=torch.bfloat16), *extras)
    (product,) = chosen
    assert (tuple(product.shape), product.ops) == ((ROWS, inner), (layers[1].math.name,))
    assert product.apart == f"products of experts: {wanted}"


def test_sums_that_are_not_rounded_are_made_apart():
    """The one launch rounds sums before its chain."""
    with collected(ProductChosen) as chosen:
        run(mlp(), randn(ROWS, WIDTH, dtype=torch.bfloat16), step=Step(recipe_for("delayed", rounding="single"), RULES))
    assert [each.apart for each in chosen] == [
        "sums that are not rounded: in fp32 they leave a thread no registers for its chain"
    ] * 2


@pytest.mark.parametrize("name", ["delayed", "fp8_block"])
def test_a_product_that_is_invariant_is_made_with_its_chain(name, monkeypatch):
    """Sums have one order there; what the one launch does not take after all is an invariant product again."""
    calls = []
    monkeypatch.setattr(gemm, "why_apart", lambda *_, **__: "")
    monkeypatch.setattr(gemm, "product_chain", lambda *a, **k: calls.append(k["invariant"]) or product_chain(*a, **k))
    x, results = randn(ROWS, WIDTH, dtype=torch.bfloat16), []
    for rules in (RULES, UNFUSED):
        results.append(run(mlp(), x, step=Step(recipe_for(name, batch_invariant=True), rules)).tensors)
    assert calls == [True] * 2
    assert differences(*results) == []


def test_operands_of_other_lengths_are_refused_before_they_are_read():
    quantizer = Float8CurrentScalingQuantizer(torch.float8_e4m3fn)
    left, right = (quantizer.quantize(torch.randn(32, length)) for length in (64, 48))
    product = gemm.PendingProduct(left, right, torch.bfloat16, None, {})
    with pytest.raises(ShapeError, match="wants equal summed dimensions, got 64 and 48"):
        product.chained([], None, dtype=torch.bfloat16, rounding="per_op", keep=())


def test_operands_that_do_not_meet_are_not_added_in_place(monkeypatch):
    monkeypatch.setattr(gemm, "accumulate", lambda *_, **__: True)
    quantizers = Float8CurrentScalingQuantizer(torch.float8_e4m3fn), MXFP8Quantizer()
    one, other = (quantizer.quantize(torch.randn(32, 32)) for quantizer in quantizers)
    assert [gemm.add_product("wgrad", one, each, torch.zeros(32, 32)) for each in (one, other)] == [True, False]


def test_a_linear_with_a_product_of_its_own_is_asked_for_it(monkeypatch):
    class Twice(ops.BasicLinear):
        traits = ops.BasicLinear.traits
        accepts_quantized = True

        def produce(self, ctx, x, *, out_dtype=None):
            return 2 * super().produce(ctx, x, out_dtype=out_dtype)

    monkeypatch.setattr(gemm, "why_apart", lambda *_, **__: "")
    results = []
    for rules in (RULES, UNFUSED):
        torch.manual_seed(0)
        model = to(ops.Sequential(Twice(WIDTH, WIDTH), ops.GELU()), torch.bfloat16)
        x = randn(ROWS, WIDTH, dtype=torch.bfloat16)
        results.append(run(model, x, step=Step(recipe_for("delayed"), rules)).tensors)
    assert differences(*results) == []
