"""Training under DDP, FSDP2 and on HSDP meshes equals training in one process; stored weights are gathered quantized."""

from __future__ import annotations

import pytest

from benchmarks import distributed
from tests.distributed import checkpoints, collectives, experts, parallel, shards, stages
from tests.distributed.running import spawn
from tests.distributed.training import FEW, WIRES, check_case, table


def check_benchmark(stack: distributed.Stack, rank: int, ranks: int, device: str) -> list[str]:
    """The script that measures training over ranks runs, and counts bytes on any device."""
    found = list(distributed.records(stack, ranks, device))
    wrong = [f"{each['name']}: {each['value']} {each['unit']}" for each in found if each["met"] is False]
    return wrong + ([] if {each["name"] for each in found} == set(distributed.variants(device)) else ["a variant is missing"])


BENCHMARK = (check_benchmark, distributed.SMALL)


@pytest.mark.cpu
@pytest.mark.row("H20", "H22", "H23", "H27", "H28", "R17")
def test_r17_training_on_two_ranks_equals_one_process():
    modules = (shards, checkpoints, parallel, collectives, stages)
    tasks = [*(task for module in modules for task in module.TASKS), *experts.FEW]
    spawn(2, "cpu", [*((check_case, case) for case in FEW), *WIRES, *tasks, BENCHMARK])


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.row("H20", "H22", "H35", "R17")
@pytest.mark.parametrize("ranks", [2, 4])
def test_r17_every_recipe_in_every_way_on_two_and_four_ranks(ranks):
    spawn(ranks, "cpu", [*((check_case, case) for case in table(ranks)), *parallel.MORE, *experts.TASKS])
