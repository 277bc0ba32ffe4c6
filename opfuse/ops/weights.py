"""Weights of ops: made plain or, inside ``quantized_model_init``, quantized; given their initial values in place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from opfuse.core.cast import cure_of
from opfuse.core.operation import BasicOperation
from opfuse.core.spec import new_parameter
from opfuse.errors import OpfuseWarning, describe
from opfuse.formats import COLUMNWISE, ROWWISE, USAGES
from opfuse.recipes.autocast import current_model_init
from opfuse.tensors.groups import GroupedPlane
from opfuse.tensors.masters import stored_in
from opfuse.tensors.quantizers import GroupedQuantizer
from opfuse.tensors.shards import join
from opfuse.tensors.storage import QuantizedStorage
from opfuse.tensors.tensor import QuantizedTensor

PRESERVED = "high_precision_init_val"
"""The attribute of a quantized parameter that holds its initial values; None until it has some."""


def new_weight(op: BasicOperation, name: str, shape: tuple[int, ...], *, device: Any, dtype: torch.dtype | None) -> nn.Parameter:
    """A parameter ``name`` for ``op``, without values yet; inside ``quantized_model_init`` one that lives quantized.

    ShapeError or DtypeError if the format cannot take it; other errors as of :func:`new_parameter`.
    """
    plain, init = new_parameter(type(op.owner).__name__, shape, device=device, dtype=dtype), current_model_init()
    if init is None:
        return plain
    quantizer = op.stored_quantizer(name, init.recipe)
    cure = partial(cure_of, op, op.quantizer_role(name).tensor_type, overridable=False)
    quantizer.check(shape, plain.dtype, where=f"{op.label} {name}", cure=cure)
    op.__dict__["stored"] = (*op.__dict__.get("stored", ()), name)
    empty = quantizer.make_empty(shape, dtype=plain.dtype, device=plain.device)
    made = nn.Parameter(QuantizedTensor(empty, quantizer=quantizer))
    if init.preserve_high_precision_init_val:
        setattr(made, PRESERVED, None)
    return made


@torch.no_grad()
def reset_weight(op: BasicOperation, name: str, draw: Callable[[torch.Tensor], Any]) -> None:
    """Write what ``draw`` puts into a plain tensor into the parameter ``name``, in place; nothing on the meta device.

    The parameter stays the one that optimizers and hooks know, and stays what it was made as: plain or quantized.
    """
    parameter = op.parameter(name)
    if parameter.is_meta:
        return
    if isinstance(stored_in(parameter), QuantizedTensor):
        join(parameter)
        values = torch.empty_like(parameter)
        draw(values)
        parameter.copy_(values)
        if PRESERVED in vars(parameter):
            setattr(parameter, PRESERVED, values.cpu())
        return
    if current_model_init() is not None:
        wanted, got = "a weight that was made inside quantized_model_init", "a plain one, which stays plain"
        cure = "build the op inside quantized_model_init, on the meta device if its values come later"
        message = describe(f"{op.label}.reset_parameters() {name}", wanted=wanted, got=got, cure=cure)
        warnings.warn(message, OpfuseWarning, stacklevel=3)
    draw(parameter)


def regroup(state_dict: dict[str, Any], name: str, held: int, groups: int) -> None:
    """Rewrite ``name`` in ``state_dict`` as one tensor if ``held`` is 1, else as one for each group; only if all are there.

    Quantized weights keep their bytes both ways, since each group has scales of its own.
    """
    parts = [f"{name}{i}" for i in range(groups)]
    if held == 1 and name not in state_dict and all(part in state_dict for part in parts):
        state_dict[name] = _stacked([state_dict.pop(part) for part in parts])
    elif held == groups > 1 and name in state_dict:
        state_dict.update(zip(parts, state_dict.pop(name)))


def _stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """``parts`` as one tensor: planes as they are where all are quantized alike, else values."""
    stored = [part for part in parts if isinstance(part, QuantizedTensor)]
    records = [part.record for part in stored]
    first = records[0] if len(records) == len(parts) else None
    if first is None or any((record.structure, record.shape) != (first.structure, first.shape) for record in records):
        return torch.stack(list(parts))
    sizes = (first.matrix_shape[0],) * len(records)
    rowwise, columnwise = (
        GroupedPlane([record.plane(usage) for record in records], sizes) if usage in first.usages else None for usage in USAGES
    )
    whole = QuantizedStorage(torch.Size((len(records), *first.shape)), first.dtype, rowwise, columnwise, first.why)
    own = [part.quantizer for part in stored if part.quantizer is not None]
    if len(own) < len(parts):
        return QuantizedTensor(whole, quantizer=None)
    together = GroupedQuantizer(tuple(own), rowwise=ROWWISE in first.usages, columnwise=COLUMNWISE in first.usages)
    return QuantizedTensor(whole, quantizer=together)
