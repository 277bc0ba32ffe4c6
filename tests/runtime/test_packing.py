"""What is saved for the backward pass goes in one block where kernels alone read it: values, and who holds what for how long."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from opfuse import ops
from opfuse.kernels.engine import joining
from opfuse.runtime.compile.saved_call import SavedTensor, SavedTensorPacker
from opfuse.runtime.replay.dispatch import BackwardPass, ReplayedSegment
from opfuse.runtime.replay.instructions import LaunchStep, OpStep
from opfuse.runtime.replay.packing import Packing
from opfuse.runtime.replay.program import SMALL, Program
from opfuse.runtime.replay.recorder import Recorder
from opfuse.runtime.replay.replayable import BACKWARD_LOOKS, Recorded, Replayable, tensors_and_planes
from tests.program.fake import ADDS, KERNELS, VARIANT, fake_device, launch
from tests.programs import forwards, plans_of

pytestmark = pytest.mark.cpu

SEGMENT: Any = SimpleNamespace(nodes=range(1), outputs=(1,))
KEY = ("fake",)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with fake_device(monkeypatch):
        yield


def room(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=torch.float32, device="cpu")


def zeros(like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=torch.float32, device="cpu")


def forward(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """16 x^4, and what its derivative 64 x^3 is made of, of which torch reads the last one."""
    doubled = launch("double", x, room(x))
    squared = launch("square", doubled, room(x))
    return launch("square", squared, room(x)), [doubled, squared, launch("negate", x, room(x))]


def backward(grad: Tensor, saved: list[Tensor]) -> Tensor:
    doubled, squared, negative = saved
    made = launch("double", squared, room(grad))
    twice = launch("double", doubled, room(grad))
    return grad * made * twice * 2 * torch.sign(-negative) * torch.sign(twice)


class Interpreter:
    """Counts what was not repeated."""

    calls = 0
    places = ()

    def gradients(self, grads: dict[int, Tensor | None], saved: Iterator[Tensor]) -> list[Tensor | None]:
        self.calls += 1
        (grad,) = grads.values()
        return [backward(grad, list(saved))]


class ForwardPass:
    """One that is recorded: its results are one output, then what is saved."""

    def __init__(self, recorder: Recorder, results: list[Tensor], interpreter: Any) -> None:
        assert recorder.refusal == ""
        backward = BackwardPass(interpreter, Replayable("cpu", "fake", BACKWARD_LOOKS), packs=True)
        program = Program(recorder, [recorder.number(each) for each in results])
        self.interpreter, self.first = interpreter, backward
        self.replayable = Replayable("cpu", "fake")
        self.replayable.add(KEY, Recorded(program, None, backward, backward.replayables))

    def call(self, *given: Tensor) -> ReplayedSegment:
        plan: Any = SimpleNamespace(programs={0: self.replayable})
        return ReplayedSegment(plan, SEGMENT, (), (), key=KEY, tensors=[*given])

    @property
    def program(self) -> Program:
        program: Program = self.replayable[KEY].program
        return program

    @property
    def backward(self) -> BackwardPass:
        backward: BackwardPass = self.replayable[KEY].rest
        return backward


def recorded_forward(x: Tensor) -> ForwardPass:
    recorder = Recorder([x])
    with torch.no_grad(), recorder.recording():
        y, saved = forward(x)
    return ForwardPass(recorder, [y, *saved], Interpreter())


def step(recorded: ForwardPass, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Result, gradient, and what lay between the passes."""
    call = recorded.call(x)
    with torch.no_grad():
        (y,) = call.forward([x])
        saved = call.released()
        kept = list(saved)
        (dx,) = call.gradients({1: grad}, iter(saved))
    return y, dx, kept


def packing_of(recorded: ForwardPass, backward: Program) -> Packing | None:
    made, read = recorded.program.recording, backward.recording
    assert made is not None
    assert read is not None
    return Packing.of(made, read, grads=1, count=len(made.results) - 1)


def assert_right(x: Tensor, grad: Tensor, y: Tensor, dx: Tensor) -> None:
    assert torch.equal(y, (4 * x * x) * (4 * x * x))
    assert torch.equal(dx, backward(grad, forward(x)[1]))
    torch.testing.assert_close(dx, grad * 64 * x**3)


def test_what_kernels_alone_read_is_saved_in_one_block():
    recorded = recorded_forward(torch.randn(40))
    counts = []
    for call in range(8):
        x, grad = torch.randn(40), torch.randn(40)
        y, dx, kept = step(recorded, x, grad)
        assert_right(x, grad, y, dx)
        counts.append(len(kept))
        if call >= 5:
            assert [each.dtype for each in kept] == [torch.uint8, torch.float32]  # the block, and what torch reads
    # Seen, recorded, repeated, which is when it is known what the pass reads; from then on packed.
    assert counts == [3, 3, 3, 2, 2, 2, 2, 2]
    assert recorded.interpreter.calls == 2
    assert recorded.backward.packed is not None
    assert len(recorded.backward.packed.recorded()) == 1


def test_what_kernels_add_to_is_in_a_block_of_zeros_which_one_op_fills(monkeypatch):
    def adding(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        saved = [launch("double", x, room(x)), launch(ADDS, x, zeros(x)), launch("square", x, room(x)), launch(ADDS, x, zeros(x))]
        return launch("square", saved[0], room(x)), saved

    def read(grad: Tensor, saved: list[Tensor]) -> Tensor:
        return launch("double", grad, room(grad)) + sum(launch("negate", each, room(grad)) for each in saved)

    monkeypatch.setitem(globals(), "forward", adding)
    monkeypatch.setitem(globals(), "backward", read)
    recorded = recorded_forward(torch.randn(40))
    for call in range(8):
        x, grad = torch.randn(40), torch.randn(40)
        y, dx, kept = step(recorded, x, grad)
        assert torch.equal(y, (2 * x) ** 2)
        assert torch.equal(dx, read(grad, adding(x)[1]))
        assert len(kept) == (4 if call < 3 else 2)
    ((_, found),) = recorded.call(torch.randn(40)).replayable.recorded()
    assert found.program.text.count("memset(") == 1


def test_a_block_is_made_before_the_first_of_its_tensors_is_written(monkeypatch):
    """Saved in another order than they are made: the block is there for the kernel that comes first."""

    def turned(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        squared_first = launch("square", x, room(x))
        doubled = launch("double", x, room(x))
        return launch("square", launch("square", doubled, room(x)), room(x)), [
            doubled,
            squared_first,
            launch("negate", x, room(x)),
        ]

    monkeypatch.setitem(globals(), "forward", turned)
    recorded = recorded_forward(torch.randn(40))
    for call in range(8):
        x, grad = torch.randn(40), torch.randn(40)
        y, dx, kept = step(recorded, x, grad)
        assert torch.equal(y, ((2 * x) ** 2) ** 2)
        assert torch.equal(dx, backward(grad, turned(x)[1]))
        assert len(kept) == (3 if call < 3 else 2)


def test_another_look_of_the_gradient_gets_what_was_packed():
    """In memory of its own, so that it can be recorded as if there were no block; then it is packed as well."""
    recorded = recorded_forward(torch.randn(40))
    for call in range(16):
        x = torch.randn(40)
        grad = torch.randn(40) if call < 5 or call % 2 else torch.randn(80)[::2]
        y, dx, _ = step(recorded, x, grad)
        assert_right(x, grad, y, dx)
    assert recorded.backward.packed is not None
    assert len(recorded.backward.packed.recorded()) == 2
    assert recorded.interpreter.calls == 4


def test_hooks_of_saved_tensors_see_them_one_by_one():
    """A call under hooks has a program of its own, of which no blocks will be made."""
    model, x = ops.Sequential(ops.Linear(8, 8)), torch.randn(8, 8, requires_grad=True)
    for _ in range(2):
        for hooks in (nullcontext(), torch.autograd.graph.save_on_cpu()):
            with hooks:
                model(x)
    assert [made.rest.packs for made in forwards(plans_of(model))] == [True, False]


def test_a_call_in_a_compiled_graph_saves_blocks_as_a_plain_call_does():
    model, x = ops.Sequential(ops.Linear(8, 8)), torch.randn(8, 8, requires_grad=True)
    for _ in range(2):
        for hooks in (nullcontext(), saved_tensors_hooks(SavedTensorPacker([]).pack, SavedTensor.unpacked)):
            with hooks:
                model(x)
    assert [made.rest.packs for made in forwards(plans_of(model))] == [True]


def test_a_pass_that_reads_what_is_packed_as_tensors_is_refused_the_block():
    recorded = recorded_forward(torch.randn(40))
    for _ in range(5):
        step(recorded, torch.randn(40), torch.randn(40))
    packing = recorded.backward.packing
    assert packing is not None
    grad, doubled, *others = given = [torch.randn(40), *forward(torch.randn(40))[1]]
    recorder = Recorder(given)
    with torch.no_grad(), recorder.recording():
        result = backward(grad, [doubled, *others]) + 0 * doubled
    assert packing.backward(Program(recorder, [recorder.number(result)]).recording, 1) is None


def test_large_tensors_stay_apart_since_a_block_is_there_as_long_as_anything_in_it():
    count = SMALL // 4 + 1
    recorded = recorded_forward(torch.randn(count))
    for _ in range(4):
        step(recorded, torch.randn(count), torch.randn(count))
    assert recorded.backward.packing is None
    assert recorded.backward.packs is False


class OfWeights(Interpreter):
    """Gradients of grad + 1, and the squares of what was saved, which one launch reads; then another one runs."""

    def gradients(self, grads: dict[int, Tensor | None], saved: Iterator[Tensor]) -> list[Tensor | None]:
        self.calls += 1
        (grad,), planes = grads.values(), list(saved)
        squares = [launch("square", plane, room(plane)) for plane in planes]
        return [launch("negate", grad, room(grad)), *squares]


def test_large_tensors_that_one_step_reads_last_are_one(monkeypatch: pytest.MonkeyPatch):
    """As planes of experts' weights; it is let go of when they are read, in a program that is too large for one slab."""
    monkeypatch.setattr("tests.program.fake.SPARE", 0)
    monkeypatch.setitem(joining.READ_WORDS, VARIANT.source, (0,))
    monkeypatch.setattr("opfuse.runtime.replay.program.SMALL", 0)
    weights = [torch.nn.Parameter(torch.randn(70)) for _ in range(5)]
    x, alive = torch.randn(70), [lambda: None]
    recorder = Recorder([x, *weights])
    with torch.no_grad(), recorder.recording():
        planes = [launch("double", weight, room(weight)) for weight in weights]
        y = x + 1
    recorded = ForwardPass(recorder, [y, *planes], OfWeights())
    gone: list[bool] = []
    negate = KERNELS["negate"]
    monkeypatch.setitem(KERNELS, "negate", lambda values: [gone.append(alive[0]() is None), negate(values)][1])
    for turn in range(6):
        call = recorded.call(x, *weights)
        with torch.no_grad():
            call.forward([x])
            saved = call.released()
            count, alive[0] = len(saved), weakref.ref(saved[0])
            dx, *squares = call.gradients({1: x}, iter([saved.pop(0) for _ in range(count)]))
        assert count == (5 if turn < 3 else 1)
        assert torch.equal(dx, -x)
        assert all(torch.equal(square, (2 * weight) ** 2) for square, weight in zip(squares, weights, strict=True))
    assert recorded.interpreter.calls == 2
    assert gone[-3:] == [True] * 3


def test_a_backward_pass_holds_nothing_that_it_has_read():
    recorded = recorded_forward(torch.randn(40))
    for _ in range(5):
        step(recorded, torch.randn(40), torch.randn(40))
    call = recorded.call(*tensors_and_planes([torch.randn(40)]))
    call.forward([])
    saved = call.released()
    alive = [weakref.ref(each) for each in saved]
    grads = {1: torch.randn(40)}
    call.gradients(grads, iter([saved.pop(0) for _ in range(len(saved))]))
    gc.collect()
    assert grads == {}
    assert [each() for each in alive] == [None, None]


def test_one_tensor_is_no_block():
    x = torch.randn(8)
    recorder = Recorder([x])
    with torch.no_grad(), recorder.recording():
        doubled = launch("double", x, room(x))
        y = x + 1
    recorded = ForwardPass(recorder, [y, doubled], Interpreter())
    grad = torch.randn(8)
    recorder = Recorder([grad, doubled])
    with torch.no_grad(), recorder.recording():
        dx = launch("negate", doubled, room(x))
    assert packing_of(recorded, Program(recorder, [recorder.number(dx)])) is None


def test_what_packing_takes_grows_as_the_number_of_saved_tensors(monkeypatch: pytest.MonkeyPatch):
    """As with experts, of which each has tensors of its own: a step is not asked again for each of them."""

    def asked(count: int) -> int:
        x, made = torch.randn(8), list[int]()
        recorder = Recorder([x])
        with torch.no_grad(), recorder.recording():
            planes = [launch("double", x, room(x)) for _ in range(count)]
            y = x + 1
        recorded = ForwardPass(recorder, [y, *planes], Interpreter())
        recorder = Recorder([torch.randn(8), *planes])
        with torch.no_grad(), recorder.recording():
            read = [launch("negate", plane, room(x)) for plane in planes]
        backward = Program(recorder, [recorder.number(each) for each in read])
        with monkeypatch.context() as counting:
            for kind in (OpStep, LaunchStep):
                counting.setattr(kind, "reads", lambda step, reads=kind.reads: [made.append(1), reads(step)][1])
            assert packing_of(recorded, backward) is not None
        return len(made)

    assert asked(64) < 3 * asked(32)


COPY = "copy"


def made_by(entry: str, x: Tensor, out: Tensor) -> Tensor:
    """By a launch, or a copy of memory."""
    return x.clone() if entry == COPY else launch(entry, x, out)


class Drawn:
    """A random forward pass of launches and copies that saves results in any order, and a backward pass that reads them in any
    order. In every second one torch computes nothing.
    """

    places = ()

    def __init__(self, seed: int) -> None:
        self._choose = random.Random(seed)
        entries = [*KERNELS]
        count = self._choose.randint(3, 12)
        self.made = [(self._choose.choice([*entries, ADDS, COPY]), self._choose.randrange(i + 1)) for i in range(count)]
        self.saved = self._choose.sample(range(1, len(self.made) + 1), self._choose.randint(2, len(self.made)))
        order = self._choose.sample(range(len(self.saved)), len(self.saved))
        self.read = [(self._choose.choice([*entries, COPY]), i) for i in order[: self._choose.randint(2, len(order))]]
        self.calls, self._plain = 0, seed % 2

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        values = [x]
        for entry, source in self.made:
            values.append(made_by(entry, values[source], zeros(x) if entry == ADDS else room(x)))
        y = values[-1] + 1 if self._plain else launch("double", values[-1], room(x))
        return y, [values[i] for i in self.saved]

    def gradients(self, grads: dict[int, Tensor | None], saved: Iterator[Tensor]) -> list[Tensor | None]:
        self.calls += 1
        return self.backward(next(iter(grads.values())), list(saved))

    def backward(self, grad: Any, saved: list[Tensor]) -> list[Tensor | None]:
        return [launch("negate", grad, room(grad)), *(made_by(entry, saved[i], room(grad)) for entry, i in self.read)]


@pytest.mark.few
@pytest.mark.parametrize("small", [SMALL, 0], ids=["small", "large"])
@pytest.mark.parametrize("seed", range(40))
def test_random_passes_have_their_values_however_they_are_packed(seed, small, monkeypatch):
    """Interpreted, recorded, repeated and packed: values that a plain run has, in memory that is there when it is read."""
    monkeypatch.setitem(joining.READ_WORDS, VARIANT.source, (0,))
    monkeypatch.setattr("opfuse.runtime.replay.program.SMALL", small)
    drawn = Drawn(seed)
    x = torch.randn(40)
    recorder = Recorder([x])
    with torch.no_grad(), recorder.recording():
        y, saved = drawn.forward(x)
    recorded = ForwardPass(recorder, [y, *saved], drawn)
    for _ in range(7):
        x, grad = torch.rand(40) - 0.5, torch.rand(40) - 0.5
        call = recorded.call(x)
        with torch.no_grad():
            (y,) = call.forward([x])
            kept = call.released()
            found = call.gradients({1: grad}, iter([kept.pop(0) for _ in range(len(kept))]))
        wanted, planes = drawn.forward(x)
        assert all(map(torch.equal, [y, *found], [wanted, *drawn.backward(grad, planes)]))
    assert drawn.calls == 2
