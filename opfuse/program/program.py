"""A recorded run as a program: fill in addresses, launch, in a straight line."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from opfuse.kernels.engine import launch as launching
from opfuse.kernels.engine.bindings import driver
from opfuse.program.cublaslt import Form, Product, library
from opfuse.program.slab import Slab, last_reads, slab_of
from opfuse.program.steps import CallStep, LaunchStep, OpStep, ProductStep, Ref, Step, numbers_in
from opfuse.program.tape import Tape

_aten: Any = torch.ops.aten
_WORD = 8

Values = list[Any]
"""Tensors by number; None where only an address is known, or no longer."""


class Frame:
    """What a call writes for the device's libraries: the parameters of all launches, and descriptors of products."""

    def __init__(self, parameters: Sequence[bytes], forms: Sequence[Form]) -> None:
        self.products = [Product(form) for form in forms]
        sizes = [-(-len(parameter) // _WORD) * _WORD for parameter in parameters]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        packed = b"".join(parameter.ljust(size, b"\0") for parameter, size in zip(parameters, sizes))
        self._buffer = ctypes.create_string_buffer(packed, len(packed) or 1)
        base = ctypes.addressof(self._buffer)
        self._pointers = [(ctypes.c_void_p * 1)(base + start) for start in starts]
        self.starts = [start // _WORD for start in starts]
        self.words = memoryview(self._buffer).cast("B")[: sum(sizes)].cast("Q")
        self.arguments = [ctypes.addressof(pointer) for pointer in self._pointers]


Run = Callable[[Values, list[int], Frame], None]


class Program:
    """What a tape recorded, to be run for tensors that look like those of the recording.

    Memory that only kernels see lies in one slab, zeroed memory in another; a tensor is made where torch reads it or the caller
    gets it. Threads may run a program at the same time: each call has a frame of its own.
    """

    def __init__(self, tape: Tape, results: Sequence[int]) -> None:
        """results: the numbers of the tensors that a call returns."""
        self.results = tuple(results)
        self._count, self._given = len(tape.tensors), len(tape.given)
        self.steps = _needed([each for step in tape.steps for each in _by_address(tape, step)], self.results)
        self._launches = [step for step in self.steps if isinstance(step, LaunchStep)]
        self._products = [step for step in self.steps if isinstance(step, ProductStep)]
        self._frames = [self._new_frame()]
        by_address: list[LaunchStep | ProductStep] = [*self._launches, *self._products]
        self._device = by_address[0].device if by_address else None
        workspace = max((product.workspace for product in self._frames[0].products), default=0)
        sizes = {
            i: t.untyped_storage().nbytes() for i, t in enumerate(tape.tensors) if t.is_cuda and t.get_device() == self._device
        }
        self.slab = slab_of(self.steps, sizes, _aten.empty.memory_format, self.results, reserved=workspace)
        self.zeros = slab_of(self.steps, sizes, _aten.zeros.default, self.results, reuses=False)
        self._addressed = {number for step in by_address for number in step.reads()}
        self._given_addresses = tuple(number for number in range(self._given) if number in self._addressed)
        self._run = self._line()

    def _new_frame(self) -> Frame:
        return Frame([step.parameter for step in self._launches], [step.form for step in self._products])

    def __call__(self, given: Sequence[torch.Tensor]) -> list[Any]:
        """The results. given: the tensors that come in, in the order of the recording."""
        if self._device is not None and not launching.is_current(self._device):
            with launching.on_device(self._device):
                return self(given)
        values: Values = [*given, *(None,) * (self._count - self._given)]
        addresses = [0] * (self._count + 1)
        for number in self._given_addresses:
            addresses[number] = values[number].data_ptr()
        memory = [self._room(torch.empty, self.slab, addresses), self._room(torch.zeros, self.zeros, addresses)]
        addresses[-1] = memory[0].data_ptr() if memory[0] is not None else 0
        try:
            frame = self._frames.pop()
        except IndexError:  # other calls have them all
            frame = self._new_frame()
        for run in self._run:
            run(values, addresses, frame)
        self._frames.append(frame)
        return [values[number] for number in self.results]

    def _room(self, make: Callable[..., torch.Tensor], slab: Slab, addresses: list[int]) -> torch.Tensor | None:
        if not slab.size:
            return None
        memory = make(slab.size, dtype=torch.uint8, device=self._device)
        base = memory.data_ptr()
        for number, offset in slab.offsets.items():
            addresses[number] = base + offset
        return memory

    # -- the line ----------------------------------------------------------------------------------------------------

    def _line(self) -> list[Run]:
        """What a call runs, one after the other; a tensor is let go after its last reader."""
        placed = self.slab.offsets.keys() | self.zeros.offsets.keys()
        last, kept = last_reads(self.steps), placed | set(self.results)
        line: list[Run] = []
        for i, step in enumerate(self.steps):
            if not (isinstance(step, OpStep) and len(step.results) == 1 and step.results[0] in placed):
                line.append(self._running(step))
            if gone := [n for n in dict.fromkeys(step.reads()) if last[n] == i and n not in kept]:
                line.append(_let_go(gone))
        return line

    def _running(self, step: Step) -> Run:
        if isinstance(step, LaunchStep):
            index = self._launches.index(step)
            return _launch(step, index, self._frames[0].starts[index])
        if isinstance(step, ProductStep):
            return _product(step, self._products.index(step))
        if isinstance(step, CallStep):
            return _call(step)
        return _op(step, {number for number in step.results if number in self._addressed})


def _launch(step: LaunchStep, index: int, start: int) -> Run:
    holes = tuple((start + hole.word, *hole.place) for hole in step.holes)
    kernel = launching.function(step.variant, step.entry, step.device)
    launch, stream_of, device = driver().launchKernel, torch._C._cuda_getCurrentRawStream, step.device
    (blocks, threads, shared) = step.grid

    def run(values: Values, addresses: list[int], frame: Frame) -> None:
        words = frame.words
        for word, number, offset in holes:
            words[word] = addresses[number] + offset
        launch(kernel, blocks, 1, 1, threads, 1, 1, shared, stream_of(device), frame.arguments[index], 0)

    return run


def _product(step: ProductStep, index: int) -> Run:
    (left, a), (right, b), (left_scale, c), (right_scale, d), (out, e) = step.places
    device, stream_of = step.form.device, torch._C._cuda_getCurrentRawStream

    def run(values: Values, addresses: list[int], frame: Frame) -> None:
        frame.products[index](
            (
                addresses[left] + a,
                addresses[right] + b,
                addresses[left_scale] + c,
                addresses[right_scale] + d,
                addresses[out] + e,
            ),
            addresses[-1],
            stream_of(device),
        )

    return run


def _call(step: CallStep) -> Run:
    function, results = step.function, step.results

    def run(values: Values, addresses: list[int], frame: Frame) -> None:
        for number, tensor in zip(results, function(), strict=True):
            values[number], addresses[number] = tensor, tensor.data_ptr()

    return run


def _let_go(numbers: Sequence[int]) -> Run:
    def run(values: Values, addresses: list[int], frame: Frame) -> None:
        for number in numbers:
            values[number] = None

    return run


def _op(step: OpStep, addressed: set[int]) -> Run:
    op, args, kwargs, results = _BINDINGS.get(step.op, step.op), step.args, step.kwargs, step.results
    is_flat = not any(True for _ in numbers_in([a for a in (*args, *kwargs.values()) if not isinstance(a, Ref)]))
    places = tuple(arg.number if isinstance(arg, Ref) else None for arg in args) if is_flat else ()

    def filled(values: Values) -> Any:
        if is_flat:
            return op(*[arg if at is None else values[at] for arg, at in zip(args, places)], **kwargs)
        return op(*_filled(args, values), **_filled(kwargs, values))

    def run_one(values: Values, addresses: list[int], frame: Frame) -> None:
        values[first] = filled(values)

    def run_addressed(values: Values, addresses: list[int], frame: Frame) -> None:
        tensor = values[first] = filled(values)
        addresses[first] = tensor.data_ptr()

    def run_all(values: Values, addresses: list[int], frame: Frame) -> None:
        made = filled(values)
        for number, tensor in zip(results, (made,) if step.single else made or ()):
            values[number], addresses[number] = tensor, tensor.data_ptr()

    if not step.single:
        return run_all
    (first,) = results
    return run_addressed if addressed else run_one


def _filled(value: Any, values: Values) -> Any:
    """Arguments with the tensors in place of their numbers."""
    kind = type(value)
    if kind is Ref:
        return values[value.number]
    if kind is list or kind is tuple:
        return kind([_filled(each, values) for each in value])
    if kind is dict:
        return {name: _filled(each, values) for name, each in value.items()}
    return value


# -- what a program makes of a tape ------------------------------------------------------------------------------------------


def _needed(steps: Sequence[Step], results: Sequence[int]) -> list[Step]:
    """Without the ops that make what nobody reads: views whose address alone was read, and the memory of what was folded."""
    read, kept = set(results), []
    for step in reversed(steps):
        if isinstance(step, OpStep) and step.is_pure and read.isdisjoint(step.results):
            continue
        read.update(step.reads())
        kept.append(step)
    return kept[::-1]


def _by_address(tape: Tape, step: Step) -> list[Step]:
    """``step``, or if it is a product that torch hands to cuBLASLt, the same by addresses, after an op that makes room for it."""
    if not isinstance(step, OpStep) or step.op not in _SCALED_MM or library() is None:
        return [step]
    missing = step.op._schema.arguments[len(step.args) :]
    given = [*step.args, *(step.kwargs.get(argument.name, argument.default_value) for argument in missing)]
    left, right, left_scales, left_scaling, _, right_scales, right_scaling, _, bias, _, _, fast, *_ = given
    a, b, out = (tape.tensors[number] for number in (left.number, right.number, step.results[0]))
    if not a.is_cuda or bias is not None or not (a.is_contiguous() and b.t().is_contiguous() and out.is_contiguous()):
        return [step]
    form = Form(
        len(a), b.shape[1], b.shape[0], a.dtype, b.dtype, out.dtype, left_scaling[0], right_scaling[0], bool(fast), a.get_device()
    )
    if not Product(form).found:
        return [step]
    numbers = left.number, right.number, left_scales[0].number, right_scales[0].number, step.results[0]
    product = ProductStep(form, *(tape.place(number) for number in numbers))
    if step.op is _aten._scaled_mm_v2.out:
        return [product]
    room = {"dtype": out.dtype, "device": out.device}
    return [OpStep(_aten.empty.memory_format, (list(out.shape),), room, step.results, single=True), product]


_SCALED_MM = (_aten._scaled_mm_v2.default, _aten._scaled_mm_v2.out)


def _empty(size: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=device)


def _zeros(size: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    return torch.zeros(size, dtype=dtype, device=device)


_BINDINGS: dict[Any, Callable[..., Any]] = {
    _aten.empty.memory_format: _empty,
    _aten.zeros.default: _zeros,
    _aten.mm.default: torch.mm,
    _aten.t.default: torch.t,
    _aten.view.dtype: torch.Tensor.view,
    _aten.view.default: torch.Tensor.view,
    _aten._scaled_mm_v2.default: torch._scaled_mm_v2,
}
"""Torch's own bindings of ops, which cost less than a call by the op's name."""
