"""An activation between experts, or its derivative, and the cast of the result in groups: one launch, with the bits of two."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import opfuse
from benchmarks.grouped import Mixture, mixture
from opfuse import ops, recipes
from opfuse.errors import ShapeError
from opfuse.formats import E4M3, USAGES
from opfuse.fusions import RULES
from opfuse.kernels.chains.cast import backward_chain_cast
from opfuse.kernels.engine.registry import Kernel
from opfuse.kernels.products import grouped
from opfuse.runtime.replay.replayable import Recorded
from opfuse.tensors.ragged import RaggedProducts
from tests.compiler.harness import UNFUSED, Step, differences, generator_of, gradient, randn, run
from tests.kernels.cases.chain_casts import OF_GROUPS, Combination, chain_case
from tests.kernels.cases.chains import ChainCase
from tests.plans import plans_used
from tests.program.fake import fake_device, launches_seen

BF16 = torch.bfloat16
BLOCKS = recipes.Float8BlockScaling()
GROUPS, K = 4, 128
SIZES = ((100, 0, 28, 200), (128, 128, 0, 0), (0, 0, 0, 1), (300, 0, 1, 127))
CHAINS = {
    "swiglu": (lambda: [ops.SwiGLU()], 2),
    "scaled swiglu": (lambda: [ops.ScaledSwiGLU()], 2),
    "gelu, dropout": (lambda: [ops.GELU(), ops.Dropout(0.2)], 1),
}
APART = RULES.without("epilogue_groups", "backward_groups")
ONE_OF_THEM = (RULES.without("backward_groups"), RULES.without("epilogue_groups"))


@pytest.fixture
def on_device(monkeypatch):
    """Say that the CPU is a device that makes products of groups of unknown sizes."""
    monkeypatch.setattr(RaggedProducts, "supported_on", lambda *_: True)


def experts(name: str = "scaled swiglu", inner: int = 144) -> ops.Sequential:
    torch.manual_seed(4)
    chain, halves = CHAINS[name]
    layers = [ops.GroupedLinear(GROUPS, *sizes, bias=False, dtype=BF16) for sizes in ((K, halves * inner), (inner, K))]
    return ops.Sequential(layers[0], *chain(), layers[1])


def given(name: str, sizes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """What a call of experts takes: rows, sizes of groups, and scales where rows have some."""
    rows, splits = sum(sizes), torch.tensor(sizes)
    scales = [torch.rand(rows, generator=generator_of(2)).to(BF16)] * (name == "scaled swiglu")
    return randn(rows, K, seed=rows), splits, *scales, splits


def launched(monkeypatch, call) -> list[tuple[str, ...]]:
    """The kernels of chains and of casts that a device would be asked for, each with its definitions."""
    seen: list[tuple[str, ...]] = []

    def note(variant, entry, *_, device):
        seen.append((entry, *variant.defines))

    def run_(self, *args, **kwargs):
        with monkeypatch.context() as inner:
            if self.source.startswith(("chain", "cast")):
                inner.setattr(Kernel, "__call__", lambda kernel, *a, **k: kernel.run(note, *a, **k))
                self.run(note, *args, **kwargs)
            inner.setattr(Kernel, "__call__", lambda kernel, *a, **k: kernel.reference(*a, **k))
            return self.reference(*args, **kwargs)

    monkeypatch.setattr(Kernel, "__call__", run_)
    call()
    return seen


# -- the bits --------------------------------------------------------------------------------------------------------------------


@pytest.mark.few
@pytest.mark.row("X12")
@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_r4_a_chain_and_its_cast_in_groups_are_what_they_are_apart(name, sizes, grad):
    model = experts(name)
    for parameter in model.parameters():
        parameter.requires_grad_(grad)
    sets = (RULES, APART, UNFUSED, *ONE_OF_THEM)
    runs = [run(model, *given(name, sizes), step=Step(BLOCKS, rules, input_grad=grad)) for rules in sets]
    assert runs[0].outcomes("epilogue_groups")[0].status == "fused"
    assert runs[0].outcomes("backward_groups")[0].status == ("fused" if grad else "absent")
    for other in runs[1:]:
        assert differences(runs[0].tensors, other.tensors) == []


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize(
    "changed",
    [
        {"backward_override": "dequantized"},
        {"backward_override": "high_precision"},
        {"keep": "recompute"},
        {"keep": "quantized"},
        {"batch_invariant": True},
        {"rounding": "single"},
    ],
    ids=str,
)
def test_other_ways_to_save_and_to_compute_have_the_bits_of_two_launches(changed, monkeypatch):
    monkeypatch.setattr("opfuse.kernels.products.grouped._arch", lambda device: (9, 0))
    recipe, model = BLOCKS.replace(**changed), experts()
    fused, apart = (
        run(model, *given("scaled swiglu", SIZES[0]), step=Step(recipe, rules, input_grad=True)) for rules in (RULES, APART)
    )
    assert fused.outcomes("epilogue_groups")[0].status == "fused"
    assert fused.outcomes("backward_groups")[0].status == ("absent" if "backward_override" in changed else "fused")
    assert differences(fused.tensors, apart.tensors) == []


def scaled_biases() -> tuple[ops.Sequential, tuple[torch.Tensor, ...]]:
    """Experts whose first layer has biases that do not train, times scales of rows that do; and what a call takes."""
    torch.manual_seed(4)
    options = {"single_grouped_bias": True, "dtype": BF16}
    up = ops.GroupedLinear(GROUPS, K, 256, scale_bias=True, **options)
    model = ops.Sequential(up, ops.SwiGLU(), ops.GroupedLinear(GROUPS, 128, K, bias=False, dtype=BF16))
    up.bias.requires_grad_(False)
    x, splits, scales, _ = given("scaled swiglu", SIZES[0])
    return model, (x, splits, scales, splits)


@pytest.mark.usefixtures("on_device")
def test_scales_of_biases_have_their_gradient_from_what_the_launch_stores(monkeypatch):
    model, args = scaled_biases()
    fused, apart = (run(model, *args, step=Step(BLOCKS, rules)) for rules in (RULES, APART))
    assert [each.status for each in fused.outcomes("backward_groups")] == ["fused"]
    assert differences(fused.tensors, apart.tensors) == []
    assert fused.tensors["grad of extra 1"].abs().sum() > 0
    kinds = backwards(model, args, monkeypatch)
    assert len(kinds) == 1
    assert {"GROUPED=1", *BOTH} <= kinds[0]


@pytest.mark.usefixtures("on_device")
def test_a_chain_without_a_product_before_it_is_taken_too():
    """Behind a value that leaves the pipeline, which no rule crosses."""
    up, act, down = experts("swiglu")
    model = ops.Sequential(up, ops.MakeExtraOutput(), act, down)
    fused, apart = (
        run(model, *given("swiglu", SIZES[0]), step=Step(BLOCKS, rules, input_grad=True)) for rules in (RULES, UNFUSED)
    )
    assert [outcome.status for outcome in fused.outcomes("epilogue_groups")] == ["fused"]
    assert differences(fused.tensors, apart.tensors) == []


# -- the launches ----------------------------------------------------------------------------------------------------------------


BOTH, ROWS, COLUMNS = (("ROWWISE=1", "COLUMNWISE=1"), ("ROWWISE=1", "COLUMNWISE=0"), ("ROWWISE=0", "COLUMNWISE=1"))


@pytest.mark.row("X12")
@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize(
    ("changed", "grad", "wanted"),
    [
        ({}, True, ("GROUPED=1", *BOTH)),
        ({}, False, ROWS),  # which do not depend on groups
        ({"backward_override": "dequantized"}, True, ROWS),
        ({"backward_override": "high_precision"}, True, ROWS),
        ({"keep": "recompute"}, True, ROWS),
    ],
    ids=str,
)
def test_one_launch_makes_the_activation_and_its_codes(changed, grad, wanted, monkeypatch):
    model, args = experts(), given("scaled swiglu", SIZES[0])
    scope = Step(BLOCKS.replace(**changed), RULES).scope

    def call() -> None:
        with scope(), torch.set_grad_enabled(grad):
            model(*args)

    found = [(entry, {*defines}) for entry, *defines in launched(monkeypatch, call)]
    chains = [defines for entry, defines in found if entry.startswith("chain")]
    assert len(chains) == 1
    assert {*wanted} <= chains[0]
    assert ("GROUPED=1" in chains[0]) == ("GROUPED=1" in wanted)
    assert sum(entry == "cast_block_groups" for entry, _ in found) <= 1  # of the first layer's input


def backwards(model: ops.Sequential, args: tuple[torch.Tensor, ...], monkeypatch, **changed) -> list[set[str]]:
    """The definitions of the kernels of chains that a backward pass asks for. Alone it casts only the last layer's gradient."""
    x, *rest = args
    leaves = [each.detach().clone().requires_grad_(each.is_floating_point()) for each in rest]
    with Step(BLOCKS.replace(**changed), RULES).scope():
        y = model(x.detach().requires_grad_(), *leaves)
    found = [(entry, {*defines}) for entry, *defines in launched(monkeypatch, lambda: y.backward(gradient(y, 1)))]
    assert sum(entry == "cast_block_groups" for entry, _ in found) == 1
    return [defines for entry, defines in found if entry.startswith("chain")]


@pytest.mark.row("X12")
@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("name", CHAINS)
def test_one_launch_makes_the_derivative_and_its_codes(name, monkeypatch):
    """With the gradient of rows' scales, where they train."""
    (defines,) = backwards(experts(name, inner=256), given(name, SIZES[0]), monkeypatch)
    assert {"GROUPED=1", *BOTH} <= defines
    assert ("TILE_THREADS=512" in defines) == (name == "scaled swiglu")


@pytest.mark.usefixtures("on_device")
def test_a_layer_that_makes_no_gradient_of_weights_has_rows_cast(monkeypatch):
    """Rows depend on no groups."""
    model = experts("swiglu", inner=256)
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    (defines,) = backwards(model, given("swiglu", SIZES[0]), monkeypatch)
    assert {*ROWS} <= defines


@pytest.mark.usefixtures("on_device")
def test_what_is_made_anew_is_made_in_one_launch(monkeypatch):
    """Columns of the activation, in the backward pass."""
    model, args = experts(), given("scaled swiglu", SIZES[0])

    def call() -> None:
        with Step(BLOCKS.replace(keep="recompute"), RULES).scope():
            y = model(*args)
        y.backward(gradient(y, 1))

    chains = [{*defines} for entry, *defines in launched(monkeypatch, call) if entry == "chain_tile"]
    assert any({"GROUPED=1", *COLUMNS} <= defines for defines in chains)


@pytest.mark.cpu
def test_sums_over_rows_are_not_made_in_tiles_of_groups():
    """Their pieces are those of the matrix, so chain and cast are launched apart."""
    turn = Combination(OF_GROUPS, USAGES, E4M3, False)
    for biased, wanted in (((), ["chain_tile"]), (("bias",), [])):
        args, kwargs = chain_case(ChainCase((*biased, "gelu"), (300, 256)), "backward", turn, torch.device("cpu"))
        entries: list[tuple[str, ...]] = []
        backward_chain_cast.run(lambda *launch, into=entries, device: into.append(launch), *args, **kwargs)
        assert [entry for _, entry, *_ in entries] == wanted


# -- what is told ----------------------------------------------------------------------------------------------------------------


FAMILY = "quantize.ragged.{}.family: one of ('block',)"
NO_CAST = ("absent", None, None)


@pytest.mark.parametrize(
    ("recipe", "wanted", "backward"),
    [
        (BLOCKS, ("fused", None, None), ("fused", None, None)),
        (None, ("absent", "pattern.quantize: quantize_groups", "grouped_linear"), NO_CAST),
        (recipes.Float8CurrentScaling(), ("missed", FAMILY, "'tensor'"), ("missed", FAMILY, "'tensor'")),
        (recipes.DelayedScaling(), ("missed", FAMILY, "'tensor'"), ("missed", FAMILY, "'tensor'")),
        (recipes.CustomRecipe(qfactory="fp8_row_scaled"), ("missed", FAMILY, "'row'"), ("missed", FAMILY, "'row'")),
        (recipes.MXFP8BlockScaling(), ("missed", FAMILY, "'mx'"), ("missed", FAMILY, "'mx'")),
        (recipes.MXFP8BlockScaling(backward_override="dequantized"), ("missed", FAMILY, "'mx'"), NO_CAST),
        (
            recipes.Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
            ("missed", FAMILY, "nothing"),
            ("missed", FAMILY, "nothing"),
        ),
    ],
    ids=["blocks", "no recipe", "current", "delayed", "rows", "mxfp8", "override", "square blocks"],
)
def test_it_is_told_why_a_chain_and_its_cast_are_apart(recipe, wanted, backward):
    model = experts(inner=128)
    sizes = (128, 128, 0, 128)
    made = run(model, *given("scaled swiglu", sizes), step=Step(recipe, RULES))
    for rule, of, told in (("epilogue_groups", "inputs", wanted), ("backward_groups", "gradients", backward)):
        found = {(each.status, each.guard and f"{each.guard}: {each.wanted}", each.got) for each in made.outcomes(rule)}
        assert found == {tuple(part and part.format(of) for part in told)}


def test_where_the_host_knows_the_sizes_the_rule_runs_both():
    """Nothing says that the device makes the products, so the cast is made group by group."""
    fused, apart = (run(experts(), *given("scaled swiglu", SIZES[0]), step=Step(BLOCKS, rules)) for rules in (RULES, UNFUSED))
    assert fused.outcomes("epilogue_groups")[0].status == fused.outcomes("backward_groups")[0].status == "fused"
    assert differences(fused.tensors, apart.tensors) == []


@pytest.mark.unrun
@pytest.mark.usefixtures("on_device")
@pytest.mark.cpu
def test_sizes_that_do_not_add_up_are_refused_where_the_host_sees_them(monkeypatch):
    """By the run, and by the program that repeats it for all sizes."""
    model, (x, splits, scales, _) = experts(), given("scaled swiglu", SIZES[0])
    wrong = torch.tensor((100, 0, 27, 200))
    with fake_device(monkeypatch), launches_seen(monkeypatch), opfuse.autocast(recipe=BLOCKS):
        for given_last in (wrong, splits, splits, wrong):
            with pytest.raises(ShapeError, match="with the sum 327") if given_last is wrong else nullcontext():
                model(x, splits, scales, given_last)


# -- programs --------------------------------------------------------------------------------------------------------------------


@pytest.mark.row("X11")
@pytest.mark.unrun
def test_one_program_repeats_it_for_all_sizes(monkeypatch, request):
    """The second call is recorded although its sizes are new; its launches are those that a device would have."""
    request.getfixturevalue("on_device")
    model = experts()
    with fake_device(monkeypatch), launches_seen(monkeypatch), opfuse.autocast(recipe=BLOCKS), plans_used() as plans:
        for sizes in ((128, 64, 0, 64), (0, 0, 200, 56)):
            model(*given("scaled swiglu", sizes))
    made = [made for plan in plans for looks in plan.programs.values() for made in looks.values()]
    assert made
    assert all(isinstance(each, Recorded) for each in made)


# -- whole mixtures --------------------------------------------------------------------------------------------------------------


IN_GROUPS = {
    "blocks": BLOCKS,
    "current": recipes.Float8CurrentScaling(),
    "rows": recipes.CustomRecipe(qfactory="fp8_row_scaled"),
}
REPEATED = {"plain": None, "delayed": recipes.DelayedScaling()} | {
    f"{name}, {override}": recipe.replace(backward_override=override)
    for name, recipe in IN_GROUPS.items()
    for override in (None, "dequantized", "high_precision")
}


@pytest.mark.unrun
@pytest.mark.parametrize("recipe", REPEATED.values(), ids=REPEATED)
@pytest.mark.cpu
def test_a_mixture_is_repeated_from_its_gate_to_its_sum(recipe, on_device, monkeypatch, caplog):
    """Its gate shares a segment with the experts' layers: what keeps one op from being repeated keeps all of them.

    Launches of programs do nothing here: what is asked is which passes become programs.
    """
    model = mixture(Mixture(tokens=40, features=K, groups=GROUPS, top_k=2, inner=K), "cpu")
    x = randn(40, K).requires_grad_()
    monkeypatch.setattr(grouped, "_arch", lambda device: (9, 0))
    with caplog.at_level(logging.INFO, logger="opfuse.programs"), fake_device(monkeypatch), launches_seen(monkeypatch):
        monkeypatch.setattr("opfuse.runtime.replay.codegen.driver", lambda: SimpleNamespace(launchKernel=lambda *_: None))
        for _ in range(4):
            with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
                y = model(x)
            torch.autograd.grad(y, [x, *model.parameters()], gradient(y, 7))
    assert caplog.messages == []
    plans = [plan for each in model.runs() for _, plan in each.cache.items()]
    made = [each for plan in plans for looks in plan.programs.values() for each in looks.values()]
    assert all(isinstance(each, Recorded) for each in made)
    assert all(any(isinstance(backward, Recorded) for backward in each.rest.replayable.values()) for each in made)
