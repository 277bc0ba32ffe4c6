"""Steps of a call that autograd does not look into, written down in order: what each read and made, and its backward pass.

In a graph of torch.compile a call is one op. Where all that it does are segments of one plan, it needs no graph of autograd's own
inside of that op, and no engine to run it backward: which tensor went into which step is all there is to know. Gradients are
summed as autograd sums them: what comes from outside first, then the last step's, each in the order in which it read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from opfuse.core.context import versions
from opfuse.errors import SavedTensorError, describe
from opfuse.tensors.storage import share_memory

MaybeGradients = Sequence[torch.Tensor | None]
StepBackward = Callable[[list[torch.Tensor | None], bool], MaybeGradients]
"""Gradients of what a step read for those of what it made, a list that it may empty; and whether it will be asked again."""


class _NotedStep(NamedTuple):
    """reads: the numbers of what it read, None of what wants no gradient. makes: those of what it made."""

    reads: Sequence[int | None]
    makes: range
    backward: StepBackward


class Copies:
    """Copies of tensors in the memory of ``given``, one of each."""

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        self.given = given
        self._made: dict[Any, torch.Tensor] = {}

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or its copy if it lies in that memory."""
        for other in self.given:
            if share_memory(tensor, other):
                place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
                if place not in self._made:
                    self._made[place] = tensor.detach().clone()
                return self._made[place]
        return tensor


class Ledger:
    """The steps of one call.

    arguments: what gradients are for; of one that stands twice, its first place gets all. given: those whose memory a compiler
    may write over, so that of what is saved of them a copy is kept. kept: all tensors that are saved.
    """

    def __init__(self, arguments: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
        self.kept: list[torch.Tensor] = []
        self._count = len(arguments)
        self._steps: list[_NotedStep] | None = []
        self._watched: list[SavedTensors] = []
        self._looks: list[tuple[torch.dtype, torch.Size]] = []
        self._numbers: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []  # until the call is over, so that no other tensor has the id of one
        self._copies = Copies(given)
        for each in arguments:
            self._enter(each)

    def _enter(self, tensor: torch.Tensor) -> None:
        self._numbers.setdefault(id(tensor), len(self._alive))
        self._alive.append(tensor)
        self._looks.append((tensor.dtype, tensor.shape))

    def note(self, reads: Sequence[torch.Tensor | None], makes: Sequence[torch.Tensor], backward: StepBackward) -> None:
        """A step was made: tensors are known again by identity, so ``makes`` are none of those before."""
        numbers, start = self._numbers, len(self._alive)
        steps = [] if self._steps is None else self._steps
        steps.append(_NotedStep([numbers.get(id(each)) for each in reads], range(start, start + len(makes)), backward))
        for each in makes:
            self._enter(each)

    def keep(self, saved: Sequence[torch.Tensor]) -> SavedTensors:
        """``saved`` for the backward pass; of what lies in the memory of ``given`` a copy."""
        own = [self._copies.own(tensor) for tensor in saved]
        self.kept += own
        return SavedTensors(own)

    def watch(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have no backward pass run after a write to ``tensors``, whose memory steps save under other counts of writes."""
        self._watched.append(SavedTensors([*tensors]))

    def close(self, results: Sequence[torch.Tensor]) -> None:
        """The call is over, and gave these."""
        self._ends = [self._numbers.get(id(each)) for each in results]
        self._numbers, self._alive, self._copies, self.kept = {}, [], Copies(()), []

    def gradients(self, given: MaybeGradients, *, keep: bool) -> MaybeGradients:
        """Of the arguments, for those of the results. keep: there will be another pass."""
        steps = self._steps
        if steps is None:
            where, cure = "backward of a compiled pipeline", "pass retain_graph=True to the first"
            raise SavedTensorError(describe(where, wanted="one backward pass", got="a second one", cure=cure))
        for each in self._watched:
            each.taken(keep)
        if not keep:
            self._steps, self._watched = None, []
        found: list[torch.Tensor | None] = [None] * len(self._looks)
        for end, grad in zip(self._ends, given):
            self._add(found, end, grad)
        for reads, makes, backward in reversed(steps):
            received = [found[number] for number in makes]
            found[makes.start : makes.stop] = [None] * len(makes)
            if any(each is not None for each in received):
                for number, grad in zip(reads, backward(received, keep)):
                    self._add(found, number, grad)
        return found[: self._count]

    def _add(self, found: list[torch.Tensor | None], number: int | None, grad: torch.Tensor | None) -> None:
        """As autograd takes a gradient: in the dtype and the shape of what it is for."""
        if number is None or grad is None:
            return
        dtype, shape = self._looks[number]
        if grad.shape != shape:
            grad = grad.sum_to_size(shape)
        if grad.dtype != dtype:
            grad = grad.to(dtype)
        earlier = found[number]
        found[number] = grad if earlier is None else earlier + grad


class SavedTensors:
    """Tensors that a step saved, and the counts of their writes."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self.versions = versions(*tensors)

    def taken(self, keep: bool) -> list[torch.Tensor]:
        """The tensors; unless they are kept, who takes them alone has them. SavedTensorError if one was written since."""
        tensors = self.tensors
        check_unwritten(tensors, self.versions)
        if keep:
            return [*tensors]
        self.tensors = []
        return tensors


def check_unwritten(tensors: Sequence[torch.Tensor], before: Sequence[int]) -> None:
    """SavedTensorError unless their counts of writes are those of ``before``."""
    if tensors and versions(*tensors) != before:
        where, wanted = "backward of a compiled pipeline", "saved tensors as the forward pass left them"
        cure, got = "change parameters after the backward pass", "one changed in place since"
        raise SavedTensorError(describe(where, wanted=wanted, got=got, cure=cure))
