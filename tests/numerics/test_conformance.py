"""Scale rules make the bytes of the libraries that they are named after, and say where they do not."""

from __future__ import annotations

import re

import pytest
import torch

import opfuse
from docs import conformance
from opfuse import ops, recipes
from opfuse.errors import QuantizerError, RecipeError
from opfuse.formats import COLUMNWISE, ROWWISE
from opfuse.kernels.casts.encoding import Ruled
from opfuse.numerics.rules import RULES, rules_of
from opfuse.recipes import QuantizerRole, support
from opfuse.tensors.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8RowQuantizer,
    MXFP8Quantizer,
)

E4M3 = torch.float8_e4m3fn
EXACT = {"scale_rule": "compressed_tensors", "force_pow_2_scales": False}
IN_TORCH = {
    "rows": lambda **usage: Float8RowQuantizer(E4M3, **EXACT, **usage),
    "1x128": lambda **usage: Float8BlockQuantizer(E4M3, block_scaling_dim=1, **EXACT, **usage),
    "128x128": lambda **usage: Float8BlockQuantizer(E4M3, **EXACT, **usage),
    "deepgemm": lambda **usage: Float8BlockQuantizer(E4M3, scale_rule="deepgemm", force_pow_2_scales=False, **usage),
    "mx": lambda **usage: MXFP8Quantizer(scale_rule="compressed_tensors", **usage),
    "mx 32x32": lambda **usage: MXFP8Quantizer(scale_rule="compressed_tensors", with_2d_quantization=True, **usage),
}


@pytest.mark.row("R01")
def test_r01_the_page_counts_the_bytes_that_differ_from_each_library():
    """Writing it fails if a byte differs in a block that the page does not tell of."""
    assert conformance.rendered() == conformance.DOCUMENT.read_text(encoding="utf-8"), "run `python -m docs.conformance`"


def test_every_rule_is_compared_in_every_family_that_it_knows():
    compared = {(case.rule, case.quantizer.formats[0].family) for case in conformance.CASES}
    known = {(name, family) for name, rule in RULES.items() for family in rule.ways if name != "te"}
    assert known - compared == set(), "compare these with a library, in CASES of docs/conformance.py"


def test_every_rule_without_kernels_is_tried_on_lines_and_on_blocks_that_are_not_finite():
    tried = {(made.scale_rule, made.formats[0].family) for made in (make() for make in IN_TORCH.values())}
    computed = {(name, family) for name, rule in RULES.items() for family, way in rule.ways.items() if way.formula is not None}
    assert computed - tried == set(), "make a quantizer of these in IN_TORCH of this file"


@pytest.mark.parametrize("name", IN_TORCH)
def test_both_planes_of_a_rule_without_kernels_are_the_cast_of_their_lines(name):
    x = torch.randn(256, 192).bfloat16() * torch.logspace(-3, 3, 192)
    quantizer = IN_TORCH[name]()
    both = quantizer.quantize(x)
    turned = IN_TORCH[name](columnwise=False).quantize(x.t().contiguous()).plane(ROWWISE)
    column = both.plane(COLUMNWISE)
    assert torch.equal(column.data.t() if column.format.family == "mx" else column.data, turned.data)
    assert torch.equal(column.dequantize(torch.float32), turned.dequantize(torch.float32).t())
    assert torch.equal(both.dequantize(usage=ROWWISE), both.dequantize(usage=COLUMNWISE)) == quantizer.planes_agree
    assert isinstance(quantizer.encoding(x.shape, x.dtype), Ruled)


@pytest.mark.row("R18")
@pytest.mark.parametrize("name", IN_TORCH)
def test_r18_a_block_that_is_not_finite_shows(name):
    x = torch.randn(128, 256)
    x[3, 5] = torch.inf
    back = IN_TORCH[name](columnwise=False).quantize(x).dequantize()
    assert not back[3, 5].isfinite()
    assert back[:, 128:].isfinite().all() or name == "rows"


def test_zeros_stay_zeros_under_every_rule():
    for make in IN_TORCH.values():
        assert make().quantize(torch.zeros(128, 128)).dequantize().count_nonzero() == 0


@pytest.mark.parametrize(
    "recipe",
    [
        recipes.Float8BlockScaling(scale_rule="deepgemm", use_f32_scales=True),
        recipes.Float8BlockScaling(scale_rule="compressed_tensors", use_f32_scales=True),
        recipes.MXFP8BlockScaling(scale_rule="compressed_tensors"),
    ],
    ids=repr,
)
def test_a_model_trains_by_a_rule_without_kernels_fused_as_op_by_op_and_says_so(recipe):
    torch.manual_seed(0)
    model, x = ops.Sequential(ops.RMSNorm(128), ops.Linear(128, 128), ops.GELU(), ops.Linear(128, 128)), torch.randn(128, 128)
    found = []
    for rules in (opfuse.fusions.RULES, opfuse.compiler.registry.RuleSet((), level=0)):
        model.zero_grad()
        with opfuse.autocast(recipe=recipe), opfuse.compiler.registry.use_rules(rules):
            model(x).sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))
    slow = f"no kernel casts by scale_rule={recipe.scale_rule!r}: torch casts input, weight, grad_output"
    assert support(recipe, (9, 0)).reason.endswith(slow)
    assert support(recipe.replace(scale_rule="te"), (9, 0)).reason.endswith(slow) is False


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda: MXFP8Quantizer(scale_rule="deepgemm"), "one of te, ocp_floor, rceil, compressed_tensors"),
        (lambda: Float8BlockQuantizer(E4M3, scale_rule="compressed_tensors"), "scales that are any fp32 scales"),
        (lambda: Float8CurrentScalingQuantizer(E4M3, scale_rule="torchao_pow2"), "scales that are powers of two"),
        (lambda: recipes.Float8CurrentScaling(scale_rule="torchao_pow2"), "use_power_2_scales=True"),
        (lambda: recipes.Float8BlockScaling(scale_rule="compressed_tensors"), "use_f32_scales=True"),
        (lambda: recipes.MXFP8BlockScaling(scale_rule="floor"), "write 'ocp_floor', its present name"),
        (lambda: recipes.MXFP8BlockScaling(scale_rounding="floor"), "write scale_rule='te'"),
    ],
)
def test_a_rule_that_a_format_has_not_is_refused_with_those_that_it_has(make, wanted):
    with pytest.raises((QuantizerError, RecipeError), match=wanted):
        make()


def test_the_rule_is_part_of_the_quantizer_that_a_parameter_is_saved_with():
    with opfuse.quantized_model_init(recipe=recipes.MXFP8BlockScaling(scale_rule="ocp_floor")):
        op = ops.Linear(64, 64)
    saved = opfuse.to_planes(op.state_dict())
    assert b'"scale_rule": "ocp_floor"' in bytes(saved["weight.planes"].tolist())
    assert opfuse.from_planes(saved)["weight"].quantizer.scale_rule == "ocp_floor"
    former = bytes(saved["weight.planes"].tolist()).replace(b'"scale_rule": "ocp_floor"', b'"scale_rounding": "floor"')
    former = re.sub(rb'"crc32": "\w+", ', b"", former)  # texts had no checksum either
    saved["weight.planes"] = torch.frombuffer(bytearray(former), dtype=torch.uint8)
    assert opfuse.from_planes(saved)["weight"].quantizer.scale_rule == "ocp_floor"


def test_rules_by_family():
    assert {"te", "ocp_floor", "rceil", "compressed_tensors"} <= {*rules_of("mx")} < {*RULES}
    assert rules_of("nv") == ()
    assert recipes.MXFP8BlockScaling().quantizer(QuantizerRole()).scale_rule == "te"
