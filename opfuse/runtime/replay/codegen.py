"""Writes a program as one Python function for its recording, with constants for everything that is known."""

from __future__ import annotations

import keyword
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from opfuse.errors import PipelineError, describe
from opfuse.kernels.engine import launch as launching
from opfuse.kernels.engine.bindings import driver, runtime
from opfuse.runtime.replay.host_bytes import bytes_of
from opfuse.runtime.replay.instructions import CallStep, CopyStep, LaunchStep, OpStep, ProductStep, Ref, Step, TensorOffset
from opfuse.runtime.replay.launch_graph import QueueFunction
from opfuse.runtime.replay.memory_plan import last_reads
from opfuse.torch_private.devices import empty_on
from opfuse.torch_private.operations import scaled_mm_into

if TYPE_CHECKING:
    from opfuse.runtime.replay.launch_args import Frame

_aten: Any = torch.ops.aten

ProgramFunction = Callable[[list[Any], "Frame", int], list[torch.Tensor]]
"""Tensors that come in (the list is emptied), the call's frame, the stream; the results."""

_LITERALS = (int, bool, str, type(None))

_BINDINGS: dict[Any, Callable[..., Any]] = {
    _aten.mm.default: torch.mm,
    _aten.t.default: torch.t,
    _aten.view.dtype: torch.Tensor.view,
    _aten.view.default: torch.Tensor.view,
    _aten._scaled_mm_v2.default: scaled_mm_into,
}
"""Torch's own bindings of ops, which cost less than a call by the op's name."""


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class CompiledText:
    """A text of Python, and what it compiles to. nbytes: what both take on the host."""

    text: str
    code: CodeType
    nbytes: int


_COMPILED: WeakValueDictionary[str, CompiledText] = WeakValueDictionary()


def compiled(text: str) -> CompiledText:
    """``text`` compiled: once for all programs that have it, as those of equal layers have."""
    found = _COMPILED.get(text)
    if found is None:
        code = compile(text, "<opfuse program>", "exec")
        found = _COMPILED[text] = CompiledText(text, code, bytes_of([text, code]))
    return found


class Line:
    """Writes the text of the function, and collects the values of its constants.

    device: on which it allocates. addressed: the base of each tensor whose address is read, by number. inside: offsets of tensors
    that lie in the slab, by number, and so have no variable; the slab's own is 0. together: whether ``run`` makes all
    memory, and then has ``queue`` queue everything, so that a CUDA graph can stand for it.
    """

    def __init__(
        self,
        device: torch.device | None,
        addressed: Mapping[int, int],
        inside: Mapping[int, int],
        *,
        together: bool = False,
    ) -> None:
        self._constants: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._lines: list[str] = []
        self._queued: list[str] = [] if together else self._lines
        self._together, self._inside = together, inside
        self._addressed, self._device = addressed, device
        self._launches = self._products = 0
        self._empty = empty_on(device) if device is not None else None

    def write(
        self,
        steps: Sequence[Step],
        arguments: Sequence[int],
        results: Sequence[int],
        *,
        slab: int,
        zeroed: int,
    ) -> tuple[CompiledText, ProgramFunction, QueueFunction | None]:
        """The text, and the function that it defines over the constants.

        arguments, results: numbers of the inputs and results. slab: its bytes, of which the first ``zeroed`` are set to 0.
        """
        inside = self._inside.keys()
        last, lasting = last_reads(steps), {*inside, *results}
        self._start(arguments, last, lasting)
        self._make_slab(slab, zeroed)
        defined = {*arguments, *inside}
        for i, step in enumerate(steps):
            _check_defined(step, defined)
            new = [n for n in getattr(step, "results", ()) if n not in defined]
            if not (isinstance(step, OpStep) and len(step.results) == 1 and step.results[0] in inside):
                self._step(step)
                self._moved(new)
            defined.update(new)
            self._release([n for n in dict.fromkeys((*step.reads(), *new)) if last.get(n, i) == i and n not in lasting])
        if self._together:
            self._say("frame.queue(stream)")
        self._say(f"return [{', '.join(map(_name, results))}]")
        return self._function()

    def _function(self) -> tuple[CompiledText, ProgramFunction, QueueFunction | None]:
        parts = ["def run(given, frame, stream):", *(f"    {line}" for line in self._lines)]
        if self._together:
            parts += ["", "def queue(at, arguments, products, stream):", *(f"    {line}" for line in self._queued)]
        text = compiled("\n".join(parts))
        namespace = dict(self._constants)
        exec(text.code, namespace)
        return text, namespace["run"], namespace.get("queue")

    # -- what is written ---------------------------------------------------------------------------------------------

    def _say(self, line: str) -> None:
        self._lines.append(line)

    def _constant(self, name: str, value: Any) -> str:
        """The name of a constant of the function."""
        self._constants[name] = value
        return name

    def _new_constant(self, value: Any) -> str:
        """The name of a constant that has none of its own; one for the same object."""
        found = self._names.get(id(value))
        if found is None:
            found = self._names[id(value)] = self._constant(sys.intern(f"c{len(self._constants)}"), value)
        return found

    def _start(self, arguments: Sequence[int], last: Mapping[int, int], lasting: Collection[int]) -> None:
        if arguments:
            self._say(f"{_targets(arguments)}given")
        self._say("given.clear()")
        if self._addressed:
            names = ["at", "move"] if self._together else ["at", "move", "arguments", "products"]
            self._say(f"{', '.join(names)} = {', '.join(f'frame.{name}' for name in names)}")
        self._moved(arguments)
        self._release([number for number in arguments if number not in last and number not in lasting])

    def _make_slab(self, size: int, zeroed: int) -> None:
        if size:
            self._room(_name(SLAB), (size,), torch.uint8)
            self._moved([SLAB])
            if zeroed:
                self._zero(SLAB, zeroed)

    def _moved(self, numbers: Collection[int]) -> None:
        """Compare the addresses of tensors that were just made with those that the frame has."""
        for number in numbers:
            if number in self._addressed:
                base = self._addressed[number]
                self._say(f"address = {_name(number)}.data_ptr()")
                self._say(f"if address != at[{base}]: move({base}, address)")

    def _release(self, numbers: Collection[int]) -> None:
        if numbers and not self._together:
            self._say(f"del {', '.join(map(_name, numbers))}")

    def _room(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        if self._empty is None:
            empty, where = self._constant("torch_empty", torch.empty), self._constant("device", self._device)
            self._say(f"{name} = {empty}({tuple(shape)}, dtype={self._dtype(dtype)}, device={where})")
            return
        strides = [1]
        for size in reversed(shape[1:]):
            strides.append(strides[-1] * max(size, 1))
        strides = strides[: len(shape)][::-1]
        self._say(f"{name} = {self._constant('empty', self._empty)}({tuple(shape)}, {tuple(strides)}, {self._dtype(dtype)})")

    def _dtype(self, dtype: torch.dtype) -> str:
        return self._constant(str(dtype).replace(".", "_"), dtype)

    def _zero(self, number: int, size: int) -> None:
        """Fill a tensor that was just made with zeros."""
        if self._together and number in self._addressed:
            lines, address = self._queued, f"at[{self._addressed[number]}]"
        else:
            lines, address = self._lines, f"{_name(number)}.data_ptr()"
        lines.append(f"{self._constant('memset', runtime().memsetAsync)}({address}, 0, {size}, stream)")

    # -- one step ----------------------------------------------------------------------------------------------------

    def _step(self, step: Step) -> None:
        if isinstance(step, LaunchStep):
            kernel = self._new_constant(launching.loaded(step.variant, step.entry, step.device).pointer)
            blocks, threads, shared = step.grid
            launch = self._constant("launch", driver().launchKernel)
            grid = f"{blocks}, 1, 1, {threads}, 1, 1, {shared}"
            self._queued.append(f"{launch}({kernel}, {grid}, stream, arguments[{self._launches}], 0)  # {step.entry}")
            self._launches += 1
        elif isinstance(step, ProductStep):
            self._queued.append(f"products[{self._products}](stream)")
            self._products += 1
        elif isinstance(step, CopyStep):
            copy, kind = self._constant("memcpy", runtime().memcpyAsync), runtime().memcpyDeviceToDevice
            target, source = map(self._address, (step.target, step.source))
            self._queued.append(f"{copy}({target}, {source}, {step.nbytes}, {kind}, stream)")
        elif isinstance(step, CallStep):
            self._say(f"{_targets(step.results)}{self._new_constant(step.function)}()")
        elif (room := plain_room(step, self._device)) is not None:
            shape, dtype = room
            (number,) = step.results
            self._room(_name(number), shape, dtype)
            if step.op is _aten.zeros.default:
                size = dtype.itemsize
                for length in shape:
                    size *= length
                if size:
                    self._zero(number, size)
        else:
            self._op(step)

    def _address(self, place: TensorOffset) -> str:
        number, offset = located(place, self._inside)
        base = f"at[{self._addressed[number]}]"
        return f"{base} + {offset}" if offset else base

    def _op(self, step: OpStep) -> None:
        op = self._new_constant(_BINDINGS.get(step.op, step.op))
        arguments = [self._text(each) for each in step.args]
        odd = {name: each for name, each in step.kwargs.items() if keyword.iskeyword(name)}
        arguments += [f"{name}={self._text(each)}" for name, each in step.kwargs.items() if name not in odd]
        if odd:
            arguments.append(f"**{self._text(odd)}")
        target = f"{_name(step.results[0])} = " if step.single else _targets(step.results)
        self._say(f"{target}{op}({', '.join(arguments)})")

    def _text(self, value: Any) -> str:
        """An argument, with the variables of the tensors in it."""
        kind = type(value)
        if kind is Ref:
            return _name(value.number)
        if kind is list:
            return f"[{', '.join(map(self._text, value))}]"
        if kind is tuple:
            return f"({''.join(f'{self._text(each)}, ' for each in value)})"
        if kind is dict:
            return f"{{{', '.join(f'{name!r}: {self._text(each)}' for name, each in value.items())}}}"
        return repr(value) if kind in _LITERALS else self._new_constant(value)


SLAB = -1
"""The number of the block of small tensors that only this program's kernels read."""


def located(place: TensorOffset, inside: Mapping[int, int]) -> TensorOffset:
    """A place in a tensor that lies in the slab as one in the slab; any other as it is. inside: offsets there, by number."""
    start = inside.get(place.number)
    return place if start is None else TensorOffset(SLAB, start + place.offset)


MAKES_ROOM = (_aten.empty.memory_format, _aten.zeros.default)
"""Ops that allocate a tensor, uninitialised or zero."""


def plain_room(step: Step, device: torch.device | None) -> tuple[Sequence[int], torch.dtype] | None:
    """Shape and dtype, if the step only allocates a contiguous tensor on the program's device; else None."""
    if not isinstance(step, OpStep) or step.op not in MAKES_ROOM or device is None or len(step.args) != 1:
        return None
    dtype, where = step.kwargs.get("dtype"), step.kwargs.get("device")
    if dtype is None or where is None or step.kwargs.get("pin_memory") or not _USUAL.issuperset(step.kwargs):
        return None
    return (step.args[0], dtype) if where.type == device.type and where.index in (None, device.index) else None


_USUAL = {"dtype", "device", "layout", "pin_memory"}


def _check_defined(step: Step, defined: Collection[int]) -> None:
    """PipelineError for a step that reads memory which no step before it has made: a kernel would take any address."""
    if unmade := [number for number in step.reads() if number not in defined]:
        got, cure = f"{step} before {', '.join(map(_name, unmade))}", "set OPFUSE_PROGRAMS=0, and report this"
        raise PipelineError(describe("a program", wanted="memory that is made before a step reads it", got=got, cure=cure))


def _name(number: int) -> str:
    return "slab" if number == SLAB else f"t{number}"


def _targets(numbers: Sequence[int]) -> str:
    return f"{', '.join(map(_name, numbers))}, = " if numbers else ""
