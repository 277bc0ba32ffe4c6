"""Events: who hears them, where they end, and that what they say does not depend on how a call runs."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from contextvars import copy_context
from typing import Any

import pytest
import torch

import opfuse
from opfuse import events, ops, recipes
from opfuse.events import (
    GroupRan,
    KernelLaunched,
    PlanMissed,
    PlanUsed,
    ProductChosen,
    TensorSaved,
    collected,
    emit,
    silenced,
    subscribed,
)
from opfuse.kernels.engine import launch as launching
from opfuse.kernels.engine.compiling import Variant
from opfuse.runtime.interpret.observed import observed
from opfuse.runtime.plans.misses import plan_policy, trial_plans
from tests.compiler.harness import generator_of
from tests.plans import plans_used

RECIPE = recipes.MXFP8BlockScaling()


def mlp() -> ops.Sequential:
    torch.manual_seed(0)
    return ops.Sequential(ops.Linear(32, 64), ops.GELU(), ops.Linear(64, 32)).bfloat16()


def given() -> torch.Tensor:
    return torch.randn(32, 32, generator=generator_of(0)).bfloat16().requires_grad_()


def called(model: Any, x: torch.Tensor | None = None) -> torch.Tensor:
    with opfuse.autocast(recipe=RECIPE):
        return model(given() if x is None else x)


def test_listeners_of_all_blocks_hear_the_outermost_first() -> None:
    heard: list[tuple[str, Any]] = []
    event = PlanUsed(None)
    with subscribed(lambda each: heard.append(("outer", each)), PlanUsed, PlanMissed):
        with subscribed(lambda each: heard.append(("inner", each)), PlanUsed):
            emit(event)
        emit(event)
    emit(event)
    assert heard == [("outer", event), ("inner", event), ("outer", event)]
    assert not events.listeners()


@pytest.mark.parametrize(("types", "left"), [((), []), ((PlanUsed,), [ProductChosen])])
def test_a_silenced_block_hides_events_from_listeners_around_it_alone(types: tuple[type, ...], left: list[type]) -> None:
    outer: list[Any] = []
    with subscribed(outer.append, PlanUsed, ProductChosen), silenced(*types), collected(PlanUsed) as inner:
        emit(PlanUsed(None))
        emit(ProductChosen(torch.Size((1,)), (), ""))
    assert ([type(each) for each in outer], len(inner)) == (left, 1)


def test_a_listener_hears_its_own_thread_and_copies_of_its_context() -> None:
    with collected(PlanUsed) as heard:
        thread = threading.Thread(target=copy_context().run, args=(emit, PlanUsed(1)))
        other = threading.Thread(target=emit, args=(PlanUsed(2),))
        for each in (thread, other):
            each.start()
            each.join()
    assert heard == [PlanUsed(1)]


def test_a_listener_of_the_process_hears_every_thread_and_silenced_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_everywhere", {})
    heard: list[Any] = []
    events.subscribe_everywhere(heard.append, PlanMissed)
    model = mlp()
    thread = threading.Thread(target=called, args=(model,))
    thread.start()
    thread.join()
    with silenced():
        called(mlp())
    called(model)  # finds its plan
    assert len(heard) == 2
    assert all(event.pipeline.history[-1] is event.record for event in heard)


def test_an_error_of_the_block_ends_a_subscription() -> None:
    with pytest.raises(ValueError, match="inside"), subscribed(print, PlanUsed), silenced(), trial_plans():
        raise ValueError("inside")
    assert not events.listeners()
    assert not plan_policy().trial


# -- calls ---------------------------------------------------------------------------------------------------------------------


def test_calls_that_a_program_repeats_emit_their_plans() -> None:
    model = mlp()
    with plans_used() as plans:
        for _ in range(4):
            called(model)
    assert len(plans) == 4
    assert len({id(plan) for plan in plans}) == 1


def saves(model: Any) -> Iterator[tuple[int, str, torch.Size]]:
    with collected(TensorSaved) as saved:
        called(model)
    return ((event.node, event.name, event.value.shape) for event in saved)


def groups(model: Any) -> Iterator[tuple[str, str]]:
    ran: list[GroupRan] = []
    with observed(ran.append, fused=True):
        y = called(model)
    y.sum().backward()  # outside of the block: it is the backward pass of an observed call
    return ((event.side, event.name) for event in ran)


def products(model: Any) -> Iterator[tuple[str, ...]]:
    with collected(ProductChosen) as chosen:
        called(model)
    return (event.ops for event in chosen)


@pytest.mark.parametrize("found", [saves, groups, products])
def test_events_of_the_interpreter_are_those_of_the_first_call_after_programs_took_over(found: Any) -> None:
    model = mlp()
    first = list(found(model))
    for _ in range(4):
        called(model).sum().backward()
    assert first
    assert list(found(model)) == first


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputation_repeats_no_event_of_the_first_run(reentrant: bool) -> None:
    model = mlp()
    heard: list[Any] = []
    with subscribed(heard.append, *events.FIRST_RUN):
        y = opfuse.checkpoint(lambda x: called(model, x), given(), use_reentrant=reentrant)
        first = len(heard)
        y.sum().backward()
    assert {type(event) for event in heard} >= {PlanUsed, ProductChosen}
    assert len(heard) == first


def test_a_look_at_a_call_is_not_heard_around_it() -> None:
    model = mlp()
    heard: list[Any] = []
    with subscribed(heard.append, PlanUsed, TensorSaved, ProductChosen, GroupRan), opfuse.autocast(recipe=RECIPE):
        assert opfuse.explain(model, given()).plans
        assert opfuse.saved(model, given(), errors=True).values
    assert heard == []


def test_a_policy_for_misses_and_one_for_trials_do_not_undo_each_other() -> None:
    model = mlp()
    with trial_plans(), opfuse.on_miss("error"), plans_used() as plans:
        called(model)
        called(model)
    assert len({id(plan) for plan in plans}) == 2  # made for one call each, and missed by none
    assert model.cache_info().plans == 0


# -- launches -----------------------------------------------------------------------------------------------------------------


def test_a_launch_is_heard_before_it_is_queued_and_by_nobody_in_a_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[object] = []
    variant, grid, layout = Variant("a.cu"), launching.Grid(2, 32, 64), struct.Struct("Pq")
    monkeypatch.setattr(launching, "current_device", lambda: 0)
    monkeypatch.setattr(launching, "raw_stream", lambda device: 7)
    monkeypatch.setattr(launching, "bind", lambda device: None)

    def queue(grid: object, block: object, arguments: object, *, shared_mem: int, stream: Any) -> None:
        heard.append((grid, block, shared_mem, stream.ptr))

    monkeypatch.setattr(launching, "loaded", lambda variant, entry, device: launching.Loaded(queue, 5))
    with subscribed(heard.append, KernelLaunched):
        launching.launch(variant, "a", grid, layout, 16, 3, device=0)
        with launching.dry_run() as needed:
            launching.launch(Variant("b.cu"), "b", grid, layout, 16, 3, device=0)
    launching.launch(variant, "a", grid, layout, 16, 3, device=0)
    assert heard == [KernelLaunched(variant, "a", grid, layout, (16, 3), 0), *[((2,), (32,), 64, 7)] * 2]
    assert needed == [Variant("b.cu")]
    assert bytes(launching._parameters.buffer[: layout.size]) == layout.pack(16, 3)
