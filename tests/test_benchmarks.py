"""What the benchmarks call, run on the CPU: peers in PyTorch compute what the kernels that they are set against compute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.overrides import TorchFunctionMode

from benchmarks import bandwidth, record, timing

SHAPE = (256, 512)
CALLS = [pytest.param(table[name], id=name) for table, _ in record.TABLES.values() for name in table]
PAIRS = [pytest.param(table[name], peers[name], id=name) for table, peers in record.TABLES.values() for name in peers]


class OnCPU(TorchFunctionMode):
    """Tensors that are asked for on a CUDA device are made on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        return function(*args, **({**kwargs, "device": "cpu"} if kwargs.get("device") == "cuda" else kwargs))


@pytest.fixture(autouse=True)
def _on_cpu() -> Iterator[None]:
    with OnCPU():
        yield


def first(result: object) -> torch.Tensor:
    """The first tensor of nested results, codes as numbers."""
    while not isinstance(result, torch.Tensor):
        result = result[0]
    return result.view(torch.float8_e4m3fn).float() if result.element_size() == 1 else result.float()


@pytest.mark.parametrize("entry", CALLS)
def test_every_call_runs(entry: tuple[float, bandwidth.Make]) -> None:
    size, make = entry
    assert 2 <= size <= 11
    assert make(SHAPE)() is not None


@pytest.mark.parametrize(("entry", "peer"), PAIRS)
def test_a_peer_computes_what_it_is_set_against(entry: tuple[float, bandwidth.Make], peer: bandwidth.Peer) -> None:
    """But for rounding: sums in another order, powers through logarithms."""
    torch.manual_seed(1)
    ours = first(entry[1](SHAPE)())
    torch.manual_seed(1)
    theirs = first(peer.function(*peer.tensors(SHAPE)))
    assert ours.shape == theirs.shape
    close = torch.isclose(ours, theirs, rtol=2**-2, atol=2**-6, equal_nan=True)
    assert ((ours == theirs) | (ours.isnan() & theirs.isnan())).float().mean() > 0.97
    assert close.float().mean() > 0.9999


def test_results_take_turns_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last result of each call is alive while the next one runs."""

    class Event:
        def __init__(self, **_: object) -> None: ...

        def record(self) -> None: ...

        def synchronize(self) -> None: ...

        def elapsed_time(self, _: Event) -> float:
            return 1.0

    for name, fake in {"Event": Event, "_sleep": lambda _: None, "synchronize": lambda: None}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    addresses: list[int] = []

    def call() -> torch.Tensor:
        made = torch.empty(1 << 20)
        addresses.append(made.data_ptr())
        return made

    timing.device_time([call] * 5, launches=20, repeats=2)
    assert all(len(set(addresses[i : i + 5])) == 5 for i in range(len(addresses) - 4))


def test_limits_are_of_figures_that_there_are() -> None:
    names = {name for table, _ in record.TABLES.values() for name in table}
    assert {*record.LEAST, *record.MOST} <= names
