"""Which formats meet in the products of an op: decided when its plan is made, before anything is cast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from opfuse.compiler.graph import CastSpec
from opfuse.core.operation import BasicOperation
from opfuse.errors import MissingPlaneError, RecipeError, describe
from opfuse.formats import USAGES, Format
from opfuse.recipes import Recipe
from opfuse.recipes.policy import planes
from opfuse.tensors.gemm import GEMMS, clash
from opfuse.tensors.storage import QuantizedStorage
from opfuse.tensors.tensor import QuantizedTensor

GEMM = "gemm"
"""Trait of an op whose roles are the operands of the three products."""

Formats = Mapping[str, Format]
"""Formats by usage."""


def stored_formats(op: BasicOperation, role: str, recipe: Recipe, products: Sequence[str]) -> Formats | None:
    """The formats in which a quantized parameter enters ``products``; None if it is cast anew, by ``on_recipe_change``.

    RecipeError where the policy refuses another format than the recipe's; MissingPlaneError for a plane that is read, was not
    made and cannot be derived. What is read is asked of the planes themselves: a quantizer says how later casts are made.
    """
    stored = op.parameter(role)
    if not isinstance(stored, QuantizedTensor):
        return {}
    read = planes(op.quantizer_role(role).tensor_type, tuple(products)) if GEMM in op.traits else frozenset(stored.usages)
    found: dict[str, Format] = {usage: _format(op, role, stored.storage, usage) for usage in USAGES if usage in read}
    with op.quantizer_states.kept():
        quantizer, _ = op.make_quantizer(role, recipe)
    wanted: dict[str, Format] = {usage: fmt for usage, fmt in zip(USAGES, quantizer.formats) if usage in found}
    if found == wanted or recipe.on_recipe_change == "keep":
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


def _format(op: BasicOperation, role: str, stored: QuantizedStorage, usage: str) -> Format:
    try:
        return stored.derived(usage).format
    except MissingPlaneError as error:
        raise MissingPlaneError(
            describe(
                f"{op.label} {role}",
                wanted=f"{usage} data, which a product of this call reads",
                got=f"a parameter stored without: {stored.why}",
                cure="quantize it in both directions, or compute the backward pass under a backward_override",
            )
        ) from error


def _listed(formats: Formats) -> str:
    return " and ".join(f"{fmt} {usage}" for usage, fmt in formats.items())


def clashes(
    op: BasicOperation, casts: Mapping[str, CastSpec], stored: Mapping[str, Formats], products: Sequence[str]
) -> Iterator[str]:
    """Why operands of ``op`` cannot meet, for each pair that cannot, out of its casts and its stored parameters."""
    if GEMM not in op.traits:
        return
    formats: dict[str, Formats] = {role: dict(zip(USAGES, spec.quantizer.formats)) for role, spec in casts.items()}
    operands = [(op.quantizer_role(role).tensor_type, each) for role, each in (formats | dict(stored)).items()]
    for name in products:
        what = GEMMS[name]
        left = [each[what.left_plane] for tensor_type, each in operands if tensor_type == what.left]
        right = [each[what.right_plane] for tensor_type, each in operands if tensor_type == what.right]
        reasons = (clash(name, one, other) for one in left for other in right)
        yield from (f"{op.label} {reason}" for reason in dict.fromkeys(reasons) if reason is not None)
