"""Amaxes as maxima over the ranks of a group, in one collective that also tells whether the ranks mean the same tensors.

The collective takes the maximum of 1024 words: the number of casts, a digest of their names and digests of the first 300 names,
each with its complement, and the first 420 amaxes; further amaxes follow in a second collective. Ranks agree if the maxima of
each word and of its complement are the rank's own. On a CPU the host always checks that. On a GPU it would have to wait, so it
checks only a new list of casts, or a list with a state that was made or loaded since: a rank may know its list from another
model while the next rank has another list.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from opfuse.errors import RecipeError, describe, number_of
from opfuse.torch_private.operations import copy_each

WORDS, NAMES = 1024, 300
_HEAD = 2 * (2 + NAMES)

LOOKS_ALWAYS = ("cpu",)
"""Devices whose values the host reads without waiting."""

_Heads = dict[tuple[tuple[str, ...], torch.device], torch.Tensor]
_HEADS: weakref.WeakKeyDictionary[Any, _Heads] = weakref.WeakKeyDictionary()
"""By group the words of every list of names that all its ranks agreed on."""


def reduce_amaxes(amaxes: Sequence[torch.Tensor], names: Sequence[str], group: Any, *, new: bool = False) -> None:
    """Each of ``amaxes``, fp32 (1,) on one device, becomes its maximum over the ranks of ``group`` (None: all).

    Compared as integer bits, since a floating-point maximum may lose a NaN. names: of the casts, with where these stand in
    the model, equal and in one order on all ranks, else RecipeError, and no amax is changed. new: whether the host checks that in
    any case.
    """
    heads = _HEADS.setdefault(dist.group.WORLD if group is None else group, {})
    key = tuple(names), amaxes[0].device
    known = heads.get(key)
    head = _head(key[0], key[1]) if known is None else known
    room = WORDS - _HEAD - len(amaxes)
    first = torch.cat([head, *amaxes[: WORDS - _HEAD], head.new_zeros(max(room, 0))])
    first = _maximum(first, group)
    if known is None or new or first.device.type in LOOKS_ALWAYS:
        _check(first[:_HEAD], head, key[0])
        heads[key] = head
    whole = first[_HEAD:]
    if room < 0:
        whole = torch.cat([whole, _maximum(torch.cat(list(amaxes[WORDS - _HEAD :])), group)])
    copy_each(list(amaxes), list(whole[: len(amaxes)].split(1)))


def _maximum(words: torch.Tensor, group: Any) -> torch.Tensor:
    bits = words.view(torch.int32)
    dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=group)
    return words


def _head(names: tuple[str, ...], device: torch.device) -> torch.Tensor:
    """The words that ranks compare, as the fp32 that have these bits."""
    words = [len(names), _digest("\n".join(names)), *map(_digest, names[:NAMES])]
    words += [0] * (2 + NAMES - len(words))
    return torch.tensor([*words, *(~word for word in words)], dtype=torch.int32).to(device).view(torch.float32)


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little", signed=True)


def _check(reduced: torch.Tensor, own: torch.Tensor, names: tuple[str, ...]) -> None:
    """RecipeError unless the maxima over the ranks are this rank's own words."""
    differs = reduced.view(torch.int32) != own.view(torch.int32)
    words = (differs[: 2 + NAMES] | differs[2 + NAMES :]).tolist()
    if not any(words):
        return
    place = next((i for i, differs_here in zip(count(), words[2:]) if differs_here), NAMES)
    mine = f"{names[place]!r} as number {place + 1}" if place < min(len(names), NAMES) else number_of(len(names), "cast")
    same = "ranks with the same layers, as those of one stage of a pipeline are, all new or all loaded"
    cure = f"give autocast an amax_reduction_group of {same}, or set reduce_amax=False"
    wanted, got = "the same casts in the same order on every rank of the group", f"{mine} here, and another rank has others"
    raise RecipeError(describe("delayed scaling, shared amaxes", wanted=wanted, got=got, cure=cure))
