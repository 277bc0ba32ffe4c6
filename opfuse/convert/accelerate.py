"""Accelerate: an Accelerator whose ``prepare`` converts models, by a handler as those that it has for other FP8 libraries.

Accelerate looks handlers up in a table of its own classes, which takes no other. So :class:`Accelerator` takes out the handler of
this file and passes on all others. It wants ``pip install opfuse[accelerate]``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from opfuse.convert.evaluation import EvaluationRegion, evaluation_regions
from opfuse.convert.experts import experts_of
from opfuse.convert.fuse import OUTSIDE, UNFUSED, fuse_, report
from opfuse.convert.given import OWN
from opfuse.convert.leaves import weight_of
from opfuse.convert.policy import Policies, Policy
from opfuse.errors import ConversionError, OpfuseWarning, UnsupportedError, describe, listed, notice, number_of
from opfuse.recipes import Float8CurrentScaling, Recipe

try:
    import accelerate
    from accelerate.utils import KwargsHandler
except ImportError as error:
    where, cure = "opfuse.convert.accelerate", "pip install opfuse[accelerate]"
    raise UnsupportedError(describe(where, wanted="the package accelerate", got="none", cure=cure)) from error


@dataclass
class OpfuseRecipeKwargs(KwargsHandler):  # type: ignore[misc]
    """How ``prepare`` converts models, as ``TERecipeKwargs`` and ``AORecipeKwargs`` say it for their libraries.

    recipe, policy: see :func:`opfuse.fuse_`. use_autocast_during_eval: whether the model computes under the recipe in evaluation
    as well, so that it is judged, and generates, as it was trained; False, which is TERecipeKwargs's default: it then computes in
    high precision, as before its conversion.
    """

    recipe: Recipe = field(default_factory=Float8CurrentScaling)
    policy: Policy | None = None
    use_autocast_during_eval: bool = True


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """``accelerate.Accelerator``, which converts each model by :func:`opfuse.fuse_` in ``prepare``, before anything wraps it.

    kwargs_handlers: those of Accelerate, and one :class:`OpfuseRecipeKwargs`; without one it is Accelerate's own. A model
    that ``fuse_`` has converted stays as it is; of one that it has converted in part, a warning says what is left.
    ``mixed_precision`` is "no" or "bf16" (or "fp16"), that of what stays in high precision: "fp8" asks for another library.

    ConversionError for a second handler of this kind, for "fp8" beside one, and for an optimizer over parameters that ``fuse_``
    has replaced, which are FP8 matrices of transformers.
    """

    def __init__(self, *args: Any, kwargs_handlers: Iterable[Any] | None = None, **options: Any) -> None:
        handlers = [*(kwargs_handlers or ())]
        own = [each for each in handlers if isinstance(each, OpfuseRecipeKwargs)]
        if len(own) > 1:
            wanted, cure = "one OpfuseRecipeKwargs", "give modules recipes of their own by its policy"
            raise ConversionError(describe("Accelerator kwargs_handlers", wanted=wanted, got=len(own), cure=cure))
        if own and "fp8" in (options.get("mixed_precision"), *args):
            raise _other_library()
        self.opfuse_recipe_handler = own[0] if own else None
        super().__init__(*args, kwargs_handlers=[each for each in handlers if each not in own] or None, **options)
        if own and self.mixed_precision == "fp8":  # of a file or of the environment
            raise _other_library()

    def prepare(self, *args: Any, **options: Any) -> Any:
        models = [each for each in args if isinstance(each, nn.Module)]
        before = {id(parameter) for model in models for parameter in model.parameters()}
        for model in models:
            self._fuse(model)
        gone = before - {id(parameter) for model in models for parameter in model.parameters()}
        for optimizer in (each for each in args if isinstance(each, torch.optim.Optimizer)):
            if any(id(parameter) in gone for group in optimizer.param_groups for parameter in group["params"]):
                cure = "call fuse_ before you make the optimizer, then prepare both"
                got = "FP8 matrices of transformers, which are other parameters now"
                raise ConversionError(describe("Accelerator.prepare", wanted="the model's parameters", got=got, cure=cure))
        return super().prepare(*args, **options)

    def prepare_model(self, model: nn.Module, *args: Any, **options: Any) -> Any:
        self._fuse(model)
        return super().prepare_model(model, *args, **options)

    def _fuse(self, model: nn.Module) -> None:
        """Convert a model that is not, and say what is left of one that is converted in part."""
        handler = self.opfuse_recipe_handler
        if handler is None:
            return
        if not any(OWN in vars(module) for module in model.modules()):
            fuse_(model, handler.recipe, policy=handler.policy)
        elif not getattr(model, "_is_accelerate_prepared", False):
            _warn_of_rest(model, Policies(model, handler.recipe, handler.policy, None))
        if not handler.use_autocast_during_eval and next(evaluation_regions(model), None) is None:
            EvaluationRegion(model)


def _warn_of_rest(model: nn.Module, policies: Policies) -> None:
    """Say which modules the handler asks to convert that lie outside of the parts that ``fuse_`` was called on."""
    left = [line.path for line in report(model) if line.got in (OUTSIDE, UNFUSED)]
    for path in [*left]:
        module = model.get_submodule(path)
        multiplies = weight_of(module) is not None or experts_of(module) is not None
        if not multiplies or not policies.of(module, path).convert:
            left.remove(path)
    if left:
        count = number_of(len(left), "module")
        got = f"it is converted in part, and stays so: {count} in high precision, {listed(left[:MOST_NAMED])}"
        cure = "call opfuse.fuse_ on the whole model before, with a policy for its parts; or unfuse_, and prepare converts it all"
        text = notice(f"Accelerator.prepare of a {type(model).__name__}", got=got, cure=cure)
        warnings.warn(text, OpfuseWarning, stacklevel=4)


MOST_NAMED = 3
"""Of modules that a warning names."""


def _other_library() -> ConversionError:
    cure = "write mixed_precision='bf16': the recipe stands in the handler"
    got = "'fp8', for which Accelerate converts models by another library"
    return ConversionError(describe("Accelerator mixed_precision", wanted="'no', 'bf16' or 'fp16'", got=got, cure=cure))
