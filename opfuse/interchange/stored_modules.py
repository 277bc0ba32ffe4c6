"""Modules of other libraries that hold their weights quantized, as transformers' ``FP8Linear``: read as stored parameters.

:func:`hold_stored` puts a :class:`~opfuse.tensors.tensor.QuantizedTensor` over the bytes of codes and scales in the place of the
weight, and nothing in that of the scales. An ``FP8Linear`` is then what its parameters say, an ``nn.Linear``, and gets that
class, as ``fully_shard`` gives modules one: its own forward hands codes to kernels that not every machine has. State dicts keep
the library's names and arrays: what nothing has changed is written bit for bit as it was read. :func:`hold_arrays` undoes it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn

from opfuse.errors import ConversionError, describe
from opfuse.formats import USAGES
from opfuse.interchange.layouts import LAYOUTS
from opfuse.numerics.scales import e8m0_of_pow2
from opfuse.tensors.groups import GroupedPlane, groups_of, sizes_of
from opfuse.tensors.quantizers import GroupedQuantizer
from opfuse.tensors.storage import QuantizedStorage
from opfuse.tensors.tensor import QuantizedTensor

E8M0 = torch.float8_e8m0fnu
SCALE = "_scale_inv"
"""What follows the name of a matrix in the name of its scales."""

_LIBRARY = "transformers.integrations.finegrained_fp8"


class StoredClass(NamedTuple):
    """A class of transformers that multiplies with stored matrices.

    matrices: their names. becomes: the class of a module whose matrices are stored parameters.
    """

    matrices: tuple[str, ...]
    becomes: type[nn.Module]


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


CLASSES: Mapping[str, StoredClass] = MappingProxyType(
    {
        "FP8Linear": StoredClass(("weight",), nn.Linear),
        "FP8Experts": StoredClass(("gate_up_proj", "down_proj"), StoredExperts),
    }
)
"""By name. A matrix W (out, in), or one for each expert, has FP8 codes c and, under its name with :data:`SCALE`, a scale s for
each 128 x 128 of them: W = c s.
"""

_HELD = "_opfuse_stored"
"""The attribute of a module that says how it held its matrices."""


class _Held(NamedTuple):
    """What a module was: its class and, by the names of matrices, the dtype of scales and whether codes and scales trained."""

    kind: type[nn.Module]
    arrays: dict[str, tuple[torch.dtype, bool, bool]]


def _held(module: nn.Module) -> dict[str, tuple[torch.dtype, bool, bool]]:
    held: _Held | None = vars(module).get(_HELD)
    return {} if held is None else held.arrays


def _class_of(module: nn.Module) -> StoredClass | None:
    library = sys.modules.get(_LIBRARY)
    return next((row for name, row in CLASSES.items() if type(module) is getattr(library, name, None)), None)


def matrices_of(module: nn.Module) -> tuple[str, ...]:
    """The names of the matrices that a module of :data:`CLASSES` holds as arrays; none of any other module."""
    row = _class_of(module)
    names = () if row is None else row.matrices
    return tuple(name for name in names if module._parameters.get(name) is not None and name not in _held(module))


_CLAMPS = ("swiglu_alpha", "swiglu_limit", "limit", "gate_softcap", "up_softcap")
"""Attributes of ``FP8Experts`` that change what is between its products; None in those of which it is act(gate) * up."""


def why_not_held(module: nn.Module) -> str:
    """What keeps the matrices of a module of :data:`CLASSES` from being stored parameters; empty if nothing does."""
    if getattr(module, "activation_scheme", "dynamic") != "dynamic":
        return "static scales of activations, where recipes find scales in each call"
    if given := [name for name in _CLAMPS if getattr(module, name, None) is not None]:
        return f"a gated unit with {' and '.join(given)}"
    row = _class_of(module)
    if row is not None and (without := [name for name in row.matrices if module._parameters.get(name) is None]):
        return f"no {without[0]}"
    for name in matrices_of(module):
        codes, scales = module._parameters[name], module._parameters.get(name + SCALE)
        if codes is None or scales is None or codes.dim() != scales.dim():
            return f"{name} without a scale for each block"
        if not all(_LAYOUT.fits(arrays) for arrays in _arrays(codes, scales)):
            return f"{name} {codes.dtype} {tuple(codes.shape)} with scales {scales.dtype} {tuple(scales.shape)}"
    return ""


@torch.no_grad()
def hold_stored(module: nn.Module, path: str, dtype: torch.dtype) -> None:
    """Hold the matrices of a module of :data:`CLASSES` as stored parameters of the nominal ``dtype``, over the same bytes.

    Gradients are in ``dtype``, and reach a matrix if its codes had ``requires_grad``.
    """
    row, names = _class_of(module), matrices_of(module)
    if row is None or not names:
        return
    if _HELD not in vars(module):
        module.register_state_dict_post_hook(_write)
        module.register_load_state_dict_pre_hook(_read)
    held = vars(module)[_HELD] = _Held(type(module), {})
    for name in names:
        codes, scales = (cast(nn.Parameter, module._parameters[key]) for key in (name, name + SCALE))
        held.arrays[name] = scales.dtype, codes.requires_grad, scales.requires_grad
        stored = _stored(f"{path}.{name}", codes, scales, dtype)
        module._parameters[name] = nn.Parameter(stored, requires_grad=codes.requires_grad)
        module._parameters[name + SCALE] = None
    module.__class__ = row.becomes


@torch.no_grad()
def hold_arrays(module: nn.Module) -> None:
    """Undo :func:`hold_stored`: codes and scales are arrays of the module again, with the values of the parameters now."""
    held: _Held | None = vars(module).get(_HELD)
    if held is None or not held.arrays:
        return
    for name, (dtype, *trained) in held.arrays.items():
        arrays = _written(cast(QuantizedTensor, module._parameters[name]), name, dtype)
        for key, trains in zip((name, name + SCALE), trained):
            module._parameters[key] = nn.Parameter(arrays[key], requires_grad=trains)
    held.arrays.clear()
    module.__class__ = held.kind


def stored_parameters(model: nn.Module) -> dict[str, QuantizedTensor]:
    """The parameters that :func:`hold_stored` made, by name."""
    return {
        f"{path}.{name}".lstrip("."): cast(QuantizedTensor, module._parameters[name])
        for path, module in model.named_modules()
        for name in _held(module)
    }


# -- between arrays and planes ---------------------------------------------------------------------------------------------------

_LAYOUT = LAYOUTS["deepseek"]
_CODES, _SCALES = (part.suffix for part in _LAYOUT.parts)


def _arrays(codes: torch.Tensor, scales: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Codes and scales of each matrix, by the names of the layout."""
    pairs = [(codes, scales)] if codes.dim() == 2 else zip(codes, scales)
    return [{_CODES: one.detach(), _SCALES: other.detach()} for one, other in pairs]


def _stored(name: str, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> QuantizedTensor:
    layout = _LAYOUT if scales.dtype != E8M0 else replace(_LAYOUT, quantizer=_POWERS_OF_TWO)
    matrices = [layout.read(name, arrays, dtype) for arrays in _arrays(codes, scales)]
    if codes.dim() == 2:
        return matrices[0]
    sizes = (codes.shape[1],) * len(matrices)
    rowwise, columnwise = (GroupedPlane([matrix.held.plane(usage) for matrix in matrices], sizes) for usage in USAGES)
    storage = QuantizedStorage(codes.shape, dtype, rowwise, columnwise)
    return QuantizedTensor(storage, quantizer=GroupedQuantizer(tuple([layout.quantizer] * len(matrices))))


_POWERS_OF_TWO = replace(cast(Any, _LAYOUT.quantizer), force_pow_2_scales=True)


def _written(stored: QuantizedTensor, name: str, scale_dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Codes and scales by their names in the module, in the dtypes in which it held them."""
    sizes = sizes_of(stored.held)
    records = [stored.held] if sizes is None else groups_of(stored.held, sizes)
    found = [[*_LAYOUT.written("", record).values()] for record in records]
    codes, scales = (array[0] if sizes is None else torch.stack(array) for array in zip(*found))
    return {name: codes, name + SCALE: _scales_as(scale_dtype, scales, name)}


def _scales_as(dtype: torch.dtype, scales: torch.Tensor, name: str) -> torch.Tensor:
    """fp32 scales in ``dtype``. ConversionError for values that it does not have."""
    held = e8m0_of_pow2(scales).view(E8M0) if dtype == E8M0 else scales.to(dtype)
    if not torch.equal(held.to(torch.float32), scales):
        cure = "train under a recipe with force_pow_2_scales=True" if dtype == E8M0 else "export_weights(model, 'deepseek')"
        wanted, got = f"scales that are {dtype}", "others, which training has written"
        raise ConversionError(describe(f"state dict {name}{SCALE}", wanted=wanted, got=got, cure=cure))
    return held


def _write(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """The hook of a state dict: arrays in the place of stored parameters."""
    for name, (dtype, *_) in _held(module).items():
        stored = state.get(prefix + name)
        if isinstance(stored, QuantizedTensor):
            state.update(
                {prefix + key: array for key, array in _written(cast(QuantizedTensor, stored.detach()), name, dtype).items()}
            )


def _read(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """The hook of loading: stored parameters in the place of arrays."""
    for name in _held(module):
        codes, scales = state.get(prefix + name), state.get(prefix + name + SCALE)
        if scales is not None and codes is not None:
            stored = cast(QuantizedTensor, module._parameters[name])
            state[prefix + name] = _stored(prefix + name, codes, state.pop(prefix + name + SCALE), stored.dtype)
