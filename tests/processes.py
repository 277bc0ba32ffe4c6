"""Processes of several ranks, forked from one that has imported torch and the package once: each import takes seconds.

Optimizers and FSDP2 import torch._dynamo at their first step, in every process anew if it is not there.
"""

import contextlib
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

multiprocessing.set_forkserver_preload(
    ["torch", "torch.distributed.fsdp", "torch._dynamo", "opfuse.ops", "opfuse.recipes", "opfuse.convert", "opfuse.cli.commands"]
)
FORKSERVER = torch.multiprocessing.get_context("forkserver")


def run_ranks(worker: Callable[..., None], *args: Any, ranks: int = 2, grace: float | None = None) -> None:
    """``worker(rank, *args)`` in a process for each rank; what one raises is raised here. grace: seconds for others to end."""
    context = torch.multiprocessing.start_processes(worker, args, nprocs=ranks, start_method="forkserver", join=False)
    while not context.join(grace_period=grace):
        pass


def _run_program(rank: int, program: str, folder: Path) -> None:
    sys.argv = ["program", str(rank), str(folder / "store")]
    with (folder / str(rank)).open("w") as out, contextlib.redirect_stdout(out):
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})


def printed(program: str, folder: Path, *, ranks: int = 2) -> list[str]:
    """What a program prints on each rank; its arguments are the rank and a file in ``folder`` for the group to meet at."""
    run_ranks(_run_program, program, folder, ranks=ranks)
    return [(folder / str(rank)).read_text() for rank in range(ranks)]
