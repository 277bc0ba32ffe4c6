"""Rows on their way to experts: cast as they are read where one kernel casts them in groups, with the bits of copies."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import opfuse
from opfuse import ops, recipes
from opfuse.compiler.registry import RuleSet, use_rules
from opfuse.compiler.rules import fusion
from opfuse.errors import FusionError, PipelineError
from opfuse.formats import USAGES
from opfuse.fusions import RULES
from opfuse.fusions.declared import extended
from opfuse.fusions.dispatch import DISPATCH_CAST, dispatch_cast
from opfuse.kernels.engine.registry import Kernel
from opfuse.tensors.quantizers import Float8BlockQuantizer
from opfuse.tensors.ragged import RaggedProducts, cast_in_groups
from tests.compiler.harness import UNFUSED, Step, differences, generator_of, randn, run
from tests.plans import plans_used

BF16 = torch.bfloat16
BLOCKS = recipes.Float8BlockScaling()
ROWS = recipes.CustomRecipe(qfactory="fp8_row_scaled")
RECIPES: dict[str, recipes.Recipe] = {
    "blocks": BLOCKS,
    "rows": ROWS,
    "current": recipes.Float8CurrentScaling(),
    "delayed": recipes.DelayedScaling(amax_history_len=4),
}
TOKENS, K, GROUPS, TOP_K = 37, 128, 4, 2


def wired(first: torch.nn.Module, *between: torch.nn.Module, groups: int = GROUPS, top_k: int = TOP_K) -> ops.Sequential:
    """A dispatch, what stands behind it, a grouped layer that takes its splits, and sums over the rows of a token."""
    torch.manual_seed(4)
    gate, combine = ops.TokenDispatch(groups, K, top_k=top_k, dtype=BF16), ops.TokenCombine()
    gate.set_extra_output_channel(0, "splits")
    gate.set_extra_output_channel(2, "places", output_to_caller=False)
    first.set_extra_input_channel(0, "splits")
    combine.set_extra_input_channel(0, "places")
    return ops.Sequential(gate, *between, first, combine)


def layer(groups: int = GROUPS, **options: object) -> ops.GroupedLinear:
    torch.manual_seed(3)
    return ops.GroupedLinear(groups, K, 160, dtype=BF16, **{"bias": False, "pad_splits": True, **options})


@pytest.fixture
def on_device(monkeypatch):
    """Say that the CPU is a device that makes products of groups of unknown sizes."""
    monkeypatch.setattr(RaggedProducts, "supported_on", lambda *_: True)


class _Copies(TorchDispatchMode):
    """The shapes of what rows are copied to."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.index_select.default and made.ndim == 2:
            self.made.append((*made.shape,))
        return made


# -- the bits --------------------------------------------------------------------------------------------------------------------


SHAPES = [(37, 4, 2), (1, 4, 4), (5, 4, 1), (200, 2, 1), (300, 16, 3)]


@pytest.mark.few
@pytest.mark.row("X12")
@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize(("tokens", "groups", "top_k"), SHAPES)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_r4_rows_cast_as_they_are_read_have_the_bits_of_copies(recipe, tokens, groups, top_k, grad):
    model, x = wired(layer(groups, single_grouped_weight=True), groups=groups, top_k=top_k), randn(tokens, K)
    for parameter in model.parameters():
        parameter.requires_grad_(grad)
    steps = 2 if recipe.kind == "delayed" else 1  # whose scales are those of the step before
    fused, unfused = (run(model, x, step=Step(recipe, rules, input_grad=grad, steps=steps)) for rules in (RULES, UNFUSED))
    assert differences(fused.tensors, unfused.tensors) == []
    assert fused.outcomes("dispatch_cast")[0].status == "fused"


@pytest.mark.row("X12")
@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_r4_rows_of_a_router_of_ones_own_are_cast_as_they_are_read(recipe):
    """Also with choices that are no group's."""
    permute, layers = ops.TokenPermute(GROUPS), layer(single_grouped_weight=True)
    permute.set_extra_output_channel(0, "splits")
    layers.set_extra_input_channel(0, "splits")
    model, x = ops.Sequential(permute, layers), randn(TOKENS, K)
    chosen = torch.randint(-1, GROUPS + 1, (TOKENS, TOP_K), generator=generator_of(2))
    steps = 2 if recipe.kind == "delayed" else 1
    fused, unfused = (run(model, x, chosen, step=Step(recipe, rules, input_grad=True, steps=steps)) for rules in (RULES, UNFUSED))
    assert differences(fused.tensors, unfused.tensors) == []
    assert fused.outcomes("dispatch_cast")[0].status == "fused"


@pytest.mark.row("X12")
@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_r4_gradients_of_rows_that_tokens_sum_have_the_bits_of_copies(recipe, weighted):
    """In the dtype of the rows where the sum has another, and 0 where no sum has the row; weights need rows of their own."""
    layers, combine = layer(single_grouped_weight=True), ops.TokenCombine(weighted=weighted, typed=True)
    draw = generator_of(2)
    chosen = torch.randint(-1, GROUPS + 1, (TOKENS, TOP_K), generator=draw)
    x, splits, places = ops.TokenPermute(GROUPS)(randn(TOKENS, K), chosen)
    extras = splits, places.int(), *([torch.rand(TOKENS, TOP_K, generator=draw)] if weighted else []), torch.zeros(1)
    model, steps = ops.Sequential(layers, combine), 2 if recipe.kind == "delayed" else 1
    fused, unfused = (run(model, x, *extras, step=Step(recipe, rules, steps=steps)) for rules in (RULES, UNFUSED))
    assert differences(fused.tensors, unfused.tensors) == []
    assert fused.outcomes("backward_combine")[0].status == ("missed" if weighted else "fused")


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("override", ["dequantized", "high_precision"])
@pytest.mark.parametrize("recipe", [BLOCKS, RECIPES["current"]], ids=["blocks", "current"])
def test_rows_under_an_override_have_the_bits_of_copies(recipe, override, monkeypatch):
    """What is saved under high precision are the rows themselves, which are copied for it."""
    monkeypatch.setattr("opfuse.kernels.products.grouped._arch", lambda device: (9, 0))
    model, x = wired(layer(single_grouped_weight=True)), randn(TOKENS, K)
    step = recipe.replace(backward_override=override)
    fused, unfused = (run(model, x, step=Step(step, rules, input_grad=True)) for rules in (RULES, UNFUSED))
    assert differences(fused.tensors, unfused.tensors) == []
    assert fused.outcomes("dispatch_cast")[0].status == "fused"


@pytest.mark.parametrize("usages", [USAGES, USAGES[:1], USAGES[1:]], ids=str)
def test_a_cast_through_an_index_is_that_of_the_rows(usages):
    wanted = {usage: usage in usages for usage in USAGES}
    quantizer = Float8BlockQuantizer(torch.float8_e4m3fn, block_scaling_dim=1).wanting(**wanted)
    x, splits = randn(50, 144), torch.tensor([100, 0, 28, 1])
    index = torch.randint(50, (129,), generator=generator_of(1))
    found, wanted = cast_in_groups(quantizer, x, splits, index), cast_in_groups(quantizer, x[index], splits)
    assert (found.shape, found.usages) == (wanted.shape, wanted.usages) == ((129, 144), usages)
    assert all(map(torch.equal, found.tensors(), wanted.tensors()))


FORWARD, AGAIN, BOTH = ("ROWWISE=1", "COLUMNWISE=0"), ("ROWWISE=0", "COLUMNWISE=1"), ("ROWWISE=1", "COLUMNWISE=1")
READ = {"forward": (TOKENS, K), "again": (TOKENS, K), "gradient": (TOKENS + 1, K + 32)}
"""The shape of the matrix whose rows are read: tokens, or gradients of tokens and a row of zeros."""

THROUGH_AN_INDEX = {
    ("blocks", "forward"): [("cast_block_groups", *FORWARD)],
    ("blocks", "again"): [("cast_block_groups", *AGAIN)],
    ("blocks", "gradient"): [("cast_block_groups", *BOTH)],
    ("rows", "forward"): [("cast_row",)],
    ("rows", "again"): [("amax_lines", "GROUPED=1"), ("cast_lines", *AGAIN)],
    ("rows", "gradient"): [("amax_lines", "GROUPED=1"), ("cast_lines", *BOTH)],
    ("current", "forward"): [("amax_lines", "IN=float", "GROUPED=1"), ("cast_tensor_groups", "RECORD=0", *FORWARD)],
    ("current", "again"): [("cast_tensor_groups", "RECORD=0", *AGAIN)],  # under the amaxes of the forward pass
    ("current", "gradient"): [("amax_lines", "IN=float", "GROUPED=1"), ("cast_tensor_groups", "RECORD=0", *BOTH)],
    ("delayed", "forward"): [("cast_tensor_groups", "RECORD=1", *FORWARD)],
    ("delayed", "again"): [("cast_tensor_groups", *AGAIN)],
    ("delayed", "gradient"): [("cast_tensor_groups", "RECORD=1", *BOTH)],
}
"""What a GPU is asked for, by recipe, in the forward pass, in the backward pass for gradients of weights, and for the gradient of
the results. Amaxes of tokens, under "current", need no index."""


@pytest.mark.few(apart=True)
@pytest.mark.row("X12")
@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize(("recipe", "when"), THROUGH_AN_INDEX)
def test_rows_are_read_by_the_kernel_that_casts_them(recipe, when, monkeypatch):
    """The only copies of rows left are those of sums over the rows of a token."""
    launched = []

    def call(self, *args, **kwargs):
        if kwargs.get("index") is not None:
            assert args[0].shape in READ.values() or args[0].shape[1] == 1  # amaxes of tokens
            if args[0].shape == READ[when] or args[0].shape == (READ[when][0], 1):
                self.run(lambda variant, entry, *_, device: launched.append((entry, *variant.defines)), *args, **kwargs)
        return self.reference(*args, **kwargs)

    monkeypatch.setattr(Kernel, "__call__", call)
    model, x = wired(layer()), randn(TOKENS, K)
    copies = {}
    for rules in (UNFUSED, RULES):
        with Step(RECIPES[recipe], rules).scope(), _Copies() as seen:
            launched.clear()
            y = model(x)
            if when != "forward":
                launched.clear()
                seen.made.clear()
                torch.autograd.grad(y[0] if isinstance(y, tuple) else y, model[1].weight0, torch.ones(TOKENS, K + 32, dtype=BF16))
        copies[rules] = seen.made
    found = [each for each in launched if "INDEXED=1" in each]
    for (entry, *defines), (wanted, *among) in zip(found, THROUGH_AN_INDEX[recipe, when], strict=True):
        assert entry == wanted
        assert {*among} <= {*defines}
    assert [entry for entry, *defines in launched if "INDEXED=1" not in defines] == ["amax_lines"] * (
        recipe == "current" and when != "again"
    )
    rows = TOKENS * TOP_K, READ[when][1]
    assert copies[UNFUSED].count(rows) == (when != "gradient")  # whose rows the sum's own backward pass makes
    assert copies[RULES].count(rows) == 1  # that of the definition, which ran in place of the kernel


# -- what is told ----------------------------------------------------------------------------------------------------------------


def told(model: torch.nn.Module, recipe: recipes.Recipe | None, *extras: torch.Tensor) -> tuple[str, str | None, str | None]:
    """Status of the rule, what it wanted, and what it got."""
    (found,) = run(model, randn(TOKENS, K), *extras, step=Step(recipe, RULES)).outcomes("dispatch_cast")
    return found.status, found.guard and f"{found.guard}: {found.wanted}", found.got


NO_CAST = ("missed", "quantize.ragged.inputs.family: one of ('block', 'row', 'tensor')", "nothing")
NO_PLACE = "pattern.quantize: quantize_groups"


@pytest.mark.parametrize(
    ("make", "recipe", "wanted"),
    [
        *((lambda: wired(layer()), recipe, ("fused", None, None)) for recipe in RECIPES.values()),
        (lambda: wired(layer()), None, ("absent", NO_PLACE, "grouped_linear")),
        (lambda: wired(layer()), recipes.MXFP8BlockScaling(), (*NO_CAST[:2], "'mx'")),
        (lambda: wired(layer()), recipes.NVFP4BlockScaling(), NO_CAST),
        (lambda: wired(layer()), recipes.Float8CurrentScaling(backward_override="high_precision"), ("fused", None, None)),
        (lambda: wired(layer()), recipes.Float8BlockScaling(backward_override="dequantized"), ("fused", None, None)),
        (lambda: wired(layer(bias=True)), BLOCKS, NO_CAST),
        (lambda: wired(layer(), ops.MakeExtraOutput()), BLOCKS, ("absent", NO_PLACE, "make_extra_output")),
        (lambda: wired(layer(), ops.GELU()), BLOCKS, ("absent", NO_PLACE, "gelu")),
    ],
    ids=[*RECIPES, "no recipe", "mxfp8", "nvfp4", "high precision", "override", "bias", "another reader", "an op between"],
)
def test_it_is_told_why_rows_are_copied(make, recipe, wanted):
    assert told(make(), recipe) == wanted


def test_splits_of_the_caller_are_another_matter():
    """Of those of the dispatch alone the rule knows that they are where its rows are."""
    gate, _, combine = wired(layer())
    splits = torch.bincount(torch.arange(TOKENS * TOP_K) % GROUPS, minlength=GROUPS)
    with use_rules(RULES), opfuse.autocast(recipe=BLOCKS), plans_used() as plans:
        ops.Sequential(gate, layer(), combine)(randn(TOKENS, K), splits)
    (outcome,) = (each for each in plans[0].outcomes if each.rule == "dispatch_cast")
    assert (outcome.status, outcome.got) == ("absent", "the end of the run")


# -- rules that leave extra outputs ----------------------------------------------------------------------------------------------


def forgetful(x, *, dispatch, quantize):
    route = dispatch.op.route(dispatch, x)
    return quantize.op(route.x, route.extra_outputs[0], route.rows)


def with_rule(rule) -> None:
    with use_rules(RULES.replaced(rule)), opfuse.autocast(recipe=BLOCKS):
        wired(layer())(randn(TOKENS, K))


def test_a_rule_takes_ops_with_extra_outputs_only_if_it_leaves_them():
    pattern = {term.name: term for term in DISPATCH_CAST.pattern}
    with pytest.raises(PipelineError, match=r"outputs: wants 3, got 0.*leave them in its context"):
        with_rule(fusion("dispatch_cast", pattern, forward=forgetful, extra_outputs=True))
    with_rule(fusion("dispatch_cast", pattern, forward=forgetful))  # takes none
    with pytest.raises(FusionError, match="True or False"):
        fusion("dispatch_cast", pattern, forward=dispatch_cast, extra_outputs=1.5)
    assert extended(DISPATCH_CAST, "mine", DISPATCH_CAST.pattern).extra_outputs


def test_what_a_rule_leaves_is_checked():
    """An extra output that is no tensor; a backward pass without the gradients of extra inputs, which nobody else would miss."""
    pattern = {term.name: term for term in DISPATCH_CAST.pattern}

    def tells(x, *, dispatch, quantize):
        dispatch.set_extra_outputs(*dispatch.op.route(dispatch, x).extra_outputs[:2], "places")

    with pytest.raises(PipelineError, match=r"extra outputs: wants .*tensor.*str.*pass each of them, in order"):
        with_rule(fusion("dispatch_cast", pattern, forward=tells, extra_outputs=True))

    half = fusion("half", "relu add=add_extra_input", backward=lambda dy, *, relu, add: dy)
    x, y = (randn(4, 4).requires_grad_() for _ in range(2))
    with use_rules(RuleSet((half,))):
        result = ops.Sequential(ops.ReLU(), ops.AddExtraInput())(x, y)
        with pytest.raises(PipelineError, match=r"gradients of extra inputs: wants 1, got 0"):
            result.sum().backward()


@pytest.mark.parametrize("rules", [RULES, UNFUSED], ids=["fused", "unfused"])
@pytest.mark.parametrize("trains", [False, True])
def test_probabilities_of_a_frozen_gate_want_no_gradient(trains, rules, on_device):
    """Also where the gate shares an autograd node with a layer that trains."""
    model, x = wired(layer()), randn(TOKENS, K)
    model[0].weight.requires_grad_(trains)
    with use_rules(rules), opfuse.autocast(recipe=BLOCKS):
        y, *others = model(x)
    wanted = [(torch.bfloat16, trains), (torch.int64, False)]
    assert sorted(((each.dtype, each.requires_grad) for each in others), key=str) == wanted
    (grad,) = torch.autograd.grad(y.sum(), [model[1].weight0])
    assert grad.abs().sum() > 0
