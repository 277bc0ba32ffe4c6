"""torch.set_default_device says where a user's new tensors lie, and nothing of those that the library makes for itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import opfuse
from opfuse import ops
from opfuse.torch_private.table import faults
from tests.compiler.harness import RECIPES

pytestmark = pytest.mark.cpu
KINDS = ("fp8_current", "delayed", "fp8_block", "mxfp8")


def converted(kind: str) -> nn.Module:
    with torch.device("cpu"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    opfuse.fuse_(model, RECIPES[kind]())
    return model


def of_ops(kind: str, *made: ops.FusibleOperation) -> nn.Module:
    model = ops.Sequential(*made)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, device="cpu"))
    return model


def gradients(model: nn.Module, *given: torch.Tensor) -> list[torch.Tensor]:
    """Of a first call to one that is repeated, all of them."""
    return [grad for _ in range(4) for grad in torch.autograd.grad(model(*given).sum(), [*model.parameters()])]


def trains(kind: str, x: torch.Tensor) -> object:
    return gradients(converted(kind), x)


def trains_compiled(kind: str, x: torch.Tensor) -> object:
    return gradients(torch.compile(converted(kind), backend="aot_eager", fullgraph=True), x)


def trains_a_head(kind: str, x: torch.Tensor) -> object:
    head = of_ops(kind, ops.LinearCrossEntropy(64, 96, quantized=True, device="cpu"))
    with opfuse.autocast(recipe=RECIPES[kind]()):
        return gradients(head, x, torch.arange(32, device="cpu"))


def trains_experts(kind: str, x: torch.Tensor) -> object:
    experts = ops.GroupedLinear(3, 64, 64, device="cpu"), ops.ScaledSwiGLU(), ops.GroupedLinear(3, 32, 64, device="cpu")
    sizes = torch.tensor([0, 128, 128], device="cpu")
    with opfuse.autocast(recipe=RECIPES[kind]()):
        rows, scales = torch.cat([x] * 8), torch.linspace(0, 1, 256, device="cpu")
        return gradients(of_ops(kind, *experts), rows, sizes, scales, sizes)


def steps_on_masters(kind: str, x: torch.Tensor) -> object:
    with torch.device("cpu"), opfuse.quantized_model_init(recipe=RECIPES[kind]()):
        torch.manual_seed(0)
        model = ops.Sequential(ops.Linear(64, 64), ops.Linear(64, 64))
    optimizer = opfuse.with_masters(torch.optim.AdamW(model.parameters(), lr=1e-2))
    for _ in range(3):
        with opfuse.autocast(recipe=RECIPES[kind]()):
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [state["master"] for state in optimizer.state_dict()["state"].values() if "master" in state]


def tells_what_is_saved(kind: str, x: torch.Tensor) -> object:
    return str(opfuse.saved(converted(kind), x, errors=True))


def explains(kind: str, x: torch.Tensor) -> object:
    return str(opfuse.explain(converted(kind), x))


WAYS = (trains, trains_compiled, trains_a_head, trains_experts, steps_on_masters, tells_what_is_saved, explains)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_the_library_makes_lies_where_its_inputs_lie(way, kind):
    """A default device without memory: whatever was made there by mistake would have no values."""
    x = torch.linspace(-2, 3, 32 * 64).view(32, 64)
    wanted = way(kind, x)
    torch.compiler.reset()
    with torch.device("meta"):
        found = way(kind, x)
    assert wanted
    assert all(
        torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        for one, other in zip(tree_leaves(wanted), tree_leaves(found), strict=True)
    )


def test_names_of_torch_are_checked_on_the_cpu():
    with torch.device("meta"):
        assert [*faults(slow=False)] == []
