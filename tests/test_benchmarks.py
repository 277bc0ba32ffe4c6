"""What the benchmarks call, run on the CPU: peers in PyTorch compute what the kernels that they are set against compute."""

from __future__ import annotations

import functools
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import opfuse
from benchmarks import (
    adapters,
    bandwidth,
    calls,
    chained,
    choices,
    compiling,
    converted,
    distributed,
    grouped,
    libraries,
    mixtures,
    models,
    overhead,
    pipelines,
    products,
    profiles,
    pytorch,
    record,
    rollout,
    sanitizer,
    small,
    steps,
    timing,
    training,
)
from docs import performance, tables
from opfuse import ops
from opfuse.config import Config, load
from opfuse.errors import UnsupportedError
from opfuse.kernels.products.runs import products_into
from opfuse.recipes import Recipe, Support, recipe_of
from opfuse.train import Comparison, compare
from tests.kernels.catalogue import CASES

SHAPE = (256, 512)
CALLS = [pytest.param(table[name], id=name) for table, _ in record.TABLES.values() for name in table]
PAIRS = [pytest.param(table[name], peers[name], id=name) for table, peers in record.TABLES.values() for name in peers]


class OnCPU(TorchFunctionMode):
    """Tensors that are asked for on a CUDA device are made on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        return function(*args, **({**kwargs, "device": "cpu"} if kwargs.get("device") == "cuda" else kwargs))


@pytest.fixture(autouse=True)
def _on_cpu() -> Iterator[None]:
    with OnCPU():
        yield


def first(result: object) -> torch.Tensor:
    """The first tensor of nested results, codes as numbers."""
    while not isinstance(result, torch.Tensor):
        result = result[0]
    return result.view(torch.float8_e4m3fn).float() if result.element_size() == 1 else result.float()


@pytest.mark.parametrize("entry", CALLS)
def test_every_call_runs(entry: tuple[float, bandwidth.Make]) -> None:
    size, make = entry
    assert 2 <= size <= 11
    assert make(SHAPE)() is not None


@pytest.mark.parametrize(("entry", "peer"), PAIRS)
def test_a_peer_computes_what_it_is_set_against(entry: tuple[float, bandwidth.Make], peer: bandwidth.Peer) -> None:
    """But for rounding: sums in another order, powers through logarithms."""
    torch.manual_seed(1)
    ours = first(entry[1](SHAPE)())
    torch.manual_seed(1)
    theirs = first(peer.function(*peer.tensors(SHAPE)))
    assert ours.shape == theirs.shape
    close = torch.isclose(ours, theirs, rtol=2**-2, atol=2**-6, equal_nan=True)
    assert ((ours == theirs) | (ours.isnan() & theirs.isnan())).float().mean() > 0.97
    assert close.float().mean() > 0.9999


def fake_events(monkeypatch: pytest.MonkeyPatch, waits: Callable[[int], bool]) -> list[int]:
    """Events that take 1 ms, and the cycles that were slept. waits: of these, whether the device was done before the host."""
    slept: list[int] = []

    class Event:
        def __init__(self, **_: object) -> None: ...

        def record(self) -> None: ...

        def synchronize(self) -> None: ...

        def query(self) -> bool:
            return waits(slept[-1])

        def elapsed_time(self, _: Event) -> float:
            return 1.0

    for name, fake in {"Event": Event, "_sleep": slept.append, "synchronize": lambda: None}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    timing._cycles.cache_clear()
    return slept


def test_the_device_sleeps_until_the_host_has_queued_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time that the device spent waiting for the host is none of the device's."""
    slept = fake_events(monkeypatch, waits=lambda cycles: cycles < 100_000_000)
    found = timing.device_time([lambda: None], launches=4, repeats=3)
    assert found == (250.0, 250.0, 250.0)
    assert slept[-3:] == [slept[-1]] * 3
    assert slept[-1] >= 100_000_000 > slept[-4]
    fake_events(monkeypatch, waits=lambda cycles: True)
    with pytest.raises(RuntimeError, match="waits for the host"):
        timing.device_time([lambda: None], launches=4)
    assert timing.device_time([lambda: None], launches=4, waits=True).median == 250.0
    timing._cycles.cache_clear()


def test_results_take_turns_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last result of each call is alive while the next one runs."""

    fake_events(monkeypatch, waits=lambda lead: False)
    addresses: list[int] = []

    def call() -> torch.Tensor:
        made = torch.empty(1 << 20)
        addresses.append(made.data_ptr())
        return made

    timing.device_time([call] * 5, launches=20, repeats=2)
    assert all(len(set(addresses[i : i + 5])) == 5 for i in range(len(addresses) - 4))


def test_two_calls_are_compared_within_rounds_of_either_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is first in a round is faster here by half, on top of a drift that would move ratios of medians."""
    asked: list[int] = []

    def timed(calls: list[timing.Call], **_: object) -> timing.Timing:
        asked.append(which := 1 if calls[0] is one else 2)
        first, drift = len(asked) % 2, (len(asked) + 1) // 2
        return timing.Timing(*[which * drift * (0.5 if first else 1.0)] * 3)

    one, other = (lambda: None), (lambda: 1)
    monkeypatch.setattr(timing, "device_time", timed)
    found = timing.compared(one, other, rounds=4)
    assert asked == [1, 2, 2, 1] * 2
    assert found.ratio == pytest.approx((0.25 + 1.0) / 2)


def test_calls_are_timed_in_turns_and_told_by_their_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call once a round; a round in which the clocks were low does not show."""
    order: list[str] = []
    rounds = 7

    def timed(calls: Sequence[timing.Call], *, launches: int, repeats: int) -> timing.Timing:
        (call,) = calls
        call()
        slow = 100 if len(order) <= 4 else 1
        took = 1e3 * slow * (1 + "abcd".index(order[-1]))
        return timing.Timing(took, 0.0, 2 * took)

    monkeypatch.setattr(pipelines, "device_time", timed)
    calls = {name: functools.partial(order.append, name) for name in "abcd"}
    assert pipelines.in_turns(calls) == {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}
    assert "".join(order) == "abcd" * rounds


@pytest.mark.parametrize("kind", calls.MOST_WALL)
def test_what_is_measured_with_kept_weights_keeps_them(kind: str) -> None:
    """Every call finds the casts of the one before, in whatever order inference and training take turns."""
    model = ops.Sequential(ops.Linear(32, 32), ops.GELU(), ops.Linear(32, 32)).to(torch.bfloat16)
    x = torch.randn(32, 32, dtype=torch.bfloat16).requires_grad_()
    recipe = recipe_of(kind, {})
    plain = calls.host_calls(model, recipe, x)
    kept = calls.with_kept_weights(model, recipe, plain, {"infer"})
    assert set(kept) == ({"infer"} if kind == "delayed" else set(plain))
    for each in (*kept.values(), *plain.values(), *kept.values(), *kept.values()):
        each()
    for each in kept.values():
        assert isinstance(each, calls.Kept)
        served = [entry.served for entries in each.weights._entries.values() for entry in entries]
        assert served == [True, True]


@pytest.fixture(scope="module")
def trained() -> Comparison:
    """Two steps on the CPU of a configuration."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("opfuse.train.comparison.EVALUATION_SAMPLES", 64)
        return compare(load(training.CONFIGS / f"{training.NAMES[0]}.yaml"), device="cpu", steps=2)


def test_each_training_is_compared_on_the_device(trained: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Config, str]] = []

    def compared(config: Config, *, device: str) -> Comparison:
        asked.append((config, device))
        return trained

    monkeypatch.setattr(training, "compare", compared)
    assert [*training.runs()] == [trained] * len(training.NAMES)
    assert [Path(config.path).stem for config, _ in asked] == [*training.NAMES]
    assert {device for _, device in asked} == {"cuda"}


@pytest.mark.parametrize(
    ("status", "part", "met"),
    [
        ("native", 1.015, True),
        ("native", 0.985, True),
        ("native", 1.03, False),
        ("native", 0.97, False),
        ("emulated", 1.0, False),
    ],
)
def test_a_training_meets_its_limit_near_its_baseline_if_products_are_native(
    status: str, part: float, met: bool, trained: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``part``: the loss of the run as a part of that of the baseline."""
    run = replace(trained.run, losses=(4.0 * part,) * 2)
    given = replace(trained, run=run, baseline=replace(trained.run, losses=(4.0,) * 2))
    monkeypatch.setattr(training, "runs", lambda: iter((given,)))
    monkeypatch.setattr(Comparison, "backend", Support(status, "said here"))
    loss, off = training.records()
    name = f"opfuse run delayed, 2 steps, {status} products"
    assert loss == {"name": f"{name}, loss", "value": pytest.approx(4 * part), "unit": "nats", "limit": None, "met": None}
    assert off == {
        "name": f"{name}, off bfloat16",
        "value": pytest.approx(100 * abs(part - 1)),
        "unit": "%",
        "limit": training.MOST,
        "met": met,
    }


def test_limits_are_of_figures_that_there_are() -> None:
    names = {name for table, _ in record.TABLES.values() for name in table}
    assert {*record.LEAST, *record.MOST} <= names


def test_a_gather_is_covered_where_other_kernels_run() -> None:
    """Kernels that overlap, or touch, count once; those of NCCL cover nothing."""
    spans = {
        "ncclDevKernel_AllGather_a": (10, 20),
        "ncclDevKernel_AllGather_b": (100, 10),
        "ncclDevKernel_ReduceScatter": (5, 50),
    }
    spans |= {"gemm": (0, 12), "cast": (8, 6), "norm": (14, 1), "copy": (25, 100)}
    events = [{"name": name, "ts": start, "dur": took} for name, (start, took) in spans.items()]
    assert distributed.covered(events, "AllGather") == (pytest.approx(0.03), pytest.approx((5 + 5 + 10) / 30))
    assert distributed.covered(events[-4:], "AllGather") == (0.0, 0.0)


@pytest.fixture
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch, "compile", lambda model, mode=None: model)
    monkeypatch.setattr(converted, "SETTLES", 1)
    monkeypatch.setattr(converted, "wall_time", lambda call, calls: call() or 1.0)
    native = [("none", None, None), *(each for each in models.settings() if each[0] in calls.MOST_WALL)]
    monkeypatch.setattr(calls, "settings", lambda: native)


TINY = models.Sizes(128, 128, 128)


@pytest.mark.usefixtures("_no_device")
def test_what_a_user_waits_is_measured_of_every_recipe_and_has_its_limits() -> None:
    found = [*calls.host_records(1, small=128, device="cpu", calls=1)]
    found += calls.decoder_records(1, sizes=TINY, layers=1, device="cpu", graphs=False)
    assert len({(each["name"], each["unit"]) for each in found}) == len(found)
    limits = {each["unit"]: [] for each in found if each["limit"] is not None}
    for each in found:
        assert each["value"] > 0
        assert (each["limit"] is None) == (each["met"] is None)
        if each["limit"] is not None:
            limits[each["unit"]].append(each["limit"])
    assert len(limits["Python calls"]) == 6
    assert len(limits["x eager bf16"]) == 6 + 3
    page = performance.problems({"results": [{**each, "script": "host"} for each in found]}, "host")
    assert "A 128x128:" in page
    assert "Decoder of 1 layers 128x128:" in page
    assert "fp8_block weights kept" in page


@pytest.mark.usefixtures("_no_device")
def test_what_it_costs_to_be_asked_is_set_beside_what_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "KINDS", ("fp8_current",))
    found = [*overhead.step_records(TINY, rounds=1, every=1, device="cpu")]
    (limited,) = [each for each in found if each["limit"] is not None]
    assert (limited["name"].rpartition(", ")[2], limited["limit"], limited["unit"]) == (overhead.WATCHED, 1.0, "% more")
    found += overhead.host_records(TINY, rounds=1, calls=1, device="cpu")
    assert len({(each["name"], each["unit"]) for each in found}) == len(found)
    page = performance.overhead({"results": [{**each, "script": "overhead"} for each in found]})
    for name in overhead.SETTINGS:
        assert f"| {name} |" in page
    drift = {overhead.OFF: [10.0, 20.0], overhead.WATCHED: [10.1, 20.2]}
    assert overhead.added(drift, overhead.WATCHED) == pytest.approx(1.0)


@pytest.mark.usefixtures("_no_device")
@pytest.mark.filterwarnings("ignore")
def test_a_converted_model_is_measured_as_called_and_as_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And stands in the README once it is recorded."""
    pytest.importorskip("transformers", reason="of the extra `test`")
    assert converted.label_of(converted.LLAMA) == tables.LLAMA
    stack = converted.Stack(1, models.Sizes(32, 64, 64), 2, 1)
    found = [*converted.records(1, stack=stack, device="cpu")]
    others = [each for each in json.loads(tables.RECORD.read_text())["results"] if each["script"] != "converted"]
    (file := tmp_path / "record.json").write_text(json.dumps({"results": [*others, *found]}))
    monkeypatch.setattr(tables, "RECORD", file)
    assert tables.OF_LLAMA not in tables.speed()
    monkeypatch.setattr(tables, "LLAMA", converted.label_of(stack))
    assert tables.speed().count("`fuse_` with") == 2 * len(converted.KINDS)
    page = performance.problems({"results": [{**each, "script": "converted"} for each in found]}, "converted")
    assert {each["name"].split(", ")[2] for each in found if each["limit"]} == converted.LEAST.keys()
    assert "| torch.compile bf16 |" in page
    assert "Llama of 1 layers 32x64:" in page
    assert all(f"| {kind} {how} |" in page for kind in converted.KINDS for how in ("called", "compiled"))


def test_a_case_of_steps_says_what_its_recipe_keeps() -> None:
    case = steps.Case(steps.ONE, "delayed", keep="recompute")
    assert case.settings.keep == "recompute"
    assert "delayed keep=recompute + adamw" in str(case)
    assert "keep" not in str(steps.BASES[steps.ONE])


def test_whole_steps_are_compared_with_bf16_before_and_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    one, eight = (steps.Case(size, "fp8_current") for size in (steps.ONE, steps.EIGHT))
    ran: list[steps.Case] = []
    seconds = iter((3.0, 2.0, 5.0, 7.0, 4.0, 9.0))

    def measured(case: steps.Case, rounds: int, device: str) -> tuple[float, int]:
        ran.append(case)
        return next(seconds), 100

    monkeypatch.setattr(steps, "measured", measured)
    found = {(each["name"], each["unit"]): each["value"] for each in steps.records(cases=(one, eight), device="cpu")}
    bases = [steps.BASES[case.size] for case in (one, eight)]
    assert ran == [bases[0], one, bases[0], bases[1], eight, bases[1]]
    speeds = [found[f"{case}, step", "x torch.compile bf16"] for case in (one, eight)]
    assert speeds == [4.0 / 2.0, 8.0 / 4.0]
    assert [found[f"{base}, step", "ms"] for base in bases] == [4000.0, 8000.0]


def test_a_whole_step_is_compared_with_one_in_bf16_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("transformers", "torchao"):
        pytest.importorskip(library, reason="of the extra `test`")
    monkeypatch.setattr(steps, "WORDS", 512)
    sizes = {"layers": 1, "hidden": 64, "inner": 64, "heads": 2, "groups": 1, "vocabulary": steps.WORDS, "compile": False}
    few = {"sequence": 16, "micro": 2, "step_tokens": 32, "validation_tokens": 32, "tokens": 512}
    monkeypatch.setattr(steps, "SIZES", {name: replace(each, **sizes, **few) for name, each in steps.SIZES.items()})
    cases = (steps.BASES[steps.ONE], steps.Case(steps.ONE, "fp8_current", "adamw8bit", "fused"))
    with torch.compiler.set_stance("force_eager"):
        assert all(steps.measured(case, 1, "cpu")[0] > 0 for case in cases)
    found = [each for case, took in zip(cases, ((3.0, 100), (2.0, 64))) for each in steps.compared(case, *took, (3.0, 100))]
    limits = [(each["value"], each["limit"], each["met"]) for each in found if each["limit"] is not None]
    assert limits == [(1.5, 1.3, True), (64.0, 65, True)]
    page = performance.problems({"results": [{**each, "script": "steps"} for each in found]}, "steps")
    assert "| bf16 + adamw + compiled loss |" in page
    assert "64 (65) % of torch.compile" in page


@pytest.mark.usefixtures("_no_device")
@pytest.mark.filterwarnings("ignore")
def test_small_layers_stand_beside_bf16_run_in_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="of the extra `test`")
    stack, ways = converted.Stack(1, models.Sizes(16, 64, 64), 2, 1), []
    monkeypatch.setattr(small, "compiled", lambda model, mode=None: ways.append(mode))
    found = [*small.records(1, stack=stack, device="cpu")]
    runs = [(each["name"].split(", ")[2], each["unit"]) for each in found if each["limit"] is not None]
    hows = (small.CALLED, small.COMPILED)
    assert runs == [(f"{kind} {how}", f"x bf16 {how}") for how in hows for kind in small.KINDS]
    assert ways == [None] * 3
    small.passes_of("fp8_block", small.REDUCED, stack, "cpu")
    assert ways[3:] == [small.REDUCED]
    took = {("bf16", "both"): [3.0], ("fp8_block", "both"): [4.0]}
    last = [*small.compared(small.AS_GRAPH, stack, took)][-1]
    assert (last["value"], last["limit"], last["met"]) == (0.75, 0.95, False)
    page = performance.problems({"results": [{**each, "script": "small"} for each in found]}, "small")
    assert "| fp8_block compiled |" in page


@pytest.mark.usefixtures("_no_device")
@pytest.mark.filterwarnings("ignore")
def test_libraries_are_compared_by_the_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="of the extra `test`")
    monkeypatch.setattr(libraries, "LEADS", 32)
    monkeypatch.setattr(libraries, "LEAST", {name: {32: 1.0} for name in libraries.LEAST})
    stack = converted.Stack(1, models.Sizes(16, 64, 64), 2, 1)
    found = [*libraries.records(1, stack=stack, tokens=(16, 32), device="cpu")]
    assert {each["name"].split(", ")[1] for each in found} == {"Llama of 1 layers 16x64", "Llama of 1 layers 32x64"}
    called = {name for name in libraries.LEAST if not name.endswith(libraries.AS_GRAPH)}
    assert {each["name"].split(", ")[2] for each in found if each["limit"]} == called
    took = {
        (name, "step"): [float(ms)] for name, ms in ((libraries.COMPILED, 3), (libraries.TORCHAO, 2), ("fp8_current packed", 1))
    }
    limits = {(each["unit"], each["value"]): each["limit"] for each in libraries.compared(32, stack, took) if each["limit"]}
    assert limits == {(f"x {libraries.COMPILED}", 3.0): 1.0, (f"x {libraries.TORCHAO}", 2.0): 1.0}
    graphs = {f"{libraries.COMPILED} {libraries.AS_GRAPH}": 2.0, f"fp8_current packed {libraries.AS_GRAPH}": 1.0}
    took |= {(name, "step"): [ms] for name, ms in graphs.items()}
    ratios = [(each["name"].split(", ")[2], each["unit"]) for each in libraries.compared(32, stack, took) if each["unit"] != "ms"]
    beside = [name for name, unit in ratios if unit.endswith(libraries.AS_GRAPH)]
    assert beside == [f"fp8_current packed {libraries.AS_GRAPH}"]  # a graph beside a graph, and no call beside one
    page = performance.problems({"results": [{**each, "script": "libraries"} for each in found]}, "libraries")
    assert "| fp8_current packed |" in page


def test_a_decoder_of_ops_computes_what_that_of_torch_does() -> None:
    torch.manual_seed(0)
    eager, fused = (models.decoder(TINY, 1, fused=mine) for mine in (False, True))
    fused.load_state_dict(eager.state_dict())
    x = torch.randn(TINY.tokens, TINY.hidden)
    torch.testing.assert_close(fused(x), eager(x))


def test_the_own_product_is_set_beside_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "SIZES", ((128, 128, 16),))
    monkeypatch.setattr(products, "GROUPS", ((2, 16),))
    monkeypatch.setattr(products, "FEATURES", (128, 16))
    monkeypatch.setattr(products, "EXPERTS", 3)
    monkeypatch.setattr(products, "graph_of", lambda call: [call, call()][0])
    monkeypatch.setattr(products, "compared", lambda *_: timing.Compared(2.0, 1.0, 2.0))
    took = itertools.cycle((1.0, 2.0))  # of the own product, of the library's
    monkeypatch.setattr(products, "STATES", {state: lambda call: next(took) for state in products.STATES})
    found = [*products.records("cpu")]
    limited = {(each["unit"], each["value"]) for each in found if each["limit"]}
    assert {value for unit, value in limited if unit != "TFLOP/s"} == {2.0}
    assert {unit for unit, _ in limited} >= {"x cuBLASLt", "x cuBLASLt cool", "x cuBLASLt alone", "TFLOP/s"}
    forward = 1  # a weight's gradient stands beside a forward product as well
    experts = 2 * len(products.OF_EXPERTS) * len(products.ROWS)
    assert len(found) == 2 * 2 * len(products.KINDS) + forward + experts + 2 * 2 * len(products.STATED)
    assert len({(each["name"], each["unit"]) for each in found}) == len(found)


@pytest.mark.parametrize("each", [16, 64, 192])
def test_deepgemm_gets_the_operands_of_the_own_product(monkeypatch: pytest.MonkeyPatch, each: int) -> None:
    """In its layouts, of a product and of experts; both multiply by their definitions here. It stores whole tiles of experts."""
    kind, experts, length, columns = products.KINDS[products.FORWARD], 3, 512, 128

    def multiplied(left: Any, right: Any, out: torch.Tensor, *masks: Any, c: Any = None, recipe: Any = (1, 128, 128)) -> None:
        (a, of_a), (b, of_b) = left, right
        assert not masks or a.shape[1] % products.PEER_TILE == 0
        of_b = of_b.repeat_interleave(recipe[1], -2)
        rows, columns = (x.float() * of_x.repeat_interleave(128, -1) for x, of_x in ((a, of_a), (b, of_b)))
        out.copy_(rows @ columns.transpose(-1, -2) + (0 if c is None else c))

    library = SimpleNamespace(fp8_gemm_nt=multiplied, m_grouped_fp8_gemm_nt_masked=multiplied)
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    left = products.operand(kind.left, experts * each, length, "cpu")
    rights = [products.operand(kind.right, columns, length, "cpu") for _ in range(experts)]
    rows, sizes = experts * each, torch.full((experts,), each)
    groups = products.RowGroups(products.row_groups(sizes, rows), rows, experts)
    call = products.peer_of_experts(left, rights)
    call()
    own = products.product_of_rows(left, rights, groups, out_dtype=torch.bfloat16)
    torch.testing.assert_close(call.args[2][:, :each].flatten(0, 1), own)
    one = products.peer_of(left, rights[0])
    one()
    torch.testing.assert_close(one.args[2][:each], own[:each])
    right = products.operand(products.KINDS[products.WEIGHT_GRADIENT].right, columns, length, "cpu")
    added = products.peer_of(left, right)
    for _ in range(2):
        added()
    out = torch.zeros(rows, columns)
    for _ in range(2):
        products.grouped_product([left], [right], [rows], out_dtype=torch.float32, out=out, accumulate=True)
    torch.testing.assert_close(added.args[2], out, rtol=0, atol=1e-5 * float(out.abs().max()))


def test_what_stands_beside_deepgemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward products, and those of a weight's gradient, which both add to it."""
    monkeypatch.setattr(products, "SIZES", ((128, 512, 128),))
    monkeypatch.setattr(products, "has_peer", lambda: True)
    monkeypatch.setattr(products, "peer_of", lambda left, right: lambda: None)
    monkeypatch.setattr(products, "alone", lambda call: [call(), 1.0][1])
    monkeypatch.setattr(products, "compared", lambda *calls: [[call() for call in calls], timing.Compared(2.0, 1.0, 2.0)][1])
    found = [(row["kind"], row["state"]) for row in products.beside_peer("cpu")]
    kinds = products.FORWARD, f"{products.WEIGHT_GRADIENT}, added to fp32"
    assert found == [(kind, state) for kind in kinds for state in ("", " alone")]


def test_one_launch_is_set_beside_several_in_turns_cool_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chained, "SIZES", ((256, 2048, 128),))
    monkeypatch.setattr(chained, "CHAINS", {chained.LIMITED: chained.CHAINS[chained.LIMITED]})
    monkeypatch.setattr(chained, "compared", lambda *_: timing.Compared(3.0, 2.0, 1.5))
    took = itertools.cycle((2.0, 4.0))  # of one launch, of the others
    monkeypatch.setattr(chained, "STATES", {state: lambda call: next(took) for state in products.STATES})
    found = {each["unit"]: (each["value"], each["limit"]) for each in chained.records("cpu")}
    least = chained.LEAST[2048]
    assert found == {
        **{"us": (2.0, None), "us cool": (2.0, None), "us alone": (2.0, None)},
        **{"x apart": (1.5, least), "x apart cool": (2.0, least), "x apart alone": (2.0, least)},
    }


def test_choices_are_measured_on_both_sides_of_each_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device, where nothing is computed: operands are large."""
    monkeypatch.setattr(choices, "row_groups", lambda splits, rows: splits)
    monkeypatch.setattr(choices, "compared", lambda *_, **__: timing.Compared(2.0, 1.0, 2.0))
    found = {each["name"]: each["limit"] for each in choices.records("meta")}
    assert len(found) == 36
    alone = {name for name in found if "groups of" in name}
    threshold = {name: re.sub(r"\d+", "n", name) for name in found if name not in alone}
    for kind in set(threshold.values()):
        limits = [found[name] for name, of in threshold.items() if of == kind]
        assert sorted(limits, key=str) == [choices.LEAST, None]
    page = performance.choices({"results": [{**each, "script": "choices"} for each in choices.records("meta")]})
    assert ("product, per tensor, fast: 112 tiles", "2.00 (0.97)") in page


def test_gradients_of_groups_are_added_in_the_launch_or_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "SPLIT", (2, 128))
    monkeypatch.setattr(choices, "FEATURES", (256, 128))
    given: list[dict[int, torch.Tensor]] = []

    def kept(*arguments: Any) -> None:
        given.append(arguments[-1])
        products_into(*arguments)

    monkeypatch.setattr(choices, "products_into", kept)
    for name in ("per tensor, split", "1x128 by 1x128"):
        choice = choices._groups(name, products.KINDS[name], "cpu")
        choice.own()
        totals = given[-1].values()
        once = [total.clone() for total in totals]
        choice.other()
        assert all(one.any() and torch.equal(total, 2 * one) for total, one in zip(totals, once))


@pytest.mark.usefixtures("_no_device")
def test_experts_are_measured_as_a_user_waits_for_them() -> None:
    found = [*grouped.used([grouped.Used(grouped.Problem(256, 2, 128, 128), 1.0, beside=grouped.GROUPED)], device="cpu")]
    assert {each["unit"] for each in found} == {"ms", *grouped.SPEEDS.values()}
    assert all(each["name"].startswith("2 x 128, 128 to 128 rows, ") for each in found)
    assert all(each["unit"] == "x bf16 grouped" for each in found if each["limit"] is not None)


def test_mixtures_are_measured_with_what_they_fuse_and_without() -> None:
    ran: list[Any] = []

    def timed(call: timing.Call) -> float:
        ran.append(call())
        return 3.0

    def turns(one: timing.Call, other: timing.Call) -> timing.Compared:
        ran.append((one(), other()))
        return timing.Compared(2.0, 1.0, 2.0)

    found = [*grouped.mixtures(timed, turns, problems=[grouped.Mixture(64, 128, 4, 2, 128)], device="cpu")]
    first = len(grouped.READ) + len(grouped.CHAINED) * len(grouped.BETWEEN)
    casts, (_, *steps) = ran[:first], ran[first:]
    for apart, together in casts:
        assert all(map(torch.equal, apart.tensors(), together.tensors()))
    for name in grouped.READ:
        one, *others = (steps.pop(0) for _ in range(3 if name in grouped.CHAINED else 2))
        assert name == "delayed" or all(all(map(torch.equal, one, other)) for other in others)  # the next step has other scales
    units = {each["unit"] for each in found}
    assert units == {"ms", "x bf16 grouped", "x apart", "x two launches"} <= {"ms", *performance.SPEEDS}
    page = "".join(performance.groups({"results": [{**each, "script": "grouped"} for each in found]}))
    assert all(f"| {name}, rows read | 0.00 (2.00) |" in page for name in grouped.READ)
    assert all(f"| {name}, {grouped.ONE} | 0.00 (2.00) |" in page for name in grouped.CHAINED)
    assert "| 64 tokens of 128 to 2 of 4 |" in page


def test_sanitizers_share_the_cases_of_a_kernel() -> None:
    """Each case goes to one process; those of the same variants follow each other."""
    (kernel, cases) = next((kernel, cases) for kernel, cases in CASES.items() if kernel.name == "cast_row")
    dealt = sanitizer.shares("memcheck", ["cast_row"], 4)
    assert sorted(itertools.chain(*dealt)) == sorted(("cast_row", name) for name in cases)
    of_case = {name: variant for (variant, _), names in kernel.launches(cases).items() for name in names}
    loaded = [len({of_case.get(name) for _, name in share}) for share in dealt]  # None: nothing to launch
    singly = [len({of_case.get(name) for name in list(cases)[i::4]}) for i in range(4)]
    assert max(loaded) < min(singly)
    with pytest.raises(UnsupportedError, match=r"got cast_rows\. Cure: name some of amaxes_nv"):
        sanitizer.shares("memcheck", ["cast_rows"])


def test_a_trace_is_told_kernel_by_kernel() -> None:
    """By names without their types, each with its launches; what takes next to nothing is one row; then the page's table."""
    spans = [("cast_row", 0, 10), ("void at::native::(anonymous namespace)::add<4, int>(int)", 15, 5), ("cast_row", 20, 20)]
    spans += [("product", 45, 1000), ("fill<1>", 1045, 1), ("copy", 1046, 2)]
    events = [{"name": name, "ts": start, "dur": took} for name, start, took in spans]
    found = [{**each, "script": "profiles"} for each in profiles.figures("B, training, delayed", events)]
    page = performance.traces({"results": found})
    rows = [line for line in page.splitlines() if line.startswith("| ")][2:]
    assert rows == [
        "| product | 1.00 (1) |",
        "| cast_row | 0.03 (2) |",
        "| others | 0.01 (3) |",
        "| all kernels | 1.04 (6) |",
        "| from the first to the last | 1.05 |",
    ]


@pytest.mark.slow
def test_first_steps_are_measured_in_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own step is none of the steps that follow, of which the first has a limit."""
    monkeypatch.setattr(compiling, "PROCESSES", 1)
    found = [*compiling.first_steps("cpu", 32, ["fp8_block"])]
    empty, on_disk = compiling.MOST_FIRST.values()
    assert [each["limit"] for each in found] == [None, empty, None, None, None, on_disk, None, None]
    assert [each["name"].split(" training step, ")[0] for each in found[:4]] == ["plain torch's", "first", "second", "third"]
    assert all(each["value"] > 0 for each in found)


@pytest.mark.slow
def test_a_process_that_dies_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "PROCESSES", 1)
    monkeypatch.setattr(compiling, "STEPS", "import sys; sys.exit(3)")
    with pytest.raises(RuntimeError, match="ended with 3"):
        next(compiling.first_steps("cpu", 32, ["fp8_block"]))


def test_no_process_of_another_recipe_waits_beside_those_that_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "STEPS", "print('ready', flush=True); input(); print([1.0, 2.0, 3.0, 4.0])")
    begin, begun = compiling._begun, []

    def noted(directory, script, kind, *arguments):
        assert all(process.poll() == 0 for other, process in begun if other != kind)
        begun.append((kind, begin(directory, script, kind, *arguments)))
        return begun[-1][1]

    monkeypatch.setattr(compiling, "_begun", noted)
    found = [*compiling.first_steps("cpu", 32, ["delayed", "mxfp8"])]
    assert [kind for kind, _ in begun] == ["delayed"] * 6 + ["mxfp8"] * 6
    assert [each["value"] for each in found] == [1, 2, 3, 4] * 4


def test_what_pytorch_offers_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph for all recipes, without a break; a step in every way."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(pytorch, "ROUNDS", 1)
    monkeypatch.setattr(pytorch, "wall_time", lambda call: call() or 1.0)
    monkeypatch.setattr(pytorch, "RECIPES", {kind: pytorch.RECIPES[kind] for kind in ("delayed", "fp8_current")})
    monkeypatch.setattr(pytorch, "traced", lambda step: step() or COPIES)
    monkeypatch.setattr(opfuse, "graphed", lambda model, args, recipe: in_region(model, recipe))
    found = [*pytorch.graph_records(TINY, TINY, 1, "cpu"), *pytorch.compile_records(TINY, 1, "cpu")]
    found += pytorch.offload_records(TINY, 1, "cpu")
    assert len({(each["name"], each["unit"]) for each in found}) == len(found)
    counted = {each["unit"]: each for each in found}
    assert counted["graph breaks"]["met"]
    assert counted["recompilations"]["met"]
    assert counted["% of copies beside kernels"]["value"] == pytest.approx(75)
    assert counted["MiB a step"]["value"] == 3
    page = performance.inside({"results": [{**each, "script": "pytorch"} for each in found]})
    assert "0 (0) graph breaks" in page


COPIES = [
    {"cat": "kernel", "name": "gemm", "ts": 0, "dur": 10, "args": {}},
    {"cat": "kernel", "name": "cast", "ts": 8, "dur": 7, "args": {}},
    *({"cat": "gpu_memcpy", "name": f"Memcpy {way}", "ts": 0, "dur": 20, "args": {"bytes": 3 << 20}} for way in ("DtoH", "HtoD")),
]


def in_region(model: torch.nn.Module, recipe: Recipe) -> Callable[[torch.Tensor], torch.Tensor]:
    def call(x: torch.Tensor) -> torch.Tensor:
        with opfuse.autocast(recipe=recipe):
            result: torch.Tensor = model(x)
        return result

    return call


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("combine_rows", "moved rows"),
        ("product", "products"),
        ("nvjet_sm90_tst_128x256", "products"),
        ("cast_block_groups", "casts"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("triton_poi_fused_mul_0", "compiled by torch"),
        ("vectorized_elementwise_kernel", mixtures.REST),
    ],
)
def test_a_kernel_of_a_mixture_belongs_to_a_part(kernel: str, part: str) -> None:
    assert mixtures.part_of(kernel) == part


@pytest.mark.parametrize(("tokens", "shape"), [(32, (1, 32)), (4096, (1, 4096)), (16384, (4, 4096))])
def test_many_tokens_are_several_sequences(tokens: int, shape: tuple[int, int]) -> None:
    assert converted.batch(tokens) == shape


def test_a_step_has_whole_sequences() -> None:
    with pytest.raises(ValueError, match="got 6144 tokens"):
        converted.batch(6144)


@pytest.mark.parametrize("kind", ["", "fp8_block"])
def test_a_mixture_of_small_sizes_runs_both_passes(kind: str) -> None:
    pytest.importorskip("transformers", reason="of the extra `test`")
    qwen = mixtures.MIXTURES[0]
    small = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = mixtures.model_of(qwen._replace(fields={**qwen.fields, **small, **heads}), 32, kind, "cpu", layers=1)
    mixtures.passes_of(model, 32, 64, "cpu")()
    assert all(p.grad is not None for name, p in model.named_parameters() if "embed" not in name)


def test_adapters_learn_the_same_in_checkpoints():
    """Of the layers whose steps are timed; compiled ones are wrapped, and keep their names in the state dict."""
    pytest.importorskip("peft")
    stack = adapters.LLAMA._replace(layers=1, sizes=models.Sizes(16, 128, 256), heads=2, groups=1)
    found = []
    for how in ("called", "in checkpoints"):
        torch.manual_seed(0)
        model = adapters.made(adapters.OURS, how, stack, "cpu")
        torch.manual_seed(1)
        adapters.calls_of(model, stack, "cpu")[adapters.STEP]()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(grad, found[1][name]) for name, grad in found[0].items())
    assert any(grad.any() for grad in found[0].values())
    wrapped = adapters.made(adapters.OURS, "compiled in checkpoints", stack, "cpu")
    assert [*wrapped.state_dict()] == [*model.state_dict()]
    assert all(hasattr(layer, "_checkpoint_wrapped_module") for layer in wrapped.base_model.model.layers)


def test_rollout_compares_a_model_with_an_invariant_one():
    found = [*rollout.records(shape=rollout.SMALL, device="cpu")]
    ratios = {each["name"].rpartition(", ")[2]: each for each in found if each["unit"] == "x not invariant"}
    assert [*ratios] == ["rollout of 2 tokens", "training", "both"]
    assert [each["limit"] for each in ratios.values()] == [None, None, rollout.MOST]
    assert all(each["value"] > 0 for each in found)
