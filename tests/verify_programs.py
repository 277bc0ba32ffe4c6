"""A plugin that checks every program: ``pytest -p tests.verify_programs``.

Each look is recorded at its first call, and at its second where the first makes what later ones find, such as a scale's state.
The program runs at once for the tensors of the recording: its results must be those of the run, bit for bit. Left out are
programs that draw random numbers or change state, whose second run differs.

No test fails under it. One that makes programs only to read them, of kernels that cannot run, has the marker ``unrun``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch

from opfuse.runtime.replay import replayable
from opfuse.runtime.replay.instructions import CallStep, OpStep
from opfuse.runtime.replay.program import Program
from opfuse.runtime.replay.recorder import Recorder
from opfuse.tensors import QuantizedTensor

replayable.INTERPRETED_FIRST = False
_make = Program.__init__
_add = replayable.Replayable.add
_begin, _number = Recorder.__init__, Recorder.number
_held = WeakKeyDictionary[Recorder, tuple[list[torch.Tensor], dict[int, torch.Tensor]]]()
"""What came into a recorded run, and the tensors of which a number was asked for: a recorder holds none."""


def _begun(recorder: Recorder, given: Sequence[torch.Tensor]) -> None:
    _held[recorder] = [*given], {}
    _begin(recorder, given)


def _numbered(recorder: Recorder, tensor: torch.Tensor) -> int:
    number = _number(recorder, tensor)
    _held[recorder][1][number] = tensor
    return number


def _repeats(program: Program) -> bool:
    """Whether a second run gives what the first one gave."""
    draws = (isinstance(step, OpStep) and torch.Tag.nondeterministic_seeded in step.op.tags for step in program.recording.steps)
    return not any(draws) and not any(isinstance(step, CallStep) for step in program.recording.steps)


def _made_and_checked(program: Program, recorder: Recorder, results: Sequence[int]) -> None:
    _make(program, recorder, results)
    if not _repeats(program):
        return
    given, tensors = _held[recorder]
    wanted = [tensors[number].detach().clone() for number in results]
    device = given[0].device.type if given else "cpu"
    with torch.no_grad(), torch.autocast(device, enabled=False):
        got = program([*given])
    for number, one, other in zip(results, got, wanted, strict=True):
        same = (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, tensors[number].stride())
        assert same, f"tensor {number} looks another way"
        assert torch.equal(_bits(one), _bits(other)), f"tensor {number} has other bits"


def _added(programs: replayable.Replayable, look: Any, what: Any) -> None:
    _add(programs, look, replayable.SEEN if what is replayable.REFUSED and look not in programs else what)


def _bits(x: torch.Tensor) -> torch.Tensor:
    x = x.dequantize() if isinstance(x, QuantizedTensor) else x
    return x.detach().contiguous().flatten().view(torch.uint8)


Recorder.__init__, Recorder.number = _begun, _numbered  # type: ignore[method-assign]
Program.__init__ = _made_and_checked  # type: ignore[method-assign]
replayable.Replayable.add = _added  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def _unrun(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("unrun"):
        monkeypatch.setattr(Program, "__init__", _make)
        monkeypatch.setattr(replayable.Replayable, "add", _add)
        monkeypatch.setattr(replayable, "INTERPRETED_FIRST", True)
