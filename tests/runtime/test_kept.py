"""Casts of weights kept from call to call: the bits of a run without, however hard the weights are changed in between."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import opfuse
from opfuse import ops, recipes
from opfuse.core.cast import GRADIENT, Cast
from opfuse.core.grouped_cast import GroupedCast
from opfuse.errors import PipelineError, SavedTensorError, UnsupportedError
from opfuse.runtime.replay.replayable import Recorded
from opfuse.runtime.weights import cast_cache as kept
from opfuse.runtime.weights.cast_cache import CASTS, KeptWeights, kept_weights
from opfuse.tensors.quantizers import MXFP8Quantizer
from opfuse.tensors.quantizers.base import is_repeatable
from tests.compiler.harness import CASES, delayed_state, gradient, randn, recipe_for, to
from tests.turns import in_turn

BF16 = torch.bfloat16
RECIPE = recipes.MXFP8BlockScaling()
SAVED = RECIPE.replace(keep="all")
"""Saves casts of weights also outside of a scope, so that a weight may be written before the backward pass."""


def mlp(dtype: torch.dtype = BF16) -> ops.Sequential:
    return to(ops.Sequential(ops.Linear(64, 128), ops.GELU(), ops.Linear(128, 64, bias=False)), dtype)


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Roles of the weights that are cast, in order, whoever runs the call; one that a program repeats is none."""
    seen: list[str] = []
    for kind in (Cast, GroupedCast):

        def counted(self: Cast, x: Any, *by: Any, call: Any = kind.__call__) -> Any:
            if self.role not in ("input", GRADIENT):
                seen.append(self.role)
            return call(self, x, *by)

        monkeypatch.setattr(kind, "__call__", counted)
    return seen


@dataclass
class Run:
    """A model, what it is run under, and all that its calls gave."""

    model: nn.Module
    recipe: recipes.Recipe | None
    calls: int = 0

    def __post_init__(self) -> None:
        self.seen: list[torch.Tensor] = []
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def call(self, *, train: bool = True, recipe: recipes.Recipe | None = None, rows: int = 32) -> None:
        """One microbatch; gradients add up."""
        self.calls += 1
        recipe = recipe or self.recipe
        x = randn(rows, 64, seed=self.calls).requires_grad_(train)
        with torch.set_grad_enabled(train), opfuse.autocast(enabled=recipe is not None, recipe=recipe):
            y = self.model(x)
        self.seen.append(y.detach().clone())
        if train:
            y.backward(gradient(y, self.calls))
            self.seen.append(x.grad)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def result(self) -> list[torch.Tensor]:
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return [*self.seen, *grads, *self.model.parameters(), *delayed_state(self.model).values()]


Script = Callable[[Run, KeptWeights | None], None]


def both(script: Script, recipe: recipes.Recipe | None = RECIPE, model: Callable[[], nn.Module] = mlp) -> KeptWeights:
    """Run a script with and without a scope: every bit is the same. The scope, after its end."""
    torch.manual_seed(0)
    one = model()
    other, found = copy.deepcopy(one), []
    with kept_weights(one) as scope:
        run = Run(one, recipe)
        torch.manual_seed(1)  # of gradients that are rounded at random
        script(run, scope)
        found = run.result()
    run = Run(other, recipe)
    torch.manual_seed(1)
    script(run, None)
    wanted = run.result()
    assert len(found) == len(wanted)
    for i, (a, b) in enumerate(zip(found, wanted)):
        assert torch.equal(a, b), i
    assert (scope.casts, scope.nbytes) == (0, 0)
    return scope


def microbatches(run: Run, scope: KeptWeights | None) -> None:
    for _ in range(2):
        with opfuse.autocast(enabled=run.recipe is not None, recipe=run.recipe):
            for _ in range(4):
                run.call()
        run.step()
    for _ in range(3):
        run.call(train=False)
        run.call()


@pytest.mark.few(apart=True)
@pytest.mark.row("B21")
@pytest.mark.parametrize(("name", "override"), [CASES[0], *in_turn(CASES[1:], of=2)])
def test_microbatches_steps_and_evaluation_have_the_same_bits(name: str, override: str | None, casts: list[str]):
    both(microbatches, recipe_for(name, override))
    assert (casts == []) == (name == "none")


@pytest.mark.parametrize("name", ["mxfp8", "fp8_current", "delayed"])
def test_a_weight_is_cast_once_for_the_microbatches_of_a_step(name: str, casts: list[str]):
    run = Run(mlp(), recipe_for(name))
    with kept_weights(run.model) as scope:
        for step in range(1, 4):
            with opfuse.autocast(recipe=run.recipe):
                for _ in range(5):
                    run.call()
            run.step()
            assert len(casts) == 2 * step
            assert scope.casts == 2  # those of before the step go when their successors come
    casts.clear()
    run.call()
    assert scope.casts == len(scope._entries) == 0


@pytest.mark.cpu
def test_programs_take_what_is_kept_as_inputs():
    """So repeated calls hold no steps for it: the program has fewer steps than without."""
    steps = []
    for scoped in (True, False):
        model = mlp()
        with kept_weights(model) if scoped else contextlib.nullcontext():
            run = Run(model, RECIPE)
            for _ in range(4):
                run.call(train=False)
            plans = [plan for each in model.runs() for _, plan in each.cache.items()]
            looks = [look for plan in plans for looks in plan.programs.values() for look in looks.values()]
            steps.append(sum(made.program.text.count("\n") for made in looks if isinstance(made, Recorded)))
    assert 0 < steps[0] < steps[1]


@pytest.mark.row("H34")
@pytest.mark.parametrize("name", ["mxfp8", "fp8_block", "fp8_current", "nvfp4"])
def test_h34_a_kept_cast_is_made_again_for_other_planes_or_formats(name: str, casts: list[str]):
    """Rows alone, which inference reads, are no cast for training; nor is one of a recipe for another; each is found again."""
    first = recipe_for(name)
    if name == "nvfp4":
        first = first.replace(disable_stochastic_rounding=True)
    other = recipe_for("mxfp8" if name == "fp8_row" else "fp8_row")
    uses: list[tuple[dict[str, Any], int]] = [
        ({"train": False}, 2),
        ({"train": False}, 0),
        ({"train": True}, 2),
        ({"train": True}, 0),
        ({"train": False}, 0),
        ({"train": True, "recipe": other}, 2),
        ({"train": True}, 0),
        ({"train": True, "recipe": other}, 0),
    ]

    def script(run: Run, scope: KeptWeights | None) -> None:
        for options, made in uses:
            before = len(casts)
            run.call(**options)
            assert scope is None or len(casts) - before == made, options

    scope = both(script, first)
    assert scope.casts == 0


class Streams:
    """What stands for the streams of a device: kept casts ask for the number of that of a call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now: int | None = 0
        monkeypatch.setattr(kept, "_stream", lambda device: self.now)


def test_a_cast_is_kept_for_the_stream_that_made_it(casts: list[str], monkeypatch: pytest.MonkeyPatch):
    """Nothing waits for another stream, so what that may not have made yet is not read; nor is anything in a graph's capture."""
    streams = Streams(monkeypatch)

    def script(run: Run, scope: KeptWeights | None) -> None:
        for stream, made in ((0, 2), (0, 0), (7, 2), (0, 0), (7, 0), (7, 0), (0, 0)):
            streams.now, before = stream, len(casts)
            run.call()
            assert scope is None or len(casts) - before == made, stream
        streams.now, before = None, len(casts)
        run.call()
        assert scope is None or (len(casts) - before, scope.casts) == (4, 4)  # one plane in each pass, as outside of the scope
        run.step()
        for stream in (7, 0):
            streams.now, before = stream, len(casts)
            run.call()
            assert scope is None or len(casts) - before == 2  # each stream has made its own of what was written

    both(script)


# -- changes of a weight inside the scope ------------------------------------------------------------------------------------


def _replace(linear: nn.Module) -> None:
    linear.weight = nn.Parameter(linear.weight.detach() * 2)


def _swap(linear: nn.Module) -> None:
    linear.weight.data = linear.weight.detach() * 2


def _write(linear: nn.Module) -> None:
    with torch.no_grad():
        linear.weight.view(-1)[::2].mul_(2)


def _write_in_inference_mode(linear: nn.Module) -> None:
    with torch.inference_mode():
        linear.weight.mul_(2)


def _load(linear: nn.Module) -> None:
    linear.load_state_dict({name: value * 2 for name, value in linear.state_dict().items()})


def _convert(linear: nn.Module) -> None:
    linear.half()
    with torch.no_grad():
        linear.weight.mul_(2)
    linear.bfloat16()


def _move(linear: nn.Module) -> None:
    before = linear.weight.detach().clone()
    linear.to_empty(device="meta")
    linear.to_empty(device=before.device)
    linear.zero_grad()  # which was moved as well, without values
    with torch.no_grad():
        linear.weight.copy_(before * 2)
        linear.bias.zero_()


def _restride(linear: nn.Module) -> None:
    linear.weight.data = torch.zeros(64, 128, dtype=BF16).copy_(linear.weight.detach().t()).t()


CHANGES = [_replace, _swap, _write, _write_in_inference_mode, _load, _convert, _move, _restride]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_of_a_weight_is_seen_by_the_next_call(change: Callable[[nn.Module], None]):
    def script(run: Run, scope: KeptWeights | None) -> None:
        for _ in range(2):
            for train in (True, False, True):
                run.call(train=train)
            change(run.model[0])
            run.call(train=False)
            run.call()

    both(script)


class WritesUncounted(torch.optim.SGD):
    """As optimizers of other libraries do, whose kernels torch does not know."""

    def step(self, closure: Callable[[], object] | None = None) -> None:
        if closure is not None:
            closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=group["lr"])


UNCOUNTED = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-1, fused=True),
    "another library's": WritesUncounted,
}


@pytest.mark.parametrize("optimizer", UNCOUNTED)
def test_a_step_that_writes_without_a_count_is_seen_by_the_next_call(optimizer: str, casts: list[str]):
    def script(run: Run, scope: KeptWeights | None) -> None:
        run.optimizer = UNCOUNTED[optimizer](run.model.parameters())
        for _ in range(3):
            for _ in range(4):
                run.call()
            writes = run.model[0].weight._version
            run.step()
            assert run.model[0].weight._version == writes
            run.call(train=False)
        assert scope is None or casts.count("weight") == 3 * 4  # each step is followed by calls of two plans

    both(script)


class FailsAfterWriting(WritesUncounted):
    def step(self, closure: Callable[[], object] | None = None) -> None:
        super().step(closure)
        raise ZeroDivisionError


def test_a_step_that_fails_or_calls_the_model_is_seen_by_the_next_call():
    def script(run: Run, scope: KeptWeights | None) -> None:
        for _ in range(3):
            for kind, closure in ((FailsAfterWriting, None), (WritesUncounted, run.call)):
                run.call()
                run.call()
                with contextlib.suppress(ZeroDivisionError):
                    kind(run.model.parameters(), lr=1e-1).step(closure)
                run.call()

    both(script)


def test_a_step_on_other_parameters_leaves_the_casts(casts: list[str]):
    other = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([other], fused=True)
    run = Run(mlp(), RECIPE)
    with kept_weights(run.model):
        for _ in range(4):
            run.call()
            other.grad = torch.ones(4)
            optimizer.step()
    assert casts.count("weight") == 2


def _begins_elsewhere(weight: nn.Parameter) -> None:
    """In the same memory."""
    shift = int(weight.storage_offset() == 0)
    weight.data = weight.data.as_strided(weight.shape, weight.stride(), 64 * 64 * shift)


def _comes_to_lie_where_it_lay(weight: nn.Parameter) -> None:
    """In memory that was freed and allocated again: another storage with the same address."""
    there = (ctypes.c_uint8 * weight.untyped_storage().nbytes()).from_address(weight.untyped_storage().data_ptr())
    weight.data.mul_(2)
    _holders.append(weight.data)
    weight.data = torch.frombuffer(there, dtype=BF16)[: 64 * 64].view(64, 64)


def _turned(weight: nn.Parameter) -> None:
    """In the same place."""
    weight.data = weight.data.t()


def _read_as_another_dtype(weight: nn.Parameter) -> None:
    """In the same place, which plans for torch.autocast do not notice in their own casts."""
    weight.data = weight.data.view(torch.float16 if weight.dtype == BF16 else BF16)


_holders: list[torch.Tensor] = []

SWAPS = [_begins_elsewhere, _comes_to_lie_where_it_lay, _turned, _read_as_another_dtype]


@pytest.mark.parametrize("swap", SWAPS, ids=lambda swap: swap.__name__)
@pytest.mark.cpu
def test_data_that_is_swapped_without_a_count_is_seen_by_the_next_call(swap: Callable[[nn.Parameter], None]):
    def script(run: Run, scope: KeptWeights | None) -> None:
        weight = run.model[0].weight
        weight.data = torch.cat((weight.data, 3 * weight.data))[:64]
        with torch.autocast("cpu", dtype=BF16):
            for _ in range(3):
                for _ in range(3):
                    run.call(train=False)
                writes = weight._version
                swap(weight)
                assert weight._version == writes
                run.call(train=False)

    both(script, model=lambda: to(ops.Sequential(ops.Linear(64, 64, bias=False)), BF16))
    _holders.clear()


def test_two_scopes_of_one_model_in_two_contexts_know_nothing_of_each_other():
    run, contexts = Run(mlp(), RECIPE), (copy_context(), copy_context())
    blocks = [kept_weights(run.model) for _ in contexts]
    scopes = [context.run(block.__enter__) for context, block in zip(contexts, blocks)]
    for context, scope in zip(contexts, scopes):
        for _ in range(3):
            context.run(run.call, train=False)
        assert scope.casts == 2
    for context, block in zip(contexts, blocks):
        context.run(block.__exit__, None, None, None)


def test_a_write_through_data_is_no_write_that_counts_until_the_casts_are_dropped():
    run = Run(mlp(), RECIPE)
    x = randn(32, 64)
    with torch.no_grad(), opfuse.autocast(recipe=RECIPE), kept_weights(run.model) as scope:
        before = run.model(x)
        run.model[0].weight.data.mul_(2)
        assert torch.equal(run.model(x), before)
        scope.drop()
        after = run.model(x)
    with torch.no_grad(), opfuse.autocast(recipe=RECIPE):
        assert torch.equal(run.model(x), after)
    assert not torch.equal(before, after)


def test_a_kept_plane_that_somebody_writes_is_made_anew():
    def script(run: Run, scope: KeptWeights | None) -> None:
        for calls in (1, 3):
            for _ in range(calls):
                run.call(train=False)
            for plane in () if scope is None else scope.tensors():
                plane.zero_()
        run.call(train=False)

    both(script)


@pytest.mark.parametrize("calls", [0, 4])
def test_a_kept_plane_that_is_written_between_the_passes_is_an_error(calls: int):
    """As of any saved tensor, for the interpreter and for a program."""
    run = Run(mlp(), RECIPE)
    with kept_weights(run.model) as scope, opfuse.autocast(recipe=RECIPE):
        for _ in range(calls):
            run.call()
        y = run.model(randn(32, 64).requires_grad_())
        for block in scope.tensors():
            block[:1] += 1
    with pytest.raises(SavedTensorError, match="changed in place"):
        y.backward(gradient(y, 0))


def test_a_weight_that_is_written_between_the_passes_changes_no_gradient_of_its_kept_cast():
    def script(run: Run, scope: KeptWeights | None) -> None:
        for call in range(6):
            x = randn(32, 64, seed=call).requires_grad_()
            with opfuse.autocast(recipe=SAVED):
                y = run.model(x)
            with torch.no_grad():
                run.model[2].weight.mul_(1.5)
            y.backward(gradient(y, call))
            run.seen += [y.detach(), x.grad]

    both(script)


def test_freezing_a_weight_plans_anew_and_keeps_its_cast(casts: list[str]):
    def script(run: Run, scope: KeptWeights | None) -> None:
        for wanted in (True, False, True):
            run.model[0].weight.requires_grad_(wanted)
            for _ in range(3):
                run.call()
        assert scope is None or casts.count("weight") == 2

    both(script)


def test_what_is_stale_goes_before_its_successor_comes():
    """Also where a call found it bound to its segment."""
    run = Run(mlp(), RECIPE)
    with kept_weights(run.model) as scope:
        for _ in range(4):
            run.call()
        stale = [weakref.ref(block) for block in scope.tensors()]
        bytes_of_one = scope.nbytes
        assert len(stale) == 4  # a weight has a block for each direction
        run.step()
        run.call()
        assert not any(block() is not None for block in stale)
        assert scope.nbytes == bytes_of_one


def test_a_graph_holds_the_direction_that_its_backward_pass_reads():
    """Not the other one, once the scope is over."""
    model = to(ops.Sequential(ops.Linear(64, 128, bias=False)), BF16)
    saved: list[int] = []
    for call in range(4):
        with kept_weights(model) as scope, opfuse.autocast(recipe=RECIPE):
            y = model(randn(32, 64, seed=call).requires_grad_())
            rowwise, columnwise = scope.tensors()
        held = {t.untyped_storage().data_ptr() for t in y.grad_fn.saved_tensors}
        assert columnwise.data_ptr() in held
        assert rowwise.data_ptr() not in held
        saved.append(len(y.grad_fn.saved_tensors))
    assert len(set(saved)) == 1


# -- recipes, regions, delayed scaling ------------------------------------------------------------------------------------------


def test_recipes_and_dtypes_change_inside_the_scope():
    others = [recipe_for(name) for name in ("fp8_block", "mxfp8", "nvfp4", "fp8_current", "fp8_row", "mxfp8")]

    def script(run: Run, scope: KeptWeights | None) -> None:
        for recipe, train in itertools.product(others, (False, True)):
            run.call(recipe=recipe, train=train)
            run.call(recipe=recipe, train=train)
        if scope is not None:
            assert scope.casts <= 2 * CASTS

    both(script)


def test_an_fp32_model_under_two_dtypes_of_torch_autocast():
    def script(run: Run, scope: KeptWeights | None) -> None:
        for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
            with torch.autocast("cpu", dtype=dtype):
                run.call()
                run.call(train=False)

    both(script, model=lambda: mlp(torch.float32))


def test_a_delayed_scale_that_moves_has_its_weight_cast_anew(casts: list[str]):
    recipe = recipes.DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent")

    def script(run: Run, scope: KeptWeights | None) -> None:
        for factor in (1.0, 4.0, 0.25):
            with torch.no_grad():
                run.model[0].weight.mul_(factor)
            run.call()  # a region of its own: its end moves the scale
            run.call(train=False)
            with opfuse.autocast(recipe=recipe):
                run.call()
                run.call(train=False)
                run.call()

    both(script, recipe)


def test_a_weight_that_changes_before_every_call_is_cast_by_the_calls_and_tried_again(monkeypatch, casts: list[str]):
    monkeypatch.setattr(kept, "REST", 8)
    run = Run(mlp(), recipes.DelayedScaling(amax_history_len=4))
    with kept_weights(run.model) as scope:
        found = []
        for _ in range(2 * kept.REST):
            run.call()
            found.append(scope.casts)
        assert found[: kept.VAIN] == [2] * kept.VAIN
        assert found[kept.VAIN : kept.REST - 1] == [0] * (kept.REST - kept.VAIN - 1)
        assert found[kept.REST :].count(2) == 1
        for _ in range(kept.REST):  # in one region they stand
            with opfuse.autocast(recipe=run.recipe):
                run.call(), run.call()
        assert scope.casts == 2

    def script(run: Run, scope: KeptWeights | None) -> None:
        for call in range(3 * kept.REST):
            run.call(train=call % 5 > 0)

    both(script, run.recipe)


def test_a_region_that_fails_drops_its_amaxes_so_the_next_casts_count_again():
    recipe = recipes.DelayedScaling(amax_history_len=4)

    def script(run: Run, scope: KeptWeights | None) -> None:
        for _ in range(2):
            with contextlib.suppress(ZeroDivisionError), opfuse.autocast(recipe=recipe):
                run.call()
                raise ZeroDivisionError
            with opfuse.autocast(recipe=recipe):
                run.call()
                run.call()

    both(script, recipe)


def test_delayed_states_that_are_loaded_convert_or_change_length():
    first = recipes.DelayedScaling(amax_history_len=4)
    second = recipes.DelayedScaling(amax_history_len=8, margin=2)

    def script(run: Run, scope: KeptWeights | None) -> None:
        run.call()
        saved = copy.deepcopy(run.model.state_dict())
        for recipe in (first, second, first):
            with opfuse.autocast(recipe=recipe):
                run.call(recipe=recipe)
                run.call(recipe=recipe, train=False)
                run.call(recipe=recipe)
        run.model.load_state_dict(saved)
        with opfuse.autocast(recipe=first):
            run.call()
            run.call()

    both(script, first)


# -- what surrounds a call ------------------------------------------------------------------------------------------------------


def test_a_graph_may_be_run_backward_after_the_scope_and_after_the_weight_was_cast_anew():
    def grads(scoped: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, made = mlp(), []
        with kept_weights(model) if scoped else contextlib.nullcontext(), opfuse.autocast(recipe=SAVED):
            for call in range(4):
                x = randn(32, 64, seed=call).requires_grad_()
                made.append((x, model(x)))
                if call == 2:
                    with torch.no_grad():
                        model[0].weight.copy_(model[0].weight * 3)
        for _, y in made:
            y.backward(gradient(y, 0))
        return [*(x.grad for x, _ in made), *(p.grad for p in model.parameters())]

    assert all(torch.equal(a, b) for a, b in zip(grads(True), grads(False), strict=True))


@pytest.mark.parametrize("name", ["mxfp8", "delayed"])
def test_a_checkpoint_repeats_its_call(name: str):
    recipe = recipe_for(name)

    def script(run: Run, scope: KeptWeights | None) -> None:
        for call in range(4):
            x = randn(32, 64, seed=call).requires_grad_()
            with opfuse.autocast(recipe=recipe):
                y = opfuse.checkpoint(run.model, x)
                run.call()
                again = opfuse.checkpoint(run.model, x)
                run.call()
            again.backward(gradient(y, call))
            y.backward(gradient(y, 0))
            run.seen += [y.detach(), x.grad]

    both(script, recipe)


def test_saved_tensors_that_hooks_move_have_the_same_bits():
    def script(run: Run, scope: KeptWeights | None) -> None:
        for _ in range(5):
            with torch.autograd.graph.save_on_cpu():
                run.call()

    both(script)


@pytest.mark.few
@pytest.mark.parametrize("recipe", [RECIPE, recipes.Float8CurrentScaling()], ids=["", "current"])
@pytest.mark.parametrize("calls", [1, 2, 4])
def test_a_checkpoint_repeats_its_call_with_or_without_kept_casts(calls: int, recipe: recipes.Recipe):
    """Its first run in the scope and its second one after it, or the other way round: both save as many tensors."""

    def grads(first: bool, again: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, found = mlp(), []
        for call in range(calls):
            x = randn(32, 64, seed=call).requires_grad_()
            with kept_weights(model) if first else contextlib.nullcontext(), opfuse.autocast(recipe=recipe):
                y = opfuse.checkpoint(model, x)
            with kept_weights(model) if again else contextlib.nullcontext():
                y.backward(gradient(y, call))
            found += [y.detach(), x.grad]
        return [*found, *(p.grad for p in model.parameters())]

    wanted = grads(False, False)
    for ways in ((True, False), (False, True), (True, True)):
        assert all(torch.equal(a, b) for a, b in zip(grads(*ways), wanted, strict=True)), ways


def test_inference_mode_leaves_nothing_that_a_training_call_cannot_save():
    def script(run: Run, scope: KeptWeights | None) -> None:
        for _ in range(3):
            with torch.inference_mode():
                run.call(train=False)
        run.call()

    recipe = recipe_for("mxfp8", "dequantized")
    both(script, recipe)


def test_stochastic_and_unknown_quantizers_cast_at_every_call(casts: list[str]):
    class Mine(MXFP8Quantizer):
        pass

    model = to(ops.Sequential(ops.Linear(64, 64)), BF16)
    x = randn(32, 64)
    for factory in (lambda role: Mine(), lambda role: MXFP8Quantizer()):
        casts.clear()
        recipe = recipes.CustomRecipe(qfactory=factory)
        with torch.no_grad(), opfuse.interpreted(), opfuse.autocast(recipe=recipe), kept_weights(model):
            model(x), model(x)
        assert len(casts) == (1 if recipe.qfactory(None).__class__ is MXFP8Quantizer else 2)
    assert not is_repeatable(recipe_for("nvfp4").quantizer(opfuse.recipes.QuantizerRole("linear", "grad_output")))


def test_one_weight_of_two_layers_is_cast_once(casts: list[str]):
    model = to(ops.Sequential(ops.Linear(64, 64), ops.GELU(), ops.Linear(64, 64, bias=False)), BF16)
    model[2].weight = model[0].weight
    with torch.no_grad(), opfuse.autocast(recipe=RECIPE):
        wanted = model(randn(32, 64))
        casts.clear()
        with kept_weights(model) as scope:
            for _ in range(4):
                assert torch.equal(model(randn(32, 64)), wanted)
            assert (len(casts), scope.casts) == (1, 1)


def test_experts_keep_theirs(casts: list[str]):
    model = to(ops.GroupedLinear(3, 64, 64), BF16)
    splits = torch.tensor([32, 0, 64], device="cpu")
    x = randn(96, 64)
    with torch.no_grad(), opfuse.autocast(recipe=RECIPE):
        wanted = model(x, splits)
        casts.clear()
        with kept_weights(model) as scope:
            for _ in range(3):
                assert torch.equal(model(x, splits), wanted)
            assert (len(casts), scope.casts) == (3, 3)


def test_experts_lie_together_and_each_is_cast_anew_alone(casts: list[str]):
    """Their block goes with the last of them."""
    model, splits = to(ops.GroupedLinear(3, 64, 64, bias=False), BF16), torch.tensor([32, 0, 64], device="cpu")

    def call(seed: int) -> list[torch.Tensor]:
        x = randn(96, 64, seed=seed).requires_grad_()
        with opfuse.autocast(recipe=RECIPE):
            y = model(x, splits)
        return [y, *torch.autograd.grad(y, [x, *model.parameters()], gradient(y, seed))]

    def write(name: str) -> None:
        with torch.no_grad():
            model.get_parameter(name).mul_(2)

    with kept_weights(model) as scope:
        for seed in range(4):
            got = call(seed)
        block, other = ({id(t): t for t in scope.tensors()}).values()
        first, alone = weakref.ref(block), scope.nbytes // 3
        del block, other
        for i, name in enumerate(("weight1", "weight0", "weight2")):
            casts.clear()
            write(name)
            for seed in range(4):
                got = call(seed)
            assert casts == [name]
            assert scope.nbytes == (4 + i) * alone if i < 2 else 3 * alone
            assert (first() is None) == (i == 2)
    assert all(map(torch.equal, got, call(3)))


# -- the scope ------------------------------------------------------------------------------------------------------------------


def test_the_scope_lets_go_of_everything_however_it_ends():
    model = mlp()
    with contextlib.suppress(ZeroDivisionError), kept_weights(model) as scope:
        run = Run(model, RECIPE)
        for _ in range(4):  # interpreted, recorded, repeated
            run.call(train=False)
        assert scope.casts == 2
        assert scope.nbytes == sum(t.untyped_storage().nbytes() for t in scope.tensors())
        assert scope.nbytes >= sum(p.numel() for p in (model[0].weight, model[2].weight))
        assert repr(scope) == f"KeptWeights(2 casts, {scope.nbytes} bytes)"
        alive = [weakref.ref(t) for t in scope.tensors()]
        raise ZeroDivisionError
    gc.collect()
    assert (scope.casts, scope.nbytes) == (0, 0)
    assert not any(each() is not None for each in alive)


def test_a_scope_inside_a_scope_keeps_only_what_the_outer_one_does_not(casts: list[str]):
    model, other = mlp(), mlp()
    run, another = Run(model, RECIPE), Run(other, RECIPE)
    with kept_weights(model) as outer:
        run.call(train=False)
        with kept_weights(nn.ModuleList([model, other])) as inner:
            run.call(train=False)
            another.call(train=False)
            assert (outer.casts, inner.casts) == (2, 2)
        run.call(train=False)
        assert (outer.casts, inner.casts, len(casts)) == (2, 0, 4)
        another.call(train=False)
        assert (outer.casts, inner.casts) == (2, 0)


def test_other_models_and_threads_of_their_own_context_are_not_concerned():
    model, other = mlp(), mlp()
    with kept_weights(model) as scope:
        Run(other, RECIPE).call(train=False)
        thread = threading.Thread(target=Run(model, RECIPE).call)
        thread.start()
        thread.join()
        assert scope.casts == 0


def test_threads_in_copies_of_the_context_share_the_casts(casts: list[str]):
    model = mlp()
    x = randn(32, 64)
    with torch.no_grad(), opfuse.autocast(recipe=RECIPE):
        wanted = model(x)
    casts.clear()
    got: list[torch.Tensor] = []
    start = threading.Barrier(4)

    def serve() -> None:
        start.wait()
        for _ in range(5):
            with torch.no_grad(), opfuse.autocast(recipe=RECIPE):
                got.append(model(x))

    with kept_weights(model) as scope:
        threads = [threading.Thread(target=copy_context().run, args=(serve,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(casts), scope.casts) == (2, 2)
        late = copy_context()
    assert all(torch.equal(each, wanted) for each in got)
    assert len(got) == 20
    late.run(Run(model, RECIPE).call)  # a copy of a context whose scope is over
    assert scope.casts == 0


def test_a_scope_that_ends_in_another_context_is_over():
    model, inside = mlp(), copy_context()
    block = kept_weights(model)
    scope = inside.run(block.__enter__)
    inside.run(Run(model, RECIPE).call)
    assert scope.casts == 2
    block.__exit__(None, None, None)
    inside.run(Run(model, RECIPE).call)
    assert scope.casts == 0


def test_what_is_told():
    model, x = mlp(), randn(32, 64).requires_grad_()
    with opfuse.autocast(recipe=SAVED):
        without = opfuse.saved(model, x)
        with kept_weights(model) as scope:
            assert opfuse.saved(model, x).totals == without.totals  # a look keeps nothing
            assert scope.casts == 0
            model(x)
            found = opfuse.saved(model, x)
            assert scope.casts == 2
            text = str(opfuse.explain(model, x))
    weights = [value for value in found.values if value.name == "w"]
    assert weights
    assert {value.memory for value in weights} == {"kept weights"}
    assert found.totals.own == without.totals.own - sum(value.bytes for value in weights)
    assert f"kept     2 casts of weights, {found.kept_bytes} bytes" in text
    assert "kept  " not in str(without)


def test_what_the_scope_refuses():
    with pytest.raises(PipelineError, match=r"nn\.Module"), kept_weights([mlp()]):
        pass

    class FSDPModule(nn.Module):
        pass

    model = nn.Sequential(mlp())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.fsdp.FSDPModule", FSDPModule)
        model.append(FSDPModule())
        with pytest.raises(UnsupportedError, match="FSDP"), kept_weights(model):
            pass


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert kept._owners.get() == {}


def test_a_repeated_call_takes_few_functions_of_the_library_and_a_kept_cast_few_more():
    """The host's time of small models is theirs; each is counted where a frame of the package begins."""
    model, x, package = mlp(), randn(32, 64), str(Path(opfuse.__file__).parent)

    def infer() -> int:
        begun = 0

        def count(frame: FrameType, event: str, _: object) -> None:
            nonlocal begun
            begun += event == "call" and frame.f_code.co_filename.startswith(package)

        with torch.no_grad(), opfuse.autocast(recipe=recipes.Float8CurrentScaling()):
            sys.setprofile(count)
            try:
                model(x)
            finally:
                sys.setprofile(None)
        return begun

    plain = [infer() for _ in range(4)][-1]
    with kept_weights(model) as scope:
        inside = [infer() for _ in range(4)][-1]
        assert scope.casts == 2
    assert plain <= 54
    assert inside <= plain + 1 + 5 * 2  # to ask for kept casts, and for each of them
