"""What a call keeps for its backward pass, value by value, and what it would keep under other settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from opfuse.domains import checked_arguments
from opfuse.errors import OpfuseError, PipelineError, describe, number_of
from opfuse.formats import dtype_name
from opfuse.inspect.alike import aligned, alike, common, counted, starred
from opfuse.inspect.observe import CallInputs, Observation, SavedValue, Totals, copied_call, observe
from opfuse.recipes import Recipe, autocast, current_recipe
from opfuse.recipes.autocast import current_amax_group
from opfuse.recipes.recipe import KEEPS, OVERRIDES
from opfuse.torch_private.operations import tree_leaves


@dataclass(frozen=True)
class RefusedSetting:
    """A setting, tried for comparison, under which a call cannot run. reason: the first line of the error."""

    reason: str

    def __str__(self) -> str:
        return f"refused: {self.reason}"


@dataclass(frozen=True)
class Saved:
    """What one call saves, and what it would save otherwise.

    by_override: under every backward override, or why the recipe or the call refuses it; empty without a recipe. by_keep:
    likewise under every ``keep`` of the recipe.
    baseline: of the same call, in its own dtypes, without a recipe, or why it cannot run so. dtype: of its parameters, as
    "bfloat16", or "mixed dtypes". kept_bytes: of the casts of weights that :func:`opfuse.kept_weights` keeps around the call,
    which no total counts. errors: of each setting that can run, as "keep=recompute", how far the gradients of all parameters are
    from those of the baseline, as a share of these; only where they were asked for.
    """

    recipe: str
    values: tuple[SavedValue, ...] = field(repr=False)
    totals: Totals
    by_override: Mapping[str, Totals | RefusedSetting]
    baseline: Totals | RefusedSetting
    dtype: str
    kept_bytes: int = 0
    by_keep: Mapping[str, Totals | RefusedSetting] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        head = (f"recipe   {self.recipe}", f"saved    {totals_line(self.totals)}", "")
        return "\n".join((*head, *listed(self.values), "", *_comparison(self)))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "recipe": self.recipe,
            "values": [asdict(value) for value in self.values],
            **self.totals._asdict(),
            "kept_bytes": self.kept_bytes,
            "by_override": {name: _plain(totals) for name, totals in self.by_override.items()},
            "by_keep": {name: _plain(totals) for name, totals in self.by_keep.items()},
            "errors": dict(self.errors),
            "baseline": {"dtype": self.dtype, **_plain(self.baseline)},
        }


@checked_arguments(PipelineError, but="model")
def saved(model: nn.Module, *inputs: Any, errors: bool = False, **named: Any) -> Saved:
    """What ``model(*inputs, **named)`` saves for its backward pass under the active recipe.

    Runs the forward once for each setting that is compared, without side effects, like :func:`opfuse.explain`. A setting under
    which the call cannot run is reported as refused, and why; only the active recipe raises. A model and inputs on the meta
    device are counted as they would be with memory. Of what an activation checkpoint inside the model runs, its inputs count, and
    not what its recomputation saves in the backward pass. errors: also run the backward passes, and report how far gradients are
    from those without a recipe. PipelineError for what is no module or runs no op of opfuse, and for ``errors`` on the meta
    device, which has no values; DtypeError if the first input is no tensor.
    """
    given = CallInputs(inputs, named)
    if errors and any(tensor.is_meta for tensor in given.tensors):
        where, wanted, got = "saved(errors=True)", "tensors with values", "some on the meta device"
        cure = "leave errors out, or give the model memory (to_empty) and values, and pass inputs with values"
        raise PipelineError(describe(where, wanted=wanted, got=got, cure=cure))
    found = observe(model, given)
    recipes = recipes_of(found)
    asked = ("backward_override", "keep") if len(recipes) == 1 else ()
    overrides, kept = [totals_under(recipes[0], name, found.totals, model, given) for name in asked] or ({}, {})
    baseline = _attempted(lambda: _baseline(model, given))
    made = " and ".join(map(repr, recipes)) or "none", found.values, found.totals
    comparable = errors and asked and not isinstance(baseline, RefusedSetting)
    off = _errors(recipes[0], overrides, kept, model, given) if comparable else {}
    return Saved(*made, overrides, baseline, _dtype(model, given), found.kept[1], kept, off)


def recipes_of(found: Observation) -> list[Recipe]:
    """The active recipe; without one, those that converted modules ran under."""
    active = current_recipe()
    ran = dict.fromkeys(plan.key.env.recipe for plan in found.plans)
    return [active] if active is not None else [each for each in ran if each is not None]


CHOICES: Mapping[str, tuple[str | None, ...]] = {"backward_override": tuple(OVERRIDES), "keep": tuple(KEEPS.schema["enum"])}
"""The fields of a recipe that decide what is saved, and their values."""


SettingTotals = Mapping[str, Totals | RefusedSetting]
"""What a call keeps under each value of a field, or why it refuses one."""


def totals_under(
    recipe: Recipe, name: str, totals: Totals, model: nn.Module, arguments: CallInputs
) -> dict[str, Totals | RefusedSetting]:
    """What a call keeps under every value of the field ``name``, or why it refuses one. totals: under the recipe as it is."""

    def under(value: str | None) -> Totals:
        with _changed(recipe, name, value):
            return observe(model, arguments).totals

    given = getattr(recipe, name)
    return {str(value): totals if value == given else _attempted(partial(under, value)) for value in CHOICES[name]}


def _changed(recipe: Recipe, name: str, value: str | None) -> autocast:
    """A region of ``recipe`` with another value of one field."""
    return autocast(recipe=recipe.replace(**{name: value}), amax_reduction_group=current_amax_group())


def _errors(
    recipe: Recipe, overrides: SettingTotals, kept: SettingTotals, model: nn.Module, given: CallInputs
) -> dict[str, float]:
    """How far gradients are under each setting that can run, by its name."""
    with autocast(enabled=False):
        exact = _gradients_of(model, given)
    errors = {}
    for name, told_of in (("backward_override", overrides), ("keep", kept)):
        for value in CHOICES[name]:
            if not isinstance(told_of[str(value)], RefusedSetting):
                with _changed(recipe, name, value):
                    errors[f"{name}={value}"] = _error_of(_gradients_of(model, given), exact)
    return errors


def _gradients_of(model: nn.Module, given: CallInputs) -> list[torch.Tensor | None]:
    """The gradients of all trained parameters under the active recipe, for gradients of the outputs that are drawn from one seed.

    The call runs on copies, and neither ``.grad`` nor ``main_grad`` of the caller is written.
    """
    generator = torch.Generator().manual_seed(0)
    with copied_call(model, given) as call:
        outputs = [output for output in tree_leaves(call()) if isinstance(output, torch.Tensor) and output.requires_grad]
        wanted = [p for p in model.parameters() if p.requires_grad]
        if not (outputs and wanted):
            return []
        drawn = [torch.randn(output.shape, generator=generator, device="cpu").to(output) for output in outputs]
        grads = torch.autograd.grad(outputs, wanted, drawn, allow_unused=True)
        return [getattr(p, "main_grad", None) if grad is None else grad for p, grad in zip(wanted, grads)]


def _error_of(found: list[torch.Tensor | None], exact: list[torch.Tensor | None]) -> float:
    """The norm of the difference of all gradients together, as a share of that of ``exact``; nan where there is none."""
    pairs = [(a.double(), b.double()) for a, b in zip(found, exact) if a is not None and b is not None]
    off, whole = (
        math.fsum(float(each.square().sum()) for each in those) for those in ([a - b for a, b in pairs], [b for _, b in pairs])
    )
    return math.sqrt(off / whole) if whole else math.nan


def _baseline(model: nn.Module, arguments: CallInputs) -> Totals:
    with autocast(enabled=False):
        return observe(model, arguments, of_opfuse=False).totals


def _dtype(model: nn.Module, given: CallInputs) -> str:
    """The dtype of the parameters, of the first input where there are none; "mixed dtypes" where they differ."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()} or {given.tensors[0].dtype}
    return dtype_name(dtypes.pop()) if len(dtypes) == 1 else "mixed dtypes"


def _attempted(call: Callable[[], Totals]) -> Totals | RefusedSetting:
    """What ``call`` finds, or why it failed: a setting that is tried for comparison must not raise."""
    try:
        return call()
    except (OpfuseError, RuntimeError) as error:
        return RefusedSetting(str(error).partition("\n")[0])


def _plain(totals: Totals | RefusedSetting) -> dict[str, Any]:
    return {"refused": totals.reason} if isinstance(totals, RefusedSetting) else totals._asdict()


# -- text ----------------------------------------------------------------------------------------------------------------

HEAD = ("op", "name", "format", "planes", "dtype", "shape", "bytes", "memory")


def totals_line(totals: Totals) -> str:
    """Totals in a line."""
    saved = f"{number_of(totals.bytes, 'byte')} for backward"
    return f"{saved}, {totals.own} of them beside the call's inputs; parameters are not counted"


def listed(values: Sequence[SavedValue]) -> Iterator[str]:
    """Lines of a table of the values."""
    rows = [HEAD, *(_row(same) for same in alike(values, _as_another))]
    return (f"  {line}" for line in aligned(rows, right=(HEAD.index("bytes"),)))


def _as_another(v: SavedValue) -> SavedValue:
    """What values of layers that are alike have in common."""
    return replace(v, op=starred(v.op), memory=starred(v.memory))


def _row(same: Sequence[SavedValue]) -> tuple[str, ...]:
    v, op, memory = same[0], counted([each.op for each in same]), common([each.memory for each in same])
    return op, v.name, v.format, "+".join(v.usages), v.dtype, "x".join(map(str, v.shape)), str(v.bytes), memory


def _comparison(found: Saved) -> Iterator[str]:
    """A line for each override and each way to keep, and the baseline last."""
    dtype = found.dtype
    rows = {f"backward_override={name}": totals for name, totals in found.by_override.items()}
    # What a recipe with the default, keep=None, saves stands in the line of its override.
    kept = {name: totals for name, totals in found.by_keep.items() if name != "None" or totals is not found.totals}
    rows |= {f"keep={name}": totals for name, totals in kept.items()}
    base = 0 if isinstance(found.baseline, RefusedSetting) else found.baseline.own
    for name, totals in (rows | {f"{dtype}, no recipe": found.baseline}).items():
        if isinstance(totals, RefusedSetting):
            yield f"{name:<35}{totals}"
            continue
        part = f", {totals.own / base:.1%} of {dtype}" if base else ""
        off = f", gradients {found.errors[name]:.1%} off" if name in found.errors else ""
        yield f"{name:<35}{totals.bytes:>12} bytes {totals.own:>12} beside the inputs{part}{off}"
