"""Tapes and programs: what one run did, repeated for other values."""

from __future__ import annotations

import math
import struct
import threading
import weakref
from functools import partial
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from opfuse.events import KernelLaunched
from opfuse.kernels.engine import launch as launching
from opfuse.kernels.engine.compiling import Variant
from opfuse.kernels.engine.launch import Grid
from opfuse.runtime.replay.instructions import AddressSlot, LaunchStep, OpStep, ProductStep, Ref, TensorOffset
from opfuse.runtime.replay.launch_args import MANY, Frame, Reader, Readers
from opfuse.runtime.replay.memory_plan import ALIGNMENT, aligned, slab_of
from opfuse.runtime.replay.program import SMALL, Program, Recording, _needed
from opfuse.runtime.replay.recorder import Recorder, Unrecordable, pointers
from tests.program.fake import LAYOUT as PARAMETER
from tests.program.fake import VARIANT, fake_device, floats
from tests.program.fake import launch as launch_kernel

pytestmark = pytest.mark.cpu

EMPTY = torch.ops.aten.empty.memory_format
LAYOUT = struct.Struct("PIPq")


def record(function, *given: Tensor) -> tuple[Recorder, list[Tensor]]:
    recorder = Recorder(given)
    with torch.no_grad(), recorder.recording():
        results = list(function(*given))
    return recorder, results


def program_of(function, *given: Tensor) -> Program:
    recorder, results = record(function, *given)
    assert recorder.refusal == ""
    return Program(recorder, [recorder.number(result) for result in results])


def refusal_of(function, *given: Tensor) -> str:
    return record(function, *given)[0].refusal


def mixed(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Views, in-place ops, results that are views, lists of tensors, several results."""
    y = torch.zeros(4, 3)
    y.add_(x @ w.t())
    left, right = y.split([1, 2], dim=1)
    right.mul_(2.0)
    values, indices = torch.cat([left, right], dim=1).sort(dim=1)
    return y, y[:, 1:], values, indices, x.detach()


def test_a_program_does_for_other_values_what_the_run_did():
    program = program_of(mixed, torch.randn(4, 5), torch.randn(3, 5))
    for _ in range(3):
        x, w = torch.randn(4, 5), torch.randn(3, 5)
        for got, wanted in zip(program([x, w]), mixed(x, w), strict=True):
            assert torch.equal(got, wanted)
            assert (got.stride(), got.dtype) == (wanted.stride(), wanted.dtype)


def test_results_that_are_inputs_are_the_very_tensors():
    program = program_of(lambda x: (x, x + 1), torch.randn(3))
    x = torch.randn(3)
    assert program([x])[0] is x


def test_results_share_memory_as_those_of_the_run_do():
    y, part, *_ = program_of(mixed, torch.randn(4, 5), torch.randn(3, 5))([torch.randn(4, 5), torch.randn(3, 5)])
    part.fill_(7.0)
    assert (y[:, 1:] == 7.0).all()


def test_random_numbers_are_drawn_anew_at_every_call():
    program = program_of(lambda x: (x + torch.rand(3),), torch.zeros(3))
    torch.manual_seed(3)
    wanted = [torch.rand(3) for _ in range(2)]
    torch.manual_seed(3)
    assert all(torch.equal(program([torch.zeros(3)])[0], each) for each in wanted)


def test_an_assertion_is_repeated_though_it_gives_nothing():
    def halves(x: Tensor, sizes: Tensor) -> list[Tensor]:
        torch._assert_async(sizes.sum() == len(x), "sizes add up")
        return [x / 2]

    x = torch.randn(4, 3)
    program = program_of(halves, x, torch.tensor([1, 3]))
    assert torch.equal(program([x, torch.tensor([2, 2])])[0], x / 2)
    with pytest.raises(RuntimeError, match="sizes add up"):
        program([x, torch.tensor([2, 3])])


def test_a_draw_that_nobody_reads_still_moves_the_generator():
    program = program_of(lambda x: (torch.rand(3), x + torch.rand(3))[1:], torch.zeros(3))
    torch.manual_seed(3)
    torch.rand(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(program([torch.zeros(3)])[0], wanted)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: (x * x.sum().item(),), "values decide the result of aten._local_scalar_dense"),
        (lambda x: (x if bool((x > 0).any()) else -x,), "values decide the result"),
        (lambda x: (x[x > 0],), "values decide the result of aten.index"),
        (lambda x: (x.nonzero(),), "values decide the result of aten.nonzero"),
        (lambda x: (x + ELSEWHERE,), "came from elsewhere"),
        (lambda x: (x + torch._fused_sdp_choice(*[x.view(1, 1, 2, 2)] * 3),), "returns more than tensors"),
    ],
)
def test_what_no_program_can_repeat_ends_the_recording_and_not_the_run(function, why):
    x = torch.randn(4, generator=torch.Generator().manual_seed(0))
    recorder, (got,) = record(function, x)
    assert why in recorder.refusal
    assert torch.equal(got, function(x)[0])
    assert recorder.steps == recorder.tensors == []


ELSEWHERE = torch.ones(4)


def test_tensors_without_elements_are_repeated():
    """As groups without rows have them: views that lie nowhere, and results."""

    def run(x):
        first, none, rest = x.split((2, 0, 2))
        return [first + 1, none * 2, torch.cat([none, rest * 3]), x[4:].t() + none.sum()]

    x = torch.randn(4, 3)
    program = program_of(run, torch.randn(4, 3))
    assert all(map(torch.equal, program([x]), run(x)))
    assert program([torch.randn(4, 3)])[3].shape == (3, 0)


def test_two_inputs_in_one_memory_are_refused_but_one_may_come_twice():
    x = torch.randn(4, 4)
    assert "share memory" in refusal_of(lambda a, b: (a + b,), x, x[0])
    program = program_of(lambda a, b: (a * b,), x, x)
    y = torch.randn(4, 4)
    assert torch.equal(program([y, y])[0], y * y)


def test_a_recorded_run_holds_nothing_and_its_memory_is_used_again():
    """As much memory as any other run takes, in which an address is that of one tensor after the other."""
    stores = []

    def run(x: Tensor) -> list[Tensor]:
        y = x
        for factor in range(2, 12):
            z = y * factor
            y = z[1:].clone()
            stores.append(StorageWeakRef(z.untyped_storage()))
        return [y, y.view(2, -1)]

    x = torch.randn(4106)
    program = program_of(run, x)
    assert all(store.expired() for store in stores)
    other = torch.randn(4106)
    assert all(map(torch.equal, program([other]), run(other)))


@pytest.mark.parametrize("first", [0, 250], ids=["there", "within"])
@pytest.mark.parametrize(
    "read", [lambda x: x + 1, lambda x: x[1:] + 1, lambda x: launch_kernel("double", x, torch.empty(x.shape))]
)
def test_what_lies_where_a_tensor_of_the_run_lay_is_not_that_tensor(read, first):
    """Tensors over memory of the test's own, of which the first is gone when the second is made."""
    memory = bytearray(4000)
    came_in = torch.frombuffer(memory, dtype=torch.float32)
    recorder = Recorder([came_in])
    del came_in
    with torch.no_grad(), recorder.recording():
        read(torch.frombuffer(memory, dtype=torch.float32, offset=4 * first))
    assert "came from elsewhere" in recorder.refusal


def test_a_tensor_without_elements_is_no_place(monkeypatch):
    """As a group without rows is none, though it may be the first that is seen of a storage."""

    def run(nothing: Tensor, x: Tensor) -> list[Tensor]:
        return [launch_kernel("double", x, torch.empty(8)), nothing + 1]

    with fake_device(monkeypatch):
        x, other = torch.randn(8), torch.randn(8)
        program = program_of(run, x[:0], x)
        assert all(map(torch.equal, program([other[:0], other]), run(other[:0], other)))


def test_a_tensor_may_lie_over_where_others_lay(monkeypatch):
    """Of three that the host gives one after the other, of which the last begins before the others and reaches behind them."""
    memory = torch.arange(1000.0)

    def given(first: int, last: int) -> list[Tensor]:
        return [torch.frombuffer(memory[first:last].numpy(), dtype=torch.float32)]

    def run(x: Tensor) -> list[Tensor]:
        results = []
        for first, last in (250, 400), (500, 700), (0, 1000):
            (part,) = launching.host_call(partial(given, first, last))
            results += [part + x, launch_kernel("double", part[-20:], torch.empty(20))]
        return results

    x = torch.ones(1)
    with fake_device(monkeypatch):
        program = program_of(run, x)
        memory.mul_(-1)
        assert all(map(torch.equal, program([x]), run(x)))


def test_a_function_of_the_host_is_called_at_its_place_in_every_run():
    state = {"scale": torch.tensor([2.0])}
    x = torch.ones(2)
    recorder = Recorder([x])

    def live() -> list[Tensor]:
        state["calls"] = state.get("calls", 0) + 1
        return [state["scale"]]

    with recorder.recording():
        launching.host_call(live)
        result = x * state["scale"]
    program = Program(recorder, [recorder.number(result)])
    state["scale"] = torch.tensor([5.0])
    assert program([torch.ones(2)])[0].tolist() == [5.0, 5.0]
    assert state["calls"] == 2


def test_a_function_of_the_host_that_fails_is_no_step_and_ends():
    x = torch.ones(2)
    recorder = Recorder([x])

    def fail() -> list[Tensor]:
        torch.ones(3)  # a tensor from elsewhere, which the recorder must not see
        raise ValueError("no numbers")

    with recorder.recording():
        with pytest.raises(ValueError, match="no numbers"):
            launching.host_call(fail)
        x + 1
    assert recorder.refusal == ""
    assert len(recorder.steps) == 1


class Live:
    """A function of the host that may be called with others; all are told of in ``log``."""

    log: ClassVar[list[str]] = []

    def __init__(self, name: str, value: float) -> None:
        self.name, self.tensors = name, [torch.tensor([value])]

    def __call__(self) -> list[Tensor]:
        self.log.append(self.name)
        return self.tensors

    def together(self, others: list[Live]) -> Live:
        joined = Live(self.name + "".join(each.name for each in others), 0)
        joined.tensors = [tensor for each in (self, *others) for tensor in each.tensors]
        return joined


@pytest.mark.parametrize(("names", "wanted"), [("ab", 11.0), ("abc", 26.0)])
def test_functions_of_the_host_that_can_be_called_as_one_are(names, wanted):
    x, lives = torch.ones(2), [Live(name, value) for value, name in enumerate(names, 2)]
    recorder = Recorder([x])
    with recorder.recording():
        for live in lives:
            launching.host_call(live)
            x = 2 * x + live.tensors[0]
    program = Program(recorder, [recorder.number(x)])
    Live.log.clear()
    assert program([torch.ones(2)])[0].tolist() == [wanted, wanted]
    assert Live.log == [names]


def test_what_came_in_is_let_go_after_its_last_reader():
    """Whoever hands tensors over and keeps none pays for none that is not read any more."""
    alive = []
    x, y, unread = (torch.ones(2) for _ in range(3))
    recorder = Recorder([x, y, unread])

    def look() -> list[Tensor]:
        alive.append([made() is not None for made in handed])
        return [PLACE]

    handed = [weakref.ref(each) for each in (x, y, unread)]
    with recorder.recording():
        sums = x + 1
        launching.host_call(look)
        result = sums * y + PLACE
    program = Program(recorder, [recorder.number(result)])
    del recorder, x
    given = [torch.ones(2) for _ in range(3)]
    handed = [weakref.ref(each) for each in given]
    program(given)
    assert given == []
    assert alive[-1] == [False, True, False]
    assert handed[1]() is None


PLACE = torch.zeros(2)


def test_a_view_that_shows_what_came_in_is_a_step_only_if_it_goes_out():
    def run(x: Tensor) -> list[Tensor]:
        return [(x.view(2, 2).view(2, 2) + 1).sum(0), x.view(2, 2)]

    x = torch.ones(2, 2)
    recorder, results = record(run, x)
    program = Program(recorder, [recorder.number(each) for each in results])
    views = [step for step in program.recording.steps if step.op.is_view]
    assert [recorder.number(results[1])] == [number for step in views for number in step.results]
    got, out = program([x])
    assert got.tolist() == [4.0, 4.0]
    assert out is not x


def test_a_view_that_shows_what_is_known_is_no_step():
    recorder, (y,) = record(lambda x: [(x + 1).t().view(4)], torch.ones(4))
    assert [step.op for step in recorder.steps] == [torch.ops.aten.add.Tensor]
    assert recorder.number(y) == 1
    came_in = record(lambda x: [x.view(4)], torch.ones(4))[0]
    assert [step.op for step in came_in.steps] == [torch.ops.aten.view.default]  # a view of what comes in is another tensor


def test_a_program_is_a_function_that_one_can_read():
    program = program_of(lambda x, w: [torch.nn.functional.pad((x @ w.t()).sort(dim=1).values, (1, 0), value=-math.inf)], *PAIR)
    assert program.text.splitlines() == [
        "def run(given, frame, stream):",
        "    t0, t1, = given",
        "    given.clear()",
        "    t2 = c0(t1)",
        "    del t1",
        "    t3 = c1(t0, t2)",
        "    del t0, t2",
        "    t4, t5, = c2(t3, 1)",
        "    del t3, t5",
        "    t6 = c3(t4, [1, 0], c4)",
        "    del t4",
        "    return [t6]",
    ]


PAIR = torch.randn(4, 5), torch.randn(3, 5)


# -- launches, whose parameters are looked at without a device ---------------------------------------------------------------


def launch(recorder: Recorder, *fields: int) -> None:
    recorder.launched(KernelLaunched(Variant("none.cu"), "none", Grid(1, 32), LAYOUT, fields, 0))


def test_addresses_become_places_and_the_rest_of_a_parameter_stays():
    x = torch.randn(8)
    recorder = Recorder([x])
    with recorder.recording():
        y = torch.empty(4)
        launch(recorder, x[2:].data_ptr(), 7, y.data_ptr(), 9)
    (step,) = [step for step in recorder.steps if isinstance(step, LaunchStep)]
    assert step.slots == (AddressSlot(0, TensorOffset(0, 8)), AddressSlot(2, TensorOffset(recorder.number(y), 0)))
    assert LAYOUT.unpack(step.parameter) == (0, 7, 0, 9)


def test_an_address_of_nowhere_is_refused():
    recorder = Recorder([torch.randn(8)])
    launch(recorder, ELSEWHERE.data_ptr(), 7, 0, 9)
    assert "address of a tensor that came from elsewhere" in recorder.refusal


@pytest.mark.parametrize(
    ("layout", "found"),
    [
        ("PPq", ((0, 0), (1, 1))),
        ("PIP", ((0, 0), (2, 2))),
        ("3PfI2q", ((0, 0), (1, 1), (2, 2))),
        ("IPqq", ((1, 1),)),
        ("PPPqPqqfIII", ((0, 0), (1, 1), (2, 2), (4, 4))),
        ("2P2qIf0qP0q", ((0, 0), (1, 1), (6, 5))),
        ("PI0qIP", ((0, 0), (3, 3))),
    ],
)
def test_where_the_addresses_of_a_parameter_stand(layout, found):
    assert pointers(layout) == found
    fields = [0] * len(struct.unpack(layout, bytes(struct.calcsize(layout))))
    for index, word in found:
        packed = struct.pack(layout, *[1 if i == index else 0 for i in range(len(fields))])
        assert struct.unpack_from("Q", packed, 8 * word) == (1,)


def test_a_frame_writes_an_address_for_all_who_read_it():
    readers = {0: Readers([Reader(0, 1, 4), Reader(1, 0, 0)], []), 1: Readers([Reader(0, 0, 0)], [])}
    frame = Frame([b"\1" * 12, b"\2" * 8], [], readers)
    frame.move(0, 100)
    assert bytes(frame.words) == b"\1" * 8 + struct.pack("QQ", 104, 100)
    assert frame.at == [100, 0]


def test_a_frame_writes_an_address_that_many_read():
    """More places than a loop fills, beside one that is another's."""
    many = 3 * MANY
    readers = {0: Readers([Reader(0, i, 8 * i) for i in range(many)], []), 1: Readers([Reader(0, many, 0)], [])}
    frame = Frame([bytes(8 * many) + b"\2" * 8], [], readers)
    for address in (100, (1 << 63) + 8):
        frame.move(0, address)
        assert struct.unpack(f"{many}Q8s", bytes(frame.words)) == (*range(address, address + 8 * many, 8), b"\2" * 8)


# -- memory ------------------------------------------------------------------------------------------------------------------


WORKSPACE = 2 * ALIGNMENT


class Scribbling:
    """A product that is twice its left operand, and leaves its workspace full of other numbers."""

    def __init__(self, form):
        self.addresses = [0] * 6

    def __call__(self, stream):
        left, *_, out, workspace = self.addresses
        floats(workspace, WORKSPACE // 4)[:] = 1 / 3
        floats(out, 64)[:] = 2 * floats(left, 64)


def test_the_workspace_of_products_is_nobody_elses(monkeypatch):
    """Neither what is zero nor what another step reads later lies there."""
    options = {"dtype": torch.float32, "device": torch.device("cpu")}
    zeros = OpStep(torch.ops.aten.zeros.default, ([64],), options, (1,), single=True)
    rooms = [OpStep(EMPTY, ([64],), options, (number,), single=True) for number in range(2, 6)]

    def launched(entry: str, read: int, written: int) -> LaunchStep:
        slots = (AddressSlot(0, TensorOffset(read, 0)), AddressSlot(1, TensorOffset(written, 0)))
        return LaunchStep(VARIANT, entry, Grid(1, 32), 0, PARAMETER.pack(0, 0, 64), slots)

    operands = {"left": 2, "right": 1, "left_scale": 1, "right_scale": 1, "out": 3}
    product = ProductStep(SimpleNamespace(device=0), {name: TensorOffset(n, 0) for name, n in operands.items()}, WORKSPACE)
    steps = (zeros, *rooms, launched("double", 0, 2), product, launched("negate", 1, 4), launched("negate", 2, 5))
    monkeypatch.setattr("opfuse.runtime.replay.launch_args.Product", Scribbling)
    with fake_device(monkeypatch):
        program = Program.of(Recording(steps, (0,), (3, 4, 5), 0, {1: 256, 2: 256}, frozenset()))
        for _ in range(2):
            x = torch.randn(64)
            assert all(map(torch.equal, program([x]), [4 * x, torch.zeros(64), -2 * x]))


def room(number: int) -> OpStep:
    return OpStep(EMPTY, ([4],), {}, (number,), single=True)


def reading(*numbers: int) -> LaunchStep:
    slots = tuple(AddressSlot(i, TensorOffset(number, 0)) for i, number in enumerate(numbers))
    return LaunchStep(Variant("none.cu"), "none", Grid(1, 32), 0, bytes(8 * len(numbers)), slots)


def test_a_slab_places_by_lifetimes_and_leaves_out_what_is_read_as_a_tensor_or_outlives_it():
    steps = [room(0), room(1), reading(0, 1), room(2), reading(1, 2), room(3), room(4), room(5), reading(3, 4, 5)]
    steps.append(OpStep(torch.ops.aten.add.Tensor, (Ref(4), 1), {}, (6,), single=True))
    sizes = dict.fromkeys(range(6), 300)
    slab = slab_of(steps, sizes, EMPTY, results={5}, reserved=10)
    assert set(slab.offsets) == {0, 1, 2, 3}
    assert all(offset % ALIGNMENT == 0 and offset >= ALIGNMENT for offset in slab.offsets.values())
    assert slab.offsets[0] != slab.offsets[1] != slab.offsets[2]
    assert slab.offsets[2] == slab.offsets[0] == slab.offsets[3]  # which are dead by then
    assert slab.size == ALIGNMENT + 2 * 2 * ALIGNMENT
    apart = slab_of(steps, sizes, EMPTY, results={5}, reuses=False)
    assert len(set(apart.offsets.values())) == 4


@pytest.mark.parametrize("seed", range(30))
def test_tensors_that_are_alive_together_never_overlap_in_a_slab(seed):
    """Each lies at the first place where nothing lies that is still read."""
    choose = torch.Generator().manual_seed(seed)
    steps, sizes, made = [], {}, 0
    for _ in range(40):
        if made < 2 or torch.rand(1, generator=choose) < 0.5:
            sizes[made] = int(torch.randint(1, 5000, (1,), generator=choose))
            steps.append(room(made))
            made += 1
        else:
            steps.append(reading(*torch.randint(0, made, (2,), generator=choose).tolist()))
    slab = slab_of(steps, sizes, EMPTY, results=())
    first = {step.results[0]: i for i, step in enumerate(steps) if isinstance(step, OpStep)}
    last = {n: max([i for i, step in enumerate(steps) if n in step.reads()], default=first[n]) for n in first}
    for a, begins in first.items():
        for b in range(a):
            apart = slab.offsets[a] + sizes[a] <= slab.offsets[b] or slab.offsets[b] + sizes[b] <= slab.offsets[a]
            assert apart or begins > last[b], (a, b)
        alive = [b for b in range(a) if last[b] >= begins]
        before = range(0, slab.offsets[a], ALIGNMENT)
        assert all(any(_overlap(at, sizes[a], slab.offsets[b], sizes[b]) for b in alive) for at in before)
    assert slab.size == max(offset + aligned(sizes[n]) for n, offset in slab.offsets.items())


def _overlap(start: int, size: int, other: int, of_other: int) -> bool:
    """Whether two pieces share a part of a place."""
    return start < other + aligned(of_other) and other < start + aligned(size)


@pytest.mark.unrun
def test_large_memory_lies_outside_of_the_slab(monkeypatch):
    """It would be there from the first step to the last, which a program for a CUDA graph accepts."""
    x = torch.ones(8)
    for size, spare, inside in ((SMALL, -1, True), (SMALL + 1, -1, False), (SMALL + 1, ALIGNMENT, True)):
        recorder = Recorder([x])
        with recorder.recording():
            room = torch.empty(size, dtype=torch.uint8)
            launch(recorder, x.data_ptr(), 7, room.data_ptr(), 9)
        with monkeypatch.context() as patched:  # a launch that is never made: its kernel is not loaded
            patched.setattr(launching, "loaded", lambda *_: launching.Loaded(None, 0))
            patched.setattr("opfuse.runtime.replay.codegen.driver", lambda: SimpleNamespace(launchKernel=None))
            patched.setattr("opfuse.runtime.replay.program._size_on", lambda tensor, _: tensor.size)
            patched.setattr("opfuse.runtime.replay.program.spare_bytes", Mock(return_value=spare))
            program = Program(recorder, [])
        assert (recorder.number(room) in program.slab.offsets) == inside
        assert ("slab" in program.text) == inside


def test_memory_that_a_graph_would_hold_longer_is_counted(monkeypatch):
    """``x`` could go before the last result is made; ``inside`` before, too, in whose place another lies then."""

    def passes(x: Tensor) -> list[Tensor]:
        inside = launch_kernel("double", x, torch.empty(SMALL, dtype=torch.float32))
        first = launch_kernel("negate", inside, torch.empty(SMALL, dtype=torch.float32))
        other = launch_kernel("double", first, torch.empty(SMALL, dtype=torch.float32))
        return [first, launch_kernel("negate", other, torch.empty(SMALL, dtype=torch.float32))]

    nbytes, made = 4 * SMALL, []
    for spare in (nbytes - 1, nbytes):
        monkeypatch.setattr("tests.program.fake.SPARE", spare)
        with fake_device(monkeypatch):
            made.append("queue(" in program_of(passes, torch.randn(SMALL)).text)
    assert made == [False, True]


def test_steps_that_nobody_needs_are_left_out():
    steps = [room(0), OpStep(torch.ops.aten.t.default, (Ref(0),), {}, (1,), single=True), reading(0)]
    assert _needed(steps, ()) == [steps[0], steps[2]]
    written = OpStep(torch.ops.aten.add_.Tensor, (Ref(1), 1), {}, (1,), single=True)
    assert _needed([*steps[:2], written], ()) == [*steps[:2], written]


def test_threads_run_one_program_at_the_same_time():
    program = program_of(mixed, torch.randn(4, 5), torch.randn(3, 5))
    wrong = []

    def loop(seed: int) -> None:
        choose = torch.Generator().manual_seed(seed)
        for _ in range(100):
            x, w = torch.randn(4, 5, generator=choose), torch.randn(3, 5, generator=choose)
            wrong.extend(1 for got, wanted in zip(program([x, w]), mixed(x, w)) if not torch.equal(got, wanted))

    threads = [threading.Thread(target=loop, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_view_that_no_op_made_is_made_by_the_program():
    x, other = torch.randn(4, 4), torch.randn(4, 4)
    recorder, (y,) = record(lambda x: [2 * x], x)
    number = recorder.number(y.as_strided((2, 2), (8, 2), 1))
    assert torch.equal(Program(recorder, [number])([other])[0], (2 * other).as_strided((2, 2), (8, 2), 1))
    with pytest.raises(Unrecordable, match="elsewhere"):
        recorder.number(ELSEWHERE)


def test_a_place_in_the_storage_of_what_comes_in_is_not_repeated():
    """The next call's tensor may begin elsewhere in its storage; torch counts offsets from the beginning."""
    x, later = torch.randn(4, 4), torch.randn(2, 4, 4)[1]
    assert "comes in" in refusal_of(lambda x: [x.as_strided((2, 2), (8, 2), 1)], x)
    recorder = Recorder([x])
    with pytest.raises(Unrecordable, match="comes in"):
        recorder.number(x.as_strided((2, 2), (8, 2), 1))
    program = program_of(lambda x: [x.as_strided((2, 2), (8, 2))], x)
    assert torch.equal(program([later])[0], later.as_strided((2, 2), (8, 2)))


def test_arguments_of_an_op_have_the_names_of_its_schema():
    op = torch.ops.aten._scaled_mm_v2.default
    positional = [Ref(0), Ref(1), [Ref(2)], [0], [], [Ref(3)], [1], []]
    step = OpStep(op, tuple(positional), {"use_fast_accum": True, "out_dtype": torch.bfloat16}, (4,), single=True)
    given = step.by_name()
    assert [*given] == [argument.name for argument in op._schema.arguments]
    assert (given["mat2"], given["scale_b"], given["recipe_b"]) == (Ref(1), [Ref(3)], [1])
    assert (given["bias"], given["use_fast_accum"], given["out_dtype"]) == (None, True, torch.bfloat16)
