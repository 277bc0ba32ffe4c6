"""Collectives over rows, and the record on all ranks of a cast whose rows they have: for FSDP2 and for ops alike.

These collectives take and return tensors alone, so that a program repeats them as it does any other op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from opfuse.formats import ROWWISE, Usage
from opfuse.tensors.planes import mirrored
from opfuse.tensors.rows import join_rows, row_parts
from opfuse.tensors.storage import QuantizedStorage
from opfuse.torch_private.sharding import functional_collectives


class PlaneTransfer(NamedTuple):
    """Which planes of a cast travel to all ranks, and when.

    now: planes that travel when the collective runs. later: planes that only the backward pass reads, and that travel then.
    mirror: the columnwise plane does not travel, but is made of the rowwise one.
    """

    now: tuple[Usage, ...]
    later: tuple[Usage, ...] = ()
    mirror: bool = False

    def at_once(self) -> PlaneTransfer:
        """A copy that transfers all planes now."""
        return PlaneTransfer((*self.now, *self.later), mirror=self.mirror)


def gathered(x: torch.Tensor, ranks: int, group: Any) -> torch.Tensor:
    """The first dimensions of ``x`` of all ranks, one after another."""
    return _waited(functional_collectives.all_gather_into_tensor(x.contiguous(), ranks, _name(group)))


def scattered(x: torch.Tensor, ranks: int, group: Any) -> torch.Tensor:
    """This rank's part of the first dimension of the sum of ``x`` over the ranks."""
    return _waited(functional_collectives.reduce_scatter_tensor(x.contiguous(), "sum", ranks, _name(group)))


def summed(x: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum of ``x`` over the ranks."""
    return _waited(functional_collectives.all_reduce(x.contiguous(), "sum", _name(group)))


def exchanged(x: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: Any) -> torch.Tensor:
    """Rows of ``x``, as many as ``sent`` says to each rank in turn, for those that each of them sends here: ``received``."""
    return _waited(functional_collectives.all_to_all_single(x.contiguous(), [*received], [*sent], _name(group)))


def _waited(made: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = functional_collectives.wait_tensor(made)
    return result


def _name(group: Any) -> str:
    world: Any = dist.group.WORLD
    name: str = (world if group is None else group).group_name
    return name


def gathered_rows(piece: QuantizedStorage, ranks: int, group: Any) -> QuantizedStorage:
    """The record whose pieces the ranks have, each of as many whole blocks of rows; scales that all rows share must be equal."""
    shape = (ranks * piece.shape[0], *piece.shape[1:])
    return join_rows(piece, [gathered(part, ranks, group) for part in row_parts(piece)], shape)


def with_mirror(storage: QuantizedStorage) -> QuantizedStorage:
    """``storage`` with the columnwise plane of the values in its rowwise one."""
    return replace(storage, columnwise=mirrored(storage.plane(ROWWISE)))
