"""What mutants found that nothing else asked for: refusals of single methods, and what explanations say word for word."""

from __future__ import annotations

import pytest
import torch

import opfuse
from opfuse import ops, recipes
from opfuse.compiler.registry import FusionFunction
from opfuse.errors import FusionError, PipelineError, QuantizerError
from opfuse.fusions import RULES
from opfuse.inspect.explain import explain
from opfuse.inspect.observe import Totals
from opfuse.inspect.saved import totals_line


class Halved(ops.BasicOperation):
    """Has a forward and no backward."""

    saves = ()

    def op_forward(self, ctx, input_, **rest):
        return input_ / 2


def test_an_op_without_a_backward_is_refused_when_it_trains():
    x = torch.randn(3, requires_grad=True)
    y = ops.Sequential(Halved())(x)
    assert torch.equal(y.detach(), x.detach() / 2)
    with pytest.raises(PipelineError, match="op_backward or fuser_backward"):
        y.sum().backward()


def test_a_function_takes_no_name_that_is_taken():
    function = FusionFunction("fuse", "forward", lambda ops, recipe: ops)
    with pytest.raises(FusionError, match="wants a new name"):
        RULES.with_function(function).with_function(function)


@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("index", [-1, 7])
def test_a_slot_that_there_is_not_is_refused_without_a_recipe_as_well(mode, index):
    with pytest.raises(QuantizerError, match="an index below"):
        ops.BasicLinear(8, 8).get_quantizer(mode, index)


def test_totals_in_a_line():
    assert totals_line(Totals(10, 4)).startswith("10 bytes for backward, 4 of them")


def test_products_and_groups_are_told_as_they_are():
    """Formats of operands, None in high precision; a group of one node is no fusion."""
    model, x = ops.Sequential(ops.Linear(64, 64), ops.GELU(), ops.Linear(64, 64, bias=False)).bfloat16(), torch.randn(32, 64)
    recipe = recipes.MXFP8BlockScaling(backward_override="high_precision")
    with opfuse.autocast(recipe=recipe):
        (pipeline,) = explain(model, x.bfloat16().requires_grad_()).to_dict()["pipelines"]
    formats = {(each["product"], each["left"], each["right"]) for each in pipeline["products"]}
    assert formats == {("fprop", "mxfp8_e4m3", "mxfp8_e4m3"), ("dgrad", None, None), ("wgrad", None, None)}
    groups = pipeline["forward_groups"]
    assert {group["fusion"] is None for group in groups if len(group["nodes"]) == 1} == {True}
    assert {group["fusion"] is None for group in groups if len(group["nodes"]) > 1} == {False}
    assert {len(group["nodes"]) > 1 for group in groups} == {True, False}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("GELU", "gelu"),
        ("MyOp", "my_op"),
        ("MyGLU", "my_glu"),
        ("RMSNorm", "rms_norm"),
        ("X", "x"),
        ("Gelu2D", "gelu2d"),
        ("My_Op", "my_op"),
        ("ABc", "a_bc"),
    ],
)
def test_the_kind_of_an_op_is_its_name_in_small_letters(name, kind):
    assert type(name, (ops.BasicOperation,), {}).kind == kind
