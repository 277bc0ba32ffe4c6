"""Values watched: what is told of a cast is what it did, a look changes no bit, and it costs nothing where nobody looks."""

from __future__ import annotations

import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import opfuse
from opfuse import ops, recipes
from opfuse.cli.app import main
from opfuse.config import load
from opfuse.errors import ConfigError, OutputError, PipelineError
from opfuse.inspect.casts import figures
from opfuse.inspect.trace import read
from opfuse.runtime.interpret.checkpoint import checkpoint
from opfuse.runtime.plans import trace as writing
from opfuse.tensors.quantizers import Float8CurrentScalingQuantizer, GroupedQuantizer, MXFP8Quantizer, NVFP4Quantizer
from opfuse.train import compare
from tests.compiler.harness import generator_of


def mlp() -> ops.Sequential:
    torch.manual_seed(0)
    return ops.Sequential(ops.RMSNorm(32), ops.Linear(32, 64), ops.GELU(), ops.Linear(64, 32)).bfloat16()


def train(model: Any, recipe: recipes.Recipe, steps: int = 1) -> list[torch.Tensor]:
    made = []
    torch.manual_seed(1)
    for step in range(steps):
        x = torch.randn(32, 32, generator=generator_of(step)).bfloat16().requires_grad_()
        with opfuse.autocast(recipe=recipe):
            y = model(x)
        y.square().sum().backward()
        made += [y.detach(), x.grad]
    return made + [p.grad for p in model.parameters()]


def test_figures_are_those_of_the_values() -> None:
    x = torch.zeros(32, 32)
    x[0, :4] = torch.tensor([448.0, 1e-4, 3.0, -100.0])
    x[1, 0], x[2, 0] = math.inf, 1.0
    (found,) = (each.read() for each in figures(x, MXFP8Quantizer()(x).record))
    assert (found.format, found.plane, found.elements, found.amax) == ("mxfp8_e4m3", "rowwise", 1024, 448.0)
    assert found.nonfinite == pytest.approx(1 / 1024)
    assert found.saturated == 0.0
    assert found.flushed == pytest.approx(1 / 5)
    assert sum(found.scales.values()) == pytest.approx(1.0)
    assert found.scales[0] == found.scales[128] == pytest.approx(32 / 1024)  # the blocks of 448 and of inf
    assert found.sqnr is not None
    assert found.sqnr > 30  # of the values that both sides have


@pytest.mark.parametrize(
    "quantizer", [MXFP8Quantizer(), Float8CurrentScalingQuantizer(torch.float8_e5m2), NVFP4Quantizer(with_rht=False)]
)
def test_sqnr_is_that_of_what_is_decoded(quantizer: Any) -> None:
    x = torch.randn(64, 64, generator=generator_of(0)).bfloat16()
    made = quantizer(x).record
    (found,) = (each.read() for each in figures(x, made))
    assert found.sqnr == pytest.approx(sqnr(x, made), abs=1e-3)
    assert found.saturated == 0.0


def sqnr(x: torch.Tensor, made: Any, usage: str | None = None) -> float:
    loss = x.double() - made.dequantize(torch.float32, usage).double()
    return 10 * math.log10(x.double().square().sum() / loss.square().sum())


QUANTIZERS = {
    "nvfp4": NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
    "mxfp8": MXFP8Quantizer(),
    "fp8_current": Float8CurrentScalingQuantizer(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("sizes", [None, (40, 0, 24)])
@pytest.mark.parametrize("kind", QUANTIZERS)
def test_groups_and_rotated_planes_are_told(kind: str, sizes: tuple[int, ...] | None) -> None:
    """Groups as one tensor; a rotated plane beside the other, of the values that the rotation makes."""
    x = torch.randn(64, 64, generator=generator_of(0)).bfloat16()
    x[3] *= 1000
    quantizer = QUANTIZERS[kind]
    made = (GroupedQuantizer((quantizer,) * 3, sizes, padded=True).quantize(x)) if sizes else quantizer.quantize(x)
    first, *rotated = (each.read() for each in figures(x, made))
    assert (first.plane, first.elements) == ("rowwise", x.numel())
    assert first.sqnr == pytest.approx(sqnr(x, made), abs=1e-3)
    assert len(rotated) == (kind == "nvfp4")
    for found in rotated:
        assert (found.plane, found.format) == ("columnwise", "nvfp4 (rotated)")
        assert found.sqnr == pytest.approx(sqnr(x, made, "columnwise"), abs=0.05)  # turned back, and rounded to bf16
        assert found.amax == pytest.approx(float(torch.stack(amaxes(made)).max()))


def amaxes(made: Any) -> list[torch.Tensor]:
    """Those that the casts of rotated values found."""
    return [plane.amax.max() for plane in getattr(made.columnwise, "members", (made.columnwise,)) if plane.data.numel()]


def test_a_look_at_experts_tells_of_each_operand() -> None:
    model = ops.Sequential(ops.GroupedLinear(3, 32, 64, bias=False, pad_splits=True)).bfloat16()
    x = torch.randn(96, 32).bfloat16().requires_grad_()
    with warnings.catch_warnings(record=True) as alarms, opfuse.autocast(recipe=recipes.NVFP4BlockScaling()):
        warnings.simplefilter("always")
        with opfuse.watch(model, alarms={"sqnr": 1000.0}) as watch:
            model(x, torch.tensor([40, 0, 56])).square().sum().backward()
    told = {(record["tensor"], record["plane"]) for record in watch.records}
    assert len(str(watch).splitlines()) == 1 + len(told)
    assert sum("the signal-to-noise ratio is " in str(each.message) for each in alarms) == len(told)
    both = {(name, plane) for name in ("input", "grad_output") for plane in ("rowwise", "columnwise")}
    assert told == both | {(f"weight{i}", "rowwise") for i in range(3)}


@pytest.mark.cpu
def test_a_scale_that_is_too_small_saturates() -> None:
    """Under delayed scaling the scale is of earlier steps: 1 at first, so that what lies above 448 is cut."""
    model = ops.Sequential(ops.Linear(32, 32, bias=False))
    x = torch.ones(32, 32)
    x[0] = 1000.0
    x[1, :16] = 460.0  # rounds to 448: nothing was cut
    x[1, 16:] = 470.0  # above half a step
    watch = opfuse.watch(model)
    with warnings.catch_warnings(record=True) as told, opfuse.autocast(recipe=recipes.DelayedScaling()):
        warnings.simplefilter("always")
        model(x)
    (cast,) = [each for each in watch.records if each["tensor"] == "input"]
    assert cast["saturated"] == pytest.approx(1.5 / 32)
    assert cast["op"] == "0"
    text = next(str(each.message) for each in told if "saturated" in str(each.message))
    said = "4.69 % of the values saturated (limit 1 %), cast to fp8_tensor_e4m3. Cure: give the scale room"
    assert text.startswith(f"op 0, input, step 1: {said}")


def test_the_cure_of_a_weight_that_is_not_finite_is_not_that_of_an_input() -> None:
    """An op made the input, and none the weight."""
    model = ops.Sequential(ops.Linear(32, 32, bias=False), ops.Linear(32, 32, bias=False))
    with torch.no_grad():
        next(model.parameters())[0, 0] = torch.nan
    with warnings.catch_warnings(record=True) as told, opfuse.autocast(recipe=recipes.Float8CurrentScaling()):
        warnings.simplefilter("always")
        with opfuse.watch(model, every=1, alarms={"nonfinite": 0.0}):
            model(torch.ones(32, 32))
            model[0].weight.data[0, 0] = 0.0
            model(torch.full((32, 32), torch.inf))
    weight, given = (str(each.message) for each in told)
    assert weight.startswith("op 0, weight, step 1: 0.0977 % of the values are NaN or infinite (limit 0 %), cast to")
    assert "Cure: check the weight after loading" in weight
    assert given.startswith("op 0, input, step 2: ")
    assert "Cure: look at the op, or the data, that these values come from" in given


def test_of_values_that_are_not_finite_the_first_cast_of_a_step_is_told_and_all_are_recorded() -> None:
    """They spread to whatever is computed from them."""
    model = ops.Sequential(*[ops.Linear(32, 32, bias=False) for _ in range(3)])
    with torch.no_grad():
        model[1].weight[0, 0] = torch.nan
    with warnings.catch_warnings(record=True) as told, opfuse.autocast(recipe=recipes.Float8CurrentScaling()):
        warnings.simplefilter("always")
        with opfuse.watch(model, every=1, alarms={"nonfinite": 0.0}) as watch:
            for _ in range(2):
                model(torch.ones(32, 32)).sum().backward()
    assert [str(each.message).partition(":")[0] for each in told] == ["op 1, weight, step 1"]
    assert {(r["op"], r["tensor"]) for r in watch.records if r["nonfinite"]} >= {
        ("1", "weight"),
        ("2", "input"),
        ("0", "grad_output"),
    }


RECIPES = {"mxfp8": recipes.MXFP8BlockScaling, "delayed": recipes.DelayedScaling, "nvfp4": recipes.NVFP4BlockScaling}


@pytest.mark.parametrize("kind", RECIPES)
def test_a_look_changes_no_bit_and_no_cache(kind: str) -> None:
    plain, watched = mlp(), mlp()
    wanted = train(plain, RECIPES[kind](), 4)
    with opfuse.watch(watched, every=2, alarms={}) as watch:
        got = train(watched, RECIPES[kind](), 4)
    assert all(map(torch.equal, wanted, got))
    info = watched.cache_info()
    assert (info.plans, info.misses) == (1, 1)
    assert sorted({record["step"] for record in watch.records}) == [1, 3]
    tensors = {(record["op"], record["tensor"]) for record in watch.records}
    assert tensors == {(op, tensor) for op in ("1", "3") for tensor in ("input", "weight", "grad_output")}
    assert "grad_output" in str(watch)


def test_recipes_that_round_once_keep_their_fusions() -> None:
    plain, watched = mlp(), mlp()
    recipe = recipes.MXFP8BlockScaling(rounding="single")
    wanted = train(plain, recipe)
    watch = opfuse.watch(watched, every=1)
    assert all(map(torch.equal, wanted, train(watched, recipe)))
    assert {record["tensor"] for record in watch.records} >= {"weight"}


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_is_told_once(reentrant: bool) -> None:
    model = mlp()

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> Any:
            return (
                checkpoint(self.inner, x)
                if not reentrant
                else torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=True)
            )

    whole = Model()
    wanted = train(mlp(), recipes.MXFP8BlockScaling())
    with opfuse.watch(whole, every=1) as watch:
        assert all(map(torch.equal, wanted, train(whole, recipes.MXFP8BlockScaling())))
    counted = [(record["op"], record["tensor"]) for record in watch.records]
    assert len(counted) == len(set(counted)) == 6


def test_evaluation_is_not_watched_and_an_error_ends_the_look() -> None:
    model = mlp()
    watch = opfuse.watch(model, every=1)
    with opfuse.autocast(recipe=recipes.MXFP8BlockScaling()):
        model.eval()(torch.randn(32, 32).bfloat16())
        model.train()
        with pytest.raises(Exception, match="trailing dimensions"):
            model(torch.randn(32, 31).bfloat16())
        other = mlp()
        other(torch.randn(32, 32).bfloat16())
    assert watch.records == []
    assert other.cache_info().plans == 1


def test_two_looks_at_one_model_both_tell_and_both_end() -> None:
    model, recipe = mlp(), recipes.MXFP8BlockScaling()
    with opfuse.watch(model, every=2) as one, opfuse.watch(model, every=2) as other:
        train(model, recipe)
        assert one.records == other.records
        assert one.records
        before = len(one.records)
        train(model, recipe)
        assert len(one.records) == before  # the second step is not due
    train(model, recipe)
    assert len(one.records) == len(other.records) == before


class Writer:
    """What a SummaryWriter and a run of W&B have."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.told.append((name, step))


class Run:
    def __init__(self) -> None:
        self.told: list[Any] = []

    def log(self, values: dict[str, float], step: int) -> None:
        self.told += [(name, step) for name in values]


@pytest.mark.cpu
def test_records_go_to_lines_of_json_and_to_writers(tmp_path: Path) -> None:
    seen: list[Any] = []
    sinks: list[Any] = [tmp_path / "deep" / "values.jsonl", Writer(), Run(), seen.append]
    for to in sinks:
        train_one = mlp()
        opfuse.watch(train_one, to=to)
        train(train_one, recipes.MXFP8BlockScaling())
    lines = [json.loads(line) for line in sinks[0].read_text().splitlines()]
    assert len(lines) == len(seen) == 6
    assert {**lines[0], "scales": None} == {**seen[0], "scales": None}
    assert ("1/input/sqnr", 1) in sinks[1].told
    assert sorted(sinks[1].told) == sorted(sinks[2].told)


@pytest.mark.usefixtures("own_pipelines")
def test_figures_of_a_step_go_where_casts_go(tmp_path: Path) -> None:
    seen: list[Any] = []
    sinks: list[Any] = [tmp_path / "values.jsonl", Writer(), Run(), seen.append, tmp_path / "run"]
    for to in sinks:
        model = mlp()
        with opfuse.watch(model, every=2, to=to) as one:
            for rate in (0.1, 0.2, 0.3):
                train(model, recipes.MXFP8BlockScaling())
                one.log(loss=torch.tensor(rate).double() * 2, learning_rate=rate, odd=math.nan)
    lines = [json.loads(line) for line in sinks[0].read_text().splitlines()]
    steps = [line for line in lines if "op" not in line]
    assert [(line["step"], line["loss"], line["learning_rate"], line["odd"]) for line in steps] == [
        (1, pytest.approx(0.2), 0.1, "nan"),
        (2, pytest.approx(0.4), 0.2, "nan"),
        (3, pytest.approx(0.6), 0.3, "nan"),
    ]
    assert steps[0]["ms"] is None
    assert steps[1]["ms"] == pytest.approx(1e3 * (steps[1]["seconds"] - steps[0]["seconds"]), abs=0.01)
    assert all(line["memory"] > 0 and line["peak"] > 0 for line in steps)
    assert [record["loss"] for record in seen if "op" not in record] == pytest.approx([0.2, 0.4, 0.6])
    assert {("loss", 1), ("learning_rate", 3), ("peak", 2)} <= {*sinks[1].told} & {*sinks[2].told}
    (trace,) = read(sinks[4])
    assert [step.figures["loss"] for step in trace.steps] == pytest.approx([0.2, 0.4, 0.6])
    assert all(math.isnan(step.figures["odd"]) for step in trace.steps)
    assert {(cast.step, cast.op) for cast in trace.casts} == {(step, op) for step in (1, 3) for op in ("1", "3")}
    assert (trace.models[0].model, trace.models[0].every, trace.models[0].modules) == ("Sequential", 2, [])
    assert len(trace.plans) >= 1
    assert trace.counts is not None


@pytest.mark.usefixtures("own_pipelines")
def test_what_goes_on_in_a_file_is_a_trace_of_its_own(tmp_path: Path) -> None:
    """As where a container gives each process the same number."""
    model = mlp()
    for _ in range(2):
        writing._writer.cache_clear()
        with opfuse.watch(model, to=tmp_path, alarms={}) as one:
            train(model, recipes.MXFP8BlockScaling())
            one.log(loss=1)
    writing._writer.cache_clear()
    first, second = read(tmp_path)
    assert first.path == second.path
    assert [len(first.steps), len(second.steps)] == [1, 1]
    assert first.counts is not None
    assert second.counts is not None
    assert {plan.key for plan in first.plans} <= {plan.key for plan in second.plans}


def test_what_cannot_be_logged_is_refused() -> None:
    with opfuse.watch(mlp()) as one:
        for name, value in (("loss", "low"), ("loss", torch.zeros(2)), ("loss", None), ("step", 3)):
            with pytest.raises(
                PipelineError, match=rf"log\({name}=\): wants (one number|a name beside step, op, seconds, ms, memory, peak), got"
            ):
                one.log(**{name: value})  # type: ignore[arg-type]


def test_what_cannot_be_watched_is_refused(tmp_path: Path) -> None:
    refused = {
        "every": {"every": 0},
        "did you mean 'saturated'": {"alarms": {"satrated": 1.0}},
        r"watch\(alarms=\) sqnr: wants a finite number": {"alarms": {"sqnr": "high"}},
        r"watch\(alarms=\): wants limits by figure, got 30": {"alarms": 30},
    }
    for match, given in refused.items():
        with pytest.raises(PipelineError, match=match):
            opfuse.watch(mlp(), **given)  # type: ignore[arg-type]
    with pytest.raises(PipelineError, match="ops of opfuse"):
        opfuse.watch(torch.nn.Linear(3, 3))
    with pytest.raises(OutputError, match="something to write to"):
        opfuse.watch(mlp(), to=3)
    (tmp_path / "file").write_text("")
    for name, wanted in (("x.jsonl", "a file to write"), ("x", "a directory to write in")):
        with pytest.raises(OutputError, match=wanted):
            opfuse.watch(mlp(), to=tmp_path / "file" / name)


CONFIG = """version: 1
recipe: {kind: mxfp8}
pipeline: {ops: [{op: linear, in_features: 64, out_features: 256}]}
data: {kind: pydoc_topics, context: 4, embedding: 16}
train: {steps: 3, batch_size: 32, eval_every: 3}
watch: {every: 2, alarms: {sqnr: 900}}
"""


def test_a_file_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings(record=True) as alarms:
        warnings.simplefilter("always")
        assert main(["run", "mine.yaml", "--out", "out"]) == 0
    assert [str(each.message).partition(":")[0] for each in alarms] == [
        f"op pipeline.0, {tensor}, step 1" for tensor in ("input", "weight", "grad_output")
    ]
    lines = [json.loads(line) for line in (tmp_path / "out" / "values.jsonl").read_text().splitlines()]
    assert [(each["step"], each["tensor"]) for each in lines] == [
        (s, t) for s in (1, 3) for t in ("input", "weight", "grad_output")
    ]
    (tmp_path / "other.yaml").write_text(CONFIG.replace("every: 2", "every: 2, to: wandb"))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"watch\.to: wants an installed wandb.*pip install wandb"):
        compare(load("other.yaml"), steps=1)


def test_the_host_time_of_each_group() -> None:
    model, x = mlp(), torch.randn(32, 32).bfloat16()
    with opfuse.autocast(recipe=recipes.MXFP8BlockScaling()):
        found = opfuse.host_times(model, x, calls=2)
    assert {(row.side, row.name) for row in found.rows} >= {("forward", "epilogue"), ("backward", "backward_activation_bias")}
    assert sum(row.share for row in found.rows) == pytest.approx(1.0)
    assert found.rows[0].seconds >= found.rows[-1].seconds > 0
    assert str(found).splitlines()[1].split()[3:5] == [found.rows[0].side, found.rows[0].name]
    assert found.to_dict()["groups"][0]["side"] == found.rows[0].side
    assert model.cache_info().misses == 0
    assert all(p.grad is None for p in model.parameters())


class Looking(torch.nn.Module):
    """Looks at the model around it, in the midst of its first call."""

    look: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        look, self.look = self.look, None
        if look is not None:
            look(x)
        return x


@pytest.mark.parametrize("look", [opfuse.explain, opfuse.saved, opfuse.host_times])
def test_calls_that_leave_no_trace_are_no_steps(look: Any) -> None:
    """Of a watched pipeline, of a model around one, and in the midst of a step that is watched."""
    recipe, x = recipes.Float8CurrentScaling(), torch.randn(32, 32).bfloat16()
    pipeline, around = mlp(), torch.nn.Sequential(Looking(), mlp())
    for model in (pipeline, around):
        with opfuse.autocast(recipe=recipe), opfuse.watch(model, every=1, alarms={}) as watched:
            look(model, x)
            assert (watched.step, watched.records) == (0, [])
            model(x)
            found = len(watched.records)
            assert (watched.step, found > 0) == (1, True)
            around[0].look = lambda x: look(around, x)
            model(x)
            assert (watched.step, len(watched.records)) == (2, 2 * found)
            around[0].look = None


@pytest.mark.usefixtures("own_pipelines")
def test_the_report_of_a_model_that_was_converted_in_part_is_written(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 64))
    opfuse.fuse_(model[1], recipes.MXFP8BlockScaling())
    writing._writer.cache_clear()
    with opfuse.watch(model, every=1, to=tmp_path, alarms={}):
        model(torch.randn(32, 64, requires_grad=True)).sum().backward()
    writing._writer.cache_clear()
    (trace,) = read(tmp_path)
    assert [row[1] for row in trace.models[0].modules] == ["Linear"]
