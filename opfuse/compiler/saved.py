"""What a call keeps for its backward pass, value by value, and what it would keep under other settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from opfuse.compiler.observe import SavedValue, Totals, observe
from opfuse.errors import RecipeError
from opfuse.recipes import Recipe, autocast, current_amax_group, current_recipe
from opfuse.recipes.policy import KEEP

BASELINE = torch.bfloat16
"""The dtype of the call without a recipe that others are compared with."""


@dataclass(frozen=True)
class Saved:
    """What one call saves, and what it would save otherwise.

    by_override: under every backward override, None where the recipe refuses it; empty without a recipe.
    baseline: of the same call in bfloat16 without a recipe.
    """

    recipe: str
    values: tuple[SavedValue, ...]
    totals: Totals
    by_override: Mapping[str, Totals | None]
    baseline: Totals

    def __str__(self) -> str:
        head = (f"recipe   {self.recipe}", f"saved    {told(self.totals)}", "")
        return "\n".join((*head, *listed(self.values), "", *_comparison(self)))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "recipe": self.recipe,
            "values": [asdict(value) for value in self.values],
            **self.totals._asdict(),
            "by_override": {name: None if totals is None else totals._asdict() for name, totals in self.by_override.items()},
            "baseline": {"dtype": str(BASELINE).removeprefix("torch."), **self.baseline._asdict()},
        }


def saved(model: nn.Module, x: torch.Tensor, *extra_inputs: torch.Tensor) -> Saved:
    """What ``model(x, *extra_inputs)`` saves for its backward pass under the active recipe.

    Runs the forward once for each setting that is compared; like :func:`opfuse.explain`, it leaves no trace.
    """
    recipe = current_recipe()
    found = observe(model, x, extra_inputs)
    others = {} if recipe is None else totals_by_override(recipe, model, x, extra_inputs)
    return Saved(
        "none" if recipe is None else repr(recipe), found.values, found.totals, others, _baseline(model, x, extra_inputs)
    )


def totals_by_override(
    recipe: Recipe, model: nn.Module, x: torch.Tensor, extras: Sequence[torch.Tensor]
) -> dict[str, Totals | None]:
    """What a call keeps under every backward override of ``recipe``; None where it refuses one."""
    found: dict[str, Totals | None] = {}
    for override in KEEP:
        try:
            changed = recipe.replace(backward_override=override)
        except RecipeError:
            found[str(override)] = None
            continue
        with autocast(recipe=changed, amax_reduction_group=current_amax_group()):
            found[str(override)] = observe(model, x, extras).totals
    return found


def _baseline(model: nn.Module, x: torch.Tensor, extras: Sequence[torch.Tensor]) -> Totals:
    state = {name: _cast(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    with autocast(enabled=False):
        return observe(model, _cast(x), [_cast(extra) for extra in extras], state).totals


def _cast(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in the baseline's dtype, with the same need of a gradient; what is no floating-point number stays."""
    changed = tensor.detach().to(BASELINE) if tensor.is_floating_point() else tensor.detach()
    return changed.requires_grad_(tensor.requires_grad)


# -- text ----------------------------------------------------------------------------------------------------------------

HEAD = ("op", "name", "format", "planes", "dtype", "shape", "bytes", "memory")


def told(totals: Totals) -> str:
    """Totals in a line."""
    return f"{totals.bytes} bytes for backward, {totals.own} of them beside the call's inputs; parameters are not counted"


def listed(values: Sequence[SavedValue]) -> Iterator[str]:
    """Lines of a table of the values."""
    rows = [HEAD, *map(_row, values)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        cells = (cell.rjust(n) if name == "bytes" else cell.ljust(n) for name, cell, n in zip(HEAD, row, widths))
        yield "  " + "  ".join(cells).rstrip()


def _row(v: SavedValue) -> tuple[str, ...]:
    return v.op, v.name, v.format, "+".join(v.usages), v.dtype, "x".join(map(str, v.shape)), str(v.bytes), v.memory


def _comparison(found: Saved) -> Iterator[str]:
    """A line for each override, and the baseline last."""
    dtype = str(BASELINE).removeprefix("torch.")
    rows = {f"backward_override={name}": totals for name, totals in found.by_override.items()}
    for name, totals in (rows | {f"{dtype}, no recipe": found.baseline}).items():
        if totals is None:
            yield f"{name:<35}refused by this recipe"
            continue
        part = f", {totals.own / found.baseline.own:.1%} of {dtype}" if found.baseline.own else ""
        yield f"{name:<35}{totals.bytes:>12} bytes {totals.own:>12} beside the inputs{part}"
