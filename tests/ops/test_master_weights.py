"""Masters of weights that live quantized: a loop by hand and ``with_masters``, on one process and on the shards of FSDP2."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

import opfuse
from opfuse import ops, recipes
from opfuse.errors import DtypeError
from opfuse.tensors import QuantizedTensor
from opfuse.tensors.masters import stored_in
from tests.ops.by_hand import step_by_hand
from tests.processes import run_ranks

RECIPES = {"mxfp8": recipes.MXFP8BlockScaling(), "fp8_current": recipes.Float8CurrentScaling()}
RATE, STEPS = 1e-4, 8


def layer(kind: str, *, preserve: bool = True, device: str | None = None) -> ops.Linear:
    torch.manual_seed(0)
    with opfuse.quantized_model_init(recipe=RECIPES[kind], preserve_high_precision_init_val=preserve):
        return ops.Linear(64, 64, device=device)


def train(model: nn.Module, kind: str, *, sign: float = 1.0) -> list[torch.Tensor]:
    """A loop by hand under a constant gradient, whose steps of AdamW are about ``RATE``; the masters."""
    masters = opfuse.master_weights(model.parameters())
    optimizer = torch.optim.AdamW([masters.get(p, p) for p in model.parameters()], lr=RATE, weight_decay=0.0)
    x = torch.ones(32, 64)
    for _ in range(STEPS):
        with opfuse.autocast(recipe=RECIPES[kind]):
            loss = sign * model(x).sum()
        loss.backward()
        step_by_hand(optimizer, masters)
    return list(masters.values())


def train_in_one_line(model: nn.Module, kind: str) -> list[torch.Tensor]:
    """The same by ``with_masters``, through a state dict by names half-way, into an optimizer of another rate."""
    first, second = (opfuse.with_masters(torch.optim.AdamW(model.parameters(), lr=r, weight_decay=0.0)) for r in (RATE, 1.0))
    for step in range(STEPS):
        if step == STEPS // 2:
            set_optimizer_state_dict(model, second, get_optimizer_state_dict(model, first))
        optimizer = first if step < STEPS // 2 else second
        with opfuse.autocast(recipe=RECIPES[kind]):
            loss = model(torch.ones(32, 64)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [entries["master"] for entries in second.state_dict()["state"].values() if "master" in entries]


def test_masters_are_the_preserved_values_or_the_decoded_ones_and_none_for_plain_weights():
    model = ops.Sequential(layer("mxfp8"), ops.Linear(64, 64), layer("mxfp8", preserve=False)).to(torch.bfloat16)
    masters = opfuse.master_weights(model.parameters())
    first, last = model[0].weight, model[2].weight
    assert list(masters) == [first, last]
    for p, want in ((first, first.get_high_precision_init_val()), (last, last.detach().dequantize(torch.float32))):
        assert type(masters[p]) is torch.Tensor
        assert (masters[p].dtype, masters[p].device, masters[p].requires_grad) == (torch.float32, p.device, False)
        assert torch.equal(masters[p], want.to(p.device, torch.float32))
    masters[first].zero_()
    assert first.get_high_precision_init_val().any()
    assert first.dequantize().any()
    plain = layer("mxfp8").float()  # nominally fp32: its copy in fp32 is still no quantized one
    assert type(next(iter(opfuse.master_weights([plain.weight]).values()))) is torch.Tensor


def worker(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{store}")
    mesh = init_device_mesh("cpu", (2,))
    for kind in RECIPES:
        compare(kind, mesh, rank)
        materialise(kind, mesh)
    gc.collect()  # a module holds the group through its mesh
    dist.barrier()
    dist.destroy_process_group()


def compare(kind, mesh, rank):
    """Every weight moves by 8 steps of 1e-4, which quantized weights have no room for; sharded as alone."""
    alone = layer(kind, preserve=False)
    start = alone.weight.detach().dequantize()
    (whole,) = train(alone, kind)
    assert (whole - start + RATE * STEPS).abs().max() < 1e-5
    model = fully_shard(layer(kind, preserve=False), mesh=mesh)
    assert isinstance(stored_in(model.weight), QuantizedTensor)
    (master,) = train(model, kind)
    model.reshard()
    assert type(master) is type(model.weight)
    rows = slice(32 * rank, 32 * rank + 32)
    assert master.placements == model.weight.placements
    assert torch.allclose(stored_in(master), whole[rows], rtol=0, atol=1e-5)
    held = stored_in(model.weight)
    assert isinstance(held, QuantizedTensor)
    assert torch.equal(held.dequantize(), held.quantizer.quantize(stored_in(master)).dequantize())
    assert torch.allclose(model.bias.full_tensor(), alone.bias, rtol=0, atol=1e-6)
    other = fully_shard(layer(kind, preserve=False), mesh=mesh)
    (same,) = train_in_one_line(other, kind)
    other.reshard()
    assert type(same) is type(master)
    assert torch.equal(stored_in(same), stored_in(master))
    assert torch.equal(stored_in(other.weight).dequantize(), held.dequantize())
    assert torch.equal(other.bias.full_tensor(), model.bias.full_tensor())


def materialise(kind, mesh):
    """Made on the meta device, sharded, and given values: the casts of those that torch draws for a plain weight."""
    models = [fully_shard(made, mesh=mesh) for made in (layer(kind, device="meta"), nn.Linear(64, 64, device="meta"))]
    for model in models:
        model.to_empty(device="cpu")
        torch.manual_seed(1)
        model.reset_parameters()
    stored, plain = (stored_in(model.weight).detach() for model in models)
    assert isinstance(stored, QuantizedTensor)
    assert torch.equal(stored.dequantize(), stored.quantizer.quantize(plain).dequantize())
    with opfuse.autocast(recipe=RECIPES[kind]):
        assert models[0](torch.ones(32, 64)).isfinite().all()


@pytest.mark.cpu
def test_masters_of_fsdp2_shards_train_as_the_whole_does(tmp_path):
    run_ranks(worker, tmp_path / "store")


def test_what_is_no_parameter_is_refused_instead_of_having_no_master():
    with opfuse.quantized_model_init(recipe=RECIPES["mxfp8"]):
        model = ops.Sequential(ops.Linear(32, 32))
    for given in (model, model[0], model.named_parameters(), [{"params": list(model.parameters())}]):
        with pytest.raises(DtypeError, match=r"pass model.parameters\(\)"):
            opfuse.master_weights(given)
    assert list(opfuse.master_weights(model[0].weight)) == [model[0].weight]
