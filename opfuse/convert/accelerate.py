"""Accelerate: an Accelerator whose ``prepare`` converts models, by a handler as those that it has for other FP8 libraries.

Accelerate looks handlers up in a table of its own classes, which takes no other. So :class:`Accelerator` takes out the handler of
this file and passes on all others. It wants ``pip install opfuse[accelerate]``.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from opfuse.convert.fuse import fuse_, report
from opfuse.convert.policy import Policy
from opfuse.errors import ConversionError, UnsupportedError, describe
from opfuse.recipes import Float8CurrentScaling, Recipe, autocast

try:
    import accelerate
    from accelerate.utils import KwargsHandler
except ImportError as error:
    cure = "pip install opfuse[accelerate]"
    raise UnsupportedError(
        describe("opfuse.convert.accelerate", wanted="the package accelerate", got="none", cure=cure)
    ) from error


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

    kwargs_handlers: those of Accelerate, and one :class:`OpfuseRecipeKwargs`; without one it is Accelerate's own. A model that
    ``fuse_`` has converted stays as it is. ``mixed_precision`` is "no" or "bf16" (or "fp16"), that of what stays in high
    precision: "fp8" asks for another library.

    ConversionError for a second handler of this kind, for "fp8" beside one, and for an optimizer over parameters that ``fuse_``
    has replaced, which are FP8 matrices of transformers.
    """

    def __init__(self, *args: Any, kwargs_handlers: Iterable[Any] | None = None, **options: Any) -> None:
        handlers = [*(kwargs_handlers or ())]
        own = [each for each in handlers if isinstance(each, OpfuseRecipeKwargs)]
        if len(own) > 1:
            cure = "give modules recipes of their own by its policy"
            raise ConversionError(
                describe("Accelerator kwargs_handlers", wanted="one OpfuseRecipeKwargs", got=len(own), cure=cure)
            )
        if own and "fp8" in (options.get("mixed_precision"), *args):
            raise _other_library()
        self.opfuse_recipe_handler = own[0] if own else None
        self._fused: WeakSet[nn.Module] = WeakSet()
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
        """Convert a model once; one that something has wrapped was converted before."""
        handler = self.opfuse_recipe_handler
        if handler is None or model in self._fused or getattr(model, "_is_accelerate_prepared", False):
            return
        if not _is_fused(model):
            fuse_(model, handler.recipe, policy=handler.policy)
        self._fused.add(model)
        if not handler.use_autocast_during_eval:
            region = _EvaluationRegion()
            model.register_forward_pre_hook(region.enter)
            model.register_forward_hook(region.leave, always_call=True)


def _other_library() -> ConversionError:
    cure = "write mixed_precision='bf16': the recipe stands in the handler"
    got = "'fp8', for which Accelerate converts models by another library"
    return ConversionError(describe("Accelerator mixed_precision", wanted="'no', 'bf16' or 'fp16'", got=got, cure=cure))


def _is_fused(model: nn.Module) -> bool:
    try:
        report(model)
    except ConversionError:
        return False
    return True


class _EvaluationRegion:
    """A region around the forwards of a module in which nothing is cast, while the module is in evaluation mode."""

    def __init__(self) -> None:
        self.entered: list[ExitStack] = []

    def enter(self, module: nn.Module, *_: Any) -> None:
        region = ExitStack()
        if not module.training:
            region.enter_context(autocast(enabled=False))
        self.entered.append(region)

    def leave(self, *_: Any) -> None:
        if self.entered:
            self.entered.pop().close()
