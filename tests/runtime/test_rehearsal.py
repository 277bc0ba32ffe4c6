"""Kernels that a first call must compile are found by a rehearsal, which leaves no trace, and compiled together."""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections.abc import Iterator

import pytest
import torch

import opfuse
from opfuse import ops, recipes
from opfuse.kernels.casts.delayed import updating
from opfuse.kernels.engine import ahead, compiling, cubins
from opfuse.kernels.engine import launch as launching
from opfuse.kernels.engine.compiling import Variant
from opfuse.kernels.engine.joining import joined_variant
from opfuse.kernels.engine.launch import dry_run
from opfuse.kernels.engine.registry import Kernel
from opfuse.numerics import scalars
from opfuse.tensors.quantizers import Float8CurrentScalingQuantizer
from tests.compiler.harness import delayed_state, gradient, randn, recipe_for, to
from tests.processes import ran

pytestmark = pytest.mark.cpu
BF16 = torch.bfloat16


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Variant]]:
    """What the rehearsals find of a device that is the CPU, whose kernels must all be compiled."""
    noted: list[Variant] = []

    def call(self, *args, **kwargs):
        local = launching._parameters
        if local.dry:
            self.run(launching.launch, *args, **kwargs)
        elif (coming := local.coming) is not None:
            local.coming = None
            noted.extend(coming())
        return self.reference(*args, **kwargs)

    monkeypatch.setattr(Kernel, "__call__", call)
    monkeypatch.setattr(scalars, "LOOKED_UP", ())
    return noted


def model_of() -> ops.Sequential:
    torch.manual_seed(0)
    return to(ops.Sequential(ops.RMSNorm(64), ops.Linear(64, 256), ops.SwiGLU(), ops.Dropout(0.5), ops.Linear(128, 64)), BF16)


def steps(model, recipe, *, train: bool = True) -> list[torch.Tensor]:
    seen = []
    torch.manual_seed(1)
    for call in range(2):
        x = randn(32, 64, seed=call).requires_grad_(train)
        with torch.set_grad_enabled(train), opfuse.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x)
        seen.append(y.detach())
        if train:
            y.backward(gradient(y, call))
            seen.append(x.grad)
    return [*seen, *(p.grad for p in model.parameters() if p.grad is not None), *delayed_state(model).values()]


@pytest.mark.parametrize("name", ["none", "delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4"])
def test_a_rehearsal_finds_the_kernels_of_both_passes_and_leaves_no_trace(name, found):
    recipe, model = recipe_for(name), model_of()
    other = copy.deepcopy(model)
    with opfuse.interpreted():
        wanted = steps(other, recipe)
        forward = len(found)
    assert forward == 0  # a debugger's run is what it seems
    got = steps(model, recipe)
    assert all(map(torch.equal, got, wanted))
    both = len(found)
    steps(model, recipe, train=False)
    assert 0 < len(found) - both < both  # inference has its own rehearsal, of a forward pass alone
    assert len({variant.source for variant in found}) > 1
    assert (updating() in found) == (name == "delayed")


@pytest.fixture
def unlike_zeros() -> Iterator[None]:
    """Memory that nothing has written yet holds NaNs."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_what_reads_values_ends_a_rehearsal(found, caplog):
    model = to(ops.Sequential(ops.TokenDispatch(2, 64)), BF16)
    x = randn(32, 64)
    with torch.no_grad(), opfuse.interpreted():
        wanted, *_ = model(x)
    with torch.no_grad(), caplog.at_level(logging.DEBUG, "opfuse.programs"):
        got, *_ = model(x)
    assert torch.equal(got, wanted)
    if found:
        assert "rehearsed in part" in caplog.text


def test_what_writes_to_an_input_is_left_out(found, unlike_zeros):
    model = to(ops.Sequential(ops.GELU(), ops.Linear(64, 64, bias=False), ops.AddExtraInput(in_place=True), ops.GELU()), BF16)
    x, extra = randn(32, 64), randn(32, 64, seed=1)
    before = extra.clone()
    with torch.no_grad(), opfuse.interpreted():
        wanted = model(x, before)
    assert not found
    with torch.no_grad():
        assert torch.equal(model(x, extra), wanted)
    assert torch.equal(extra, before)
    assert found


LAYERS = {
    "linear": lambda: ops.Linear(64, 48, bias=False, accumulate_into_main_grad=True),
    "experts": lambda: ops.GroupedLinear(3, 64, 48, bias=False, accumulate_into_main_grad=True),
    "experts, one weight": lambda: ops.GroupedLinear(
        3, 64, 48, bias=False, accumulate_into_main_grad=True, single_grouped_weight=True
    ),
}


@pytest.mark.few
@pytest.mark.parametrize("overwrites", [False, True])
@pytest.mark.parametrize("name", ["none", "delayed", "fp8_current", "fp8_block"])
@pytest.mark.parametrize("layer", LAYERS)
def test_gradients_of_weights_are_added_once_and_not_from_memory_of_a_rehearsal(layer, name, overwrites, found, unlike_zeros):
    """Those of the first step, too: a buffer ``main_grad`` is no input of the segment that writes it."""
    torch.manual_seed(0)
    extras = [torch.tensor([16, 0, 32])] if "experts" in layer else []
    model = to(ops.Sequential(ops.RMSNorm(64), LAYERS[layer]()), BF16)
    for weight in model[1].parameters():
        weight.main_grad, weight.overwrite_main_grad = torch.full(weight.shape, 0.5), overwrites
    runs = []
    for interpreted in (True, False):
        own = copy.deepcopy(model)
        for weight, first in zip(own[1].parameters(), model[1].parameters(), strict=True):
            weight.main_grad, weight.overwrite_main_grad = first.main_grad.clone(), overwrites
        recipe = recipe_for(name)
        with opfuse.interpreted() if interpreted else contextlib.nullcontext():
            for call in range(2):
                with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
                    y = own(randn(48, 64, seed=call).requires_grad_(), *extras)
                y.backward(gradient(y, call))
        assert bool(found) != interpreted
        runs.append([weight.main_grad for weight in own[1].parameters()])
    for got, wanted in zip(*reversed(runs), strict=True):
        assert torch.isfinite(wanted).all()
        assert torch.equal(got, wanted)


class Counted(Float8CurrentScalingQuantizer):
    """Of the user's own."""

    calls = 0

    def quantize(self, x, **options):
        type(self).calls += 1
        return super().quantize(x, **options)


@pytest.mark.parametrize("own", ["input", "weight", "grad_output"])
def test_a_rehearsal_runs_no_code_of_the_users_own(own, found):
    def factory(role):
        return (Counted if role.tensor_type == own else Float8CurrentScalingQuantizer)(torch.float8_e4m3fn)

    model = to(ops.Sequential(ops.Linear(64, 64), ops.GELU(), ops.Linear(64, 64)), BF16)
    called = []
    for call in range(3):
        Counted.calls = 0
        with opfuse.autocast(recipe=recipes.CustomRecipe(qfactory=factory)):
            y = model(randn(32, 64, seed=call).requires_grad_())
        y.backward(gradient(y, call))
        called.append(Counted.calls)
    assert called == [2, 2, 2]
    assert found


def test_a_dry_run_launches_nothing_and_its_blocks_end():
    with dry_run() as outer:
        launching.launch(Variant("a.cu"), "a", launching.Grid(1, 1), None, device=0)
        with dry_run() as inner:
            launching.launch(Variant("b.cu"), "b", launching.Grid(1, 1), None, device=0)
    assert (outer, inner) == ([Variant("a.cu")], [Variant("b.cu")])
    assert not launching._parameters.dry


@pytest.fixture
def cache(tmp_path) -> cubins.CubinCache:
    (tmp_path / "kernels").mkdir(mode=0o700)
    return cubins.CubinCache(tmp_path / "kernels")


def test_variants_are_compiled_in_threads_each_once_and_one_that_fails_is_left(tmp_path, monkeypatch, cache):
    (tmp_path / "good.cu").write_text('extern "C" __global__ void good(float* x) { x[0] = N; }')
    (tmp_path / "bad.cu").write_text("nonsense")
    monkeypatch.setattr(compiling, "SOURCES", tmp_path)
    compiling.assemble.cache_clear()
    good, bad = [Variant("good.cu", (f"N={i}",)) for i in range(3)], Variant("bad.cu")
    compile_text, threads = compiling.compile_text, []

    def noted(*args):
        threads.append(threading.current_thread())
        return compile_text(*args)

    monkeypatch.setattr(compiling, "compile_text", noted)
    compiling.cubin(good[0], "sm_90a", cache)
    ahead.compile_together([*good, bad, good[1]], "sm_90a", cache)
    for variant in (*good, bad):
        ahead.wait_for(variant, "sm_90a", cache)
    assert all(compiling.is_compiled(variant, "sm_90a", cache) for variant in good)
    assert not compiling.is_compiled(bad, "sm_90a", cache)
    assert len(threads) == 4
    assert threading.main_thread() not in threads[1:]
    ahead.compile_together(good, "sm_90a", cache)
    assert len(threads) == 4
    compiling.assemble.cache_clear()


def test_the_first_variant_is_being_compiled_while_others_are_looked_for(monkeypatch, cache):
    begun, looked_for = threading.Event(), []

    def coming() -> Iterator[Variant]:
        yield Variant("first.cu")
        looked_for.append(begun.wait())

    monkeypatch.setattr(ahead, "is_compiled", lambda *_: False)
    monkeypatch.setattr(ahead, "cubin", lambda *_: begun.set())
    ahead.compile_together(coming(), "sm_90a", cache)
    assert looked_for == [True]


def test_who_needs_a_kernel_waits_for_no_other(monkeypatch, cache):
    """The caller goes on while others are compiled, and is told of one that fails when it compiles that itself."""
    slow, may_end = Variant("slow.cu"), threading.Event()
    monkeypatch.setattr(ahead, "is_compiled", lambda *_: False)
    monkeypatch.setattr(ahead, "cubin", lambda variant, *_: variant != slow or may_end.wait())
    ahead.compile_together([Variant("quick.cu"), slow], "sm_90a", cache)
    ahead.wait_for(Variant("quick.cu"), "sm_90a", cache)
    assert [variant for variant, *_ in ahead._coming] == [slow]
    threading.Timer(0.05, may_end.set).start()
    ahead.wait_for(slow, "sm_90a", cache)
    assert may_end.is_set()
    ahead.wait_for(Variant("nobody's.cu"), "sm_90a", cache)


def test_what_takes_longest_is_compiled_first_and_what_joins_launches_last():
    """One text is compiled longer than others of its length."""
    short, long, longest, slow = map(Variant, ("norm_sums.cu", "amax.cu", "product.cu", "dequantize.cu"))
    joined = joined_variant(Variant("cast_mx.cu", ("PARAMETER_BYTES=64",)))
    assert len(compiling.assemble(slow)) < len(compiling.assemble(longest))
    assert ahead.in_turn([joined, long, short, longest, slow]) == [slow, longest, long, short, joined]


FORK = """
import os, sys, threading
from pathlib import Path
from opfuse.kernels.engine import ahead, cubins
from opfuse.kernels.engine.compiling import Variant
begun, may_end = threading.Event(), threading.Event()
ahead.is_compiled, ahead.cubin = lambda *_: False, lambda *_: begun.set() or may_end.wait()
slow = Variant("slow.cu"), "sm_90a", cubins.CubinCache(Path(sys.argv[1]))
ahead.compile_together(slow[:1], *slow[1:])
begun.wait()
if (child := os.fork()) == 0:
    ahead.wait_for(*slow)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(ahead._coming))
threading.Timer(0.05, may_end.set).start()
"""


def test_a_child_waits_for_no_thread_of_its_parent_and_an_interpreter_ends(tmp_path):
    done = ran(FORK, tmp_path)
    assert done.stdout == "7 1\n"


def test_the_first_kernel_that_is_not_compiled_asks_for_the_others(monkeypatch):
    told: list[list[Variant]] = []
    compiled = {Variant("known.cu")}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for name, value in {
        "architecture": lambda device: "sm_90a",
        "is_compiled": lambda variant, *_: variant in compiled,
        "in_turn": list,
        "compile_together": lambda variants, *_: told.append(list(variants)),
        "cubin_path": lambda *_: (_ for _ in ()).throw(RuntimeError("no device")),
    }.items():
        monkeypatch.setattr(launching, name, value)
    with launching.compiled_ahead(lambda: [Variant("next.cu")]):
        for source in ("known.cu", "new.cu", "other.cu"):
            with pytest.raises(RuntimeError, match="no device"):
                launching.load(Variant(source), "entry", 0)
    assert told == [[Variant("new.cu"), Variant("next.cu")]]
