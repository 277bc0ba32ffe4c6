"""Checkpoints over ranks, and a process that is killed while it saves one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException

from tests.distributed.checkpoints import MORE, killed, resume, same, states, train, trainer, whole
from tests.distributed.running import spawn
from tests.distributed.training import Case, data
from tests.processes import FORKSERVER

CASE = Case("mxfp8", stored=True)


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.row("H28", "R17")
def test_checkpoints_of_every_recipe_go_between_ranks():
    spawn(2, "cpu", MORE)


def save_and_die(folder: Path) -> None:
    """Save a second checkpoint, and be killed in its midst."""
    saved = []
    save = torch.save

    def killing(*args, **kwargs):
        saved.append(save(*args, **kwargs))
        if len(saved) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    filesystem.torch.save = killing
    one = resume(trainer(CASE, None, 2, "cpu", scale=3.0), folder / "1", no_dist=True)
    train(CASE, one, data(CASE, 1, 0, 0, 2))
    dcp.save(states(one), checkpoint_id=folder / "2", no_dist=True)


@pytest.mark.cpu
@pytest.mark.row("H28")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_process_that_is_killed_while_it_saves_leaves_the_last_checkpoint_whole(tmp_path):
    one = trainer(CASE, None, 2, "cpu")
    train(CASE, one, data(CASE, 0, 0, 0, 2))
    dcp.save(states(one), checkpoint_id=tmp_path / "1", no_dist=True)
    process = FORKSERVER.Process(target=save_and_die, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    other = trainer(CASE, None, 2, "cpu", scale=3.0)
    before = whole(other[0].parameters())
    with pytest.raises(CheckpointException, match="metadata"):
        resume(other, tmp_path / "2", no_dist=True)
    assert same(whole(other[0].parameters()), before)
    assert same(whole(resume(other, tmp_path / "1", no_dist=True)[0].parameters()), whole(one[0].parameters()))


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.row("H28")
def test_a_rank_that_is_killed_while_all_save_leaves_the_last_checkpoint_whole():
    assert killed(2, "cpu") == []
