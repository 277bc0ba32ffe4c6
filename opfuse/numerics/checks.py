"""Checks of what casts are given, before a kernel reads or writes it.

A kernel computes addresses from layouts, and reads memory as fp32 whatever is there. So it would write outside of a plane if a
layout were wrong, and read another number if a dtype were.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch

from opfuse.errors import DtypeError, QuantizerError, describe
from opfuse.numerics.layouts import Layout

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that casts read."""


def check_planes(shape: Sequence[int], layouts: Sequence[Layout], *, where: str) -> None:
    """QuantizerError unless ``layouts`` are planes of a tensor (..., columns) of ``shape``, seen as a matrix (rows, columns).

    One plane or two, of different usages, of one format and one order of scales; only one of them may be rotated. where: names
    the cast in the error.
    """
    matrix = (math.prod(shape[:-1]), shape[-1]) if len(shape) else ()
    if not layouts:
        raise _refused(where, "one plane or two", "none", "name the planes to make")
    first, usages = layouts[0], {layout.usage for layout in layouts}
    for layout in layouts:
        if layout.shape != matrix:
            raise _refused(where, f"planes of {matrix}", f"a layout of {layout.shape}", "make it for the tensor's shape")
        if not (_same_but_rotated(layout, first) and layout.swizzled == first.swizzled):
            got = " and ".join(f"{each.format}{' swizzled' * each.swizzled}" for each in (first, layout))
            raise _refused(where, "planes of one format and one order of scales", got, "cast once for each")
    if len(usages) != len(layouts):
        raise _refused(where, "one plane for each usage", [layout.usage for layout in layouts], "ask for each plane once")


def _same_but_rotated(a: Layout, b: Layout) -> bool:
    return a.format == b.format or a.format.replace(rht=()) == b.format.replace(rht=())


def check_cast(shape: Sequence[int], dtype: torch.dtype, layouts: Sequence[Layout], *, family: str, where: str) -> None:
    """:func:`check_planes` of a matrix, in formats of ``family``; DtypeError unless the matrix is fp32, bf16 or fp16."""
    check_matrix(shape, dtype, where=where)
    check_planes(shape, layouts, where=where)
    if layouts[0].format.family != family:
        raise _refused(where, f"planes of the family {family!r}", layouts[0].format, "use the cast of that format")


def check_matrix(shape: Sequence[int], dtype: torch.dtype, *, where: str) -> None:
    """QuantizerError unless ``shape`` is that of a matrix, DtypeError unless kernels read ``dtype``."""
    check_dtype(dtype, where=where)
    if len(shape) != 2:
        raise _refused(where, "a matrix", f"the shape {tuple(shape)}", "flatten its leading dimensions")


def check_dtype(dtype: torch.dtype, *, where: str) -> None:
    """DtypeError unless kernels read ``dtype``."""
    if dtype not in DTYPES:
        raise DtypeError(describe(where, wanted=", ".join(map(str, DTYPES)), got=dtype, cure="convert the tensor first"))


def check_choice(value: object, known: Collection[object], *, where: str) -> None:
    """QuantizerError unless ``value`` is one of ``known``."""
    if value not in known:
        raise _refused(where, f"one of {', '.join(map(repr, known))}", repr(value), "pass one of these")


def check_array(value: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, where: str) -> None:
    """QuantizerError unless ``value`` is a contiguous array of this shape and dtype on ``device``."""
    if value.dtype != dtype or value.shape != shape or value.device != device or not value.is_contiguous():
        layout = "" if value.is_contiguous() else ", not contiguous"
        got = f"{value.dtype} {tuple(value.shape)} on {value.device}{layout}"
        raise _refused(where, f"{dtype} {tuple(shape)} on {device}, contiguous", got, "pass an array made for this call")


def check_amaxes(amaxes: Sequence[torch.Tensor], layouts: Sequence[Layout], device: torch.device, *, where: str) -> None:
    """QuantizerError unless there is the amax of each plane, fp32, contiguous, on ``device``."""
    _check_amaxes(amaxes, [layout.amax_shape or () for layout in layouts], device, where, "amaxes_nv")


def check_lines(amaxes: Sequence[torch.Tensor], layouts: Sequence[Layout], device: torch.device, *, where: str) -> None:
    """QuantizerError unless there are the amaxes of each plane's lines, fp32, contiguous, on ``device``."""
    _check_amaxes(amaxes, [layout.lines[:1] for layout in layouts], device, where, "line_amaxes")


def _check_amaxes(
    amaxes: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]], device: torch.device, where: str, source: str
) -> None:
    if len(amaxes) != len(shapes):
        raise _refused(where, f"{len(shapes)} amaxes, one for each plane", len(amaxes), f"take what {source} gives")
    for amax, shape in zip(amaxes, shapes):
        check_array(amax, shape, torch.float32, device, where=f"{where} amax")


def require_number(value: torch.Tensor, device: torch.device, *, where: str) -> None:
    """QuantizerError unless ``value`` is one fp32 number on ``device``: a kernel would misread anything else."""
    if value.dtype != torch.float32 or value.numel() != 1 or value.device != device:
        got, cure = f"{value.dtype} {tuple(value.shape)} on {value.device}", f"make it with torch.ones(1, device={str(device)!r})"
        raise _refused(where, f"fp32 (1,) on {device}", got, cure)


def check_number(value: torch.Tensor, device: torch.device, *, where: str) -> int:
    """The address of one fp32 number on ``device``, as by :func:`require_number`."""
    require_number(value, device, where=where)
    return value.data_ptr()


def _refused(where: str, wanted: object, got: object, cure: str) -> QuantizerError:
    return QuantizerError(describe(where, wanted=wanted, got=got, cure=cure))
