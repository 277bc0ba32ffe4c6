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
from opfuse.errors import DtypeError, OpfuseError, number_of
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
) -> list[Problem]:
    """The problems that ``rows`` samples would meet on their way through the pipeline.

    Ends early where an op takes tensors from the caller or where nothing tells the input's columns. Behind an op that its input
    does not fit, it goes on as if it did, and tells no problem that may be one with the first. Behind one that only the recipe
    does not fit, all is as it would be, and every problem is told.
    """
    if (refusal := recipe.training_refusal() if recipe is not None else None) is not None:
        return [Problem("refused-recipe", *sentence(refusal), ("recipe",))]
    columns = data.columns if data is not None else input_columns(entries)
    if columns is None:
        return []
    if (problem := _too_large((rows, columns), ("pipeline", "ops", 0) if data is None else ("data",))) is not None:
        return [problem]
    with without_compiler():
        found = _Rehearsal(entries, recipe, dtype)
        last = found.shape(torch.Size((rows, columns)))
    if data is None:
        return found.problems
    given = f"; a sample of the data has {number_of(columns, 'column')}, context {data.context} x embedding {data.embedding}"
    problems = [
        replace(problem, message=problem.message.removesuffix(".") + given) if problem.loc == ("pipeline", "ops", 0) else problem
        for problem in found.problems
    ]
    if found.sure and last is not None and last[-1] != data.classes:
        message = f"the pipeline returns {number_of(last[-1], 'column')}, {data.kind} has {data.classes} classes"
        cure = f"end with out_features: {data.classes}"
        problems.append(Problem("does-not-fit", message, cure, ("pipeline", "ops", len(entries) - 1)))
    return problems


class _Rehearsal:
    """The way through a pipeline, and the problems on it. sure: whether the columns are those that the file means."""

    def __init__(self, entries: Sequence[PipelineEntry], recipe: Recipe | None, dtype: torch.dtype) -> None:
        self.entries, self.recipe, self.dtype = entries, recipe, dtype
        self.problems: list[Problem] = []
        self.sure = True
        self._few = _few_groups(entries)

    def shape(self, shape: torch.Size) -> torch.Size | None:
        """The shape of the output for an input of ``shape``; None where it depends on the caller's tensors, or is unknown."""
        channels: dict[str, Tensor] = {}
        for i, entry in enumerate(self.entries):
            if any(name not in channels for name in entry.extra_input):
                return None  # of an op that made none
            outputs = self._outputs(i, shape, [channels[name] for name in entry.extra_input])
            if outputs is None:
                return None
            for output in outputs:
                if (problem := _too_large(output.shape, ("pipeline", "ops", i))) is not None:
                    self.problems.append(problem)
                    return None
            self.sure = self.sure or "out_features" in dict(entry.arguments)
            shape = outputs[0].shape
            channels |= dict(zip(entry.extra_output, outputs[1:]))
        return shape

    def _outputs(self, i: int, shape: torch.Size, extras: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
        """The outputs of one op; if its input does not fit, for the columns that it asks for."""
        entry = self.entries[i]
        alone = _with_groups(replace(entry, extra_input=(), extra_output=()), self._few)
        inputs = Tensor(shape, self.dtype), *extras
        try:
            return _rehearse(alone, inputs, self.recipe, self.dtype)
        except (OpfuseError, RuntimeError) as error:
            reason = sentence(str(error).replace(f"num_groups={alone.groups}", f"num_groups={entry.groups}"))
            same = isinstance(error, DtypeError) and any(reason[1] == problem.help for problem in self.problems)
        if self.sure and not same:  # one dtype of the pipeline is one problem
            self.problems.append(Problem("does-not-fit", *(_unequal(entry, inputs) or reason), ("pipeline", "ops", i)))
        try:
            return _rehearse(alone, inputs, None, self.dtype)  # what does not fit is the recipe
        except (OpfuseError, RuntimeError):
            self.sure = False
        columns = input_columns([entry])
        if columns is None or columns == shape[-1]:
            return None
        try:
            return _rehearse(alone, (Tensor(torch.Size((*shape[:-1], columns)), self.dtype), *extras), self.recipe, self.dtype)
        except (OpfuseError, RuntimeError):
            return None


def _unequal(entry: PipelineEntry, inputs: Sequence[Tensor]) -> tuple[str, str] | None:
    """What is wrong with a sum of tensors of two widths, and what to do; None for anything else."""
    widths = [tensor.shape[-1] for tensor in inputs if tensor.shape]
    if entry.op != "add_extra_input" or len(widths) < 2 or widths[0] == widths[1]:
        return None
    what = "what goes into the block" if entry.extra_input[0].startswith(f"{RESIDUAL} ") else repr(entry.extra_input[0])
    message = f"{what} has {number_of(widths[1], 'column')}, and what it is added to has {widths[0]}"
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
