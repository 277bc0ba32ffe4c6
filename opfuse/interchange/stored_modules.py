"""Modules of other libraries that hold their weights quantized, such as transformers' ``FP8Linear``: read as stored parameters.

:func:`hold_stored` puts a :class:`~opfuse.tensors.tensor.QuantizedTensor` over the bytes of codes and scales in their place. A
module is then what its parameters say, such as an ``nn.Linear``, and gets that class, as ``fully_shard`` gives modules one: the
library's forward hands codes to kernels that not every machine has. State dicts keep the library's names and arrays: what nothing
has changed is written bit for bit as it was read. :func:`hold_arrays` undoes it.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn

from opfuse.errors import ConversionError, OpfuseWarning, describe, notice, number_of
from opfuse.formats import ROWWISE
from opfuse.interchange.layouts import LAYOUTS, Foreign
from opfuse.numerics.scales import e8m0_of_pow2
from opfuse.tensors.dispatch import DECODED_DTYPES
from opfuse.tensors.groups import GroupedPlane, groups_of, sizes_of
from opfuse.tensors.optimizers import mark_replaced
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
    """Modules that multiply with stored matrices.

    becomes: the class of a module once its matrices are parameters. matrices: the names of these. layouts: those of
    :data:`LAYOUTS` that their arrays may have. Arrays have the names of a file's with that of the matrix in the place of
    ``weight``; those of experts are stacks. attributes: what the library reads of a module of its own, and takes out of one that
    it leaves alone. wanted, cure: which modules can have stored parameters, and what to do with others.
    """

    becomes: type[nn.Module]
    matrices: tuple[str, ...]
    layouts: tuple[str, ...]
    attributes: tuple[str, ...]
    wanted: str
    cure: str


_FP8: dict[str, Any] = {
    "layouts": ("deepseek",),
    "attributes": (),
    "wanted": "FP8 codes with a scale for each 128 x 128, and scales of activations from each call",
    "cure": "load the model with quantization_config=FineGrainedFP8Config(dequantize=True)",
}
KINDS: Mapping[str, StoredKind] = MappingProxyType(
    {
        "FP8Linear": StoredKind(nn.Linear, ("weight",), **_FP8),
        "FP8Experts": StoredKind(StoredExperts, ("gate_up_proj", "down_proj"), **_FP8),
    }
)
"""By the name of the class in ``transformers.integrations.finegrained_fp8``."""

_SCHEMES = tuple(name for name, layout in LAYOUTS.items() if any(part.suffix == "weight_scale" for part in layout.parts))
COMPRESSED = StoredKind(
    nn.Linear,
    ("weight",),
    layouts=_SCHEMES,
    attributes=("quantization_status", "quantization_scheme"),
    wanted=f"weights as in {', '.join(_SCHEMES)}, and scales of activations from each call",
    cure="load the model with quantization_config=CompressedTensorsConfig(dequantize=True)",
)
"""Linear layers that compressed-tensors has compressed. At a model's first call it decompresses those with the attributes."""


Ids = tuple[int, ...]
"""The ``id()`` of each array of a matrix."""


class _Array(NamedTuple):
    """An array as a module held it."""

    key: str
    dtype: torch.dtype
    trained: bool


class _Held(NamedTuple):
    """What a module was: its class, the layout of its matrices, its arrays by matrix, and the library's attributes."""

    kind: type[nn.Module]
    layout: str
    matrices: dict[str, list[_Array]]
    attributes: dict[str, Any]


_HELD = "_opfuse_stored"
"""The attribute of a module that says what it was; its matrices are none once :func:`hold_arrays` has undone it."""


def _held(module: nn.Module) -> _Held | None:
    held: _Held | None = vars(module).get(_HELD)
    return held


def _matrices_held(module: nn.Module) -> dict[str, list[_Array]]:
    held = _held(module)
    return {} if held is None else held.matrices


_COMPRESSED = "compressed"
"""What compressed-tensors says of a module whose weight it has compressed."""


def _status(module: nn.Module) -> str | None:
    status: str | None = getattr(vars(module).get("quantization_status"), "value", None)
    return status


def stored_kind(module: nn.Module) -> StoredKind | None:
    """What a module is whose matrices another library holds quantized; None of any other module."""
    if type(module) is nn.Linear:
        return COMPRESSED if _status(module) == _COMPRESSED else None
    library = sys.modules.get("transformers.integrations.finegrained_fp8")
    return next((kind for name, kind in KINDS.items() if type(module) is getattr(library, name, None)), None)


def stored_layout(module: nn.Module) -> str | None:
    """The layout of :data:`LAYOUTS` that the arrays of a module of another library have; None if they have none of its kind."""
    kind = stored_kind(module)
    for name in kind.layouts if kind is not None else ():
        if all(_fits(LAYOUTS[name], _arrays_of(module, matrix, LAYOUTS[name])) for matrix in cast(Any, kind).matrices):
            return name
    return None


def _arrays_of(module: nn.Module, matrix: str, layout: Foreign) -> dict[str, torch.Tensor]:
    """The arrays of a layout that a module has of a matrix, by name."""
    keys = (matrix + part.suffix.removeprefix("weight") for part in layout.parts)
    return {key: array for key in keys if (array := module._parameters.get(key)) is not None}


def _apart(layout: Foreign, arrays: Iterable[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The arrays of each matrix, by their names in a file."""
    whole = [array.detach().contiguous() for array in arrays]
    each = [whole] if whole[0].dim() == 2 else zip(*whole)
    return [dict(zip((part.suffix for part in layout.parts), one)) for one in each]


def _fits(layout: Foreign, arrays: Mapping[str, torch.Tensor]) -> bool:
    if len(arrays) != len(layout.parts):
        return False
    dims = [array.dim() for array in arrays.values()]
    alike = dims[:2] == [2, 2] or (dims == [3, 3] and len({len(array) for array in arrays.values()}) == 1)
    return alike and all(map(layout.fits, _apart(layout, arrays.values())))


def stored_arrays(module: nn.Module) -> list[torch.Tensor]:
    """What a module holds of matrices that :func:`hold_stored` would replace; nothing of a module that holds none quantized."""
    kind = stored_kind(module)
    if kind is None:
        return []
    layouts, matrices = [LAYOUTS[name] for name in kind.layouts], kind.matrices
    found = {k: array for layout in layouts for matrix in matrices for k, array in _arrays_of(module, matrix, layout).items()}
    return [*found.values()]


_OTHERWISE = ("swiglu_alpha", "swiglu_limit", "limit", "gate_softcap", "up_softcap")
"""Attributes of ``FP8Experts`` that change what is between its products; None in those of which it is act(gate) * up."""


def why_not_held(module: nn.Module) -> str:
    """What keeps a module that :func:`stored_kind` knows from having stored parameters; empty if nothing does."""
    kind, layout = cast(StoredKind, stored_kind(module)), stored_layout(module)
    if getattr(module, "activation_scheme", "dynamic") != "dynamic":
        return "static scales of activations, where recipes find scales in each call"
    if given := [name for name in _OTHERWISE if getattr(module, name, None) is not None]:
        return f"a gated unit with {' and '.join(given)}"
    if (joined := module._parameters.get("gate_up_proj")) is not None and (rows := joined.shape[1] // 2) % 128:
        return f"gate and up of {number_of(rows, 'row')}, whose scales transformers joins as if blocks of 128 ended there"
    if layout is None:
        named = {key: array for key, array in module._parameters.items() if array is not None and key != "bias"}
        return ", ".join(f"{key} {array.dtype} {tuple(array.shape)}" for key, array in named.items()) or "no weight"
    return _why_not_compressed(module, LAYOUTS[layout]) if kind is COMPRESSED else ""


def _why_not_compressed(module: nn.Module, layout: Foreign) -> str:
    arrays = _arrays_of(module, "weight", layout)
    has = {key for key, array in [*module._parameters.items(), *module._buffers.items()] if array is not None}
    if others := sorted(has - {*arrays, "bias"}):
        return f"{' and '.join(others)} beside {' and '.join(arrays)}"
    if getattr(module.quantization_scheme, "output_activations", None) is not None:
        return "a cast of what the layer returns"
    if layout.parts[-1].scale_of is not None and any(array.is_meta for array in arrays.values()):
        return "a global scale without a value, on the meta device"
    try:
        layout.amax("", {part.suffix: array for part, array in zip(layout.parts, arrays.values())})
    except ConversionError:
        return "a global scale that follows from no fp32 amax; import_weights(..., nearest_scale=True) takes the next one"
    return ""


@torch.no_grad()
def hold_stored(module: nn.Module, path: str, dtype: torch.dtype, trains: bool, tied: dict[Ids, nn.Parameter]) -> None:
    """Hold the matrices of a module as stored parameters of the nominal ``dtype``, over the same bytes.

    Gradients are in ``dtype``, and reach a matrix if its codes had ``requires_grad``; ``trains`` says whether they reach one of
    integers, which cannot have it. :func:`stored_kind` knows the module, and :func:`why_not_held` finds nothing.
    tied: the parameters that were made, by the ``id()`` of their arrays, so that modules with one matrix share it again.
    """
    kind, name = stored_kind(module), stored_layout(module)
    if kind is None or name is None:
        return
    held = _Held(type(module), name, {}, {key: vars(module)[key] for key in kind.attributes})
    slots: dict[str, nn.Parameter | None] = {}
    replaced: dict[str, tuple[nn.Parameter, str]] = {}
    for matrix in kind.matrices:
        arrays = _arrays_of(module, matrix, LAYOUTS[name])
        held.matrices[matrix] = [_Array(key, array.dtype, array.requires_grad) for key, array in arrays.items()]
        codes, ids = next(iter(arrays.values())), tuple(map(id, arrays.values()))
        if ids not in tied:
            stored = _stored(f"{path}.{matrix}", LAYOUTS[name], arrays.values(), dtype)
            wanted = codes.requires_grad if codes.dtype.is_floating_point else trains
            tied[ids] = nn.Parameter(stored, requires_grad=wanted)
        slots |= {**dict.fromkeys(arrays), matrix: tied[ids]}
        replaced |= {key: (tied[ids], f"{path}.{key}") for key in arrays}
    if _HELD not in vars(module):  # from here on nothing raises
        module.register_state_dict_post_hook(_write)
        module.register_load_state_dict_pre_hook(_read)
    for key in kind.attributes:
        del vars(module)[key]
    for key, (other, place) in replaced.items():
        mark_replaced(module._parameters.get(key), other, place)
    if kind is COMPRESSED:
        vars(module).pop("forward", None)  # which casts activations around that of nn.Linear
    module._parameters.update(slots)
    vars(module)[_HELD] = held
    module.__class__ = kind.becomes


@torch.no_grad()
def hold_arrays(module: nn.Module, tied: dict[int, list[nn.Parameter]]) -> None:
    """Undo :func:`hold_stored`: a module has arrays again, with the values of the parameters now.

    A parameter that something else was put in the place of, such as plain values or a shard, stays: the library multiplies it.
    tied: the arrays that were made, by the ``id()`` of their parameters, so that modules with one matrix share it again.
    """
    held = _held(module)
    if held is None or not held.matrices:
        return
    stays = False
    for matrix, before in held.matrices.items():
        stored = module._parameters[matrix]
        if isinstance(stored, QuantizedTensor):
            if id(stored) not in tied:
                arrays = _written(LAYOUTS[held.layout], stored, before).values()
                trains = (stored.requires_grad, *[array.trained for array in before[1:]])
                pairs = zip(arrays, trains)
                tied[id(stored)] = [nn.Parameter(a, requires_grad=t and a.dtype.is_floating_point) for a, t in pairs]
            mark_replaced(stored, tied[id(stored)][0], matrix)
            del module._parameters[matrix]
            module._parameters.update(zip([array.key for array in before], tied[id(stored)]))
        else:
            stays = True
    held.matrices.clear()
    module.__class__ = held.kind
    if held.attributes and not stays:
        vars(module).update(held.attributes)
        importlib.import_module("compressed_tensors.quantization.lifecycle.forward").set_forward_quantized(module)


_HOOK = "ct_decompress_hook"
"""The attribute of a model in which compressed-tensors keeps its hook, which decompresses the model at its first call."""


def is_whole(model: nn.Module) -> bool:
    """Whether the hook that decompresses a model's layers is on the model or inside of it, and so can be taken off."""
    return any(_HOOK in vars(module) for module in model.modules())


def decompress_the_rest(model: nn.Module) -> None:
    """Have linear layers that are still as compressed-tensors made them decompressed at the next call of their model.

    So does the library's own hook, which also puts forwards that move weights between devices in the place of all others. It is
    put back once all layers are as the library made them.
    """
    for root in model.modules():
        library: Any = vars(root).get(_HOOK)
        if library is None:
            continue
        compressor = getattr(getattr(root, "hf_quantizer", None), "compressor", None)
        states = {_status(module) for module in root.modules()} - {None}
        library.remove()
        if compressor is not None and states == {_COMPRESSED} and not any(map(_matrices_held, root.modules())):
            compressor.add_decompress_hook(root)
        elif _COMPRESSED in states:
            vars(root)[_HOOK] = root.register_forward_pre_hook(_decompress)


def _decompress(root: nn.Module, _: Any) -> None:
    vars(root)[_HOOK].remove()
    left = {path: module for path, module in root.named_modules() if stored_kind(module) is COMPRESSED}
    compressors = importlib.import_module("compressed_tensors.compressors")
    for module in left.values():
        compressors.decompress_module(module)
    if left:
        paths = f"{', '.join([*left][:3])}{' and others' if len(left) > 3 else ''}"
        got = f"its first call decompresses {paths}, which save_pretrained then writes plain, while config.json says compressed"
        cure = "save the model before its first call, or have fuse_ convert these layers too"
        warnings.warn(notice("a model of compressed-tensors", got=got, cure=cure), OpfuseWarning, stacklevel=2)


def stored_parameters(model: nn.Module) -> dict[str, tuple[QuantizedTensor, tuple[str, ...]]]:
    """The parameters that :func:`hold_stored` made, by name, and the names of their arrays in the state dict of ``model``."""
    return {
        f"{path}.{matrix}".lstrip("."): (
            cast(QuantizedTensor, module._parameters[matrix]),
            tuple(f"{path}.{array.key}".lstrip(".") for array in before),
        )
        for path, module in model.named_modules(remove_duplicate=False)
        for matrix, before in _matrices_held(module).items()
        if isinstance(module._parameters[matrix], QuantizedTensor)
    }


# -- between arrays and planes ---------------------------------------------------------------------------------------------------


def _stored(name: str, layout: Foreign, arrays: Iterable[torch.Tensor], dtype: torch.dtype) -> QuantizedTensor:
    codes, scales, *_ = whole = [*arrays]
    if layout is LAYOUTS["deepseek"] and scales.dtype == E8M0:
        layout = replace(layout, quantizer=_POWERS_OF_TWO)
    matrices = [layout.read(name, each, dtype) for each in _apart(layout, whole)]
    if codes.dim() == 2:
        return matrices[0]
    sizes = (codes.shape[1],) * len(matrices)
    rowwise = GroupedPlane([matrix.held.plane(ROWWISE) for matrix in matrices], sizes)
    storage = QuantizedStorage(codes.shape, dtype, rowwise, None, matrices[0].held.why)
    return QuantizedTensor(storage, quantizer=GroupedQuantizer(tuple([layout.quantizer] * len(matrices))))


_POWERS_OF_TWO = replace(cast(Any, LAYOUTS["deepseek"].quantizer), force_pow_2_scales=True)


def _written(layout: Foreign, stored: QuantizedTensor, before: list[_Array]) -> dict[str, torch.Tensor]:
    """The arrays of a matrix by their names in the module, in the dtypes in which it held them; copies.

    Planes are no plain arrays: one is a transposed copy, scales may be padded. Who writes to arrays of them would write a part.
    """
    sizes = sizes_of(stored.held)
    records = [stored.held] if sizes is None else groups_of(stored.held, sizes)
    found = [[*layout.written("", record).values()] for record in records]
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
    for matrix, before in _matrices_held(module).items():
        stored = state.get(prefix + matrix)
        if isinstance(stored, QuantizedTensor):
            layout = LAYOUTS[cast(_Held, _held(module)).layout]
            arrays = _written(layout, cast(QuantizedTensor, state.pop(prefix + matrix).detach()), before)
            state.update({prefix + key: array for key, array in arrays.items()})


def _read(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """The hook of loading: stored parameters in the place of arrays. Plain values and stored ones are left to the parameter.

    Codes without their scales are no values: the scales are missing then. So torch says of those of other sizes and dtypes.
    """
    _, _, missing, _, errors = others  # beside the metadata and whether loading is strict: keys that are missing and unexpected
    for matrix, before in _matrices_held(module).items():
        layout, keys = LAYOUTS[cast(_Held, _held(module)).layout], [prefix + array.key for array in before]
        codes = state.get(keys[0])
        if codes is None or isinstance(codes, QuantizedTensor) or codes.dtype in DECODED_DTYPES:
            continue
        absent = [key for key in keys if key not in state]
        given = {key: state.pop(key) for key in keys if key in state}
        missing += absent
        parameter = cast(torch.Tensor, module._parameters[matrix])
        stored = None if absent or not _fits(layout, given) else _read_copies(prefix + matrix, layout, given, parameter.dtype)
        if stored is not None and stored.shape == parameter.shape:
            state[prefix + matrix] = stored
        elif not absent:
            got = ", ".join(f"{key} {array.dtype} {tuple(array.shape)}" for key, array in given.items())
            wanted = f"arrays of {cast(_Held, _held(module)).layout} for {tuple(parameter.shape)}"
            errors.append(describe(prefix + matrix, wanted=wanted, got=got, cure="load a checkpoint of this model"))


def _read_copies(name: str, layout: Foreign, given: Mapping[str, torch.Tensor], dtype: torch.dtype) -> QuantizedTensor:
    return _stored(name, layout, [array.detach().clone() for array in given.values()], dtype)
