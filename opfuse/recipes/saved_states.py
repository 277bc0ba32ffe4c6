"""Delayed-scaling states in files: the tensors of a state, and what is checked before one is loaded.

A state is saved as three fp32 tensors, in shapes that depend neither on the recipe nor on use, so that a model which has not run
yet has all of them for ``torch.distributed.checkpoint`` to fill. ``scale`` (1,); ``amax_history`` (1024,), or as long as a longer
history; ``made_for`` (3,): the element's maximum and the margin that the scale was found under (0, 0 for the initial scale), and
the length of the history, whose slots come first (0 for a state that was never used).

Element maximum and margin are stored beside the scale because another recipe may read the file in mid-training: it converts the
scale exactly, by a power of two, where a scale of another format would saturate gradients. A non-finite amax enters no history,
which it would freeze for its length; the device counts it, and the host reports it when it reads states anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch

from opfuse.errors import QuantizerError, describe, nearest
from opfuse.formats import FP8_ELEMENTS
from opfuse.numerics.delayed import UpdateRule

SLOTS = 1024
"""Slots of a saved history, at least."""

MOST = 2**20
"""Slots of a history that is loaded, at most: more would take memory that no training needs."""

FIELDS = {"scale": (1, 1), "amax_history": (1, MOST), "made_for": (3, 3)}
"""Elements that a field has, from least to most."""

_MAXIMA = {element.max for element in FP8_ELEMENTS.values()}


class SavedState(NamedTuple):
    """A state of a file that may be taken over. used: whether anything was cast with it."""

    scale: torch.Tensor
    amax_history: torch.Tensor
    rule: UpdateRule | None
    used: bool


def saved_state(scale: torch.Tensor, amax_history: torch.Tensor, rule: UpdateRule | None) -> dict[str, torch.Tensor]:
    """The tensors of a state, all new."""
    fp8_max, margin = (0.0, 0) if rule is None else rule[:2]
    return _fields(scale.clone(), amax_history, (fp8_max, margin, len(amax_history)))


def unused_state(device: torch.device | str | None) -> dict[str, torch.Tensor]:
    """The tensors of a state that was never used."""
    one = torch.ones(1, dtype=torch.float32, device=device)
    return _fields(one, one[:0], (0.0, 0, 0))


def _fields(scale: torch.Tensor, history: torch.Tensor, made_for: tuple[float, int, int]) -> dict[str, torch.Tensor]:
    padded = history.new_zeros(max(SLOTS, len(history)))
    padded[: len(history)] = history
    return {
        "scale": scale,
        "amax_history": padded,
        "made_for": torch.tensor(made_for, dtype=torch.float32, device=scale.device),
    }


def checked_states(saved: object, *, where: str, known: Collection[str] | None = None) -> dict[str, SavedState]:
    """The states of a dictionary ``role/field``, by role, once all of it was found to be in order; else QuantizerError.

    known: the roles that there may be; None: any. Nothing is allocated by a size that the file claims without having the bytes.
    What was saved without ``made_for`` is a history of its own length, under a rule that is not known.
    """
    if not isinstance(saved, Mapping) or not all(isinstance(name, str) for name in saved):
        raise _refused(where, "a dictionary of tensors by 'role/field'", type(saved).__name__)
    states: dict[str, dict[str, Any]] = {}
    for name, value in saved.items():
        role, _, field = name.rpartition("/")
        states.setdefault(role, {})[field] = value
    if known is not None and (unknown := states.keys() - set(known)):
        first = min(unknown)
        got = f"{first!r}{nearest(first, known)}"
        cure = "load it into the op that saved it, under the name that it had"
        raise QuantizerError(describe(where, wanted=f"roles out of {', '.join(map(repr, known))}", got=got, cure=cure))
    return {role: _checked(fields, where=f"{where} {role}".strip()) for role, fields in states.items()}


def _checked(fields: Mapping[str, Any], *, where: str) -> SavedState:
    required = set(FIELDS) - {"made_for"}
    if not required <= fields.keys() <= FIELDS.keys():
        raise _refused(where, "'scale' of shape (1,) and 'amax_history' of shape (length,)", sorted(fields))
    for name, value in fields.items():
        _check_tensor(name, value, where=where)
    with torch.no_grad():
        scale, history = (fields[name].detach().to(torch.float32).reshape(-1) for name in ("scale", "amax_history"))
        fp8_max, margin, length = fields["made_for"].tolist() if "made_for" in fields else (0.0, 0.0, len(history))
        if not (scale.isfinite() & (scale > 0)).item():
            raise _refused(where, "a finite scale above 0", scale.item())
        if (history < 0).any().item():
            raise _refused(where, "amaxes of at least 0", history.min().item())
        if fp8_max not in {0.0, *_MAXIMA} or margin % 1 or length not in range(len(history) + 1):
            wanted = f"made_for of 0 or an FP8 maximum ({', '.join(map(str, sorted(_MAXIMA)))}), a margin, and a length"
            raise _refused(where, f"{wanted} up to {len(history)}", [fp8_max, margin, length])
        # Older files may hold what was not finite.
        history = torch.where(history.isfinite(), history, 0.0)[: int(length) or None]
    rule = UpdateRule(fp8_max, int(margin), "max") if fp8_max else None
    return SavedState(scale, history, rule, bool(length))


def _check_tensor(name: str, value: object, *, where: str) -> None:
    least, most = FIELDS[name]
    wanted = f"{name} of shape ({least},)" if least == most else f"{name} of shape (length,), with up to {most} slots"
    if not isinstance(value, torch.Tensor):
        raise _refused(where, wanted, repr(value) if value is None or isinstance(value, str) else type(value).__name__)
    shown = f"{value.dtype} {tuple(value.shape)} on {value.device}"
    flat = value.ndim == 1 or (most == 1 and value.numel() == 1)
    if not flat or not value.is_floating_point() or not least <= value.numel() <= most or value.is_meta:
        raise _refused(where, f"{wanted}, of floats", shown)
    if value.layout != torch.strided or any(stride == 0 for stride in value.stride() if value.numel() > 1):
        raise _refused(where, f"{wanted}, with memory for every element", f"{shown}, of {value.untyped_storage().nbytes()} bytes")


def _refused(where: str, wanted: str, got: object) -> QuantizerError:
    return QuantizerError(describe(where, wanted=wanted, got=got, cure="load what a state_dict() of opfuse holds, unchanged"))
