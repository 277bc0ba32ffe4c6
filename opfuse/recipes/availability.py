"""What this machine runs natively, what it emulates, and why.

Every recipe runs everywhere: a cast is exact on each backend, and a product without native hardware is emulated from the same
quantized operands. *Native* means that the hardware has the product and that this package calls it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import torch

from opfuse.domains import checked_arguments
from opfuse.errors import RecipeError, describe, nearest
from opfuse.formats import (
    DEQUANTIZED,
    E4M3,
    FP8_ELEMENTS,
    IDENTITY,
    NVFP4,
    USAGES,
    NumberFormat,
    fp8_block,
    fp8_tensor,
    mxfp8,
)
from opfuse.kernels.products.hopper import FASTER, SCALING
from opfuse.kernels.products.native import BACKENDS, ON_CPU, OWN, Machine, layout_refusal
from opfuse.numerics.layouts import Layout, layout_of
from opfuse.recipes.builtin import DelayedScaling
from opfuse.recipes.custom import CustomRecipe, DelayedScalingRequest
from opfuse.recipes.kinds import RECIPES
from opfuse.recipes.recipe import TENSOR_TYPES, QuantizerRole, Recipe
from opfuse.tensors.gemm import GEMMS, clash
from opfuse.tensors.quantizers import HybridQuantizer
from opfuse.tensors.quantizers.base import RuledQuantizer

Arch = tuple[int, int]
"""CUDA compute capability; (0, 0) is the CPU."""

ARCHS: tuple[Arch, ...] = ((0, 0), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0))


class Gate(NamedTuple):
    """Hardware that has a product: compute capabilities from ``since`` up to, not including, ``below``, and a CUDA version."""

    since: Arch
    below: Arch = (999, 0)
    cuda: Arch = (0, 0)

    def miss(self, arch: Arch, cuda: Arch | None) -> str:
        """Why the gate is closed, or an empty string. ``cuda`` None is a torch without CUDA: its version is not asked."""
        if arch == (0, 0):
            return ON_CPU
        if not self.since <= arch < self.below:
            upper = "" if self.below == Gate((0, 0)).below else f" and < {_dotted(self.below)}"
            return f"compute capability: wants >= {_dotted(self.since)}{upper}, got {_dotted(arch)}"
        if cuda is not None and cuda < self.cuda:
            return f"CUDA: wants >= {_dotted(self.cuda)}, got {_dotted(cuda)}"
        return ""


GATES = {
    "delayed": Gate(since=(8, 9)),
    "fp8_current": Gate(since=(8, 9)),
    "fp8_block": Gate(since=(9, 0), cuda=BACKENDS["block"].cuda),
    "mxfp8": Gate(since=(10, 0), below=(12, 0)),
    "nvfp4": Gate(since=(10, 0)),
}
"""Which hardware multiplies operands of each kind of recipe."""


class NativeGemm(NamedTuple):
    """A matrix product of this package that runs on the hardware's own units."""

    kind: str
    name: str
    since: Arch
    below: Arch


def native_name(left: NumberFormat, right: NumberFormat) -> str:
    """Who makes native products of two formats: cuBLASLt (``scaled_mm``), or it or the package's own kernel (``product.cu``),
    as is faster for their sizes (:data:`~opfuse.kernels.products.hopper.FASTER`).
    """
    library, scaling = BACKENDS[left.family].name, SCALING.get((left.block, right.block))
    ours, _, _ = OWN[left.family].name.partition(",")
    return f"{ours} or {library}" if any(scaling == each for each, _ in FASTER) else library


_FPROP: Mapping[str, tuple[NumberFormat, NumberFormat]] = {
    "delayed": (fp8_tensor(E4M3), fp8_tensor(E4M3)),
    "fp8_current": (fp8_tensor(E4M3), fp8_tensor(E4M3)),
    "fp8_block": (fp8_block(E4M3, 1), fp8_block(E4M3, 2)),
    "mxfp8": (mxfp8(E4M3), mxfp8(E4M3)),
    "nvfp4": (NVFP4, NVFP4),
}
"""Formats of the forward product's operands."""

NATIVE_GEMMS: tuple[NativeGemm, ...] = tuple(
    NativeGemm(kind, native_name(*formats), backend.since, backend.below)
    for kind, formats in _FPROP.items()
    if (backend := BACKENDS.get(formats[0].family))
)
"""Products the package calls natively; a kind of recipe without a row here is emulated everywhere.

One product of a native kind may still be emulated, for its sizes or elements: ``refusal`` in ``kernels/products/native.py`` says
which rule it misses.
"""


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


def _dotted(version: Arch) -> str:
    return f"{version[0]}.{version[1]}"


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
    """How ``recipe``, or recipes of a kind such as ``"mxfp8"``, run on ``arch`` (None: on this machine).

    A custom recipe is native if all products are that it quantizes for a linear layer without a name. If its factory refuses such
    a layer, nothing is known, and the answer is emulated.
    """
    kind = recipe.kind if isinstance(recipe, Recipe) else recipe
    arch = device_arch() if arch is None else arch
    if isinstance(recipe, CustomRecipe):
        found, told = _custom(recipe, arch), _casts(recipe)
        return Support(found.status, f"{found.reason}; {told}") if told else found
    if kind == "custom":
        return Support("emulated", "each product is native only if both of its quantizers' formats are; ask for a recipe")
    if kind not in GATES:
        cure = f"use one of {', '.join(RECIPES)}"
        raise RecipeError(describe("support", wanted="a recipe or its kind", got=f"{kind!r}{nearest(kind, GATES)}", cure=cure))
    casts = f"; {told}" if isinstance(recipe, Recipe) and (told := _casts(recipe)) else ""
    called = [gemm for gemm in NATIVE_GEMMS if gemm.kind == kind]
    if closed := GATES[kind].miss(arch, _cuda_version()):
        nowhere = "" if called or arch == (0, 0) else "; this package does not call such a product yet"
        return Support("emulated", closed + nowhere + casts)
    native = next((gemm for gemm in called if gemm.since <= arch < gemm.below), None)
    if native is None:
        missing = f"compute capability {_dotted(arch)} has the product, this package does not call it yet"
        return Support("emulated", missing + casts)
    return Support("native", native.name + casts)


def _casts(recipe: Recipe) -> str | None:
    """Which casts of a recipe run in torch on every device; None if there are kernels for all."""
    if isinstance(recipe, CustomRecipe):
        made = {role: recipe.key_extras[f"{role}_quantizer"] for role in TENSOR_TYPES}
    elif hasattr(recipe, "scale_rule"):
        made = {role: recipe.quantizer(QuantizerRole(tensor_type=role)) for role in TENSOR_TYPES}
    else:
        return None
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


def _custom(recipe: CustomRecipe, arch: Arch) -> Support:
    """Native if every product is that reads two quantized planes; else the reason of the first that is not.

    Refused if calls are: for formats that cannot meet, or for delayed scaling under an override.
    """
    try:
        formats = {role: _formats(recipe, role) for role in TENSOR_TYPES}
    except RecipeError as error:
        return Support("refused", str(error))
    products: dict[str, tuple[Layout, Layout]] = {}
    own: dict[str, None] = {}
    for name, what in GEMMS.items() if recipe.backward_override is None else [("fprop", GEMMS["fprop"])]:
        one, other = formats[what.left], formats[what.right]
        if one is None or other is None:
            return Support("emulated", f"{name}: the factory refuses a linear layer without a name")
        left, right = one[what.left_plane], other[what.right_plane]
        if IDENTITY not in (left, right):
            own |= {role: None for role, fmt in ((what.left, left), (what.right, right)) if fmt == DEQUANTIZED}
            products[name] = layout_of(left, what.left_plane, _USUAL), layout_of(right, what.right_plane, _USUAL)
    if own:
        return Support("emulated", f"products read the dequantized values of a quantizer of one's own: {', '.join(own)}")
    clashes = [reason for name, pair in products.items() if (reason := clash(name, *(layout.format for layout in pair)))]
    if clashes:
        return Support("emulated" if recipe.allow_mixed_emulation else "refused", clashes[0])
    native: dict[str, list[str]] = {}
    for name, pair in products.items():
        machine = Machine(arch, _cuda_version() or _NEWEST)
        if miss := Gate((0, 0)).miss(arch, None) or layout_refusal(*pair, torch.bfloat16, machine):
            return Support("emulated", f"{name}: {miss}")
        native.setdefault(native_name(*(layout.format for layout in pair)), []).append(name)
    found = "; ".join(f"{', '.join(names)} by {backend}" for backend, names in native.items())
    return Support("native", found or "all products are in high precision")


_USUAL, _NEWEST = (256, 256), (99, 0)
"""Sizes of a matrix that every back end takes, and the CUDA version that stands for a torch without CUDA."""


def _formats(recipe: CustomRecipe, tensor_type: str) -> Mapping[str, NumberFormat] | None:
    """The format of each plane of an operand; None if the factory needs the name of the layer. RecipeError if it is refused."""
    role = QuantizerRole(tensor_type=tensor_type)
    answer = recipe.key_extras[f"{tensor_type}_quantizer"]
    if isinstance(answer, DelayedScalingRequest):
        delayed = cast(DelayedScaling, recipe.delayed_scaling(role))
        return dict.fromkeys(USAGES, fp8_tensor(FP8_ELEMENTS[delayed.fp8_dtype(role)]))
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
