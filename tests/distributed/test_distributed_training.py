"""Training under DDP, FSDP2 and on HSDP meshes equals training in one process; stored weights are gathered quantized."""

from __future__ import annotations

import pytest

from tests.distributed import checkpoints, parallel, shards
from tests.distributed.running import spawn
from tests.distributed.training import FEW, WIRES, check_case, table


@pytest.mark.cpu
@pytest.mark.row("H20", "H22", "H23", "H27", "H28", "R17")
def test_r17_training_on_two_ranks_equals_one_process():
    spawn(2, "cpu", [*((check_case, case) for case in FEW), *WIRES, *shards.TASKS, *checkpoints.TASKS, *parallel.TASKS])


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.row("H20", "H22", "H35", "R17")
@pytest.mark.parametrize("ranks", [2, 4])
def test_r17_every_recipe_in_every_way_on_two_and_four_ranks(ranks):
    spawn(ranks, "cpu", [*((check_case, case) for case in table(ranks)), *parallel.MORE])
