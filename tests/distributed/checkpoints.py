"""Distributed checkpoints of what trains on several ranks: to as many, to one and back, saved aside, and what a crash leaves."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

import opfuse
from opfuse.errors import RecipeError
from opfuse.recipes import amaxes
from tests.distributed.running import Task, failed, say
from tests.distributed.training import RECIPES, WRAPS, Case, build, data, loss_of, optimizer_of, region_of, whole

Trainer = tuple[nn.Module, torch.optim.Optimizer]


def trainer(case: Case, wrap: str | None, ranks: int, device: str, *, scale: float = 1.0, prepared: bool = True) -> Trainer:
    """A model and its optimizer, spread as ``wrap`` says, or one that each rank has whole.

    scale: of its first values. prepared: it shows the keys of its delayed scaling before it has run.
    """
    model = build(case, ranks, device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    if case.recipe == "delayed" and prepared:
        opfuse.prepare_delayed(model, RECIPES[case.recipe]())
    spread = model if wrap is None else WRAPS[wrap](model, case, ranks, device)
    return spread, optimizer_of(case, spread.parameters())


def train(case: Case, trainer: Trainer, x: torch.Tensor) -> torch.Tensor:
    """One step; its loss."""
    model, optimizer = trainer
    with region_of(case.recipe):
        loss = loss_of(model, x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def states(trainer: Trainer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(*trainer)))


def resume(trainer: Trainer, path: Path, **options: Any) -> Trainer:
    """``trainer`` with what the checkpoint holds."""
    state = states(trainer)
    dcp.load(state, checkpoint_id=path, **options)
    set_state_dict(*trainer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return trainer


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def shared_folder() -> Path:
    """A folder that all ranks know."""
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name, 0)
    return Path(str(name[0]))


def check_checkpoint(case: Case, rank: int, ranks: int, device: str) -> list[str]:
    """What was saved goes on as what saved it, on as many ranks, wrapped otherwise, and after one process had it."""
    folder, first = shared_folder(), trainer(case, case.wrap, ranks, device)
    batches = [data(case, step, 0, rank, ranks).to(device) for step in range(2)]
    train(case, first, batches[0])
    saved = whole(first[0].parameters())
    dcp.save(states(first), checkpoint_id=folder / "saved")
    others = dist.new_group(backend="gloo")  # a thread's messages must not meet those of the training
    aside = dcp.async_save(states(first), checkpoint_id=folder / "aside", process_group=others)
    loss = train(case, first, batches[1])  # while it is written
    aside.result()
    after = whole(first[0].parameters())
    if rank == 0:
        alone = resume(trainer(case, None, ranks, device, scale=3.0), folder / "saved", no_dist=True)
        dcp.save(states(alone), checkpoint_id=folder / "alone", no_dist=True)
        wrong = [] if same(whole(alone[0].parameters()), saved) else ["one process has other values"]
    else:
        wrong = []
    dist.barrier()
    for name in ("saved", "aside", "alone"):
        for wrap in ("fsdp", "ddp") if name == "saved" else (case.wrap,):
            other = resume(trainer(case, wrap, ranks, device, scale=3.0), folder / name)
            if not same(whole(other[0].parameters()), saved):
                wrong.append(f"{name}: other values under {wrap}")
            if not torch.equal(train(case, other, batches[1]), loss):
                wrong.append(f"{name}: another loss under {wrap}")
            ordered = ranks <= 2 or wrap == case.wrap  # more than two gradients are summed in the order of the collective
            if ordered and not same(whole(other[0].parameters()), after):
                wrong.append(f"{name}: another step under {wrap}")
    return wrong


def check_broadcast(prepared: bool, rank: int, ranks: int, device: str) -> list[str]:
    """One rank reads a checkpoint and tells the others. Where these do not know that there are states, only one has them.

    All ranks find that out, though none waits for its device without need, and those others know the list of casts by heart.
    """
    case = Case("delayed")
    batches = [data(case, step, 0, rank, ranks).to(device) for step in range(2)]
    first, other = trainer(case, "fsdp", ranks, device), trainer(case, "fsdp", ranks, device, scale=3.0, prepared=prepared)
    train(case, first, batches[0])
    full = get_model_state_dict(first[0], options=StateDictOptions(full_state_dict=True))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other[0], full if rank == 0 else {}, options=options)
    if prepared:
        return [] if torch.equal(train(case, other, batches[1]), train(case, first, batches[1])) else ["another loss"]
    refused = pytest.raises(RecipeError, match="the same casts in the same order on every rank")
    with mock.patch.object(amaxes, "LOOKS_ALWAYS", ()), refused:
        train(case, other, batches[1])
    return []


KILLED = Case("current", stored=True)


def check_killed(folder: Path, rank: int, ranks: int, device: str) -> list[str]:
    """Save one checkpoint whole; the last rank is killed while it writes its part of another."""
    one, save = trainer(KILLED, KILLED.wrap, ranks, device), torch.save
    train(KILLED, one, data(KILLED, 0, 0, rank, ranks).to(device))
    dcp.save(states(one), checkpoint_id=folder / "1")
    train(KILLED, one, data(KILLED, 1, 0, rank, ranks).to(device))
    written: list[None] = []

    def killing(*args: Any, **kwargs: Any) -> None:
        written.append(save(*args, **kwargs))
        if len(written) == 3 and rank == ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    filesystem.torch.save = killing
    dcp.save(states(one), checkpoint_id=folder / "2")
    return ["was not killed"]


def check_left(folder: Path, rank: int, ranks: int, device: str) -> list[str]:
    """The last whole checkpoint goes on as what saved it; the other one is refused, and nothing of it is read."""
    one, other = trainer(KILLED, KILLED.wrap, ranks, device), trainer(KILLED, KILLED.wrap, ranks, device, scale=3.0)
    train(KILLED, one, data(KILLED, 0, 0, rank, ranks).to(device))
    before = whole(other[0].parameters())
    with pytest.raises(CheckpointException, match="metadata"):
        resume(other, folder / "2")
    wrong = [] if same(whole(other[0].parameters()), before) else ["values of a checkpoint that is not whole"]
    resume(other, folder / "1")
    batch = data(KILLED, 1, 0, rank, ranks).to(device)
    alike = torch.equal(train(KILLED, other, batch), train(KILLED, one, batch))
    return wrong + ([] if alike and same(whole(other[0].parameters()), whole(one[0].parameters())) else ["another step"])


def killed(ranks: int, device: str) -> list[str]:
    """What is wrong with the checkpoints of ranks of which one is killed while it saves."""
    say(0, "the next task ends when a rank is killed in its midst")
    with tempfile.TemporaryDirectory() as folder:
        failures = failed(ranks, device, [(check_killed, Path(folder)), (check_left, Path(folder))])
    died = failures.pop(0, ["nobody was killed"])
    as_meant = any("signal SIGKILL" in text for text in died)
    return [*(() if as_meant else died), *(text for texts in failures.values() for text in texts)]


TASKS: list[Task] = [
    (check_checkpoint, Case("delayed")),
    (check_checkpoint, Case("mxfp8", stored=True)),
    (check_broadcast, True),
    (check_broadcast, False),
]
MORE: list[Task] = [
    (check_checkpoint, Case(recipe, stored=stored, wrap=wrap))
    for recipe in RECIPES
    for stored in (False, True)
    for wrap in ("fsdp", "ddp")
    if recipe != "none" or not stored
]
