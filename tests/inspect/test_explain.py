"""Explanations: an outcome for every rule at every place, the bytes that really are saved, and no trace left behind."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import opfuse
from opfuse import ops, recipes
from opfuse.errors import FusionError
from opfuse.inspect.explain import explain
from opfuse.kernels.products.backends import ON_CPU, Machine
from tests.plans import plans_used


def mlp(size: int = 64) -> ops.Sequential:
    torch.manual_seed(0)
    return ops.Sequential(ops.RMSNorm(size), ops.Linear(size, 2 * size), ops.GELU(), ops.Linear(2 * size, size))


def call(recipe: recipes.Recipe | None, **options: bool):
    x = torch.randn(32, 64, requires_grad=True)
    with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
        return explain(mlp(), x, **options)


@pytest.mark.row("X02")
def test_x02_every_active_rule_has_an_outcome_with_a_reason() -> None:
    found = call(recipes.MXFP8BlockScaling())
    assert {o.rule for o in (*found.outcomes("forward"), *found.outcomes("backward"))} == set(opfuse.active_rules().names)
    for outcome in (*found.outcomes("forward"), *found.outcomes("backward")):
        assert outcome.status in ("fused", "shadowed", "missed", "absent")
        assert outcome.status != "shadowed" or outcome.by
        assert outcome.status != "missed" or (outcome.guard and outcome.wanted and outcome.got)


@pytest.mark.row("B17")
def test_b17_override_is_named_as_the_reason() -> None:
    found = call(recipes.MXFP8BlockScaling(backward_override="dequantized")).narrowed("backward_activation_bias")
    misses = found.outcomes("backward")
    assert misses
    assert all(
        (o.status, o.guard, o.wanted, o.got) == ("missed", "env.recipe.backward_override", "None", "'dequantized'")
        for o in misses
    )


def test_a_rule_that_is_not_active_is_refused_instead_of_having_no_outcome() -> None:
    with pytest.raises(FusionError, match=r"got 'epilog'; did you mean 'epilogue'[?] Cure: name one of .*epilogue"):
        call(recipes.MXFP8BlockScaling()).narrowed("epilog")


def test_json_has_what_the_text_says() -> None:
    found = call(recipes.MXFP8BlockScaling())
    values = found.to_dict()
    for side in ("forward", "backward"):
        assert [o["rule"] for o in values[side]] == [o.rule for o in found.outcomes(side)]
        assert all(set(o) >= {"rule", "status", "ops"} for o in values[side])
    (pipeline,) = values["pipelines"]
    assert pipeline["nodes"][3] == "3:basic_linear"
    lines = str(found).splitlines()
    assert len(lines) > 10
    assert values["backend"] == found.backend == "emulated"
    assert lines[0].startswith("recipe   MXFP8BlockScaling(")
    assert lines[1] == f"backend  emulated: {found.reason}"
    assert lines[2].startswith(f"saved    {found.saved_bytes} bytes for backward, {found.totals.own} of them beside")


def test_mermaid_shows_each_node_once_a_direction_and_only_real_edges() -> None:
    found = call(recipes.MXFP8BlockScaling())
    forward, backward = found.mermaid().split("\n\n")
    nodes = found.plans[0].graph.nodes
    for text, side in ((forward, "forward"), (backward, "backward")):
        for node in nodes:
            assert text.count(f'n{node.index}["{node.name}"]') == (side in node.directions)
    assert all(edge in forward for edge in ("n1 --> n3", "n2 --> n3", "n3 --> n5"))
    assert "n9 --> n6" in backward
    assert "n4 --> n3" in backward


def expected_bytes(override: str | None) -> int:
    """The MLP's saved state in bytes by hand: fp32 activations, and what the second product reads, in high precision or in MXFP8
    with scales padded to (4, 128) or (128, 4). Weights are saved as parameters, and the norm's result is made anew.
    """
    rows, size, hidden, scales = 32, 64, 128, 512
    norm = rows * size * 4 + rows * 4
    gelu = rows * hidden * 4
    return norm + gelu + (rows * hidden * 4 if override == "high_precision" else rows * hidden + scales)


@pytest.mark.row("B31")
@pytest.mark.parametrize("override", [None, "dequantized", "high_precision"])
def test_saved_bytes_are_those_of_the_formula(override: str | None) -> None:
    assert call(recipes.MXFP8BlockScaling(backward_override=override)).saved_bytes == expected_bytes(override)


@pytest.mark.row("B31")
def test_saved_bytes_by_override_and_refusals() -> None:
    measured = call(recipes.MXFP8BlockScaling(), overrides=True).saved_by_override
    assert dict(measured) == {str(o): expected_bytes(o) for o in (None, "dequantized", "high_precision")}
    delayed = call(recipes.DelayedScaling(), overrides=True).saved_by_override
    assert "got backward_override='dequantized'" in delayed["dequantized"].reason
    assert "got backward_override='high_precision'" in delayed["high_precision"].reason


@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64)])
def test_a_call_without_rows_is_explained(shape: tuple[int, ...]) -> None:
    model, x = mlp(), torch.empty(shape, requires_grad=True)
    with opfuse.autocast(recipe=recipes.MXFP8BlockScaling()), plans_used() as plans:
        found = explain(model, x)
        assert model(x).shape == shape
    assert found.plans == (plans[-1],)


def test_every_extra_input_has_a_name_of_its_own() -> None:
    x, one, other = torch.randn(4, 8, requires_grad=True), torch.randn(4), torch.randn(4)
    found = explain(ops.Sequential(ops.ScaledSReLU(), ops.ScaledSReLU()), x, one, other)
    assert {"extra input 0", "extra input 1"} <= {value.memory for value in found.saved}


def test_without_a_recipe() -> None:
    found = call(None)
    assert found.backend == "high precision"
    assert "epilogue" in found.fusions


def test_explaining_leaves_no_trace() -> None:
    model, x = mlp(), torch.randn(32, 64)
    model.append(ops.Dropout(0.5))
    with opfuse.autocast(recipe=recipes.DelayedScaling()):
        model(x)
    before = {name: value.clone() for name, value in model[1].quantizer_states.to_dict().items()}
    state = torch.get_rng_state()
    with opfuse.autocast(recipe=recipes.DelayedScaling()):
        explain(model, 100 * x)
    assert torch.equal(torch.get_rng_state(), state)
    after = model[1].quantizer_states.to_dict()
    slots = {name for name in before if name.startswith(("input", "weight"))}
    assert slots
    assert all(torch.equal(before[name], after[name]) for name in slots)


class Drawing(torch.nn.Module):
    """Draws from every generator, as models do that leave out layers at random."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops(x + torch.rand(()) + random.random() + np.random.rand())


def test_random_numbers_of_python_numpy_and_torch_are_those_that_would_have_come() -> None:
    model, x = Drawing(), torch.randn(32, 64)
    told = []
    for look in (lambda: None, lambda: explain(model, x), lambda: opfuse.saved(model, x), lambda: opfuse.host_times(model, x)):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        look()
        told.append(model(x))
    assert all(torch.equal(told[0], each) for each in told[1:])


class Stateful(torch.nn.Module):
    """A pipeline that overwrites its extra input, between modules with buffers and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(64)
        self.ops = ops.Sequential(ops.Linear(64, 64), ops.AddExtraInput(in_place=True), ops.Dropout(0.5))

    def forward(self, x: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
        return self.ops(self.norm(x), extra)


def remembered(model: Stateful) -> dict[str, torch.Tensor]:
    states = {f"{i}/{name}": t for i, op in enumerate(model.ops) for name, t in op.quantizer_states.to_dict().items()}
    return {name: t.clone() for name, t in (*model.named_buffers(), *model.named_parameters(), *states.items())}


@pytest.mark.parametrize("called", [True, False])
@pytest.mark.parametrize("length", [4, 2])
def test_explaining_changes_no_input_no_buffer_no_counter_and_makes_no_state(called: bool, length: int) -> None:
    torch.manual_seed(0)
    model, x, extra = Stateful(), torch.randn(32, 64), torch.randn(32, 64, requires_grad=True).clone()
    recipe = recipes.DelayedScaling(amax_history_len=4)
    if called:
        with opfuse.autocast(recipe=recipe):
            model(x, extra.clone()).sum().backward()
    before, counters, values, version = remembered(model), model.ops.cache_info(), extra.detach().clone(), extra._version
    buffers = dict(model.named_buffers())
    with opfuse.autocast(recipe=recipe.replace(amax_history_len=length)):
        explain(model, 3 * x, extra)
    after = remembered(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(buffers[name] is buffer for name, buffer in model.named_buffers())
    assert model.ops.cache_info() == counters
    assert torch.equal(extra, values)
    assert (extra._version, extra.is_leaf, extra.grad_fn is not None) == (version, False, True)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("leaf", [True, False])
def test_the_plan_explained_is_the_one_that_runs(offset: int, leaf: bool) -> None:
    model = ops.Sequential(ops.Linear(64, 64), ops.AddExtraInput(), ops.GELU())
    x = torch.randn(32 * 64 + offset)[offset:].view(32, 64).detach()
    extra = torch.randn(32, 64, requires_grad=True)
    with opfuse.autocast(recipe=recipes.MXFP8BlockScaling()):
        found = explain(model, x, extra if leaf else extra.clone())
        with plans_used() as plans:
            model(x, extra)
    assert [plan.key for plan in plans] == [plan.key for plan in found.plans]
    assert plans[0].key.env.aligned == (offset == 0)
    assert plans[0].fusions == found.fusions


def _told_products(recipe, **sizes) -> list[tuple[str, str, str]]:
    model = ops.Sequential(ops.Linear(sizes.get("k", 64), sizes.get("n", 96)))
    with opfuse.autocast(recipe=recipe):
        told = opfuse.explain(model, torch.randn(32, sizes.get("k", 64), requires_grad=True)).to_dict()
    return [(each["product"], each["status"], each["reason"]) for each in told["pipelines"][0]["products"]]


def test_each_product_is_told_native_or_emulated_and_why() -> None:
    """Of the device that it runs on, and on a CPU nothing is native; products under an override are in high precision."""
    arch = torch.cuda.get_device_capability() if torch.get_default_device().type == "cuda" else (0, 0)
    how = {
        True: ("native", "product.cu or scaled_mm, per tensor"),
        False: (
            "emulated",
            f"compute capability: wants >= 8.9 and < 13.0, got {arch[0]}.{arch[1]}" if any(arch) else ON_CPU,
        ),
    }[arch == (9, 0)]
    assert _told_products(recipes.Float8CurrentScaling()) == [(name, *how) for name in ("fprop", "dgrad", "wgrad")]
    told = _told_products(recipes.MXFP8BlockScaling(backward_override="dequantized"))
    assert [each[:2] for each in told] == [("fprop", "emulated"), ("dgrad", "high precision"), ("wgrad", "high precision")]


def test_products_on_hopper_follow_the_rules_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opfuse.compiler.plain.machine", lambda arch: Machine((9, 0), (13, 0)))
    assert {each[1] for each in _told_products(recipes.Float8CurrentScaling())} == {"native"}
    told = _told_products(recipes.Float8CurrentScaling(), n=72)
    assert told[0] == ("fprop", "emulated", "right lines: wants a positive multiple of 16, got 72")
    assert told[1] == ("dgrad", "emulated", "length of the sum: wants a positive multiple of 16, got 72")
    assert told[2][:2] == ("wgrad", "native")


@pytest.mark.parametrize(
    ("recipe", "cuda", "fprop", "wgrad"),
    [
        (recipes.DelayedScaling(), (13, 0), "product.cu or scaled_mm, per tensor", "product.cu or scaled_mm, per tensor"),
        (recipes.DelayedScaling(), (12, 8), "scaled_mm, per tensor", "scaled_mm, per tensor"),
        (recipes.Float8BlockScaling(), (13, 0), "product.cu or scaled_mm, 1x128 and", "scaled_mm, 1x128 and"),
        (recipes.CustomRecipe(qfactory="fp8_row_scaled"), (13, 0), "scaled_mm, per row", "scaled_mm, per row"),
    ],
)
def test_who_makes_a_native_product_is_told(recipe, cuda, fprop, wgrad, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the table that chooses by sizes; groups are one launch of the package's own kernel."""
    monkeypatch.setattr("opfuse.compiler.plain.machine", lambda arch: Machine((9, 0), cuda))
    told = {name: reason for name, _, reason in _told_products(recipe)}
    assert told["fprop"].startswith(fprop)
    assert told["wgrad"].startswith(wgrad)
    experts = ops.Sequential(ops.GroupedLinear(2, 64, 96, bias=False))
    with opfuse.autocast(recipe=recipe):
        found = opfuse.explain(experts, torch.randn(64, 64, requires_grad=True), torch.tensor([32, 32])).to_dict()
    makers = {each["reason"].partition(",")[0] for each in found["pipelines"][0]["products"]}
    assert makers == {"product.cu" if cuda >= (12, 9) else "scaled_mm"}


TENSOR, ROW, MX, NV, BLOCKS = (
    "scaled_mm, " + name for name in ("per tensor", "per row", "MXFP8", "NVFP4", "FP8 blocks as MXFP8")
)
OURS, FIRST_USE = "product.cu or ", ", certified on first use"
BLACKWELL = ((10, 0), (10, 3), (12, 0))
CALLED = {
    ("delayed", (8, 9)): (TENSOR + FIRST_USE,) * 3,
    ("delayed", (9, 0)): (OURS + TENSOR,) * 3,
    ("fp8_current", (8, 9)): (TENSOR + FIRST_USE,) * 3,
    ("fp8_current", (9, 0)): (OURS + TENSOR,) * 3,
    ("fp8_block", (9, 0)): (
        *(OURS + "scaled_mm, 1x128 and 128x128 blocks of E4M3",) * 2,
        "scaled_mm, 1x128 and 128x128 blocks of E4M3",
    ),
    ("fp8_block, fp32 scales", (9, 0)): (
        *(OURS + "scaled_mm, 1x128 and 128x128 blocks of E4M3",) * 2,
        "scaled_mm, 1x128 and 128x128 blocks of E4M3",
    ),
    ("rows", (8, 9)): (ROW + FIRST_USE,) * 3,
    ("rows", (9, 0)): (ROW,) * 3,
    **{(kind, arch): (TENSOR + FIRST_USE,) * 3 for kind in ("delayed", "fp8_current") for arch in BLACKWELL},
    **{("rows", arch): (ROW + FIRST_USE,) * 3 for arch in BLACKWELL},
    **{("fp8_block", arch): (BLOCKS + FIRST_USE,) * 3 for arch in BLACKWELL},
    **{("mxfp8", arch): (MX + FIRST_USE,) * 3 for arch in BLACKWELL},
    **{("nvfp4", arch): (NV + FIRST_USE,) * 3 for arch in BLACKWELL},
}
"""The library calls of fprop, dgrad and wgrad, by recipe and compute capability; all others are emulated."""
EVERY_RECIPE = {
    **{kind: make for kind, make in recipes.RECIPES.items() if kind != "custom"},
    "rows": partial(recipes.CustomRecipe, qfactory="fp8_row_scaled"),
    "fp8_block, fp32 scales": partial(recipes.Float8BlockScaling, use_f32_scales=True),
}


@pytest.mark.few
@pytest.mark.row("R10")
@pytest.mark.parametrize("arch", [(8, 0), (8, 9), (9, 0), *BLACKWELL])
@pytest.mark.parametrize("kind", EVERY_RECIPE)
def test_what_each_architecture_would_call(kind: str, arch: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opfuse.compiler.plain.machine", lambda _: Machine(arch, (13, 0)))
    model = ops.Sequential(ops.Linear(128, 256)).bfloat16()
    with opfuse.autocast(recipe=EVERY_RECIPE[kind]()):
        told = opfuse.explain(model, torch.randn(32, 128, dtype=torch.bfloat16, requires_grad=True)).to_dict()
    found = [(each["product"], each["status"], each["reason"]) for each in told["pipelines"][0]["products"]]
    calls = CALLED.get((kind, arch))
    if calls is None:
        assert {status for _, status, _ in found} <= {"emulated", "high precision"}
        wanted = "wants powers of two" if kind == "fp8_block, fp32 scales" and arch in BLACKWELL else "wants >= "
        assert all(wanted in reason for _, status, reason in found if status == "emulated")
    else:
        assert found == [(name, "native", call) for name, call in zip(("fprop", "dgrad", "wgrad"), calls, strict=True)]


@pytest.mark.parametrize(("bias", "wgrad"), [(False, "native"), (True, "emulated")])
def test_groups_of_any_rows_begin_on_tiles_unless_biases_sum_them(bias, wgrad, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opfuse.compiler.plain.machine", lambda arch: Machine((9, 0), (13, 0)))
    experts = ops.Sequential(ops.GroupedLinear(2, 64, 96, bias=bias))
    with opfuse.autocast(recipe=recipes.Float8BlockScaling()):
        found = opfuse.explain(experts, torch.randn(100, 64, requires_grad=True), torch.tensor([79, 21])).to_dict()
    told = {each["product"]: each["status"] for each in found["pipelines"][0]["products"]}
    assert told == {"fprop": "native", "dgrad": "native", "wgrad": wgrad}


@pytest.mark.parametrize(
    ("groups", "bias", "recipe", "why"),
    [
        (2, False, recipes.Float8BlockScaling(), None),
        (2, True, recipes.Float8BlockScaling(), "gradients of biases sum the rows of each group"),
        (129, False, recipes.Float8BlockScaling(), "wants at most 128 groups, got 129"),
        (
            2,
            False,
            recipes.Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
            "no kernel casts groups by Float8BlockQuantizer(",
        ),
        (2, False, recipes.NVFP4BlockScaling(disable_rht=True), "no kernel casts groups by NVFP4Quantizer("),
        (2, False, recipes.MXFP8BlockScaling(), "wgrad: compute capability: wants >= 10.0 and < 13.0, got 9.0"),
        (2, True, None, "gradients of biases sum the rows of each group"),
    ],
)
@pytest.mark.cpu
def test_why_the_host_waits_for_sizes_of_groups_is_told(groups, bias, recipe, why, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opfuse.compiler.plain.machine", lambda arch: Machine((9, 0), (13, 0)))
    splits = torch.tensor([96] + [0] * (groups - 1))
    model = ops.Sequential(ops.GroupedLinear(groups, 64, 96, bias=bias))
    with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
        found = opfuse.explain(model, torch.randn(96, 64, requires_grad=True), splits)
    assert "sizes of groups" not in str(found)  # of a CPU, where nothing waits
    (plan,) = found.plans
    env = plan.key.env._replace(device="cuda", arch=(9, 0))
    text = str(replace(found, plans=(replace(plan, key=plan.key._replace(env=env)),)))
    assert ("  sizes of groups that the host reads\n" in text) == (why is not None)
    assert why is None or f":grouped_linear: {why}" in text
