"""Weights of 128 x 128 blocks that are stored by rows alone: bit for bit what products of both planes give."""

import pytest
import torch
from torch import nn

import opfuse
from opfuse.formats import USAGES
from opfuse.recipes import availability
from opfuse.tensors import QuantizedTensor
from opfuse.tensors.quantizers import Float8BlockQuantizer

pytestmark = pytest.mark.skipif(availability.device_arch() != (9, 0), reason="products of compute capability 9.0")

BF16, RECIPE = torch.bfloat16, opfuse.recipes.Float8BlockScaling()
QUANTIZER = Float8BlockQuantizer(torch.float8_e4m3fn, force_pow_2_scales=False)


class Gated(nn.Module):
    """A gated unit, whose first two weights share a product."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def stored(model: nn.Module, *, planes: tuple[str, ...], trains: bool) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            held = QUANTIZER.quantize(module.weight.detach()).only(*planes, why="not wanted")
            module.weight = nn.Parameter(QuantizedTensor(held, quantizer=QUANTIZER), requires_grad=trains)
    return model


def results(model: nn.Module, rows: int, width: int, device: torch.device) -> list[torch.Tensor]:
    """Interpreted, recorded and repeated."""
    found = []
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(rows, width, device=device).to(BF16).requires_grad_()
        y = model(x)
        trained = [p for p in model.parameters() if p.requires_grad]
        found += [y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, *trained])]
    return found


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("size", [(128, 256, 384), (1024, 2048, 1152), (272, 1040, 640)])
def test_one_plane_gives_the_bits_of_two(size, trains, pack, compiles, device):
    (rows, width, inner), ways = size, []
    for planes in (USAGES, USAGES[:1]):
        torch.manual_seed(0)
        model = stored(Gated(width, inner).to(device, BF16), planes=planes, trains=trains)
        opfuse.fuse_(model, RECIPE, pack=pack)
        torch._dynamo.reset()
        ways.append(results(torch.compile(model, backend="aot_eager") if compiles else model, rows, width, device))
    assert all(map(torch.equal, *ways))
