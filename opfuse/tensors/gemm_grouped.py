"""The three products of a grouped linear layer: those of a linear layer, for each group of rows with a weight of its own.

Groups are multiplied one after another, or all in one launch: in high precision by torch's grouped product, if only the device
knows their sizes or if that is faster; in FP8 by the package's own product, where there is one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard, cast

import torch

from opfuse.kernels.casts.dequantize import dequantize_groups
from opfuse.kernels.engine.launch import host_call, is_capturing
from opfuse.kernels.products import grouped
from opfuse.numerics.row_groups import RowGroups
from opfuse.tensors.gemm import (
    GEMMS,
    Operand,
    add_product,
    add_products,
    gemm,
    gemm_of_groups,
    gemm_of_runs,
    wgrad_into,
    wgrad_of_runs,
)
from opfuse.tensors.groups import Sizes, groups_of, written
from opfuse.tensors.ragged import copied_to, groups_in
from opfuse.tensors.storage import QuantizedStorage

Weights = torch.Tensor | Sequence[Operand]
"""The weight (N, K) of each group; plain ones may be one tensor (G, N, K)."""


class Groups(NamedTuple):
    """Rows of each group: numbers, or None and an integer tensor (G,) that only the device knows."""

    sizes: Sizes | None
    splits: torch.Tensor | None = None

    def ends(self, device: torch.device, rows: int) -> torch.Tensor:
        """int32 (G,) on ``device``: where each group ends."""
        if self.sizes is None:
            return grouped.ends_of(copied_to(cast(torch.Tensor, self.splits), device), rows)
        sizes = self.sizes

        def ends() -> Sequence[torch.Tensor]:
            if is_capturing():  # a graph would copy from where the host had them, and has them no more
                return [written(sizes, torch.int32, device).cumsum(0, dtype=torch.int32)]
            counted = [*itertools.accumulate(sizes)]
            return [torch.tensor(counted, dtype=torch.int32, device="cpu").to(device, non_blocking=True)]

        (made,) = host_call(ends)  # a repeated call makes them anew: they are numbers of the host
        return made


def takes_device_splits(x: Operand, weights: Weights) -> bool:
    """Whether the products of ``x`` and ``weights`` can be made without the host knowing the sizes."""
    listed = [weights] if isinstance(weights, torch.Tensor) else weights
    return isinstance(x, torch.Tensor) and _plain(listed) and grouped.takes([x], listed)


def grouped_rows(
    name: str,
    left: Operand,
    weights: Weights,
    groups: Groups,
    *,
    dtype: torch.dtype,
    out_dtype: torch.dtype | None = None,
    **options: Any,
) -> torch.Tensor:
    """fprop or dgrad: rows (..., N) or (..., K) of ``left`` times the weight of their group. Types and options are ``gemm``'s."""
    leading, width = left.shape[:-1], weights[0].shape[0 if name == "fprop" else 1]
    if isinstance(left, QuantizedStorage) and (runs := groups_in(left)) is not None:
        fast, rights = options.get("fast", False), cast(list[QuantizedStorage], weights)
        return gemm_of_runs(name, left, rights, runs, out_dtype=out_dtype or dtype, fast=fast).reshape(*leading, width)
    taken = out_dtype in (None, dtype) and not options.get("invariant") and takes_device_splits(left, weights)
    apart = not isinstance(weights, torch.Tensor)
    if groups.sizes is None or (taken and grouped.is_faster(name, groups.sizes, cast(torch.Tensor, weights[0]), apart=apart)):
        stacked = weights if isinstance(weights, torch.Tensor) else _stacked(weights, GEMMS[name].right_plane, dtype)
        return _in_one_launch(name, left, stacked, groups).reshape(*leading, width)
    there = [group for group in zip(_split(left, groups.sizes), weights, groups.sizes) if group[2]]
    if (rows := _quantized(name, there, out_dtype=out_dtype or dtype, **options)) is None:
        rows = torch.empty(sum(groups.sizes), width, dtype=out_dtype or dtype, device=left.device)
        for (piece, weight, _), out in zip(there, rows.split([size for *_, size in there])):
            gemm(name, piece, weight, dtype=dtype, out_dtype=out_dtype, out=out, **options)
    return rows.reshape(*leading, width)


def grouped_wgrad(
    dy: Operand,
    x: Operand,
    groups: Groups,
    *,
    wanted: Collection[int],
    dtype: torch.dtype,
    out_dtype: torch.dtype | None = None,
    **options: Any,
) -> torch.Tensor | list[torch.Tensor | None]:
    """dW (N, K) of each group, None for groups that are not ``wanted``; or of all as one (G, N, K).

    dW of a group without rows is exactly zero. An ``out_dtype`` other than ``dtype`` needs sizes that the host knows.
    """
    if _is_ragged(x) and not _is_ragged(dy):  # beside a gradient in high precision, as an override wants
        x = cast(QuantizedStorage, x).dequantize(dtype)
    call = WgradCall(dy, x, groups, wanted, dtype, out_dtype, options)
    run = next(run for refusal, run in WGRADS if not refusal(call))
    return run(call)


class WgradCall(NamedTuple):
    """The arguments of :func:`grouped_wgrad`."""

    dy: Operand
    x: Operand
    groups: Groups
    wanted: Collection[int]
    dtype: torch.dtype
    out_dtype: torch.dtype | None
    options: Mapping[str, Any]


def _is_ragged(operand: Operand) -> bool:
    """Whether planes hold groups whose sizes only the device knows."""
    return isinstance(operand, QuantizedStorage) and groups_in(operand) is not None


def _not_ragged(call: WgradCall) -> str:
    ragged = _is_ragged(call.dy) and isinstance(call.x, QuantizedStorage)
    return "" if ragged else "its operands are not planes of groups whose sizes only the device knows"


def _ragged_wgrad(call: WgradCall) -> torch.Tensor:
    dy, x = cast(QuantizedStorage, call.dy), cast(QuantizedStorage, call.x)
    runs, out_dtype = cast(RowGroups, groups_in(dy)), call.out_dtype or call.dtype
    return wgrad_of_runs(dy, x, runs, out_dtype=out_dtype, fast=call.options.get("fast", False))


def _not_at_once(call: WgradCall) -> str:
    if call.groups.sizes is None:
        return ""  # nothing else can
    if len(call.wanted) < len(call.groups.sizes):
        return "not every group is wanted"
    operands = call.dy, call.x
    fast = call.out_dtype in (None, call.dtype) and _plain(operands) and grouped.takes(operands)
    return "" if fast else "no grouped product takes the operands"


def _wgrad_at_once(call: WgradCall) -> torch.Tensor:
    x = call.x.dequantize(call.dtype) if isinstance(call.x, QuantizedStorage) else call.x
    return _in_one_launch("wgrad", call.dy, x.reshape(-1, x.shape[-1]), call.groups)


def _wgrad_by_group(call: WgradCall) -> torch.Tensor | list[torch.Tensor | None]:
    """The groups that have rows: in one launch if they are quantized so, else one after another. The others are zero."""
    dy, x, sizes, out_dtype = call.dy, call.x, cast(Sizes, call.groups.sizes), call.out_dtype or call.dtype
    shape = dy.shape[-1], x.shape[-1]
    pairs = [*zip(_split(dy, sizes), _split(x, sizes))]
    filled = [i for i, size in enumerate(sizes) if size and i in call.wanted]
    stacked = _quantized("wgrad", [(*pairs[i], shape[0]) for i in filled], out_dtype=out_dtype, **call.options)
    if stacked is not None and len(filled) == len(pairs):
        return stacked.view(-1, *shape)
    options = {"dtype": call.dtype, "out_dtype": call.out_dtype, **call.options}
    one_by_one = (gemm("wgrad", *pairs[i], **options) for i in filled)
    products = dict(zip(filled, one_by_one if stacked is None else stacked.view(-1, *shape)))
    empty = {i: torch.zeros(shape, dtype=out_dtype, device=dy.device) for i in call.wanted if i not in products}
    return [products.get(i, empty.get(i)) for i in range(len(pairs))]


WGRADS: Sequence[tuple[Callable[[WgradCall], str], Callable[[WgradCall], torch.Tensor | list[torch.Tensor | None]]]] = (
    (_not_ragged, _ragged_wgrad),
    (_not_at_once, _wgrad_at_once),
    (lambda _: "", _wgrad_by_group),
)
"""Ways to compute :func:`grouped_wgrad`, the first that can: why it cannot, an empty string if it can, and what runs."""


def add_wgrads(
    dy: Operand,
    x: Operand,
    sizes: Sizes,
    buffers: Mapping[int, torch.Tensor],
    *,
    whole: torch.Tensor | None = None,
    fast: bool = False,
) -> set[int]:
    """Add dW of groups to their ``buffers``, (N, K) in fp32, where the product can add and that saves time; the groups done.

    One launch for each group, or one for all if the buffers are those of all groups and parts of ``whole``, (G, N, K).
    """
    if not isinstance(dy, QuantizedStorage) or not isinstance(x, QuantizedStorage):
        return set()
    pairs = dict(enumerate(zip(_split(dy, sizes), _split(x, sizes))))
    there = [i for i in buffers if sizes[i]]
    idle = set(buffers).difference(there)  # to which nothing is added
    if whole is not None and whole.is_contiguous() and len(there) == len(pairs):
        dys, xs = zip(*(pairs[i] for i in there))
        if add_products("wgrad", dys, xs, whole.flatten(0, 1), fast=fast):
            return {*there, *idle}
    return {i for i in there if add_product("wgrad", *pairs[i], buffers[i], fast=fast)} | idle


def add_wgrads_of_runs(
    dy: Operand, x: Operand, added: Mapping[int, torch.Tensor], new: Mapping[int, torch.Tensor], *, fast: bool = False
) -> None:
    """dW of groups whose sizes only the device knows: added to the buffers ``added``, written to ``new``, (N, K) in fp32.

    One launch for either. A group without rows leaves a buffer in ``added`` as it is.
    """
    left, right = cast(QuantizedStorage, dy), cast(QuantizedStorage, x)
    runs = cast(RowGroups, groups_in(left))
    for buffers, accumulate in ((added, True), (new, False)):
        if buffers:
            wgrad_into(left, right, runs, buffers, accumulate=accumulate, fast=fast)


def _quantized(name: str, groups: Sequence[tuple[Operand, Operand, int]], **options: Any) -> torch.Tensor | None:
    """The products of groups of (left, right, rows of the result), if they are made in one launch."""
    return gemm_of_groups(name, *zip(*groups), **options) if groups else None


def _plain(operands: Sequence[Operand]) -> TypeGuard[Sequence[torch.Tensor]]:
    return all(isinstance(operand, torch.Tensor) for operand in operands)


def _split(operand: Operand, sizes: Sizes) -> Sequence[Operand]:
    if isinstance(operand, QuantizedStorage):
        return groups_of(operand, sizes)
    parts: Sequence[torch.Tensor] = operand.reshape(-1, operand.shape[-1]).split(sizes)
    return parts


def _stacked(weights: Sequence[Operand], usage: str, dtype: torch.dtype) -> torch.Tensor:
    """The values of weights in one tensor (G, N, K): of a quantized one those of its plane ``usage``, or of the only one."""
    if _plain(weights):
        return torch.stack(list(weights))
    planes = [
        weight.plane(usage if usage in weight.usages else weight.usages[0])
        for weight in cast(Sequence[QuantizedStorage], weights)
    ]
    stored = [(plane.data, cast(torch.Tensor, plane.scale), plane.amax, plane.layout) for plane in planes]
    return dequantize_groups(stored, dtype=dtype).view(-1, *weights[0].shape)


def _in_one_launch(name: str, left: Any, right: torch.Tensor, groups: Groups) -> torch.Tensor:
    rows: torch.Tensor = left.reshape(-1, left.shape[-1])
    return grouped.multiply(name, rows, right, groups.ends(rows.device, len(rows)))
