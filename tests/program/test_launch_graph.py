"""What a program queues becomes a CUDA graph where its addresses come again, and only there."""

from __future__ import annotations

import gc
import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from opfuse.runtime.replay import launch_graph
from opfuse.runtime.replay.program import SMALL, Program
from opfuse.runtime.replay.recorder import Recorder
from tests.program.fake import CAPTURING, SPARE, FakeCuda, fake_device, launch

pytestmark = [pytest.mark.cpu, pytest.mark.row("R16")]

COUNT = 64


def room(count: int = COUNT) -> Tensor:
    return torch.empty(count, dtype=torch.float32, device="cpu")


def minus_double(x: Tensor, out: Tensor) -> Tensor:
    """``-2 * x`` by two kernels, in memory of the caller, so that addresses are the test's."""
    return launch("negate", launch("double", x, room()), out)


@contextmanager
def recorded(patch: pytest.MonkeyPatch, function=minus_double, given=None) -> Iterator[tuple[Program, FakeCuda]]:
    """A program over a slab that has one address, on a device that counts graphs."""
    given = [torch.randn(COUNT), room()] if given is None else given
    slab = torch.empty(SPARE >> 4, dtype=torch.uint8)
    with fake_device(patch) as cuda:
        recorder = Recorder(given)
        with torch.no_grad(), recorder.recording():
            result = function(*given)
        program = Program(recorder, [recorder.number(result)])
        program.constants["empty"] = lambda shape, strides, dtype: slab[: shape[0]]  # type: ignore[index]
        yield program, cuda


@pytest.fixture
def at_once(monkeypatch):
    """Graphs wait for no other."""
    monkeypatch.setattr(launch_graph, "CALLS", 0)


def test_addresses_that_come_for_the_third_time_are_a_graph(monkeypatch):
    x, out = torch.randn(COUNT), room()
    with recorded(monkeypatch) as (program, cuda):
        for turn in range(6):
            x.copy_(torch.randn(COUNT))  # a graph reads what lies there now
            (result,) = program([x, out])
            assert result is out
            assert torch.equal(result, -2 * x)
            assert cuda.captures == program.graphs == (turn >= 1)
            assert cuda.replays == max(turn - 1, 0)


def test_other_addresses_are_queued_one_by_one(at_once, monkeypatch):
    pairs = [(torch.randn(COUNT), room()) for _ in range(12)]
    with recorded(monkeypatch) as (program, cuda):
        for x, out in pairs:
            assert torch.equal(program([x, out])[0], -2 * x)
        assert (cuda.captures, cuda.replays) == (0, 0)
        for _ in range(4):
            for x, out in pairs[: launch_graph.KEPT]:
                x.neg_()
                assert torch.equal(program([x, out])[0], -2 * x)
        assert cuda.captures == launch_graph.KEPT
        assert cuda.replays == 2 * launch_graph.KEPT


def test_the_oldest_graph_goes_first_and_is_never_launched_again(at_once, monkeypatch):
    pairs = [(torch.randn(COUNT), room()) for _ in range(launch_graph.KEPT + 1)]
    with recorded(monkeypatch) as (program, cuda):
        for x, out in [pair for pair in pairs for _ in range(3)]:
            assert torch.equal(program([x, out])[0], -2 * x)
        assert (cuda.captures, cuda.replays) == (len(pairs), len(pairs))
        assert cuda.destroyed == 1
        for x, out in reversed(pairs):
            x.neg_()
            assert torch.equal(program([x, out])[0], -2 * x)
        assert cuda.replays == 2 * len(pairs) - 1
    del program
    gc.collect()
    assert cuda.destroyed == cuda.captures == len(pairs) + 1


def test_graphs_are_made_no_more_often_than_they_pay(monkeypatch):
    """Addresses that come in turns, more than there are graphs: each would be captured at each call."""
    pairs = [(torch.randn(COUNT), room()) for _ in range(launch_graph.KEPT + 2)]
    with recorded(monkeypatch) as (program, cuda):
        for _ in range(40):
            for x, out in pairs:
                assert torch.equal(program([x, out])[0], -2 * x)
        calls = 40 * len(pairs)
        assert launch_graph.KEPT < cuda.captures <= launch_graph.KEPT + calls / launch_graph.CALLS


def test_where_no_graph_can_be_made_launches_are_queued_one_by_one(caplog, monkeypatch):
    def refuse(self: FakeCuda, stream: int, mode: int) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(FakeCuda, "streamBeginCapture", refuse)
    x, out = torch.randn(COUNT), room()
    with recorded(monkeypatch) as (program, cuda), caplog.at_level(logging.INFO, logger="opfuse.programs"):
        for _ in range(5):
            assert torch.equal(program([x, out])[0], -2 * x)
        assert (cuda.captures, cuda.replays) == (0, 0)
    assert caplog.messages == ["queued one by one at every call, since no CUDA graph could be made: out of memory"]


def test_a_result_that_somebody_has_is_not_overwritten(monkeypatch):
    """The next call makes its result elsewhere, so its addresses are others."""

    def doubled(x: Tensor) -> Tensor:
        return launch("double", x, room())

    x = torch.randn(COUNT)
    with fake_device(monkeypatch):
        recorder = Recorder([x])
        with torch.no_grad(), recorder.recording():
            result = doubled(x)
        program = Program(recorder, [recorder.number(result)])
        held = [program([x.copy_(torch.full((COUNT,), float(turn)))])[0] for turn in range(12)]
        assert [each[0].item() for each in held] == [2.0 * turn for turn in range(12)]


@pytest.mark.parametrize("fails", ["streamBeginCapture", "launchKernel", "graphInstantiate"])
def test_what_is_captured_is_let_go_of_whatever_fails(fails, monkeypatch):
    """It is tried once."""
    x, out = torch.randn(COUNT), room()
    with recorded(monkeypatch) as (program, cuda):
        works, tried = getattr(cuda, fails), Mock(side_effect=RuntimeError)
        failing = tried if fails != "launchKernel" else lambda *args: (tried if args[-3] == CAPTURING else works)(*args)
        monkeypatch.setattr(cuda, fails, failing)
        program.constants["launch"] = cuda.launchKernel  # type: ignore[index]
        for _ in range(40):
            assert torch.equal(program([x, out])[0], -2 * x)
        assert (tried.call_count, cuda.left, cuda.replays) == (1, 0, 0)


def test_addresses_are_remembered_from_the_last_time_they_came(monkeypatch):
    """The oldest that are forgotten are those that did not come for longest."""
    pairs = [(torch.randn(COUNT), room()) for _ in range(launch_graph.SEEN + 1)]
    with recorded(monkeypatch) as (program, cuda):
        with monkeypatch.context() as patch:
            patch.setattr(program._frames[0].queue, "_capture", lambda addresses: None)
            for x, out in [*pairs[:-1], pairs[0], pairs[-1]]:
                program([x, out])
        for pair in (pairs[0], pairs[1]):
            program([*pair])
            assert cuda.captures == 1


def test_two_calls_at_the_same_time_have_graphs_of_their_own(monkeypatch):
    """A graph has the parameters that its frame had: another frame has others."""
    x, out = torch.randn(COUNT), room()
    with recorded(monkeypatch) as (program, cuda):
        (frame,) = program._frames
        for _ in range(3):
            program([x, out])
        program._frames.clear()  # as while another call has it
        for _ in range(3):
            program([x, out])
        assert cuda.captures == 2
        assert program._frames[0] is not frame


def test_inside_of_a_capture_launches_are_queued_one_by_one(at_once, monkeypatch):
    x, out = torch.randn(COUNT), room()
    with recorded(monkeypatch) as (program, cuda):
        for _ in range(3):
            program([x, out])
        assert cuda.replays == 1
        monkeypatch.setattr(launch_graph, "is_capturing", lambda: True)
        for _ in range(3):
            program([x, out])
            assert torch.equal(out, -2 * x)
        assert (cuda.captures, cuda.replays) == (1, 1)
        other = room()
        for _ in range(3):
            program([x, other])
        assert cuda.captures == 1


@pytest.mark.parametrize("spare", [SPARE, -1], ids=["graph", "one by one"])
def test_copies_of_memory_go_by_addresses(spare, monkeypatch):
    """Of a tensor of the caller, of a part of one, and of one that lies in the slab behind another."""

    def kept(x: Tensor, out: Tensor) -> list[Tensor]:
        launch("double", x, out)
        first = launch("negate", x, room())
        inside = launch("square", x, room())
        return [out.clone(), out[8:24].clone(), inside.clone(), launch("negate", first, room())]

    monkeypatch.setattr("tests.program.fake.SPARE", spare)
    x, out = torch.randn(COUNT), room()
    with fake_device(monkeypatch) as cuda:
        recorder = Recorder([x, out])
        with torch.no_grad(), recorder.recording():
            results = kept(x, out)
        program = Program(recorder, [recorder.number(result) for result in results])
        rooms = [torch.empty(1 << 12, dtype=torch.uint8), room(), room(16), room(), room()]
        program.constants["empty"] = Mock(side_effect=itertools.cycle(rooms))  # type: ignore[index]
        for _ in range(5):
            x.copy_(torch.randn(COUNT))
            for made, wanted in zip(program([x, out]), (2 * x, 2 * x[8:24], x * x, x), strict=True):
                assert torch.equal(made, wanted)
        assert cuda.replays == (3 if spare == SPARE else 0)
    assert program.text.count("memcpy(") == 3


@pytest.mark.parametrize("why", ["an op of torch", "memory", "the environment"])
def test_what_cannot_be_one_graph_is_a_straight_line(why, monkeypatch):
    def passes(x: Tensor, out: Tensor) -> Tensor:
        made = launch("double", x, room(SMALL))
        return launch("negate", made + 1 if why == "an op of torch" else made, out)

    if why == "the environment":
        monkeypatch.setenv("OPFUSE_LAUNCH_GRAPHS", "0")
    if why == "memory":
        monkeypatch.setattr("tests.program.fake.SPARE", -1)
    x, out = torch.randn(SMALL), torch.empty(SMALL)
    with fake_device(monkeypatch) as cuda:
        recorder = Recorder([x, out])
        with torch.no_grad(), recorder.recording():
            result = passes(x, out)
        program = Program(recorder, [recorder.number(result)])
        for _ in range(4):
            assert torch.equal(program([x, out])[0], -(2 * x + (why == "an op of torch")))
        assert cuda.captures == 0
    assert "def queue(" not in program.text


def programs(function, *given: Tensor, patch: pytest.MonkeyPatch, spare: int = 0) -> Program:
    """That of ``function`` where a graph may hold so many bytes longer; it is compared with the function, thrice."""
    patch.setattr("tests.program.fake.SPARE", spare)
    with fake_device(patch):
        recorder = Recorder(given)
        with torch.no_grad(), recorder.recording():
            results = function(*given)
        program = Program(recorder, [recorder.number(result) for result in results])
        for _ in range(3):
            for each in given:
                each.detach().copy_(torch.randn(each.shape))
            wanted = function(*[each.detach().clone() for each in given])
            for made, want in zip(program([*given]), wanted, strict=True):
                assert torch.equal(made, want)
                assert made.stride() == want.stride()
    return program


LARGE = SMALL
"""Floats of a tensor that is no small one."""


def seen_in_rows(x: Tensor, out: Tensor) -> list[Tensor]:
    return [launch("double", x, out).view(8, -1)]


def read_and_let_go(x: Tensor, out: Tensor) -> list[Tensor]:
    """``x`` could go before the last room is made."""
    return [launch("double", launch("double", x, out), room(COUNT)), out]


def by_a_small_room(x: Tensor, out: Tensor) -> list[Tensor]:
    return [launch("negate", launch("double", x, room()), out)]


def zeros_in_turn(x: Tensor, out: Tensor) -> list[Tensor]:
    for _ in range(3):
        out = launch("negate", launch("add", out, torch.zeros(len(x), dtype=torch.float32, device="cpu")), out)
    return [out]


def shown_in_rows(x: Tensor, out: Tensor) -> list[Tensor]:
    """The memory behind a view that goes out stays, though no launch reads it any more; ``x`` could go."""
    big = launch("double", x, room(len(x)))
    shown = big.view(2, -1)
    other = launch("double", launch("negate", big, room(len(x))), room(len(x)))
    return [shown, launch("negate", other, out)]


def parameter(count: int = COUNT) -> Tensor:
    return torch.nn.Parameter(torch.randn(count), requires_grad=False)


AT_NO_COST = {
    "a view goes out": (seen_in_rows, lambda: torch.randn(COUNT), True),
    "an input is held": (read_and_let_go, lambda: torch.randn(COUNT), False),
    "a parameter stays": (read_and_let_go, parameter, True),
    "small tensors count, too": (by_a_small_room, lambda: torch.randn(COUNT), True),
    "zeros are held": (zeros_in_turn, lambda: torch.randn(LARGE), False),
    "the base of a view stays": (shown_in_rows, lambda: parameter(LARGE), True),
    "an input is held beside it": (shown_in_rows, lambda: torch.randn(LARGE), False),
}


@pytest.mark.parametrize("case", AT_NO_COST)
def test_a_graph_holds_nothing_longer_that_it_may_not(case, monkeypatch):
    """Where no byte may be held longer."""
    function, make, graph = AT_NO_COST[case]
    x = make()
    program = programs(function, x, room(len(x)), patch=monkeypatch)
    assert ("def queue(" in program.text) is graph


def test_a_room_has_a_number_that_no_tensor_of_the_recording_had(monkeypatch):
    """Not that of one that was made and dropped, whose size is another."""

    def two_in_a_room(x: Tensor, out: Tensor) -> list[Tensor]:
        rooms = room(LARGE), room(LARGE)
        for each in rooms:
            launch("double", x, each)
        launch("add", *rooms)
        launch("double", x, out)
        torch.zeros(64, device="cpu")
        return [out]

    program = programs(two_in_a_room, torch.randn(LARGE), room(LARGE), patch=monkeypatch, spare=-1)
    assert program.text.count("empty(") == 1
    assert program.slab.size == 0


COPIES = {
    "nobody reads it": (lambda x, out: [(launch("double", x, out), x.clone())[0]], 0),
    "of what no launch reads": (lambda x, out: [launch("double", out, out), x.clone()], 1),
    "without elements": (lambda x, out: [launch("double", x, out), x[:0].clone()], 0),
    "in another order": (lambda x, out: [launch("double", x, out), x.view(8, 8).t().clone()], 0),
    "of a length of 1": (lambda x, out: [launch("double", x, out), x.as_strided((1, 4), (9, 1)).clone()], 0),
    "as asked": (
        lambda x, out: [launch("double", x, out), x.view(1, 2, 4, 8).clone(memory_format=torch.channels_last)],
        0,
    ),
    "without launches": (lambda x, out: [x.clone()], 0),
    "zeros that go out unread": (
        lambda x, out: [launch("double", x, out), torch.zeros(8, dtype=torch.float32, device="cpu")],
        0,
    ),
}


@pytest.mark.parametrize("case", COPIES)
def test_which_copies_go_by_addresses(case, monkeypatch):
    function, copies = COPIES[case]
    program = programs(function, torch.randn(COUNT), room(), patch=monkeypatch, spare=SPARE)
    assert program.text.count("memcpy(") == copies
