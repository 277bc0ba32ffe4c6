"""Modules of other libraries that hold their weights quantized, as transformers' ``FP8Linear``: read as stored parameters.

:func:`hold_stored` puts a :class:`~opfuse.tensors.tensor.QuantizedTensor` over the bytes of codes and scales in their place. A
module is then what its parameters say, such as an ``nn.Linear``, and gets that class, as ``fully_shard`` gives modules one: the
library's forward hands codes to kernels that not every machine has. State dicts keep the library's names and arrays: what nothing
has changed is written bit for bit as it was read. :func:`hold_arrays` undoes it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn

from opfuse.errors import ConversionError, describe, number_of
from opfuse.formats import ROWWISE
from opfuse.interchange.layouts import LAYOUTS
from opfuse.numerics.scales import e8m0_of_pow2
from opfuse.tensors.dispatch import DECODED_DTYPES
from opfuse.tensors.groups import GroupedPlane, groups_of, sizes_of
from opfuse.tensors.quantizers import GroupedQuantizer
from opfuse.tensors.storage import QuantizedStorage
from opfuse.tensors.tensor import QuantizedTensor

E8M0 = torch.float8_e8m0fnu


class StoredExperts(nn.Module):
    """Experts over stored matrices: each token x gets the sum over its experts of w W_down (act(W_gate x) * W_up x).

    It has the attributes of an ``FP8Experts``, whose class it replaces.
    """

    num_experts: int
    gate_up_proj: torch.Tensor
    down_proj: torch.Tensor
    act_fn: nn.Module

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Tokens (n, width), the numbers (n, k) of their experts, and weights (n, k)."""
        total = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, choice = torch.where(top_k_index == expert)
            gate, up = F.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            y = F.linear(self.act_fn(gate) * up, self.down_proj[expert])
            total.index_add_(0, token, (y * top_k_weights[token, choice, None]).to(total.dtype))
        return total


class StoredKind(NamedTuple):
    """A class of transformers that multiplies with stored matrices, in the layout of DeepSeek.

    becomes: the class of a module once its matrices are parameters. matrices: the names of these. The codes of a matrix have its
    name, the scales the name of a file's with that of the matrix in the place of ``weight``; those of experts are stacks.
    """

    becomes: type[nn.Module]
    matrices: tuple[str, ...]


KINDS: Mapping[str, StoredKind] = MappingProxyType(
    {
        "FP8Linear": StoredKind(nn.Linear, ("weight",)),
        "FP8Experts": StoredKind(StoredExperts, ("gate_up_proj", "down_proj")),
    }
)
"""By the name of the class in ``transformers.integrations.finegrained_fp8``."""

LAYOUT = "deepseek"
"""The layout of their arrays, in :data:`LAYOUTS`."""

_LAYOUT = LAYOUTS[LAYOUT]


class _Array(NamedTuple):
    """An array as a module held it."""

    key: str
    dtype: torch.dtype
    trained: bool


class _Held(NamedTuple):
    """What a module was: its class, and its arrays by matrix."""

    kind: type[nn.Module]
    matrices: dict[str, list[_Array]]


_HELD = "_opfuse_stored"
"""The attribute of a module that says what it was; its matrices are none once :func:`hold_arrays` has undone it."""


def _held(module: nn.Module) -> dict[str, list[_Array]]:
    held: _Held | None = vars(module).get(_HELD)
    return {} if held is None else held.matrices


def _kind_of(module: nn.Module) -> StoredKind | None:
    library = sys.modules.get("transformers.integrations.finegrained_fp8")
    return next((kind for name, kind in KINDS.items() if type(module) is getattr(library, name, None)), None)


def _arrays_of(module: nn.Module, matrix: str) -> dict[str, torch.Tensor]:
    """The arrays that a module has of a matrix, by name."""
    keys = (matrix + part.suffix.removeprefix("weight") for part in _LAYOUT.parts)
    return {key: array for key in keys if (array := module._parameters.get(key)) is not None}


def _apart(arrays: Iterable[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The arrays of each matrix, by their names in a file."""
    codes, scales = (array.detach().contiguous() for array in arrays)
    pairs = [(codes, scales)] if codes.dim() == 2 else zip(codes, scales)
    return [dict(zip((part.suffix for part in _LAYOUT.parts), pair)) for pair in pairs]


def _fits(arrays: Mapping[str, torch.Tensor]) -> bool:
    dims = [array.dim() for array in arrays.values()]
    alike = dims == [2, 2] or (dims == [3, 3] and len({len(array) for array in arrays.values()}) == 1)
    return alike and all(map(_LAYOUT.fits, _apart(arrays.values())))


def stored_arrays(module: nn.Module) -> list[torch.Tensor]:
    """The arrays of a module of :data:`KINDS` that :func:`hold_stored` would replace; none of any other module."""
    kind = _kind_of(module)
    return [] if kind is None else [array for matrix in kind.matrices for array in _arrays_of(module, matrix).values()]


_OTHERWISE = ("swiglu_alpha", "swiglu_limit", "limit", "gate_softcap", "up_softcap")
"""Attributes of ``FP8Experts`` that change what is between its products; None in those of which it is act(gate) * up."""


def why_not_held(module: nn.Module) -> str:
    """What keeps a module of :data:`KINDS` from having stored parameters; empty if nothing does."""
    kind = _kind_of(module)
    if getattr(module, "activation_scheme", "dynamic") != "dynamic":
        return "static scales of activations, where recipes find scales in each call"
    if given := [name for name in _OTHERWISE if getattr(module, name, None) is not None]:
        return f"a gated unit with {' and '.join(given)}"
    for matrix in kind.matrices if kind is not None else ():
        arrays = _arrays_of(module, matrix)
        if matrix == "gate_up_proj" and (rows := arrays[matrix].shape[1] // 2) % 128:
            return f"gate and up of {number_of(rows, 'row')}, whose scales transformers joins as if blocks of 128 ended there"
        if not _fits(arrays):
            return ", ".join(f"{key} {array.dtype} {tuple(array.shape)}" for key, array in arrays.items()) or f"no {matrix}"
    return ""


@torch.no_grad()
def hold_stored(module: nn.Module, path: str, dtype: torch.dtype, tied: dict[int, nn.Parameter]) -> None:
    """Hold the matrices of a module of :data:`KINDS` as stored parameters of the nominal ``dtype``, over the same bytes.

    Gradients are in ``dtype``, and reach a matrix if its codes had ``requires_grad``. :func:`why_not_held` finds nothing.
    tied: the parameters that were made, by the ``id()`` of their codes, so that modules with one matrix share it again.
    """
    kind = _kind_of(module)
    if kind is None:
        return
    if _HELD not in vars(module):
        module.register_state_dict_post_hook(_write)
        module.register_load_state_dict_pre_hook(_read)
    held = _Held(type(module), {})
    for matrix in kind.matrices:
        arrays = _arrays_of(module, matrix)
        held.matrices[matrix] = [_Array(key, array.dtype, array.requires_grad) for key, array in arrays.items()]
        codes = arrays[matrix]
        if id(codes) not in tied:
            stored = _stored(f"{path}.{matrix}", arrays.values(), dtype)
            tied[id(codes)] = nn.Parameter(stored, requires_grad=codes.requires_grad)
        module._parameters.update(dict.fromkeys(arrays))
        module._parameters[matrix] = tied[id(codes)]
    vars(module)[_HELD] = held
    module.__class__ = kind.becomes


@torch.no_grad()
def hold_arrays(module: nn.Module) -> None:
    """Undo :func:`hold_stored`: a module has arrays again, with the values of the parameters now.

    A parameter that something else was put in the place of, such as plain values or a shard, stays: the library multiplies it.
    """
    held: _Held | None = vars(module).get(_HELD)
    if held is None or not held.matrices:
        return
    for matrix, before in held.matrices.items():
        stored = module._parameters[matrix]
        if isinstance(stored, QuantizedTensor):
            arrays, trains = _written(stored, before), (stored.requires_grad, *(each.trained for each in before[1:]))
            made = {key: nn.Parameter(array, requires_grad=each) for (key, array), each in zip(arrays.items(), trains)}
            module._parameters.update(made)
    held.matrices.clear()
    module.__class__ = held.kind


def stored_parameters(model: nn.Module) -> dict[str, tuple[QuantizedTensor, tuple[str, ...]]]:
    """The parameters that :func:`hold_stored` made, by name, and the names of their arrays in the state dict of ``model``."""
    return {
        f"{path}.{matrix}".lstrip("."): (
            cast(QuantizedTensor, module._parameters[matrix]),
            tuple(f"{path}.{array.key}".lstrip(".") for array in before),
        )
        for path, module in model.named_modules(remove_duplicate=False)
        for matrix, before in _held(module).items()
        if isinstance(module._parameters[matrix], QuantizedTensor)
    }


# -- between arrays and planes ---------------------------------------------------------------------------------------------------


def _stored(name: str, arrays: Iterable[torch.Tensor], dtype: torch.dtype) -> QuantizedTensor:
    codes, scales = arrays
    layout = _LAYOUT if scales.dtype != E8M0 else replace(_LAYOUT, quantizer=_POWERS_OF_TWO)
    matrices = [layout.read(name, each, dtype) for each in _apart((codes, scales))]
    if codes.dim() == 2:
        return matrices[0]
    sizes = (codes.shape[1],) * len(matrices)
    rowwise = GroupedPlane([matrix.held.plane(ROWWISE) for matrix in matrices], sizes)
    storage = QuantizedStorage(codes.shape, dtype, rowwise, None, matrices[0].held.why)
    return QuantizedTensor(storage, quantizer=GroupedQuantizer(tuple([layout.quantizer] * len(matrices))))


_POWERS_OF_TWO = replace(cast(Any, _LAYOUT.quantizer), force_pow_2_scales=True)


def _written(stored: QuantizedTensor, before: list[_Array]) -> dict[str, torch.Tensor]:
    """The arrays of a matrix by their names in the module, in the dtypes in which it held them; copies.

    Planes are no plain arrays: one is a transposed copy, scales may be padded. Who writes to arrays of them would write a part.
    """
    sizes = sizes_of(stored.held)
    records = [stored.held] if sizes is None else groups_of(stored.held, sizes)
    found = [[*_LAYOUT.written("", record).values()] for record in records]
    whole = [arrays[0].clone() if sizes is None else torch.stack(arrays) for arrays in zip(*found)]
    return {array.key: _as_held(made, array) for made, array in zip(whole, before)}


def _as_held(made: torch.Tensor, array: _Array) -> torch.Tensor:
    """An array in the dtype in which it was held. fp32 scales that training has made stay fp32 where a narrower dtype lacks their
    values; ConversionError where it is E8M0, since readers know such scales by their dtype.
    """
    if made.dtype == array.dtype:
        return made
    held = e8m0_of_pow2(made).view(E8M0) if array.dtype == E8M0 else made.to(array.dtype)
    back = held.to(torch.float32)
    if bool(((back == made) | (back.isnan() & made.isnan())).all()):
        return held
    if array.dtype == E8M0:
        wanted, got = "scales that are powers of two", "others, which were written into the parameter"
        cure = "cast by a quantizer with force_pow_2_scales=True"
        raise ConversionError(describe(f"state dict {array.key}", wanted=wanted, got=got, cure=cure))
    return made


def _write(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """The hook of a state dict: arrays in the place of stored parameters."""
    for matrix, before in _held(module).items():
        stored = state.get(prefix + matrix)
        if isinstance(stored, QuantizedTensor):
            arrays = _written(cast(QuantizedTensor, stored.detach()), before)
            state.update({prefix + key: array for key, array in arrays.items()})


def _read(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """The hook of loading: stored parameters in the place of arrays. Plain values and stored ones are left to the parameter.

    Codes without their scales are no values: the scales are missing then. So torch says of those of other sizes and dtypes.
    """
    _, _, missing, _, errors = others  # beside the metadata and whether loading is strict: keys that are missing and unexpected
    for matrix, before in _held(module).items():
        keys, codes = [prefix + array.key for array in before], state.get(prefix + matrix)
        if codes is None or isinstance(codes, QuantizedTensor) or codes.dtype in DECODED_DTYPES:
            continue
        absent = [key for key in keys if key not in state]
        given = {key: state.pop(key) for key in keys if key in state}
        missing += absent
        shape = module._parameters[matrix].shape  # type: ignore[union-attr]
        if not absent and (codes.shape != shape or not _fits(given)):
            got = ", ".join(f"{key} {array.dtype} {tuple(array.shape)}" for key, array in given.items())
            wanted = f"codes {tuple(shape)} and a scale for each 128 x 128"
            errors.append(describe(prefix + matrix, wanted=wanted, got=got, cure="load a checkpoint of this model"))
        elif not absent:
            copies = [array.detach().clone() for array in given.values()]
            state[prefix + matrix] = _stored(prefix + matrix, copies, module._parameters[matrix].dtype)  # type: ignore[union-attr]
