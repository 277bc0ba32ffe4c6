"""Gradients that are sums over several uses of one tensor: the last use first, fused or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import opfuse
from opfuse import ops
from opfuse.recipes import Float8CurrentScaling
from tests.plans import plans_used

BF16 = torch.bfloat16
SIZE = 64


class Forth(ops.FusedOperation):
    """Its ops one by one, in both passes."""

    def fuser_forward(self, basic_op_ctxs, input_, **rest):
        return super().fuser_forward(basic_op_ctxs, input_, **rest)

    def fuser_backward(self, basic_op_ctxs, grad_output, **rest):
        return super().fuser_backward(basic_op_ctxs, grad_output, **rest)


def shared_ops() -> list[torch.nn.Module]:
    linear, bias = ops.BasicLinear(SIZE, SIZE, dtype=BF16), ops.Bias(SIZE, dtype=BF16)
    return [linear, bias, ops.GELU(), bias, ops.SiLU(), linear, bias, ops.ReLU(), linear]


def tied_parameters() -> list[torch.nn.Module]:
    layers = [ops.Linear(SIZE, SIZE, dtype=BF16) for _ in range(3)]
    for layer in layers[1:]:
        layer.weight, layer.bias = layers[0].weight, layers[0].bias
    return [layers[0], ops.GELU(), layers[1], ops.SiLU(), layers[2], ops.GELU()]


def channel_with_three_readers() -> list[torch.nn.Module]:
    tap, readers = ops.MakeExtraOutput(), [ops.AddExtraInput() for _ in range(3)]
    tap.set_extra_output_channel(0, "h", output_to_caller=False)
    for reader in readers:
        reader.set_extra_input_channel(0, "h")
    return [tap, ops.Linear(SIZE, SIZE, dtype=BF16), readers[0], ops.GELU(), readers[1], ops.SiLU(), readers[2], ops.GELU()]


def channel_read_twice_in_a_chain_and_once_behind_it() -> list[torch.nn.Module]:
    *before, last, gelu = channel_with_three_readers()
    return [*before, ops.Linear(SIZE, SIZE, dtype=BF16), last, gelu]


def three_extra_inputs() -> list[torch.nn.Module]:
    adds = [module for _ in range(3) for module in (ops.AddExtraInput(), ops.GELU())]
    return [ops.Linear(SIZE, SIZE, dtype=BF16), *adds]


def gradients_that_are_cast_before_their_readers() -> list[torch.nn.Module]:
    tap, *rest = channel_read_twice_in_a_chain_and_once_behind_it()
    return [ops.GELU(), tap, ops.Quantize(forward=True, backward=True), *rest]


CASES: dict[str, tuple[Callable[[], list[torch.nn.Module]], int]] = {
    "an op three times": (shared_ops, 0),
    "three ops with one weight": (tied_parameters, 0),
    "a channel with three readers": (channel_with_three_readers, 0),
    "a channel with two readers in one chain": (channel_read_twice_in_a_chain_and_once_behind_it, 0),
    "the input as an extra input too": (three_extra_inputs, 3),
    "a channel behind which gradients are cast": (gradients_that_are_cast_before_their_readers, 0),
}


def gradients(
    model: torch.nn.Module, parameters: list[torch.Tensor], x: torch.Tensor, dy: torch.Tensor, uses: int
) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y = model(x, *[x] * uses)
    return [y.detach(), *torch.autograd.grad(y, (x, *parameters), dy)]


@pytest.mark.few
@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling()], ids=["", "FP8"])
@pytest.mark.parametrize(
    ("case", "own"),
    [(case, own) for case in CASES for own in (False, True) if not (own and case == "an op three times")],
)
@pytest.mark.cpu
def test_gradients_of_one_tensor_are_summed_in_one_order(case, own, recipe):
    make_parts, uses = CASES[case]
    parts = make_parts()
    apart = ops.Sequential(*parts, rules=opfuse.RuleSet((), level=0))
    fused = Forth([basic for part in parts for basic in part.basic_ops]) if own else ops.Sequential(*parts)
    parameters = list(apart.parameters())
    for parameter in parameters:
        torch.nn.init.normal_(parameter, std=0.3)
    for _ in range(4):
        x, dy = torch.randn(32, SIZE).to(BF16), torch.randn(32, SIZE).to(BF16)
        with plans_used() as plans, opfuse.autocast(enabled=recipe is not None, recipe=recipe):
            found = gradients(fused, parameters, x, dy, uses)
            wanted = gradients(apart, parameters, x, dy, uses)
        assert plans[0].fusions
        for got, want in zip(found, wanted, strict=True):
            assert torch.equal(got, want)
