"""What this machine runs natively, what it emulates, and why.

Every recipe runs everywhere: a cast is exact on each backend, and a product without native hardware is emulated from the same
quantized operands. *Native* means that the hardware has the product and that this package calls it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, cast

import torch

from opfuse.domains import checked_arguments
from opfuse.errors import OpfuseWarning, RecipeError, describe, nearest
from opfuse.formats import DEQUANTIZED, FP8_ELEMENTS, IDENTITY, USAGES, NumberFormat, fp8_tensor
from opfuse.kernels.products.backends import ON_CPU, Machine
from opfuse.kernels.products.certificate import wrong_kernels_here
from opfuse.kernels.products.native import native_name, native_refusal
from opfuse.numerics.layouts import Layout, layout_of
from opfuse.recipes.builtin import DelayedScaling
from opfuse.recipes.custom import CustomRecipe
from opfuse.recipes.kinds import RECIPES
from opfuse.recipes.recipe import TENSOR_TYPES, QuantizerRole, Recipe
from opfuse.recipes.settings import misread
from opfuse.tensors.gemm import GEMMS, clash
from opfuse.tensors.quantizers import HybridQuantizer, Quantizer
from opfuse.tensors.quantizers.base import RuledQuantizer

Arch = tuple[int, int]
"""CUDA compute capability; (0, 0) is the CPU."""

ARCHS: tuple[Arch, ...] = ((0, 0), (8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0))


@dataclass(frozen=True)
class Support:
    """How a recipe runs: ``native``, ``emulated``, or ``refused`` (a custom one whose calls are refused), and why."""

    status: Literal["native", "emulated", "refused"]
    reason: str

    def __str__(self) -> str:
        return f"{self.status}: {self.reason}"


class SupportRow(NamedTuple):
    """One cell of the support matrix, as a row."""

    kind: str
    arch: Arch
    status: str
    reason: str


def device_arch() -> Arch:
    """Compute capability of the current CUDA device, (0, 0) when there is none."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def _cuda_version() -> Arch | None:
    if torch.version.cuda is None:
        return None
    major, minor, *_ = torch.version.cuda.split(".")
    return int(major), int(minor)


@checked_arguments(RecipeError)
def support(recipe: Recipe | str, arch: Arch | None = None) -> Support:
    """How ``recipe``, or one of a kind such as ``"mxfp8"`` with the defaults of its fields, runs on ``arch`` (None: here).

    It is native if all products are that it quantizes for a linear layer without a name. If it refuses such a layer, or if its
    kind has no defaults, nothing is known, and the answer is emulated. RecipeError for another kind.
    """
    if isinstance(recipe, str):
        if recipe not in RECIPES:
            got, cure = f"{recipe!r}{nearest(recipe, RECIPES)}", f"use one of {', '.join(RECIPES)}"
            raise RecipeError(describe("support", wanted="a recipe or its kind", got=got, cure=cure))
        cls = RECIPES[recipe]
        try:
            with warnings.catch_warnings():  # of the environment, which nobody asked about
                warnings.simplefilter("ignore", OpfuseWarning)
                recipe = cls()
        except RecipeError:
            if errors := misread(cls):
                return Support("refused", str(next(iter(errors.values()))))
            return Support("emulated", "each product is native only if both of its quantizers' formats are; ask for a recipe")
    try:
        casts = {role: _asked(recipe, role) for role in TENSOR_TYPES}
    except RecipeError as error:
        return Support("refused", str(error))
    arch = device_arch() if arch is None else arch
    summary = _summary(recipe, [*_products(recipe, casts, arch)])
    return Support(summary.status, "; ".join(filter(None, (summary.reason, _slow_casts(casts), kernels_in_torch(arch)))))


OperandCast: TypeAlias = Quantizer | DelayedScaling | None
"""What casts an operand; None if the recipe needs to know more than its role."""


def _asked(recipe: Recipe, tensor_type: str) -> OperandCast:
    """What casts an operand of a linear layer without a name. RecipeError for what a custom recipe refuses in every layer."""
    role = QuantizerRole(tensor_type=tensor_type)
    try:
        return cast(DelayedScaling | None, recipe.delayed_scaling(role)) or recipe.quantizer(role)
    except Exception:
        if isinstance(recipe, CustomRecipe) and recipe.key_extras[f"{tensor_type}_quantizer"] is not None:
            raise
        return None


def _slow_casts(casts: Mapping[str, OperandCast]) -> str | None:
    """Which operands torch casts on every device; None if there are kernels for all."""
    slow = {role: [part.scale_rule for part in _parts(cast) if part.runs_in_torch] for role, cast in casts.items()}
    rules = dict.fromkeys(rule for rules in slow.values() for rule in rules)
    roles = ", ".join(role for role, rules in slow.items() if rules)
    return f"no kernel casts by scale_rule={' or '.join(map(repr, rules))}: torch casts {roles}" if rules else None


def kernels_in_torch(arch: Arch | None = None) -> str:
    """Which kernels torch computes on the current device, if it is of ``arch``, since they are wrong there; else empty."""
    wrong = wrong_kernels_here(_machine(device_arch() if arch is None else arch))
    return f"wrong here, so torch computes them: {', '.join(wrong)}" if wrong else ""


def _parts(quantizer: object) -> list[RuledQuantizer]:
    """The quantizers with a scale rule that one is made of."""
    subs = (
        (quantizer.rowwise_quantizer, quantizer.columnwise_quantizer) if isinstance(quantizer, HybridQuantizer) else (quantizer,)
    )
    return [quantizer for quantizer in subs if isinstance(quantizer, RuledQuantizer)]


class _ProductSupport(NamedTuple):
    """How a product of a linear layer runs.

    status: ``unknown`` (the recipe says nothing of an operand), ``dequantized`` (it reads values of the quantizers of ``roles``),
    ``clash`` (its formats do not meet), ``emulated``, ``native``, or ``plain`` (in high precision). why: the backend if native.
    """

    name: str
    status: Literal["unknown", "dequantized", "clash", "emulated", "native", "plain"]
    why: str = ""
    roles: tuple[str, ...] = ()


def _products(recipe: Recipe, casts: Mapping[str, OperandCast], arch: Arch) -> Iterator[_ProductSupport]:
    """The products of a linear layer on ``arch``: all three, or fprop alone if the recipe does not train so."""
    formats = {role: _formats(role, operand) for role, operand in casts.items()}
    trains = recipe.backward_override is None and recipe.training_refusal() is None
    for name, product in (GEMMS if trains else {"fprop": GEMMS["fprop"]}).items():
        one, other = formats[product.left], formats[product.right]
        if one is None or other is None:
            who = "factory" if isinstance(recipe, CustomRecipe) else "recipe"
            yield _ProductSupport(name, "unknown", f"the {who} refuses a linear layer without a name")
            continue
        left, right = one[product.left_plane], other[product.right_plane]
        if IDENTITY in (left, right):
            yield _ProductSupport(name, "plain")
            continue
        pair = layout_of(left, product.left_plane, _USUAL), layout_of(right, product.right_plane, _USUAL)
        if DEQUANTIZED in (left, right):
            sides = (product.left, left), (product.right, right)
            yield _ProductSupport(name, "dequantized", roles=tuple(role for role, fmt in sides if fmt == DEQUANTIZED))
        elif misfit := clash(name, pair[0].format, pair[1].format):
            yield _ProductSupport(name, "clash", misfit)
        elif miss := _miss(pair, arch):
            yield _ProductSupport(name, "emulated", miss)
        else:
            yield _ProductSupport(name, "native", native_name(pair[0].format, pair[1].format, _machine(arch)))


def _summary(recipe: Recipe, products: Sequence[_ProductSupport]) -> Support:
    """Native if every product is that reads two quantized planes; else why the first is not, or why calls are refused."""
    first = {product.status: product for product in reversed(products)}
    if unknown := first.get("unknown"):
        return Support("emulated", f"{unknown.name}: {unknown.why}")
    if "dequantized" in first:
        roles = dict.fromkeys(role for product in products for role in product.roles)
        return Support("emulated", f"products read the dequantized values of a quantizer of one's own: {', '.join(roles)}")
    if different := first.get("clash"):
        return Support("emulated" if recipe.allow_mixed_emulation else "refused", different.why)
    if emulated := first.get("emulated"):
        alike = all((product.status, product.why) == (emulated.status, emulated.why) for product in products)
        return Support("emulated", emulated.why if alike else f"{emulated.name}: {emulated.why}")
    backends: dict[str, list[str]] = {}
    for product in products:
        if product.status == "native":
            backends.setdefault(product.why, []).append(product.name)
    natively = "; ".join(f"{', '.join(names)} by {backend}" for backend, names in backends.items())
    return Support("native", natively or "all products are in high precision")


def _miss(pair: tuple[Layout, Layout], arch: Arch) -> str:
    """Why the product of two planes is emulated on ``arch``; an empty string if it is native."""
    return ON_CPU if arch == (0, 0) else native_refusal(*pair, torch.bfloat16, _machine(arch))


def _machine(arch: Arch) -> Machine:
    return Machine(arch, _cuda_version() or _NEWEST)


_USUAL, _NEWEST = (256, 256), (99, 0)
"""Sizes of a matrix that every back end takes, and the CUDA version that stands for a torch without CUDA."""


def _formats(tensor_type: str, answer: OperandCast) -> Mapping[str, NumberFormat] | None:
    """The format of each plane of an operand; None if it is not known."""
    if isinstance(answer, DelayedScaling):
        element = FP8_ELEMENTS[answer.fp8_dtype(QuantizerRole(tensor_type=tensor_type))]
        return dict.fromkeys(USAGES, fp8_tensor(element))
    return None if answer is None else dict(zip(USAGES, answer.formats))


@checked_arguments(RecipeError)
def support_matrix(archs: tuple[Arch, ...] = ARCHS) -> tuple[SupportRow, ...]:
    """One row per kind of recipe and compute capability."""
    cells = ((kind, arch, support(kind, arch)) for kind in RECIPES for arch in archs)
    return tuple(SupportRow(kind, arch, cell.status, cell.reason) for kind, arch, cell in cells)


def _available(kind: str, *, return_reason: bool, native: bool) -> bool | tuple[bool, str]:
    here = support(kind)
    available = here.status == "native" if native else here.status != "refused"
    return (available, str(here)) if return_reason else available


@checked_arguments(RecipeError)
def is_fp8_available(*, return_reason: bool = False, native: bool = False) -> bool | tuple[bool, str]:
    """Whether per-tensor FP8 recipes run here; with ``native``, whether they do without emulation."""
    return _available("fp8_current", return_reason=return_reason, native=native)


@checked_arguments(RecipeError)
def is_fp8_block_scaling_available(*, return_reason: bool = False, native: bool = False) -> bool | tuple[bool, str]:
    """Whether FP8 block scaling runs here; with ``native``, whether it does without emulation."""
    return _available("fp8_block", return_reason=return_reason, native=native)


@checked_arguments(RecipeError)
def is_mxfp8_available(*, return_reason: bool = False, native: bool = False) -> bool | tuple[bool, str]:
    """Whether MXFP8 runs here; with ``native``, whether it does without emulation."""
    return _available("mxfp8", return_reason=return_reason, native=native)


@checked_arguments(RecipeError)
def is_nvfp4_available(*, return_reason: bool = False, native: bool = False) -> bool | tuple[bool, str]:
    """Whether NVFP4 runs here; with ``native``, whether it does without emulation."""
    return _available("nvfp4", return_reason=return_reason, native=native)


# -- rates of products, measured on one H200: what advice and warnings estimate from -------------------------------------------

BF16 = 810e12
RATES: Mapping[str, float] = {"fp8_current": 1465e12, "fp8_block": 1270e12, "mxfp8": 680e12, "nvfp4": 690e12}
"""FLOP/s of products in bf16 and by kind of recipe: means over the three products and both sizes of the record."""

RECORD = "benchmarks/results/h200.json"
"""Where the rates were measured."""
