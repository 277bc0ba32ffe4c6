"""States of the optimizer in low precision: torchao's AdamW on converted models, on stored weights, and on shards.

Steps of torchao are compiled, one kernel for each shape, which takes long: all tests but one run them eagerly.
"""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import init_device_mesh

import opfuse
from opfuse import recipes
from opfuse.errors import OpfuseWarning
from opfuse.tensors import QuantizedTensor
from opfuse.tensors.masters import stored_in
from tests.compiler.harness import generator_of
from tests.processes import run_ranks
from tests.turns import in_turn

with warnings.catch_warnings():  # of extensions for GPUs that are not here
    warnings.simplefilter("ignore")
    from torchao.optim import AdamW8bit, AdamWFp8
    from torchao.optim.subclass_8bit import OptimState8bit
    from torchao.optim.subclass_fp8 import OptimStateFp8

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")]
RECIPE = recipes.Float8BlockScaling()
WIDTH = 128
STATES = {"8 bits": (AdamW8bit, OptimState8bit), "FP8": (AdamWFp8, OptimStateFp8)}
MASTERS = {"none": None, "fp32": torch.float32, "bf16": torch.bfloat16}
"""What is beside bf16 weights, which round at random, or beside weights stored in FP8."""


@pytest.fixture
def _eager() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


eager = pytest.mark.usefixtures("_eager")


def made(*, stored: bool, seed: int = 0, width: int = WIDTH) -> nn.Module:
    """A converted model, whose weights are bf16, or FP8 as of a checkpoint."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)).bfloat16()
    if stored:
        tensors, _ = opfuse.export_weights(model, "fp8_block", recipe=RECIPE)
        model.load_state_dict(opfuse.import_weights(tensors), assign=True)
    opfuse.fuse_(model, RECIPE)
    return model


def trainer(name: str, masters: str, *, seed: int = 0, rate: float = 1e-2) -> tuple[nn.Module, Any]:
    model = made(stored=masters != "none", seed=seed)
    optimizer = STATES[name][0](model.parameters(), lr=rate, bf16_stochastic_round=True)
    dtype = MASTERS[masters]
    return model, optimizer if dtype is None else opfuse.with_masters(optimizer, dtype=dtype)


def train(model: nn.Module, optimizer: Any, steps: range, rank: int = 0) -> list[float]:
    losses = []
    for step in steps:
        width = model[0].normalized_shape[0]
        x = torch.randn(32, width, generator=generator_of(2 * step + rank)).bfloat16()
        loss = (model(x) - x.roll(1, 1)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def bits(model: nn.Module) -> list[torch.Tensor]:
    """A copy of all that parameters of this rank hold."""
    held = [stored_in(p).detach() for p in model.parameters()]
    return [x.clone() for p in held for x in (p.record.tensors() if isinstance(p, QuantizedTensor) else [p])]


def same(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, ones, others)) and len(ones) == len(others)


def by_fp32_masters() -> list[float]:
    """Losses with fp32 masters of bf16 weights and fp32 moments, by torch's AdamW."""
    model = made(stored=False)
    masters = [p.detach().float() for p in model.parameters()]
    optimizer, losses = torch.optim.AdamW(masters, lr=1e-2), []
    for step in range(25):
        losses += train(model, Into(model, masters, optimizer), range(step, step + 1))
    return losses


class Into:
    """An optimizer of masters, from and into the parameters of a model."""

    def __init__(self, model: nn.Module, masters: list[torch.Tensor], inner: torch.optim.Optimizer) -> None:
        self.pairs, self.inner = list(zip(model.parameters(), masters)), inner

    @torch.no_grad()
    def step(self) -> None:
        for p, master in self.pairs:
            master.grad = p.grad.float()
        self.inner.step()
        for p, master in self.pairs:
            p.copy_(master)

    def zero_grad(self) -> None:
        for p, _ in self.pairs:
            p.grad = None


reference = functools.cache(by_fp32_masters)


@eager
@pytest.mark.parametrize(("name", "masters"), in_turn(STATES, MASTERS, of=2))
def test_losses_are_those_of_fp32_masters_and_moments(name: str, masters: str) -> None:
    """Up to 5 % after 25 steps of a tiny model, which fall by more than half; each pipeline keeps its one plan."""
    model, optimizer = trainer(name, masters)
    torch.manual_seed(1)
    losses, wanted = train(model, optimizer, range(25)), reference()
    assert sum(losses[-5:]) == pytest.approx(sum(wanted[-5:]), rel=0.05)
    assert losses[-1] < 0.5 * losses[0]
    assert opfuse.cache_info(model).total.misses == 1
    kind = STATES[name][1]
    large = [entries for entries in optimizer.state_dict()["state"].values() if entries["exp_avg"].numel() >= 4096]
    assert len(large) == 2
    for entries in large:
        assert isinstance(entries["exp_avg"], kind)
        assert isinstance(entries["exp_avg_sq"], kind)
        assert ("master" in entries) == (masters != "none")
        assert masters == "none" or entries["master"].dtype == MASTERS[masters]


@pytest.mark.row("U12")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_kept_casts_see_what_a_step_wrote(compiled: bool) -> None:
    """A fresh model with the same weights computes the same bits, though casts live over steps."""
    model, optimizer = trainer("8 bits", "none")
    if compiled:  # the step of one weight alone: each shape is a kernel that a C++ compiler makes in ten seconds
        model.requires_grad_(False)
        model[1].weight.requires_grad_(True)
    with opfuse.kept_weights(model), nullcontext() if compiled else torch.compiler.set_stance("force_eager"):
        x = torch.randn(32, WIDTH).bfloat16()
        for step in range(3):
            before = model(x).detach()
            train(model, optimizer, range(step, step + 1))
            after = model(x).detach()
            assert not torch.equal(after, before)
            fresh = made(stored=False, seed=1)
            fresh.load_state_dict(model.state_dict())
            assert torch.equal(fresh(x), after)


@pytest.mark.few(apart=True)
@eager
@pytest.mark.row("H28")
@pytest.mark.parametrize(("way", "name", "masters"), in_turn(["torch.save", "DCP"], STATES, MASTERS, of=2))
def test_a_run_goes_on_with_the_same_bits(way: str, name: str, masters: str, tmp_path: Path) -> None:
    """Losses and weights, with the generator that rounds; the learning rate is that of the file."""
    model, optimizer = trainer(name, masters)
    torch.manual_seed(1)
    train(model, optimizer, range(3))
    generator = torch.get_rng_state()
    if way == "DCP":
        dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer))), checkpoint_id=tmp_path, no_dist=True)
    else:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    losses = train(model, optimizer, range(3, 6))

    other, loaded = trainer(name, masters, seed=1, rate=1.0)
    if way == "DCP":
        resume(other, loaded, tmp_path, no_dist=True)
    else:
        saved = torch.load(tmp_path / "saved.pt")
        other.load_state_dict(saved["model"])
        loaded.load_state_dict(saved["optimizer"])
    torch.set_rng_state(generator)
    assert loaded.param_groups[0]["lr"].item() == pytest.approx(1e-2)
    assert train(other, loaded, range(3, 6)) == losses
    assert same(bits(other), bits(model))


def resume(model: nn.Module, optimizer: Any, path: Path, **options: Any) -> None:
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.load(state, checkpoint_id=path, **options)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def sharded(name: str, masters: str, mesh: Any, *, seed: int = 0, rate: float = 1e-2) -> tuple[nn.Module, Any]:
    """Shards in fp32 that compute in bf16, or FP8 with masters of theirs: torchao's moments lose the dtype of bf16 shards."""
    stored = masters != "none"
    model = made(stored=stored, seed=seed, width=2 * WIDTH)  # each rank has whole blocks of rows
    if not stored:
        model.float()
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=None if stored else torch.bfloat16))
    optimizer = STATES[name][0](model.parameters(), lr=rate, bf16_stochastic_round=True)
    return model, opfuse.with_masters(optimizer) if stored else optimizer


def worker(rank: int, folder: Path, pairs: list[tuple[str, str]]) -> None:
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    warnings.simplefilter("error", OpfuseWarning)
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder / 'store'}")
    mesh = init_device_mesh("cpu", (2,))
    for name, masters in pairs:
        kind = STATES[name][1]
        place = folder / f"{name} {masters}"
        model, optimizer = sharded(name, masters, mesh)
        train(model, optimizer, range(3), rank)
        moments = [stored_in(each["exp_avg"]) for each in optimizer.state_dict()["state"].values()]
        assert sum(isinstance(each, kind) for each in moments) == 2
        dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer))), checkpoint_id=place)
        generator = torch.get_rng_state()
        losses = train(model, optimizer, range(3, 6), rank)
        assert losses[-1] < losses[0]
        other, loaded = sharded(name, masters, mesh, seed=1, rate=1.0)
        resume(other, loaded, place)
        torch.set_rng_state(generator)
        assert train(other, loaded, range(3, 6), rank) == losses
        for each in (model, other):
            each.reshard()
        assert same(bits(other), bits(model))
    gc.collect()  # a module holds the group through its mesh
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.row("H28", "R17")
@pytest.mark.parametrize(
    "pairs",
    [
        [("8 bits", "none"), ("FP8", "fp32")],
        pytest.param([("8 bits", "fp32"), ("FP8", "none")], marks=pytest.mark.slow),
    ],
    ids=["each", "other pairs"],
)
def test_shards_of_fsdp2_have_moments_of_their_own_and_go_on_with_the_same_bits(
    pairs: list[tuple[str, str]], tmp_path: Path
) -> None:
    """States and masters in pairs, over the same ranks."""
    run_ranks(worker, tmp_path, pairs)
