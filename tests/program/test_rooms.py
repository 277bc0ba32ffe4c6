"""Large memory of one stretch of a program is one allocation: same values, and at no step more of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from opfuse.kernels.engine import joining
from opfuse.runtime.replay.instructions import AddressSlot, CopyStep, LaunchStep, OpStep, Ref, Step, TensorOffset
from opfuse.runtime.replay.memory_plan import ALIGNMENT, largest_alive, last_reads, shared_rooms, with_rooms
from opfuse.runtime.replay.program import Program
from opfuse.runtime.replay.recorder import Recorder
from tests.program.fake import VARIANT, fake_device, launch
from tests.program.test_program import EMPTY, reading, room

pytestmark = pytest.mark.cpu

SIZE = 3 * ALIGNMENT


def joined(steps: Sequence[Step], results: Sequence[int] = (), lasting: Sequence[int] = ()) -> list[Step]:
    large = {n: SIZE for step in steps if isinstance(step, OpStep) for n in step.results if n not in lasting}
    return shared_rooms(steps, EMPTY, large, {*lasting, *results}, results)


def rooms(steps: Sequence[Step]) -> list[int]:
    """Bytes of each; 0 of those that were not joined."""
    return [step.args[0][0] if "dtype" in step.kwargs else 0 for step in steps if isinstance(step, OpStep) and step.op is EMPTY]


def test_a_part_of_a_tensor_stays_so_many_bytes_behind_its_begin():
    """In a room, in which the tensor lies behind another."""
    part = TensorOffset(1, 64)
    launch = replace(reading(1), slots=(AddressSlot(0, part),))
    *_, launch, copy = with_rooms(
        [room(0), room(1), launch, CopyStep(part, TensorOffset(0, 32), 8)], {7: [0, 1]}, {0: SIZE, 1: SIZE}
    )
    assert isinstance(launch, LaunchStep)
    assert isinstance(copy, CopyStep)
    assert [slot.place for slot in launch.slots] == [copy.source] == [TensorOffset(7, SIZE + 64)]
    assert copy.target == TensorOffset(7, 32)


@pytest.mark.parametrize(
    ("steps", "most"),
    [
        ([], 16),
        ([reading(9)], 16),
        ([room(0), reading(9, 0), room(1), reading(0, 1)], 17),
        ([reading(9), room(0), room(1), reading(0, 1)], 16),
        ([reading(9), room(0), room(2), reading(0, 2), room(4), reading(2, 4)], 20),
        ([reading(9), room(0), reading(0), room(2), reading(2), room(3), reading(3)], 16),
        ([reading(9, 9), room(3), room(4)], 16),
        ([reading(9), room(4), room(3), reading(4), room(2)], 24),
        ([reading(9), room(4), reading(4, 4, 4), room(3), reading(3), room(8)], 128),
    ],
)
def test_the_most_that_is_alive_at_one_step(steps, most):
    """Of rooms of 1, 2, 4, 8 and 16 bytes that go when they are read last, or at once if nobody reads them; 8 goes out."""
    sizes = {0: 1, 1: 2, 2: 4, 3: 8, 4: 16, 8: 128, 9: 16}
    assert largest_alive(steps, sizes, [9], [8]) == most


def test_what_one_step_reads_last_is_one_room():
    steps = [room(0), room(1), reading(9, 0), reading(9, 1), room(2), reading(9, 2), reading(0, 1, 2, 9)]
    made = joined(steps)
    assert rooms(made) == [3 * SIZE]
    *casts, product = (step for step in made if isinstance(step, LaunchStep))
    places = [cast.slots[1].place for cast in casts]
    assert [place.offset for place in places] == [0, SIZE, 2 * SIZE]
    assert [slot.place for slot in product.slots[:3]] == places
    assert len({place.number for place in places} - set(range(10))) == 1


@pytest.mark.parametrize(
    ("between", "last", "wanted"),
    [
        ([reading(8)], (0, 1), [0, 0]),  # what came in is let go of
        ([reading(6)], (0, 1), [2 * SIZE]),  # which is held by others
        ([room(5), reading(5)], (0, 1), [0, 0, 0]),  # so is what lay between
        ([room(7), reading(7)], (0, 1), [2 * SIZE, 0]),  # which lets go of nothing in a slab
        ([OpStep(torch.ops.aten.add.Tensor, (Ref(0), 1), {}, (6,), single=True), reading(6)], (0, 1), [0, 0]),  # torch reads it
        ([], (0,), [0, 0]),  # which lives longer
        ([], (0, 3), [0, 0]),  # which goes out
    ],
)
def test_what_has_another_life_has_memory_of_its_own(between, last, wanted):
    second = last[-1] if last != (0,) else 1
    steps = [room(0), *between, room(second), reading(*last), reading(second)][: None if last == (0,) else -1]
    assert rooms(joined(steps, results=[3], lasting=[6, 7])) == wanted


def alive(steps: Sequence[Step], sizes: dict[int, int], results: Sequence[int]) -> list[int]:
    """Bytes at each launch."""
    last, held, found = last_reads(steps), dict[int, int](), list[int]()
    for i, step in enumerate(steps):
        if isinstance(step, OpStep):
            (number,) = step.results
            held[number] = sizes.get(number) or step.args[0][0]
        else:
            found.append(sum(held.values()))
        held = {n: size for n, size in held.items() if n in results or last.get(n, i) > i}
    return found


@pytest.mark.parametrize("seed", range(30))
def test_at_no_step_more_is_alive_than_with_memory_of_their_own(seed):
    choose = torch.Generator().manual_seed(seed)
    steps, made = [room(0)], 1
    for _ in range(40):
        if torch.rand(1, generator=choose) < 0.5:
            steps.append(room(made))
            made += 1
        else:
            steps.append(reading(*torch.randint(max(0, made - 4), made, (3,), generator=choose).tolist()))
    results, sizes = [made - 1], dict.fromkeys(range(made), SIZE)
    after = joined(steps, results)
    assert max(alive(after, sizes, results), default=0) <= max(alive(steps, sizes, results), default=0)
    written = [{(slot.place.number, slot.place.offset) for slot in step.slots} for step in after if isinstance(step, LaunchStep)]
    before = [{slot.place.number for slot in step.slots} for step in steps if isinstance(step, LaunchStep)]
    assert [*map(len, written)] == [*map(len, before)]


def test_casts_of_groups_make_their_room_at_once(monkeypatch):
    """Read and written at the places where they would be alone, at every call."""

    def cast_and_multiply(*weights: torch.Tensor) -> list[torch.Tensor]:
        planes = [launch("double", weight, torch.empty(70, dtype=torch.float32, device="cpu")) for weight in weights]
        return [launch("square", plane, torch.empty(70, dtype=torch.float32, device="cpu")) for plane in planes]

    monkeypatch.setitem(joining.READ_WORDS, VARIANT.source, (0,))
    monkeypatch.setattr("opfuse.runtime.replay.program.SMALL", 0)
    with fake_device(monkeypatch):
        recorder = Recorder(weights := [torch.randn(70) for _ in range(5)])
        with torch.no_grad(), recorder.recording():
            results = cast_and_multiply(*weights)
        program = Program(recorder, [recorder.number(each) for each in results])
        assert program.text.count("empty(") == 1 + 5
        for _ in range(3):
            values = [torch.randn(70) for _ in range(5)]
            assert all(map(torch.equal, program([*values]), [(2 * value) ** 2 for value in values]))
