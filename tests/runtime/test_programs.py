"""Segments that are recorded once and repeated: the bits of the interpreter, whatever changes between two calls."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import re
import threading
import tracemalloc
from types import SimpleNamespace
from weakref import WeakValueDictionary

import pytest
import torch
import torch.distributed as dist

import opfuse
from opfuse import ops, recipes
from opfuse.errors import SavedTensorError
from opfuse.numerics.pointwise import gated
from opfuse.runtime.plans.cache_info import CacheInfo
from opfuse.runtime.replay import replayable
from opfuse.runtime.replay import user_code as own
from opfuse.runtime.replay.dispatch import interpreted
from opfuse.runtime.replay.program import host_bytes
from opfuse.runtime.replay.replayable import BACKWARD_LOOKS, LOOKS, Recorded, Replayable
from opfuse.tensors.quantizers import Float8CurrentScalingQuantizer, IdentityQuantizer, NVFP4Quantizer
from tests.compiler.harness import CASES, delayed_state, gradient, randn, recipe_for, to
from tests.program.fake import fake_device, launches_seen
from tests.programs import backwards, forwards, plans_of
from tests.turns import in_turn

BF16 = torch.bfloat16

PIPELINES = {
    "mlp": lambda: [ops.Linear(64, 128), ops.GELU(), ops.Linear(128, 64)],
    "gated": lambda: [ops.RMSNorm(64), ops.Linear(64, 256, bias=False), ops.SwiGLU(), ops.Linear(128, 64, bias=False)],
    "dropout": lambda: [ops.LayerNorm(64), ops.Linear(64, 64), ops.Dropout(0.25), ops.SReLU(), ops.Linear(64, 32)],
    "residual": lambda: [ops.MakeExtraOutput(), ops.Linear(64, 64), ops.ReLU(), ops.Reshape((-1, 64)), ops.AddExtraInput()],
}


def model_of(name: str) -> ops.Sequential:
    made = PIPELINES[name]()
    if name == "residual":
        made[0].set_extra_output_channel(0, "skip", output_to_caller=False)
        made[-1].set_extra_input_channel(0, "skip")
    return to(ops.Sequential(*made), BF16)


def run(model, recipe, *, calls: int = 4, train: bool = True, rows: int = 32, autocast: bool = False) -> list[dict]:
    """Calls with values of their own: outputs, gradients, and at the end delayed-scaling state."""
    seen = []
    for call in range(calls):
        torch.manual_seed(call)
        x = (randn(rows, 64, seed=call) * (call + 1)).requires_grad_(train)
        model.zero_grad(set_to_none=True)
        device = torch.get_default_device().type
        with (
            torch.set_grad_enabled(train),
            opfuse.autocast(enabled=recipe is not None, recipe=recipe),
            torch.autocast(device, enabled=autocast, dtype=BF16),
        ):
            y = model(x)
        if train:
            y.backward(gradient(y, call))
        grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        seen.append({"y": y.detach().clone(), "x.grad": x.grad, **grads})
    seen.append(delayed_state(model))
    return seen


def recorded_in(model) -> list[Recorded]:
    """The forward passes of all plans of a model."""
    return forwards(plans_of(model))


def backwards_of(model) -> list[Recorded]:
    return backwards(*recorded_in(model))


@pytest.mark.unrun
@pytest.mark.cpu
def test_a_recording_stays_while_blocks_of_saved_tensors_may_be_made_of_it(monkeypatch):
    """Of a program with kernels, before a backward pass that it will know; elsewhere nothing is left to decide."""

    def recorded(train: bool) -> Recorded:
        model, x = to(ops.Sequential(ops.Linear(64, 64)), BF16), randn(32, 64).requires_grad_(train)
        with fake_device(monkeypatch), launches_seen(monkeypatch), torch.set_grad_enabled(train):
            for _ in range(2):
                with opfuse.autocast(recipe=recipes.MXFP8BlockScaling()):
                    y = model(x)
                if train:
                    y.backward(torch.ones_like(y))
        (made,) = recorded_in(model)
        assert made.program.launches
        return made

    for train in (True, False):
        made = recorded(train)
        assert (made.program.recording is not None, bool(made.rest and made.rest.packs)) == (train, train)
    run(model := model_of("mlp"), None, calls=2)
    assert {made.program.recording for made in recorded_in(model)} == {None}


def test_nothing_is_recorded_while_a_graph_is_captured(monkeypatch):
    """A recorded program may want kernels that none of its calls has launched: joined ones, which a capture cannot load."""
    model, recipe = model_of("mlp"), recipes.Float8CurrentScaling()
    monkeypatch.setattr("opfuse.runtime.replay.replayable.is_capturing", lambda: True)
    run(model, recipe)
    assert recorded_in(model) == []
    monkeypatch.undo()
    run(model, recipe)
    assert recorded_in(model)
    assert backwards_of(model)


def assert_same(got: list[dict], wanted: list[dict]) -> None:
    for call, (one, other) in enumerate(zip(got, wanted, strict=True)):
        assert one.keys() == other.keys()
        for name in one:
            same = one[name] is other[name] is None or torch.equal(one[name], other[name])
            assert same, (call, name)


def compared(model, recipe, **options) -> None:
    """Repeated equals interpreted, and was repeated."""
    other = copy.deepcopy(model)
    with interpreted():
        wanted = run(other, recipe, **options)
    assert recorded_in(other) == []
    assert_same(run(model, recipe, **options), wanted)


@pytest.mark.few(apart=True)
@pytest.mark.row("B21")
@pytest.mark.parametrize(
    ("pipeline", "name", "override", "stage"), in_turn(PIPELINES, CASES, ("training", "inference"), of=len(PIPELINES))
)
def test_repeated_segments_equal_interpreted_ones(pipeline, name, override, stage):
    model, train = model_of(pipeline), stage == "training"
    compared(model, recipe_for(name, override), train=train)
    assert recorded_in(model)
    assert bool(backwards_of(model)) == train


def test_torch_autocast_has_its_say_once():
    model = model_of("mlp").float()
    compared(model, None, autocast=True)
    assert recorded_in(model)


def test_every_look_of_an_input_has_a_program_of_its_own_up_to_a_limit():
    model = model_of("mlp")
    x = randn(64, 64)
    looks = [x, x[::2], randn(64, 128)[:, :64], randn(64 * 64 + 1)[1:].view(64, 64), randn(64, 64).t()]
    for _ in range(3):
        for look in looks:
            with torch.no_grad():
                got = model(look)
                with interpreted():
                    assert torch.equal(got, model(look))
    segments = len({id(program) for program in recorded_in(model)})
    assert segments >= len(looks)
    for rows in range(1, 3 * LOOKS):
        with torch.no_grad():
            model(x[:1].expand(rows, 64).contiguous())
    (run,) = model.runs()
    assert all(len(looks) <= LOOKS for _, plan in run.cache.items() for looks in plan.programs.values())


def called(model: ops.Sequential, *rows: int) -> None:
    """Three calls for each number of rows: interpreted, recorded, repeated."""
    for count in rows:
        for _ in range(3):
            model(randn(count, 64).requires_grad_()).sum().backward()


def rows_of(model: ops.Sequential) -> set[int]:
    """For how many rows there are programs."""
    plans = [plan for run in model.runs() for _, plan in run.cache.items()]
    return {look[0][0][0] for plan in plans for looks in plan.programs.values() for look, _ in looks.recorded()}


@pytest.mark.cpu
def test_programs_take_no_more_of_the_host_than_is_allowed(monkeypatch, caplog):
    """In a whole process; the least recently used go first, but never what needs the room. What went is recorded again."""
    monkeypatch.setattr(replayable, "_ALL", WeakValueDictionary())  # without those that other tests still hold
    one, other = (to(ops.Sequential(ops.Linear(64, 64), ops.GELU()), BF16) for _ in range(2))
    called(other, 8)
    called(one, 8, 16)
    called(one, 8)  # used again, so those of the other are the oldest, then those of 16 rows
    most = host_bytes(program for model in (one, other) for made in recorded_in(model) for program in made.programs())
    most += 500  # much less than a program: a number more or less, as one that two of its values share
    monkeypatch.setenv("OPFUSE_PROGRAM_BYTES", str(most))
    with caplog.at_level(logging.INFO, "opfuse.programs"):
        called(one, 24)
    assert (rows_of(one), rows_of(other)) == ({8, 16, 24}, set())
    assert other.cache_info().dropped == len(caplog.messages) > 0 == one.cache_info().dropped
    monkeypatch.setenv("OPFUSE_PROGRAM_BYTES", "1")
    called(one, 32)
    assert (rows_of(one), one.cache_info().programs) == ({32}, 2)
    assert one.cache_info().dropped > 0
    called(other, 8)
    assert (rows_of(one), rows_of(other)) == (set(), {8})


@pytest.mark.cpu
def test_programs_are_counted_together_only_when_room_may_be_short(monkeypatch):
    """With each of n they would take the first steps of a large model the square of n."""
    counted = []
    monkeypatch.setattr(replayable, "_ALL", WeakValueDictionary())
    made = Replayable.recorded
    monkeypatch.setattr(Replayable, "recorded", lambda looks: [counted.append(looks), made(looks)][1])
    monkeypatch.setenv("OPFUSE_PROGRAM_BYTES", str(100 * 1000))
    looks = Replayable(limit=1000)
    for i in range(90):
        program = SimpleNamespace(instance_bytes=900, code=SimpleNamespace(nbytes=100), used=i)
        looks.add(i, Recorded(program))
    assert len(counted) == 1
    for i in range(90, 300):
        program = SimpleNamespace(instance_bytes=900, code=SimpleNamespace(nbytes=100), used=i)
        looks.add(i, Recorded(program))
    assert [*looks] == [*range(200, 300)]


def test_cache_info_counts_programs_and_what_they_take():
    model = model_of("mlp")
    assert model.cache_info()[4:] == (0, 0, 0, 0, 0)
    run(model, recipes.MXFP8BlockScaling(), calls=5)
    info = model.cache_info()
    alive = [program for each in recorded_in(model) for program in each.programs()]
    assert info.programs == len(alive) >= 2
    assert info.block_bytes == max(program.block_bytes for program in alive)
    assert info.host_bytes >= sum(map(len, {program.text for program in alive})) > 0


@pytest.mark.cpu
@pytest.mark.parametrize("recipe", [None, recipes.Float8CurrentScaling()])
def test_cache_info_tells_what_the_host_holds(recipe):
    """Within a factor of two of what Python allocates for further looks of one plan."""
    model = ops.Sequential(*[op for _ in range(2) for op in (ops.RMSNorm(32), ops.Linear(32, 32), ops.GELU())]).to(BF16)

    def step(rows):
        with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
            model(randn(rows, 32).requires_grad_()).sum().backward()

    for _ in range(4):
        step(128)
    told = -model.cache_info().host_bytes
    gc.collect()
    tracemalloc.start()
    try:
        for rows in (256, 384):
            for _ in range(4):
                step(rows)
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    told += model.cache_info().host_bytes
    assert told / 2 < held < 2 * told


@pytest.mark.cpu
def test_a_recording_is_let_go_of_and_equal_layers_share_their_code():
    layers = [to(ops.Sequential(ops.Linear(64, 64), ops.GELU()), BF16) for _ in range(3)]
    x = randn(8, 64)
    for layer in layers:
        for _ in range(4):
            layer(x).sum().backward()
    programs = [program for layer in layers for made in recorded_in(layer) for program in made.programs()]
    assert len(programs) == 6
    assert {program.recording for program in programs} == {None}
    assert len({id(program.text) for program in programs}) == 2
    assert len({program._run.__code__ for program in programs}) == 2


def test_cache_info_of_an_op_that_is_called_alone():
    op, x = to(ops.Linear(64, 64), BF16), randn(8, 64)
    assert op.cache_info() == CacheInfo(0, 0, 0, None)
    with torch.no_grad():
        for _ in range(4):
            op(x)
    assert op.cache_info()[:5] == (1, 3, 1, "first plan: the cache was empty", 1)


def test_a_look_keeps_programs_for_few_looks_of_gradients():
    model = model_of("mlp")
    for call in range(4 * BACKWARD_LOOKS):
        y = model(randn(4 * BACKWARD_LOOKS, 64).requires_grad_())
        wide = randn(*y.shape, seed=call).repeat(1, 1 + call // 3)
        y.backward(wide[:, : y.shape[1]])
    assert max(len(made.rest.replayable) for made in recorded_in(model)) == BACKWARD_LOOKS


def test_a_parameter_that_is_replaced_moved_or_written_is_read_anew():
    model = model_of("mlp")
    other = copy.deepcopy(model)

    def change(module, step):
        if step == 0:
            module[0].weight = torch.nn.Parameter(randn(128, 64, seed=50))
        elif step == 1:
            module[0].weight.data = randn(128, 64, seed=51)
        elif step == 2:
            with torch.no_grad():
                module[2].bias.fill_(3.0)
        else:
            module[0].weight = torch.nn.Parameter(randn(128, 65, seed=52)[:, :64])  # of other strides

    recipe = recipes.MXFP8BlockScaling()
    for step in range(4):
        for _ in range(2):
            with interpreted():
                wanted = run(other, recipe, calls=2)
            assert_same(run(model, recipe, calls=2), wanted)
        change(model, step)
        change(other, step)
    assert_same(run(model, recipe, calls=2), run(other, recipe, calls=2))


@pytest.mark.parametrize("name", ["delayed", "fp8_current", "mxfp8", "nvfp4"])
def test_weights_that_live_quantized(name):
    recipe = recipe_for(name)
    with opfuse.quantized_model_init(recipe=recipe):
        model = to(ops.Sequential(ops.Linear(64, 64, dtype=BF16), ops.GELU(), ops.Linear(64, 64, dtype=BF16)), BF16)
    compared(model, recipe)
    assert recorded_in(model)
    assert backwards_of(model)


HYBRID, E4M3 = recipes.DelayedScaling(), recipes.DelayedScaling(fp8_format="E4M3")
SHORT, LATEST = recipes.DelayedScaling(amax_history_len=4), recipes.DelayedScaling(amax_compute_algo="most_recent", margin=1)


def aborted(model: ops.Sequential, saved: dict) -> None:
    with contextlib.suppress(KeyError), opfuse.autocast(recipe=HYBRID):
        model(100 * randn(32, 64))
        raise KeyError


BETWEEN = {
    "a state dict": lambda model, saved: model.load_state_dict(saved),
    "validation": lambda model, saved: run(model, E4M3, calls=3, train=False),
    "a region left by an error": aborted,
}


@pytest.mark.parametrize("between", BETWEEN)
def test_programs_see_what_becomes_of_delayed_states(between):
    """A state may get another rule, recipe, history or other tensors: a program that goes on with what it saw would be silent."""
    model = model_of("mlp")
    run(model, HYBRID, calls=1)
    saved = copy.deepcopy(model.state_dict())
    other = copy.deepcopy(model)
    for recipe in (HYBRID, E4M3, HYBRID, SHORT, HYBRID, LATEST, HYBRID):
        for each in (model, other):
            with interpreted() if each is other else contextlib.nullcontext():
                BETWEEN[between](each, saved)
        with interpreted():
            wanted = run(other, recipe)
        assert_same(run(model, recipe), wanted)
    assert len(recorded_in(model)) >= 4
    assert recorded_in(other) == []
    programs = [program for each in recorded_in(model) for program in each.programs()]
    assert all(len(re.findall(r"= c\d+\(\)$", each.text, re.M)) == 1 for each in programs)  # for all casts of a pass


def test_two_backward_passes_of_one_graph():
    model = model_of("mlp")
    run(model, recipes.Float8CurrentScaling())
    x = randn(32, 64).requires_grad_()
    with opfuse.autocast():
        y = model(x)
    grads = [torch.autograd.grad(y, x, gradient(y, 0), retain_graph=True)[0] for _ in range(3)]
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


def test_a_write_between_forward_and_backward_is_noticed():
    model = model_of("mlp")
    run(model, None)
    x = randn(32, 64).requires_grad_()
    y = model(x)
    with torch.no_grad():
        model[0].weight.add_(1.0)
    with pytest.raises(SavedTensorError):
        y.backward(gradient(y, 0))


def test_checkpoints_and_offload_see_what_the_interpreter_shows_them():
    recipe = recipes.Float8CurrentScaling()
    model = model_of("dropout")
    run(model, recipe)

    def step(scope, call) -> list[torch.Tensor]:
        torch.manual_seed(11)
        x = randn(32, 64, seed=9).requires_grad_()
        with opfuse.autocast(recipe=recipe), scope():
            y = call(x)
        y.backward(gradient(y, 0))
        return [y.detach(), x.grad]

    wanted = step(contextlib.nullcontext, model)
    for _ in range(3):
        for got in (
            step(contextlib.nullcontext, lambda x: opfuse.checkpoint(model, x)),
            step(torch.autograd.graph.save_on_cpu, model),
        ):
            assert all(map(torch.equal, got, wanted))


def test_threads_share_programs():
    model = model_of("gated")
    recipe = recipes.Float8BlockScaling()
    x = [randn(32, 64, seed=i) for i in range(4)]
    with torch.no_grad(), opfuse.autocast(recipe=recipe):
        wanted = [model(each) for each in x for _ in range(2)][::2]
    wrong = []

    def loop(i: int) -> None:
        for _ in range(20):
            with torch.no_grad(), opfuse.autocast(recipe=recipe):
                wrong.extend([] if torch.equal(model(x[i]), wanted[i]) else [i])

    threads = [threading.Thread(target=loop, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_inference_mode_and_back():
    model = model_of("mlp")
    x = randn(32, 64)
    with interpreted():
        wanted = model(x).detach()
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
        for _ in range(3):
            with mode():
                assert torch.equal(model(x), wanted)


# -- what is interpreted at every call ---------------------------------------------------------------------------------------


class Counting(ops.BasicOperation):
    calls = 0

    def op_forward(self, ctx, input_, **_):
        Counting.calls += 1
        return input_ * Counting.calls

    def op_backward(self, ctx, grad_output):
        return grad_output, ()


class CountingGELU(ops.GELU):
    calls = 0

    def op_forward(self, ctx, input_, **kwargs):
        CountingGELU.calls += 1
        return super().op_forward(ctx, input_, **kwargs)


class Squared(ops.Activation):
    math = ops.Pointwise("squared", "x * x", ("dy * 2.0f * x",), value=lambda x: x * x, grad=lambda dy, x: (dy * 2 * x,))


@pytest.mark.parametrize("op", [Counting, CountingGELU])
def test_ops_with_code_of_the_users_own_run_at_every_call(op):
    model = to(ops.Sequential(ops.Linear(64, 64), op()), BF16)
    op.calls = 0
    run(model, None, calls=5)
    assert op.calls == 5


def test_an_activation_of_the_users_own_is_repeated():
    model = to(ops.Sequential(ops.Linear(64, 64), Squared()), BF16)
    compared(model, recipes.MXFP8BlockScaling())
    assert recorded_in(model)


SLOPE = [1.0]


class Sloped(ops.Activation):
    math = ops.Pointwise("sloped", "x", ("dy",), value=lambda x: x * SLOPE[0], grad=lambda dy, x: (dy * SLOPE[0],))


class SlopedGate(ops.GLU):
    math = gated(Sloped.math, "sloped_gate")


@pytest.mark.cpu
@pytest.mark.parametrize("op", [Sloped, SlopedGate])
def test_definitions_that_read_more_than_their_arguments_run_at_every_call(op):
    model = ops.Sequential(op())
    for slope in (1.0, 1.0, 1.0, 2.0, 3.0):
        SLOPE[0] = slope
        x = torch.ones(2, 8, requires_grad=True)
        y = model(x)
        y.sum().backward()
        assert y.detach().unique().tolist() == x.grad.unique().tolist() == [slope]


def test_a_method_that_is_set_on_an_op_runs():
    op = ops.GELU()
    forward, calls = op.op_forward, []
    op.op_forward = lambda *args, **kwargs: calls.append(1) or forward(*args, **kwargs)
    assert not own.is_library_op(op)
    assert own.is_library_op(ops.GELU())


def test_a_dispatch_mode_of_the_callers_sees_every_op():
    from torch.utils.flop_counter import FlopCounterMode

    model = model_of("mlp")
    x = randn(32, 64)
    counts = []
    for _ in range(4):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(x)
        counts.append(counter.get_total_flops())
    assert len(set(counts)) == 1
    assert counts[0] == 2 * 2 * 32 * 64 * 128


def test_in_place_results_are_interpreted_and_the_log_says_so(caplog):
    caplog.set_level(logging.INFO, logger="opfuse.programs")
    model = to(ops.Sequential(ops.Linear(64, 64), ops.AddExtraInput(in_place=True)), BF16)
    x = randn(32, 64)
    for call in range(3):
        extra = randn(32, 64, seed=call)
        wanted = extra + model[0](x)
        with torch.no_grad():
            assert torch.equal(model(x, extra), wanted)
        assert torch.equal(extra, wanted)
    assert "changed in place" in caplog.text


def test_a_tensor_that_comes_twice_and_two_that_come_once_have_programs_of_their_own():
    model = to(ops.Sequential(ops.AddExtraInput(), ops.GELU()), BF16)
    x, other = randn(32, 64), randn(32, 64, seed=1)
    for extra in (x, x, x, other, other, other, x):
        with torch.no_grad():
            got = model(x, extra)
            with interpreted():
                assert torch.equal(got, model(x, extra))


def test_interpreted_records_nothing():
    model = model_of("mlp")
    with interpreted():
        run(model, None)
    assert recorded_in(model) == []


@pytest.mark.parametrize("recipe", [None, recipes.Float8CurrentScaling()], ids=["none", "fp8_current"])
def test_torch_autocast_around_a_backward_pass_has_no_say(recipe):
    """Autograd hands its thread's state on; which precision a gradient has was decided in the forward pass."""
    model = to(ops.Sequential(ops.Linear(64, 64), ops.GELU(), ops.Linear(64, 32)), torch.float32)
    device = torch.get_default_device().type
    for around in (False, False, True, False, True):
        grads = []
        for scope in (contextlib.nullcontext, interpreted):
            x = randn(32, 64, dtype=torch.float32).requires_grad_()
            with scope(), opfuse.autocast(enabled=recipe is not None, recipe=recipe):
                y = model(x)
            with scope(), torch.autocast(device, enabled=around, dtype=BF16):
                y.backward(gradient(y, 0))
            grads.append(x.grad)
        assert torch.equal(*grads)
    assert backwards_of(model)


def test_two_tensors_over_one_memory_count_their_own_writes():
    model = to(ops.Sequential(ops.Linear(64, 64, bias=False)), torch.float32)
    for _ in range(4):
        x = model[0].weight.data.requires_grad_()
        y = model(x)
        with torch.no_grad():
            x.add_(1)
        with pytest.raises(SavedTensorError):
            y.sum().backward()


@pytest.mark.parametrize(
    "quantizer",
    [Float8CurrentScalingQuantizer(torch.float8_e4m3fn, with_amax_reduction=True), NVFP4Quantizer(with_amax_reduction=True)],
)
def test_ranks_that_come_after_the_first_calls_are_asked(quantizer, tmp_path, monkeypatch):
    """Such a quantizer reduces its amax over all processes, if there are any by now."""
    recipe = recipes.CustomRecipe(qfactory=lambda role: IdentityQuantizer() if role.is_gradient else quantizer)
    model, x = to(ops.Sequential(ops.Linear(64, 64)), torch.bfloat16), randn(32, 64)
    asked = []
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: asked.append(args))
    for _ in range(3):
        with opfuse.autocast(recipe=recipe), torch.no_grad():
            model(x)
    assert asked == []
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        with opfuse.autocast(recipe=recipe), torch.no_grad():
            model(x)
    finally:
        dist.destroy_process_group()
    assert asked
