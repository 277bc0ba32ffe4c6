"""Calls whose groups of nodes are listened to: the interpreter emits each group with the values between ops.

Other calls do not pass through this module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from opfuse.compiler.cover import Group
from opfuse.compiler.graph import BACKWARD, FORWARD
from opfuse.compiler.plan import Plan
from opfuse.core.context import Value
from opfuse.core.operation import BasicOperation
from opfuse.events import GroupRan, PlanUsed, emit, silenced, subscribed
from opfuse.kernels.engine.launch import check_capture
from opfuse.recipes.passes import Pass, current_pass
from opfuse.runtime.interpret.gradients import Gradients
from opfuse.runtime.plans.misses import trial_plans

RunsGroup = Callable[[Group, Any], None]
"""Runs a group over the values, or the gradients, of its pass."""

Listeners = Mapping[type, tuple[Callable[[Any], None], ...]]
"""By type of event."""


@contextmanager
def observed(listener: Callable[[GroupRan], None], *, fused: bool = False) -> Iterator[None]:
    """Listen to each group of nodes of the calls inside the block, and of their backward passes.

    fused: under the plans of ordinary calls. Otherwise every op runs by itself where that changes no bit, so that each cast is
    observed with its input. The plans are made for this alone: no cache keeps them, and listeners around do not hear of them.
    """
    check_capture("values of a call", got="a look at them, as opfuse.watch has", cure="capture outside of it")
    with trial_plans(alone=not fused), silenced(PlanUsed), subscribed(listener, GroupRan):
        yield


class GroupEvents:
    """Emits each group of nodes of an observed call, also those of its backward pass, to the listeners ``to`` of the call."""

    def __init__(self, plan: Plan, ops: Sequence[BasicOperation], to: Listeners) -> None:
        self.plan, self.ops, self._listeners = plan, ops, to

    def forward(self, run: RunsGroup, group: Group, values: dict[int, Value]) -> None:
        """Run a group of the forward pass."""
        start = time.perf_counter()
        run(group, values)
        seconds = time.perf_counter() - start
        if current_pass() is Pass.RECOMPUTE:  # the first run emitted it
            return
        nodes = [self.plan.graph.nodes[i] for i in group.nodes]
        first, last = nodes[0], nodes[-1]
        source = None
        if first.is_cast and not group.claimed:
            source = self.ops[first.op].parameter(self._role(group) or "") if first.side else values[first.inputs[0]]
        self._emit(FORWARD, group, seconds, source, values.get(last.outputs[0]) if last.outputs else None)

    def backward(self, run: RunsGroup, group: Group, grads: Gradients) -> None:
        """Run a group of the backward pass."""
        nodes = [self.plan.graph.nodes[i] for i in group.nodes]
        if not any(grads.has(node.outputs) for node in nodes):
            return
        cast = nodes[-1].is_cast and not group.claimed
        source = _gradient(grads, nodes[-1].outputs[0]) if cast else None
        start = time.perf_counter()
        run(group, grads)
        seconds = time.perf_counter() - start
        value = nodes[-1].outputs[0] if cast else nodes[0].inputs[0] if nodes[0].inputs else None
        self._emit(BACKWARD, group, seconds, source, None if value is None else _gradient(grads, value))

    def _role(self, group: Group) -> str | None:
        cast = self.plan.casts.get(group.nodes[0]) if len(group.nodes) == 1 else None
        return None if cast is None else cast.role

    def _emit(self, side: str, group: Group, seconds: float, source: Value | None, result: Value | None) -> None:
        nodes = [self.plan.graph.nodes[i] for i in group.nodes]
        names = tuple(node.name for node in nodes)
        ops = tuple(self.ops[number] for number in dict.fromkeys(node.op for node in nodes))
        name = group.name if group.claimed else names[0]
        event = GroupRan(self.plan.name, side, name, names, ops, self._role(group), seconds, source, result)
        emit(event, to=self._listeners)


def _gradient(grads: Gradients, value: int) -> Value | None:
    values: Mapping[int, Value] = grads.values
    return values.get(grads.graph.gradient_of(value))
