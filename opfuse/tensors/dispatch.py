"""What every aten operation does to a quantized tensor: one table, and one rule for everything that is not in it.

A handler takes the operator, the quantized tensor and the other arguments. It returns NotImplemented where the record cannot
express the result; then, as for any operator without a handler, the operation runs on the dequantized values.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from opfuse.errors import OpfuseWarning, QuantizedTensorError, describe, notice
from opfuse.tensors import exchange
from opfuse.tensors.copied_view import copied_views, written
from opfuse.tensors.groups import groups_of, sizes_of
from opfuse.tensors.partial_writes import RowSpan
from opfuse.tensors.planes import decoded, formats_of, map_tensors, with_shape
from opfuse.tensors.quantized import Quantized
from opfuse.tensors.rows import cat_rows, slice_rows, zero_rows
from opfuse.tensors.shards import amaxes
from opfuse.torch_private.dispatch import arguments_of
from opfuse.torch_private.operations import tree_map

aten = torch.ops.aten

DECODED_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_SLICE = "rows cut from a larger tensor"
_STEPPED = notice(
    "a step on weights stored in low precision",
    got="each update is rounded to their format at once, so small ones are lost",
    cure="optimizer = opfuse.with_masters(optimizer), which keeps what is lost; or filter this OpfuseWarning",
)


def run(cls: type[Quantized], func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of ``func``, by its handler or on dequantized values."""
    if func.is_view and torch.is_inference_mode_enabled() and not args[0].is_inference():
        with torch.inference_mode(False), torch.no_grad():  # a view of a normal tensor is one too, and shares its version
            return run(cls, func, args, kwargs)
    handler = HANDLERS.get(func)
    if handler is not None and isinstance(args[0], (cls, list, tuple)):
        result = handler(func, *args, **kwargs)
        if result is not NotImplemented:
            return result
    return compute(cls, func, args, kwargs)


def compute(cls: type[Quantized], func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on dequantized values and cast what it wrote back into the quantized tensors it wrote to.

    Nothing is run if one of these cannot be written. QuantizedTensorError if ``func`` changes the shape of one. Views of what was
    decoded refuse writes, which would not arrive.
    """
    targets: list[Quantized] = written(cls, func, args, kwargs)
    for tensor in targets:
        if "c10d" in func.namespace:
            exchange.refuse(func, func, args, tensor)
        tensor.check_writable(str(func))
    aliases = any(argument.alias_info is not None for argument in arguments_of(func))
    plain: dict[int, torch.Tensor] = {}

    def lower(x: Any) -> Any:
        if not isinstance(x, cls):
            return x
        if id(x) not in plain:
            plain[id(x)] = decoded(x.record) if aliases else x.record.dequantize()
        return plain[id(x)]

    result = func(*tree_map(lower, tuple(args)), **tree_map(lower, kwargs))
    for tensor in targets:
        shape = plain[id(tensor)].shape
        if shape != tensor.shape:
            where, cure = f"{func} on {tensor!r}", "dequantize() it first"
            raise QuantizedTensorError(describe(where, wanted="an unchanged shape", got=tuple(shape), cure=cure))
    for tensor in targets:
        tensor.quantize_(plain[id(tensor)])
    if any(fmt.family != "identity" for tensor in targets for fmt in formats_of(tensor.record).values()):
        _WRITES.count += 1
        _watch_steps()
    wrappers = {id(plain[id(tensor)]): tensor for tensor in targets}
    result = tree_map(lambda x: wrappers.get(id(x), x), result)
    return copied_views(result) if func.is_view else result


class _Writes(threading.local):
    """How often operations of this thread have written what is stored in low precision, and how often until its last step."""

    count = 0
    seen = 0


_WRITES = _Writes()


@functools.cache
def _watch_steps() -> None:
    """From the first such write on, which may be in a step: nobody else pays for the hooks."""
    register_optimizer_step_pre_hook(lambda *_: setattr(_WRITES, "seen", _WRITES.count))
    register_optimizer_step_post_hook(_tell_of_step)


def _tell_of_step(*_: Any) -> None:
    """OpfuseWarning if a step of an optimizer wrote so. Masters are not written here, nor are their weights."""
    if _WRITES.count > _WRITES.seen:
        _WRITES.seen = _WRITES.count
        warnings.warn(_STEPPED, OpfuseWarning, stacklevel=3)


def _alias(func: Any, t: Quantized, *_: Any, **__: Any) -> Any:
    return t.over(t.held, readonly=t.readonly)


def _itself(func: Any, t: Quantized) -> Any:
    return t


def _reshape(func: Any, t: Quantized, *args: Any) -> Any:
    """Keep the record under another shape of the same elements, if the last dimension stays, or if it becomes flat."""
    shape = func(_without_values(t), *args).shape
    if len(shape) != 1 and shape[-1:] != t.record.plane(t.usages[0]).shape[-1:]:
        return NotImplemented
    return t.over(with_shape(t.record, shape), readonly=t.readonly)


def _as_strided(func: Any, t: Quantized, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Any:
    same = tuple(size) == tuple(t.shape) and tuple(stride) == t.stride() and not storage_offset
    return _alias(func, t) if same else NotImplemented


def _rows(t: Quantized, start: int, stop: int) -> Any:
    if (start, stop) == (0, t.shape[0]):
        return _alias(None, t)
    storage = slice_rows(
        t._storage if t.partial_rows else t.record, start, stop
    )  # of a tensor that has not all rows yet, to write more
    if storage is None:
        return NotImplemented
    piece = t.over(storage, readonly=_SLICE, quantizer=t.quantizer and t.quantizer.of_groups(start, stop))
    whole, before = (t, 0) if t.row_span is None else t.row_span[:2]
    piece.row_span = RowSpan(whole, before + start, before + stop)
    return piece


def _slice(func: Any, t: Quantized, dim: int = 0, start: int | None = None, end: int | None = None, *step: int) -> Any:
    if dim not in (0, -t.dim()) or step not in ((), (1,)):
        return NotImplemented
    first, last, _ = slice(start, end).indices(t.shape[0])
    return _rows(t, first, last)


def _split(func: Any, t: Quantized, sizes: int | Sequence[int], dim: int = 0) -> Any:
    """All pieces as quantized tensors, or none."""
    if dim not in (0, -t.dim()):
        return NotImplemented
    lengths = [len(piece) for piece in func(torch.empty(t.shape[0], device="meta"), sizes)]
    stops = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    pieces = [_rows(t, stop - length, stop) for length, stop in zip(lengths, stops)]
    return NotImplemented if any(piece is NotImplemented for piece in pieces) else pieces


def _group(t: Quantized, index: int) -> Any:
    """One matrix of a stack whose matrices were cast apart, over the very bytes, to be read and written; None of another."""
    sizes = sizes_of(t.held)
    if sizes is None or t.dim() != 3 or sizes != (t.shape[1],) * t.shape[0]:
        return None
    of_groups = getattr(t.quantizer, "quantizers", ())
    return t.over(groups_of(t.held, sizes)[index], readonly=t.readonly, quantizer=of_groups[index] if of_groups else None)


def _unbind(func: Any, t: Quantized, dim: int = 0) -> Any:
    groups = [_group(t, i) for i in range(t.shape[0])] if dim in (0, -t.dim()) else []
    return groups if groups and groups[0] is not None else NotImplemented


def _select(func: Any, t: Quantized, dim: int, index: int) -> Any:
    """One matrix of a stack of matrices."""
    count = t.shape[0]
    if dim not in (0, -t.dim()) or t.dim() < 3 or not -count <= index < count:
        return NotImplemented
    if (group := _group(t, index % count)) is not None:
        return group
    piece = _rows(t, index % count, index % count + 1)
    return piece if piece is NotImplemented else t.over(with_shape(piece.record, t.shape[1:]), readonly=_SLICE)


def _cat(func: Any, tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
    """Rows of quantized tensors, one below the other, keep their bytes where their blocks do not reach into each other."""
    if dim not in (0, -tensors[0].dim()) or not all(isinstance(each, Quantized) for each in tensors):
        return NotImplemented
    whole: list[Quantized] = [*tensors]  # type: ignore[list-item]
    storage = cat_rows([each.record for each in whole])
    return NotImplemented if storage is None else whole[0].over(storage)


def _clone(func: Any, t: Quantized, *, memory_format: Any = None) -> Any:
    return t.over(map_tensors(t.record, torch.clone))


def _to_copy(func: Any, t: Quantized, **options: Any) -> Any:
    """Planes are copied to another device as they are; for another dtype the values are decoded."""
    dtype = options.get("dtype") or t.dtype
    if dtype != t.dtype:
        return func(t.record.dequantize(dtype if dtype in DECODED_DTYPES else t.dtype), **options)
    device, non_blocking = options.get("device") or t.device, options.get("non_blocking", False)
    return t.over(map_tensors(t.record, lambda plane: plane.to(device, non_blocking=non_blocking, copy=True)))


def _copy_(func: Any, t: Quantized, source: torch.Tensor, non_blocking: bool = False) -> Any:
    return t.quantize_(source if source.shape == t.shape else source.expand(t.shape))


def _foreach_copy_(
    func: Any, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], non_blocking: bool = False
) -> None:
    """Copy each source; the amaxes of all casts that share scales over ranks are found in one collective."""
    found = amaxes(targets, sources)
    for i, (target, source) in enumerate(zip(targets, sources)):
        if i in found:
            cast(Quantized, target).quantize_(source, amax=found[i])
        else:
            target.copy_(source, non_blocking)


def _new_zeros(func: Any, t: Quantized, size: Sequence[int], **options: Any) -> Any:
    """Quantized zeros of another number of rows where the format has them: FSDP2 makes a shard so and copies rows into it."""
    if any(value is not None and value is not False for value in options.values()):
        return _fresh(func, t, size, **options)
    storage, quantizer = zero_rows(t.record, size), t.quantizer
    if storage is None or (quantizer is not None and quantizer.state and sizes_of(storage) is not None):
        return _fresh(func, t, size)  # also of a stack whose matrices have scales of before, each its own
    return t.over(map_tensors(storage, torch.clone), quantizer=quantizer and quantizer.of_groups(0, size[0]))


def _empty_like(func: Any, t: Quantized, **options: Any) -> Any:
    """Plain, unless a tensor that has no bytes yet is given some (``Module.to_empty``)."""
    device = torch.device(options.get("device") or t.device)
    if t.is_meta and device.type != "meta" and options.get("dtype") in (None, t.dtype):
        return t.over(map_tensors(t.record, lambda plane: torch.empty_like(plane, device=device)))
    return _fresh(func, t, **options)


def _new_empty(func: Any, t: Quantized, size: Sequence[int], **options: Any) -> torch.Tensor:
    """Plain, except of the tensor's own size on a named device: torch stages checkpoints so, and copies planes into it."""
    given = {name for name, value in options.items() if value is not None and value is not False}
    if given != {"device"} or tuple(size) != tuple(t.shape):
        return _fresh(func, t, size, **options)
    return t.over(map_tensors(t.record, lambda plane: torch.empty_like(plane, device=options["device"])))


def _fresh(func: Any, t: Quantized, *args: Any, **options: Any) -> torch.Tensor:
    """Plain tensors like ``t`` need none of its values."""
    options["device"] = options.get("device") or t.device
    made: torch.Tensor = func(_without_values(t), *args, **options)
    return made


def _without_values(t: Quantized) -> torch.Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device="meta")


def _pin_memory(func: Any, t: Quantized, device: Any = None) -> Any:
    return t.over(map_tensors(t.record, torch.Tensor.pin_memory))


def _is_pinned(func: Any, t: Quantized, device: Any = None) -> bool:
    return all(plane.is_pinned() for plane in t.record.tensors())


def _record_stream(func: Any, t: Quantized, stream: Any) -> None:
    for plane in t.record.tensors():
        plane.record_stream(stream)


def _dequantize(func: Any, t: Quantized) -> torch.Tensor:
    return decoded(t.record)


def _refuse(func: Any, t: Quantized, *_: Any, **__: Any) -> Any:
    wanted, cure = "its planes to stay where they are", "assign to .data, or copy_ into it"
    raise QuantizedTensorError(describe(f"{func} on {t!r}", wanted=wanted, got="other memory", cure=cure))


HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.lift_fresh.default: _alias,
    aten.detach_.default: _itself,
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.unsqueeze.default: _reshape,
    aten.squeeze.default: _reshape,
    aten.squeeze.dim: _reshape,
    aten.squeeze.dims: _reshape,
    aten.as_strided.default: _as_strided,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.select.int: _select,
    aten.unbind.int: _unbind,
    aten.cat.default: _cat,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy_,
    aten._foreach_copy_.default: _foreach_copy_,
    aten.new_zeros.default: _new_zeros,
    aten.empty_like.default: _empty_like,
    aten.new_empty.default: _new_empty,
    aten.dequantize.self: _dequantize,
    aten._pin_memory.default: _pin_memory,
    aten.is_pinned.default: _is_pinned,
    aten.record_stream.default: _record_stream,
    **dict.fromkeys(
        (
            aten.zeros_like.default,
            aten.ones_like.default,
            aten.full_like.default,
            aten.rand_like.default,
            aten.randn_like.default,
            aten.new_empty_strided.default,
            aten.new_ones.default,
            aten.new_full.default,
        ),
        _fresh,
    ),
    **dict.fromkeys(
        (aten.set_.source_Tensor, aten.set_.source_Storage, aten.set_.source_Storage_storage_offset, aten.resize_.default),
        _refuse,
    ),
    **({torch.ops.c10d.broadcast_.default: exchange.broadcast} if torch.distributed.is_available() else {}),
}
