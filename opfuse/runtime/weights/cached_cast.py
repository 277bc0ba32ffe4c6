"""A cast of a weight that is kept between calls, and what its validity depends on: of one weight, or of many at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from opfuse.core.cast import Cast
from opfuse.formats import USAGES
from opfuse.recipes.delayed import DelayedScalingState
from opfuse.runtime.weights.packed import pack, to_blocks
from opfuse.torch_private.tensors import number_of, storage_number, version_of

# Mapped over all weights of a segment at every call: no function of Python runs for each.
_SHOWN = attrgetter("shape", "dtype")
_ADDRESS, _STRIDES, _MEMORY = torch.Tensor.data_ptr, torch.Tensor.stride, torch.Tensor.untyped_storage


def _lying(weights: Sequence[torch.Tensor]) -> list[list[Any]]:
    """For each weight: its version as autograd counts writes, its address, the number of its memory, its layout."""
    memory = map(_MEMORY, weights)
    found: Iterable[Iterable[Any]] = (
        *(map(version_of, weights), map(_ADDRESS, weights), map(number_of, memory)),
        *(map(_SHOWN, weights), map(_STRIDES, weights)),
    )
    return [*map(list, found)]


class Unchanged:
    """Whether weights and what was made of them are as they were then; states of delayed scales, too."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weights: tuple[torch.Tensor, ...] = (weight,)
        # While it is here, no other memory has its number.
        self._memory = [StorageWeakRef(weight.untyped_storage())]
        self._lying = _lying(self._weights)
        self._made: dict[int, tuple[torch.Tensor, int]] = {}
        self._states: list[tuple[DelayedScalingState, object, int, int]] = []

    def watch(self, made: Iterable[torch.Tensor], states: Iterable[DelayedScalingState]) -> None:
        """Watch what was made of the weight, and the states of its scale, from now on."""
        self._made = {id(tensor): (tensor, version_of(tensor)) for tensor in made}
        self._states = [(state, state.tensors_id, state.generation, version_of(state.scale)) for state in states]

    def changed(self) -> None:
        """Note a write that nobody has counted."""
        self._lying = []

    @classmethod
    def together(cls, many: Sequence[Unchanged]) -> Unchanged:
        """One check that is true while every cast in ``many`` is valid."""
        whole = cls.__new__(cls)
        whole._weights = tuple([weight for unchanged in many for weight in unchanged._weights])
        whole._memory = [memory for unchanged in many for memory in unchanged._memory]
        whole._lying = [[value for part in parts for value in part] for parts in zip(*(unchanged._lying for unchanged in many))]
        whole._made = {key: made for unchanged in many for key, made in unchanged._made.items()}
        whole._states = [state for unchanged in many for state in unchanged._states]
        return whole

    @property
    def is_delayed(self) -> bool:
        """Whether scales come from states."""
        return bool(self._states)

    def __bool__(self) -> bool:
        if _lying(self._weights) != self._lying:
            return False
        for tensor, writes in self._made.values():  # no generator: its calls cost as much as what is compared
            if version_of(tensor) != writes:
                return False
        return not self._states or all(
            (s.tensors_id, s.generation, version_of(s.scale)) == (tensors_id, generation, version)
            for s, tensors_id, generation, version in self._states
        )


class CachedCast:
    """A cast of a weight, and everything that its validity depends on. :func:`settle` completes it.

    tensors: its memory without the weight's own, ``blocks`` first. layout: how they lie, the same object for all that lie alike.
    served: whether a second call has found it. users: what has bound it, to be ended with it, by number.
    """

    blocks: tuple[torch.Tensor, ...] = ()
    tensors: tuple[torch.Tensor, ...] = ()
    layout: CachedLayout

    def __init__(self, cast: Cast, parameter: torch.Tensor, stream: int) -> None:
        with _plainly():
            self.unchanged = Unchanged(parameter)
            self.storage = cast(parameter)
        self.parameter, self.stream, self.served = parameter, stream, False
        self.users: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._cast, self._dtype = cast, _dtype(cast, parameter)

    def serves(self, cast: Cast, stream: int) -> bool:
        """Whether ``cast``, of the same weight, would make the same bytes and count the same amaxes."""
        mine = self._cast
        return (
            self.stream == stream
            and mine.quantizer == cast.quantizer
            and mine.counts == cast.counts
            and len(mine.live_states) == len(cast.live_states)
            and all(one is other for one, other in zip(mine.live_states, cast.live_states))
            and (not cast.live_states or mine.rule == cast.rule)
            and self._dtype == _dtype(cast, self.parameter)
        )

    def _settle(self, blocks: Sequence[torch.Tensor]) -> None:
        memory = storage_number(self.parameter)
        lying, _ = to_blocks(self.storage.tensors(), blocks)
        self.blocks = tuple([block for block in blocks if any(block is each for each in lying)])
        lying, places = to_blocks(self.storage.tensors(), self.blocks)
        self.tensors = tuple({id(t): t for t in lying if storage_number(t) != memory}.values())
        self.layout = interned((places, *((t.shape, t.stride(), t.dtype) for t in self.tensors)))
        self.unchanged.watch(self.tensors, self._cast.live_states)


def settle(casts: Sequence[CachedCast]) -> None:
    """Lay ``casts``, which were just made, one for each weight of an op, together in a block for each direction."""
    blocks, weights = list[torch.Tensor](), [cast.parameter for cast in casts]
    for usage in USAGES:
        with _plainly():
            storages, made = pack([cast.storage for cast in casts], usage, weights)
        blocks += made
        for cast, storage in zip(casts, storages):
            cast.storage = storage
    for cast in casts:
        cast._settle(blocks)


class CachedLayout:
    """How kept casts lie in memory, as one object for all that lie alike: layouts of calls are compared by it."""

    def __init__(self, what: tuple[Any, ...]) -> None:
        self.what = what


_LOOKS: WeakValueDictionary[tuple[Any, ...], CachedLayout] = WeakValueDictionary()


def interned(what: tuple[Any, ...]) -> CachedLayout:
    """The object for ``what``."""
    return _LOOKS.setdefault(what, CachedLayout(what))


def _dtype(cast: Cast, parameter: torch.Tensor) -> torch.dtype:
    return cast.op.compute_dtype(cast.env, parameter)


@contextmanager
def _plainly() -> Iterator[None]:
    """Neither inference mode nor a graph may mark what later calls save for their backward passes."""
    with torch.inference_mode(mode=False), torch.no_grad():
        yield
