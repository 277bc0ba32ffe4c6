"""R10: what each compute capability would call for each pass of a linear layer under each recipe, or why it is emulated.

Cells are written by hand. Where one has a product of the library, planes of its formats are handed over as on that device, and a
mock that knows the layouts of the library alone has to multiply them to the exact product.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import pytest
import torch

from opfuse.formats import E4M3, NumberFormat, fp8_tensor, mxfp8
from opfuse.kernels.products.backends import BACKENDS, MX_GROUPS, Backend, Machine, backend_of
from opfuse.kernels.products.certificate import Exact, PairOperands, Trial, random_plane, trials
from opfuse.kernels.products.native import OWN, layout_refusal, library_product, runs_refusal
from opfuse.numerics.layouts import layout_of
from opfuse.recipes import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizerRole,
    Recipe,
)
from opfuse.tensors.gemm import GEMMS
from tests.kernels.test_certificate import CPU, library  # noqa: F401 - a fixture

BF16 = torch.bfloat16
ARCHS = ((8, 9), (9, 0), (10, 0), (10, 3), (12, 0))
RECIPES: Mapping[str, Recipe] = {
    "delayed": DelayedScaling(),
    "current": Float8CurrentScaling(),
    "rows": CustomRecipe(qfactory="fp8_row_scaled"),
    "blocks": Float8BlockScaling(),
    "blocks, E5M2 gradients": Float8BlockScaling(fp8_format=Format.HYBRID),
    "blocks, fp32 scales": Float8BlockScaling(use_f32_scales=True),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),  # rotated, rounded stochastically, weights in tiles of 16x16
    "nvfp4, 4over6": NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="all", nvfp4_4over6_e4m3_use_256="all"),
    "nvfp4, rows": NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True),
}
TENSOR, ROW, MX, NV = "scaled_mm, per tensor", "scaled_mm, per row", "scaled_mm, MXFP8", "scaled_mm, NVFP4"
BLOCK, BLOCK_MX = "scaled_mm, 1x128 and 128x128 blocks of E4M3", "scaled_mm, FP8 blocks as MXFP8"
OWN_TENSOR, OWN_ROW = "product.cu, per tensor", "product.cu, per row"
OWN_BLOCK, MX_IN_GROUPS = "product.cu, 1x128 and 128x128 blocks of E4M3", "scaled_grouped_mm, MXFP8 in groups"
E5M2_TWICE = "elements: wants e4m3 twice, got ('e5m2', 'e4m3')"
FP32_SCALES = "block scales: wants powers of two on both sides, got any fp32 and any fp32"
ONE_AMAX = "global amaxes: wants one for each operand, got one for each row"
IN_GROUPS_NV = "blocks: wants those of products in groups, got (1, 16) and (1, 16)"


def none_on(arch: str, since: str, below: str = "13.0") -> str:
    return f"compute capability: wants >= {since} and < {below}, got {arch}"


def from_blackwell(name: str) -> tuple[tuple[str, ...], ...]:
    return (none_on("8.9", "10.0"),), (none_on("9.0", "10.0"),), (name,), (name,), (name,)


def on_hopper(*name: str) -> tuple[tuple[str, ...], ...]:
    return tuple(name if arch == "9.0" else (none_on(arch, "9.0", "10.0"),) for arch in ("8.9", "9.0", "10.0", "10.3", "12.0"))


CALLS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "delayed": ((TENSOR,),) * 5,
    "current": ((TENSOR,),) * 5,
    "rows": ((ROW,),) * 5,
    "blocks": ((none_on("8.9", "9.0"),), (BLOCK,), (BLOCK_MX,), (BLOCK_MX,), (BLOCK_MX,)),
    "blocks, E5M2 gradients": (
        (none_on("8.9", "9.0"),),
        (BLOCK, E5M2_TWICE, E5M2_TWICE),
        (BLOCK_MX,),
        (BLOCK_MX,),
        (BLOCK_MX,),
    ),
    "blocks, fp32 scales": ((none_on("8.9", "9.0"),), (BLOCK,), (FP32_SCALES,), (FP32_SCALES,), (FP32_SCALES,)),
    "mxfp8": from_blackwell(MX),
    "nvfp4": from_blackwell(NV),
    "nvfp4, 4over6": from_blackwell(NV),
    "nvfp4, rows": ((none_on("8.9", "10.0"),), (none_on("9.0", "10.0"),), *((ONE_AMAX, NV, ONE_AMAX),) * 3),
}
"""For each of :data:`ARCHS` fprop, dgrad and wgrad; one entry stands for all three."""

IN_GROUPS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "delayed": on_hopper(OWN_TENSOR),
    "current": on_hopper(OWN_TENSOR),
    "rows": on_hopper(OWN_ROW),
    "blocks": on_hopper(OWN_BLOCK),
    "blocks, E5M2 gradients": on_hopper(OWN_BLOCK, E5M2_TWICE, E5M2_TWICE),
    "blocks, fp32 scales": on_hopper(OWN_BLOCK),
    "mxfp8": (
        (none_on("8.9", "10.0", "11.0"),),
        (none_on("9.0", "10.0", "11.0"),),
        (MX_IN_GROUPS,),
        (MX_IN_GROUPS,),
        (none_on("12.0", "10.0", "11.0"),),
    ),
    **dict.fromkeys(("nvfp4", "nvfp4, 4over6", "nvfp4, rows"), ((IN_GROUPS_NV,),) * 5),
}
"""The same of groups whose sizes only the device knows."""

CELLS = [
    pytest.param(recipe, arch, name, id=f"{recipe}, {arch[0]}.{arch[1]}, {name}")
    for recipe, arch, name in itertools.product(RECIPES, ARCHS, GEMMS)
]


def formats(recipe: Recipe, name: str) -> tuple[NumberFormat, NumberFormat]:
    """Those of the planes that a product reads."""
    product = GEMMS[name]
    found = []
    for tensor_type, usage in ((product.left, product.left_plane), (product.right, product.right_plane)):
        role = QuantizerRole(tensor_type=tensor_type)
        delayed = isinstance(recipe, DelayedScaling)
        made = (fp8_tensor(recipe.fp8_format.element(role)),) * 2 if delayed else recipe.quantizer(role).formats
        found.append(made[usage != "rowwise"])
    return found[0], found[1]


def cell(table: Mapping[str, tuple[tuple[str, ...], ...]], recipe: str, arch: tuple[int, int], name: str) -> str:
    passes = table[recipe][ARCHS.index(arch)]
    return passes[[*GEMMS].index(name) % len(passes)]


def name_in(rows: tuple[Backend, ...], machine: Machine, refused: str) -> str:
    """Who is called, or why nobody is."""
    row = backend_of(rows, machine)
    return refused if refused or isinstance(row, str) else row.name


@pytest.mark.few(2, apart=True)
@pytest.mark.row("R10")
@pytest.mark.parametrize(("recipe", "arch", "name"), CELLS)
def test_r10_what_each_device_calls(recipe: str, arch: tuple[int, int], name: str, library: Callable[..., None]) -> None:  # noqa: F811
    product, machine, (one, other) = GEMMS[name], Machine(arch, (13, 0)), formats(RECIPES[recipe], name)
    layouts = [layout_of(fmt, usage, (256, 256)) for fmt, usage in ((one, product.left_plane), (other, product.right_plane))]
    rows = BACKENDS[one.family]
    wanted = cell(CALLS, recipe, arch, name)
    assert name_in(rows, machine, layout_refusal(*layouts, BF16, machine)) == wanted
    if not wanted.startswith("scaled_mm"):
        return
    random, sizes = torch.Generator().manual_seed(1), ((132, 160), (48, 160))
    planes = [random_plane(layout.format, layout.usage, *size, random) for layout, size in zip(layouts, sizes)]
    if one.rht:  # both operands are rotated alike, which the product of what is stored does not undo
        planes = [plane._replace(layout=plane.layout.replace(format=one.replace(rht=()))) for plane in planes]
    pair = PairOperands(*planes)
    row = backend_of(rows, machine)
    library(row)
    assert Exact.of(Trial(wanted, pair, [pair])).fault(library_product(row, pair, BF16, fast=False)) == ""


@pytest.mark.row("R10")
@pytest.mark.parametrize(("recipe", "arch", "name"), CELLS)
def test_r10_what_each_device_calls_for_groups(recipe: str, arch: tuple[int, int], name: str) -> None:
    product, machine, (one, other) = GEMMS[name], Machine(arch, (13, 0)), formats(RECIPES[recipe], name)
    layouts = [layout_of(fmt, usage, (256, 256)) for fmt, usage in ((one, product.left_plane), (other, product.right_plane))]
    rows = BACKENDS[MX_GROUPS] if one.family == "mx" else OWN.get(one.family, ())
    assert name_in(rows, machine, runs_refusal(*layouts, BF16, machine)) == cell(IN_GROUPS, recipe, arch, name)


CUDAS = {
    "tensor": ((12, 1), (0, 0), (12, 8)),
    "row": ((12, 1), (12, 9), (12, 8)),
    "block": ((12, 9), (12, 8)),
    "mx": ((12, 8),),
    "nv": ((12, 8),),
    MX_GROUPS: ((12, 8),),
}
"""The first CUDA that has each row's product, as torch says."""


@pytest.mark.parametrize("family", BACKENDS)
def test_the_cuda_that_each_product_wants(family: str) -> None:
    for row, (major, minor) in zip(BACKENDS[family], CUDAS[family], strict=True):
        assert backend_of(BACKENDS[family], Machine(row.since, (major, minor))) is row
        if major:
            refused = backend_of(BACKENDS[family], Machine(row.since, (major, minor - 1)))
            assert refused == f"CUDA: wants >= {major}.{minor}, got {major}.{minor - 1}"


def test_sums_of_groups_have_whole_tiles_of_scales() -> None:
    """Torch does not say where the scales of the next group begin after others."""
    wanted = "length of the sum: wants a positive multiple of 128, got 160"
    layouts = [layout_of(mxfp8(E4M3), "rowwise", (256, 160))] * 2
    assert runs_refusal(*layouts, BF16, Machine((10, 0), (13, 0))) == wanted


@pytest.mark.row("R10")
@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch[0] == 10])
def test_r10_groups_are_handed_over_as_the_library_reads_them(arch: tuple[int, int], library: Callable[..., None]) -> None:  # noqa: F811
    row = backend_of(BACKENDS[MX_GROUPS], Machine(arch, (13, 0)))
    library(row)
    few = itertools.islice(trials(MX_GROUPS, row), 3)  # of rows by both planes of a right, and over rows
    assert [Exact.of(each).fault(library_product(row, each.operands.to(CPU), BF16, fast=False)) for each in few] == [""] * 3
