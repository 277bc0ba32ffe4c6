"""A rehearsal: every op once, forward and backward, on tensors without data.

Its cost does not depend on the sizes in a file: groups are alike, so that few of them stand for all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from opfuse.config.expand import RESIDUAL
from opfuse.config.findings import Loc, Problem, sentence
from opfuse.config.models import Text
from opfuse.config.operations import IN_PYTHON, MAX_ELEMENTS, PipelineEntry
from opfuse.errors import OpfuseError
from opfuse.fusions.declared import KINDS
from opfuse.recipes import Recipe
from opfuse.recipes.autocast import under
from opfuse.torch_private.unloaded import without_compiler

_SIZES = ("in_features", "normalized_shape", "size")
"""Parameters that tell how many columns an op takes."""

_RESHAPING = ("reshape",)


class Tensor(NamedTuple):
    """What is known of a tensor without data."""

    shape: torch.Size
    dtype: torch.dtype


def trial(
    entries: Sequence[PipelineEntry], recipe: Recipe | None, dtype: torch.dtype, *, rows: int, data: Text | None
) -> Problem | None:
    """The first problem that ``rows`` samples would meet on their way through the pipeline, or None.

    Ends early, without a problem, where an op takes tensors from the caller or where nothing tells the input's columns.
    """
    if (refusal := recipe.training_refusal() if recipe is not None else None) is not None:
        return Problem("refused-recipe", *sentence(refusal), ("recipe",))
    columns = data.columns if data is not None else input_columns(entries)
    if columns is None:
        return None
    if (problem := _too_large((rows, columns), ("pipeline", "ops", 0) if data is None else ("data",))) is not None:
        return problem
    with without_compiler():
        last = _shape(entries, recipe, torch.Size((rows, columns)), dtype)
    if isinstance(last, Problem) and data is not None and last.loc == ("pipeline", "ops", 0):
        given = f"; a sample of the data has {columns} columns, context {data.context} x embedding {data.embedding}"
        return replace(last, message=last.message.removesuffix(".") + given)
    if isinstance(last, Problem) or data is None or last is None or last[-1] == data.classes:
        return last if isinstance(last, Problem) else None
    message = f"the pipeline returns {last[-1]} columns, {data.kind} has {data.classes} classes"
    return Problem("does-not-fit", message, f"end with out_features: {data.classes}", ("pipeline", "ops", len(entries) - 1))


def _shape(
    entries: Sequence[PipelineEntry], recipe: Recipe | None, shape: torch.Size, dtype: torch.dtype
) -> torch.Size | Problem | None:
    """The shape of the pipeline's output for an input of ``shape``; None where it depends on the caller's tensors."""
    channels: dict[str, Tensor] = {}
    few = _few_groups(entries)
    for i, entry in enumerate(entries):
        alone = _with_groups(replace(entry, extra_input=(), extra_output=()), few)
        try:
            inputs = Tensor(shape, dtype), *(channels[name] for name in entry.extra_input)
            outputs = _rehearse(alone, inputs, recipe, dtype)
        except (OpfuseError, RuntimeError) as error:
            reason = sentence(str(error).replace(f"num_groups={alone.groups}", f"num_groups={entry.groups}"))
            return Problem("does-not-fit", *(_unequal(entry, inputs) or reason), ("pipeline", "ops", i))
        if outputs is None:
            return None
        for output in outputs:
            if (problem := _too_large(output.shape, ("pipeline", "ops", i))) is not None:
                return problem
        shape = outputs[0].shape
        channels |= dict(zip(entry.extra_output, outputs[1:]))
    return shape


def _unequal(entry: PipelineEntry, inputs: Sequence[Tensor]) -> tuple[str, str] | None:
    """What is wrong with a sum of tensors of two widths, and what to do; None for anything else."""
    widths = [tensor.shape[-1] for tensor in inputs if tensor.shape]
    if entry.op != "add_extra_input" or len(widths) < 2 or widths[0] == widths[1]:
        return None
    what = "what goes into the block" if entry.extra_input[0].startswith(f"{RESIDUAL} ") else repr(entry.extra_input[0])
    message = f"{what} has {widths[1]} columns, and what it is added to has {widths[0]}"
    return message, f"have the layers before the sum end with out_features: {widths[1]}"


def _too_large(shape: Sequence[int], place: Loc) -> Problem | None:
    if (elements := math.prod(shape)) <= MAX_ELEMENTS:
        return None
    return Problem("too-large", f"a tensor of a file has at most {MAX_ELEMENTS} elements, got {elements}", IN_PYTHON, place)


def _few_groups(entries: Sequence[PipelineEntry]) -> dict[int, int]:
    """A small number for each number of groups, not below what one token goes to; different ones for different ones."""
    least = max((dict(entry.arguments).get("top_k", 1) for entry in entries), default=1)
    return {groups: min(groups, least + i) for i, groups in enumerate(sorted({e.groups for e in entries if e.groups}))}


def _with_groups(entry: PipelineEntry, few: Mapping[int, int]) -> PipelineEntry:
    found = {"num_groups": few[entry.groups]} if entry.groups else {}
    return replace(entry, arguments=tuple((dict(entry.arguments) | found).items()))


def input_columns(entries: Sequence[PipelineEntry]) -> int | None:
    """What the first op that knows its columns takes, if those before it leave the columns alone; else None."""
    for entry in entries:
        arguments = dict(entry.arguments)
        if found := next((arguments[name] for name in _SIZES if name in arguments), None):
            return found if isinstance(found, int) else found[0] if len(found) == 1 else None
        if entry.op in _RESHAPING or "gated" in KINDS.get(entry.op, ()):
            return None
    return None


@lru_cache(maxsize=1024)
def _rehearse(
    entry: PipelineEntry, given: tuple[Tensor, ...], recipe: Recipe | None, dtype: torch.dtype
) -> tuple[Tensor, ...] | None:
    """The outputs of one op alone, main first, whose backward pass has run as well; None if it takes more inputs."""
    op = entry.build(dtype=dtype, device="meta")
    if op.num_extra_inputs >= len(given):
        return None
    inputs = [torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in given]
    inputs = [x.requires_grad_() * 1 if x.is_floating_point() else x for x in inputs]
    with under(recipe):
        result = op(*inputs)
    outputs = result if isinstance(result, tuple) else (result,)
    differentiable = [output for output in outputs if output.requires_grad]
    torch.autograd.backward(differentiable, [torch.empty_like(output) for output in differentiable])
    return tuple(Tensor(output.shape, output.dtype) for output in outputs)
