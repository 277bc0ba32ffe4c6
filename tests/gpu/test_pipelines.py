"""Whole pipelines on the device under every recipe and override: no host waits, graphs, the same bits again, close to the CPU."""

import functools
import gc

import pytest
import torch

import opfuse
from opfuse import ops, recipes
from opfuse.errors import RecipeError
from opfuse.recipes.recipe import OVERRIDES

WIDTH, REPLAYS = 256, 100
RECIPES = {
    "delayed": recipes.DelayedScaling,
    "current": recipes.Float8CurrentScaling,
    "block": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "nvfp4": functools.partial(recipes.NVFP4BlockScaling, disable_stochastic_rounding=True),
}
PIPELINES = {
    "gelu": lambda: [ops.Linear(WIDTH, 2 * WIDTH), ops.GELU(), ops.Linear(2 * WIDTH, WIDTH)],
    "swiglu": lambda: [
        ops.RMSNorm(WIDTH),
        ops.Linear(WIDTH, 4 * WIDTH, bias=False),
        ops.SwiGLU(),
        ops.Linear(2 * WIDTH, WIDTH, bias=False),
    ],
    "residual": lambda: _residual(ops.LayerNorm(WIDTH), ops.Linear(WIDTH, WIDTH), ops.SiLU()),
}


def _residual(*branch):
    """The branch of an input, and their sum."""
    source, add = ops.MakeExtraOutput(), ops.AddExtraInput()
    source.set_extra_output_channel(0, "skip", output_to_caller=False)
    add.set_extra_input_channel(0, "skip")
    return [source, *branch, add]


def _takes(make, override):
    try:
        make(backward_override=override)
    except RecipeError:
        return False
    return True


CASES = [
    pytest.param(name, make, override, id=f"{name}-{kind}-{override}")
    for name in PIPELINES
    for kind, make in RECIPES.items()
    for override in OVERRIDES
    if _takes(make, override)
]


class Step:
    """Forward and backward of one pipeline, over tensors that stay where they are."""

    def __init__(self, name, recipe, device):
        torch.manual_seed(0)
        self.model = ops.Sequential(*PIPELINES[name]()).to(torch.bfloat16).to(device)
        self.recipe = recipe
        self.x, self.dy = (torch.randn(128, WIDTH).to(torch.bfloat16).to(device) for _ in range(2))
        self.x.requires_grad_()

    def __call__(self):
        """The output, and the gradients of the input and of the parameters."""
        with opfuse.autocast(recipe=self.recipe):
            y = self.model(self.x)
        return [y.detach(), *torch.autograd.grad(y, [self.x, *self.model.parameters()], self.dy)]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("name", "make", "override"), CASES)
def test_r11_r12_a_step_waits_for_nothing_and_repeats_its_bits(name, make, override, device):
    """Delayed scaling learns from each step, so its scales are given time to settle."""
    step = Step(name, make(backward_override=override), device)
    for _ in range(4):
        first = step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        others = [step() for _ in range(10)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(same(other, first) for other in others)


@pytest.mark.parametrize(("name", "make", "override"), CASES)
def test_r12_a_captured_step_replays_on_new_values(name, make, override, device):
    check_replays(*(Step(name, make(backward_override=override), device) for _ in range(2)), device)


@pytest.mark.parametrize("kind", RECIPES)
def test_r12_a_captured_step_of_weights_that_live_quantized(kind, device):
    recipe = RECIPES[kind]()
    with opfuse.quantized_model_init(recipe=recipe):
        steps = [Step("swiglu", recipe, device) for _ in range(2)]
    check_replays(*steps, device)


def check_replays(step, other, device):
    """A hundred replays of ``step``, each on new values, have the bits of ``other`` called."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
            other()
    torch.cuda.current_stream().wait_stream(side)
    gc.collect()  # an earlier graph that dies during the capture would invalidate it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(REPLAYS):
        torch.manual_seed(seed)
        values = torch.randn_like(step.dy) * (1 + seed % 7), torch.randn_like(step.dy)
        for each in (step, other):
            each.x.data.copy_(values[0])
            each.dy.copy_(values[1])
        graph.replay()
        assert same(captured, other()), seed


def test_r12_each_replay_rounds_with_bits_of_its_own(device):
    step = Step("gelu", recipes.NVFP4BlockScaling(), device)
    step()
    gc.collect()  # an earlier graph that dies during the capture would invalidate it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, dx, *_ = step()
    graph.replay()
    first = y.clone(), dx.clone()
    graph.replay()
    assert torch.equal(y, first[0])
    assert not torch.equal(dx, first[1])


@pytest.mark.parametrize(("name", "make", "override"), CASES)
def test_r5_a_step_on_the_device_is_near_that_on_the_cpu(name, make, override, device):
    """Native sums have fewer bits and other products round differently: near in norm, by the noise of the format."""
    here, there = Step(name, make(backward_override=override), device), Step(name, make(backward_override=override), "cpu")
    for got, wanted in zip(here(), there(), strict=True):
        error = (got.cpu().double() - wanted.double()).norm() / wanted.double().norm()
        assert error < 0.05, error
