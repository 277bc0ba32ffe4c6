"""What raises, dies or leaves others waiting is told, and the tasks behind it run."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from tests.distributed.running import failed, summary

MINUTE = 60.0


def check_passes(given: str, rank: int, ranks: int, device: str) -> list[str]:
    dist.barrier()
    return []


def check_differs(given: str, rank: int, ranks: int, device: str) -> list[str]:
    return [given] if rank else []


def check_raises(given: str, rank: int, ranks: int, device: str) -> list[str]:
    if rank:
        pytest.fail(given)
    dist.barrier()
    return []


def check_dies(given: str, rank: int, ranks: int, device: str) -> list[str]:
    if rank:
        os._exit(3)
    return []


@pytest.mark.cpu
def test_all_tasks_run_and_all_that_is_wrong_is_told():
    tasks = [(check_passes, "first"), (check_differs, "another value"), (check_raises, "a fault"), (check_passes, "between")]
    tasks += [(check_dies, "at once"), (check_differs, "in the end"), (check_passes, "last")]
    failures = failed(2, "cpu", tasks, grace=MINUTE)
    told = "\n".join(line for lines in failures.values() for line in lines)
    for text in (
        "another value (differs), rank 1: another value",
        "a fault (raises), rank 1: Failed: a fault\nTraceback",
        "a fault (raises), rank 0: ",
        "at once (dies), rank 1: did not end: process 1 terminated with exit code 3",
        "in the end (differs), rank 1: in the end",
    ):
        assert text in told
    assert "(passes)" not in told
    found = summary(len(tasks), failures)
    assert (found["passed"], found["failed"]) == (3, 4)
    assert "a fault (raises), rank 1: Failed: a fault" in found["failures"]
    assert not any("\n" in line for line in found["failures"])
