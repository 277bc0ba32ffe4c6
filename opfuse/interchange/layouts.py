"""Weights as other libraries write and read them: names and arrays in files, converted from and to planes bit for bit.

:data:`LAYOUTS` is a table: DeepSeek's block FP8, schemes of compressed-tensors, which vLLM and transformers read as well, and the
experts of GPT-OSS. Weights that live quantized in its format are written as they are; plain ones are cast by the layout's
scale rule. Arrays that do not fit are refused by name. :data:`READ` also has a layout that is read and not written: ModelOpt's
NVFP4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, cast

import torch

from opfuse.errors import ConversionError, describe, nearest
from opfuse.formats import COLUMNWISE, E2M1, E4M3, NVFP4, ROWWISE, NumberFormat, Usage
from opfuse.numerics.layouts import Layout, layout_of, load_scale, store_scale
from opfuse.numerics.scales import divide, nvfp4_global_scale
from opfuse.tensors.groups import GroupedPlane
from opfuse.tensors.planes import mirrored
from opfuse.tensors.quantizers import (
    Float8BlockQuantizer,
    Float8RowQuantizer,
    GroupedQuantizer,
    MXFP4Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from opfuse.tensors.storage import Plane, QuantizedStorage
from opfuse.tensors.tensor import QuantizedTensor

FP8 = torch.float8_e4m3fn


class Part(NamedTuple):
    """An array of a weight in a file: the last part of its name, its dtype, and how it is made of a plane.

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
    config: the ``quantization_config`` of a model whose modules of these names stay plain. usage: the plane that it stores.

    ``path`` is what the names of a weight's arrays begin with; that of a linear layer is the module's.
    """

    parts: tuple[Part, ...]
    quantizer: Quantizer
    config: Callable[[list[str]], dict[str, Any]]
    usage: ClassVar[Usage] = ROWWISE
    weight: ClassVar[str] = ".weight"
    """What a parameter's name has after the path."""
    separator: ClassVar[str] = "."
    """What stands between the path and the suffix of an array."""

    @property
    def format(self) -> NumberFormat:
        """The format of the rowwise plane."""
        return self.quantizer.formats[0]

    def name(self, path: str, part: Part) -> str:
        """The name of an array in a file."""
        return f"{path}{self.separator}{part.suffix}"

    def written(self, path: str, record: QuantizedStorage) -> dict[str, torch.Tensor]:
        """The arrays of a weight by their names in a file; they share memory with ``record`` where they can."""
        plane = record.plane(self.usage)
        return {self.name(path, part): _as(part.written(plane), part.dtype) for part in self.parts}

    def paths(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
        """The paths of weights that a file may have in this layout: of scales, and of codes, whose scales may be missing."""
        scales = {part.suffix for part in self.parts[1:]}
        for name, array in tensors.items():
            path, _, last = name.rpartition(".")
            if last in scales or (last == "weight" and array.dtype == FP8):
                yield path

    def arrays(self, path: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Those of a weight that a file has, by suffix."""
        return {part.suffix: tensors[name] for part in self.parts if (name := self.name(path, part)) in tensors}

    def lines(self, arrays: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales with the lines of the plane as rows; those of several matrices one below the other."""
        codes, scales = (arrays[part.suffix] for part in self.parts[:2])
        return codes, scales

    def layout(self, codes: torch.Tensor) -> Layout:
        """The layout of the plane whose codes are given, (lines, bytes)."""
        lines = codes.shape[0], codes.shape[1] * 8 // cast(Any, self.format.element).bits
        return layout_of(self.format, self.usage, lines if self.usage == ROWWISE else lines[::-1])

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
        """The weight of arrays that fit. The columnwise plane holds the same values, or is their cast, or there is none; where it
        is the rowwise bytes, transposed, the backward pass makes it, so that a weight takes no more memory than its arrays.
        """
        codes, scales = (arrays[part.suffix] for part in self.parts[:2])
        rowwise = self._plane(codes, scales, self.amax(path, arrays, nearest=nearest))
        storage = QuantizedStorage(torch.Size(rowwise.shape), dtype, rowwise, None)
        if rowwise.is_mirror or not self.quantizer.columnwise:
            why = "it is made of the rowwise bytes" if rowwise.is_mirror else "its cast from four bits would err by as much again"
            return QuantizedTensor(replace(storage, why=why), quantizer=self.quantizer)
        columnwise = mirrored(rowwise) if self.quantizer.planes_agree else self._columnwise(storage.dequantize(torch.float32))
        why = "its rows cannot be cut into blocks"
        return QuantizedTensor(QuantizedStorage(storage.shape, dtype, rowwise, columnwise, why), quantizer=self.quantizer)

    def _plane(self, codes: torch.Tensor, scales: torch.Tensor, amax: torch.Tensor | None = None) -> Plane:
        layout = self.layout(codes)
        wide = scales.to(torch.float32) if layout.format.scale == "fp32" else scales.view(torch.uint8)
        return Plane(self.usage, layout.format, layout.shape, codes.view(torch.uint8), store_scale(wide, layout), amax)

    def _columnwise(self, values: torch.Tensor) -> Plane | None:
        quantizer = self.quantizer.wanting(rowwise=False)
        return quantizer.quantize(values).plane(COLUMNWISE) if quantizer.is_quantizable(values) else None


@dataclass(frozen=True)
class ForeignStack(Foreign):
    """How GPT-OSS stores the matrices of all experts, which one parameter (experts, in, out) holds.

    Codes are (experts, out, blocks of in, bytes of a block), scales (experts, out, blocks of in): each matrix is the columnwise
    plane of its part of the parameter.
    """

    usage: ClassVar[Usage] = COLUMNWISE
    weight: ClassVar[str] = ""
    separator: ClassVar[str] = "_"

    def paths(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
        """Those of bytes: others may have such names for arrays of their own."""
        ends = {f"{self.separator}{part.suffix}": part.dtype for part in self.parts}
        for name, array in tensors.items():
            for end, dtype in ends.items():
                if name.endswith(end) and _is_of(array, dtype):
                    yield name.removesuffix(end)

    def fits(self, arrays: Mapping[str, torch.Tensor]) -> bool:
        if len(arrays) < len(self.parts):
            return False
        codes, scales = (arrays[part.suffix] for part in self.parts)
        width = self.format.multiple * cast(Any, self.format.element).bits // 8
        known = all(_is_of(arrays[part.suffix], part.dtype) for part in self.parts)
        return known and codes.dim() == 4 and codes.shape[-1] == width and codes.shape[:-1] == scales.shape and codes.numel() > 0

    def lines(self, arrays: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = super().lines(arrays)
        return codes.flatten(2).flatten(0, 1), scales.flatten(0, 1)

    def read(
        self, path: str, arrays: Mapping[str, torch.Tensor], dtype: torch.dtype, *, nearest: bool = False
    ) -> QuantizedTensor:
        """The parameter (experts, in, out) over the bytes of arrays that fit; it has columnwise data alone."""
        codes, scales = (arrays[part.suffix] for part in self.parts)
        members = [self._plane(*pair) for pair in zip(codes.flatten(2), scales)]
        rows, columns = members[0].shape
        plane, why = GroupedPlane(members, (rows,) * len(members)), "its blocks run along what the product sums"
        storage = QuantizedStorage(torch.Size((len(members), rows, columns)), dtype, None, plane, why)
        return QuantizedTensor(storage, quantizer=GroupedQuantizer((self.quantizer,) * len(members), rowwise=False))

    def stacked(self, path: str, records: Sequence[QuantizedStorage]) -> dict[str, torch.Tensor]:
        """The arrays of the matrices of all experts by their names in a file."""
        found = [[*self.written(path, record).values()] for record in records]
        codes, scales = (torch.stack(arrays) for arrays in zip(*found))
        return {self.name(path, part): array for part, array in zip(self.parts, (codes.view(*scales.shape, -1), scales))}


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


def _gpt_oss(ignored: list[str]) -> dict[str, Any]:
    """As transformers' ``Mxfp4Config`` writes itself."""
    return {"quant_method": "mxfp4", "modules_to_not_convert": ignored}


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
        "mxfp4": Foreign(
            (Part("weight_packed", torch.uint8, _codes), Part("weight_scale", torch.uint8, _scales)),
            MXFP4Quantizer(scale_rule="compressed_tensors", columnwise=False),
            _scheme("mxfp4-pack-quantized", {**_MX_ARGS, "num_bits": 4}, None),
        ),
        "gpt_oss": ForeignStack(
            (Part("blocks", torch.uint8, _codes), Part("scales", torch.uint8, _scales)),
            MXFP4Quantizer(rowwise=False),
            _gpt_oss,
        ),
    }
)
"""By name: DeepSeek's; FP8_BLOCK, FP8_DYNAMIC, MXFP8, NVFP4A16 and MXFP4A16 of compressed-tensors; GPT-OSS's."""

OF_LINEAR_LAYERS = tuple(name for name, foreign in LAYOUTS.items() if not isinstance(foreign, ForeignStack))
"""Those that store the matrix of a linear layer, or of one expert."""

_MODELOPT = (
    Part("weight", torch.uint8, _codes),
    Part("weight_scale", FP8, _scales),
    Part("weight_scale_2", torch.float32, lambda plane: _decode(cast(torch.Tensor, plane.amax)), _decode),
)
READ: Mapping[str, Foreign] = MappingProxyType({**LAYOUTS, "modelopt": replace(LAYOUTS["nvfp4"], parts=_MODELOPT)})
"""Those, and what is read alone: readers of ModelOpt's NVFP4 want scales of activations, which a calibration finds."""

OF_ACTIVATIONS = ("input_scale", "input_global_scale")
"""Arrays beside a quantized weight that no recipe reads: it finds scales of activations in each call."""

OF_CACHES = tuple(
    f"{of}_{what}" for of in ("k", "v", "q", "kv", "prob", "output") for what in ("scale", "zero_point", "global_scale")
)
"""Last names of arrays that say how an engine quantizes its cache of keys and values, which training does not have: those of an
attention layer, or of what its projections put out.
"""


def is_of_cache(name: str) -> bool:
    """Whether an array of a file belongs to the cache of an engine, and to no weight."""
    return name.rpartition(".")[2] in OF_CACHES


# -- what files hold ---------------------------------------------------------------------------------------------------------


def recognized(
    tensors: Mapping[str, torch.Tensor], layout: str | None = None
) -> Iterator[tuple[str, Foreign, dict[str, torch.Tensor]]]:
    """Each quantized weight: its module's path, its layout, and its arrays by suffix. Errors of :func:`import_weights`."""
    known = dict(READ) if layout is None else {layout: layout_named(layout, READ)}
    paths = {(each.separator, path): None for each in known.values() for path in each.paths(tensors)}
    for separator, path in paths:
        alike = [each for each in known.values() if each.separator == separator]
        found = [(each, each.arrays(path, tensors)) for each in alike]
        fitting = next(((each, arrays) for each, arrays in found if each.fits(arrays)), None)
        if fitting is None:
            there = {suffix: array for _, arrays in found for suffix, array in arrays.items()}
            shapes = ", ".join(f"{suffix} {there[suffix].dtype} {tuple(there[suffix].shape)}" for suffix in sorted(there))
            cure = "pass all of the file's tensors, and name their layout"
            raise ConversionError(describe(path, wanted=f"a weight in one of {', '.join(known)}", got=shapes, cure=cure))
        yield path, *fitting


def values_of(foreign: Foreign, path: str, arrays: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Plain values; of NVFP4 by the scale of the file itself, which need follow from no amax."""
    part = foreign.parts[-1]
    if part.scale_of is None:
        return foreign.read(path, arrays, torch.float32).dequantize().to(dtype)
    unscaled = foreign.read(path, {**arrays, part.suffix: part.scale_of(torch.full((1,), _LARGEST))}, torch.float32).dequantize()
    overall = arrays[part.suffix].to(torch.float32)
    return (unscaled / overall if part.scale_of is _encode else unscaled * overall).to(dtype)


def layout_named(layout: str, known: Mapping[str, Foreign]) -> Foreign:
    if layout not in known:
        read = "write nvfp4, whose readers need no calibration; " if layout in READ else ""
        cure, got = f"{read}use one of {', '.join(known)}", f"{layout!r}{nearest(layout, known)}"
        raise ConversionError(describe("layout", wanted="a layout", got=got, cure=cure))
    return known[layout]
