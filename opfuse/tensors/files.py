"""Quantized tensors in files that hold plain tensors only, as safetensors: plane by plane, and back, bit for bit.

``0.weight`` becomes ``0.weight.rowwise.data``, ``.scale`` and, where the format has one, ``.amax``; likewise ``.columnwise``.
Planes in groups are ``0.weight.rowwise.members.0.data`` and so on. An array that two planes share is there once, under its first
name. ``0.weight.planes`` is a JSON text, as bytes: the record without its arrays, its quantizer, and the CRC-32 of all of it, by
which damage to a file is an error and never another value. Plain tensors in such files have no checksum, as safetensors has none.

A file is untrusted. Its JSON is read by the names of a fixed table and through constructors that check their fields. Kernels
read as far as a layout says, so every array is compared with the layout that the text claims before a tensor is made of it.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields
from typing import Any, get_args, get_type_hints

import torch

from opfuse.domains import checked_arguments
from opfuse.errors import QuantizedTensorError, describe
from opfuse.formats import DTYPES, USAGES, Element, NumberFormat, dtype_name
from opfuse.tensors import quantizers
from opfuse.tensors.groups import GroupedPlane
from opfuse.tensors.masters import stored_in
from opfuse.tensors.planes import known_format, with_formats
from opfuse.tensors.quantizers.base import Quantizer, zero_plane
from opfuse.tensors.storage import Plane, QuantizedStorage
from opfuse.tensors.tensor import QuantizedTensor

VERSION = 1
_TEXT = ".planes"
_MARK = b'{"opfuse": '
_CHECKSUM = "crc32"
_ARRAY = re.compile(rf"(.+)\.({'|'.join(USAGES)})(\.members\.\d+)?\.data")
"""What the array of a plane is called, which no file has without its text."""

_FAMILIES = get_args(get_type_hints(NumberFormat)["family"])
_QUANTIZERS = [getattr(quantizers, name) for name in quantizers.__all__ if name not in ("Quantizer", "ForeignQuantizer")]
_CLASSES: dict[str, Any] = {
    cls.__name__: cls for cls in (QuantizedStorage, Plane, GroupedPlane, NumberFormat, Element, *_QUANTIZERS)
}
_MADE: dict[str, Callable[..., Any]] = _CLASSES | {
    "QuantizedStorage": lambda shape, **others: QuantizedStorage(torch.Size(shape), **others),
    "dtype": lambda name: DTYPES[name],
    "Format": NumberFormat,  # what files called it at first
}
"""What makes a value of a text, by the name of its type. A text names nothing else."""

_UNSAID = "pow2"
"""A field of formats that no text has: the arrays say it."""

_FORMER: dict[str, Callable[[Any], tuple[str, Any]]] = {
    "scale_rounding": lambda rounding: ("scale_rule", {"ceil": "te", "floor": "ocp_floor"}[rounding]),
}
"""Fields that texts of earlier versions have, and what they are now."""


@checked_arguments(QuantizedTensorError)
def to_planes(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with each quantized tensor as the plain tensors of its planes, which share its memory; others as they are.

    Their bytes are read by the host, for a checksum of each quantized tensor: about half a second per GiB.

    Your own quantizers, and those over a process group, are not saved: such a tensor, once loaded, takes bytes, not values.
    QuantizedTensorError for a sharded quantized tensor, and for one in groups of sizes that only a device knows.
    """
    found: dict[str, Any] = {}
    for name, value in state_dict.items():
        if not isinstance(value, torch.Tensor) or not isinstance(stored_in(value), QuantizedTensor):
            found[name] = value
        elif isinstance(value, QuantizedTensor):
            found |= {name + part: array for part, array in _apart(value).items()}
        else:
            cure = "gather it first: value.full_tensor(); or save the shards with torch.distributed.checkpoint"
            raise QuantizedTensorError(describe(f"to_planes {name}", wanted="a whole tensor", got="a shard of one", cure=cure))
    return found


@checked_arguments(QuantizedTensorError)
def from_planes(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """What :func:`to_planes` took apart, put together again; other entries as they are.

    Ops call it themselves when they load; for other modules call it first. QuantizedTensorError for planes that are incomplete,
    that differ from what their text says, or whose bytes changed since :func:`to_planes`.
    """
    found = dict(state_dict)
    put_together(found)
    return found


def put_together(state_dict: MutableMapping[str, Any], prefix: str = "") -> None:
    """:func:`from_planes` in place, of the names that begin with ``prefix``."""
    for key in [key for key in state_dict if key.startswith(prefix) and key.endswith(_TEXT) and _is_text(state_dict[key])]:
        name = key.removesuffix(_TEXT)
        try:
            made = _together(name, state_dict)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
            raise _no_record(name, f"{type(error).__name__}: {error}") from error
        for part in _apart(made):
            del state_dict[name + part]
        state_dict[name] = made
    for key, value in state_dict.items():
        if key.startswith(prefix) and (found := _ARRAY.fullmatch(key)) and not getattr(value, "is_meta", True):
            raise _no_record(found[1], f"{key} without the text {found[1]}{_TEXT}")


def _no_record(name: str, got: str) -> QuantizedTensorError:
    cure = "load all tensors that to_planes made, as they were saved"
    return QuantizedTensorError(describe(f"planes of {name}", wanted="a whole record", got=got, cure=cure))


def _apart(tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
    """The plain tensors of one, by what is added to its name."""
    _ = tensor.record.structure  # which raises for planes that the host cannot describe
    arrays: dict[str, torch.Tensor] = {}
    record = _described(tensor.record, "", arrays)
    own: dict[str, torch.Tensor] = {}
    try:
        quantizer = _described(tensor.quantizer, ".quantizer", own)
    except TypeError:
        quantizer, own = None, {}
    arrays |= own
    said = {"record": record, "quantizer": quantizer}
    text = json.dumps({"opfuse": VERSION, _CHECKSUM: _checksum(said, arrays), **said})
    return {part: array.detach().contiguous() for part, array in arrays.items()} | {
        _TEXT: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(tensor.device)
    }


def _checksum(said: Mapping[str, Any], arrays: Mapping[str, torch.Tensor]) -> str:
    """The CRC-32 of a record, its quantizer and its arrays; of the texts alone on the meta device."""
    found = zlib.crc32(json.dumps([said["record"], said["quantizer"]]).encode())
    for _, array in sorted(arrays.items()):
        if not array.is_meta:
            found = zlib.crc32(array.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data, found)
    return f"{found:08x}"


def _described(value: Any, path: str, arrays: dict[str, torch.Tensor]) -> Any:
    """``value`` in what JSON has, its arrays put into ``arrays`` by the path to them. TypeError for what no text can say."""
    if isinstance(value, torch.Tensor):
        known = next((name for name, array in arrays.items() if array is value), path)
        arrays[known] = value
        return {"array": known}
    if _CLASSES.get(type(value).__name__) is type(value):
        names = [field.name for field in fields(value) if field.name != _UNSAID]
        names = ["members", "sizes"] if isinstance(value, GroupedPlane) else names
        said = {name: _described(getattr(value, name), f"{path}.{name}", arrays) for name in names}
        return {"type": type(value).__name__, **said}
    if isinstance(value, tuple):
        return [_described(each, f"{path}.{i}", arrays) for i, each in enumerate(value)]
    if isinstance(value, torch.dtype):
        return {"type": "dtype", "name": dtype_name(value)}
    if isinstance(value, torch.device):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(type(value).__name__)


def _is_text(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or value.dtype != torch.uint8 or value.ndim != 1 or value.is_meta:
        return False
    return bytes(value[: len(_MARK)].tolist()) == _MARK


def _together(name: str, arrays: Mapping[str, Any]) -> QuantizedTensor:
    text = json.loads(bytes(arrays[name + _TEXT].tolist()))
    if text["opfuse"] != VERSION:
        raise ValueError(f"version {text['opfuse']}, where this opfuse reads {VERSION}")
    storage = _checked(_restored(text["record"], name, arrays), QuantizedStorage)
    for usage, plane in ((usage, getattr(storage, usage)) for usage in USAGES):
        if plane is None:
            continue
        _check(_checked(plane, Plane), usage)
        rows, columns = plane.shape
        if rows * columns != storage.shape.numel() and (columns != storage.shape[-1] or rows < storage.matrix_shape[0]):
            raise ValueError(f"a {usage} plane of shape {plane.shape} in a tensor of shape {tuple(storage.shape)}")
    quantizer = _restored(text["quantizer"], name, arrays)
    quantizer = None if quantizer is None else _checked(quantizer, Quantizer)
    made = QuantizedTensor(_with_known_scales(storage, quantizer), quantizer=quantizer)
    if text.get(_CHECKSUM) not in (None, _checksum(text, {part: arrays[name + part] for part in _arrays_of(text)})):
        raise ValueError("damaged data: the CRC-32 is not that of what was saved")  # texts of earlier versions have none
    return made


def _with_known_scales(storage: QuantizedStorage, quantizer: Quantizer | None) -> QuantizedStorage:
    """The same bytes; planes say of their scales what is so, and stays so under a quantizer that writes to them."""
    stays = USAGES if quantizer is None else [usage for usage, fmt in zip(USAGES, quantizer.formats) if fmt.pow2]
    return with_formats(storage, {usage: known_format(storage.plane(usage)) for usage in storage.usages if usage in stays})


def _arrays_of(said: Any) -> Iterator[str]:
    """The arrays that a text speaks of, by what is added to the tensor's name."""
    if isinstance(said, dict) and said.keys() == {"array"}:
        yield said["array"]
        return
    for each in said.values() if isinstance(said, dict) else said if isinstance(said, list) else ():
        yield from _arrays_of(each)


def _restored(said: Any, name: str, arrays: Mapping[str, Any]) -> Any:
    """The inverse of :func:`_described`."""
    if isinstance(said, list):
        return tuple(_restored(each, name, arrays) for each in said)
    if not isinstance(said, dict):
        return said
    if said.keys() == {"array"}:
        return _checked(arrays[name + said["array"]], torch.Tensor)
    fields_ = dict(_FORMER[field](each) if field in _FORMER else (field, each) for field, each in said.items() if field != "type")
    return _MADE[said["type"]](**{field: _restored(each, name, arrays) for field, each in fields_.items()})


def _check(plane: Plane, usage: str) -> None:
    """ValueError unless the arrays of ``plane`` are those that its layout speaks of: kernels read what a layout says."""
    if isinstance(plane, GroupedPlane):
        fits = all(_checked(each, Plane).shape[1] == plane.shape[1] for each in plane.members)
        if not fits or not all(each.shape[0] >= size for each, size in zip(plane.members, plane.sizes, strict=True)):
            raise ValueError(f"groups of shapes {[each.shape for each in plane.members]} for sizes {plane.sizes}")
        for each in plane.members:
            _check(each, usage)
        return
    if plane.usage != usage or len(plane.shape) != 2 or min(_checked(size, int) for size in plane.shape) < 0:
        raise ValueError(f"a {plane.usage} plane of shape {plane.shape} as the {usage} one")
    if plane.format.family == "identity":
        if plane.data.numel() != plane.shape[0] * plane.shape[1] or plane.scale is not None or plane.amax is not None:
            raise ValueError(f"data of shape {tuple(plane.data.shape)} for {plane.shape}")
        return
    if _checked(plane.format, NumberFormat).family not in _FAMILIES:
        raise ValueError(f"a format of the family {plane.format.family!r}")
    layout = plane.layout
    wanted, got = ([_signature(each) for each in (p.data, p.scale, p.amax)] for p in (zero_plane(layout, "meta"), plane))
    if wanted != got:
        raise ValueError(f"{usage} arrays {got} where {plane.format} has {wanted}")


def _signature(array: torch.Tensor | None) -> object:
    return None if array is None else (tuple(array.shape), str(array.dtype))


def _checked(value: Any, wanted: type) -> Any:
    if not isinstance(value, wanted):
        raise TypeError(f"{type(value).__name__} where a {wanted.__name__} was saved")
    return value
