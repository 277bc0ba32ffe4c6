"""What shows that rows do not depend on their batch: recipes, a model, pieces of a batch."""

import copy
from collections.abc import Iterator

import torch

import opfuse
from opfuse import ops
from opfuse.recipes import CustomRecipe, DelayedScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling, Recipe

WIDTH = 128
RECIPES: dict[str, Recipe] = {
    "block": Float8BlockScaling(batch_invariant=True),
    "row": CustomRecipe(qfactory="fp8_row_scaled", batch_invariant=True),
    "mxfp8": MXFP8BlockScaling(batch_invariant=True),
    "delayed": DelayedScaling(batch_invariant=True),
    "nvfp4": NVFP4BlockScaling(
        row_scaled_activation=True, disable_rht=True, backward_override="dequantized", batch_invariant=True
    ),
}


def model_of(dtype: torch.dtype, width: int = WIDTH, device: torch.device | None = None) -> ops.Sequential:
    """A norm, a product with an activation that is cast in one kernel, a product whose result leaves."""
    torch.manual_seed(0)
    made = ops.RMSNorm(width), ops.Linear(width, 2 * width), ops.SwiGLU(), ops.Linear(width, width)
    return ops.Sequential(*made).to(device, dtype)


def bits_of_rows(model: torch.nn.Module, x: torch.Tensor, recipe: Recipe, *, training: bool = False) -> torch.Tensor:
    """The result of a forward pass, as bits. The model stays as it is, also scales that training moves."""
    with torch.set_grad_enabled(training), opfuse.autocast(recipe=recipe):
        y = (copy.deepcopy(model) if training else model)(x.clone().requires_grad_(training))
    return y.detach().view(torch.int32 if y.dtype == torch.float32 else torch.int16)


def pieces(count: int, rows: int) -> Iterator[slice]:
    """A first, a last and a middle piece of so many rows."""
    return (slice(start, start + rows) for start in dict.fromkeys((0, (count - rows) // 2 // 32 * 32, count - rows)))
