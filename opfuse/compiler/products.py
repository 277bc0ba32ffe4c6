"""The products of an op: which formats meet, decided when its plan is made, before anything is cast; native or emulated."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from opfuse.compiler.graph import CastSpec, ProductFormats
from opfuse.core.operation import BasicOperation
from opfuse.core.signature import Env
from opfuse.errors import MissingPlaneError, RecipeError, describe
from opfuse.formats import COLUMNWISE, DEQUANTIZED, IDENTITY, USAGES, NumberFormat
from opfuse.kernels.products.backends import Machine, reads_tiled_scales
from opfuse.kernels.products.certificate import wrong_product
from opfuse.kernels.products.native import (
    OWN,
    invariant_refusal,
    layout_refusal,
    library_name,
    machine,
    native_name,
    native_refusal,
    wrong_runs,
)
from opfuse.kernels.products.tiles import rows_of
from opfuse.numerics.layouts import layout_of
from opfuse.recipes import Recipe
from opfuse.recipes.policy import planes
from opfuse.tensors.gemm import GEMMS
from opfuse.tensors.quantizers import Quantizer
from opfuse.tensors.quantizers.base import casts_itself
from opfuse.tensors.tensor import QuantizedTensor

GEMM = "gemm"
"""Trait of an op whose roles are the operands of the three products."""

Formats = Mapping[str, NumberFormat]
"""Formats by usage."""


def stored_formats(op: BasicOperation, role: str, recipe: Recipe, products: Sequence[str]) -> Formats | None:
    """The formats in which a quantized parameter enters ``products``; None if it is cast anew, by ``on_recipe_change``.

    RecipeError where the policy refuses another format than the recipe's; MissingPlaneError for a plane that is read, was not
    made and cannot be derived. What is read is asked of the planes themselves: a quantizer says how later casts are made.
    """
    stored = op.parameter(role)
    if not isinstance(stored, QuantizedTensor):
        return {}
    read = planes(op.quantizer_role(role).tensor_type, tuple(products)) if GEMM in op.known.traits else frozenset(stored.usages)
    found: dict[str, NumberFormat] = {usage: fmt for usage in USAGES if usage in read and (fmt := _format(stored, usage))}
    formats = op.stored_quantizer(role, recipe).formats
    wanted: dict[str, NumberFormat] = {usage: fmt for usage, fmt in zip(USAGES, formats) if usage in found}
    if _as_stored(found) == _as_stored(wanted) or recipe.on_recipe_change == "keep":
        _check_found(op, role, stored, read)
        return found
    if recipe.on_recipe_change == "dequantize":
        return None
    raise RecipeError(
        describe(
            f"{op.label} {role} under {type(recipe).__name__}",
            wanted=f"a parameter stored as the recipe casts it, {_listed(wanted)}",
            got=f"one stored as {_listed(found)}",
            cure="compute under the recipe it was made with, or set the recipe's on_recipe_change to 'dequantize' (cast its "
            "values for each call) or to 'keep' (multiply it as it is)",
        )
    )


_SPARED = {COLUMNWISE: ", or compute the backward pass under a backward_override"}
"""How a call can do without a plane."""


def _format(stored: QuantizedTensor, usage: str) -> NumberFormat | None:
    """The format in which a product reads a plane; None for one that was not made and cannot be derived."""
    try:
        return stored.format_of(usage)
    except MissingPlaneError:
        return None


def _check_found(op: BasicOperation, role: str, stored: QuantizedTensor, read: Collection[str]) -> None:
    """MissingPlaneError for a plane that is read and cannot be had."""
    for usage in USAGES:
        if usage in read and _format(stored, usage) is None:
            wanted, got = f"{usage} data, which a product of this call reads", f"a parameter stored without: {stored.held.why}"
            cure = "quantize it in both directions" + _SPARED.get(usage, "")
            raise MissingPlaneError(describe(f"{op.label} {role}", wanted=wanted, got=got, cure=cure))


def _as_stored(formats: Formats) -> Formats:
    return {usage: fmt.as_stored for usage, fmt in formats.items()}


def _listed(formats: Formats) -> str:
    return " and ".join(f"{fmt} {usage}" for usage, fmt in formats.items())


def products_of(
    index: int,
    op: BasicOperation,
    casts: Mapping[str, CastSpec],
    stored: Mapping[str, Formats],
    *,
    made: Sequence[str],
    quantized: Sequence[str],
) -> Iterator[ProductFormats]:
    """The products ``made`` by the op at ``index``, of which those ``quantized`` read its casts and its stored parameters."""
    if GEMM not in op.known.traits:
        return
    formats: dict[str, Formats] = {role: dict(zip(USAGES, spec.quantizer.formats)) for role, spec in casts.items()}
    operands = [(op.quantizer_role(role).tensor_type, each) for role, each in (formats | dict(stored)).items()]
    for name in made:
        what = GEMMS[name]
        left: dict[NumberFormat | None, None] = {}
        right: dict[NumberFormat | None, None] = {}
        for tensor_type, each in operands if name in quantized else ():
            for side, role, plane in ((left, what.left, what.left_plane), (right, what.right, what.right_plane)):
                if tensor_type == role:
                    side[None if each[plane] == IDENTITY else each[plane]] = None
        for one, other in itertools.product(left or (None,), right or (None,)):
            yield ProductFormats(index, name, one, other)


def in_read_order(quantizer: Quantizer, env: Env) -> Quantizer:
    """The quantizer, whose casts store scales as the products of the device read them: one kernel writes them so at once."""
    reads_tiles = any(reads_tiled_scales(fmt.family, machine(env.arch)) for fmt in quantizer.formats)
    return replace(quantizer, optimize_for_gemm=True) if reads_tiles and casts_itself(quantizer) else quantizer


def refusal_in_groups(cast: CastSpec, env: Env) -> str:
    """Why a device that multiplies each group does not where it alone knows their sizes; an empty string if it does."""
    if cast.ragged is None:
        return ""
    on = machine(env.arch)
    return cast.ragged.refusal(on, torch.bfloat16) or wrong_runs(cast.ragged.inputs, on)


class How(NamedTuple):
    """``native``, ``emulated`` or ``high precision``, and why."""

    status: str
    reason: str


def how(product: ProductFormats, spec: Any, env: Env) -> How:
    """How ``product`` of an op with hyper-parameters ``spec`` runs in ``env``; of a native one also who makes it."""
    if product.left is None or product.right is None:
        return How("high precision", "an operand is in high precision")
    if DEQUANTIZED in (product.left, product.right):
        return How("emulated", "it reads the dequantized values of a quantizer of one's own")
    if product.clash is not None:
        return How("emulated", product.clash.problem)
    what, features = GEMMS[product.name], (getattr(spec, "in_features", 0), getattr(spec, "out_features", 0))
    widths = {"input": (env.rows_class, features[0]), "weight": features[::-1], "grad_output": (env.rows_class, features[1])}
    left, right = (
        layout_of(fmt, plane, widths[role])
        for fmt, plane, role in ((product.left, what.left_plane, what.left), (product.right, what.right_plane, what.right))
    )
    on = machine(env.arch)
    asked = left, right, env.autocast or torch.bfloat16, on
    ours, refused = not layout_refusal(*asked, own=True), native_refusal(*asked)
    if env.product(product.name).get("invariant", False):
        family = product.left.family
        return _invariant(family, invariant_refusal(*asked) or wrong_product(family, on), env, on, ours=ours)
    if refused and not ours:
        return How("emulated", refused)
    alone = hasattr(spec, "num_groups") or bool(refused)
    return How("native", _maker(product.left, product.right, on, ours=ours, alone=alone))


def _maker(left: NumberFormat, right: NumberFormat, on: Machine, *, ours: bool, alone: bool) -> str:
    """Who makes a native product. ours: whether the package's own kernel takes it; alone: whether it then does so at any size, as
    in one launch for groups, or where the library refuses.
    """
    return OWN[left.family][0].name if ours and alone else native_name(left, right, on)


def _invariant(family: str, refusal: str, env: Env, on: Machine, *, ours: bool) -> How:
    """How a product runs in which no row depends on others."""
    if ours:
        return How("native", f"{OWN[family][0].name}, batch-invariant: one order of sums for any number of rows")
    tiles = f"batch-invariant: in tiles of {rows_of(env.device)} rows"
    return How("emulated", f"{refusal}; {tiles}") if refusal else How("native", f"{library_name(family, on)}, {tiles}")
