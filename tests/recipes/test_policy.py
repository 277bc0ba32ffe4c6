"""The policy tables of the backward override: which planes a cast makes, what is saved, what the backward pass computes in."""

from __future__ import annotations

import pytest
import torch

import opfuse
from opfuse import ops
from opfuse.formats import COLUMNWISE, ROWWISE
from opfuse.recipes import Float8CurrentScaling
from opfuse.recipes.recipe import OVERRIDES, cast_quantizer, planes, saved_planes
from opfuse.tensors.gemm import GEMMS
from opfuse.tensors.quantizers import HybridQuantizer, IdentityQuantizer, MXFP8Quantizer

BOTH = ("dgrad", "wgrad")
ROLES = ("input", "weight", "grad_output")

READS = {
    ("fprop", "input"): {ROWWISE},
    ("fprop", "weight"): {ROWWISE},
    ("dgrad", "grad_output"): {ROWWISE},
    ("dgrad", "weight"): {COLUMNWISE},
    ("wgrad", "grad_output"): {COLUMNWISE},
    ("wgrad", "input"): {COLUMNWISE},
}

CASTS = {
    # (override, backward products): usages of the casts of input, weight and grad_output; None: no cast
    (None, BOTH): ((ROWWISE, COLUMNWISE), (ROWWISE, COLUMNWISE), (ROWWISE, COLUMNWISE)),
    (None, ("dgrad",)): ((ROWWISE,), (ROWWISE, COLUMNWISE), (ROWWISE,)),
    (None, ("wgrad",)): ((ROWWISE, COLUMNWISE), (ROWWISE,), (COLUMNWISE,)),
    (None, ()): ((ROWWISE,), (ROWWISE,), None),
    ("dequantized", BOTH): ((ROWWISE,), (ROWWISE,), None),
    ("dequantized", ("dgrad",)): ((ROWWISE,), (ROWWISE,), None),
    ("dequantized", ()): ((ROWWISE,), (ROWWISE,), None),
    ("high_precision", BOTH): ("original", "original", None),
    ("high_precision", ("dgrad",)): ((ROWWISE,), "original", None),
    ("high_precision", ("wgrad",)): ("original", (ROWWISE,), None),
    ("high_precision", ()): ((ROWWISE,), (ROWWISE,), None),
}


def test_every_override_has_a_row():
    assert set(OVERRIDES) == {None, "dequantized", "high_precision"}
    assert [policy.backward for policy in OVERRIDES.values()] == ["quantized", "high_precision", "high_precision"]
    assert [policy.saved for policy in OVERRIDES.values()] == ["columnwise", "rowwise", "original"]


@pytest.mark.row("H09")
@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("role", ROLES)
def test_h09_planes_that_a_product_reads(gemm, role):
    assert planes(role, (gemm,)) == READS.get((gemm, role), set())


def test_planes_of_several_products_add_up():
    assert planes("grad_output", BOTH) == {ROWWISE, COLUMNWISE}
    assert planes("grad_output", ()) == frozenset()
    assert planes("bias", tuple(GEMMS)) == frozenset()


@pytest.mark.row("B08")
@pytest.mark.parametrize(("override", "backward"), CASTS)
@pytest.mark.parametrize("role", ROLES)
def test_b08_planes_that_a_cast_makes(override, backward, role):
    quantizer = MXFP8Quantizer()
    made = cast_quantizer(quantizer, role, override, backward)
    want = CASTS[override, backward][ROLES.index(role)]
    assert (quantizer.rowwise, quantizer.columnwise) == (True, True)
    if want is None:
        assert made is None
    elif want == "original":
        assert isinstance(made, HybridQuantizer)
        assert made.rowwise_quantizer == quantizer.wanting(columnwise=False)
        assert isinstance(made.columnwise_quantizer, IdentityQuantizer)
        assert made.columnwise_source == "original"
    else:
        assert made == quantizer.wanting(rowwise=ROWWISE in want, columnwise=COLUMNWISE in want)


@pytest.mark.row("B11")
@pytest.mark.parametrize("override", OVERRIDES)
def test_b11_what_is_saved_of_an_operand(override):
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    operand = cast_quantizer(MXFP8Quantizer(), "input", override, BOTH).quantize(x)
    saved = saved_planes(operand, override)
    if override == "high_precision":
        assert saved is x
        return
    kept = COLUMNWISE if override is None else ROWWISE
    assert saved.usages == (kept,)
    assert saved.plane(kept) is operand.plane(kept)
    assert repr(override) in saved.why


@pytest.mark.parametrize(("given", "fast"), [("backward", {"fprop"}), ("all", set()), ("none", set(GEMMS))])
def test_split_accumulator_says_which_sums_of_a_linear_are_split(given, fast, monkeypatch):
    seen = {}

    def multiply(left, right, *, out_dtype, fast, out, **_):
        seen[len(seen)] = fast
        return torch.zeros(left.layout.lines[0], right.layout.lines[0], dtype=out_dtype)

    monkeypatch.setattr("opfuse.tensors.gemm.multiply", multiply)
    x = torch.randn(32, 64, requires_grad=True)
    for op, extras in ((ops.Linear(64, 48), ()), (ops.GroupedLinear(1, 64, 48), (torch.tensor([32]),))):
        seen.clear()
        with opfuse.autocast(recipe=Float8CurrentScaling(split_accumulator=given)):
            op(x, *extras).sum().backward()
        assert {name for name, was in zip(("fprop", "dgrad", "wgrad"), seen.values(), strict=True) if was} == fast
