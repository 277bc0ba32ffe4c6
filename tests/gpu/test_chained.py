"""A product, its chain and its cast in one launch against one after the other, bit for bit, on random values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import opfuse
from opfuse import ops, recipes
from opfuse.formats import COLUMNWISE, E4M3, ROWWISE
from opfuse.kernels.engine.launch import is_dry
from opfuse.kernels.products.chained import multiply_then_chain, product_chain
from opfuse.kernels.products.hopper import grouped_product
from opfuse.kernels.products.native import _scaled_mm
from opfuse.recipes import availability
from opfuse.tensors import gemm
from tests.gpu.test_kernels import tensors
from tests.gpu.test_products import KINDS, planes
from tests.kernels.cases.chain_casts import encoding_of
from tests.kernels.cases.chains import ChainCase

pytestmark = pytest.mark.skipif(availability.device_arch() != (9, 0), reason="products of compute capability 9.0")

BF16, BOTH = torch.bfloat16, (ROWWISE, COLUMNWISE)
GELU = ("bias", "gelu")
CALLS = {
    "delayed": (GELU, "delayed", (ROWWISE,), ()),
    "delayed, both planes, input kept": (GELU, "delayed", BOTH, (1,)),
    "delayed, columnwise": (GELU, "delayed", (COLUMNWISE,), ()),
    "delayed, SiLU": (("bias", "silu"), "delayed", BOTH, ()),
    "delayed, dropout": (("bias", "gelu", "dropout"), "delayed", (ROWWISE,), (1,)),
    "current": (GELU, "current", (ROWWISE,), ()),
    "current, input kept": (GELU, "current", BOTH, (1,)),
    "bias": (("bias",), "", (), ()),
    "bias, residual": (("bias", "add"), "", (), ()),
    "dropout, residual, input kept": (("bias", "dropout", "add"), "", (), (1,)),
}
BLOCKS = {
    "1x128": (GELU, "1x128", (ROWWISE,), ()),
    "1x128, input kept": (GELU, "1x128", (ROWWISE,), (1,)),
    "bias": (("bias",), "", (), ()),
}
SIZES = {"tails": (1037, 784, 528), "even": (2064, 2048, 1024)}
ALL = [("tensors", name, call, fast) for name, call in CALLS.items() for fast in (True, False)]
ALL += [("1x128, 128x128", name, call, False) for name, call in BLOCKS.items()]


def made(call, kind: str, sizes: tuple[int, int, int], device: torch.device):
    """Arguments, alike at every call, and the options that say what is made."""
    ops, cast, usages, keep = call
    lines, columns, length = sizes
    generator = torch.Generator(device).manual_seed(lines)
    left, right = (planes(q, count, length, generator, device) for q, count in zip(KINDS[kind], (lines, columns)))
    chain = ChainCase(ops, (lines, columns))
    _, stages = chain.stages(device, chain.generator())
    encode = encoding_of(cast, E4M3, usages, (lines, columns), device) if cast else None
    return (left, right, stages, encode), {"shape": torch.Size((lines, columns)), "dtype": BF16, "keep": keep}


def bits(result, encode) -> list[torch.Tensor]:
    found = tensors(result) + tensors([getattr(encode, "amax", None)])
    return [t.contiguous().view(torch.uint8) for t in found]


@pytest.mark.row("X09")
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("form", ALL, ids=[f"{k}, {n}{', fast' * f}" for k, n, _, f in ALL])
def test_r5_one_launch_has_the_bits_of_several(form, sizes, device):
    kind, _, call, fast = form
    lines, columns, length = SIZES[sizes]
    lines = lines // 16 * 16 if COLUMNWISE in call[2] else lines
    lines = lines // 4 * 4 if kind != "tensors" else lines
    results = []
    for function in (multiply_then_chain, product_chain):
        arguments, options = made(call, kind, (lines, columns, length), device)
        for plane in arguments[:2]:
            plane.scale.mul_(0.03)
        results.append(bits(function(*arguments, fast=fast, **options), arguments[3]))
    assert len(results[0]) > 0
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_r18_what_is_not_finite_shows_where_it_is(device):
    results = []
    for function in (multiply_then_chain, product_chain):
        arguments, options = made(CALLS["delayed, both planes, input kept"], "tensors", (528, 400, 272), device)
        bias = arguments[2][0].operands["bias"]
        bias[7], bias[50], bias[390] = torch.nan, torch.inf, 3e38
        results.append(bits(function(*arguments, fast=True, **options), arguments[3]))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.row("X09")
@pytest.mark.parametrize(
    ("recipe", "override"),
    [
        (recipes.DelayedScaling, None),
        (recipes.Float8CurrentScaling, None),
        (recipes.Float8CurrentScaling, "high_precision"),
        (recipes.Float8BlockScaling, None),
        (recipes.Float8BlockScaling, "high_precision"),
    ],
)
def test_r5_r11_a_step_has_the_same_bits_either_way(recipe, override, device, monkeypatch):
    """Interpreted, recorded and repeated; without gradients, too."""
    ways, launched = [], []
    monkeypatch.setattr(gemm, "product_chain", lambda *a, **k: launched.append(a) or product_chain(*a, **k))
    for why in (gemm.why_apart, lambda *_, **__: "asked to"):
        monkeypatch.setattr(gemm, "why_apart", why)
        torch.manual_seed(0)
        layers = ops.Linear(512, 1024), ops.GELU(), ops.Linear(1024, 512)
        model = ops.Sequential(*layers).to(torch.bfloat16).to(device)
        found = []
        for seed in range(4):
            torch.manual_seed(seed)
            x = torch.randn(2, 2048, 512, device=device).to(BF16).requires_grad_()
            with opfuse.autocast(recipe=recipe(backward_override=override)):
                y = model(x)
                with torch.no_grad():
                    plain = model(x)
            found += [y.detach(), plain, *torch.autograd.grad(y.sum(), [x, *model.parameters()])]
        ways.append(found)
    assert len(launched) > 0
    assert all(torch.equal(one, other) for one, other in zip(*ways, strict=True))


def counted(accumulate: Callable[..., bool], added: list[bool]) -> Callable[..., bool]:
    """``accumulate``, of which ``added`` gets the results; a dry run that finds kernels to compile does not count."""

    def call(*operands, **options) -> bool:
        done = accumulate(*operands, **options)
        if not is_dry():
            added.append(done)
        return done

    return call


@pytest.mark.row("X10")
@pytest.mark.parametrize("recipe", [recipes.DelayedScaling, recipes.Float8BlockScaling])
def test_r5_gradients_are_added_to_main_grad_by_the_product(recipe, device, monkeypatch):
    ways, added = [], []
    for accumulate in (gemm.accumulate, lambda *_, **__: False):
        monkeypatch.setattr(gemm, "accumulate", counted(accumulate, added))
        torch.manual_seed(0)
        model = ops.Linear(1024, 4096, accumulate_into_main_grad=True, dtype=BF16).to(device)
        model.weight.main_grad = torch.randn(4096, 1024, device=device)
        for _ in range(3):
            x = torch.randn(512, 1024, device=device).to(BF16)
            version = model.weight.main_grad._version
            with opfuse.autocast(recipe=recipe()):
                model(x).square().sum().backward()
            assert model.weight.main_grad._version > version
        ways.append(model.weight.main_grad)
    assert added == [True] * 3 + [False] * 3
    assert torch.equal(*ways)


@pytest.mark.row("X10")
@pytest.mark.parametrize("single", [True, False])
def test_r5_gradients_of_experts_are_added_by_one_launch_or_one_each(single, device, monkeypatch):
    """Of sizes that the host knows, as it does where biases train."""
    ways, added = [], []
    for accumulate in (gemm.accumulate, lambda *_, **__: False):
        monkeypatch.setattr(gemm, "accumulate", counted(accumulate, added))
        torch.manual_seed(0)
        options = {"accumulate_into_main_grad": True, "single_grouped_weight": single, "dtype": BF16}
        model = ops.GroupedLinear(3, 2048, 4096, **options).to(device)
        weights = [getattr(model, name) for name in model.weight_names]
        for weight in weights:
            weight.main_grad = torch.randn(weight.shape, device=device)
        x = torch.randn(1024, 2048, device=device).to(BF16)
        with opfuse.autocast(recipe=recipes.Float8BlockScaling()):
            model(x, [128, 256, 640]).square().sum().backward()
        ways.append([weight.main_grad for weight in weights])
    assert added[: 1 if single else 3] == [True] * (1 if single else 3)
    assert all(map(torch.equal, *ways))


@pytest.mark.row("X10")
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_r5_sums_in_fp32_are_added_in_place(kind, fast, device):
    generator = torch.Generator(device).manual_seed(5)
    left, right = (planes(q, count, 528, generator, device) for q, count in zip(KINDS[kind], (1036, 784)))
    wanted = _scaled_mm(left, right, out_dtype=torch.float32, fast=fast)
    got = grouped_product([left], [right], [1036], out_dtype=torch.float32, fast=fast)
    assert torch.equal(got, wanted)
    held = torch.randn(1036, 784, generator=generator, device=device)
    added = held + wanted
    assert grouped_product([left], [right], [1036], out_dtype=torch.float32, fast=fast, out=held, accumulate=True) is held
    assert torch.equal(held, added)
