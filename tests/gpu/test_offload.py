"""What autograd saves leaves for the host while the device computes: the bits of a step that keeps it, in less memory."""

import pytest
import torch

import opfuse
from tests.gpu.test_pipelines import RECIPES, Step, same


@pytest.mark.row("H25")
@pytest.mark.parametrize("kind", RECIPES)
def test_h25_what_leaves_comes_back_with_the_same_bits(kind, device):
    """Nothing may stand still on its way; then the last tensor of a step may."""
    kept, leaving = (Step("swiglu", RECIPES[kind](), device) for _ in range(2))
    for ahead in (1, 1, 1, 2**20):
        with opfuse.offloaded(leaving.model, ahead=ahead, least=1):
            got = leaving()
        assert same(got, kept()), ahead


def test_memory_is_free_between_the_passes(device):
    wide = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.GELU()) for _ in range(8)]).to(device)
    x = torch.randn(4096, 2048, device=device)
    held = []
    for ahead in (None, 1, 1):
        scope = opfuse.offloaded(wide, ahead=ahead or 2**40, least=2**20 if ahead else 2**40)
        before = torch.cuda.memory_allocated()
        with scope:
            y = wide(x)
        held.append(torch.cuda.memory_allocated() - before)
        y.sum().backward()
    assert held[0] > 10 * x.nbytes
    assert max(held[1:]) <= 3 * x.nbytes  # the output, and what was saved last
