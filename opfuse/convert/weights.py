"""Ops over the parameters of a model's own modules, which stay where they are, under their names.

An op reads its parameters at each call from the dictionary of a module that owns them. If that is a module of the model, the op
reads the parameter itself. If an op reads several parameters as one, or one transposed, :class:`MadeParameters` owns the tensor,
which is made of them at each call under autograd, so that gradients arrive in the model's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from operator import add, attrgetter
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from opfuse.convert.states import LOADS
from opfuse.core.context import versions
from opfuse.core.operation import BasicOperation
from opfuse.core.signature import is_foreign
from opfuse.core.spec import spec_of
from opfuse.errors import ConversionError, SavedTensorError, describe, number_of
from opfuse.formats import ROWWISE
from opfuse.ops.linear import BasicLinear
from opfuse.ops.pointwise import Bias
from opfuse.runtime.compile.backward_tape import BackwardTape, StepBackward
from opfuse.runtime.compile.saved_call import autocast_like
from opfuse.runtime.replay.replayable import layout_key
from opfuse.tensors.rows import may_join, over_rows, packed_rows
from opfuse.tensors.storage import QuantizedStorage
from opfuse.tensors.tensor import QuantizedTensor
from opfuse.torch_private.tensors import share_memory

AnyOp = TypeVar("AnyOp", bound=BasicOperation)


def borrowing(kind: type[AnyOp], fields: Iterable[Any], owner: nn.Module, *names: str) -> AnyOp:
    """An op of class ``kind`` with these ``fields`` of its spec, whose parameters ``names`` are those of ``owner``."""
    op = kind.__new__(kind)
    BasicOperation.__init__(op, spec_of(kind)(*fields), owner=owner)
    op.__dict__["borrows"] = names
    return op


@dataclass(frozen=True)
class Weight:
    """A module of the model that multiplies: y = x W^T + b for W (out, in); for W (in, out), ``transposed``, y = x W + b."""

    module: nn.Module
    in_features: int
    out_features: int
    transposed: bool = False

    @property
    def has_bias(self) -> bool:
        """Whether it adds a bias."""
        return self.module._parameters.get("bias") is not None

    @cached_property
    def largest(self) -> float:
        """The largest magnitude in its matrix."""
        return _largest(self.module._parameters["weight"])

    def agrees(self, other: Weight) -> bool:
        """Whether one product can do for both."""
        mine, others = self.module._parameters["weight"], other.module._parameters["weight"]
        if mine is None or others is None or (mine.dtype, mine.device) != (others.dtype, others.device):
            return False
        if (self.in_features, self.has_bias) != (other.in_features, other.has_bias):
            return False
        if isinstance(mine, QuantizedTensor) or isinstance(others, QuantizedTensor):
            return not (_why_apart((mine, others)) or _why_apart((others, mine)))
        return _may_share_a_scale((self.largest, other.largest))


MOST_APART = 2.0**10
"""How many times larger the largest value of a weight may be than that of another one in a product.

One scale may stand for the whole product, or for a block with rows of both. Of the 18 powers of two that E4M3 has, the smaller
weight then loses ten.
"""


def _may_share_a_scale(largest: Iterable[float]) -> bool:
    """Whether matrices with these largest magnitudes may. Zeros are zeros under any scale, and NaN is none."""
    sizes = [size for size in largest if 0 < size < torch.inf]
    return not sizes or max(sizes) <= MOST_APART * min(sizes)


def _why_apart(matrices: Sequence[torch.Tensor | None]) -> str:
    """Why one product cannot do for matrices, one below the other; empty if it can: plain ones may be cast under one scale, and
    stored ones are stored so, with the same bytes.
    """
    stored = [matrix for matrix in matrices if isinstance(matrix, QuantizedTensor)]
    if stored and not (len(stored) == len(matrices) and may_join([matrix.held for matrix in stored])):
        return "the loaded weights are not stored alike, or in blocks that do not end where each of them does"
    if not stored and not _may_share_a_scale(map(_largest, matrices)):
        return f"the largest values of the loaded weights are more than {MOST_APART:g} times apart, too far to share one product"
    return ""


def _largest(matrix: torch.Tensor | None) -> float:
    """The largest magnitude in a matrix; 0 where there are no values to look at."""
    if matrix is None or matrix.is_meta or not matrix.numel() or is_foreign(matrix):
        return 0.0
    return float(torch.linalg.vector_norm(matrix.detach(), torch.inf))


Source = tuple[nn.Module, str, bool]
"""A parameter of a module by its name, and whether it is read transposed."""


class MadeParameters(nn.Module):
    """Owns parameters of an op that are made anew for each call; between calls it holds stand-ins without their memory.

    sources: the parameters that each is made of, one after another in its rows. blanks: the stand-ins. reached: of this call,
    whether a gradient reaches the rows of each; empty as long as it reaches all. apart, loads: why the parts cannot be
    one product, and how many state dicts had been loaded when they were looked at.
    """

    temporary = True  # what an op reads here is made for one call
    sources: Mapping[str, Sequence[Source]]
    blanks: dict[str, torch.Tensor]
    reached: list[bool]
    apart: str
    loads: int

    def __init__(self, sources: Mapping[str, Sequence[Source]]) -> None:
        super().__init__()
        self.__dict__.update(sources=sources, blanks={}, reached=[], apart="", loads=LOADS[0])
        self.drop()

    @property
    def why_apart(self) -> str:
        """Why the parts of a matrix cannot be one product now; empty if they can, as when it was made. They are looked at again
        when state dicts were loaded; the steps of an optimizer are small.
        """
        if self.loads != LOADS[0]:
            parts = [module._parameters[own] for module, own, _ in self.sources.get("weight", ())]
            self.__dict__.update(apart=_why_apart(parts) if len(parts) > 1 else "", loads=LOADS[0])
        return self.apart

    @property
    def copied(self) -> bool:
        """Whether a call copies parameters to join them, as they lie now. A plan asks once: what it saves would be that copy."""
        return not all(_lies_whole([*map(self.read, sources)]) for sources in self.sources.values())

    def read(self, source: Source) -> torch.Tensor:
        """A parameter as it is joined with others."""
        return _read(source)

    def fill(self) -> None:
        """Make them, as autograd records it."""
        slots: dict[str, Any] = self._parameters
        tape = stand_ins()
        self.__dict__["reached"] = reached = list[bool]()
        for name, sources in self.sources.items():
            noted = isinstance(tape, BackwardTape)
            slots[name] = _noted(tape, sources) if noted else joined([*map(self.read, sources)], reached)  # type: ignore[arg-type]

    def watch(self, result: torch.Tensor) -> None:
        """Have the backward pass of ``result`` check parameters in one memory for writes, whatever gradients it is asked for."""
        for name, sources in self.sources.items():
            values: list[Any] = [taken(module._parameters[own]) for module, own, _ in sources]
            whole: Any = self._parameters[name]
            node = None if len(values) < 2 else result.grad_fn
            if node is not None and share_memory(_arrays(whole)[0], _arrays(values[0])[0]):
                node.register_prehook(partial(_check_unwritten, values, versions(*values)))

    def drop(self) -> None:
        """Put stand-ins in their places: a backward pass reads dtypes and shapes alone."""
        slots: dict[str, Any] = self._parameters
        for name, sources in self.sources.items():
            module, own, _ = sources[0]
            like: Any = module._parameters[own]
            blank = self.blanks.get(name)
            if blank is None or (blank.dtype, blank.device) != (like.dtype, like.device):
                blank = self.blanks[name] = _blank([*map(self.read, sources)])
            slots[name] = blank

    @torch.no_grad()
    def pack(self) -> None:
        """Lay what is made of several parameters out in one memory, of which each has a part; a call then copies nothing."""
        for sources in self.sources.values():
            values: list[Any] = [module._parameters[name] for module, name, _ in sources]
            if len(values) < 2 or any(transposed for _, _, transposed in sources):
                continue
            stored = [isinstance(value, QuantizedTensor) for value in values]
            if all(stored):
                for value, storage in zip(values, packed_rows([value.held for value in values])):
                    value.data = value.over(storage)
            elif not any(stored):
                whole = torch.cat(values)
                for value, part in zip(values, whole.split([len(value) for value in values])):
                    value.data = part


class LocalParameters(MadeParameters):
    """Of DTensor parameters, the part of this rank."""

    def read(self, source: Source) -> torch.Tensor:
        module, name, transposed = source
        value: Any = module._parameters[name]
        if not hasattr(value, "to_local"):
            cure = "load without assign=True, and a full state dict by torch.distributed.checkpoint.state_dict"
            where, got = f"{type(module).__name__}.{name}, experts over ranks", type(value).__name__
            raise ConversionError(describe(where, wanted="a DTensor, as parallelize_module made it", got=got, cure=cure))
        part: torch.Tensor = value.to_local()
        return part.mT if transposed else part


class _Join:
    """Makes one tensor of parameters, one after another in its rows; a step of a tape. turned: whether each is transposed.

    What it made of stored parameters in one memory it gives again while they lie there, since to make that takes the host longer
    than to launch the product. It is kept as long as the record of the first, and so holds no memory that this does not. Of plain
    ones it remembers where they lay side by side: while they lie there, one tensor over them has the layout that it had.
    """

    sized = False

    def __init__(self, values: Sequence[Any], turned: Sequence[bool]) -> None:
        self.turned = turned
        self.sizes = [value.shape[-1 if turn and value.dim() == 2 else 0] for value, turn in zip(values, turned)]
        self.layout: tuple[Any, ...] | None = None
        self._wholes: WeakKeyDictionary[QuantizedStorage, tuple[_Lying, torch.Tensor]] = WeakKeyDictionary()
        self._begins: list[int] = []
        self._place: tuple[Any, Any] = ((), ())

    def whole(self, values: Sequence[Any], tape: BackwardTape, *, trains: bool) -> torch.Tensor:
        """Without autograd. A backward pass is refused after a write to what lies in the memory of the whole."""
        whole = _whole([_as_read(value, transposed=turn) for value, turn in zip(values, self.turned)])
        whole = whole.detach() if len(values) == 1 else whole  # of several it is a new tensor, beside the parameters
        if trains and share_memory(_arrays(whole)[0], _arrays(values[0])[0]):
            tape.watch(values)  # whose counters the whole does not have
        return whole

    def backward(self, received: list[torch.Tensor | None], keep: bool) -> list[torch.Tensor | None]:
        """The gradient of each parameter."""
        whole, sizes = received[0], self.sizes
        grads = [None] * len(sizes) if whole is None else torch.unsafe_split_with_sizes(whole, sizes)
        return [grad.mT if turn and grad is not None else grad for grad, turn in zip(grads, self.turned)]

    def stands(self, tensors: Sequence[torch.Tensor]) -> bool:
        """It is found out by making it, which has no effect."""
        return True

    def __call__(self, tensors: Sequence[torch.Tensor], tape: BackwardTape) -> tuple[Sequence[torch.Tensor], StepBackward] | None:
        if (
            self._begins
            and [*map(torch.Tensor.data_ptr, tensors)] == self._begins
            and all(map(share_memory, tensors, tensors[1:]))
        ):
            tape.watch(tensors)
            return [tensors[0].as_strided(*self._place)], self.backward
        lying = _lying(tensors)
        known = None if lying is None else self._wholes.get(tensors[0].held)  # type: ignore[attr-defined]
        if known is not None and known[0] == lying:
            tape.watch(tensors)
            return [known[1]], self.backward
        whole = self.whole(tensors, tape, trains=True)
        if layout_key([whole]) != self.layout:
            return None
        if lying is not None and _arrays(whole)[0].data_ptr() == lying.addresses[0]:
            self._wholes[tensors[0].held] = lying, whole  # type: ignore[attr-defined]
        elif len(tensors) > 1 and QuantizedTensor not in map(type, tensors) and True not in self.turned:
            self._begins = [*map(torch.Tensor.data_ptr, tensors)] if share_memory(whole, tensors[0]) else []
            self._place = whole.shape, whole.stride()
        return [whole], self.backward


class _Lying(NamedTuple):
    """Where stored parameters lie, and what a tensor over the first one has of it. others: the records of all but the first."""

    addresses: list[int]
    others: list[QuantizedStorage]
    first: tuple[Any, ...]


def _lying(values: Sequence[Any]) -> _Lying | None:
    """None unless all are stored, and there are several."""
    if len(values) < 2 or {*map(type, values)} != {QuantizedTensor}:
        return None
    first, records = values[0], [value.held for value in values]
    addresses = [tensor.data_ptr() for record in records for tensor in record.tensors()]
    return _Lying(addresses, records[1:], (first.quantizer, first.ranks, first.alternates))


def _noted(tape: BackwardTape, sources: Sequence[Source]) -> torch.Tensor:
    """What is made of parameters; ``tape`` notes how their gradients follow from its gradient."""
    values: list[Any] = [module._parameters[name] for module, name, _ in sources]
    join, trains = _Join(values, [transposed for _, _, transposed in sources]), torch.is_grad_enabled()
    with torch.no_grad():
        whole = join.whole(values, tape, trains=trains)
    join.layout = layout_key([whole])
    tape.record(values, [whole], join.backward, lambda: join)
    return whole.requires_grad_(trains and any(value.requires_grad for value in values))


class _Joined(torch.autograd.Function):
    """Parts one after another in the first dimension: over their memory if they lie so, else copied."""

    @staticmethod
    def forward(ctx: Any, reached: list[bool], *parts: torch.Tensor) -> torch.Tensor:
        ctx.sizes, ctx.reached = [len(part) for part in parts], reached
        return _whole(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        parts = grads[0].split(ctx.sizes)
        reached = ctx.reached or [True] * len(parts)
        return None, *[part if reaches else None for part, reaches in zip(parts, reached)]


def _whole(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """:func:`joined`, without autograd."""
    if len(parts) == 1:
        return parts[0]
    arrays = [*zip(*map(_arrays, parts))]
    if not all(map(_lie_together, arrays)):
        with autocast_like(parts[0], None):  # which may be on with another dtype
            return torch.cat([*parts])
    whole = [*map(_as_they_lie, arrays)]
    first: Any = parts[0]
    return first.over(over_rows(first.held, whole)) if isinstance(first, QuantizedTensor) else whole[0]


def _check_unwritten(parts: Sequence[torch.Tensor], before: Sequence[int], *_: Any) -> None:
    """SavedTensorError for parts that were written: autograd notices writes to the first part alone."""
    if (now := versions(*parts)) != before:
        got = f"weights written {number_of(sum(now) - sum(before), 'time')} since"
        cure = "call backward() before an optimizer's step"
        where, wanted = "backward of weights in one memory", "each as the forward pass left it"
        raise SavedTensorError(describe(where, wanted=wanted, got=got, cure=cure))


def joined(parts: Sequence[torch.Tensor], reached: list[bool] | None = None) -> torch.Tensor:
    """``parts`` one after another in the first dimension: as they lie, if they lie so, else copied.

    reached: a list that the backward pass reads, once it has come to it: which parts a gradient reaches; empty: all.
    """
    if len(parts) == 1:
        return parts[0]
    return _Joined.apply([] if reached is None else reached, *parts)  # type: ignore[no-any-return, no-untyped-call]


def _arrays(parameter: torch.Tensor) -> Sequence[torch.Tensor]:
    """The memory of a parameter: codes and scales of one that is stored in rows alone, without those of groups of its own."""
    if isinstance(parameter, QuantizedTensor) and parameter.held.usages == (ROWWISE,):
        plane = parameter.held.plane(ROWWISE)
        return (parameter,) if plane.in_groups else plane.tensors()
    return (parameter,)


def _lies_whole(parts: Sequence[torch.Tensor]) -> bool:
    """Whether parameters lie in memory as they are joined, in all of their arrays."""
    return len(parts) == 1 or all(map(_lie_together, zip(*map(_arrays, parts))))


def _lie_together(parts: Sequence[torch.Tensor]) -> bool:
    begins = [*map(torch.Tensor.data_ptr, parts)]
    ends = [*map(add, begins, map(attrgetter("nbytes"), parts))]
    there = begins[1:] == ends[:-1] and all(map(torch.Tensor.is_contiguous, parts))
    return there and all(map(share_memory, parts, parts[1:]))


def _as_they_lie(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The one array whose rows ``parts`` are."""
    first, rows = parts[0].detach(), sum([part.shape[0] for part in parts])
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def _blank(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A stand-in for the concatenation of ``parts``, with the memory of one element."""
    rows = sum(part.shape[0] for part in parts)
    return torch.empty((), dtype=parts[0].dtype, device=parts[0].device).expand(rows, *parts[0].shape[1:])


def _read(source: Source) -> torch.Tensor:
    module, name, transposed = source
    return _as_read(taken(module._parameters[name]), transposed=transposed)


def _as_read(value: Any, *, transposed: bool) -> torch.Tensor:
    if transposed and isinstance(value, QuantizedTensor):
        value = value.dequantize()  # a view of a quantized tensor is of a class of its own, which kernels do not read
    weight: torch.Tensor = value.mT if transposed else value
    return weight


_instead: ContextVar[Mapping[int, torch.Tensor] | BackwardTape | None] = ContextVar("opfuse_parameters_instead", default=None)


def run_with(instead: Mapping[int, torch.Tensor] | BackwardTape, run: Callable[[], Any]) -> Any:
    """What ``run()`` gives with stand-ins in the place of parameters, by their ``id()``, which take their gradients.

    With a tape, pipelines read the parameters themselves, and record on it how gradients reach them.
    """
    reset = _instead.set(instead)
    try:
        return run()
    finally:
        _instead.reset(reset)


def stand_ins() -> Mapping[int, torch.Tensor] | BackwardTape | None:
    """The stand-ins of parameters by their ``id()``, or the tape, of the :func:`run_with` around; None outside."""
    return _instead.get()


def taken(value: Any) -> Any:
    """The stand-in of a parameter; itself outside of :func:`run_with`."""
    instead = _instead.get()
    return instead.get(id(value), value) if isinstance(instead, Mapping) else value


def replica(module: nn.Module, *, plain: bool = False) -> nn.Module:
    """``module``, or inside of :func:`run_with` a shallow copy over what stands for parameters. plain: a copy whose forward,
    and that of all modules inside, is that of its class.
    """
    if _instead.get() is None and not plain:
        return module
    copy: nn.Module = module.__new__(type(module))
    own = {name: value for name, value in vars(module).items() if not (plain and name == "forward")}
    children = {name: child and replica(child, plain=plain) for name, child in module._modules.items()}
    vars(copy).update(own, _parameters={name: taken(value) for name, value in module._parameters.items()}, _modules=children)
    return copy


def product_of(weights: Sequence[Weight]) -> tuple[list[BasicOperation], MadeParameters | None]:
    """The ops of one product with all ``weights``, one after another in its columns; and the owner of what is made for it."""
    first, columns = weights[0], sum(weight.out_features for weight in weights)
    names = ("weight", "bias") if first.has_bias else ("weight",)
    made = None
    if len(weights) > 1 or first.transposed:
        made = MadeParameters({name: [(w.module, name, w.transposed and name == "weight") for w in weights] for name in names})
    owner: nn.Module = first.module if made is None else made
    ops: list[BasicOperation] = [borrowing(BasicLinear, (first.in_features, columns), owner, "weight")]
    if all(isinstance(weight.module._parameters["weight"], QuantizedTensor) for weight in weights):
        ops[0].__dict__["stored"] = ("weight",)
    if first.has_bias:
        ops.append(borrowing(Bias, (columns,), owner, "bias"))
    return ops, made
