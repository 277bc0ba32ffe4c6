"""QuantizedTensor: the one tensor subclass, a shell with a shape and a dtype over any quantized storage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.autograd.graph import increment_version

from opfuse.errors import QuantizedTensorError, ShapeError, describe
from opfuse.formats import COLUMNWISE, ROWWISE, USAGES, NumberFormat
from opfuse.tensors import dispatch, exchange, gather, one_plane_fsdp, partial_writes, shards
from opfuse.tensors.planes import as_matrix, assemble, covers, decoded, map_tensors, tensor_pairs
from opfuse.tensors.quantized import Quantized
from opfuse.tensors.storage import INNER_NAMES, Plane, QuantizedStorage
from opfuse.torch_private.tensors import make_wrapper_subclass, no_torch_function

if TYPE_CHECKING:
    from opfuse.tensors.quantizers import Quantizer

_DATA: Any = torch.Tensor.data
_STATE = ("_storage", "_quantizer", "_readonly", "ranks", "alternates", "plane_records", "row_span", "partial_rows")


class QuantizedTensor(Quantized):
    """A tensor of ``storage.shape`` and nominal dtype ``storage.dtype`` whose values live in the planes of ``storage``.

    quantizer: how *future* casts into this tensor are made (``copy_``, optimizers); a copy is kept. Without one the tensor
    dequantizes as well as ever and takes ``copy_`` from a quantized tensor of the same layout; other writes raise
    QuantizedTensorError.

    What operations do to it (the table is in :mod:`opfuse.tensors.dispatch`):

    - They compute on the dequantized values and return plain tensors. So do ``zeros_like`` and its kin, ``.to(dtype)`` and
      ``.float()``: a master copy or an optimizer state made from a quantized tensor is never quantized. (``Module.to(dtype)``
      keeps a quantized parameter, its bytes, and changes its nominal dtype.)
    - Those that write (``add_``, ``copy_``, ``fill_``, ``out=``, ``_foreach_*_``) compute on the dequantized values and cast
      the result into every plane, in place, or raise QuantizedTensorError.
    - ``detach``, ``view`` to other leading dimensions or to one dimension, and ``as_strided`` to the tensor's own geometry
      return a new QuantizedTensor over the same bytes. ``clone``, ``.to(device)`` and ``new_zeros`` of other rows (which is
      how FSDP2 makes a shard) return one over new bytes.
    - Matrices of a stack that were cast apart, as those of experts, are QuantizedTensors over the same bytes, read and written
      one by one: ``t[i]``, ``t.unbind()``.
    - Entries of the first dimension, cut between blocks, are a QuantizedTensor that takes quantized rows of its layout alone.
      It has the same bytes where formats can share all of them, else a copy. Any other view is a copy of the values that raises
      QuantizedTensorError when it is written to; ``t[index] = value`` writes.
    """

    __torch_function__ = no_torch_function

    ranks: shards.Ranks | None = None
    alternates: bool | None = None
    plane_records: one_plane_fsdp.PlaneRecords | None = None
    row_span: partial_writes.RowSpan | None = None
    partial_rows: Mapping[int, tuple[int, QuantizedStorage]] = MappingProxyType({})

    @staticmethod
    def __new__(
        cls, storage: QuantizedStorage, *, quantizer: Quantizer | None = None, requires_grad: bool = False
    ) -> QuantizedTensor:
        if not isinstance(storage, QuantizedStorage):
            got, cure = type(storage).__name__, "quantize a tensor by calling a quantizer: quantizer(x)"
            raise QuantizedTensorError(describe("QuantizedTensor", wanted="a QuantizedStorage", got=got, cure=cure))
        exchange.register_nested_lists()
        placement = {"dtype": storage.dtype, "device": storage.device}
        tensor: QuantizedTensor = make_wrapper_subclass(cls, storage.shape, **placement, requires_grad=requires_grad)
        return tensor

    def __init__(self, storage: QuantizedStorage, *, quantizer: Quantizer | None = None, requires_grad: bool = False) -> None:
        self._storage = storage
        self._quantizer = None if quantizer is None else quantizer.copy()
        self._readonly = ""

    # -- what it holds -------------------------------------------------------------------------------------------------

    @property
    def record(self) -> QuantizedStorage:
        """The record of all planes; one that did not travel in this pass of FSDP2 is fetched, which is a collective operation."""
        if self.partial_rows or self.plane_records is not None:
            self.fetch()
        return self._storage

    def fetch(self) -> None:
        """Fetch planes that are away. QuantizedTensorError while rows are missing (:mod:`opfuse.tensors.partial_writes`)."""
        if self.partial_rows:
            partial_writes.check_whole(self)
        if self.plane_records is not None:
            self._storage = self.plane_records.whole(self._storage)

    def hold(self, usage: str) -> None:
        """In a parameter that holds one plane at a time, hold the plane of ``usage``, whose bytes are written next."""
        if self.plane_records is not None:
            self._storage = self.plane_records.records[usage]

    @property
    def held(self) -> QuantizedStorage:
        """The record of the planes that are here: all, but for :mod:`opfuse.tensors.one_plane_fsdp`."""
        if self.partial_rows:
            partial_writes.check_whole(self)
        return self._storage

    def storage(self) -> Any:
        """QuantizedTensorError: there is no one array, as libraries such as safetensors ask for."""
        wanted, cure = "a plain tensor", "save opfuse.to_planes(state_dict), or the tensor itself with torch.save"
        raise QuantizedTensorError(describe("storage() of a QuantizedTensor", wanted=wanted, got=repr(self), cure=cure))

    @property
    def quantizer(self) -> Quantizer | None:
        """How future casts into this tensor are made."""
        return self._quantizer

    @quantizer.setter
    def quantizer(self, quantizer: Quantizer) -> None:
        self._quantizer = quantizer.copy()

    @property
    def readonly(self) -> str:
        """Why this tensor must not be written; empty if it may."""
        return self._readonly

    @property
    def rowwise(self) -> Plane | None:
        """The rowwise plane, if there is one."""
        return self.record.rowwise

    @property
    def columnwise(self) -> Plane | None:
        """The columnwise plane, if there is one."""
        return self.record.columnwise

    @property
    def usages(self) -> tuple[str, ...]:
        """The directions that hold data."""
        away = self.away
        return (
            tuple(usage for usage in USAGES if usage in away or usage in self._storage.usages) if away else self._storage.usages
        )

    @property
    def format(self) -> NumberFormat:
        """The rowwise format, or the columnwise one if only that exists."""
        return self._storage.format

    @property
    def signature(self) -> tuple[str, ...]:
        """Usage and format of every plane, as text, and which of them are away."""
        held = self._storage.signature
        return held if self.plane_records is None else (*held, *(f"{usage}={fmt}, away" for usage, fmt in self.away.items()))

    @property
    def away(self) -> dict[str, NumberFormat]:
        """The formats of planes that are not here in this pass, by usage."""
        return {} if self.plane_records is None else self.plane_records.away(self._storage)

    def format_of(self, usage: str) -> NumberFormat:
        """The format in which a product reads the plane of ``usage``, here or not; MissingPlaneError if there is none."""
        return self.away.get(usage) or self._storage.derived(usage).format

    def plane(self, usage: str) -> Plane:
        """The plane of ``usage``; MissingPlaneError says why there is none."""
        return self.record.plane(usage)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        notes = [f"shape={tuple(self.shape)}", f"dtype={self.dtype}", *self.signature, f"device={self.device}"]
        if self.requires_grad:
            notes.append(_gradient_text(self))
        return f"{type(self).__name__}({', '.join(notes)})"

    # -- reading and writing -------------------------------------------------------------------------------------------

    def dequantize(self, dtype: torch.dtype | None = None, usage: str | None = None) -> torch.Tensor:
        """Plain values in ``dtype`` (None: the nominal one), from the plane ``usage`` (None: rowwise if there is one).

        Needs no quantizer. The gradient passes straight through. MissingPlaneError for a plane that is not there.
        """
        return cast(torch.Tensor, _straight_through(lambda tensor: decoded(tensor.record, dtype, usage), self))

    def quantize_(
        self, source: torch.Tensor, noop_flag: torch.Tensor | None = None, *, amax: torch.Tensor | None = None
    ) -> QuantizedTensor:
        """Cast ``source``, of the same shape, into every plane, in place. Autograd notices the change but does not record it.

        noop_flag: fp32 tensor of one element; where it is not 0 nothing is written. amax: what
        :func:`opfuse.tensors.shards.amaxes` found for ``source``.
        QuantizedTensorError without a quantizer, unless ``source`` is quantized in the same layout, or for a slice.
        """
        if source.shape != self.shape:
            got, cure = tuple(source.shape), "reshape or expand the source"
            raise ShapeError(describe("write into a QuantizedTensor", wanted=tuple(self.shape), got=got, cure=cure))
        target = as_matrix(self.record)
        record = source.record.completed(target.usages) if isinstance(source, QuantizedTensor) else None
        if record is not None and noop_flag is None and covers(record, target):
            if self.row_span is not None:
                self._storage = partial_writes.paste(self.row_span, replace(record, shape=self.shape, dtype=self.dtype))
                return self
            self.check_writable("copy_", casting=False)
            for tensor, origin in tensor_pairs(target, record):
                tensor.copy_(origin.reshape(tensor.shape))
            self.ranks = shards.unsure(self.ranks)
        else:
            quantizer = self.check_writable("a write")
            values = source.detach() if record is None else record.dequantize()
            values = values.to(self.device).reshape(target.shape)
            values = values if quantizer.is_quantizable(values) else values.to(self.dtype)
            quantizer.update_quantized(values, target, noop_flag=noop_flag, amax=amax)
        increment_version([tensor for tensor in (self, *target.tensors()) if not tensor.is_inference()])
        return self

    def check_writable(self, operation: str, *, casting: bool = True) -> Any:
        """The quantizer. QuantizedTensorError unless ``operation`` may write here; ``casting``: it writes values, not bytes."""
        if self._readonly:
            wanted, cure = "a whole tensor", "clone() it, or assign to the whole tensor: t[index] = value"
            raise QuantizedTensorError(describe(f"{operation} on {self!r}", wanted=wanted, got=self._readonly, cure=cure))
        if casting and self._quantizer is None:
            wanted, cure = "a quantizer to cast with", "QuantizedTensor(storage, quantizer=...), or dequantize() it first"
            raise QuantizedTensorError(describe(f"{operation} on {self!r}", wanted=wanted, got=None, cure=cure))
        return shards.writer(self)

    def get_high_precision_init_val(self) -> torch.Tensor | None:
        """The value before quantization, on the CPU, if ``quantized_model_init`` was asked to preserve it; else None."""
        return self.__dict__.get("high_precision_init_val")

    def clear_high_precision_init_val(self) -> None:
        """Let the preserved value go."""
        self.__dict__.pop("high_precision_init_val", None)

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Have exactly the planes asked for; None leaves a plane as it is.

        FP8 under one scale, or one for each square block, derives its columnwise plane from the rowwise one; others can
        only be dropped. MissingPlaneError, and nothing has changed, where a plane that is asked for cannot be had.
        """
        asked = {ROWWISE: rowwise_usage, COLUMNWISE: columnwise_usage}
        wanted = [usage for usage, flag in asked.items() if (usage in self.usages if flag is None else flag)]
        if not wanted:
            cure = "leave the usage of one plane True"
            raise QuantizedTensorError(describe("update_usage", wanted="at least one plane to be left", got="none", cure=cure))
        rowwise, columnwise = (self.record.derived(usage) if usage in wanted else None for usage in USAGES)
        dropped = set(self.usages) - set(wanted)
        why = "it was dropped by update_usage" if dropped else self.record.why
        self._storage = replace(self.record, rowwise=rowwise, columnwise=columnwise, why=why)

    # -- what torch asks of a tensor subclass --------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return dispatch.run(QuantizedTensor, func, args, kwargs or {})

    def over(self, storage: QuantizedStorage, *, readonly: str = "", quantizer: Quantizer | None = None) -> QuantizedTensor:
        """A new tensor over ``storage``, by default with this one's quantizer; ``readonly`` says why it must not be written."""
        tensor = QuantizedTensor(storage, quantizer=quantizer or self._quantizer)
        tensor._readonly, tensor.ranks, tensor.alternates = readonly, self.ranks, self.alternates
        if storage is self._storage:
            tensor.plane_records, tensor.row_span = self.plane_records, self.row_span
        return tensor

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return list(self.record.named_tensors), (self.record.structure, self._quantizer, self._readonly)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, outer_size: Any, outer_stride: Any) -> QuantizedTensor:
        made, quantizer, readonly = context
        return rebuild(assemble(inner, made, outer_size), quantizer, requires_grad=False, readonly=readonly, others={})

    def __getattr__(self, name: str) -> torch.Tensor:
        """An array by the name that ``__tensor_flatten__`` gives it; AttributeError for one of a plane that was not made."""
        if name.startswith(tuple(INNER_NAMES)):
            found = self.record.named_tensors
            if name in found:
                return found[name]
            raise AttributeError(f"this {type(self).__name__} has no {name}: it holds {', '.join(found)}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        if id(self) in memo:
            found: QuantizedTensor = memo[id(self)]
            return found
        if not self.is_leaf:
            cure = "detach() it first"
            raise QuantizedTensorError(describe("deepcopy", wanted="a leaf of the autograd graph", got=repr(self), cure=cure))
        memo.update({id(group): group for group in shards.process_groups(self._quantizer)})
        quantizer = deepcopy(self._quantizer, memo)
        copy = QuantizedTensor(map_tensors(self.record, torch.clone), quantizer=quantizer, requires_grad=self.requires_grad)
        copy.ranks = self.ranks
        memo[id(self)] = copy
        copy.__dict__.update(deepcopy(self.other_attributes(), memo))
        copy.grad = deepcopy(self.grad, memo)
        return copy

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """A quantizer that reduces over a process group cannot be saved: what is loaded has none, and takes bytes only."""
        storage = map_tensors(self.record, torch.Tensor.detach)
        quantizer = None if shards.process_groups(self._quantizer) else self._quantizer
        return rebuild, (storage, quantizer, self.requires_grad, self._readonly, self.other_attributes())

    def other_attributes(self) -> dict[str, Any]:
        """Attributes that others have set on this tensor, such as nn.Parameter and frameworks."""
        return {name: value for name, value in self.__dict__.items() if name not in _STATE}

    def __setitem__(self, index: Any, value: Any) -> None:
        first, *rest = index if isinstance(index, tuple) else (index,)
        if isinstance(first, int) and isinstance(group := self[first], QuantizedTensor) and not group.readonly:
            if rest or not isinstance(value, torch.Tensor):
                group[tuple(rest) or ...] = value
            else:
                group.copy_(value)
            return
        values = self.dequantize().clone()
        values[index] = value
        self.copy_(values)

    @property
    def data(self) -> torch.Tensor:
        """The same bytes, cut off from autograd.

        Assigning a quantized tensor takes over its storage. Assigning a plain one takes over its dtype and device, as
        ``Module.to`` asks for, and casts its values, unless they are those that the tensor holds already.
        """
        return cast(torch.Tensor, _DATA.__get__(self))

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        if not isinstance(new, QuantizedTensor):
            new = self.moved_to(new)
        _DATA.__set__(self, new)
        self._storage, self._quantizer, self._readonly = new._storage, new._quantizer or self._quantizer, new._readonly
        self.ranks = shards.unsure(self.ranks)

    def moved_to(self, values: torch.Tensor) -> QuantizedTensor:
        """A tensor of the same planes where ``values`` are, of their dtype; rewritten if it does not decode to them already."""
        storage = map_tensors(self.record, lambda plane: plane.to(values.device))
        moved = self.over(replace(storage, dtype=values.dtype), readonly=self._readonly)
        if values.shape != self.shape or not (values.is_meta or torch.equal(moved.dequantize(), values)):
            moved.quantize_(values)
        return moved

    def float(self) -> torch.Tensor:
        """Plain fp32 values."""
        return self.dequantize(torch.float32)

    def bfloat16(self) -> torch.Tensor:
        """Plain bf16 values."""
        return self.dequantize(torch.bfloat16)

    def half(self) -> torch.Tensor:
        """Plain fp16 values."""
        return self.dequantize(torch.float16)

    def share_memory_(self) -> QuantizedTensor:
        """Move the planes to shared memory."""
        for tensor in self.record.tensors():
            tensor.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether all planes are in shared memory."""
        return all(tensor.is_shared() for tensor in self.record.tensors())

    def __dlpack__(self, **options: Any) -> Any:
        return self.record.dequantize().__dlpack__(**options)

    # -- the all-gather protocol of FSDP2 ------------------------------------------------------------------------------

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):  # type: ignore[no-untyped-def]
        """Row parts of this shard to gather, and what :meth:`fsdp_post_all_gather` needs to know."""
        return gather.before(self, outer_size, mesh=mesh, dtype=mp_policy.param_dtype)

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):  # type: ignore[no-untyped-def]
        """The whole parameter from the gathered parts, with the tensors that it owns; with ``out``, written into it."""
        return gather.after(self, all_gather_outputs, metadata, dtype=param_dtype, out=out)


def rebuild(
    storage: QuantizedStorage,
    quantizer: Quantizer | None,
    requires_grad: bool,
    readonly: str,
    others: dict[str, Any],
) -> QuantizedTensor:
    """A tensor from the parts that pickling takes it apart into."""
    tensor = QuantizedTensor(storage, quantizer=quantizer, requires_grad=requires_grad)
    tensor._readonly = readonly
    tensor.__dict__.update(others)
    return tensor


# -- gradients -------------------------------------------------------------------------------------------------------------------


def quantize(x: torch.Tensor, quantizer: Quantizer) -> QuantizedTensor:
    """``x`` (..., K) as ``quantizer`` casts it, in memory of its own. The gradient passes straight through."""

    def owning(x: torch.Tensor) -> QuantizedTensor:
        storage = quantizer.quantize(x.record.dequantize() if isinstance(x, QuantizedTensor) else x)
        # An identity plane is the caller's own tensor, which a later write must not reach.
        kept = {id(plane.data) for plane in map(storage.plane, storage.usages) if plane.format.family == "identity"}
        storage = map_tensors(storage, lambda tensor: tensor.clone() if id(tensor) in kept else tensor)
        return QuantizedTensor(storage, quantizer=quantizer)

    return cast(QuantizedTensor, _straight_through(owning, x))


class _StraightThrough(torch.autograd.Function):
    """A change of representation: the gradient of the result is that of the argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, change: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        return change(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def _straight_through(change: Callable[[Any], torch.Tensor], x: torch.Tensor) -> Any:
    """``change(x)``, whose gradient is that of ``x``."""
    recorded = torch.is_grad_enabled() and x.requires_grad
    return _StraightThrough.apply(x, change) if recorded else change(x)  # type: ignore[no-untyped-call]


def _gradient_text(tensor: torch.Tensor) -> str:
    """How ``repr`` shows that ``tensor`` wants a gradient, as torch does; ``grad_fn=Invalid`` after a write made it ambiguous."""
    try:
        return "requires_grad=True" if tensor.grad_fn is None else f"grad_fn={tensor.grad_fn.name()}"
    except RuntimeError:
        return "grad_fn=Invalid"
