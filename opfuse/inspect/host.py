"""How long each op takes the host while calls are interpreted, before a program repeats them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from opfuse.domains import checked_arguments
from opfuse.errors import PipelineError, number_of
from opfuse.events import GroupRan
from opfuse.inspect.alike import alike, counted, starred
from opfuse.inspect.observe import CallInputs, copied_call
from opfuse.runtime.interpret.observed import observed
from opfuse.torch_private.operations import tree_leaves


@dataclass(frozen=True)
class HostTime:
    """A group of nodes of one pass. seconds: of the host, the least of all calls. share: of all groups."""

    pipeline: str
    side: str
    name: str
    nodes: tuple[str, ...]
    seconds: float
    share: float


@dataclass(frozen=True)
class HostTimes:
    """What each group took, the longest first."""

    rows: tuple[HostTime, ...]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({number_of(len(self.rows), 'group')})"

    def __str__(self) -> str:
        us = sum(row.seconds for row in self.rows) * 1e6
        head = f"{us:.0f} us of the host in {number_of(len(self.rows), 'group')}, interpreted"
        same = alike(self.rows, lambda row: (starred(row.pipeline), row.side, row.name, row.nodes))
        return "\n".join((head, *map(_line, sorted(same, key=lambda rows: -sum(row.seconds for row in rows)))))

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"groups": [asdict(row) for row in self.rows]}


def _line(rows: Sequence[HostTime]) -> str:
    """What a group took in all layers that have it."""
    share, seconds = sum(row.share for row in rows), sum(row.seconds for row in rows)
    place, first = counted([row.pipeline for row in rows]), rows[0]
    return f"{share:6.1%} {seconds * 1e6:8.1f} us  {first.side:<8} {first.name:<26} {' '.join(first.nodes)}  in {place}"


_Times = dict[tuple[str, str, str, tuple[str, ...]], list[float]]
"""Seconds of each call, by pipeline, side, name and nodes of a group."""


@checked_arguments(PipelineError, but="model")
def host_times(model: nn.Module, *inputs: Any, calls: int = 5, **named: Any) -> HostTimes:
    """How long the host is at each group of ``model(*inputs, **named)`` and of its backward pass, under the active recipe.

    Interprets ``calls`` training calls under their plans, and like :func:`opfuse.explain` leaves no trace. From the third call of
    a shape on, programs repeat segments without Python for each op, so these times matter for the first calls, and where nothing
    can be recorded. PipelineError and DtypeError as of ``explain``.
    """
    times: _Times = {}
    for _ in range(calls):
        _step(model, CallInputs(inputs, named), times)
    return _ranked(times)


def _step(model: nn.Module, given: CallInputs, times: _Times) -> None:
    def listen(run: GroupRan) -> None:
        times.setdefault((run.pipeline, run.side, run.name, run.nodes), []).append(run.seconds)

    with copied_call(model, given) as call, observed(listen, fused=True):
        outputs = [output for output in tree_leaves(call()) if isinstance(output, torch.Tensor) and output.requires_grad]
        wanted = [p for p in model.parameters() if p.requires_grad]
        if outputs and wanted:
            torch.autograd.grad(outputs, wanted, [torch.ones_like(output) for output in outputs], allow_unused=True)


def _ranked(times: _Times) -> HostTimes:
    least = {place: min(seconds) for place, seconds in times.items()}
    total = sum(least.values()) or 1.0
    rows = [HostTime(*place, seconds, seconds / total) for place, seconds in least.items()]
    return HostTimes(tuple(sorted(rows, key=lambda row: -row.seconds)))
