"""State dicts as other libraries write and read them: ``export_weights`` and ``import_weights``."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import nn

from opfuse.core.state import is_delayed_state
from opfuse.domains import checked_arguments
from opfuse.errors import ConversionError, describe, nearest, number_of
from opfuse.formats import COLUMNWISE, ROWWISE
from opfuse.inspect.heads import HEADS, heads_of
from opfuse.interchange.layouts import (
    LAYOUTS,
    OF_ACTIVATIONS,
    OF_CACHES,
    Foreign,
    ForeignStack,
    is_of_cache,
    layout_named,
    recognized,
    values_of,
)
from opfuse.interchange.stored_modules import stored_kind, stored_layout, stored_parameters
from opfuse.ops.linear import BasicLinear, Linear
from opfuse.recipes import Recipe
from opfuse.tensors.groups import groups_of, sizes_of
from opfuse.tensors.quantizers import Quantizer
from opfuse.tensors.storage import QuantizedStorage
from opfuse.tensors.tensor import QuantizedTensor

_WEIGHT = ".weight"


class Exported(NamedTuple):
    """Tensors by their names in a file, and the ``quantization_config`` for the model's config.json."""

    tensors: dict[str, torch.Tensor]
    quantization_config: dict[str, Any]


@checked_arguments(ConversionError)
def export_weights(
    model: nn.Module,
    layout: str,
    *,
    ignore: Collection[str] | None = None,
    recipe: Recipe | None = None,
    dtype: torch.dtype | None = None,
    cache_scales: Mapping[str, torch.Tensor] | None = None,
) -> Exported:
    """The state dict of ``model`` with the weights of its linear layers and experts as the library of ``layout`` stores them.

    A weight stored in the layout's format is written bit for bit, without a copy. A plain one is cast by the layout's scale rule;
    recipe, dtype: by that of the recipe that the model trains under, and from ``dtype``, in which it computes (torch.autocast's,
    or that of FSDP2's policy; None: the weight's own): these are the bytes that training multiplies.

    Experts' matrices in one parameter are written one by one, under the names that transformers gives them in files, if it gives
    them any. Other entries stay as they are, as do plain modules named in ``ignore``, by their full name or its last parts (None:
    output heads and routers, also by what the model says of them, and modules whose weight is an embedding's). The config names
    every module with a matrix that stays plain.

    cache_scales: scales of an engine's cache of keys and values, as :func:`import_weights` found them; written as they are. They
    do not say which format the cache has: what the file's own config says of it (``kv_cache_scheme``) is yours to copy.

    ConversionError for an unknown layout, a recipe of another format, a name in ``ignore`` that no module with matrices has, a
    weight that is an embedding's, a weight that is stored in another format or whose size the format cannot take, and
    ``cache_scales`` with other tensors.
    """
    writer = LayoutWriter(model, layout, ignore, recipe, dtype)
    tensors: dict[str, torch.Tensor] = {}
    for name, value in _state_of(model).items():
        tensors |= writer.written(name, value)
    return Exported(tensors | checked_scales(cache_scales or {}, tensors), writer.config)


def checked_scales(cache_scales: Mapping[str, torch.Tensor], others: Collection[str]) -> dict[str, torch.Tensor]:
    """``cache_scales``. ConversionError for a tensor that is none, or whose name one of ``others`` has."""
    for name in cache_scales:
        if not is_of_cache(name) or name in others:
            wanted = f"names that end in one of {', '.join(OF_CACHES[::3])}, and that the model does not have"
            cure = "pass the dict that import_weights(..., cache_scales={}) filled"
            raise ConversionError(describe("export_weights cache_scales", wanted=wanted, got=repr(name), cure=cure))
    return dict(cache_scales)


class LayoutWriter:
    """Turns entries of a model's state dict into those of a file in a layout. Arguments and errors: :func:`export_weights`.

    matrices: the modules that multiply, by path. ignored: those of them that are written plain.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: str,
        ignore: Collection[str] | None,
        recipe: Recipe | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.layout, self.dtype = model, layout, dtype
        self.foreign = layout_named(layout, LAYOUTS)
        self.quantizer = self.foreign.quantizer if recipe is None else _cast_of(recipe, layout)
        named = model.named_modules(remove_duplicate=False)
        self.matrices = {path: module for path, module in named if _multiplies(module)}
        others: set[str] = set()
        if isinstance(self.foreign, ForeignStack):
            others = {path for path, module in self.matrices.items() if not _has_turned(module)}
            _check_turned(model, layout, others == set(self.matrices))
        self.ignored = _ignored(model, self.matrices, ignore, others)

    @property
    def config(self) -> dict[str, Any]:
        """The ``quantization_config`` for what was written."""
        return self.foreign.config(sorted(self.ignored))

    def written(self, name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        """The entries of the file for one of the state dict."""
        path, _, own = name.rpartition(".")
        if path in self.matrices and stored_kind(self.matrices[path]) is not None:  # of another library, and not converted
            self.ignored.discard(path)
            return {name: _of_layout(name, value, stored_layout(self.matrices[path]), self.layout)}
        is_matrix = path in self.matrices and (value.dim() == 3 or (own == "weight" and value.dim() == 2))
        if (
            is_matrix
            and (isinstance(value, QuantizedTensor) or path not in self.ignored)
            and (made := self._quantized(path, name, value))
        ):
            self.ignored.discard(path)
            return made
        if isinstance(value, QuantizedTensor):
            wanted = "a weight of a linear layer, or experts that transformers writes one by one"
            raise ConversionError(describe(f"export_weights {name}", wanted=wanted, got=repr(value), cure=_cure(value)))
        if is_matrix:
            self.ignored.add(path)
        return {name: value}

    def _quantized(self, path: str, name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        """The arrays of a weight, or of the matrices of a stack; none where the layout has no such weight."""
        if isinstance(self.foreign, ForeignStack):
            return self.foreign.stacked(name, self._records(name, value)) if _is_turned(self.matrices[path], value) else {}
        if value.dim() == 2:
            return self.foreign.written(path, self._record(name, value))
        names = _names_in_files(self.model, name, value)
        return _written_apart(self.model, name, self.foreign, self._records(name, value), names) if names else {}

    def _records(self, name: str, stack: torch.Tensor) -> list[QuantizedStorage]:
        return [self._record(f"{name}[{i}]", each) for i, each in enumerate(_matrices(stack))]

    def _record(self, name: str, value: torch.Tensor) -> QuantizedStorage:
        """The planes of a weight in the format of the layout."""
        where, fmt, usage = f"export_weights {name}", self.foreign.format, self.foreign.usage
        if isinstance(value, QuantizedTensor):
            plane = getattr(value.record, usage)
            if plane is None or plane.format.as_stored != fmt:
                got = f"{value.usages[0]} data alone" if plane is None else plane.format
                raise ConversionError(describe(where, wanted=f"a weight in {fmt}", got=got, cure=_cure(value)))
            return value.record
        quantizer = self.quantizer.wanting(rowwise=usage == ROWWISE, columnwise=usage == COLUMNWISE)
        plain = value.detach().to(self.dtype or value.dtype)
        if not quantizer.is_quantizable(plain):
            cure = f"leave it plain: ignore=[{name.removesuffix(_WEIGHT)!r}, ...]"
            got = f"{plain.dtype} {tuple(plain.shape)}"
            raise ConversionError(describe(where, wanted=f"sizes and a dtype for {fmt}", got=got, cure=cure))
        return quantizer.quantize(plain)


def _cast_of(recipe: Recipe, layout: str) -> Quantizer:
    """How ``recipe`` casts weights. ConversionError if it is in another format than that of the layout."""
    quantizer = BasicLinear(1, 1, device="meta").stored_quantizer("weight", recipe)
    made, wanted = quantizer.formats[0].as_stored, LAYOUTS[layout].format
    if made != wanted:
        known = [each for each, other in LAYOUTS.items() if other.format == made]
        cure = f"use the layout {' or '.join(known)}" if known else "leave recipe out, which casts by the layout's rule"
        where = f"export_weights recipe={type(recipe).__name__}"
        raise ConversionError(describe(where, wanted=f"weights in {wanted}, the format of {layout!r}", got=made, cure=cure))
    return quantizer


def _cure(stored: QuantizedTensor) -> str:
    """What to do about a stored weight that a layout does not have."""
    held = stored.record
    known = [
        name
        for name, other in LAYOUTS.items()
        if other.usage in held.usages and held.plane(other.usage).format.as_stored == other.format
    ]
    return f"write it as {' or '.join(known)}" if known else "dequantize() the weight first"


def _of_layout(name: str, array: torch.Tensor, read: str | None, layout: str) -> torch.Tensor:
    """An array of a module that another library holds in the layout ``read``."""
    if layout != read:
        cure = "convert the model first" if read is None else f"write it as {read!r}, or convert the model first"
        got = "codes and scales that another library has read"
        raise ConversionError(describe(f"export_weights {name}", wanted="a weight of opfuse or torch", got=got, cure=cure))
    return array


def _multiplies(module: nn.Module) -> bool:
    """Whether a module is a linear layer, or has a stack of matrices."""
    stacks = any(p is not None and p.dim() == 3 for p in module._parameters.values())
    return stacks or isinstance(module, (nn.Linear, BasicLinear, Linear))


def _state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of ``model``, with the stored parameters themselves where a module of another library writes arrays, and
    without scales of delayed scaling.
    """
    stored = stored_parameters(model)
    arrays = {key for _, keys in stored.values() for key in keys}
    state = {name: value for name, value in model.state_dict().items() if not is_delayed_state(name) and name not in arrays}
    return state | {name: parameter.detach() for name, (parameter, _) in stored.items()}


def _ignored(
    model: nn.Module, matrices: Mapping[str, nn.Module], ignore: Collection[str] | None, others: Collection[str]
) -> set[str]:
    """Paths of modules that are written plain. others: those of which the layout has no weights."""
    heads = dict(heads_of(model))
    wanted = set(HEADS if ignore is None else ignore)
    found = {path for path in matrices if path in others or path in wanted or path.rpartition(".")[2] in wanted}
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


# -- experts multiplied from the right ---------------------------------------------------------------------------------------


def _is_turned(module: nn.Module, stack: torch.Tensor) -> bool:
    """Whether matrices (experts, in, out) are multiplied from the right: their module says so, as transformers' do, or they are
    stored in columns alone.
    """
    stored = isinstance(stack, QuantizedTensor) and stack.usages == (COLUMNWISE,)
    return stack.dim() == 3 and (stored or getattr(module, "is_transposed", False) is True)


def _has_turned(module: nn.Module) -> bool:
    return any(each is not None and _is_turned(module, each) for each in module._parameters.values())


def _check_turned(model: nn.Module, layout: str, has_none: bool) -> None:
    """ConversionError for a model without such matrices, and for one whose matrices transformers keeps where no state dict has
    them.
    """
    kind = getattr(sys.modules.get("transformers.integrations.mxfp4"), "Mxfp4GptOssExperts", ())
    kept = next((path for path, module in model.named_modules() if kind and isinstance(module, kind)), None)
    if kept is not None:
        got, cure = f"{kept}, whose bytes are in the order of a kernel", "load it with Mxfp4Config(dequantize=True)"
        raise ConversionError(describe(f"export_weights {layout!r}", wanted="experts in parameters", got=got, cure=cure))
    if has_none:
        wanted, cure = "experts as GPT-OSS has them, (experts, in, out)", "write mxfp4, which has linear layers"
        raise ConversionError(describe(f"export_weights {layout!r}", wanted=wanted, got=f"a {type(model).__name__}", cure=cure))


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
    loaded = vars(model).pop(_LOADED, None)  # what dequantized a checkpoint when it was loaded has no reverse
    try:
        parts: dict[str, torch.Tensor] = revert(model, {name: stack})
    finally:
        if loaded is not None:
            vars(model)[_LOADED] = loaded
    return parts


_LOADED = "_weight_conversions"
"""Where a model of transformers keeps how its checkpoint was renamed and stacked; without it, what its class says counts."""


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
        wanted = f"matrices of multiples of {unit} rows"
        got = f"{cuts} of {number_of(rows // cuts, 'row')}, with scales in common"
        raise ConversionError(describe(f"export_weights {name}", wanted=wanted, got=got, cure="name its module in ignore"))
    found: dict[str, torch.Tensor] = {}
    for arrays in zip(*(foreign.written("", record).items() for record in records)):
        suffix, stack = arrays[0][0].lstrip("."), torch.stack([array for _, array in arrays])
        shared = stack.dim() == 2  # one number for each matrix, which each part of it has
        for file, part in _as_in_files(model, name, stack[:, None].expand(-1, cuts, -1) if shared else stack).items():
            found[file.removesuffix("weight") + suffix] = part.flatten().clone() if shared else part  # files want memory apart
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
    cache_scales: MutableMapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """A state dict for ``load_state_dict`` from tensors as another library wrote them; plain tensors stay as they are.

    Weights become quantized tensors of the nominal ``dtype``, over the same bytes. Loaded into parameters that were made under
    ``quantized_model_init`` in their format they are copied bit for bit; into plain parameters, their values are.
    ``dequantize``: return plain values. ``layout``: a name of :data:`READ`; None: for each weight the one that its arrays fit.
    Static scales of activations are dropped.

    cache_scales: a dict of yours, empty at first. It takes the scales of a cache of keys and values (``k_scale``, ``v_scale``,
    ``k_proj.output_scale``) by their names; :func:`export_weights` writes them again. None: they stay in the state dict, and
    ``load_state_dict`` names them, which a model has no place for.

    NVFP4 files have a scale of the whole weight, where opfuse keeps the amax from which it follows. ``nearest_scale``: replace a
    scale that follows from no amax by the nearest one that does, 1 in 2^23 away; codes and scales of blocks keep their bytes.

    ConversionError for arrays that fit no layout, and for such a scale otherwise, by their names.
    """
    found = dict(tensors)
    for path, foreign, arrays in recognized(tensors, layout):
        for part in foreign.parts:
            del found[foreign.name(path, part)]
        for suffix in OF_ACTIVATIONS:
            found.pop(f"{path}.{suffix}", None)
        if dequantize:
            found[path + foreign.weight] = values_of(foreign, path, arrays, dtype)
        else:
            found[path + foreign.weight] = foreign.read(path, arrays, dtype, nearest=nearest_scale)
    if cache_scales is not None:
        cache_scales.update({name: found.pop(name) for name in [*found] if is_of_cache(name)})
    return found
