"""What may go wrong with the shards of stored weights. A task returns what is wrong, as those of training.py do."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import opfuse
from opfuse import ops
from opfuse.errors import OpfuseWarning, QuantizedTensorError
from opfuse.tensors import QuantizedTensor, gather, one_plane_fsdp, quantizers
from opfuse.tensors.masters import stored_in
from opfuse.tensors.planes import mirrored
from opfuse.tensors.storage import Plane
from tests.distributed.running import Task
from tests.distributed.training import RECIPES, copied, region_of
from tests.tensors.quantized_samples import QUANTIZERS, values


def sharded(recipe: str, rows: int, ranks: int, device: str, *, meta: bool = False, **options: Any) -> nn.Module:
    """options: of ``fully_shard``."""
    torch.manual_seed(0)
    with opfuse.quantized_model_init(recipe=RECIPES[recipe]()):
        layer = ops.Sequential(ops.Linear(128, rows, dtype=torch.bfloat16, device="meta" if meta else device))
    return fully_shard(layer, mesh=init_device_mesh(device, (ranks,)), **options)


def called(model: nn.Module, recipe: str, device: str) -> tuple[torch.Tensor, list[str]]:
    """The result of a call, and its warnings, but for those of emulated products and of a torch that nobody tried."""
    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    with warnings.catch_warnings(record=True) as told, region_of(recipe):
        warnings.simplefilter("always", OpfuseWarning)
        y = model(x)
    texts = [str(each.message) for each in told if issubclass(each.category, OpfuseWarning)]
    return y.detach(), [text for text in texts if "got emulated products" not in text and not text.startswith("torch: ")]


def same_on_all(x: torch.Tensor) -> bool:
    """Whether all ranks hold the bits of the first."""
    first = x.clone()
    dist.broadcast(first, 0)
    return torch.equal(first, x)


def check_written_apart(recipe: str, rank: int, ranks: int, device: str) -> list[str]:
    """Shards that were written before their ranks knew of each other are cast under what all share, and told of, once."""
    model = sharded(recipe, 128, ranks, device)
    held: Any = stored_in(model[0].weight)
    with torch.no_grad():
        held.copy_(held.dequantize() * (rank + 1))
    want = held.dequantize()
    y, told = called(model, recipe, device)
    apart = ["rows of several scales" in text for text in told]
    error = (held.dequantize() - want).abs().max() / want.abs().max()
    model.unshard()
    whole = model[0].weight
    wrong = {
        "told once": apart != [True] * (ranks > 1),
        "quantized": not isinstance(whole, QuantizedTensor),
        "alike": not (same_on_all(whole.detach().dequantize()) and same_on_all(y)),
        "near": not error < 0.2,
        "told again": bool(called(model, recipe, device)[1]),
    }
    return [name for name, failed in wrong.items() if failed]


def check_materialised(recipe: str, rank: int, ranks: int, device: str) -> list[str]:
    """Made on the meta device, sharded, given bytes and values: rows agree from their first values on."""
    model = sharded(recipe, 128, ranks, device, meta=True).to_empty(device=device)
    model[0].reset_parameters()
    y, told = called(model, recipe, device)
    return [*told, *([] if isinstance(stored_in(model[0].weight), QuantizedTensor) and same_on_all(y) else ["differs"])]


def check_cut_tiles(recipe: str, rank: int, ranks: int, device: str) -> list[str]:
    """A weight whose tiles the ranks would cut is plain, trains so, and says so, once."""
    model = sharded(recipe, 128, ranks, device)
    if ranks == 1:
        return []
    told = [text for _ in range(2) for text in called(model, recipe, device)[1]]
    wrong = [] if len(told) == 1 and "lives quantized, as it was made" in told[0] else [f"told {told}"]
    return wrong + (["quantized"] if isinstance(stored_in(model[0].weight), QuantizedTensor) else [])


def check_cut_tiles_of_converted(recipe: str, rank: int, ranks: int, device: str) -> list[str]:
    """The same of weights that a converted model took from a file, alone and as parts of one product; others stay quantized."""
    torch.manual_seed(0)
    layers = {name: nn.Linear(128, rows, bias=False) for name, rows in (("up", 128), ("gate", 128), ("down", 128 * ranks))}
    model = Gated(layers).to(device, torch.bfloat16)
    tensors, _ = opfuse.export_weights(model, "fp8_block", recipe=RECIPES[recipe](), ignore=[])
    model.load_state_dict(opfuse.import_weights(tensors), assign=True)
    opfuse.fuse_(model, RECIPES[recipe]())
    fully_shard(model, mesh=init_device_mesh(device, (ranks,)))
    told = [text for _ in range(2) for text in called(model, recipe, device)[1]]
    wanted = [] if ranks == 1 else ["lives quantized, as it was made"]
    wrong = [] if len(told) == len(wanted) and all(map(str.__contains__, told, wanted)) else [f"told {told}"]
    kept = [name for name, weight in model.named_parameters() if isinstance(stored_in(weight), QuantizedTensor)]
    return wrong + ([] if kept == [f"{name}.weight" for name in layers][-1 if ranks > 1 else 0 :] else [f"quantized: {kept}"])


class Gated(nn.Module):
    """Gate and up are one product."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return y


def check_mirrored(recipe: str, rank: int, ranks: int, device: str) -> list[str]:
    """A columnwise plane that is the rowwise one transposed is made for the backward pass alone, and for who reads it."""
    model, made = sharded(recipe, 128 * ranks, ranks, device, reshard_after_forward=True), []
    x = torch.ones(32, 128, device=device, dtype=torch.bfloat16, requires_grad=True)

    def count(plane: Plane) -> Plane:
        made.append(plane)
        return mirrored(plane)

    with mock.patch.object(gather, "mirrored", count), mock.patch.object(one_plane_fsdp, "mirrored", count):
        counts = []
        for _ in range(2):
            with region_of(recipe):
                y = model(x)
            counts.append(len(made))
            y.sum().backward()
            counts.append(len(made))
        model.unshard()
        whole: Any = model[0].weight
        same = all(map(torch.equal, whole.columnwise.tensors(), mirrored(whole.rowwise).tensors()))
        counts.append(len(made))
    wanted = [1, 2, 2, 3, 4] if ranks > 1 else counts
    return ([] if same else ["another plane"]) + ([] if counts == wanted else [f"made {counts} times, not {wanted}"])


class Layer(nn.Module):
    """A module that is no pipeline: it reads the values of its weight, in both passes."""

    def __init__(self, quantizer: quantizers.Quantizer) -> None:
        super().__init__()
        self.weight = nn.Parameter(quantizer(values((128, 96), dtype=torch.float32)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


def steps(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The results of the calls of two steps."""
    optimizer, outputs = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(2):
        optimizer.zero_grad()
        outputs.append(model(x))
        outputs[-1].square().mean().backward()
        optimizer.step()
    return [y.detach() for y in outputs]


def check_offloaded_layer(kind: str, rank: int, ranks: int, device: str) -> list[str]:
    """The same with shards that live on the CPU."""
    offload = CPUOffloadPolicy(pin_memory=device == "cuda")
    group = dist.new_group(backend="nccl" if device == "cuda" else "gloo")  # which may know no CPU
    with copied(device):
        return check_layer(kind, rank, ranks, device, mesh=DeviceMesh.from_group(group, device), offload_policy=offload)


def check_layer(kind: str, rank: int, ranks: int, device: str, **options: Any) -> list[str]:
    """A module that is no pipeline trains as on one rank. options: of ``fully_shard``."""
    options.setdefault("mesh", init_device_mesh(device, (ranks,)))
    quantizer, x = QUANTIZERS[kind](), values((8, 96), dtype=torch.float32).to(device)
    expected = steps(alone := Layer(quantizer).to(device), x)
    model = fully_shard(Layer(quantizer).to(device), **options)
    wrong = [f"call {i}" for i, (y, want) in enumerate(zip(steps(model, x), expected)) if not torch.equal(y, want)]
    model.reshard()
    rows = slice(128 // ranks * rank, 128 // ranks * (rank + 1))
    if not torch.equal(model.weight.to_local().dequantize().to(device), alone.weight.dequantize()[rows]):
        wrong.append("weights")
    model.unshard()
    return wrong + ([] if isinstance(model.weight, QuantizedTensor) else ["plain"])


def check_broadcast(recipe: str, rank: int, ranks: int, device: str) -> list[str]:
    """The bytes of one rank come to all; what is read is values; collectives whose values would have to be cast are refused."""
    weights = _weights(recipe, ranks, device)
    mine, count = weights[rank], weights[rank]._version
    dist.broadcast(mine, ranks - 1)
    pairs = zip(mine.record.tensors(), weights[-1].record.tensors(), strict=True)
    wrong = [] if all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs) else ["other bytes"]
    wrong += [] if mine._version > count else ["no write was counted"]
    values = [torch.empty_like(mine.dequantize()) for _ in range(ranks)]
    dist.all_gather(values, mine)
    wrong += [] if all(torch.equal(each, mine.dequantize()) for each in values) else ["other values"]
    dist.reduce_scatter(values[0], [mine] * ranks, dist.ReduceOp.MAX)
    wrong += [] if torch.equal(values[0], mine.dequantize()) else ["other maxima"]
    for call in (
        dist.all_reduce,
        lambda into: dist.reduce_scatter_tensor(into, torch.cat(values)),
        lambda into: dist.all_gather([into] * ranks, values[0]),
    ):
        with pytest.raises(QuantizedTensorError, match="a plain tensor to write into"):
            call(mine)
    return wrong


def _weights(recipe: str, count: int, device: str) -> list[Any]:
    """Parameters that live quantized, each of other values."""
    with opfuse.quantized_model_init(recipe=RECIPES[recipe]()):
        weights = [ops.Linear(128, 128, device=device, dtype=torch.bfloat16).weight.data for _ in range(count)]
    for i, weight in enumerate(weights):
        weight.copy_(torch.randn(128, 128, generator=torch.Generator().manual_seed(i)) * 10**i)
    return weights


def check_refused_alone(recipe: str, rank: int, ranks: int, device: str) -> list[str]:
    """A collective that one rank refuses, or whose lists one rank alone has, ends on all of them."""
    weights = _weights(recipe, ranks, device)
    values = [each.dequantize() for each in weights]
    into, most, alone = torch.empty_like(values[0]), torch.full_like(values[0], -torch.inf), rank == 0
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            dist.scatter(into, weights if alone else None, src=0)
    wrong = [] if torch.equal(into, values[rank]) else ["scatter: other values"]
    refused = [
        lambda: dist.gather(values[rank], [weights[0]] * ranks if alone else None, dst=0),
        lambda: dist.all_reduce(weights[0] if alone else most, dist.ReduceOp.MAX),
        lambda: dist.scatter(weights[0] if alone else into, values[::-1] if rank == 1 else None, src=1),
        lambda: dist.recv(weights[0], 1) if alone else dist.send(values[0], 0) if rank == 1 else None,
    ]
    for call in refused:
        with pytest.raises(QuantizedTensorError, match="a plain tensor to write into") if alone else nullcontext():
            call()
    wrong += [] if alone or torch.equal(most, values[0]) else ["all_reduce: other maxima"]
    wrong += [] if alone or torch.equal(into, values[::-1][rank]) else ["scatter: other values beside a refusal"]
    return wrong + ([] if torch.equal(weights[0].dequantize(), values[0]) else ["written"])


TASKS: list[Task] = [
    *((check_broadcast, recipe) for recipe in ("current", "nvfp4")),
    (check_refused_alone, "current"),
    *((check_layer, kind) for kind in ("mxfp8", "mxfp8_swizzled", "hybrid", "current", "nvfp4")),
    *((check_offloaded_layer, kind) for kind in ("mxfp8", "current")),
    (check_written_apart, "current"),
    (check_written_apart, "nvfp4"),
    (check_materialised, "current"),
    (check_cut_tiles, "block"),
    (check_cut_tiles_of_converted, "block"),
    *((check_mirrored, kind) for kind in ("current", "block", "nvfp4")),
]
