"""Lowering: explicit quantize nodes with the planes that will be read, values by number, channels as edges of the graph."""

from __future__ import annotations

import networkx as nx
import pytest
import torch

import opfuse
from opfuse import ops
from opfuse.compiler.graph import BACKWARD, BOTH, FORWARD, GROUPED, QUANTIZE, CastSpec, Graph
from opfuse.compiler.registry import RuleSet
from opfuse.core.protocol import Grouping
from opfuse.recipes import Float8CurrentScaling, MXFP8BlockScaling, QuantizerRole, Recipe
from opfuse.runtime.fuser import OperationFuser
from tests.compiler.harness import OVERRIDES, randn, recipe_for, to
from tests.compiler.pipelines import residual_block

BF16 = torch.bfloat16


def lowered(*modules: torch.nn.Module, recipe: Recipe | None = None, x: torch.Tensor | None = None, width: int = 64) -> Graph:
    """The graph of a pipeline for an input that wants a gradient."""
    to(torch.nn.ModuleList(modules), BF16)
    x = randn(32, width).requires_grad_() if x is None else x
    fuser = OperationFuser(modules, rules=RuleSet(()))
    extras = [randn(32, width).requires_grad_() for name in fuser.extra_inputs]
    with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
        return fuser.plan(x, *extras).graph


def names(graph: Graph, direction: str | None = None) -> list[str]:
    nodes = graph.nodes if direction is None else graph.view(direction)
    return [node.name.split(":")[1] for node in nodes]


def spec_of(graph: Graph, role: str) -> CastSpec:
    (spec,) = [node.spec for node in graph.nodes if node.kind == QUANTIZE and node.spec.role == role]
    return spec


def test_a_linear_is_a_product_and_a_bias():
    assert names(lowered(ops.Linear(64, 64))) == ["basic_linear", "bias"]
    assert names(lowered(ops.Linear(64, 64, bias=False))) == ["basic_linear"]
    assert names(lowered(ops.BasicLinear(64, 64))) == ["basic_linear"]


def test_graphs_of_equal_pipelines_are_equal_and_hash_alike():
    one, other = (lowered(ops.Linear(64, 64), ops.GELU(), recipe=MXFP8BlockScaling()) for _ in range(2))
    assert (one, hash(one)) == (other, hash(other))
    assert one != lowered(ops.Linear(64, 64), ops.SiLU(), recipe=MXFP8BlockScaling())


def test_quantize_nodes_stand_around_a_product():
    graph = lowered(ops.RMSNorm(64), ops.Linear(64, 64), ops.GELU(), recipe=MXFP8BlockScaling())
    assert names(graph) == [
        "rms_norm",
        "quantize[input]",
        "quantize[weight]",
        "basic_linear",
        "quantize[grad_output]",
        "bias",
        "gelu",
    ]
    assert names(graph, FORWARD) == ["rms_norm", "quantize[input]", "basic_linear", "bias", "gelu"]
    assert names(graph, BACKWARD) == ["rms_norm", "basic_linear", "quantize[grad_output]", "bias", "gelu"]
    cast, weight, linear, gradient = graph.nodes[1:5]
    assert (cast.directions, weight.directions, gradient.directions) == ({FORWARD}, {FORWARD}, {BACKWARD})
    assert (linear.inputs, dict(linear.operands)) == (cast.outputs, {"weight": weight.outputs[0]})
    assert gradient.inputs == gradient.outputs == linear.outputs
    assert weight.side
    assert graph.gradient_of(cast.outputs[0]) == cast.inputs[0]


GRADS = [(True, True), (True, False), (False, True), (False, False)]


@pytest.mark.row("B08", "B12")
@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize(("x_grad", "w_grad"), GRADS)
def test_b08_b12_casts_make_the_planes_that_are_read(x_grad, w_grad, override):
    linear = to(ops.Linear(64, 64, bias=False), BF16)
    linear.weight.requires_grad_(w_grad)
    fuser = OperationFuser((linear,), rules=RuleSet(()))
    with opfuse.autocast(recipe=recipe_for("mxfp8", override)):
        graph = fuser.plan(randn(32, 64).requires_grad_(x_grad)).graph
    quantized = override is None
    original = override == "high_precision"
    assert spec_of(graph, "input").quantizer.rowwise
    assert spec_of(graph, "input").quantizer.columnwise is (w_grad and (quantized or original))
    assert spec_of(graph, "weight").quantizer.columnwise is (x_grad and (quantized or original))
    if not quantized or not (x_grad or w_grad):
        assert "quantize[grad_output]" not in names(graph)
    else:
        assert spec_of(graph, "grad_output").quantizer.usages == ("rowwise",) * x_grad + ("columnwise",) * w_grad
    (node,) = [node for node in graph.nodes if node.kind == "basic_linear"]
    assert node.needs == {name for name, wanted in (("input", x_grad), ("weight", w_grad)) if wanted}
    assert node.directions == (BOTH if x_grad or w_grad else {FORWARD})


def test_no_gradient_is_lowered_without_grad_mode():
    with torch.no_grad():
        graph = lowered(ops.RMSNorm(64), ops.Linear(64, 64), recipe=MXFP8BlockScaling())
    assert graph.grads == frozenset()
    assert {node.directions for node in graph.nodes} == {frozenset((FORWARD,))}
    assert not any(node.spec.quantizer.columnwise for node in graph.nodes if node.kind == QUANTIZE)


@pytest.mark.row("U05")
def test_u05_a_quantized_weight_gets_no_quantize_node():
    linear = to(ops.Linear(64, 64), BF16)
    quantizer = Float8CurrentScaling().quantizer(QuantizerRole(tensor_type="weight"))
    linear.weight = torch.nn.Parameter(quantizer(linear.weight.detach()))
    fuser = OperationFuser((linear,), rules=RuleSet(()))
    with opfuse.autocast(recipe=Float8CurrentScaling()):
        assert "quantize[weight]" not in names(fuser.plan(randn(32, 64)).graph)


@pytest.mark.parametrize("between", [(), (ops.Identity,), (ops.Identity, ops.Identity)], ids=len)
def test_an_explicit_quantize_makes_what_the_product_reads(between):
    modules = (ops.GELU(), ops.Quantize(), *(cls() for cls in between), ops.Linear(64, 64, bias=False))
    graph = lowered(*modules, recipe=MXFP8BlockScaling())
    expected = [
        "gelu",
        "quantize[input]",
        *["identity"] * len(between),
        "quantize[weight]",
        "basic_linear",
        "quantize[grad_output]",
    ]
    assert names(graph) == expected
    assert spec_of(graph, "input").quantizer.usages == ("rowwise", "columnwise")
    alone = lowered(ops.GELU(), ops.Quantize(), ops.GELU(), recipe=MXFP8BlockScaling())
    assert spec_of(alone, "input").quantizer.usages == ("rowwise",)


@pytest.mark.parametrize("between", [(), (ops.Identity,)], ids=len)
@pytest.mark.parametrize("forward", [False, True])
def test_an_explicit_quantize_of_the_gradient_is_the_product_s_own(between, forward):
    modules = (ops.Linear(64, 64, bias=False), *(cls() for cls in between), ops.Quantize(forward=forward, backward=True))
    graph = lowered(*modules, recipe=MXFP8BlockScaling())
    assert spec_of(graph, "grad_output").quantizer.usages == ("rowwise", "columnwise")
    elsewhere = lowered(
        ops.Linear(64, 64, bias=False), ops.GELU(), ops.Quantize(forward=False, backward=True), recipe=MXFP8BlockScaling()
    )
    assert names(elsewhere).count("quantize[grad_output]") == 2


def test_the_gradient_of_the_pipeline_s_input_can_be_quantized():
    graph = lowered(ops.Quantize(forward=False, backward=True), ops.GELU(), recipe=MXFP8BlockScaling())
    assert names(graph) == ["identity", "quantize[grad_output]", "gelu"]


def test_channels_are_edges_of_the_graph():
    made = residual_block()
    graph = lowered(*made.ops)
    kinds = {node.index: node.kind for node in graph.nodes}
    edges = {(kinds[a], kinds[b], value) for a, b, value in graph.digraph.edges(data="value")}
    tap = graph.nodes[0]
    assert ("make_extra_output", "add_extra_input", tap.outputs[1]) in edges
    assert ("make_extra_output", "rms_norm", tap.outputs[0]) in edges
    assert len(edges) == len(graph.nodes)
    assert nx.is_directed_acyclic_graph(graph.digraph)
    assert nx.has_path(graph.digraph, 0, graph.nodes[-1].index)
    assert graph.outputs == (graph.nodes[-1].outputs[0],)


def test_extra_inputs_and_outputs_are_values():
    tap, hidden = ops.MakeExtraOutput(), ops.MakeExtraOutput()
    hidden.set_extra_output_channel(0, "hidden", output_to_caller=False)
    graph = lowered(tap, hidden, ops.AddExtraInput(), ops.ScaledSReLU())
    add, act = graph.nodes[2:]
    assert graph.extra_inputs == (add.inputs[1], act.inputs[1])
    assert graph.outputs == (act.outputs[0], tap_value(graph))
    assert not set(graph.extra_inputs) & set(graph.producer)


def tap_value(graph: Graph) -> int:
    return graph.nodes[0].outputs[1]


def test_what_the_graph_knows_of_parameters():
    graph = lowered(ops.Linear(64, 32))
    (name, weight), (bias_name, bias) = graph.nodes[0].params + graph.nodes[1].params
    assert (name, weight.dtype, weight.shape, weight.requires_grad) == ("weight", BF16, (32, 64), True)
    assert (bias_name, bias.shape) == ("bias", (32,))


class Experts(ops.BasicOperation):
    """Rows in groups, of which the second extra input has the sizes."""

    traits, roles, accepts_quantized = frozenset((GROUPED,)), ("input",), True
    num_extra_inputs = 2

    def grouping(self, needs):
        return Grouping(4, splits=1)

    def cast_groups(self, role):
        return 4

    def op_forward(self, ctx, x, **_):
        return ctx.extras[0]


def test_a_cast_of_groups_reads_the_sizes_that_its_op_names():
    graph = lowered(Experts(), recipe=MXFP8BlockScaling())
    (made,) = (node for node in graph.nodes if node.is_cast)
    (op,) = (node for node in graph.nodes if not node.is_cast)
    assert made.inputs == (0, graph.extra_inputs[1])
    assert (op.extra_inputs, op.grouping) == (graph.extra_inputs, Grouping(4, splits=1))
