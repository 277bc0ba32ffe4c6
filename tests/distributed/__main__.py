"""``python -m tests.distributed --device cuda``: every case and every task on the GPUs of this machine, one process on each."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from tests.distributed import checkpoints, collectives, experts, parallel, shards, stages
from tests.distributed.running import failed, summary
from tests.distributed.training import FEW, WIRES, check_case, table

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.distributed", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"), help="over NCCL on GPUs, or over gloo")
    parser.add_argument("--ranks", type=int, default=0, help="processes; by default one for each GPU, on the CPU 2")
    parser.add_argument("--report", type=Path, metavar="JSON", help="write down how many passed, and what failed")
    given = parser.parse_args()
    ranks = given.ranks or (torch.cuda.device_count() if given.device == "cuda" else 2)
    own = [
        *shards.TASKS,
        *checkpoints.TASKS,
        *checkpoints.MORE,
        *parallel.MORE,
        *collectives.TASKS,
        *stages.TASKS,
        *experts.TASKS,
    ]
    tasks = [*own, *WIRES, *((check_case, case) for case in (*FEW, *table(ranks)))]
    failures = failed(ranks, given.device, tasks)
    failures |= {len(tasks) + 1: told} if (told := checkpoints.killed(ranks, given.device)) else {}
    for lines in failures.values():
        sys.stderr.write("".join(f"{line}\n" for line in lines))
    found = summary(len(tasks) + 1, failures)
    sys.stdout.write("\n".join((f"{found['passed']} passed, {found['failed']} failed", *found["failures"], "")))
    if given.report:
        given.report.parent.mkdir(parents=True, exist_ok=True)
        given.report.write_text(json.dumps(found))
    sys.exit(bool(failures))
