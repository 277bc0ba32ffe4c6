"""Calls of pipelines that a checkpoint repeats in the backward pass, in the context of their first run.

A checkpoint is recognised by what it leaves on Python's stack while it runs its function: ``torch.utils.checkpoint`` in its
non-reentrant kind, or any ``autograd.Function`` whose forward calls pipelines, as reentrant checkpoints are. The first run
records the context of every call (recipe, region, rules, ``on_miss``). The recomputation finds the record by the same object, the
frame of the checkpoint or the ``ctx`` of the function, and makes each call in its recorded context; the ambient one is ignored.

A checkpoint within a checkpoint is repeated by the outer one, and then by itself: they share one record, and each knows where its
own calls begin. A reentrant one runs a backward pass inside of that around it: delayed scales of gradients are updated after the
outermost. The stack is searched only where a checkpoint may be: in a backward pass, under hooks of saved tensors and in the
forward of an ``autograd.Function``.

A checkpoint inside of code under torch.compile is a part of the graph: the compiler puts the calls that it makes again into the
graph of the backward pass. Those of dynamo's graph that have a checkpoint around them know it, and take the run of the compiled
code, which has one ``ctx`` in both passes, for a checkpoint. As the compiler may choose other calls and another order, each call
is found by its number in the code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import Context, copy_context
from typing import Any, NamedTuple, Protocol

import torch

from opfuse.errors import UnsupportedError, describe
from opfuse.events import FIRST_RUN, silenced
from opfuse.recipes.autocast import mark_region_used
from opfuse.recipes.counting import PassAround, count_in, running_pass
from opfuse.recipes.passes import Pass, current_pass, in_compiled_autograd, running
from opfuse.torch_private.autograd import backward_pass, outside_function, saving_hooks
from opfuse.torch_private.checkpoints import FoundCheckpoint, checkpoints, in_compiled_backward, in_searched_run, waiting_stacks


class CalledPipeline(Protocol):
    """A pipeline, or a converted module. structure: a digest of its ops. ops: the ops themselves."""

    @property
    def label(self) -> str: ...

    @property
    def structure(self) -> str: ...

    @property
    def ops(self) -> Sequence[object]: ...


class CheckpointedCall(NamedTuple):
    """A call in compiled code with a checkpoint around it there: its number in the code, and the device on which it runs."""

    number: int
    device: torch.device


class _FirstCall:
    """One call of a first run.

    drawn: by a call in compiled code, the states of torch's generators before it; None if it drew no random numbers. Compilers
    know of no generator that an op draws from; around other calls the checkpoint itself puts states back.
    """

    drawn: _RandomStates | None = None

    def __init__(self, pipeline: CalledPipeline) -> None:
        self.pipeline, self.context = pipeline, copy_context()

    def first(self, kind: Pass, run: Runs, checkpointed: CheckpointedCall | None) -> Any:
        """What ``run()`` gives, which will be repeated."""
        before = None if checkpointed is None else _RandomStates.now(checkpointed.device)
        result = _under(kind, run)
        if before is not None and before.moved():
            self.drawn = before
        return result

    def again(self, run: Runs) -> Any:
        """What ``run()`` gives in the context of the first run."""
        context: Context = self.context.copy()
        return context.run(_again, run)

    def again_in_graph(self, run: Runs) -> Any:
        """The same with the random numbers of the first run, where compiled code makes the call alone."""
        with nullcontext() if self.drawn is None else self.drawn.restored():
            return self.again(run)


class _RandomStates:
    """The states of torch's generators of the CPU and of a device."""

    def __init__(self, device: torch.device, states: Sequence[torch.Tensor]) -> None:
        self.device, self.states = device, states

    @classmethod
    def now(cls, device: torch.device) -> _RandomStates:
        """As they are."""
        on_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
        return cls(device, [torch.get_rng_state(), *on_device])

    def moved(self) -> bool:
        """Whether a generator has drawn since."""
        return not all(map(torch.equal, self.states, _RandomStates.now(self.device).states))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside the block generators are in these states, and after it in those from before."""
        cpu, *on_device = self.states
        with torch.random.fork_rng([self.device] if on_device else [], device_type="cuda"):
            torch.set_rng_state(cpu)
            for state in on_device:
                torch.cuda.set_rng_state(state, self.device)
            yield


class _PartOfCall:
    """The calls of one checkpoint: of those of an outermost one, in order, the ones from ``start`` on.

    reached: the next call to repeat, by backward pass. outer: the backward pass in which the checkpoint was made, by the
    recomputation of one around it; None if in none. places: of compiled code, whose calls are repeated in any order, the places
    of each in ``calls``.
    """

    def __init__(self, calls: list[_FirstCall], start: int, outer: PassAround = None) -> None:
        self.calls = calls
        self.start = start
        self.outer = outer
        self.reached: dict[Any, int] = {}
        self.places: dict[_CallNumber, list[int]] = {}


Runs = Callable[..., Any]

_CallNumber = tuple[int, int]
"""Of a call in compiled code, by which it finds its first run: that of the pipeline, of which several of one form may share the
code, and that of the place in the code.
"""


def repeated(pipeline: CalledPipeline, checkpointed: CheckpointedCall | None = None) -> Callable[[Runs], Any] | None:
    """A function that makes this call of ``pipeline`` if a checkpoint will repeat it or repeats it now; None otherwise.

    checkpointed: of a call in compiled code that has the checkpoint inside of it.
    """
    if checkpointed is not None:
        if current_pass() is not None:
            return None
        if in_compiled_autograd():
            raise _not_repeated(pipeline, "compiled autograd, which runs both passes as one function")
        return _search(pipeline, checkpointed)
    if backward_pass() < 0 and saving_hooks(False) is None and (outside_function() or torch.is_inference_mode_enabled()):
        return None
    if current_pass() is not None:  # called by an op of a call that was found
        return None
    if backward_pass() < 0 and saving_hooks(False) is None and in_searched_run():
        return None
    return _search(pipeline, None)


def _search(pipeline: CalledPipeline, checkpointed: CheckpointedCall | None) -> Callable[[Runs], Any] | None:
    number = id(pipeline), 0 if checkpointed is None else checkpointed.number
    first: list[FoundCheckpoint] = []  # innermost first
    part: _PartOfCall | None = None
    for found in checkpoints(compiled=checkpointed is not None):
        if found.again is None:
            first.append(found)
        elif found.compiled:
            return _of_compiled(pipeline, getattr(found.owner, _NAME, None), number)
        elif (part := getattr(found.owner, _NAME, None)) is not None:
            calls = part.calls
            at = part.reached.get(found.again, part.start)
            if at < len(calls) and _same(pipeline, calls[at].pipeline, strict=found.strict):
                part.reached[found.again] = at + 1
                count_in(part.outer)
                _join(first, calls, at, number, running_pass() if first and not in_compiled_autograd() else None)
                mark_region_used()  # in the region that the function has entered again, if it has
                call: _FirstCall = calls[at]
                return call.again
            if found.strict:
                raise _changed(pipeline, calls[at].pipeline if at < len(calls) else None)
            part = None
    if not first:
        return None
    outermost = getattr(first[-1].owner, _NAME, None)
    calls = [] if outermost is None else outermost.calls
    _join(first, calls, len(calls), number)
    made = _FirstCall(pipeline)
    calls.append(made)
    kind = Pass.TRAINED if any(found.trains for found in first) else Pass.FIRST
    return lambda run: made.first(kind, run, checkpointed)


def _of_compiled(pipeline: CalledPipeline, part: _PartOfCall | None, number: _CallNumber) -> Callable[[Runs], Any]:
    """Makes a call again that compiled code runs in its backward pass."""
    places = [] if part is None else part.places.get(number, [])
    if part is None or len(places) != 1:
        got = f"{len(places)} runs of one call, as of a nested_compile_region" if places else "a result that it needs there alone"
        raise _not_repeated(pipeline, got)
    count_in(part.outer)
    mark_region_used()
    return part.calls[places[0]].again_in_graph


def check_once(label: str) -> None:
    """UnsupportedError for a backward pass inside the function of a checkpoint, which would count its amaxes twice.

    For plans whose gradients have delayed scales. Checked once in each pass, and only where a checkpoint may be: a pass has, on
    every thread, the hooks and the mode of the code that called it.
    """
    task = backward_pass()
    if task == _CHECKED[0] or (task >= 0 and saving_hooks(True) is None and outside_function()):
        return
    stacks = waiting_stacks()
    if any(found.again is None and found.strict for frame in stacks for found in checkpoints(frame, beyond=True)):
        wanted, got = "a backward pass that runs once", "one inside the function of a checkpoint, under delayed scaling"
        cure = "run it outside of the checkpoint, or under a recipe that keeps no state"
        raise UnsupportedError(describe(f"backward of {label}", wanted=wanted, got=got, cure=cure))
    _CHECKED[0] = task


_CHECKED: list[int | None] = [None]
"""The backward pass that was checked last."""


def _join(first: list[FoundCheckpoint], calls: list[_FirstCall], at: int, number: _CallNumber, outer: PassAround = None) -> None:
    """Give ``calls``, from call ``at`` on, to the checkpoints that run for the first time."""
    for found in first:
        part: _PartOfCall | None = getattr(found.owner, _NAME, None)
        if part is None:
            part = _PartOfCall(calls, at, outer)
            setattr(found.owner, _NAME, part)
        if found.compiled:
            part.places.setdefault(number, []).append(at)


_NAME = "_opfuse_calls"
"""The attribute of a checkpoint, or of the ``ctx`` of a function, that holds its part of a record."""


def _same(one: CalledPipeline, other: CalledPipeline, *, strict: bool) -> bool:
    """Whether one call repeats another. Strictly by structure: a function may slice a pipeline, or make its ops, at each run."""
    if strict:
        return one.structure == other.structure
    return len(one.ops) == len(other.ops) and all(a is b for a, b in zip(one.ops, other.ops))


def _under(kind: Pass, run: Runs) -> Any:
    with running(kind):
        return run()


def _again(run: Runs) -> Any:
    with silenced(*FIRST_RUN):
        return _under(Pass.RECOMPUTE, run)


def _changed(pipeline: CalledPipeline, wanted: CalledPipeline | None) -> UnsupportedError:
    label = "no further call" if wanted is None else f"a call of {wanted.label}"
    cure = "checkpoint a function that calls the same pipelines whenever it runs"
    return UnsupportedError(describe("recomputation by a checkpoint", wanted=label, got=f"a call of {pipeline.label}", cure=cure))


def _not_repeated(pipeline: CalledPipeline, got: str) -> UnsupportedError:
    cure = "checkpoint the compiled function, or compile without fullgraph what is inside of the checkpoint"
    where = f"{pipeline.label} in a graph of torch.compile"
    wanted = "a call whose one run in the forward pass the backward pass repeats"
    return UnsupportedError(describe(where, wanted=wanted, got=got, cure=cure))


def check_recomputed_in_graph(label: str) -> None:
    """UnsupportedError where compiled code runs a call again in its backward pass: its recipe and its scales are gone."""
    if backward_pass() >= 0 and in_compiled_backward():
        where, wanted = f"{label} in a graph of torch.compile", "a call in the forward pass"
        got = "one that the compiler put into the backward pass, where it would run under another recipe"
        cure = (
            "set torch._functorch.config.activation_memory_budget = 1, or compile without fullgraph what a result is for that "
            "the backward pass alone needs"
        )
        raise UnsupportedError(describe(where, wanted=wanted, got=got, cure=cure))
