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
from opfuse.kernels.products.native import native_name, native_refusal
from opfuse.numerics.layouts import Layout, layout_of
from opfuse.recipes.builtin import DelayedScaling
from opfuse.recipes.custom import CustomRecipe
from opfuse.recipes.kinds import RECIPES
from opfuse.recipes.recipe import TENSOR_TYPES, QuantizerRole, Recipe
from opfuse.tensors.gemm import GEMMS, Gemm, clash
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
        try:
            with warnings.catch_warnings():  # of the environment, which nobody asked about
                warnings.simplefilter("ignore", OpfuseWarning)
                recipe = RECIPES[recipe]()
        except RecipeError:
            return Support("emulated", "each product is native only if both of its quantizers' formats are; ask for a recipe")
    try:
        made = {role: _asked(recipe, role) for role in TENSOR_TYPES}
    except RecipeError as error:
        return Support("refused", str(error))
    found, told = _found(recipe, made, device_arch() if arch is None else arch), _casts(made)
    return Support(found.status, f"{found.reason}; {told}") if told else found


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


def _casts(made: Mapping[str, OperandCast]) -> str | None:
    """Which operands torch casts on every device; None if there are kernels for all."""
    slow = {role: [part.scale_rule for part in _parts(each) if part.runs_in_torch] for role, each in made.items()}
    rules = dict.fromkeys(rule for found in slow.values() for rule in found)
    roles = ", ".join(role for role, found in slow.items() if found)
    return f"no kernel casts by scale_rule={' or '.join(map(repr, rules))}: torch casts {roles}" if rules else None


def _parts(quantizer: object) -> list[RuledQuantizer]:
    """The quantizers with a scale rule that one is made of."""
    subs = (
        (quantizer.rowwise_quantizer, quantizer.columnwise_quantizer) if isinstance(quantizer, HybridQuantizer) else (quantizer,)
    )
    return [each for each in subs if isinstance(each, RuledQuantizer)]


class _PlanesOfProduct(NamedTuple):
    """A product of two quantized operands: its name, and the layouts that the left and the right plane have."""

    name: str
    left: Layout
    right: Layout

    def clash(self) -> str | None:
        return clash(self.name, self.left.format, self.right.format)


def _found(recipe: Recipe, made: Mapping[str, OperandCast], arch: Arch) -> Support:
    """Native if every product is that reads two quantized planes; else why the first is not, or why calls are refused."""
    formats = {role: _formats(role, answer) for role, answer in made.items()}
    trains = recipe.backward_override is None and recipe.training_refusal() is None
    asked = GEMMS if trains else {"fprop": GEMMS["fprop"]}
    products: list[_PlanesOfProduct] = []
    for name, what in asked.items():
        one, other = formats[what.left], formats[what.right]
        if one is None or other is None:
            who = "factory" if isinstance(recipe, CustomRecipe) else "recipe"
            return Support("emulated", f"{name}: the {who} refuses a linear layer without a name")
        left, right = one[what.left_plane], other[what.right_plane]
        if IDENTITY not in (left, right):
            planes = layout_of(left, what.left_plane, _USUAL), layout_of(right, what.right_plane, _USUAL)
            products.append(_PlanesOfProduct(name, *planes))
    if users := {role: None for product in products for role in _decoded(asked[product.name], product)}:
        return Support("emulated", f"products read the dequantized values of a quantizer of one's own: {', '.join(users)}")
    if clashes := [reason for product in products if (reason := product.clash())]:
        return Support("emulated" if recipe.allow_mixed_emulation else "refused", clashes[0])
    if misses := {product.name: miss for product in products if (miss := _miss((product.left, product.right), arch))}:
        name, miss = next(iter(misses.items()))
        return Support("emulated", miss if [*misses.values()] == [miss] * len(asked) else f"{name}: {miss}")
    return Support("native", _backends(products, arch) or "all products are in high precision")


def _decoded(what: Gemm, product: _PlanesOfProduct) -> Iterator[str]:
    """The operands of a product that are read through the values of a user's quantizer."""
    roles = (what.left, product.left), (what.right, product.right)
    return (role for role, layout in roles if layout.format == DEQUANTIZED)


def _backends(products: Sequence[_PlanesOfProduct], arch: Arch) -> str:
    """Who makes the products, as ``fprop, dgrad by …; wgrad by …``."""
    names: dict[str, list[str]] = {}
    for product in products:
        names.setdefault(native_name(product.left.format, product.right.format, _machine(arch)), []).append(product.name)
    return "; ".join(f"{', '.join(each)} by {backend}" for backend, each in names.items())


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
    found = ((kind, arch, support(kind, arch)) for kind in RECIPES for arch in archs)
    return tuple(SupportRow(kind, arch, row.status, row.reason) for kind, arch, row in found)


def _available(kind: str, *, return_reason: bool, native: bool) -> bool | tuple[bool, str]:
    found = support(kind)
    answer = found.status == "native" if native else found.status != "refused"
    return (answer, str(found)) if return_reason else answer


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
