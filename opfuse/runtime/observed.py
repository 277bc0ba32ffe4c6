"""Observed calls: their segments are interpreted, and an observer gets each group of nodes with the values between ops.

Other calls do not pass through this module.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, Protocol

from opfuse.compiler.cover import Group
from opfuse.compiler.graph import BACKWARD, FORWARD
from opfuse.core.context import Value
from opfuse.core.operation import BasicOperation
from opfuse.recipes.passes import Pass, current_pass
from opfuse.runtime.gradients import Gradients
from opfuse.runtime.interpreter import Interpreter
from opfuse.runtime.listed import listed_plans
from opfuse.tensors.capture import check_capture


class GroupRun(NamedTuple):
    """A group of nodes that ran.

    side: forward or backward. name: of the rule that took it, or of its node. ops: those of its nodes. seconds: of the host.
    given: the input of a cast that runs alone, else None. made: the result of the group; backward, the gradient of the input of
    its first node; None if there is none.
    """

    pipeline: str
    side: str
    name: str
    nodes: tuple[str, ...]
    ops: tuple[BasicOperation, ...]
    role: str | None
    seconds: float
    given: Value | None
    made: Value | None


class Observer(Protocol):
    """Gets every group that runs in an observed call."""

    def ran(self, run: GroupRun) -> None:
        """Take a group that has run."""


_observer: ContextVar[Observer | None] = ContextVar("opfuse_observer", default=None)

current_observer = _observer.get


@contextmanager
def observed(by: Observer, *, fused: bool = False) -> Iterator[None]:
    """Observe calls inside the block, and their backward passes, group by group.

    fused: under the plans of ordinary calls. Otherwise every op runs by itself where that changes no bit, so that each cast is
    observed with its input. The plans are made for this alone, and no cache keeps them.
    """
    check_capture("values of a call", got="a look at them, as opfuse.watch has", cure="capture outside of it")
    reset = _observer.set(by)
    try:
        with listed_plans(trial=True, alone=not fused):
            yield
    finally:
        _observer.reset(reset)


@contextmanager
def unobserved() -> Iterator[None]:
    """Inside the block nobody observes calls."""
    reset = _observer.set(None)
    try:
        yield
    finally:
        _observer.reset(reset)


class ObservedRunner(Interpreter):
    """Runs a segment of an observed call."""

    observer: Observer

    def _forward_group(self, group: Group, values: dict[int, Value]) -> None:
        start = time.perf_counter()
        super()._forward_group(group, values)
        seconds = time.perf_counter() - start
        if current_pass() is Pass.AGAIN:  # was told when it ran first
            return
        nodes = [self.plan.graph.nodes[i] for i in group.nodes]
        first, last = nodes[0], nodes[-1]
        given = None
        if first.is_cast and not group.claimed:
            given = self.ops[first.op].parameter(self._role(group) or "") if first.side else values[first.inputs[0]]
        self._tell(FORWARD, group, seconds, given, values.get(last.outputs[0]) if last.outputs else None)

    def _backward_group(self, group: Group, grads: Gradients) -> None:
        nodes = [self.plan.graph.nodes[i] for i in group.nodes]
        if not any(grads.has(node.outputs) for node in nodes):
            return
        cast = nodes[-1].is_cast and not group.claimed
        given = _gradient(grads, nodes[-1].outputs[0]) if cast else None
        start = time.perf_counter()
        super()._backward_group(group, grads)
        seconds = time.perf_counter() - start
        value = nodes[-1].outputs[0] if cast else nodes[0].inputs[0] if nodes[0].inputs else None
        self._tell(BACKWARD, group, seconds, given, None if value is None else _gradient(grads, value))

    def _role(self, group: Group) -> str | None:
        cast = self.plan.casts.get(group.nodes[0]) if len(group.nodes) == 1 else None
        return None if cast is None else cast.role

    def _tell(self, side: str, group: Group, seconds: float, given: Value | None, made: Value | None) -> None:
        nodes = [self.plan.graph.nodes[i] for i in group.nodes]
        names = tuple(node.name for node in nodes)
        ops = tuple(self.ops[number] for number in dict.fromkeys(node.op for node in nodes))
        name = group.name if group.claimed else names[0]
        self.observer.ran(GroupRun(self.plan.name, side, name, names, ops, self._role(group), seconds, given, made))


def _gradient(grads: Gradients, value: int) -> Value | None:
    values: Mapping[int, Value] = grads.values
    return values.get(grads.graph.gradient_of(value))
