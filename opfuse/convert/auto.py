"""``policy="auto"``: which modules of a model stay in high precision by what is known of it, each with the reason."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from opfuse.errors import ConversionError
from opfuse.inspect.advise import advise
from opfuse.recipes import Recipe
from opfuse.recipes.rates import BF16, RATES

AUTO = "auto"
"""The word for it, in the place of a policy."""

LAYERS = 4
"""A model of fewer layers has no first and last one that stay plain: too little would be left."""


def reasons_of(model: nn.Module, recipe: Recipe | None) -> Mapping[str, str]:
    """By path, why a module stays in high precision: those that :func:`opfuse.advise` is against, and the first and the last
    layer of a model of at least LAYERS.

    That a recipe is emulated on the GPU that advice was measured on is no reason: who chose it wants it.
    """
    reasons = dict[str, str]()
    for path, place in _ends(model):
        reasons[path] = f"the {place} layer, whose errors reach the loss most"
    kind = recipe.kind if recipe is not None and recipe.kind in RATES else "fp8_current"
    try:
        advice = advise(model, kind=kind).layers
    except ConversionError:  # of a model without linear layers, such as experts alone
        return reasons
    paths = {path for path, _ in model.named_modules()}  # advice has another name for a model that is a layer itself
    for layer in advice:
        if layer.advice == "bf16" and (layer.gain is None or RATES[kind] >= BF16):
            reasons[layer.path if layer.path in paths else ""] = layer.why
    return reasons


def _ends(model: nn.Module) -> list[tuple[str, str]]:
    """The first and the last of the longest list of modules of one class, with their paths. Lists inside of one, such as the
    experts of a layer, hold no layers.
    """
    lists = list[tuple[str, nn.ModuleList]]()
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.".lstrip(".")) for outer, _ in lists)
        if isinstance(module, nn.ModuleList) and not inside and len({type(each) for each in module}) == 1:
            lists.append((path, module))
    path, longest = max(lists, key=lambda each: len(each[1]), default=("", ()))
    if len(longest) < LAYERS:
        return []
    return [(f"{path}.0".lstrip("."), "first"), (f"{path}.{len(longest) - 1}".lstrip("."), "last")]
