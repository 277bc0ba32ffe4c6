"""torch's checkpoint in its non-reentrant kind, which torch advises, with inputs that may be kept quantized."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd.graph import saved_tensors_hooks

from opfuse.errors import OpfuseError, PipelineError, RecipeError, describe
from opfuse.recipes.recipe import QuantizerRole, Recipe
from opfuse.tensors.quantizers import Quantizer
from opfuse.tensors.tensor import QuantizedTensor
from opfuse.torch_private.autograd import saving_hooks


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = False,
    keep_inputs: Recipe | None = None,
    **kwargs: Any,
) -> Any:
    """``torch.utils.checkpoint.checkpoint(function, *args, ...)``, non-reentrant by default.

    Under any checkpoint of torch, pipelines recompute with the recipe, amax group and rules of the forward pass, although
    ``autocast`` is over by then. Delayed scaling casts with the scales of the forward pass and counts no amax twice, so the bits
    are the same (``checkpoint_replay.py``).

    keep_inputs: keep those ``args`` that want a gradient as this recipe casts the input of a linear layer, in about half of the
    bytes of bf16. The recomputation reads the decoded values. It has the bits of the forward pass if a cast with one scale for
    the tensor, to the same format, is all that reads them. Otherwise, as where a norm or a residual sum reads them, gradients
    are those at the rounded inputs. Parameters, vectors, and inputs that the format cannot take, are kept as they are.
    PipelineError for what cannot be called and for what is no recipe; RecipeError for one that scales by earlier steps.
    """
    if not callable(function):
        cure = "pass the module or function, and then its arguments"
        raise PipelineError(describe("checkpoint", wanted="a module or a function", got=type(function).__name__, cure=cure))
    around = nullcontext() if keep_inputs is None else _QuantizedInputs(keep_inputs)
    with around:  # torch keeps the arguments before it begins the function, for which it has hooks of its own
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)


def _quantizer_of(recipe: Recipe) -> Quantizer:
    """The cast of an input of a linear layer by rows, as ``recipe`` makes it."""
    where, role, cure = "checkpoint(keep_inputs=)", QuantizerRole(), "pass opfuse.recipes.Float8CurrentScaling()"
    if not isinstance(recipe, Recipe):
        raise PipelineError(describe(where, wanted="a recipe", got=type(recipe).__name__, cure=cure))
    if recipe.delayed_scaling(role) is not None:
        got = f"{type(recipe).__name__}, which scales by earlier steps"
        raise RecipeError(describe(where, wanted="a recipe that finds scales in the tensor", got=got, cure=cure))
    return recipe.quantizer(role).wanting(rowwise=True, columnwise=False)


class _QuantizedInputs(saved_tensors_hooks):
    """Inside, tensors that are saved are cast, and decoded when they are read. Hooks around it get them as they are kept."""

    def __init__(self, recipe: Recipe) -> None:
        self.quantizer = _quantizer_of(recipe)
        pack, unpack = saving_hooks(True) or (_same, _same)
        super().__init__(lambda tensor: pack(self._kept(tensor)), lambda kept: _decoded(unpack(kept)))

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is not torch.Tensor or tensor.dim() < 2 or not tensor.requires_grad:  # a mask, say, wants none
            return tensor
        try:
            self.quantizer.check(tensor.shape, tensor.dtype)
        except OpfuseError:
            return tensor
        made: torch.Tensor = self.quantizer(tensor.detach())
        return made


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _decoded(kept: torch.Tensor) -> torch.Tensor:
    return kept.dequantize() if isinstance(kept, QuantizedTensor) else kept
