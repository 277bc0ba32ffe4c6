"""What ``TensorParallel`` takes and refuses; tests/distributed compares its numbers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import opfuse
from opfuse import ops
from opfuse.errors import PipelineError, ShapeError

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{store}")
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class TwoRanks:
    """A mesh of which only the size is asked."""

    def size(self):
        return 2

    def get_local_rank(self):
        return 0

    def get_group(self):
        return None


REFUSED = {
    "no pipeline": nn.Sequential(nn.Linear(32, 32)),
    "one product": ops.Sequential(ops.Linear(32, 32)),
    "something behind": ops.Sequential(ops.Linear(32, 32), ops.Linear(32, 32), ops.GELU()),
    "a norm between": ops.Sequential(ops.Linear(32, 32), ops.RMSNorm(32), ops.Linear(32, 32)),
    "parameters between": ops.Sequential(ops.Linear(32, 32), ops.Bias(32), ops.Linear(32, 32)),
    "a module of torch": ops.Sequential(nn.LayerNorm(32), ops.Linear(32, 32), ops.Linear(32, 32)),
    "another tensor": ops.Sequential(ops.AddExtraInput(), ops.Linear(32, 32), ops.Linear(32, 32)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_pipelines_that_cannot_be_cut_are_refused_and_stay(mesh, name):
    model = REFUSED[name]
    with pytest.raises(PipelineError, match="wants a Sequential of ops that ends with the second of two Linear"):
        parallelize_module(model, mesh, opfuse.TensorParallel())
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.parametrize(
    ("activation", "sizes", "multiple"),
    [(ops.SwiGLU(), (64, 32), 64), (ops.SwiGLU(glu_interleave_size=32), (64, 32), 64), (ops.GELU(), (33, 33), 1)],
    ids=["halves", "blocks", "odd"],
)
def test_features_that_the_ranks_cannot_share_are_refused(activation, sizes, multiple):
    model = ops.Sequential(ops.Linear(32, sizes[0]), activation, ops.Linear(sizes[1], 32))
    with pytest.raises(ShapeError, match=f"wants 2 equal parts of the features, of a multiple of {multiple}"):
        opfuse.TensorParallel()._apply(model, TwoRanks())
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_parameters_are_dtensors_with_their_names_and_a_pipeline_on_one_rank_is_the_pipeline(mesh):
    torch.manual_seed(0)
    model = ops.Sequential(ops.LayerNorm(32), ops.Linear(32, 64), ops.SwiGLU(), ops.Linear(32, 32))
    x, names = torch.randn(32, 32, requires_grad=True), list(model.state_dict())
    want = model(x)
    want.sum().backward()
    grads = [p.grad for p in model.parameters()]
    assert parallelize_module(model, mesh, opfuse.TensorParallel(sequence_dim=0)) is model
    assert list(model.state_dict()) == names
    y = model(x)
    assert type(y) is torch.Tensor
    assert torch.equal(y, want)
    y.sum().backward()
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.grad.full_tensor(), grad)
    with torch.no_grad():
        assert torch.equal(model(x), want)
    model.zero_grad()
    model(x.detach()).sum().backward()  # nothing reads the values of the norm's weight
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert torch.equal(parameter.grad.full_tensor(), grad)


def test_styles_of_torch_are_for_modules_of_torch(mesh):
    with pytest.raises(NotImplementedError, match=r"only support nn\.Linear"):
        parallelize_module(ops.Sequential(ops.Linear(32, 32)), mesh, {"0": ColwiseParallel()})
