"""Tasks on several ranks, over gloo or NCCL. All of them run, whatever becomes of some, and all that is wrong is told at the end.

A rank that raises, or dies, may leave the others in the midst of a collective operation: then the processes end, and new ones go
on with the next task.
"""

from __future__ import annotations

import datetime
import gc
import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException

from opfuse.errors import OpfuseWarning
from tests.processes import run_ranks

GRACE = 5.0
"""Seconds that the other ranks have to say what they met, after one has raised."""

WAIT = datetime.timedelta(minutes=10)
"""Longest wait in a collective operation."""

Task = tuple[Callable[..., list[str]], Any]
"""A check and what it checks; it returns what is wrong."""


class Ended(NamedTuple):
    """What became of a task on one rank: what is wrong, and whether the check raised."""

    found: list[str]
    raised: bool


def spawn(ranks: int, device: str, tasks: Sequence[Task], *, grace: float = GRACE) -> None:
    """One process for each rank, which run all tasks; RuntimeError that lists those that failed."""
    failures = failed(ranks, device, tasks, grace=grace)
    if failures:
        raise RuntimeError("\n".join((f"{len(failures)} failed", *(line for lines in failures.values() for line in lines))))


def failed(ranks: int, device: str, tasks: Sequence[Task], *, grace: float = GRACE) -> dict[int, list[str]]:
    """What is wrong, by the number of the task that failed; under the number of tasks what came after the last."""
    failures: dict[int, list[str]] = {}
    first = 0
    with tempfile.TemporaryDirectory() as folder:
        while first < len(tasks):
            place, died = Path(tempfile.mkdtemp(dir=folder)), ""
            try:
                run_ranks(worker, place, ranks, device, tasks[first:], ranks=ranks, grace=grace)
            except ProcessExitedException as error:
                died = str(error)
            ended = [_read(place, rank) for rank in range(ranks)]
            count = 1 + min(sum(not each.raised for each in those) for those in ended) if died else len(tasks) - first
            for i, task in enumerate(tasks[first : first + count]):
                told = _told(task, [those[i].found if i < len(those) else [f"did not end: {died}"] for those in ended])
                failures |= {first + i: told} if told else {}
            first += count
    return failures if first == len(tasks) else failures | {len(tasks): [f"after the last task: {died}"]}


def summary(tasks: int, failures: Mapping[int, Sequence[str]]) -> dict[str, Any]:
    """What became of ``tasks`` tasks: how many passed and failed, and of each that failed the first line of what is wrong."""
    first = [line.partition("\n")[0] for lines in failures.values() for line in lines]
    return {"passed": tasks - len(failures), "failed": len(failures), "failures": first}


def worker(rank: int, place: Path, ranks: int, device: str, tasks: Sequence[Task]) -> None:
    """Run the tasks on this rank until one raises, and write down what each found."""
    torch.set_num_threads(1)
    warnings.simplefilter("error", OpfuseWarning)
    # The first two as in pyproject.toml; optimizers of many tasks step on stored weights.
    for expected in ("recipe .*got emulated products", "torch: wants a release from", "a step on weights"):
        warnings.filterwarnings("ignore", expected, OpfuseWarning)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend, meeting = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", f"file://{place}/store"
    dist.init_process_group(backend, rank=rank, world_size=ranks, init_method=meeting, timeout=WAIT)
    with _file(place, rank).open("a", buffering=1) as file:
        for task in tasks:
            start, raised = time.perf_counter(), False
            try:
                found = task[0](task[1], rank, ranks, device)
            except BaseException as error:  # what pytest.raises raises is no Exception
                found, raised = [f"{type(error).__name__}: {error}\n{traceback.format_exc()}"], True
            file.write(f"{json.dumps([found, raised])}\n")
            say(rank, f"{'FAILED' if found else 'passed'}  {time.perf_counter() - start:4.1f} s  {_name(task)}")
            if raised:
                os._exit(1)  # a group whose ranks have parted cannot be taken down
    gc.collect()  # modules hold the group through their mesh
    dist.barrier()
    dist.destroy_process_group()


def say(rank: int, text: str) -> None:
    """One line, from one process."""
    if rank == 0:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def _file(place: Path, rank: int) -> Path:
    return place / f"rank {rank}"


def _read(place: Path, rank: int) -> list[Ended]:
    file = _file(place, rank)
    return [Ended(*json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def _told(task: Task, by_rank: list[list[str]]) -> list[str]:
    """A line for each text that ranks have, and whose it is."""
    ranks_by_text: dict[str, list[str]] = {}
    for rank, found in enumerate(by_rank):
        if found:
            ranks_by_text.setdefault(", ".join(found), []).append(f"rank {rank}")
    return [f"{_name(task)}, {' and '.join(ranks)}: {text}" for text, ranks in ranks_by_text.items()]


def _name(task: Task) -> str:
    return f"{task[1]} ({task[0].__name__.removeprefix('check_')})"
