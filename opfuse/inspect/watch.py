"""``opfuse.watch``: what casts do to values while a model trains, looked at in some of its steps."""

from __future__ import annotations

import resource
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from opfuse.core.operation import FusibleOperation
from opfuse.core.protocol import runs_ops
from opfuse.domains import NUMBER
from opfuse.errors import OpfuseWarning, PipelineError, describe, nearest, notice
from opfuse.events import GroupRan
from opfuse.inspect.alike import aligned
from opfuse.inspect.casts import DeviceFigures, figures
from opfuse.inspect.writers import OF_STEP, WATCHED, sink_of
from opfuse.recipes.passes import Pass, current_pass
from opfuse.runtime.interpret.observed import observed
from opfuse.runtime.plans.trace import since_start
from opfuse.tensors.storage import QuantizedStorage
from opfuse.tensors.tensor import QuantizedTensor

ALARMS: Mapping[str, float] = {"nonfinite": 0.0, "saturated": 0.01, "flushed": 0.5, "sqnr": 8.0}
"""Limits by default: shares above these are warned of, and a signal-to-noise ratio, in dB, below this."""

_WARNINGS = {
    "nonfinite": (
        "are NaN or infinite",
        "look at the op, or the data, that these values come from; later casts of the step with such values are in the records",
    ),
    "saturated": (
        "saturated",
        "give the scale room: margin of delayed scaling, a rule that rounds scales up, or E5M2 for this tensor",
    ),
    "flushed": (
        "that were not zero became zero",
        "use finer blocks or a wider exponent: MXFP8, E5M2 for gradients, or backward_override='high_precision'",
    ),
    "sqnr": (
        "the signal-to-noise ratio",
        "leave this layer in high precision, or give it more bits: opfuse advise says what was measured",
    ),
}
"""What a warning says of each figure, and what to do."""

_OF_WEIGHT = "check the weight after loading: if it is finite there, the optimizer wrote it one step earlier"
"""What to do about a weight that is not finite, which no op makes."""

RECORDS = 10_000
"""The latest records that a watch keeps."""


class LookedAt:
    """Counts the training calls of ``model`` and observes those for whose number ``due`` returns a listener.

    Calls that leave no trace, as of :func:`opfuse.explain`, are none of them.

    step: the number of calls so far.
    """

    def __init__(self, model: nn.Module, due: Callable[[int], Callable[[GroupRan], None] | None]) -> None:
        self.step = 0
        self.due = due
        self._watching: AbstractContextManager[None] | None = None
        self._hooks = (
            model.register_forward_pre_hook(self._before),
            # Prepended, so that of several looks at one model the last to begin is the first to end, as contexts must.
            model.register_forward_hook(self._after, always_call=True, prepend=True),
        )

    def _before(self, model: nn.Module, inputs: Any) -> None:
        if not model.training or current_pass() is Pass.DRY_RUN:
            return
        self.step += 1
        if self._watching is None and (listener := self.due(self.step)) is not None:
            self._watching = observed(listener)
            self._watching.__enter__()

    def _after(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if self._watching is not None and current_pass() is not Pass.DRY_RUN:
            watching, self._watching = self._watching, None
            watching.__exit__(None, None, None)

    def close(self) -> None:
        """Look no longer."""
        for hook in self._hooks:
            hook.remove()


class Watch:
    """Watches the casts of ``model`` until :meth:`close`, or until it is left as a context manager.

    Figures of a GPU are read, written and warned of at the next call of the model, when ``records`` is asked for, or at the end:
    the watched step itself waits for nothing.
    """

    def __init__(self, model: nn.Module, every: int, to: object, alarms: Mapping[str, float]) -> None:
        self.every = every
        self._records: list[dict[str, Any]] = []
        self._found: list[tuple[dict[str, Any], DeviceFigures]] = []
        self.alarms = alarms
        self._sink = sink_of(to)
        self._warned: set[tuple[str, str, str, str]] = set()
        self._spread = 0  # the step of the latest alarm of values that are not finite
        self._names = _paths(model)
        self._logged: list[dict[str, Any]] = []
        self._before: float | None = None
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._sink.begin({"model": type(model).__name__, "every": every, "modules": [*_told(model)]})
        self._calls = LookedAt(model, self._due)

    @property
    def step(self) -> int:
        """Training calls so far."""
        return self._calls.step

    @step.setter
    def step(self, number: int) -> None:
        self._calls.step = number

    @property
    def records(self) -> list[dict[str, Any]]:
        """What was found, the latest last.

        ``step``, ``op`` (its path in the model), ``tensor`` (its role), and the fields of
        :class:`~opfuse.inspect.casts.CastFigures`.
        """
        self._read()
        return self._records

    def log(self, **figures: float | torch.Tensor) -> None:
        """Record figures of the step that the model has just made, as ``log(loss=loss, learning_rate=rate)``.

        With them go the step's number, the milliseconds since the call before, and the bytes of memory: what
        :class:`~opfuse.inspect.trace.StepLine` says. ``opfuse report`` draws ``loss``, ``learning_rate`` and all others over
        steps. Figures of a GPU are read at the next step whose casts are looked at, or at the end. PipelineError for what is not
        one number, and for names that records have already.
        """
        for name, value in figures.items():
            if name in _TAKEN or not (isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)):
                wanted, got = (f"a name beside {', '.join(_TAKEN)}", name) if name in _TAKEN else ("one number", repr(value))
                raise PipelineError(describe(f"log({name}=)", wanted=wanted, got=got, cure="pass loss=loss, learning_rate=rate"))
        now = since_start()
        ms = None if self._before is None else round((now - self._before) * 1e3, 3)
        self._before = now
        memory, peak = memory_of(self._device)
        own = {"step": self.step, "seconds": round(now, 6), "ms": ms, "memory": memory, "peak": peak}
        self._logged.append({**own, **{name: v.detach() if isinstance(v, torch.Tensor) else v for name, v in figures.items()}})
        if not any(isinstance(value, torch.Tensor) and value.is_cuda for value in self._logged[-1].values()):
            self._read_logged()

    def _read_logged(self) -> None:
        found, self._logged = self._logged, []
        for record in found:
            self._sink.write({name: v.item() if isinstance(v, torch.Tensor) else v for name, v in record.items()})

    def _due(self, step: int) -> Callable[[GroupRan], None] | None:
        self._read()
        if (step - 1) % self.every:
            return None
        self._read_logged()
        return partial(self._cast_ran, step)

    def close(self) -> None:
        """Watch no longer."""
        self._calls.close()
        self._read()
        self._read_logged()
        self._sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cast_ran(self, step: int, run: GroupRan) -> None:
        """Take the figures of a group of nodes that ran in a watched step, if it was a cast."""
        made = run.result.record if isinstance(run.result, QuantizedTensor) else run.result
        if run.role is None or run.source is None or not isinstance(made, QuantizedStorage):
            return
        place = {"step": step, "op": self._names.get(id(run.ops[0]), run.ops[0].label), "tensor": run.role}
        with torch.no_grad():
            self._found += ((place, figure) for figure in figures(run.source, made))
        if made.device.type != "cuda":
            self._read()

    def _read(self) -> None:
        found, self._found = self._found, []
        for place, each in found:
            record = {**place, **each.read().record()}
            self._records = [*self._records[-RECORDS + 1 :], record]
            self._sink.write(record)
            self._alarm(record)

    def _alarm(self, record: Mapping[str, Any]) -> None:
        for name, limit in self.alarms.items():
            value, place = record[name], (record["op"], record["tensor"], record["plane"], name)
            if value is None or place in self._warned or (value >= limit if name == "sqnr" else value <= limit):
                continue
            self._warned.add(place)
            if name == "nonfinite" and record["step"] == self._spread:
                continue  # a value that is not finite spreads to all that is computed from it
            self._spread = record["step"] if name == "nonfinite" else self._spread
            where = f"op {record['op']}, {record['tensor']}, step {record['step']}"
            what, cure = _WARNINGS[name]
            if name == "sqnr":
                got = f"{what} is {value:.3g} dB (limit {limit:.3g} dB)"
            else:
                got = f"{100 * value:.3g} % of the values {what} (limit {100 * limit:.3g} %)"
            if name == "nonfinite" and record["tensor"].startswith("weight"):
                cure = _OF_WEIGHT
            text = notice(where, got=f"{got}, cast to {record['format']}", cure=cure)
            warnings.warn(text, OpfuseWarning, stacklevel=2)

    def __str__(self) -> str:
        """The latest record of each cast."""
        return "\n".join(_rows(self.records))


def watch(model: nn.Module, *, every: int = 100, to: object = None, alarms: Mapping[str, float] = ALARMS) -> Watch:
    """Record figures of every cast in the first and each ``every``-th training call of ``model``, and in its backward pass.

    For each cast: amax, shares of saturated, zeroed and non-finite values, the signal-to-noise ratio, and a histogram of scales.
    to: where records go besides ``records``: a directory, of which ``opfuse report`` makes a page, and more, see
    :func:`~opfuse.inspect.writers.sink_of`. :meth:`Watch.log` adds losses and other figures of a step. alarms: limits beyond
    which an OpfuseWarning names op, tensor, step, value and cure, once each; of values that are not finite, the first of a step.

    A watched call runs op by op, with the same bits. Under ``rounding="single"``, where that would change bits, it stays fused,
    and casts inside fusions are not reported. Other calls cost one comparison. PipelineError for a module without ops, or for
    ``every`` below 1.
    """
    if type(every) is not int or every < 1:
        raise PipelineError(describe("watch(every=)", wanted="an integer of at least 1", got=repr(every), cure="pass every=100"))
    if not isinstance(model, nn.Module) or not _paths(model):
        cure = "pass a model that is made of opfuse.ops, or that fuse_ has converted"
        raise PipelineError(describe("watch", wanted="a module with ops of opfuse", got=type(model).__name__, cure=cure))
    if not isinstance(alarms, Mapping):
        cure = "pass alarms={'sqnr': 30.0}, or alarms={} for none"
        raise PipelineError(describe("watch(alarms=)", wanted="limits by figure", got=repr(alarms), cure=cure))
    for name, limit in alarms.items():
        if name not in ALARMS:
            got, cure = f"{name!r}{nearest(str(name), ALARMS)}", f"name some of {', '.join(ALARMS)}"
            raise PipelineError(describe("watch(alarms=)", wanted="figures that are found", got=got, cure=cure))
        NUMBER.checked(f"watch(alarms=) {name}", limit, PipelineError)
    return Watch(model, every, to, alarms)


def _paths(model: nn.Module) -> dict[int, str]:
    """For each basic op the path of the outermost op that it belongs to."""
    found: dict[int, str] = {}
    for path, op in _ops(model):
        for basic in op.basic_ops:
            found.setdefault(id(basic), path or type(op).__name__)
    return found


def _ops(model: nn.Module) -> Iterator[tuple[str, FusibleOperation]]:
    for path, module in model.named_modules():
        if isinstance(module, FusibleOperation):
            yield path, module
        if (forward := runs_ops(module)) is not None:  # of a converted module
            yield from forward.named_ops()


_TAKEN = ("step", "op", *OF_STEP)


def memory_of(device: torch.device) -> tuple[int, int]:
    """Bytes that are allocated on a GPU, and that were at most; of the CPU, those of this process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return peak, peak
    used = pages * resource.getpagesize()
    return used, max(used, peak)


def _told(model: nn.Module) -> Iterator[Sequence[str]]:
    """What ``fuse_`` told of a model that it converted; of one that was converted part by part, what it told of the first."""
    yield from next((forward.told() for forward in map(runs_ops, model.modules()) if forward is not None), ())


_HEAD = tuple(name for name in WATCHED if name != "nonfinite")


def _rows(records: list[dict[str, Any]]) -> Iterator[str]:
    latest = {(record["op"], record["tensor"], record["plane"]): record for record in records}
    return aligned([_HEAD, *(tuple(map(_cell, (record[name] for name in _HEAD))) for record in latest.values())])


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
