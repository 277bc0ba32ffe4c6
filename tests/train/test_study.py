"""The study of overrides: the exact gradient is the chain rule, dequantized is exact and the others are not, and it says so."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from opfuse import ops, recipes
from opfuse.cli import main
from opfuse.config import load
from opfuse.errors import ConfigError, UnsupportedError
from opfuse.recipes import QuantizerRole, Recipe
from opfuse.recipes.recipe import OVERRIDES
from opfuse.train import ByteModel
from opfuse.train.data import Batch
from opfuse.train.exact import exact_gradients
from opfuse.train.study import CEILING, KINDS, NARROWED, Agreement, Study, agreement, gradients, study_overrides
from opfuse.train.study_report import markdown, rows, to_dict, write_study

BF16 = torch.bfloat16
CONFIGS = Path(__file__).parents[2] / "configs"
TINY = """
version: 1
recipe: {kind: mxfp8}
pipeline:
  dtype: bfloat16
  ops:
    - {op: linear, in_features: 64, out_features: 64}
    - {op: make_extra_output, extra_output: residual}
    - {op: rms_norm, size: 64}
    - {op: linear, in_features: 64, out_features: 128, bias: false}
    - {op: swiglu}
    - {op: dropout, p: 0.5}
    - {op: add_extra_input, extra_input: residual}
    - {op: linear, in_features: 64, out_features: 256}
data: {kind: pydoc_topics, context: 4, embedding: 16}
train: {steps: 4, batch_size: 32}
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("study") / "tiny.yaml"
    path.write_text(TINY)
    return path


@pytest.fixture
def own_recipe_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the recipes, the configuration's own alone is studied, which takes a fifth of the time."""
    monkeypatch.setattr("opfuse.train.study.KINDS", ())


@pytest.fixture(scope="module")
def study(tiny: Path) -> Study:
    return study_overrides(load(tiny), points=2)


def model(*layers: torch.nn.Module, dtype: torch.dtype = BF16) -> ByteModel:
    torch.manual_seed(0)
    return ByteModel(ops.Sequential(*layers).to(dtype), embedding=16, dtype=dtype)


def batch(samples: int = 32) -> Batch:
    generator = torch.Generator().manual_seed(1)
    context = torch.randint(256, (samples, 4), generator=generator)
    return Batch(context, torch.randint(256, (samples,), generator=generator))


def rowwise(recipe: Recipe, tensor_type: str, tensor: torch.Tensor) -> torch.Tensor:
    quantizer = recipe.quantizer(QuantizerRole(tensor_type=tensor_type)).wanting(rowwise=True, columnwise=False)
    return quantizer.quantize(tensor.detach()).dequantize(torch.float32).double()


def sqnr(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    return agreement(got, wanted).sqnr


# -- the exact gradient -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_exact_gradient_is_the_chain_rule_written_out(kind: str) -> None:
    """Linear, GELU, linear: dx = dy Q(w), dw = dy^T Q(x) and GELU's derivative at the values that the forward made."""
    recipe, samples = recipes.recipe_of(kind, {}), batch()
    tested = model(ops.Linear(64, 96), ops.GELU(), ops.Linear(96, 256))
    first, act, second = tested.pipeline
    with torch.no_grad(), recipes.autocast(recipe=recipe):
        x = tested.embedding(samples.context).flatten(1).to(BF16)
        z = first(x)
        h = act(z)
        logits = second(h)
    p = logits.double().softmax(-1)
    dy = (p - torch.nn.functional.one_hot(samples.target, 256)) / len(samples.target)
    dh = dy @ rowwise(recipe, "weight", second.weight)
    u = 0.79788456 * (z.double() + 0.044715 * z.double() ** 3)
    slope = 0.79788456 * (1 + 3 * 0.044715 * z.double() ** 2)
    dz = dh * (0.5 * (1 + torch.tanh(u)) + 0.5 * z.double() * (1 - torch.tanh(u) ** 2) * slope)
    dx = (dz @ rowwise(recipe, "weight", first.weight)).reshape(*samples.context.shape, 16)
    table = torch.zeros(256, 16, dtype=torch.float64).index_put((samples.context,), dx, accumulate=True)
    want = [table, dz.t() @ rowwise(recipe, "input", x), dz.sum(0), dy.t() @ rowwise(recipe, "input", h), dy.sum(0)]
    got = exact_gradients(tested, samples, recipe)
    assert [name for name, _ in tested.named_parameters()][1:3] == ["pipeline.0.weight", "pipeline.0.bias"]
    assert min(sqnr([a], [b]) for a, b in zip(got, want)) > 140  # the constants of GELU have eight digits


def test_without_a_recipe_and_in_fp32_it_is_autograd_s_in_fp64(tiny: Path) -> None:
    config = load(tiny)
    tested = ByteModel(config.build().float(), embedding=16, dtype=torch.float32).eval()
    double = copy.deepcopy(tested).double()
    double.dtype = torch.float64
    got = exact_gradients(tested, batch(), None)
    logits = double.pipeline(double.embedding(batch().context).flatten(1))
    value = torch.nn.functional.cross_entropy(logits, batch().target)
    want = torch.autograd.grad(value, list(double.parameters()))
    assert all(grad.dtype == torch.float64 for grad in got)
    assert sqnr(got, want) > 110  # evaluated at values that fp32 rounded
    assert sqnr(gradients(tested, batch(), None, seed=0), got) > 110


def test_an_explicit_cast_is_straight_through() -> None:
    tested = model(ops.Quantize(), ops.Linear(64, 256), dtype=torch.float32)
    recipe = recipes.MXFP8BlockScaling(backward_override="dequantized")
    assert sqnr(gradients(tested, batch(), recipe, seed=0), exact_gradients(tested, batch(), recipe)) > 110


GROUPED = {
    "weights apart": {},
    "one weight": {"single_grouped_weight": True, "single_grouped_bias": True},
    "no bias": {"bias": False},
    "scaled bias": {"scale_bias": True},
    "one of each, scaled": {"single_grouped_weight": True, "single_grouped_bias": True, "scale_bias": True},
}


def experts(router: ops.TokenDispatch, *middle: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """``middle`` ends with a grouped layer; the layers of a model, with a product of 256 features last."""
    combine, names = ops.TokenCombine(), ("splits", "probabilities", "places")
    for i, name in enumerate(names):
        router.set_extra_output_channel(i, name, output_to_caller=False)
    for op, read in ((middle[-1], names[:2]), (combine, names[2:])):
        for i in range(op.num_extra_inputs):
            op.set_extra_input_channel(i, read[i])
    return router, *middle, combine, ops.Linear(64, 256)


@pytest.mark.few
@pytest.mark.row("B25", "B06")
@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("options", GROUPED.values(), ids=GROUPED)
def test_b25_b06_groups_have_the_chain_rule_of_their_own_casts(kind: str | None, options: dict[str, bool]) -> None:
    """Ragged groups, more of them than some tokens reach, one after a Quantize: dequantized is exact in fp32."""
    grouped = ops.GroupedLinear(6, 64, 64, **options)
    tested = model(*experts(ops.TokenDispatch(6, 64, top_k=2), ops.Quantize(), grouped), dtype=torch.float32)
    recipe = None if kind is None else recipes.recipe_of(kind, {"backward_override": "dequantized", **NARROWED.get(kind, {})})
    assert sqnr(gradients(tested, batch(), recipe, seed=0), exact_gradients(tested, batch(), recipe)) > 110


def test_a_token_keeps_the_experts_that_were_chosen_for_it() -> None:
    """Two experts tie in fp32 for all tokens; in fp64 half of them would go to the other one."""
    router = ops.TokenDispatch(2, 64)
    tested = model(*experts(router, ops.GroupedLinear(2, 64, 64, bias=False)), dtype=torch.float32)
    with torch.no_grad():
        router.weight[:] = 0
        router.weight[:, 0] = torch.tensor([1, 1 + 2**-20])
        tested.embedding.weight[:] = (torch.rand(256, 16) - 0.5) * 2**-8
    assert sqnr(gradients(tested, batch(), None, seed=0), exact_gradients(tested, batch(), None)) > 110


def test_an_op_with_casts_of_its_own_is_refused() -> None:
    class Casts(ops.Bias):
        roles = ("input",)

    tested = model(Casts(64), ops.Linear(64, 256))
    with pytest.raises(UnsupportedError, match="linear layers as the only ops with quantized operands"):
        exact_gradients(tested, batch(), recipes.MXFP8BlockScaling())


def test_agreement_is_signal_to_noise_and_cosine() -> None:
    ones = [torch.ones(3), torch.ones(2, 5, dtype=torch.float64)]
    assert agreement(ones, ones) == Agreement(CEILING, pytest.approx(1.0))
    assert agreement([1.1 * t for t in ones], ones) == Agreement(pytest.approx(20.0, abs=1e-4), pytest.approx(1.0))
    assert agreement([torch.tensor([1.0, 1.0])], [torch.tensor([1.0, 0.0])]) == Agreement(0.0, pytest.approx(math.sqrt(0.5)))


# -- the study --------------------------------------------------------------------------------------------------------------


@pytest.mark.row("B06")
def test_b06_dequantized_is_the_exact_gradient_in_training_and_the_others_are_not(study: Study) -> None:
    """In fp32 as exact as a run without a recipe; in bf16 as good as its roundings let any run be."""
    found = {(one.step, one.dtype, one.kind, one.override): one.exact.sqnr for one in study.measurements}
    for step in (0, 4):
        floor = {dtype: found[step, dtype, None, None] for dtype in ("float32", "bfloat16")}
        assert floor["float32"] > 115
        for kind in KINDS:
            assert found[step, "float32", kind, "dequantized"] > floor["float32"] - 6
            assert found[step, "bfloat16", kind, "dequantized"] > floor["bfloat16"] - 6
            for override in (None, "high_precision"):
                assert found[step, "float32", kind, override] < 45
                assert found[step, "bfloat16", kind, override] < found[step, "bfloat16", kind, "dequantized"] - 6


@pytest.mark.row("B06", "B25")
def test_b06_b25_dequantized_is_exact_in_a_mixture_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With scales of blocks, of two levels; by itself a grouped layer has the casts of every recipe."""
    kinds = ("fp8_block", "nvfp4")
    monkeypatch.setattr("opfuse.train.study.KINDS", kinds)
    config = load(CONFIGS / "moe.yaml")
    config = replace(config, train=config.train.model_copy(update={"batch_size": 64}))
    found = study_overrides(config, steps=1, points=1)
    assert found.refusals == ()
    exact = {(one.dtype, one.kind, one.override): one.exact.sqnr for one in found.measurements}
    assert exact["float32", None, None] > 115
    for kind in kinds:
        for dtype in ("float32", "bfloat16"):
            assert exact[dtype, kind, "dequantized"] > exact[dtype, None, None] - 6
        assert max(exact["float32", kind, None], exact["float32", kind, "high_precision"]) < 45


@pytest.mark.usefixtures("own_recipe_alone")
def test_the_configuration_s_own_recipe_is_measured_whatever_its_kind(tiny: Path) -> None:
    """NVFP4's rotation takes bf16 only, so fp32 refuses what this factory does backward, and that alone."""
    own = recipes.CustomRecipe(qfactory="mxfp8_fwd_nvfp4_bwd")
    found = study_overrides(replace(load(tiny), recipe=own), steps=1, points=1)
    assert found.keys[-3:] == (("custom", None), ("custom", "dequantized"), ("custom", "high_precision"))
    (refused,) = found.refusals
    assert (refused.step, refused.dtype, refused.kind, refused.override) == (0, "float32", "custom", None)
    exact = {(one.dtype, one.kind, one.override): one.exact.sqnr for one in found.measurements}
    assert exact["bfloat16", "custom", "dequantized"] > exact["bfloat16", None, None] - 6
    assert exact["bfloat16", "custom", None] < 45


@pytest.mark.usefixtures("own_recipe_alone")
def test_delayed_scaling_is_measured_at_the_scales_of_training_without_overrides(tiny: Path) -> None:
    found = study_overrides(replace(load(tiny), recipe=recipes.DelayedScaling()), steps=2, points=2)
    own = [one for one in found.measurements if one.kind == "delayed"]
    assert [(one.step, one.dtype) for one in own] == [(0, "bfloat16"), (0, "float32"), (2, "bfloat16"), (2, "float32")]
    assert all(20 < one.exact.sqnr < 45 for one in own)
    assert {(one.kind, one.override) for one in found.refusals} == {("delayed", "dequantized"), ("delayed", "high_precision")}


def test_a_gradient_moves_no_delayed_scale() -> None:
    tested, recipe = model(ops.Linear(64, 256)), recipes.DelayedScaling(amax_history_len=1)
    with recipes.autocast(recipe=recipe):
        tested(batch().context)
    before = {name: value.clone() for name, value in tested.pipeline[0].quantizer_states.to_dict().items()}
    with torch.no_grad():
        tested.embedding.weight.mul_(3)
    gradients(tested, batch(), recipe, seed=0)
    after = tested.pipeline[0].quantizer_states.to_dict()
    assert before.keys() == after.keys() != set()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.usefixtures("own_recipe_alone")
def test_what_a_call_refuses_is_told_in_every_output(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """48 samples fill no block of columnwise MXFP8: only the override in use has to run."""
    path = tmp_path / "ragged.yaml"
    path.write_text(
        TINY.replace("batch_size: 32", "batch_size: 48").replace("kind: mxfp8", "kind: mxfp8, backward_override: dequantized")
    )
    command = ["study", "overrides", str(path), "--points", "1", "--steps", "1", "--out", str(tmp_path)]
    assert main(command) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("refused")]
    reason = "divisible by 32 for columnwise mxfp8_e4m3 data, got 48"
    assert [line for line in told if "mxfp8, None, in bfloat16 and float32" in line and reason in line]
    found = json.loads((tmp_path / "overrides.json").read_text())
    refused = {(one["recipe"], one["backward_override"], one["dtype"]): one["reason"] for one in found["refused"]}
    assert reason in refused["mxfp8", None, "float32"]
    rows = {(row["recipe"], row["backward_override"]): row for row in found["summary"]}
    assert rows["mxfp8", None]["exact"] is rows["mxfp8", None]["plain"] is None
    assert rows["mxfp8", "dequantized"]["exact"]["sqnr"] > rows[None, None]["exact"]["sqnr"] - 6
    table = (tmp_path / "overrides.md").read_text()
    assert "| `mxfp8` | `None` | refused | refused | refused | refused |" in table
    assert f"- refused: mxfp8, None, in bfloat16 and float32: {refused['mxfp8', None, 'float32']}" in table
    path.write_text(path.read_text().replace(", backward_override: dequantized", ""))
    assert main(command) != 0
    assert reason in capsys.readouterr().err


def test_every_setting_is_measured_at_every_point(study: Study) -> None:
    keys = [(one.step, one.dtype, one.kind, one.override) for one in study.measurements]
    settings = [(None, None), *((kind, override) for kind in KINDS for override in OVERRIDES)]
    assert keys == [(step, dtype, *key) for step in (0, 4) for dtype in ("bfloat16", "float32") for key in settings]
    assert all((one.plain is None) == (one.kind is None) for one in study.measurements)
    assert all(0.9 < one.plain.cosine < 1 for one in study.measurements if one.plain is not None)
    assert all(10 < one.plain.sqnr < 45 for one in study.measurements if one.plain is not None)


@pytest.mark.usefixtures("own_recipe_alone")
def test_measuring_leaves_the_run_as_it_is(study: Study, tiny: Path) -> None:
    alone = study_overrides(load(tiny), points=1)
    assert alone.curve.losses == study.curve.losses
    assert {one.step for one in alone.measurements} == {0}


def test_the_configuration_s_recipe_keeps_its_fields(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Recipe] = []

    def record(tested: ByteModel, samples: Batch, recipe: Recipe | None) -> list[torch.Tensor]:
        seen.extend(() if recipe is None else (recipe,))
        return [parameter.detach() for parameter in tested.parameters()]

    monkeypatch.setattr("opfuse.train.study.exact_gradients", record)
    config = replace(load(tiny), recipe=recipes.MXFP8BlockScaling(scale_rule="ocp_floor"))
    study_overrides(config, steps=1, points=1)
    assert {recipe.scale_rule for recipe in seen if recipe.kind == "mxfp8"} == {"ocp_floor"}
    assert [recipe.disable_rht for recipe in seen if recipe.kind == "nvfp4"] == [False, True]  # bf16, then fp32


@pytest.mark.row("B35")
@pytest.mark.usefixtures("own_recipe_alone")
def test_b35_keep_is_told_with_its_bytes_beside_its_errors(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["study", "keep", str(tiny), "--points", "1", "--steps", "1", "--out", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    none, as_ever, every, remade, kept = found["summary"]
    assert [row["keep"] for row in found["summary"]] == [None, None, "all", "recompute", "quantized"]
    assert every["saved_bytes"] > none["saved_bytes"] > remade["saved_bytes"] > kept["saved_bytes"]
    assert every["saved_bytes"] > as_ever["saved_bytes"] >= remade["saved_bytes"]  # no product reads an activation here
    assert remade["exact"] == as_ever["exact"] == every["exact"]
    assert kept["exact_float32"]["sqnr"] < as_ever["exact_float32"]["sqnr"]
    head, _, *lines = markdown(found).splitlines()
    assert head.startswith("| recipe | keep | saved | exact gradient, bfloat16 |")
    share = f"{remade['saved_bytes'] / none['saved_bytes']:.0%}"
    assert lines[3].startswith(f"| `mxfp8` | `recompute` | {share} | {remade['exact']['sqnr']:.1f} |")
    assert (tmp_path / "keep.md").read_text().count(share) >= 1


def test_what_cannot_be_studied_is_refused(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "bare.yaml"
    path.write_text(TINY.replace("data: {kind: pydoc_topics, context: 4, embedding: 16}\n", ""))
    with pytest.raises(ConfigError, match="data to train on"):
        study_overrides(load(path))
    with pytest.raises(UnsupportedError, match="nowhere"):
        study_overrides(load(tiny), device="nowhere")


# -- what is written --------------------------------------------------------------------------------------------------------


def test_the_files_say_what_was_measured(study: Study, tmp_path: Path) -> None:
    values, table, *plots = write_study(study, tmp_path)
    found = json.loads(values.read_text())
    assert found == json.loads(json.dumps(to_dict(study)))
    assert found["points"] == [0, 4]
    assert len(found["measurements"]) == len(study.measurements)
    means = {(row["recipe"], row["backward_override"]): row for row in found["summary"]}
    exact = [one.exact.sqnr for one in study.measurements if (one.dtype, one.kind, one.override) == ("float32", "mxfp8", None)]
    assert means["mxfp8", None]["exact_float32"]["sqnr"] == pytest.approx(sum(exact) / 2)
    assert means[None, None]["plain"] is None
    assert markdown(found) in table.read_text()
    assert markdown(found).count("\n") == 1 + len(means)
    for plot in plots:
        assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_pipeline_in_float32_has_one_column_of_that_dtype() -> None:
    (narrow,), (wide,) = rows("bfloat16", []), rows("float32", [])
    assert [cell for cell in narrow if "exact" in cell] == ["exact gradient, bfloat16", "exact gradient, float32"]
    assert [cell for cell in wide if "exact" in cell] == ["exact gradient, float32"]
    assert len(narrow) == len(wide) + 1


def test_without_matplotlib_there_is_no_plot(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opfuse.train.files.find_spec", lambda name: None)
    assert [path.name for path in write_study(study, tmp_path)] == ["overrides.json", "overrides.md"]


@pytest.mark.usefixtures("own_recipe_alone")
def test_the_command(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["study", "overrides", str(tiny), "--points", "1", "--steps", "2", "--out", str(tmp_path)]
    assert main(command) == 0
    told = capsys.readouterr()
    assert "dequantized" in told.out
    assert "gradients  step 1/1" in told.err
    assert "training  step 2/2" in told.err
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "overrides.json").read_text())
    assert (found["steps"], found["points"]) == (2, [0])
    assert main(["study", "everything", str(tiny)]) == 2
