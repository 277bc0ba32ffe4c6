"""What tensors without memory would take: which are alive when, and which a call reads last.

A mode of torch's dispatcher sees each op with its results, a finalizer of each storage when nobody holds it any more. So for ops
of torch the ledger has what the allocator would have: outputs before inputs are freed, each storage once. Kernels of opfuse make
their results in torch (``kernels/engine/launch.py``) and say what they read. A segment that a program repeats frees a tensor at
its last reader, where the interpreter that runs here holds it longer: so what ends inside of a segment counts up to there.

Ops whose CUDA kernels take memory that no tensor shows are in :data:`SCRATCH`.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from opfuse.errors import UnsupportedError, describe
from opfuse.events import KernelSized, SegmentRan, subscribed
from opfuse.inspect.observe import parts_of
from opfuse.kernels.engine.launch import standing_for, stands_for_gpu
from opfuse.tensors.masters import stored_in
from opfuse.tensors.storage import QuantizedStorage
from opfuse.torch_private.dispatch import UncompiledMode
from opfuse.torch_private.operations import tree_leaves, tree_map
from opfuse.torch_private.tensors import number_of

_aten: Any = torch.ops.aten

BLOCK = 512
"""Bytes to whose multiples torch's allocator rounds."""

KNOWN = 1 << 20
"""Elements of the largest tensor of integers whose values are computed beside it, for a host that reads them."""

H200, CUDA = (9, 0), (13, 0)
"""What is estimated: compute capability, and the CUDA version whose products it has."""


def rounded_up(size: int) -> int:
    """Bytes of the block that the allocator takes for so many."""
    return -(-size // BLOCK) * BLOCK


@dataclass(slots=True, eq=False)
class AllocatedBlock:
    """A storage. start, end: the op that made it, and the last one while it was alive; None at the end of all. read: the last op
    that read it. place: the module whose weights were read last when it was made.
    """

    size: int
    start: int
    place: str
    end: int | None = None
    read: int = 0


class Ledger(UncompiledMode):
    """Follows ops on the meta device inside of :meth:`following`. weights: the module of each storage of a weight, by its number.

    places: from which op on the weights of which module were read last. segments: first and last op of each pass of a segment.
    """

    def __init__(self, weights: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weights, self.clock, self.place = weights, 0, ""
        self.places: list[tuple[int, str]] = [(0, "")]
        self.segments: list[tuple[int, int]] = []
        self.blocks: list[AllocatedBlock] = []
        self._alive: dict[int, AllocatedBlock] = {}
        self._values: Any = WeakIdKeyDictionary()
        self._began = 0

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow what runs inside, as it would run on an H200."""
        with ExitStack() as stack:
            stack.enter_context(_registered())
            stack.enter_context(standing_for(H200, CUDA))
            stack.enter_context(subscribed(lambda event: self._reads(event.arguments), KernelSized))
            stack.enter_context(subscribed(self._segment, SegmentRan))
            stack.enter_context(self)
            yield

    def known(self, *tensors: torch.Tensor) -> None:
        """Leave out what the caller holds."""
        self._alive |= {number_of(storage): AllocatedBlock(0, 0, "") for storage in storages_of(tensors)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func is _aten._local_scalar_dense.default and given[0].is_meta:
            return self._value_of(given[0])
        self.clock += 1
        for tensor in given:
            self._read(tensor)
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        for tensor in made:
            self._made(tensor)
        if func in SCRATCH and (size := SCRATCH[func](*args, **kwargs)):
            self.blocks.append(AllocatedBlock(rounded_up(size), self.clock, self.place, self.clock, self.clock))
        if len(made) == 1 and _is_small(made[0]) and all(tensor in self._values for tensor in given):
            self._compute(func, args, kwargs, made[0])
        return result

    # -- memory ------------------------------------------------------------------------------------------------------

    def _made(self, tensor: torch.Tensor) -> None:
        for storage in storages_of([tensor]):
            number = number_of(storage)
            if number in self._alive or storage.device.type != "meta":
                continue
            block = self._alive[number] = AllocatedBlock(rounded_up(storage.nbytes()), self.clock, self.place, read=self.clock)
            self.blocks.append(block)
            weakref.finalize(storage, self._freed, number)

    def _freed(self, number: int) -> None:
        self._alive.pop(number).end = self.clock

    def _read(self, tensor: torch.Tensor) -> None:
        for number in map(number_of, storages_of([tensor])):
            if (module := self.weights.get(number)) is not None and module != self.place:
                self.place = module
                self.places.append((self.clock, module))
            if (block := self._alive.get(number)) is not None:
                block.read = self.clock

    def _reads(self, arguments: Sequence[Any]) -> None:
        self.clock += 1
        for tensor in tensors_within(arguments):
            self._read(tensor)

    def _segment(self, event: SegmentRan) -> None:
        if not event.ended:
            self._began = self.clock
        else:
            self.segments.append((self._began, self.clock))

    def of(self, tensor: torch.Tensor) -> Iterator[AllocatedBlock]:
        """The blocks of a tensor that is alive and was made inside."""
        for number in map(number_of, storages_of([tensor])):
            block = self._alive.get(number)
            if block is not None and block.size:
                yield block

    def alive(self) -> list[AllocatedBlock]:
        """The blocks that are alive now."""
        return [block for block in self._alive.values() if block.size]

    def last(self, block: AllocatedBlock) -> int:
        """The last op while a block takes memory, where programs repeat segments."""
        if block.end is None:
            return self.clock
        at = bisect_left(self.segments, block.end, key=lambda segment: segment[1])
        if at < len(self.segments) and self.segments[at][0] < block.end:
            return max(block.read, self.segments[at][0], block.start)
        return block.end

    def last_interpreted(self, block: AllocatedBlock) -> int:
        """The same where segments are interpreted."""
        return self.clock if block.end is None else block.end

    # -- values ------------------------------------------------------------------------------------------------------

    def _value_of(self, tensor: torch.Tensor) -> Any:
        if tensor not in self._values:
            got = "a meta tensor, which has none"
            cure = "pass what the model reads on the host as numbers or as tensors on the CPU"
            raise UnsupportedError(describe("memory: the model", wanted="values that the host can read", got=got, cure=cure))
        return self._values[tensor].item()

    def _compute(self, func: Any, args: Any, kwargs: Any, result: torch.Tensor) -> None:
        """The values of a small tensor of integers that follows from such tensors, and from no input."""
        if func in _WITHOUT_VALUES:
            return
        there, named = tree_map(self._beside, (args, kwargs))
        if "device" in named:
            named["device"] = torch.device("cpu")
        self._values[result] = func(*there, **named)

    def _beside(self, value: Any) -> Any:
        return self._values[value] if isinstance(value, torch.Tensor) else value


_WITHOUT_VALUES = (_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default, _aten.new_empty.default)


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.is_meta and not tensor.is_floating_point() and tensor.numel() <= KNOWN and type(tensor) is torch.Tensor


def storages_of(tensors: Iterable[torch.Tensor]) -> Iterator[torch.UntypedStorage]:
    """The memory of tensors, of quantized ones that of each part."""
    return (part.untyped_storage() for tensor in tensors for part in parts_of(stored_in(tensor)))


def tensors_within(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, QuantizedStorage):
        yield from value.tensors()
    elif isinstance(value, Mapping):
        yield from tensors_within(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_within(each)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors_within(tuple(getattr(value, field.name) for field in fields(value)))


def curve(spans: Sequence[tuple[int, int, int]], length: int) -> list[int]:
    """Bytes at each op, of (bytes, first op, last op)."""
    steps = [0] * (length + 2)
    for size, first, last in spans:
        steps[first] += size
        steps[last + 1] -= size
    return list(accumulate(steps))[: length + 1]


# -- what torch computes by other ops on a GPU ----------------------------------------------------------------------------------


@contextmanager
def _registered() -> Iterator[None]:
    """Inside, the dispatcher has :data:`FUNCTIONS`, for meta tensors that stand for those of a GPU; others take the formulas.

    What a Library registers goes with it.
    """
    library = torch.library.Library("aten", "IMPL")
    for op, own in FUNCTIONS.items():
        library.impl(op, partial(_chosen, op, own), "AutogradMeta")
    try:
        yield
    finally:
        del library


def _chosen(op: Any, own: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    return own(*args, **kwargs) if stands_for_gpu() else op.decompose(*args, **kwargs)


def _attention(  # noqa: PLR0917 - torch's arguments
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Flash attention in 16 bits without a mask, else memory-efficient attention."""
    how = {"scale": scale}
    if attn_mask is None and query.dtype in (torch.bfloat16, torch.float16):
        result: torch.Tensor = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, **how)[0]
        return result
    if key.shape[-3] != query.shape[-3]:
        key, value = (each.repeat_interleave(query.shape[-3] // key.shape[-3], -3) for each in (key, value))
    if attn_mask is not None:
        added = torch.empty_like(attn_mask, dtype=query.dtype) if attn_mask.dtype == torch.bool else attn_mask
        attn_mask = added.expand(*query.shape[:-1], key.shape[-2])
    efficient = _aten._scaled_dot_product_efficient_attention
    result = efficient(query, key, value, attn_mask, query.requires_grad, dropout_p, is_causal, **how)[0]
    return result


def _flash_backward(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any, **named: Any
) -> int:
    """fp32 sums of the query's gradient and of each row, and gradients of keys and values for each head of the query.

    As torch's aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp allocates them.
    """
    batch, heads, rows, width = query.shape
    rows, whole = -(-rows // 128) * 128, -(-width // 32) * 32
    spread = 2 * batch * key.shape[2] * heads * width * key.element_size() if key.shape[1] != heads else 0
    return 4 * batch * heads * rows * (whole + 1) + spread


class _NormOnGPU(torch.autograd.Function):
    """Saves input, weight and the fp32 reciprocal of each row, as aten's ``_fused_rms_norm``, which only a GPU has."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, normalized: int) -> torch.Tensor:
        rows = x.new_empty((*x.shape[: x.dim() - normalized], *[1] * normalized), dtype=torch.float32)
        ctx.save_for_backward(x, weight, rows)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        wanted = weight is not None and ctx.needs_input_grad[1]
        return torch.empty_like(x), torch.empty_like(weight) if wanted else None, None


def _rms_norm(
    x: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """By one kernel where torch has one: not for a weight of another dtype."""
    if weight is not None and weight.dtype != x.dtype:
        formula: torch.Tensor = _aten.rms_norm.default.decompose(x, normalized_shape, weight, eps)
        return formula
    result: torch.Tensor = _NormOnGPU.apply(x, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
    return result


FUNCTIONS: Mapping[Any, Callable[..., torch.Tensor]] = {
    _aten.scaled_dot_product_attention.default: _attention,
    _aten.rms_norm.default: _rms_norm,
}
"""Ops that a GPU computes by one kernel where the meta device takes a formula, and what stands for them."""

SCRATCH: Mapping[Any, Callable[..., int]] = {_aten._scaled_dot_product_flash_attention_backward.default: _flash_backward}
"""Bytes that the CUDA kernels of an op take beside its results, by its arguments."""
