"""``python -m tests.distributed --device cuda``: every case and every task on the GPUs of this machine, one process on each."""

from __future__ import annotations

import argparse

import torch

from tests.distributed import checkpoints, parallel, shards
from tests.distributed.running import spawn
from tests.distributed.training import WIRES, check_case, table

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.distributed", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"), help="over NCCL on GPUs, or over gloo")
    parser.add_argument("--ranks", type=int, default=0, help="processes; by default one for each GPU, on the CPU 2")
    given = parser.parse_args()
    ranks = given.ranks or (torch.cuda.device_count() if given.device == "cuda" else 2)
    spawn(
        ranks,
        given.device,
        [*shards.TASKS, *checkpoints.TASKS, *parallel.MORE, *WIRES, *((check_case, case) for case in table(ranks))],
    )
