"""Processes of several ranks, forked from one that has imported torch and the package once: each import takes seconds."""

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch

multiprocessing.set_forkserver_preload(["torch", "torch.distributed.fsdp", "opfuse.ops", "opfuse.recipes"])


def run_ranks(worker: Callable[..., None], *args: Any, ranks: int = 2) -> None:
    """``worker(rank, *args)`` in a process for each rank; what one raises is raised here."""
    torch.multiprocessing.start_processes(worker, args, nprocs=ranks, start_method="forkserver")
