"""What the benchmarks of casts, chains and norms share: kernels against a copy, and against PyTorch, in the same process.

A kernel's bandwidth counts the fewest bytes that its result needs, inputs read once and results written once; where the scale
follows from the amax of the whole tensor, the input is read twice. 100 % is torch's own copy of a bf16 matrix of the same shape.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from benchmarks.timing import Call, device_time, host_time

BF16, FP8 = 2, 1
BLOCKS = MX = 1 + 1 / 32
NV = 1 / 2 + 1 / 16
MX4 = 1 / 2 + 1 / 32
"""Bytes of an element, scales included (4 bytes for 128, 1 byte for 32, 1 byte for 16 elements)."""

SHAPES = ((16384, 8192), (4096, 4096))

Shape = tuple[int, int]
Make = Callable[[Shape], Call]
Table = Mapping[str, tuple[float, Make]]
"""Name: (fewest bytes for each element of ``shape``, a call over new tensors for it)."""


class Peer(NamedTuple):
    """The same in PyTorch: a function, and new tensors to call it with for a shape."""

    function: Callable[..., object]
    tensors: Callable[[Shape], Sequence[torch.Tensor]]


def random(*shape: int) -> torch.Tensor:
    """Normal values in bf16."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def turns(shape: Shape) -> int:
    """How many calls take turns, each with tensors of its own: bf16 matrices of four times the last-level cache, or three."""
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(3, -(-4 * cache // (BF16 * shape[0] * shape[1])))


def time_of(make: Make, shape: Shape) -> float:
    """Microseconds of one call."""
    return device_time([make(shape) for _ in range(turns(shape))]).median


def _copy(shape: Shape) -> Call:
    x = random(*shape)
    y = torch.empty_like(x)
    return lambda: y.copy_(x)


def measure(table: Table, shape: Shape, only: str = "") -> Iterator[dict[str, Any]]:
    """One row for the copy, and one for each call of the table whose name holds ``only``."""
    copy = time_of(_copy, shape)
    yield {"shape": shape, "name": "copy", "us": copy, "bytes": 2 * BF16, "percent": 100.0}
    for name, (size, make) in table.items():
        if only in name:
            us = time_of(make, shape)
            yield {"shape": shape, "name": name, "us": us, "bytes": size, "percent": 100 * size / (2 * BF16) * copy / us}


def measure_peers(table: Table, peers: Mapping[str, Peer], shape: Shape, only: str = "") -> Iterator[dict[str, Any]]:
    """For each call of the table that has a peer, its time and that of the peer, eager and compiled."""
    for name, peer in peers.items():
        if only not in name:
            continue
        us = time_of(table[name][1], shape)
        for how, function in (("eager torch", peer.function), ("torch.compile", torch.compile(peer.function, dynamic=False))):
            calls = [_bound(function, peer.tensors(shape)) for _ in range(turns(shape))]
            took = device_time(calls).median
            yield {"shape": shape, "name": name, "peer": how, "us": us, "peer_us": took, "times": took / us}


def _bound(function: Callable[..., object], tensors: Sequence[torch.Tensor]) -> Call:
    return lambda: function(*tensors)


def command(description: str | None, table: Table, peers: Mapping[str, Peer]) -> None:
    """The command line of a benchmark: measure and print."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--only", default="", help="measure what has this in its name")
    parser.add_argument("--host", action="store_true", help="time of the host alone")
    parser.add_argument("--peers", action="store_true", help="PyTorch in the same process")
    arguments = parser.parse_args()
    for shape in SHAPES:
        for row in measure(table, shape, arguments.only):
            print(
                f"{shape[0]:6d} x {shape[1]:5d}  {row['name']:44s} {row['us']:8.1f} us {row['percent']:6.1f} % of copy",
                flush=True,
            )
    for row in measure_peers(table, peers, SHAPES[0], arguments.only) if arguments.peers else ():
        print(f"{row['peer']:15s} {row['name']:44s} {row['peer_us']:8.1f} us, {row['times']:5.2f} times ours", flush=True)
    for name, (_, make) in table.items() if arguments.host else ():
        if arguments.only in name:
            print(f"host            {name:44s} {host_time(make((256, 256))).median:8.1f} us")
