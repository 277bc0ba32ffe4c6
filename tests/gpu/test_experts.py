"""An activation between experts, or its derivative, and the cast of the result in groups: one launch beside the two launches."""

from __future__ import annotations

import copy

import pytest
import torch

import opfuse
from benchmarks.grouped import Mixture, mixture
from opfuse import ops, recipes
from opfuse.fusions import RULES
from opfuse.kernels.casts.encoding import WithOriginal
from opfuse.kernels.chains.cast import backward_chain_encoded, forward_chain_encoded
from opfuse.kernels.chains.chain import backward_chain, forward_chain
from opfuse.numerics.activations import POINTWISE
from opfuse.numerics.chain import Stage
from opfuse.recipes import availability
from opfuse.runtime.replay.dispatch import interpreted
from opfuse.tensors.quantizers import Float8BlockQuantizer
from opfuse.tensors.ragged import cast_in_groups, encoding_in_groups
from tests.compiler.harness import UNFUSED, Step, differences, randn, run
from tests.gpu.guards import Guards
from tests.kernels.cases.chains import CONSTANTS

native_groups = pytest.mark.skipif(not (9, 0) <= availability.device_arch() < (10, 0), reason="no kernel multiplies here")
BF16 = torch.bfloat16
BLOCKS = recipes.Float8BlockScaling()
APART = RULES.without("epilogue_groups", "backward_groups")
SIZES = {
    "one row": (1,),
    "one row among groups": (0, 0, 1, 0),
    "whole tiles": (256, 128, 0, 512),
    "tails": (1, 0, 300, 127, 0, 129, 16, 67),
    "many": tuple(i * 37 % 301 for i in range(128)),
    "a few rows each": tuple(i * 7 % 11 for i in range(128)),
    "one of all": (0, 4099, 0),
}
WIDTHS = (128, 200, 768, 2048)
CHAINS = {"scaled_swiglu": 2, "swiglu": 2, "gelu": 1, "reglu": 2}
"""Ops, and how many columns they read for each of their result."""


def cast(**options: object) -> Float8BlockQuantizer:
    return Float8BlockQuantizer(torch.float8_e4m3fn, block_scaling_dim=1, **options)


def rows_of(name: str, sizes: tuple[int, ...], width: int, device: torch.device) -> tuple[torch.Tensor, list[Stage]]:
    """The input of a chain, with an infinity and a NaN in it, and the chain."""
    rows = sum(sizes)
    x = randn(rows, CHAINS[name] * width, seed=rows).to(device)
    if rows > 9:
        x[rows // 3, 5], x[rows // 2, -1] = torch.inf, torch.nan
    scales = {"scale": torch.rand(rows, device=device).to(BF16)} if name == "scaled_swiglu" else {}
    return x, [Stage(POINTWISE[name], scales)]


@pytest.mark.row("X12")
@pytest.mark.parametrize("usages", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", CHAINS)
def test_r4_one_launch_has_the_bytes_of_two(name, sizes, width, usages, device):
    """Codes, scales, their padding, and zeros behind rows and tiles; nothing is written outside."""
    splits = torch.tensor(SIZES[sizes], device=device)
    x, stages = rows_of(name, SIZES[sizes], width, device)
    quantizer = cast(rowwise=usages[0], columnwise=usages[1])
    wanted = cast_in_groups(quantizer, forward_chain(x, stages)[0], splits)
    with Guards() as guards:
        made = encoding_in_groups(quantizer, torch.Size((len(x), width)), BF16, splits, device)
        got = made.storage(forward_chain_encoded(x, stages, made.encoding)[0])
    guards.check()
    for one, other in zip(got.tensors(), wanted.tensors(), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


DERIVATIVES = {**CHAINS, "scaled_situglu": 2, "scaled_clamped_qgeglu": 2, "scaled_srelu": 1}


@pytest.mark.row("X12")
@pytest.mark.parametrize("made_of", [(True, True, False), (True, False, False), (False, True, True), (True, True, True)], ids=str)
@pytest.mark.parametrize("width", [128, 200, 768])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", DERIVATIVES)
def test_r4_one_launch_backward_has_the_bytes_of_two(name, sizes, width, made_of, device):
    """Of the codes, of gradients of rows' scales, and of the gradient itself where that is stored; nothing is written outside."""
    rowwise, columnwise, stores = made_of
    splits, rows = torch.tensor(SIZES[sizes], device=device), sum(SIZES[sizes])
    columns = DERIVATIVES[name] * width
    x, dy = (randn(rows, each, seed=each).to(device) for each in (columns, width))
    if rows > 9:
        x[rows // 3, 5], dy[rows // 2, -1] = torch.inf, torch.nan
    math = POINTWISE[name]
    scales = {"scale": torch.rand(rows, device=device).to(BF16)} if "scale" in math.operands else {}
    stages = [Stage(math, scales, {constant: CONSTANTS[constant] for constant in math.constants})]
    quantizer = cast(rowwise=rowwise, columnwise=columnwise)
    dx, wanted_grads = backward_chain(dy, stages, {0: x})
    wanted = cast_in_groups(quantizer, dx, splits)
    with Guards() as guards:
        made = encoding_in_groups(quantizer, torch.Size((rows, columns)), BF16, splits, device)
        encode = WithOriginal(made.encoding.layouts, made.encoding) if stores else made.encoding
        encoded, grads = backward_chain_encoded(dy, stages, {0: x}, encode)
        got = made.storage(encoded[: len(encoded) - stores])
    guards.check()
    pairs = [*zip(got.tensors(), wanted.tensors(), strict=True), *zip(grads[0].values(), wanted_grads[0].values(), strict=True)]
    for one, other in [*pairs, *([(encoded[-1][0], dx)] if stores else [])]:
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.row("X12")
@pytest.mark.parametrize("sizes", SIZES)
def test_r1_one_launch_has_the_bytes_of_the_definition(sizes, device):
    """Of an activation that a CPU computes with the same bits."""
    splits = torch.tensor(SIZES[sizes])
    x, stages = rows_of("reglu", SIZES[sizes], 256, torch.device("cpu"))

    def planes(where: torch.device) -> list[torch.Tensor]:
        made = encoding_in_groups(cast(), torch.Size((len(x), 256)), BF16, splits.to(where), where)
        encoded, _ = forward_chain_encoded(x.to(where), stages, made.encoding)
        return [each.cpu() for plane in encoded for each in plane]

    for got, wanted in zip(planes(device), planes(torch.device("cpu")), strict=True):
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


# -- mixtures --------------------------------------------------------------------------------------------------------------------


PROBLEMS = [
    Mixture(*sizes) for sizes in ((300, 256, 8, 2, 128), (1, 128, 128, 8, 128), (1024, 144, 4, 4, 272), (777, 640, 64, 1, 384))
]


def drawn(problem: Mixture, device: torch.device) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(5)
    return mixture(problem, str(device)), randn(problem.tokens, problem.features).to(device)


@pytest.mark.row("X12")
@native_groups
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"backward_override": "dequantized"},
        {"backward_override": "high_precision"},
        {"keep": "recompute"},
        {"keep": "quantized"},
        {"batch_invariant": True},
    ],
    ids=str,
)
def test_r4_a_mixture_is_what_it_is_apart(changed, problem, device):
    recipe, (model, x) = BLOCKS.replace(**changed), drawn(problem, device)
    runs = [run(model, x, step=Step(recipe, rules, steps=2)) for rules in (RULES, APART, UNFUSED)]
    assert runs[0].outcomes("epilogue_groups")[0].status == "fused"
    assert runs[0].outcomes("backward_groups")[0].status == ("absent" if "backward_override" in changed else "fused")
    for other in runs[1:]:
        assert differences(runs[0].tensors, other.tensors) == []


def step(model: torch.nn.Module, *given: torch.Tensor) -> list[torch.Tensor]:
    with opfuse.autocast(recipe=BLOCKS):
        y = model(*given)
    return [y.detach(), *torch.autograd.grad(y, (given[0], *model.parameters()), y.detach())]


@pytest.mark.row("X11")
@native_groups
def test_a_program_repeats_it_for_tokens_that_go_elsewhere_and_nothing_waits(device):
    (model, x), (other, _) = (drawn(PROBLEMS[0], device) for _ in range(2))
    for call in range(6):
        given = x.roll(call, 1).requires_grad_()
        torch.cuda.set_sync_debug_mode("error" if call > 1 else "default")
        try:
            found = step(model, given)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        with interpreted():
            assert all(map(torch.equal, found, step(other, given)))


def layers(device: torch.device) -> ops.Sequential:
    torch.manual_seed(6)
    options = {"bias": False, "single_grouped_weight": True, "dtype": BF16, "device": device}
    return ops.Sequential(ops.GroupedLinear(4, 256, 512, **options), ops.SwiGLU(), ops.GroupedLinear(4, 256, 144, **options))


CAPTURED = ((100, 0, 28, 200), (0, 0, 0, 328), (128, 128, 0, 72), (1, 1, 325, 1))


@pytest.mark.row("X11")
@native_groups
def test_a_captured_step_sees_new_sizes(device):
    model, x = layers(device), randn(328, 256).to(device).requires_grad_()
    other, splits = copy.deepcopy(model), torch.tensor(CAPTURED[0], device=device)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(model, x, splits, splits)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(model, x, splits, splits)
    for sizes in CAPTURED:
        splits.copy_(torch.tensor(sizes))
        graph.replay()
        given = torch.tensor(sizes, device=device)
        with interpreted():
            assert all(map(torch.equal, got, step(other, x.detach().requires_grad_(), given, given)))
