"""Replaces autograd inside of a call that is one op in a graph of torch.compile.

If all steps of such a call are segments of one plan, a backward pass only has to know which tensors each step read and made. The
tape writes that down in order, and runs the steps backward. It sums gradients as autograd does: first those from outside, then
those of the last step, and so on to the first, each in the order in which the step read its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, cast

import torch

from opfuse.core.context import versions
from opfuse.errors import SavedTensorError, UnsupportedError, describe
from opfuse.torch_private.tensors import share_memory

_COMPILED = "backward of a compiled pipeline"

_NOWHERE: Mapping[int, torch.Size] = MappingProxyType({})

MaybeGradients = Sequence[torch.Tensor | None]
StepBackward = Callable[[list[torch.Tensor | None], bool], MaybeGradients]
"""From the gradients of what a step made, a list that it may empty, to those of what it read; True if it will be asked again."""


PlanUse = Callable[[], Callable[[], object] | None]


class StepAgain(Protocol):
    """Does a step for other tensors. sized: whether it depends on values of them that the host knows, as sizes of groups."""

    sized: bool

    def stands(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether it can. tensors: what the step reads, if it is sized."""
        ...

    def __call__(
        self, tensors: Sequence[torch.Tensor], tape: BackwardTape
    ) -> tuple[Sequence[torch.Tensor], StepBackward | None] | None:
        """The results, and their backward pass over what is saved on ``tape``. None if these tensors cannot be taken, from a step
        without effects.
        """
        ...


class _TapeStep(NamedTuple):
    """One step. reads: numbers of the tensors that it read, None for those without a gradient. makes: numbers of its results.

    backward: None where no gradient passes. again: finds what does the step again, once the call is over.
    """

    reads: Sequence[int | None]
    makes: range
    backward: StepBackward | None
    again: Callable[[], StepAgain | None]


class Repetition(NamedTuple):
    """How a call is made again as a whole, for tensors with the layouts of its own.

    use: finds what counts a use of the call's plan; None if the plan was dropped. steps: numbers of what each reads and makes,
    and what does it again. looks: of all tensors. ends: numbers of the results. arguments: how many there are. input_saved: as of
    the tape.
    """

    use: PlanUse
    steps: Sequence[tuple[Sequence[int], range, StepAgain]]
    looks: list[tuple[torch.dtype, torch.Size]]
    ends: Sequence[int]
    arguments: int
    input_saved: bool

    def __call__(
        self, arguments: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
    ) -> tuple[BackwardTape, list[torch.Tensor]] | None:
        """The tape of the call and its results; None, without an effect, if it has to be made step by step."""
        used, tensors, done = self.use(), [*arguments], []
        if used is None:
            return None
        for reads, _, again in self.steps:
            if not again.stands([tensors[number] for number in reads] if again.sized else ()):
                return None
        tape = BackwardTape((), given, input_saved=self.input_saved)
        for reads, makes, again in self.steps:
            made = again([tensors[number] for number in reads], tape)
            if made is None:
                return None
            tensors += made[0]
            done.append(_TapeStep(reads, makes, made[1], never))
        used()
        tape.repeat(self, done)
        return tape, [tensors[number] for number in self.ends]


def never() -> None:
    """Finds that a step is not done again."""


def shares_memory(tensor: torch.Tensor, others: Iterable[torch.Tensor]) -> bool:
    """Whether a tensor lies in one block of memory with one of ``others``; without a loop in Python, since calls ask often."""
    return True in map(share_memory, repeat(tensor), others)


class Copies:
    """Copies of tensors that share memory with ``given``; equal views share one copy."""

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        self.given = given
        self._by_place: dict[Any, torch.Tensor] = {}

    def all_unshared(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """:func:`unshared` of each. Most calls have one input, and save nothing that shares memory with it."""
        for each in self.given:
            if True in map(share_memory, tensors, repeat(each)):
                return [*map(self.unshared, tensors)]
        return [*tensors]

    def unshared(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself, or its copy if it shares memory with ``given``."""
        if not shares_memory(tensor, self.given):
            return tensor
        place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        if place not in self._by_place:
            self._by_place[place] = tensor.detach().clone()
        return self._by_place[place]


_LOOKS = attrgetter("dtype", "shape")
"""What a gradient must have of its tensor."""


class BackwardTape:
    """The steps of one call.

    arguments: the tensors that get gradients; if one of them occurs twice, its first place gets the sum. given: arguments whose
    memory a compiler may overwrite, so of these copies are saved. input_saved: whether the graph saves the first of them, which
    the backward pass then gets again. saved: all saved tensors. use: of the plan of its pipeline.
    """

    use: PlanUse | None = None

    def __init__(self, arguments: Sequence[torch.Tensor], given: Sequence[torch.Tensor], *, input_saved: bool = False) -> None:
        self.saved: list[torch.Tensor] = []
        self.input_saved, self._again = input_saved, InputAgain()
        self._count = len(arguments)
        self._steps: list[_TapeStep] | None = []
        self._watched: list[SavedTensors] = []
        self._looks: list[tuple[torch.dtype, torch.Size]] = []
        self._numbers: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []  # until the call is over, so that no other tensor has the id of one
        self._copies = Copies(given)
        self._enter(arguments)

    def _enter(self, tensors: Sequence[torch.Tensor]) -> None:
        for number, tensor in enumerate(tensors, len(self._alive)):
            self._numbers.setdefault(id(tensor), number)
        self._alive += tensors
        self._looks += map(_LOOKS, tensors)

    def record(
        self,
        reads: Sequence[torch.Tensor | None],
        makes: Sequence[torch.Tensor],
        backward: StepBackward | None,
        again: Callable[[], StepAgain | None] = never,
    ) -> None:
        """Write a step down: what it read and made, its backward pass, and what finds how it is done again.

        ``makes`` are new tensors, known by identity. backward: None for a step that no gradient passes.
        """
        start = len(self._alive)
        steps = [] if self._steps is None else self._steps
        steps.append(_TapeStep(self._numbers_of(reads), range(start, start + len(makes)), backward, again))
        self._enter(makes)

    def _numbers_of(self, tensors: Sequence[torch.Tensor | None]) -> list[int | None]:
        return [*map(self._numbers.get, map(id, tensors))]

    def save(self, saved: Sequence[torch.Tensor]) -> SavedTensors:
        """Save tensors for the backward pass; a copy of those that share memory with ``given``, unless the graph saves them."""
        if self.input_saved:
            x, again = self._copies.given[0], self._again
            places = {place: tensor.shape for place, tensor in enumerate(saved) if _is_reshaped(x, tensor)}
            saved = [tensor for place, tensor in enumerate(saved) if place not in places]
        else:
            places, again = {}, None
        copies = self._copies.all_unshared(saved)
        self.saved += copies
        return SavedTensors(copies, places, again)

    def watch(self, tensors: Sequence[torch.Tensor]) -> None:
        """Refuse a backward pass after a write to ``tensors``, also where steps save other tensors over the same memory."""
        self._watched.append(SavedTensors([*tensors]))

    def check_read(self, entries: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """UnsupportedError unless each of ``entries`` is a result or a step has read it. Else its gradient would end, in silence,
        at what some code made of it beside the tape.
        """
        steps = [step.reads for step in self._steps or () if step.backward is not None]
        read = {*chain.from_iterable(steps), *self._numbers_of(results)}
        if not read.issuperset(self._numbers_of(entries)):
            wanted, got = "steps that gradients pass", "a copy of an input that no step made"
            cure = "call it outside of the graph, under torch.compiler.disable, and report this model"
            raise UnsupportedError(describe(_COMPILED, wanted=wanted, got=got, cure=cure))

    def close(self, results: Sequence[torch.Tensor]) -> None:
        """The call is over; ``results`` are its outputs."""
        self._ends = self._numbers_of(results)
        self._numbers, self._alive, self._copies, self.saved = {}, [], Copies(()), []

    def repetition(self) -> Repetition | None:
        """How the call, which is over, is made again; None if a step is not repeated, or reads what no step made."""
        steps = list[tuple[Any, range, StepAgain]]()
        for reads, makes, _, find in self._steps or ():
            again = None if None in reads else find()
            if again is None or (again.sized and max(map(int, filter(None, reads)), default=0) >= self._count):
                return None  # sizes that are not known before the call has effects
            steps.append((reads, makes, again))
        ends: list[Any] = self._ends
        if None in ends or self.use is None:
            return None
        return Repetition(self.use, steps, self._looks, ends, self._count, self.input_saved)

    def repeat(self, call: Repetition, steps: list[_TapeStep]) -> None:
        """The steps of ``call`` were done again, and the call is over."""
        self._copies, self.saved = Copies(()), []
        self._steps, self._looks, self._count, self._ends = steps, call.looks, call.arguments, [*call.ends]

    def gradients(self, given: MaybeGradients, *, keep: bool, x: torch.Tensor | None = None) -> MaybeGradients:
        """From the gradients of the results to those of the arguments. keep: whether another pass may follow. x: the first input,
        if the graph has saved it.

        SavedTensorError for a second pass without that, and after a write to a saved tensor.
        """
        steps = self._steps
        if steps is None:
            cure = "pass retain_graph=True to the first"
            raise SavedTensorError(describe(_COMPILED, wanted="one backward pass", got="a second one", cure=cure))
        for each in self._watched:
            each.unpack(keep)
        if not keep:
            self._steps, self._watched = None, []
        self._again.x = x
        try:
            return self._gradients(steps, given, keep)
        finally:
            self._again.x = None

    def _gradients(self, steps: Sequence[_TapeStep], given: MaybeGradients, keep: bool) -> MaybeGradients:
        found: list[torch.Tensor | None] = [None] * len(self._looks)
        for end, grad in zip(self._ends, given):
            self._add(found, end, grad)
        for reads, makes, backward, _ in reversed(steps):
            received = [found[number] for number in makes]
            found[makes.start : makes.stop] = [None] * len(makes)
            if backward is not None and any(each is not None for each in received):
                for number, grad in zip(reads, backward(received, keep)):
                    self._add(found, number, grad)
        return found[: self._count]

    def _add(self, found: list[torch.Tensor | None], number: int | None, grad: torch.Tensor | None) -> None:
        """Add a gradient in the dtype and shape of its tensor, as autograd does."""
        if number is None or grad is None:
            return
        if _LOOKS(grad) != self._looks[number]:
            dtype, shape = self._looks[number]
            grad = grad.sum_to_size(shape).to(dtype)
        earlier = found[number]
        found[number] = grad if earlier is None else earlier + grad


def _is_reshaped(x: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has the elements of ``x``, in their order and in the same memory."""
    alike = tensor.dtype == x.dtype and tensor.numel() == x.numel() and tensor.data_ptr() == x.data_ptr()
    return alike and tensor.is_contiguous() and x.is_contiguous()


class InputAgain:
    """The first input of a call, while its backward pass runs."""

    x: torch.Tensor | None = None


class SavedTensors:
    """Tensors that a step saved, and their version counts at that time.

    places: shapes in which it saved the call's first input as well, by their places among all. again: that input.
    """

    def __init__(
        self, tensors: list[torch.Tensor], places: Mapping[int, torch.Size] = _NOWHERE, again: InputAgain | None = None
    ) -> None:
        self.tensors = tensors
        self.versions = versions(*tensors)
        self._places, self._again = places, again

    def unpack(self, keep: bool) -> list[torch.Tensor]:
        """The tensors; without ``keep`` they are released here. SavedTensorError if one was written since."""
        tensors = self.tensors
        check_unwritten(tensors, self.versions)
        if keep:
            tensors = [*tensors]
        else:
            self.tensors = []
        for place, shape in self._places.items():  # from the first on
            x = cast(torch.Tensor, cast(InputAgain, self._again).x)
            tensors.insert(place, x.reshape(shape).contiguous())
        return tensors


def check_unwritten(tensors: Sequence[torch.Tensor], before: Sequence[int], where: str = _COMPILED) -> None:
    """SavedTensorError unless the version counts of ``tensors`` are those of ``before``."""
    if tensors and versions(*tensors) != before:
        raise written_since(where)


def written_since(where: str) -> SavedTensorError:
    """The error for a saved tensor that was written before the backward pass."""
    wanted, got = "saved tensors as the forward pass left them", "one changed in place since"
    cure = "change inputs and parameters after the backward pass, or pass a clone"
    return SavedTensorError(describe(where, wanted=wanted, got=got, cure=cure))
