"""``experts_implementation="opfuse"``: the experts of transformers' mixtures by opfuse, without ``fuse_`` on the model."""

from __future__ import annotations

import threading
import warnings
from collections.abc import MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from opfuse.convert.converted import converted
from opfuse.convert.fuse import fuse_
from opfuse.domains import checked_arguments
from opfuse.errors import ConversionError, OpfuseWarning, describe
from opfuse.recipes import Recipe, as_recipe
from opfuse.recipes.autocast import in_region
from opfuse.torch_private.compiler import not_traced

_CONVERTING = threading.RLock()

FALLBACK = "grouped_mm"
"""transformers' experts in one grouped product, which run outside of recipes, and where opfuse has none for a layout."""


@checked_arguments(ConversionError)
def register_experts(name: str = "opfuse", *, recipe: object = None) -> None:
    """Register opfuse with transformers' experts interface: ``from_pretrained(..., experts_implementation=name)`` then runs all
    experts of a mixture as grouped products of opfuse.

    recipe: that of the experts outside of :func:`opfuse.autocast`; inside, the region's recipe counts. Without any, transformers'
    ``grouped_mm`` runs. The experts of each layer are converted, as by :func:`opfuse.fuse_`, when they are first called; compiled
    code breaks its graph there, once. Experts that fuse_ would leave alone run as ``grouped_mm``, with a warning that says why.

    Registering a name again replaces its recipe, for models that have not run yet. ConversionError without transformers 5, and
    for a name that transformers uses already; RecipeError for a recipe that is none.
    """
    own = None if recipe is None else as_recipe(recipe)
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        cure = "pip install 'transformers>=5'"
        raise ConversionError(describe("register_experts", wanted="transformers 5", got=str(error), cure=cure)) from error
    known = ALL_EXPERTS_FUNCTIONS.get(name)
    if name == "eager" or not (known is None or isinstance(known, ExpertsForward)):
        got, cure = f"{name!r}, which transformers uses", 'opfuse.register_experts("opfuse")'
        raise ConversionError(describe("register_experts", wanted="a name of your own", got=got, cure=cure))
    ALL_EXPERTS_FUNCTIONS.register(name, ExpertsForward(name, own, ALL_EXPERTS_FUNCTIONS[FALLBACK]))


_NAMES: MutableMapping[nn.Module, str] = WeakKeyDictionary()
"""Under which name experts were converted: under another, which their model may be given later, they are converted anew."""


class ExpertsForward:
    """What transformers calls for the forward of a module with experts.

    A converted module calls this as well, for calls that its pipeline is not for, so the fallback runs. why: modules that cannot
    be converted, with the reason.
    """

    def __init__(self, name: str, recipe: Recipe | None, fallback: Any) -> None:
        self.name, self.recipe, self.fallback = name, recipe, fallback
        self.why: MutableMapping[nn.Module, str] = WeakKeyDictionary()

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found = converted(module)
        if found is None or (not torch.compiler.is_compiling() and _NAMES.get(module, self.name) != self.name):
            runs = self._convert(module)
        else:  # a converted module calls inside of its region; others found the forward of its class before a thread converted it
            runs = not torch.compiler.is_compiling() and found.region is not None and not in_region()
        return module.forward(*args, **kwargs) if runs else self.fallback(module, *args, **kwargs)

    @not_traced
    def _convert(self, module: nn.Module) -> bool:
        """Whether the module is converted now: by one thread at a time, and in a thread of its own, where the call's inference
        mode, and the hooks of a checkpoint around it on what is saved, do not reach what fuse_ tries.
        """
        with _CONVERTING:
            if module in self.why or (converted(module) is not None and _NAMES.get(module) == self.name):
                return module not in self.why
            with ThreadPoolExecutor(1) as apart:
                error = apart.submit(fuse_, module, self.recipe).exception()
            _NAMES[module] = self.name
        if error is None:
            return True
        if not isinstance(error, ConversionError):
            raise error
        self.why[module] = str(error)
        text = f"{error} Until then transformers' {FALLBACK} runs for this {type(module).__name__}."
        warnings.warn(text, OpfuseWarning, stacklevel=5)
        return False
