"""What may stand in the function that is written for a program: a straight line, whatever the recorded arguments hold."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import opfuse
from opfuse import ops, recipes
from opfuse.errors import PipelineError
from opfuse.runtime.replay.codegen import empty_on
from opfuse.runtime.replay.program import Program, Recording
from opfuse.runtime.replay.recorder import Recorder
from tests.program.fake import fake_device, launch
from tests.programs import forwards

pytestmark = [pytest.mark.cpu, pytest.mark.row("R16")]

STATEMENTS = (ast.Assign, ast.Expr, ast.Delete, ast.Return)
EXPRESSIONS = (
    ast.BinOp,
    ast.Add,
    ast.Call,
    ast.Name,
    ast.Constant,
    ast.List,
    ast.Tuple,
    ast.Dict,
    ast.keyword,
    ast.UnaryOp,
    ast.USub,
)
OF_TENSORS = {"data_ptr", "clear", "at", "move", "arguments", "products", "queue"}
"""Attributes that are read: of tensors, of the list that comes in, of the frame."""


def strange(program: Program) -> Iterator[str]:
    """Whatever in the text is more than calls of constants, one after the other, and comparisons of addresses."""
    functions = ast.parse(program.text).body
    names = [each.name for each in functions if isinstance(each, ast.FunctionDef)]
    assert names in (["run"], ["run", "queue"])
    for statement in [statement for each in functions if isinstance(each, ast.FunctionDef) for statement in each.body]:
        if isinstance(statement, ast.If):
            ((call,), test) = statement.body, statement.test
            if ast.unparse(call).split("(")[0] != "move" or not ast.unparse(test).startswith("address != at["):
                yield ast.unparse(statement)
            continue
        if not isinstance(statement, STATEMENTS):
            yield ast.unparse(statement)
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute):
                if node.attr not in OF_TENSORS:
                    yield ast.unparse(node)
            elif isinstance(node, ast.Subscript):
                if ast.unparse(node.value) not in ("arguments", "products", "at"):
                    yield ast.unparse(node)
            elif isinstance(node, ast.expr | ast.keyword) and not isinstance(node, EXPRESSIONS):
                yield ast.unparse(node)


def programs_of(model: ops.Sequential) -> Iterator[Program]:
    for run in model.runs():
        for _, plan in run.cache.items():
            for made in forwards([plan]):
                yield from made.programs()


@pytest.mark.parametrize("recipe", [None, recipes.DelayedScaling(), recipes.NVFP4BlockScaling()], ids=repr)
def test_a_program_is_a_straight_line(recipe):
    model = ops.Sequential(ops.RMSNorm(64), ops.Linear(64, 128), ops.SwiGLU(), ops.Dropout(0.5), ops.Linear(64, 64)).bfloat16()
    for _ in range(4):
        with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True))
        y.backward(torch.ones_like(y))
    made = [*programs_of(model)]
    assert len(made) >= 2
    assert [each for program in made for each in strange(program)] == []


@pytest.mark.unrun
def test_arguments_are_values_and_never_text():
    """A string among them, whatever it holds, is a literal; a float is a constant, since not every one has a literal."""
    x = torch.randn(4, 4)
    recorder = Recorder([x])
    with torch.no_grad(), recorder.recording():
        result = torch.nn.functional.gelu(torch.clamp(x, -math.inf, 0.5), approximate="tanh")
    hostile = "none'); __import__('os').abort(); ('"
    _, gelu = recorder.steps
    recorder.steps[1] = replace(gelu, kwargs={"approximate": hostile, "lambda": [hostile]})
    program = Program(recorder, [recorder.number(result)])
    assert [*strange(program)] == []
    assert "inf" not in program.text
    with pytest.raises(RuntimeError, match=r"lambda|approximate"):
        program([x])


def test_launches_are_part_of_the_line(monkeypatch):
    x = torch.randn(8)
    with fake_device(monkeypatch):
        recorder = Recorder([x])
        with torch.no_grad(), recorder.recording():
            doubled = launch("double", x, torch.empty(8, dtype=torch.float32, device="cpu"))
            result = launch("negate", doubled, torch.empty(8, dtype=torch.float32, device="cpu"))
        program = Program(recorder, [recorder.number(result)])
        other = torch.randn(8)
        assert torch.equal(program([other])[0], -2 * other)
    assert [*strange(program)] == []
    assert program.text.count("launch(") == 2


@pytest.mark.unrun
def test_what_no_step_has_made_is_no_address_of_a_launch(monkeypatch):
    x = torch.randn(8)
    with fake_device(monkeypatch):
        recorder = Recorder([x])
        with torch.no_grad(), recorder.recording():
            result = launch("double", x, torch.empty(8, dtype=torch.float32, device="cpu"))
        recording = Recording.of(recorder, [recorder.number(result)])
        room, doubled = recording.steps
        Program.of(recording)
        for wrong in ((doubled, room), (doubled,)):
            with pytest.raises(PipelineError, match=r"wants memory that is made before a step reads it, got .* before t1"):
                Program.of(replace(recording, steps=wrong))


def zeroed(x):
    """Zeros that a kernel alone reads, zeros that torch reads as well, and zeros that go out."""
    inside, read, out = (torch.zeros(8, dtype=torch.float32, device="cpu") for _ in range(3))
    made = [launch("negate", each, torch.empty(8, dtype=torch.float32, device="cpu")) for each in (inside, read)]
    return sum(made) + read + x, out


def test_what_is_zero_is_zero_at_every_call(monkeypatch):
    x = torch.randn(8)
    with fake_device(monkeypatch):
        recorder = Recorder([x])
        with torch.no_grad(), recorder.recording():
            results = zeroed(x)
        program = Program(recorder, [recorder.number(each) for each in results])
        for _ in range(3):
            got, out = program([x])
            assert torch.equal(got, x)
            assert torch.equal(out, torch.zeros(8))
            out.fill_(7.0)  # memory that the next call may get
    assert [*strange(program)] == []
    assert program.text.count("memset(") == 3


def test_what_is_zero_is_in_memory_that_nothing_was_written_to(monkeypatch):
    """All zeros of a program are written at once, at its start, so the memory of one is not that of another."""
    x = torch.randn(8)
    with fake_device(monkeypatch):
        recorder = Recorder([x])
        with torch.no_grad(), recorder.recording():
            results = []
            for entry in ("double", "negate"):
                raised = launch(entry, x, torch.zeros(8, dtype=torch.float32, device="cpu"))
                results.append(launch("negate", raised, torch.empty(8, dtype=torch.float32, device="cpu")))
            still = torch.zeros(8, dtype=torch.float32, device="cpu")
            results.append(launch("double", still, torch.empty(8, dtype=torch.float32, device="cpu")))
        program = Program(recorder, [recorder.number(each) for each in results])
        for _ in range(2):
            assert all(map(torch.equal, program([x]), [-2 * x, x, torch.zeros(8)]))


def test_a_torch_without_the_quick_function_makes_room_by_its_public_one(monkeypatch):
    x = torch.randn(8)
    with fake_device(monkeypatch):
        recorder = Recorder([x])
        with torch.no_grad(), recorder.recording():
            result = launch("double", x, torch.empty(8, dtype=torch.float32, device="cpu"))
        monkeypatch.setattr("opfuse.runtime.replay.codegen.empty_on", lambda device: None)
        monkeypatch.setattr("torch.empty", lambda shape, dtype, device: torch.zeros(shape, dtype=dtype))
        program = Program(recorder, [recorder.number(result)])
        assert torch.equal(program([x])[0], 2 * x)
    assert "torch_empty((8,), dtype=torch_float32, device=device)" in program.text
    assert empty_on(torch.device("cpu")) is torch._C._dynamo.guards._empty_strided_cpu
    assert empty_on(torch.device("meta")) is None
