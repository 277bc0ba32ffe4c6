"""DTensors and other tensors that dispatch on their own: refused, since a kernel would read memory that they do not have."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import opfuse
from opfuse import ops, recipes
from opfuse.errors import UnsupportedError
from opfuse.runtime.graphs import check_module
from opfuse.runtime.replay import warmup as rehearsal
from opfuse.tensors import quantizers, row_collectives
from tests.ops.test_op_errors import raised

RECIPES = {"none": None, "mxfp8": recipes.MXFP8BlockScaling(), "nvfp4": recipes.NVFP4BlockScaling()}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    """Of one process, where a DTensor holds the very values that a plain tensor would."""
    device = torch.get_default_device().type
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo" if device == "cpu" else "nccl", rank=0, world_size=1, init_method=f"file://{store}")
    yield init_device_mesh(device, (1,))
    dist.destroy_process_group()


def test_a_rehearsal_meets_no_ranks(mesh):
    x = torch.ones(4)
    with pytest.raises(rehearsal._Stop, match="allreduce_ waits for other ranks"), rehearsal._Harmless():
        dist.all_reduce(x)
    with pytest.raises(rehearsal._Stop, match="waits for other ranks"), rehearsal._Harmless():
        row_collectives.gathered(x, 1, None)


def test_a_step_on_masters_of_shards_is_a_write_that_autograd_counts(mesh):
    with opfuse.quantized_model_init(recipe=RECIPES["mxfp8"]):
        sharded = fully_shard(ops.Sequential(ops.Linear(64, 64, bias=False)), mesh=mesh)
    (weight,) = sharded.parameters()
    optimizer = opfuse.with_masters(torch.optim.SGD(sharded.parameters(), lr=0.5))
    with opfuse.autocast(recipe=RECIPES["mxfp8"]):
        told = opfuse.explain(sharded, data().requires_grad_())
    assert [each.memory for each in told.saved if each.name == "w"] == ["parameter 0.weight"]
    called(sharded, data(), "mxfp8").sum().backward()
    sharded.reshard()
    (weight,), kept = sharded.parameters(), weight._version
    saved = weight * torch.ones((), requires_grad=True)  # what the rest of a model may save
    optimizer.step()
    assert weight._version > kept
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.to_local().sum().backward()


def called(model: nn.Module, x: torch.Tensor, kind: str) -> torch.Tensor:
    with opfuse.autocast(enabled=kind != "none", recipe=RECIPES[kind]):
        return model(x)


def model() -> ops.Sequential:
    return ops.Sequential(ops.Linear(64, 64, dtype=torch.bfloat16), ops.GELU())


def data() -> torch.Tensor:
    return torch.randn(32, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=str)
@pytest.mark.parametrize("warm", [False, True], ids=["at first", "where a plan stands"])
@pytest.mark.parametrize("kind", RECIPES)
def test_dtensors_are_refused_as_inputs_and_as_parameters(mesh, kind, warm, placement):
    pipeline = model()
    if warm:
        called(pipeline, data(), kind)
    x = distribute_tensor(data(), mesh, [placement])
    with pytest.raises(UnsupportedError, match=r"(?s)got a DTensor.*to_local\(\)"):
        called(pipeline, x, kind)
    added = ops.Sequential(ops.AddExtraInput())
    with pytest.raises(UnsupportedError, match=r"extra input 0.*got a DTensor"):
        added(data(), x)
    distribute_module(pipeline, mesh)
    assert isinstance(pipeline[0].weight, DTensor)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"(?s)weight.*got a DTensor.*fully_shard the pipeline"):
            called(pipeline, data(), kind)
    with pytest.raises(UnsupportedError, match="DTensor"):
        opfuse.explain(pipeline, data())


def test_ops_that_are_sharded_one_by_one_are_refused_and_sharded_pipelines_run(mesh):
    """A pipeline does not call its ops as modules, so nothing would gather their parameters."""
    torch.manual_seed(0)
    pipeline, x = model(), data()
    want = called(pipeline, x, "mxfp8")
    fully_shard(pipeline, mesh=mesh)
    assert torch.equal(called(pipeline, x, "mxfp8"), want)
    with pytest.raises(UnsupportedError, match=r"graphed: wants parameters that no ranks share, got FSDPSequential in shards"):
        opfuse.graphed(pipeline, (x,))
    alone = model()
    fully_shard(alone[0], mesh=mesh)
    with pytest.raises(UnsupportedError, match="fully_shard the pipeline"):
        called(alone, x, "mxfp8")


def test_other_subclasses_that_dispatch_are_refused_and_those_that_hold_memory_run():
    from torch.testing._internal.two_tensor import TwoTensor

    class Named(torch.Tensor):
        """A tensor with a name: memory as any other."""

    x, pipeline = data(), model()
    want = pipeline(x)
    with pytest.raises(UnsupportedError, match="got a TwoTensor"):
        pipeline(TwoTensor(x, x))
    assert torch.equal(pipeline(x.as_subclass(Named)), want)
    assert torch.equal(pipeline(nn.Parameter(x)), want)
    view = quantizers.Float8CurrentScalingQuantizer(torch.float8_e4m3fn)(data().t()).t()  # a copy that refuses writes
    assert torch.equal(pipeline(view), pipeline(view.clone()))


# -- shards and torch.compile --------------------------------------------------------------------------------------------------


def trained(call, module: nn.Module) -> list[torch.Tensor]:
    """Output and gradients of three steps."""
    torch.manual_seed(0)
    for _ in range(3):
        with opfuse.autocast(recipe=CURRENT):
            y = call(torch.randn(32, 64))
        y.square().mean().backward()
    return [y.detach(), *[p.grad.to_local() for p in module.parameters()]]


CURRENT = recipes.Float8CurrentScaling()


@pytest.mark.cpu
@pytest.mark.parametrize("stored", [False, True])
def test_layers_that_fsdp2_shards_are_compiled_one_by_one(mesh, stored):
    """As TorchTitan does: each layer is one graph, and the gathers stand outside."""
    torch._dynamo.reset()
    counters.clear()
    with opfuse.quantized_model_init(enabled=stored, recipe=CURRENT):
        eager = nn.Sequential(*[ops.Sequential(ops.RMSNorm(64), ops.Linear(64, 64), ops.GELU()) for _ in range(2)])
    compiled = copy.deepcopy(eager)
    for each in (eager, compiled):
        for layer in each:
            fully_shard(layer, mesh=mesh)
        fully_shard(each, mesh=mesh)
    for layer in compiled:
        layer.compile(backend="eager", fullgraph=True)
    assert all(map(torch.equal, trained(compiled, compiled), trained(eager, eager)))
    assert counters["stats"]["unique_graphs"] == 2
    torch._dynamo.reset()


@pytest.mark.cpu
def test_a_tensor_parallel_pipeline_is_compiled_by_itself_and_not_inside_of_a_graph(mesh):
    torch._dynamo.reset()
    eager = ops.Sequential(ops.Linear(64, 64), ops.GELU(), ops.Linear(64, 64))
    alone, inside = copy.deepcopy(eager), copy.deepcopy(eager)
    for each in (eager, alone, inside):
        parallelize_module(each, mesh, opfuse.TensorParallel())
    alone.compile(backend="eager", fullgraph=True)
    wanted = trained(eager, eager)
    assert all(map(torch.equal, trained(alone, alone), wanted))
    assert all(map(torch.equal, trained(torch.compile(nn.Sequential(inside), backend="eager"), inside), wanted))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"meet around it. Cure: compile the pipeline by itself"):
        torch.compile(nn.Sequential(inside), backend="eager", fullgraph=True)(data().float())
    torch._dynamo.reset()


def test_a_graph_takes_no_parameters_in_shards(mesh):
    wanted = "parameters that no ranks share"
    gathered = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(gathered[1], mesh=mesh)
    with raised(UnsupportedError, RuntimeError, wanted, "got 1 in shards"):
        check_module("graphed", gathered)
    placed = nn.Sequential(nn.Linear(4, 4))
    placed[0].bias = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Replicate()]))
    with raised(UnsupportedError, RuntimeError, wanted, "got 0.bias in shards"):
        check_module("graphed", placed)
    check_module("graphed", nn.Sequential(nn.Linear(4, 4)))
