"""The plugin that checks every program finds one whose bits are others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import ran

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
LOOK = """
import torch
import tests.verify_programs
from opfuse.runtime.replay.program import Program
from opfuse.runtime.replay.recorder import Recorder

x = torch.ones(3)
recorder = Recorder([x])
with torch.no_grad(), recorder.recording():
    result = 2 * x
number = recorder.number(result)
Program(recorder, [number])
result += 1
try:
    Program(recorder, [number])
except AssertionError as error:
    print(error)
"""


def test_a_program_with_other_bits_is_found():
    found = ran(LOOK, cwd=ROOT)
    assert found.stdout == "tensor 1 has other bits\n"
