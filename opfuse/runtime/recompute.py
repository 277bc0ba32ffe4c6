"""Calls of pipelines that a checkpoint repeats in the backward pass, in the context of their first run.

A checkpoint is recognised by what it leaves on Python's stack while it runs its function: ``torch.utils.checkpoint`` in its
non-reentrant kind, or any ``autograd.Function`` whose forward calls pipelines, as reentrant checkpoints are. The first run
records the context of every call (recipe, region, rules, ``on_miss``). The recomputation finds the record by the same object, the
frame of the checkpoint or the ``ctx`` of the function, and makes each call in its recorded context; the ambient one is ignored.

A checkpoint within a checkpoint is repeated by the outer one, and then by itself: they share one record, and each knows where its
own calls begin. A reentrant one runs a backward pass inside of that around it: delayed scales of gradients are updated after the
outermost. The stack is searched only where a checkpoint may be: in a backward pass, under hooks of saved tensors and in the
forward of an ``autograd.Function``.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import Context, copy_context
from functools import cache
from threading import _DummyThread, get_ident
from types import CodeType, FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.function import FunctionCtx

from opfuse.errors import UnsupportedError, describe
from opfuse.events import FIRST_RUN, silenced
from opfuse.recipes import note_use
from opfuse.recipes.counting import PassAround, count_in, running_pass
from opfuse.recipes.passes import Pass, current_pass, in_compiled_autograd, running

_in_backward: Callable[[], int] = torch._C._current_graph_task_id
saving_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
"""The innermost hooks of ``torch.autograd.graph.saved_tensors_hooks``, or None. The argument: also while torch traces."""

_outside_function: Callable[[], bool] = torch._C._is_fwd_grad_enabled
"""Off in the forward of an ``autograd.Function``, but not under ``torch.no_grad()``; off also in inference mode."""


class CalledPipeline(Protocol):
    """A pipeline, or a converted module. structure: a digest of its ops. ops: the ops themselves."""

    @property
    def label(self) -> str: ...

    @property
    def structure(self) -> str: ...

    @property
    def ops(self) -> Sequence[object]: ...


class _FirstCall(NamedTuple):
    """One call of a first run."""

    pipeline: CalledPipeline
    context: Context


class _CheckpointRecord:
    """The calls of an outermost checkpoint, in order."""

    def __init__(self) -> None:
        self.calls: list[_FirstCall] = []


class _PartOfCall:
    """The calls of one checkpoint: those of a record from ``start`` on. reached: the next call to repeat, by backward pass.

    outer: the backward pass in which the checkpoint was made, by the recomputation of one around it; None if in none.
    """

    def __init__(self, record: _CheckpointRecord, start: int, outer: PassAround = None) -> None:
        self.record = record
        self.start = start
        self.outer = outer
        self.reached: dict[Any, int] = {}


class _FoundCheckpoint(NamedTuple):
    """A checkpoint on the stack.

    again: the backward pass in which it recomputes; None in its first run. strict: it only recomputes, so each call must be one
    of the first run. trains: its calls are training calls although gradients are off.
    """

    owner: Any
    again: Any
    strict: bool
    trains: bool


Runs = Callable[..., Any]


def repeated(pipeline: CalledPipeline) -> Callable[[Runs], Any] | None:
    """A function that makes this call of ``pipeline`` if a checkpoint will repeat it or repeats it now; None otherwise."""
    if _in_backward() < 0 and saving_hooks(False) is None and (_outside_function() or torch.is_inference_mode_enabled()):
        return None
    if current_pass() is not None:  # called by an op of a call that was found
        return None
    return _search(pipeline, sys._getframe(1))


def _search(pipeline: CalledPipeline, frame: FrameType | None) -> Callable[[Runs], Any] | None:
    first: list[_FoundCheckpoint] = []  # innermost first
    part: _PartOfCall | None = None
    for found in _checkpoints(frame):
        if found.again is None:
            first.append(found)
        elif (part := getattr(found.owner, _NAME, None)) is not None:
            at = part.reached.get(found.again, part.start)
            calls = part.record.calls
            if at < len(calls) and _same(pipeline, calls[at].pipeline, strict=found.strict):
                part.reached[found.again] = at + 1
                count_in(part.outer)
                _join(first, part.record, at, running_pass() if first and not in_compiled_autograd() else None)
                note_use()  # in the region that the function has entered again, if it has
                return lambda run: calls[at].context.copy().run(_again, run)
            if found.strict:
                raise _changed(pipeline, calls[at].pipeline if at < len(calls) else None)
            part = None
    if not first:
        return None
    outermost = getattr(first[-1].owner, _NAME, None)
    record = _CheckpointRecord() if outermost is None else outermost.record
    _join(first, record, len(record.calls))
    record.calls.append(_FirstCall(pipeline, copy_context()))
    kind = Pass.TRAINED if any(found.trains for found in first) else Pass.FIRST
    return lambda run: _under(kind, run)


def check_once(label: str) -> None:
    """UnsupportedError for a backward pass inside the function of a checkpoint, which would count its amaxes twice.

    For plans whose gradients have delayed scales. Checked once in each pass, and only where a checkpoint may be: a pass has, on
    every thread, the hooks and the mode of the code that called it.
    """
    task = _in_backward()
    if task == _CHECKED[0] or (task >= 0 and saving_hooks(True) is None and _outside_function()):
        return
    stacks = _waiting(sys._getframe(1))
    if any(found.again is None and found.strict for frame in stacks for found in _checkpoints(frame, beyond=True)):
        wanted, got = "a backward pass that runs once", "one inside the function of a checkpoint, under delayed scaling"
        cure = "run it outside of the checkpoint, or under a recipe that keeps no state"
        raise UnsupportedError(describe(f"backward of {label}", wanted=wanted, got=got, cure=cure))
    _CHECKED[0] = task


_CHECKED: list[int | None] = [None]
"""The backward pass that was checked last."""


def _waiting(frame: FrameType) -> list[FrameType]:
    """The stacks that wait for the running backward pass.

    This stack; on one of autograd's own threads, of which each GPU has one, also those of all threads that are in its engine. One
    of them called the pass, or a pass around it; a checkpoint on any of them is refused.
    """
    if any(thread.ident == get_ident() and not isinstance(thread, _DummyThread) for thread in threading.enumerate()):
        return [frame]
    others = [_in_engine(other) for thread, other in sys._current_frames().items() if thread != get_ident()]
    return [frame, *(other for other in others if other is not None)]


def _in_engine(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of a stack that waits for a backward pass; None if there is none."""
    while frame is not None and frame.f_code.co_name != _ENGINE:
        frame = frame.f_back
    return frame


def _join(first: list[_FoundCheckpoint], record: _CheckpointRecord, at: int, outer: PassAround = None) -> None:
    """Give ``record``, from call ``at`` on, to the checkpoints that run for the first time."""
    for found in first:
        if getattr(found.owner, _NAME, None) is None:
            setattr(found.owner, _NAME, _PartOfCall(record, at, outer))


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
        return _under(Pass.AGAIN, run)


def _changed(pipeline: CalledPipeline, wanted: CalledPipeline | None) -> UnsupportedError:
    label = "no further call" if wanted is None else f"a call of {wanted.label}"
    cure = "checkpoint a function that calls the same pipelines whenever it runs"
    return UnsupportedError(describe("recomputation by a checkpoint", wanted=label, got=f"a call of {pipeline.label}", cure=cure))


# -- the stack ---------------------------------------------------------------------------------------------------------------


_ENGINE = "_engine_run_backward"
"""The function of torch that runs a backward pass on the calling thread."""

_COMPILED = ("torch._functorch.", "torch._library.")
"""Modules whose functions run what torch.compile has made."""

_REENTRANT = "CheckpointFunctionBackward"
"""What the node of a reentrant checkpoint is called, torch's own as well as those of others."""


class _Codes(NamedTuple):
    """The functions of ``torch.utils.checkpoint`` whose frames are looked for."""

    run: CodeType
    unpack: CodeType


@cache
def _codes() -> _Codes:
    """UnsupportedError under a torch whose checkpoint has other parts: nothing here could be told from an ordinary call."""
    from torch.utils import checkpoint

    run = inspect.unwrap(checkpoint.checkpoint).__code__
    made_by = getattr(getattr(checkpoint, "_checkpoint_hook", None), "__init__", None)
    inner = [code for code in getattr(getattr(made_by, "__code__", None), "co_consts", ()) if isinstance(code, CodeType)]
    unpack = next((code for code in inner if code.co_name == "unpack_hook"), None)
    generator = getattr(checkpoint, "_checkpoint_without_reentrant_generator", None)
    made = () if generator is None else (*generator.__code__.co_varnames, *generator.__code__.co_cellvars)
    if unpack is None or "frame" not in unpack.co_freevars or "gid" not in unpack.co_varnames or "gen" not in run.co_varnames:
        raise _unknown_torch()
    if "new_frame" not in made or not hasattr(torch.autograd.graph, _ENGINE):
        raise _unknown_torch()
    return _Codes(run, unpack)


def _unknown_torch() -> UnsupportedError:
    cure = "use a torch that opfuse was tried with (see pyproject.toml), or no checkpoint"
    got = f"torch {torch.__version__}, whose checkpoint works in another way"
    return UnsupportedError(describe("activation checkpointing", wanted="a torch with a known checkpoint", got=got, cure=cure))


def _checkpoints(frame: FrameType | None, *, beyond: bool = False) -> Iterator[_FoundCheckpoint]:
    """The checkpoints on the stack, innermost first. beyond: also those outside of a backward pass that they started."""
    codes, task = _codes(), _in_backward()
    while frame is not None:
        code = frame.f_code
        if code.co_name == _ENGINE and not beyond:
            return  # what lies beyond is about a backward pass around this one
        if code is codes.run:
            generator = frame.f_locals.get("gen")
            if generator is not None and (run := generator.gi_frame) is not None:
                yield _FoundCheckpoint(run.f_locals["new_frame"], None, strict=True, trains=False)
        elif code is codes.unpack:
            yield _FoundCheckpoint(frame.f_locals["frame"], frame.f_locals["gid"], strict=True, trains=False)
        elif code.co_name in ("forward", "backward") and code.co_argcount and not _is_part(frame):
            ctx = frame.f_locals.get(code.co_varnames[0])
            if isinstance(ctx, FunctionCtx):
                again = task if code.co_name == "backward" else None
                strict = type(ctx).__name__ == _REENTRANT
                yield _FoundCheckpoint(ctx, again, strict, trains=again is None and any(_needs(ctx)))
        frame = frame.f_back


def _needs(ctx: Any) -> tuple[bool, ...]:
    return getattr(ctx, "needs_input_grad", ())


_PARTS = ("opfuse.", *_COMPILED)


def _is_part(frame: FrameType) -> bool:
    """Whether the frame is one of opfuse or of compiled code, which run inside of a call."""
    return str(frame.f_globals.get("__name__", "")).startswith(_PARTS)


def check_recomputed_in_graph(label: str) -> None:
    """UnsupportedError where compiled code runs a call again in its backward pass: its recipe and its scales are gone."""
    frame: FrameType | None = sys._getframe(1) if _in_backward() >= 0 else None
    while frame is not None and frame.f_code.co_name != _ENGINE and frame.f_code not in _codes():
        if frame.f_code.co_name == "backward" and str(frame.f_globals.get("__name__", "")).startswith(_COMPILED):
            where, wanted = f"{label} in a graph of torch.compile", "a call that runs once"
            got = "a checkpoint inside of what is compiled, which would run it again under another recipe"
            cure = "checkpoint the compiled function, or compile without fullgraph what is inside of the checkpoint"
            raise UnsupportedError(describe(where, wanted=wanted, got=got, cure=cure))
        frame = frame.f_back
