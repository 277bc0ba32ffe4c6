"""Grouped linear layers on a device: split sizes that stay there, products in one launch, and groups one after another."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import opfuse
from opfuse import ops, recipes
from opfuse.kernels.products import grouped as gemm_grouped
from opfuse.recipes import availability
from opfuse.runtime.replay.dispatch import interpreted
from opfuse.runtime.replay.replayable import Recorded
from opfuse.tensors.ragged import RaggedProducts

BF16 = torch.bfloat16
K, N = 256, 384
SPLITS = ((512, 0, 256, 256), (0, 0, 0, 0), (1, 31, 0, 992), (0, 1024, 0, 0), (0, 0, 17, 1007))
FORMS = ({}, {"single_grouped_weight": True})
grouped_kernel = pytest.mark.skipif(availability.device_arch() < gemm_grouped.SINCE, reason="torch has no grouped kernel here")
native_groups = (9, 0) <= availability.device_arch() < (10, 0)
SCALED = {
    "blocks": recipes.Float8BlockScaling(),
    "rows": recipes.CustomRecipe(qfactory="fp8_row_scaled"),
    "current": recipes.Float8CurrentScaling(),
    "delayed": recipes.DelayedScaling(amax_history_len=4),
}
OVERRIDDEN = [
    recipe.replace(backward_override=override)
    for recipe in (SCALED["blocks"], SCALED["rows"], SCALED["current"])
    for override in ("dequantized", "high_precision")
]
every_form = pytest.mark.parametrize("form", FORMS, ids=["apart", "single"])
every_split = pytest.mark.parametrize("splits", SPLITS, ids=str)


def grouped(device: torch.device, **options: object) -> ops.GroupedLinear:
    torch.manual_seed(3)
    return ops.GroupedLinear(4, K, N, bias=False, dtype=BF16, device=device, **options)


def tensors(splits: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(sum(splits))
    shapes = (sum(splits), K), (sum(splits), N)
    x, dy = (torch.randn(shape, generator=generator, device=device).to(BF16) for shape in shapes)
    return x.requires_grad_(), dy


def weights_of(op: ops.GroupedLinear) -> list[torch.Tensor]:
    return list(op.weight) if op.single_grouped_weight else [getattr(op, name) for name in op.weight_names]


def step(op, x, dy, splits, recipe=None) -> list[torch.Tensor]:
    """Output, dx, and dW of all groups."""
    with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
        y = op(x, splits)
    dx, *dw = torch.autograd.grad(y, (x, *op.parameters()), dy)
    return [y.detach(), dx, dw[0] if op.single_grouped_weight else torch.stack(dw)]


@pytest.mark.row("B24")
@grouped_kernel
@every_form
@every_split
@pytest.mark.parametrize("place", ["cuda", "cpu"])
def test_b24_r5_products_of_all_groups(splits, form, place, device):
    op, (x, dy) = grouped(device, **form), tensors(splits, device)
    y, dx, dw = (tensor.detach() for tensor in step(op, x, dy, torch.tensor(splits, device=place)))
    for i, (w, x_i, dy_i) in enumerate(zip(weights_of(op), x.detach().split(splits), dy.split(splits))):
        exact = dy_i.double().t() @ x_i.double()
        assert float((dw[i].double() - exact).norm()) <= 2**-8 * float(exact.norm())
        assert splits[i] or not dw[i].any()
        start = sum(splits[:i])
        for got, want in ((y, x_i.double() @ w.detach().double().t()), (dx, dy_i.double() @ w.detach().double())):
            piece = got[start : start + splits[i]].double()
            assert float((piece - want).norm()) <= 2**-8 * float(want.norm())


@pytest.mark.row("X11")
@grouped_kernel
@every_form
def test_nothing_waits_for_the_device(form, device):
    op, (x, dy) = grouped(device, **form), tensors(SPLITS[0], device)
    splits = torch.tensor(SPLITS[0], device=device)

    def steps() -> None:
        step(op, x, dy, splits.clone())
        step(op, x, dy, torch.tensor(SPLITS[0]), recipes.Float8CurrentScaling())
        step(op, x, dy, torch.tensor(SPLITS[0]), recipes.Float8BlockScaling())
        if native_groups:
            for recipe in (*SCALED.values(), *OVERRIDDEN):
                step(op, x, dy, splits.clone(), recipe)

    steps()  # products in a format are compared with exact ones on first use, for which the host waits
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.row("X11")
@pytest.mark.skipif(not native_groups, reason="no kernel multiplies groups of unknown sizes here")
@pytest.mark.parametrize("place", ["cuda", "cpu"])
def test_one_program_repeats_steps_of_all_sizes(place, device):
    """With the bits of the interpreter, of a list, and of one group after the other."""
    op, recipe = grouped(device), recipes.Float8BlockScaling()
    fixed, apart = (copy.deepcopy(op) for _ in range(2))
    for call in range(12):
        sizes = ((512, 0, 256, 256), (0, 1024, 0, 0), (16, 32, 960, 16), (1, 31, 0, 992))[call % 4]
        x, dy = tensors(sizes, device)
        got = step(op, x, dy, torch.tensor(sizes, device=place), recipe)
        with interpreted():
            assert all(map(torch.equal, got, step(fixed, x, dy, torch.tensor(sizes, device=place), recipe)))
            assert all(map(torch.equal, got, step(fixed, x, dy, list(sizes), recipe)))
            if all(size % 16 == 0 for size in sizes):  # of others the host's way emulates gradients of weights
                with known_to_the_host():
                    assert all(map(torch.equal, got, step(apart, x, dy, list(sizes), recipe)))
    made = [made for _, plan in op._fuser.cache.items() for looks in plan.programs.values() for made in looks.values()]
    assert [type(each) for each in made] == [Recorded]
    assert [type(each) for each in made[0].rest.replayable.values()] == [Recorded]


@contextmanager
def known_to_the_host() -> Iterator[None]:
    """Inside, groups are cast one by one, and products get the sizes from the host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RaggedProducts, "supported_on", lambda *_: False)
        yield


def random_sizes(seed: int, rows: int = 1024) -> list[int]:
    """Multiples of 16, of which some are 0."""
    cuts = torch.randint(0, rows // 16 + 1, (3,), generator=torch.Generator().manual_seed(seed)).sort().values.tolist()
    ends = [0, *(cuts if seed % 2 else [cuts[0], cuts[0], cuts[2]]), rows // 16]
    return [16 * (end - start) for start, end in itertools.pairwise(ends)]


def trained(op, x, dy, splits, recipe) -> list[torch.Tensor]:
    """Output, dx, and of each weight ``main_grad`` if there is one, else dW."""
    op.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    with opfuse.autocast(recipe=recipe):
        y = op(x, splits)
    y.backward(dy)
    return [y.detach(), x.grad, *(getattr(weight, "main_grad", weight.grad).clone() for weight in op.parameters())]


@pytest.mark.row("X11")
@pytest.mark.skipif(not native_groups, reason="no kernel multiplies groups of unknown sizes here")
@every_form
@pytest.mark.parametrize("added", [False, True], ids=["", "main_grad"])
@pytest.mark.parametrize("kind", SCALED)
def test_random_sizes_of_the_device_have_the_bits_of_the_host(kind, added, form, device):
    """Step after step, whose weights of groups without rows have zeros for gradients, or a ``main_grad`` that stays as it is."""
    there, here = (grouped(device, accumulate_into_main_grad=added, **form) for _ in range(2))
    for op in (there, here) if added else ():
        for i, weight in enumerate(op.parameters()):
            weight.main_grad = torch.full(weight.shape, -0.0 if i % 2 else 1.0, device=device)
            weight.overwrite_main_grad = i == 3
    for seed in range(6):
        sizes = random_sizes(seed)
        x, dy = tensors(tuple(sizes), device)
        got = trained(there, x, dy, torch.tensor(sizes, device=device), SCALED[kind])
        with known_to_the_host():
            want = trained(here, x, dy, sizes, SCALED[kind])
        assert [torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, want, strict=True)].count(False) == 0


@pytest.mark.row("X11")
@pytest.mark.skipif(not native_groups, reason="no kernel multiplies groups of unknown sizes here")
@pytest.mark.parametrize("added", [False, True], ids=["", "main_grad"])
@pytest.mark.parametrize("kind", ["rows", "current"])
def test_a_captured_step_sees_new_splits(kind, added, device):
    op, other = (grouped(device, accumulate_into_main_grad=added) for _ in range(2))
    for weight in (*op.parameters(), *other.parameters()) if added else ():
        weight.main_grad = torch.zeros(weight.shape, device=device)
    (x, dy), splits = tensors(SPLITS[0], device), torch.tensor(SPLITS[0], device=device)
    leaf = x.detach().clone().requires_grad_()

    def call(op, leaf, splits):
        with opfuse.autocast(recipe=SCALED[kind]):
            y = op(leaf, splits)
        return [y, *torch.autograd.grad(y, [leaf, *op.parameters()], dy)] if not added else [y, y.backward(dy)]

    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call(op, leaf, splits)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call(op, leaf, splits)
    for weight in op.parameters() if added else ():
        weight.main_grad.zero_()
    for seed in range(6):
        sizes = random_sizes(seed)
        splits.copy_(torch.tensor(sizes))
        graph.replay()
        with known_to_the_host():
            want = call(other, leaf.detach().requires_grad_(), sizes)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True) if a is not None)
        if added:
            assert all(torch.equal(a.main_grad, b.main_grad) for a, b in zip(op.parameters(), other.parameters(), strict=True))


@pytest.mark.row("B35")
@pytest.mark.skipif(not native_groups, reason="no kernel multiplies groups of unknown sizes here")
@pytest.mark.parametrize("place", ["cuda", "cpu"])
@every_form
@pytest.mark.parametrize("kind", SCALED)
def test_b35_casts_of_experts_are_made_anew_in_groups(kind, form, place, device):
    """Of sizes that the device or the host has, interpreted and repeated, without a wait."""
    torch.manual_seed(0)
    options = {"bias": False, "dtype": BF16, "device": device, **form}
    model = ops.Sequential(ops.GroupedLinear(4, K, 2 * N, **options), ops.SwiGLU(), ops.GroupedLinear(4, N, K, **options))
    steps = {"all": [], None: [], "recompute": []}
    for keep, found in steps.items():
        own, recipe = copy.deepcopy(model), SCALED[kind].replace(keep=keep)
        for splits in (*SPLITS, *SPLITS[:2]):
            x = tensors(splits, device)[0]
            given = torch.tensor(splits, device=place)
            with opfuse.autocast(recipe=recipe):
                y = own(x, given, given)
            found += [y, *torch.autograd.grad(y, [x, *own.parameters()], 2 * x.detach())]
    assert all(map(torch.equal, steps["all"], steps[None]))
    assert all(map(torch.equal, steps["all"], steps["recompute"]))
    with opfuse.autocast(recipe=SCALED[kind].replace(keep="recompute")):
        held = opfuse.saved(model, x, given, given).values
    assert [value.name for value in held if value.usages] == ["x"]


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
def test_programs_of_emulated_groups_have_the_bits_of_the_interpreter(kind, device):
    """Casts, which a program joins, and the random bits of gradients."""
    op, recipe = grouped(device), recipes.recipe_of(kind, {})
    other = copy.deepcopy(op)
    for call in range(6):
        x, dy = tensors(SPLITS[0], device)
        torch.manual_seed(call)
        got = step(op, x, dy, torch.tensor(SPLITS[0]), recipe)
        torch.manual_seed(call)
        with interpreted():
            assert all(map(torch.equal, got, step(other, x, dy, torch.tensor(SPLITS[0]), recipe)))
    made = [made for _, plan in op._fuser.cache.items() for looks in plan.programs.values() for made in looks.values()]
    assert [type(each) for each in made] == [Recorded]
    assert [type(each) for each in made[0].rest.replayable.values()] == [Recorded]


@grouped_kernel
def test_strided_and_misaligned_operands(device):
    op, (x, dy) = grouped(device), tensors(SPLITS[0], device)
    splits = torch.tensor(SPLITS[0], device=device)
    wanted = step(op, x, dy, splits)
    room = torch.zeros(2, x.numel() + 1, device=device, dtype=BF16)
    shifted = room[0, 1:].view(x.shape).copy_(x.detach()).requires_grad_()
    strided = torch.stack((x.detach(), x.detach()), 2)[..., 0].requires_grad_()
    for other in (shifted, strided):
        assert all(torch.equal(a, b) for a, b in zip(step(op, other, dy.t().contiguous().t(), splits), wanted))


@grouped_kernel
def test_layers_that_share_splits_wait_once(device):
    layers = [ops.GroupedLinear(4, *sizes, bias=False, dtype=BF16, device=device) for sizes in ((K, N), (N, K))]
    model, (x, _) = ops.Sequential(*layers), tensors(SPLITS[0], device)
    splits = torch.tensor(SPLITS[0], device=device)

    def waits(recipe: recipes.Recipe) -> int:
        with opfuse.autocast(recipe=recipe), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            y = model(x, splits, splits)
            y.backward(y.detach())
        return sum("called a synchronizing CUDA operation" in str(warning.message) for warning in caught)

    waits(recipes.MXFP8BlockScaling(backward_override="dequantized"))
    torch.cuda.set_sync_debug_mode("warn")
    try:
        assert waits(recipes.MXFP8BlockScaling(backward_override="dequantized")) == 1
        splits.copy_(torch.tensor(SPLITS[2]))  # a new value of the same tensor is read
        assert waits(recipes.MXFP8BlockScaling(backward_override="high_precision")) == 1
    finally:
        torch.cuda.set_sync_debug_mode("default")


@grouped_kernel
def test_a_graph_sees_new_splits(device):
    op, x = grouped(device, single_grouped_weight=True), tensors(SPLITS[0], device)[0].detach()
    splits = torch.tensor(SPLITS[0], device=device)
    with torch.no_grad():
        op(x, splits)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = op(x, splits)
        for new in SPLITS:
            if sum(new):
                splits.copy_(torch.tensor(new))
                graph.replay()
                assert torch.equal(y, op(x, torch.tensor(new, device=device)))


@pytest.mark.row("B25")
@every_form
@every_split
@pytest.mark.parametrize("override", [None, "dequantized", "high_precision"])
@pytest.mark.parametrize("kind", ["fp8_current", "fp8_block", "mxfp8", "nvfp4"])
def test_b25_every_group_is_a_linear_of_its_own(kind, override, splits, form, device):
    options = {"disable_stochastic_rounding": True} if kind == "nvfp4" else {}
    recipe = recipes.recipe_of(kind, {**options, "backward_override": override})
    if override is None and kind in ("mxfp8", "nvfp4") and any(size % 32 for size in splits):
        splits = (512, 0, 32, 480)
    op, (x, dy) = grouped(device, **form), tensors(splits, device)
    found = step(op, x, dy, torch.tensor(splits, device=device), recipe)
    if override == "high_precision":
        plain = step(op, x, dy, torch.tensor(splits, device=device))
        assert all(torch.equal(got, want) for got, want in zip(found[1:], plain[1:], strict=True))
    layers = [ops.Linear(K, N, bias=False, dtype=BF16, device=device) for _ in splits]
    with torch.no_grad():
        for layer, weight in zip(layers, weights_of(op)):
            layer.weight.copy_(weight)
    with opfuse.autocast(recipe=recipe):
        y = torch.cat([layer(piece) for layer, piece in zip(layers, x.split(splits))])
    dx, *dw = torch.autograd.grad(y, (x, *(layer.weight for layer in layers)), dy)
    for got, want in zip(found, (y, dx, torch.stack(dw)), strict=True):
        if override == "high_precision" and want is not y:
            continue
        if override == "dequantized" and native_groups and kind in ("fp8_block", "fp8_current") and want is not y:
            assert float((got - want).norm()) <= 2**-8 * float(want.norm())  # torch's grouped product adds in an order of its own
            continue
        if kind in ("fp8_block", "fp8_current") and override is None and want is not y and want is not dx:
            for mine, alone, size in zip(got, want, splits, strict=True):  # alone, what is no multiple of 16 is emulated
                assert torch.equal(mine, alone) or (size % 16 and float((mine - alone).norm()) <= 2**-8 * float(alone.norm()))
        else:
            assert torch.equal(got, want)


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_the_gradient_of_a_bias_is_that_of_the_op_bias(dtype, scaled, splits, device):
    """Sums over rows are added in pieces of 64 rows, also where rows come in groups."""
    op = ops.GroupedLinear(4, K, N, scale_bias=scaled, dtype=dtype, device=device)
    x, dy = (tensor.detach().to(dtype) for tensor in tensors(splits, device))
    scales = torch.rand(sum(splits), device=device, dtype=dtype)
    for recipe in (None, recipes.Float8CurrentScaling()):
        with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
            y = op(x, torch.tensor(splits), *([scales] if scaled else []))
        found = torch.autograd.grad(y, [getattr(op, name) for name in op.bias_names], dy)
        given = dy.float() * scales.float()[:, None] if scaled else dy
        for got, piece in zip(found, given.split(splits), strict=True):
            bias = ops.Bias(N, dtype=dtype, device=device)
            bias(piece).backward(piece)
            assert torch.equal(got, bias.bias.grad)


@pytest.mark.row("X11")
@pytest.mark.parametrize("kind", ["fp8_current", "fp8_block", "mxfp8"])
def test_splits_of_the_host_give_the_bits_of_splits_of_the_device(kind, device):
    op, (x, dy) = grouped(device), tensors(SPLITS[0], device)
    recipe = recipes.recipe_of(kind, {})
    given = torch.tensor(SPLITS[0]), torch.tensor(SPLITS[0], device=device), list(SPLITS[0])
    host, there, constant = (step(op, x, dy, splits, recipe) for splits in given)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(host, there, constant, strict=True))


WRONG_SUM = """
import sys, torch, opfuse
from opfuse import ops, recipes
op = ops.GroupedLinear(2, 64, 64, bias=False, dtype=torch.bfloat16, device="cuda")
with opfuse.autocast(enabled="blocks" in sys.argv, recipe=recipes.Float8BlockScaling()):
    op(torch.ones(8, 64, dtype=torch.bfloat16, device="cuda"), torch.tensor([4, 3], device="cuda"))
torch.cuda.synchronize()
"""


@grouped_kernel
@pytest.mark.parametrize("what", ["bf16", *(["blocks"] if native_groups else [])])
def test_a_wrong_sum_on_the_device_stops_it(what):
    done = subprocess.run([sys.executable, "-c", WRONG_SUM, what], capture_output=True, text=True, check=False)
    assert done.returncode
    assert "assert" in (done.stderr + done.stdout).lower()
