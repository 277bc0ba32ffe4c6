"""Two checkpoints side by side: which tensors are quantized in which, whose bytes are equal, and why others are not.

A plain weight beside a quantized one, or a high-precision source of both, is cast by every scale rule and from every dtype that
it may have had, until the bytes match. So a difference has a name: a rule, a dtype, or a module that one side left plain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from opfuse.errors import ConversionError, UnsupportedError, describe, differing
from opfuse.formats import E2M1, MXFP4, NumberFormat, dtype_name
from opfuse.inspect.heads import HEADS
from opfuse.interchange.layouts import recognized
from opfuse.numerics.layouts import load_scale
from opfuse.numerics.rules import RULES
from opfuse.numerics.scales import nvfp4_global_scale
from opfuse.tensors.archives import unarchived
from opfuse.tensors.files import from_planes
from opfuse.tensors.groups import GroupedPlane
from opfuse.tensors.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8RowQuantizer,
    MXFP4Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from opfuse.tensors.storage import Plane
from opfuse.tensors.tensor import QuantizedTensor

EQUAL, CAST = "equal", "equal after the cast"
PARTS = ("code", "scale", "global scale")
"""Names of the arrays of a quantized weight, for messages; scales are compared first."""


@dataclass(frozen=True, eq=False)
class Compared:
    """A tensor as a checkpoint has it: ``arrays`` are its values, or codes, scales and global scale of ``format``."""

    arrays: tuple[torch.Tensor, ...]
    format: NumberFormat | None = None

    def __str__(self) -> str:
        return str(self.format or dtype_name(self.arrays[0].dtype))


class Verdict(NamedTuple):
    """The comparison of one tensor. status: EQUAL, CAST, or what differs. left, right: dtype or format on each side, ``-`` if it
    is missing there. why: a reason, if one was found.
    """

    name: str
    status: str
    left: str
    right: str
    why: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether both sides compute with the same bytes."""
        return self.status in (EQUAL, CAST)


def compare(
    model: Mapping[str, torch.Tensor],
    checkpoint: Mapping[str, torch.Tensor],
    *,
    source: Mapping[str, torch.Tensor] | None = None,
    cast: bool = False,
    plain: Collection[str] = tuple(HEADS),
) -> list[Verdict]:
    """A verdict for each tensor that ``model`` or ``checkpoint`` has, in layouts of opfuse or of :data:`layouts.LAYOUTS`.

    source: values in high precision that quantized weights are casts of. cast: plain weights of ``model`` are cast in each call,
    all but those of modules whose last name is in ``plain``: a cast that gives the bytes of ``checkpoint`` is no difference.
    """
    left, right, origin = tensors_of(model), tensors_of(checkpoint), tensors_of(source or {})
    names = {**left, **right}
    return [_verdict(name, left.get(name), right.get(name), origin.get(name), _is_cast(name, plain) and cast) for name in names]


def tensors_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Compared]:
    """Each tensor of a checkpoint by its name in the model."""
    found = {}
    rest = dict(from_planes(tensors))
    for path, foreign, arrays in recognized(rest):
        codes, scales = foreign.lines(arrays)
        read = scales.to(torch.float32) if foreign.format.scale == "fp32" else scales.view(torch.uint8)
        found[path + foreign.weight] = Compared(
            (codes.view(torch.uint8), read, *foreign.global_scale(path, arrays)), foreign.format
        )
        for part in foreign.parts:
            del rest[foreign.name(path, part)]
    for name, value in rest.items():
        if isinstance(value, QuantizedTensor):
            found[name] = _of_plane(value.record.plane(value.usages[0]))
        elif isinstance(value, torch.Tensor):
            found[name] = Compared((value,))
    return found


def _of_plane(plane: Plane) -> Compared:
    """Its arrays; of groups that were cast apart, one below the other."""
    if isinstance(plane, GroupedPlane):
        parts = [_of_plane(member) for member in plane.members]
        return Compared(tuple(map(torch.cat, zip(*(part.arrays for part in parts)))), parts[0].format)
    scale = cast(torch.Tensor, plane.scale)
    scales = scale if plane.format.family == "tensor" else load_scale(scale, plane.layout).contiguous()
    overall = () if plane.amax is None else (nvfp4_global_scale(plane.amax, plane.format.encode_max),)
    return Compared((plane.data, scales, *overall), plane.format.as_stored)


def _is_cast(name: str, plain: Collection[str]) -> bool:
    path, _, last = name.rpartition(".")
    return last == "weight" and path.rpartition(".")[2] not in plain


def _verdict(name: str, left: Compared | None, right: Compared | None, origin: Compared | None, casts: bool) -> Verdict:
    shown = str(left or "-"), str(right or "-")
    if left is None or right is None:
        return Verdict(name, f"only in {'CHECKPOINT' if left is None else 'MODEL'}", *shown)
    if (left.format is None) != (right.format is None):
        status, why = _one_sided(left, right, casts)
    else:
        status, why = _compared(left, right, origin)
    return Verdict(name, status, *shown, why)


def _one_sided(left: Compared, right: Compared, casts: bool) -> tuple[str, str]:
    """Status and reason where one side is quantized."""
    plain, other = (left, right) if left.format is None else (right, left)
    found = origin_of(plain.arrays[0], other)
    if casts and plain is left and found:
        return CAST, found
    side = "CHECKPOINT" if plain is left else "MODEL"
    return f"quantized only in {side}", found or "no rule makes its bytes of the plain values"


def _compared(left: Compared, right: Compared, origin: Compared | None) -> tuple[str, str]:
    """Status and reason for two plain tensors, or two quantized ones."""
    if left.format != right.format:
        return "formats differ", ""
    if [array.shape for array in left.arrays] != [array.shape for array in right.arrays]:
        return "shapes differ", " beside ".join(str(tuple(each.arrays[0].shape)) for each in (left, right))
    if all(map(same_bytes, left.arrays, right.arrays)):
        return EQUAL, ""
    if left.format is None:
        return "values differ", _of_values(left.arrays[0], right.arrays[0])
    return "bytes differ", _of_bytes(left, right, origin)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal in dtype, shape and every bit."""
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bytes(one), _bytes(other))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def _of_values(left: torch.Tensor, right: torch.Tensor) -> str:
    """Why plain values differ: one is the other in a wider dtype, or how many do."""
    for wide, narrow, side in ((left, right, "CHECKPOINT"), (right, left, "MODEL")):
        if wide.dtype != narrow.dtype and same_bytes(wide.to(narrow.dtype), narrow):
            return f"{side} has the values rounded to {narrow.dtype}"
    wrong = left.double() != right.double()
    return f"{differing(int(wrong.sum()), wrong.numel(), 'value')}, first at {_first(wrong)}"


def _of_bytes(left: Compared, right: Compared, origin: Compared | None) -> str:
    """Why quantized bytes differ: by what each side is a cast of, else by the first array that differs."""
    if origin is not None and origin.format is None:
        found = [origin_of(origin.arrays[0], side) or "no rule from the source" for side in (left, right)]
        if found[0] != found[1]:
            return f"MODEL: {found[0]}; CHECKPOINT: {found[1]}"
    order = (1, 2, 0)[: len(left.arrays)] if len(left.arrays) > 2 else (1, 0)
    differences = []
    for i in order:
        wrong = left.arrays[i] != right.arrays[i]
        if wrong.any():
            differences.append(f"{differing(int(wrong.sum()), wrong.numel(), PARTS[i])}, first at {_first(wrong)}")
    kinds = [_kind(side) for side in (left, right)]
    return "; ".join(([f"scales are {kinds[0]} beside {kinds[1]}"] if kinds[0] != kinds[1] else []) + differences)


def _kind(side: Compared) -> str:
    """What fp32 scales are, which tells rules apart without a source."""
    scales = side.arrays[1]
    return "codes" if scales.dtype == torch.uint8 else "powers of two" if not (_mantissas(scales)).any() else "any fp32"


def _mantissas(scales: torch.Tensor) -> torch.Tensor:
    return scales.contiguous().view(torch.int32) & 0x7FFFFF


def _first(wrong: torch.Tensor) -> list[int]:
    return cast(list[int], wrong.nonzero()[0].tolist())


# -- what bytes are the cast of ----------------------------------------------------------------------------------------------


def origin_of(values: torch.Tensor, side: Compared) -> str | None:
    """The rules whose casts of ``values`` have these bytes, and the dtype that they were rounded to before; None if none do."""
    if values.dim() == 3 and side.format == MXFP4:
        values = values.mT.flatten(0, 1)  # (experts, in, out), which are stored in columns
    if values.dim() != 2 or not values.is_floating_point():
        return None
    for dtype in dict.fromkeys((values.dtype, torch.bfloat16, torch.float16)):
        x = values.to(dtype)
        if found := [name for name, quantizer in _casts(cast(NumberFormat, side.format)) if _makes(quantizer, x, side)]:
            return f"rule {' or '.join(found)}, from {dtype_name(dtype)}"
    return None


def _makes(quantizer: Quantizer, x: torch.Tensor, side: Compared) -> bool:
    if not quantizer.is_quantizable(x):
        return False
    made = _of_plane(quantizer.quantize(x).plane("rowwise"))
    return made.format == side.format and all(map(same_bytes, made.arrays, side.arrays))


def _casts(fmt: NumberFormat) -> Iterator[tuple[str, Quantizer]]:
    """Every cast to a format that has a rule, with its name."""
    rowwise: dict[str, Any] = {"columnwise": False}
    if fmt.family == "nv":
        for tiles in (False, True):
            yield f"te{' (16x16 tiles)' * tiles}", NVFP4Quantizer(with_2d_quantization=tiles, **rowwise)
        return
    makers = {"tensor": Float8CurrentScalingQuantizer, "row": Float8RowQuantizer, "block": Float8BlockQuantizer}
    for name, rule in RULES.items():
        if fmt.family not in rule.ways or fmt.element is None:
            continue
        if fmt.element == E2M1:
            yield name, MXFP4Quantizer(scale_rule=name, **rowwise)
            continue
        if fmt.family == "mx":
            for tiles in (False, True):
                made = MXFP8Quantizer(fmt.element.dtype, scale_rule=name, with_2d_quantization=tiles, **rowwise)
                yield f"{name}{' (32x32 tiles)' * tiles}", made
            continue
        more = {"block_scaling_dim": 1 if fmt.block == (1, 128) else 2} if fmt.family == "block" else {}
        for pow2 in rule.ways[fmt.family].powers:
            label = f"{name} (powers of two)" if pow2 else name
            yield label, makers[fmt.family](fmt.element.dtype, scale_rule=name, force_pow_2_scales=pow2, **more, **rowwise)


# -- files -------------------------------------------------------------------------------------------------------------------


def load(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint: a .safetensors, .pt, .pth or .bin file, or a directory of them. ConversionError for others."""
    files = sorted(file for file in path.iterdir() if file.suffix in _READERS) if path.is_dir() else [path]
    kinds = [file for file in files if file.suffix == ".safetensors"] or files
    if not kinds or any(file.suffix not in _READERS or not file.is_file() for file in kinds):
        got = "nothing" if not path.exists() else "another file" if path.is_file() else "a directory without one"
        raise ConversionError(describe(str(path), wanted=f"a file of {', '.join(_READERS)}", got=got, cure="name a checkpoint"))
    return {name: value for file in kinds for name, value in _READERS[file.suffix](file).items()}


def _safetensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        cure = "pip install safetensors"
        raise UnsupportedError(describe(str(file), wanted="the package safetensors", got="none", cure=cure)) from None
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ConversionError(describe(str(file), wanted="a whole file", got=str(error), cure="write it again")) from error


def _pickled(file: Path) -> dict[str, torch.Tensor]:
    try:
        return cast(dict[str, torch.Tensor], unarchived(file))
    except Exception as error:
        got = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConversionError(describe(str(file), wanted="a state dict", got=got, cure="write one with torch.save")) from error


_READERS = {".safetensors": _safetensors, ".pt": _pickled, ".pth": _pickled, ".bin": _pickled}
