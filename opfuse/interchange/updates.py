"""New weights for a rollout engine: the bytes that training multiplies, in packed buckets of named tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import NamedTuple

import torch
from torch import nn

from opfuse.core.context import versions
from opfuse.domains import checked_arguments
from opfuse.errors import ConversionError, describe
from opfuse.interchange.state_dicts import LayoutWriter, checked_scales
from opfuse.recipes import Recipe
from opfuse.torch_private.modules import lasting_buffers

ALIGNMENT = 256
"""Bytes at a multiple of which each tensor of a bucket begins, as those that CUDA allocates."""


class Packed(NamedTuple):
    """A tensor in a bucket. start: the first of its bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class WeightBucket:
    """Named tensors in one array.

    data: uint8 (bytes,), on the device of the weights: one message for ``torch.distributed.broadcast``, one CUDA IPC handle for a
    queue of ``torch.multiprocessing``. entries: what lies where.
    """

    data: torch.Tensor
    entries: tuple[Packed, ...]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name, over the memory of ``data``."""
        return {
            name: self.data[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for name, dtype, shape, start in self.entries
        }


Sent = MutableMapping[str, tuple[torch.Tensor, int]]
"""What was sent: by name a parameter or buffer, and its version as autograd counts writes."""


@checked_arguments(ConversionError)
def weight_updates(
    model: nn.Module,
    layout: str,
    *,
    bucket_bytes: int = 1 << 28,
    ignore: Collection[str] | None = None,
    recipe: Recipe | None = None,
    dtype: torch.dtype | None = None,
    sent: Sent | None = None,
    cache_scales: Mapping[str, torch.Tensor] | None = None,
) -> Iterator[WeightBucket]:
    """The weights of ``model`` as :func:`export_weights` writes them, in buckets, each made when it is asked for.

    Weights that are stored quantized are copied byte for byte, plain ones are cast; ignore, recipe, dtype, cache_scales: see
    :func:`export_weights`. A bucket holds at most ``bucket_bytes``, or one larger tensor, of one device.

    sent: a dict of yours, empty at first. It notes what was sent; given again, only what was written since is sent. Writes that
    autograd does not count, through ``.data``, are not seen; tensors of inference mode, of which it counts none, are always sent.

    ConversionError as in :func:`export_weights`, and for ``bucket_bytes`` below 1.
    """
    if bucket_bytes < 1:
        raise ConversionError(describe("weight_updates bucket_bytes", wanted="1 or more", got=bucket_bytes, cure="write 1 << 28"))
    scales = checked_scales(cache_scales or {}, {name for name, _ in _tensors_of(model)})
    return _buckets(LayoutWriter(model, layout, ignore, recipe, dtype), scales, bucket_bytes, sent)


def _buckets(writer: LayoutWriter, scales: Mapping[str, torch.Tensor], most: int, sent: Sent | None) -> Iterator[WeightBucket]:
    waiting: dict[str, torch.Tensor] = {}
    noted: dict[str, tuple[torch.Tensor, int]] = {}
    size = 0
    for name, value in chain(_tensors_of(writer.model), scales.items()):
        before, version = (None, 0) if sent is None else sent.get(name, (None, 0))
        if before is value and [version] == versions(value) and not value.is_inference():
            continue
        for file, tensor in writer.written(name, value.detach()).items():
            more = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
            if waiting and (size + more > most or tensor.device != next(iter(waiting.values())).device):
                yield _packed(waiting, size)
                waiting, size = {}, 0
            waiting[file] = tensor
            size += more
        noted[name] = value, versions(value)[0]
    if waiting:
        yield _packed(waiting, size)
    if sent is not None:  # of a pass that came to its end
        sent.update(noted)


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers by their names in the state dict; tied ones under each of their names."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, value in (module._parameters | lasting_buffers(module)).items():
            if value is not None:
                yield f"{path}.{name}".lstrip("."), value


def _packed(tensors: dict[str, torch.Tensor], size: int) -> WeightBucket:
    data = torch.empty(size, dtype=torch.uint8, device=next(iter(tensors.values())).device)
    entries, start = [], 0
    for name, tensor in tensors.items():
        entries.append(Packed(name, tensor.dtype, tuple(tensor.shape), start))
        data[start : start + tensor.nbytes].copy_(tensor.contiguous().view(-1).view(torch.uint8))
        start += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return WeightBucket(data, tuple(entries))
