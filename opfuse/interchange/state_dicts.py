"""State dicts as other libraries write and read them: ``export_weights`` and ``import_weights``."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from opfuse.domains import checked_arguments
from opfuse.errors import ConversionError, describe, nearest
from opfuse.inspect.heads import HEADS, heads_of
from opfuse.interchange.layouts import LAYOUTS, OF_ACTIVATIONS, Foreign, layout_named, recognized, values_of
from opfuse.interchange.stored_modules import stored_arrays, stored_parameters
from opfuse.ops.linear import BasicLinear, Linear
from opfuse.tensors.groups import groups_of, sizes_of
from opfuse.tensors.storage import QuantizedStorage
from opfuse.tensors.tensor import QuantizedTensor

_WEIGHT = ".weight"


class Exported(NamedTuple):
    """Tensors by their names in a file, and the ``quantization_config`` for the model's config.json."""

    tensors: dict[str, torch.Tensor]
    quantization_config: dict[str, Any]


@checked_arguments(ConversionError)
def export_weights(model: nn.Module, layout: str, *, ignore: Collection[str] | None = None) -> Exported:
    """The state dict of ``model`` with the weights of its linear layers and experts as the library of ``layout`` stores them.

    A weight stored in the layout's format is written bit for bit, without a copy; a plain one is cast by the layout's scale rule.
    Experts' matrices in one parameter are written one by one, under the names that transformers gives them in files, if it gives
    them any. Other entries stay as they are, as do modules named in ``ignore``, by their full name or its last parts (None:
    output heads and routers, also by what the model says of them, and modules whose weight is an embedding's). The config names
    every module with a matrix that stays plain.

    ConversionError for an unknown layout, a name in ``ignore`` that no module with matrices has, a weight that is an embedding's,
    and a weight that is stored in another format or whose size the format cannot take.
    """
    foreign = layout_named(layout, LAYOUTS)
    matrices = {path: module for path, module in model.named_modules() if _multiplies(module)}
    ignored = _ignored(model, matrices, ignore)
    tensors: dict[str, torch.Tensor] = {}
    for name, value in _state_of(model).items():
        path, _, own = name.rpartition(".")
        if path in matrices and stored_arrays(matrices[path]):  # of transformers, and not converted
            tensors[name] = _of_layout(name, value, layout)
            continue
        if path in matrices and (path not in ignored or isinstance(value, QuantizedTensor)):
            if value.dim() == 3 and (names := _names_in_files(model, name, value)):
                records = [_record(f"{name}[{i}]", each, layout) for i, each in enumerate(_matrices(value))]
                tensors |= _written_apart(model, name, foreign, records, names)
                continue
            if own == "weight" and value.dim() == 2:
                tensors |= foreign.written(path, _record(name, value, layout))
                continue
        if isinstance(value, QuantizedTensor):
            wanted, got = "a weight of a linear layer, or experts that transformers writes one by one", repr(value)
            cure = "dequantize() the weight first"
            raise ConversionError(describe(f"export_weights {name}", wanted=wanted, got=got, cure=cure))
        tensors[name] = value
        if value.dim() > 1 and path in matrices:
            ignored.add(path)
    return Exported(tensors, foreign.config(sorted(ignored)))


def _of_layout(name: str, array: torch.Tensor, layout: str) -> torch.Tensor:
    if layout != _OF_TRANSFORMERS:
        cure = f"write it as {_OF_TRANSFORMERS!r}, or convert the model first"
        got = "codes and scales that transformers has read"
        raise ConversionError(describe(f"export_weights {name}", wanted="a weight of opfuse or torch", got=got, cure=cure))
    return array


_OF_TRANSFORMERS = "deepseek"
"""The layout of modules of transformers that hold their weights quantized."""


def _multiplies(module: nn.Module) -> bool:
    """Whether a module is a linear layer, or has a stack of matrices."""
    stacks = any(p is not None and p.dim() == 3 for p in module._parameters.values())
    return stacks or isinstance(module, (nn.Linear, BasicLinear, Linear))


def _state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of ``model``, with the stored parameters themselves where a module of another library writes arrays."""
    state: dict[str, torch.Tensor] = dict(model.state_dict())
    for name, (stored, arrays) in stored_parameters(model).items():
        state = {key: value for key, value in state.items() if key not in arrays}
        state[name] = stored.detach()
    return state


def _ignored(model: nn.Module, matrices: Mapping[str, nn.Module], ignore: Collection[str] | None) -> set[str]:
    heads = dict(heads_of(model))
    wanted = set(HEADS if ignore is None else ignore)
    found = {path for path in matrices if path in wanted or path.rpartition(".")[2] in wanted}
    last = {path.rpartition(".")[2] for path in matrices}
    if ignore is None:
        return found | {path for path, module in matrices.items() if id(module) in heads}
    if unknown := sorted(wanted - {*matrices, *last}):
        got, cure = f"{unknown[0]!r}{nearest(unknown[0], matrices)}", "name a linear layer, by its whole or its last name"
        raise ConversionError(describe("export_weights ignore", wanted="names of linear layers", got=got, cure=cure))
    embeddings = {id(module.weight): path for path, module in model.named_modules() if isinstance(module, nn.Embedding)}
    for path, module in matrices.items():
        if path not in found and (tied := embeddings.get(id(module._parameters.get("weight")))) is not None:
            cure = f"leave it plain: ignore=[{path!r}, ...]"
            got = f"that of {tied}, which readers take for both"
            raise ConversionError(describe(f"export_weights {path}", wanted="a weight of its own", got=got, cure=cure))
    return found


def _record(name: str, value: torch.Tensor, layout: str) -> QuantizedStorage:
    """The planes of a weight in the format of a layout."""
    quantizer = LAYOUTS[layout].quantizer.wanting(columnwise=False)
    where = f"export_weights {name}"
    if isinstance(value, QuantizedTensor):
        plane = value.record.rowwise
        if plane is None or plane.format.as_stored != quantizer.formats[0]:
            known = [each for each, other in LAYOUTS.items() if plane is not None and other.format == plane.format.as_stored]
            cure = f"write it as {' or '.join(known)}" if known else "dequantize() the weight first"
            got = "columnwise data alone" if plane is None else plane.format
            raise ConversionError(describe(where, wanted=f"a weight in {quantizer.formats[0]}", got=got, cure=cure))
        return value.record
    if not quantizer.is_quantizable(value):
        wanted = f"sizes and a dtype for {quantizer.formats[0]}"
        cure = f"leave it plain: ignore=[{name.removesuffix(_WEIGHT)!r}, ...]"
        raise ConversionError(describe(where, wanted=wanted, got=f"{value.dtype} {tuple(value.shape)}", cure=cure))
    return quantizer.quantize(value.detach())


# -- experts -----------------------------------------------------------------------------------------------------------------


def _matrices(stack: torch.Tensor) -> list[torch.Tensor]:
    """The matrices of a stack, over the same memory."""
    if isinstance(stack, QuantizedTensor):
        sizes = sizes_of(stack.held)
        return list(stack) if sizes is None else [QuantizedTensor(record) for record in groups_of(stack.held, sizes)]
    return [*stack]


def _names_in_files(model: nn.Module, name: str, stack: torch.Tensor) -> list[str]:
    """The names that transformers writes the matrices of a stack under; none where it writes the stack, or is not there."""
    shape = torch.empty(stack.shape, device="meta")
    return [file for file, part in _as_in_files(model, name, shape).items() if part.dim() == 2 and file.endswith(_WEIGHT)]


def _as_in_files(model: nn.Module, name: str, stack: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parts of one tensor of the state dict of a model of transformers, by the names that its files have."""
    library = sys.modules.get("transformers.core_model_loading")
    revert = getattr(library, "revert_weight_conversion", None)
    if revert is None or not hasattr(model, "config"):
        return {name: stack}
    parts: dict[str, torch.Tensor] = revert(model, {name: stack})
    return parts


def _written_apart(
    model: nn.Module, name: str, foreign: Foreign, records: list[QuantizedStorage], names: list[str]
) -> dict[str, torch.Tensor]:
    """The arrays of each matrix by their names in files. One that holds two of the file's, as gate and up, is cut between its
    blocks; ConversionError where a block lies in both.
    """
    rows = records[0].matrix_shape[0]
    cuts = len(names) // len(records)
    unit = foreign.quantizer.formats[0].block[0] if foreign.quantizer.formats[0].block else rows
    if rows // cuts % unit and cuts > 1:
        wanted, got = f"matrices of multiples of {unit} rows", f"{cuts} of {rows // cuts} rows, with scales in common"
        raise ConversionError(describe(f"export_weights {name}", wanted=wanted, got=got, cure="name its module in ignore"))
    found: dict[str, torch.Tensor] = {}
    for arrays in zip(*(foreign.written("", record).items() for record in records)):
        suffix, stack = arrays[0][0].lstrip("."), torch.stack([array for _, array in arrays])
        shared = stack.dim() == 2  # one number for each matrix, which each part of it has
        for file, part in _as_in_files(model, name, stack[:, None].expand(-1, cuts, -1) if shared else stack).items():
            found[file.removesuffix("weight") + suffix] = part.flatten() if shared else part
    return found


# -- reading ---------------------------------------------------------------------------------------------------------------


@checked_arguments(ConversionError)
def import_weights(
    tensors: Mapping[str, torch.Tensor],
    *,
    layout: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    dequantize: bool = False,
    nearest_scale: bool = False,
) -> dict[str, torch.Tensor]:
    """A state dict for ``load_state_dict`` from tensors as another library wrote them; plain tensors stay as they are.

    Weights become quantized tensors of the nominal ``dtype``, over the same bytes. Loaded into parameters that were made under
    ``quantized_model_init`` in their format they are copied bit for bit; into plain parameters, their values are.
    ``dequantize``: return plain values. ``layout``: a name of :data:`READ`; None: for each weight the one that its arrays fit.
    Static scales of activations are dropped.

    NVFP4 files have a scale of the whole weight, where opfuse keeps the amax from which it follows. ``nearest_scale``: replace a
    scale that follows from no amax by the nearest one that does, 1 in 2^23 away; codes and scales of blocks keep their bytes.

    ConversionError for arrays that fit no layout, and for such a scale otherwise, by their names.
    """
    found = dict(tensors)
    for path, foreign, arrays in recognized(tensors, layout):
        for part in foreign.parts:
            del found[f"{path}.{part.suffix}"]
        for suffix in OF_ACTIVATIONS:
            found.pop(f"{path}.{suffix}", None)
        if dequantize:
            found[path + _WEIGHT] = values_of(foreign, path, arrays, dtype)
        else:
            found[path + _WEIGHT] = foreign.read(path, arrays, dtype, nearest=nearest_scale)
    return found
