"""Checkpoints of torch on Python's stack: torch does not say which one is active, nor whether it recomputes.

A non-reentrant checkpoint has an object that lives from its first run to its recomputation. Under which name it stands, and in
which functions, is found out by trying: a small checkpoint runs once and recomputes, and both runs look at the stack around them.
So what counts is that a checkpoint has such an object, not how the functions of this torch are called.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from threading import get_ident
from types import CodeType, FrameType, GeneratorType
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import nn
from torch.autograd.function import FunctionCtx

from opfuse.errors import UnsupportedError, describe
from opfuse.torch_private.autograd import backward_pass
from opfuse.torch_private.compiler import COMPILED_MODULES, runs_compiled_backward
from opfuse.torch_private.names import TRIED, convention
from opfuse.torch_private.stack import frame_at, frame_of_caller, frames, frames_of_threads

_ENGINE = "_engine_run_backward"
"""The function of torch that runs a backward pass on the calling thread."""

_REENTRANT = "CheckpointFunctionBackward"
"""What the node of a reentrant checkpoint is called, torch's own as well as those of others."""

_OWN = ("opfuse.",)
_PARTS = (*_OWN, *COMPILED_MODULES)
"""Modules of opfuse and of compiled code, whose functions run inside of a call."""


class FoundCheckpoint(NamedTuple):
    """A checkpoint on the stack.

    owner: an object that its first run and its recomputation share, and no other checkpoint; attributes can be set on it. again:
    the backward pass in which it recomputes; None in its first run. strict: it only recomputes, so each call must be one of the
    first run. trains: its calls are training calls although gradients are off. compiled: it is compiled code, whose compiler runs
    calls again in the backward pass, in an order of its own.
    """

    owner: Any
    again: Any
    strict: bool
    trains: bool
    compiled: bool = False


class _OwnerPlaces(NamedTuple):
    """Where a non-reentrant checkpoint has its object.

    first: by the code of a function on the stack of its first run, the names that lead to the object: of a local variable, or of
    a generator and of a local variable of that. again: by the code of a function on the stack of its recomputation, the names of
    the object and of the number of the backward pass.
    """

    first: dict[CodeType, tuple[str, ...]]
    again: dict[CodeType, tuple[str, str]]


_GLOBALS = vars(torch.utils.checkpoint)
"""The globals of functions of ``torch.utils.checkpoint``, by which their frames are known."""


_NamedValues = dict[tuple[str, ...], Any]
"""The variables of a function, and of its generators, by the names that lead to them."""


def _names_of(frame: FrameType) -> _NamedValues:
    found: _NamedValues = {}
    for name, value in frame.f_locals.items():
        found[(name,)] = value
        if isinstance(value, GeneratorType) and value.gi_frame is not None:
            found |= {(name, inner): each for inner, each in value.gi_frame.f_locals.items()}
    return found


def _value(frame: FrameType, names: tuple[str, ...]) -> Any:
    """What names lead to; None where a function has not come so far, or a generator has ended."""
    value = frame.f_locals.get(names[0])
    for name in names[1:]:
        inner = value.gi_frame if isinstance(value, GeneratorType) else None
        value = None if inner is None else inner.f_locals.get(name)
    return value


_SeenRun = tuple[list[tuple[CodeType, _NamedValues]], int]
"""The functions of torch.utils.checkpoint around a run of a function, innermost first, and the number of its backward pass."""


@cache
def _places() -> _OwnerPlaces:
    """UnsupportedError under a torch whose checkpoint has no such object: nothing here could be told from an ordinary call."""
    runs: list[_SeenRun] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        around = [(frame.f_code, _names_of(frame)) for frame in frames() if _is_of_checkpoints(frame)]
        runs.append((around, backward_pass()))
        return x.exp()

    def run() -> None:
        x = torch.ones(1, requires_grad=True)
        torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False, preserve_rng_state=False).backward()

    thread = threading.Thread(target=run)  # where there are no modes, no hooks and no checkpoint around
    thread.start()
    thread.join()
    found = _shared(*runs) if len(runs) == 2 else None
    if found is None or not hasattr(torch.autograd.graph, _ENGINE):
        cure = f"use a torch that opfuse was tried with ({TRIED[0]} to {TRIED[-1]}), or no checkpoint"
        got = f"torch {torch.__version__}, whose checkpoint works in another way"
        raise UnsupportedError(describe("activation checkpointing", wanted="a torch with a known checkpoint", got=got, cure=cure))
    return found


def _shared(first: _SeenRun, again: _SeenRun) -> _OwnerPlaces | None:
    """Where two runs have one object of a class of torch's checkpoint; None if they have none, or several."""
    ids = [{id(each) for _, names in run for each in names.values() if _is_own(each)} for run, _ in (first, again)]
    both = ids[0] & ids[1]
    if len(both) != 1:
        return None
    (owner,) = both
    at_first = {code: path for code, names in first[0] for path, each in names.items() if id(each) == owner}
    at_again = {
        code: (path[0], number[0])
        for code, names in again[0]
        for path, each in names.items()
        if id(each) == owner and len(path) == 1
        for number, value in names.items()
        if type(value) is int and value == again[1] and len(number) == 1
    }
    return _OwnerPlaces(at_first, at_again) if at_first and at_again else None


def _is_own(value: Any) -> bool:
    return type(value).__module__ == torch.utils.checkpoint.__name__ and hasattr(value, "__dict__")


def _is_of_checkpoints(frame: FrameType) -> bool:
    """Whether a function of ``torch.utils.checkpoint`` runs."""
    return frame.f_globals is _GLOBALS


def checkpoints(frame: FrameType | None = None, *, beyond: bool = False, compiled: bool = False) -> Iterator[FoundCheckpoint]:
    """The checkpoints on the stack, innermost first; by default on that of the caller.

    beyond: also those outside of a backward pass that they started. compiled: also the innermost run of compiled code.
    """
    seen: list[FoundCheckpoint] = []
    for found in _on_stack(frame or frame_of_caller(), beyond, compiled):
        yield found
        seen.append(found)
        if not beyond and (others := _outside(found)) is not None:
            yield from others
            seen += others
            break
    for number, found in enumerate(seen):
        if not beyond and found.again is None and found.strict:
            setattr(found.owner, _OUTSIDE, seen[number + 1 :])


def _outside(found: FoundCheckpoint) -> list[FoundCheckpoint] | None:
    """The checkpoints around one that runs for the first time, as an earlier call of its function found them; None if none did.

    What is around it does not change while its function runs. Most of the stack lies there, and to go through it took the host
    a tenth of the time of a step of LoRA in checkpoints.
    """
    others: list[FoundCheckpoint] | None = getattr(found.owner, _OUTSIDE, None) if found.again is None else None
    return others


def _on_stack(around: FrameType | None, beyond: bool, compiled: bool) -> Iterator[FoundCheckpoint]:
    """:func:`checkpoints` of a stack, which it goes through."""
    task, names, outermost, depth = backward_pass(), _names(), None, -1
    while around is not None:
        code, depth = around.f_code, depth + 1
        if (name := code.co_name) not in names:  # as most of a hundred functions on the stack
            around = around.f_back
            continue
        if name == _ENGINE and not beyond:
            break  # what lies beyond is about a backward pass around this one
        found = _own_checkpoint(around) if _is_of_checkpoints(around) else None
        if found is None and (ctx := _function_of(around)) is not None:
            if not _is_part(around):
                found = _of_function(ctx, None if name == "forward" else task)
            elif compiled and not _is_part(around, _OWN):
                compiled, again = False, None if name == "forward" else task
                found = FoundCheckpoint(ctx, again, strict=True, trains=False, compiled=True)
            elif name == "forward" and not beyond:
                if outermost is None:
                    _DEPTH[0] = depth
                if ctx is _SEARCHED[0]():
                    return
                outermost = ctx
        if found is not None:
            outermost = None
            yield found
        around = around.f_back
    if outermost is not None:
        _SEARCHED[0] = weakref.ref(outermost)


def _function_of(frame: FrameType) -> FunctionCtx | None:
    """The ``ctx`` of an ``autograd.Function`` whose forward or backward runs in a frame."""
    code = frame.f_code
    if code.co_name not in _METHODS or not code.co_argcount or code in _OF_MODULES:
        return None
    first = frame.f_locals.get(code.co_varnames[0])
    if isinstance(first, nn.Module):
        _OF_MODULES.add(code)
    return first if isinstance(first, FunctionCtx) else None


def in_searched_run() -> bool:
    """Whether the caller is in the run of compiled code around which no checkpoint was found last.

    Called where a search would be, it looks at one function, as far away as in the last one: all ops of a run have as many
    around, and to go through them takes the host a tenth of the call.
    """
    ran = _SEARCHED[0]()
    around = None if ran is None else frame_at(_DEPTH[0])
    return around is not None and around.f_code.co_name == "forward" and _function_of(around) is ran


def _own_checkpoint(frame: FrameType) -> FoundCheckpoint | None:
    """The checkpoint of a function of ``torch.utils.checkpoint`` that runs or recomputes a non-reentrant one; None of others."""
    places = _places()
    if (path := places.first.get(frame.f_code)) is not None and (owner := _value(frame, path)) is not None:
        return FoundCheckpoint(owner, None, strict=True, trains=False)
    if (pair := places.again.get(frame.f_code)) is not None:
        return FoundCheckpoint(frame.f_locals[pair[0]], frame.f_locals[pair[1]], strict=True, trains=False)
    return None


def _of_function(ctx: Any, again: Any) -> FoundCheckpoint:
    """The ``ctx`` of a function of autograd, which may be a checkpoint; ``again`` in its backward."""
    trains = again is None and any(getattr(ctx, "needs_input_grad", ()))
    return FoundCheckpoint(ctx, again, strict=type(ctx).__name__ == _REENTRANT, trains=trains)


def _names_in(code: CodeType) -> Iterator[str]:
    """The names of the functions in a module or a function, at any depth."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner.co_name
            yield from _names_in(inner)


_OUTSIDE = "_opfuse_outside"
"""The attribute of a checkpoint that holds those around its first run."""

_METHODS = ("forward", "backward")
"""The functions of an ``autograd.Function``."""


_OF_MODULES: set[CodeType] = set()
"""Forwards of modules, which no ``autograd.Function`` has: to read the variables of one takes longer than to pass by."""


@cache
def _names() -> frozenset[str]:
    """The functions on the stack that are looked at: of ``torch.utils.checkpoint``, and methods of functions of autograd."""
    module = _GLOBALS["__loader__"].get_code(torch.utils.checkpoint.__name__)
    return frozenset((_ENGINE, *_METHODS, *_names_in(module)))


_DEPTH = [-1]
"""How many functions away from a search the innermost run of compiled code was."""

_SEARCHED: list[Callable[[], FunctionCtx | None]] = [lambda: None]
"""The run of compiled code around which no checkpoint was found last: each of its ops asks."""


def waiting_stacks() -> list[FrameType]:
    """The stacks that wait for the running backward pass.

    This stack; on one of autograd's own threads, of which each GPU has one, also those of all threads that are in its engine. One
    of them called the pass, or a pass around it; a checkpoint on any of them is refused.
    """
    here = frame_of_caller()
    if any(thread.ident == get_ident() and not isinstance(thread, threading._DummyThread) for thread in threading.enumerate()):
        return [here]
    others = [_in_engine(frame) for number, frame in frames_of_threads().items() if number != get_ident()]
    return [here, *(frame for frame in others if frame is not None)]


def _in_engine(frame: FrameType | None = None) -> FrameType | None:
    """The innermost frame of a stack that waits for a backward pass; None if there is none."""
    return next((each for each in frames(frame) if each.f_code.co_name == _ENGINE), None)


def in_compiled_backward() -> bool:
    """Whether compiled code runs its backward pass around the caller, and no checkpoint of torch is between them."""
    frame: FrameType | None = frame_of_caller()
    while frame is not None:  # without a function for each of a dozen: each recomputed call asks
        name = frame.f_code.co_name
        if name == _ENGINE or frame.f_globals is _GLOBALS:
            return False
        if name == "backward" and runs_compiled_backward(frame):
            return True
        frame = frame.f_back
    return False


def _is_part(frame: FrameType, modules: tuple[str, ...] = _PARTS) -> bool:
    """Whether the frame is one of these modules, by default of opfuse or of compiled code, which run inside of a call."""
    return str(frame.f_globals.get("__name__", "")).startswith(modules)


# -- what is expected of torch ---------------------------------------------------------------------------------------------------


def _seen_by(*, use_reentrant: bool) -> list[list[FoundCheckpoint]]:
    """The checkpoints that the first run of a function and its recomputation see around them."""
    seen: list[list[FoundCheckpoint]] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append([*checkpoints()])
        return x.exp()

    x = torch.ones(1, requires_grad=True)
    torch.utils.checkpoint.checkpoint(function, x, use_reentrant=use_reentrant, preserve_rng_state=False).backward()
    return seen


def _is_recognised(*, use_reentrant: bool) -> bool:
    (first,), (again,) = _seen_by(use_reentrant=use_reentrant)
    if use_reentrant:
        return first.trains and first.again is None and again.again is not None and again.strict
    return first.owner is again.owner and first.again is None and again.again is not None


_use: dict[str, Any] = {
    "use": "recomputing calls in the context of their first run",
    "breaks": "activation checkpointing is refused",
    "slow": True,
}
convention("torch.utils.checkpoint.checkpoint, not reentrant", lambda: _is_recognised(use_reentrant=False), **_use)
convention("torch.utils.checkpoint.CheckpointFunction", lambda: _is_recognised(use_reentrant=True), **_use)


def _is_on_the_stack() -> bool:
    seen: list[bool] = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda grad: seen.append(_in_engine() is not None))
    x.exp().backward()
    return seen == [True] and _in_engine() is None


convention(
    "torch.autograd.graph._engine_run_backward",
    _is_on_the_stack,
    use="telling what is around a backward pass from what it runs",
    breaks="a call inside of a backward pass would be taken for one of a checkpoint around it",
)
