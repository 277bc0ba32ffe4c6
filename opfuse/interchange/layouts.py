"""Weights as other libraries write and read them: names and arrays in files, converted from and to planes bit for bit.

:data:`LAYOUTS` is a table: DeepSeek's block FP8, and schemes of compressed-tensors, which vLLM and transformers read as well.
Weights that live quantized in the layout's format are written as they are; plain ones are cast by the layout's scale rule. Arrays
that do not fit are refused by name. :data:`READ` also has a layout that is read and not written: ModelOpt's NVFP4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch

from opfuse.errors import ConversionError, describe, nearest
from opfuse.formats import COLUMNWISE, E2M1, E4M3, NVFP4, ROWWISE, NumberFormat
from opfuse.numerics.layouts import Layout, layout_of, load_scale, store_scale
from opfuse.numerics.scales import divide, nvfp4_global_scale
from opfuse.tensors.planes import mirrored
from opfuse.tensors.quantizers import Float8BlockQuantizer, Float8RowQuantizer, MXFP8Quantizer, NVFP4Quantizer, Quantizer
from opfuse.tensors.storage import Plane, QuantizedStorage
from opfuse.tensors.tensor import QuantizedTensor

FP8 = torch.float8_e4m3fn
_WEIGHT = ".weight"


class Part(NamedTuple):
    """An array of a weight in a file: its suffix after the module's name, its dtype, and how it is made of a plane.

    scale_of: for the scale of a whole weight, how it follows from the global amax, which opfuse keeps instead.
    """

    suffix: str
    dtype: torch.dtype
    written: Callable[[Plane], torch.Tensor]
    scale_of: Callable[[torch.Tensor], torch.Tensor] | None = None


def _codes(plane: Plane) -> torch.Tensor:
    return plane.data


def _scales(plane: Plane) -> torch.Tensor:
    return load_scale(cast(torch.Tensor, plane.scale), plane.layout).contiguous()


def _encode(amax: torch.Tensor) -> torch.Tensor:
    """The global encode scale, by which values are multiplied before their cast."""
    return nvfp4_global_scale(amax, NVFP4.encode_max)


def _decode(amax: torch.Tensor) -> torch.Tensor:
    """The global decode scale, by which cast values are multiplied."""
    return divide(amax, _LARGEST)


_LARGEST = NVFP4.encode_max * E2M1.max


@dataclass(frozen=True)
class Foreign:
    """How a library stores a weight.

    parts: its arrays: codes, scales, and the global encode scale where the format has one. quantizer: how plain weights are cast.
    config: the ``quantization_config`` of a model whose modules of these names stay plain.
    """

    parts: tuple[Part, ...]
    quantizer: Quantizer
    config: Callable[[list[str]], dict[str, Any]]

    @property
    def format(self) -> NumberFormat:
        """The format of the rowwise plane."""
        return self.quantizer.formats[0]

    def written(self, path: str, record: QuantizedStorage) -> dict[str, torch.Tensor]:
        """The arrays of a weight by their names in a file; they share memory with ``record`` where they can."""
        plane = record.plane(ROWWISE)
        return {f"{path}.{part.suffix}": _as(part.written(plane), part.dtype) for part in self.parts}

    def layout(self, codes: torch.Tensor) -> Layout:
        """The layout of the plane whose codes are given."""
        return layout_of(self.format, ROWWISE, (codes.shape[0], codes.shape[1] * 8 // cast(Any, self.format.element).bits))

    def fits(self, arrays: Mapping[str, torch.Tensor]) -> bool:
        """Whether ``arrays``, by suffix, are those of a weight in this layout, by their dtypes and shapes."""
        if not all(part.suffix in arrays for part in self.parts):
            return False
        codes, scales = (arrays[part.suffix] for part in self.parts[:2])
        if codes.dim() != 2 or not _is_of(codes, self.parts[0].dtype) or not _is_of(scales, self.parts[1].dtype):
            return False
        layout = self.layout(codes)
        return layout.lines[1] % self.format.multiple == 0 and tuple(scales.shape) == layout.blocks

    def amax(self, path: str, arrays: Mapping[str, torch.Tensor], *, nearest: bool = False) -> torch.Tensor | None:
        """The global amax that the file's scale follows from, if the format has one; ``nearest``: see :func:`import_weights`."""
        part = self.parts[-1]
        return None if part.scale_of is None else _amax_of(path, part, arrays[part.suffix], nearest=nearest)

    def global_scale(self, path: str, arrays: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The global encode scale, if the format has one, in a tuple."""
        part = self.parts[-1]
        if part.scale_of is None or part.scale_of is _encode:
            return () if part.scale_of is None else (arrays[part.suffix],)
        return (_encode(_amax_of(path, part, arrays[part.suffix], nearest=True)),)

    def read(
        self, path: str, arrays: Mapping[str, torch.Tensor], dtype: torch.dtype, *, nearest: bool = False
    ) -> QuantizedTensor:
        """The weight of arrays that fit. The columnwise plane holds the same values, or is their cast; where it is the rowwise
        bytes, transposed, the backward pass makes it, so that a weight takes no more memory than its arrays.
        """
        codes, scales = (arrays[part.suffix] for part in self.parts[:2])
        layout = self.layout(codes)
        wide = scales.to(torch.float32) if layout.format.scale == "fp32" else scales.view(torch.uint8)
        amax = self.amax(path, arrays, nearest=nearest)
        rowwise = Plane(ROWWISE, layout.format, layout.shape, codes.view(torch.uint8), store_scale(wide, layout), amax)
        storage = QuantizedStorage(torch.Size(layout.shape), dtype, rowwise, None)
        if rowwise.is_mirror:
            return QuantizedTensor(replace(storage, why="it is made of the rowwise bytes"), quantizer=self.quantizer)
        columnwise = mirrored(rowwise) if self.quantizer.planes_agree else self._columnwise(storage.dequantize(torch.float32))
        why = "its rows cannot be cut into blocks"
        return QuantizedTensor(QuantizedStorage(storage.shape, dtype, rowwise, columnwise, why), quantizer=self.quantizer)

    def _columnwise(self, values: torch.Tensor) -> Plane | None:
        quantizer = self.quantizer.wanting(rowwise=False)
        return quantizer.quantize(values).plane(COLUMNWISE) if quantizer.is_quantizable(values) else None


def _as(array: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return array if array.dtype == dtype else array.view(dtype)


_WIDER = {torch.float32: (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)}
_BYTES = (torch.uint8, torch.float8_e8m0fnu)


def _is_of(array: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether an array has ``dtype``, or what is read as it: narrower scales, E8M0 codes under their own name."""
    return array.dtype in (_BYTES if dtype == torch.uint8 else _WIDER.get(dtype, (dtype,)))


def _amax_of(path: str, part: Part, stored: torch.Tensor, *, nearest: bool) -> torch.Tensor:
    """The global amax whose scale is ``stored``, that with the most trailing zero bits; ConversionError if there is none.

    nearest: also accept one whose scale is a neighbouring fp32 number.
    """
    scale_of, wanted = cast(Any, part.scale_of), stored.reshape(1).to(torch.float32)
    about = _LARGEST / wanted if scale_of is _encode else _LARGEST * wanted
    amaxes = (about.view(torch.int32) + torch.arange(-4, 5, dtype=torch.int32, device=stored.device)).view(torch.float32)
    apart = (scale_of(amaxes).view(torch.int32) - wanted.view(torch.int32)).abs()
    found = amaxes[apart == apart.min()]
    if not wanted.isfinite() or wanted <= 0 or apart.min() > nearest:
        cure = "pass dequantize=True, which reads the values, or nearest_scale=True, which moves the last bit of such scales"
        got = wanted.item()
        raise ConversionError(describe(f"{path}.{part.suffix}", wanted="the scale of some fp32 amax", got=got, cure=cure))
    bits = found.view(torch.int32)
    return found[(bits & -bits).argmax()].reshape(1)


# -- the table ---------------------------------------------------------------------------------------------------------------


def _deepseek(ignored: list[str]) -> dict[str, Any]:
    """As DeepSeek-V3's config.json has it."""
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return config | ({"modules_to_not_convert": ignored} if ignored else {})


def _scheme(kind: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> Callable[[list[str]], dict[str, Any]]:
    """A ``quantization_config`` of compressed-tensors with one group for all linear layers."""

    def args(given: dict[str, Any]) -> dict[str, Any]:
        return {"type": "float", "symmetric": True, "dynamic": False, **given}

    def config(ignored: list[str]) -> dict[str, Any]:
        activations = None if inputs is None else args({"dynamic": True, **inputs})
        group = {"targets": ["Linear"], "weights": args(weights), "input_activations": activations, "format": kind}
        state = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "format": kind}
        return state | {"config_groups": {"group_0": group}, "ignore": ignored}

    return config


_EXACT: dict[str, Any] = {"scale_rule": "compressed_tensors", "force_pow_2_scales": False}
_TWO = (Part("weight", FP8, _codes), Part("weight_scale", torch.float32, _scales))
_MX_ARGS = {"num_bits": 8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}

LAYOUTS: Mapping[str, Foreign] = MappingProxyType(
    {
        "deepseek": Foreign(
            (Part("weight", FP8, _codes), Part("weight_scale_inv", torch.float32, _scales)),
            Float8BlockQuantizer(E4M3.dtype, scale_rule="deepgemm", force_pow_2_scales=False),
            _deepseek,
        ),
        "fp8_block": Foreign(
            _TWO,
            Float8BlockQuantizer(E4M3.dtype, **_EXACT),
            _scheme(
                "float-quantized",
                {"num_bits": 8, "strategy": "block", "block_structure": [128, 128]},
                {"num_bits": 8, "strategy": "group", "group_size": 128},
            ),
        ),
        "fp8_dynamic": Foreign(
            _TWO,
            Float8RowQuantizer(E4M3.dtype, **_EXACT),
            _scheme("float-quantized", {"num_bits": 8, "strategy": "channel"}, {"num_bits": 8, "strategy": "token"}),
        ),
        "mxfp8": Foreign(
            (Part("weight", FP8, _codes), Part("weight_scale", torch.uint8, _scales)),
            MXFP8Quantizer(scale_rule="compressed_tensors"),
            _scheme("mxfp8-quantized", _MX_ARGS, _MX_ARGS),
        ),
        "nvfp4": Foreign(
            (
                Part("weight_packed", torch.uint8, _codes),
                Part("weight_scale", FP8, _scales),
                Part("weight_global_scale", torch.float32, lambda plane: _encode(cast(torch.Tensor, plane.amax)), _encode),
            ),
            NVFP4Quantizer(),
            _scheme(
                "nvfp4-pack-quantized",
                {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
                None,  # a global scale of activations would want calibration
            ),
        ),
    }
)
"""By name: DeepSeek's, then FP8_BLOCK, FP8_DYNAMIC, MXFP8 and NVFP4A16 of compressed-tensors."""

_MODELOPT = (
    Part("weight", torch.uint8, _codes),
    Part("weight_scale", FP8, _scales),
    Part("weight_scale_2", torch.float32, lambda plane: _decode(cast(torch.Tensor, plane.amax)), _decode),
)
READ: Mapping[str, Foreign] = MappingProxyType({**LAYOUTS, "modelopt": replace(LAYOUTS["nvfp4"], parts=_MODELOPT)})
"""Those, and what is read alone: readers of ModelOpt's NVFP4 want scales of activations, which a calibration finds."""

OF_ACTIVATIONS = ("input_scale", "input_global_scale")
"""Arrays beside a quantized weight that no recipe reads: it finds scales of activations in each call."""

# -- what files hold ---------------------------------------------------------------------------------------------------------


def recognized(
    tensors: Mapping[str, torch.Tensor], layout: str | None = None
) -> Iterator[tuple[str, Foreign, dict[str, torch.Tensor]]]:
    """Each quantized weight: its module's path, its layout, and its arrays by suffix. Errors of :func:`import_weights`."""
    known = dict(READ) if layout is None else {layout: layout_named(layout, READ)}
    for path, arrays in _weights(tensors, known):
        foreign = next((layout for layout in known.values() if layout.fits(arrays)), None)
        if foreign is None:
            shapes = ", ".join(f"{suffix} {array.dtype} {tuple(array.shape)}" for suffix, array in arrays.items())
            cure = "pass all of the file's tensors, and name their layout"
            raise ConversionError(describe(path, wanted=f"a weight in one of {', '.join(known)}", got=shapes, cure=cure))
        yield path, foreign, arrays


def values_of(foreign: Foreign, path: str, arrays: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Plain values; of NVFP4 by the scale of the file itself, which need follow from no amax."""
    part = foreign.parts[-1]
    if part.scale_of is None:
        return foreign.read(path, arrays, torch.float32).dequantize().to(dtype)
    unscaled = foreign.read(path, {**arrays, part.suffix: part.scale_of(torch.full((1,), _LARGEST))}, torch.float32).dequantize()
    overall = arrays[part.suffix].to(torch.float32)
    return (unscaled / overall if part.scale_of is _encode else unscaled * overall).to(dtype)


def _weights(tensors: Mapping[str, torch.Tensor], known: Mapping[str, Foreign]) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Each module whose weight is quantized, with its arrays by suffix."""
    scales = {part.suffix for foreign in known.values() for part in foreign.parts[1:]}
    suffixes = {part.suffix for foreign in known.values() for part in foreign.parts}
    paths = {name.rpartition(".")[0]: None for name in tensors if name.rpartition(".")[2] in scales}
    codes = {name.removesuffix(_WEIGHT): None for name, each in tensors.items() if name.endswith(_WEIGHT) and each.dtype == FP8}
    paths |= codes  # also those whose scales are missing, which fit no layout
    for path in paths:
        yield path, {suffix: tensors[f"{path}.{suffix}"] for suffix in sorted(suffixes) if f"{path}.{suffix}" in tensors}


def layout_named(layout: str, known: Mapping[str, Foreign]) -> Foreign:
    if layout not in known:
        read = "write nvfp4, whose readers need no calibration; " if layout in READ else ""
        cure, got = f"{read}use one of {', '.join(known)}", f"{layout!r}{nearest(layout, known)}"
        raise ConversionError(describe("layout", wanted="a layout", got=got, cure=cure))
    return known[layout]
