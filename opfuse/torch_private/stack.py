"""Python's stack: what is running around a call, where nobody says so otherwise."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import nn

_CALL = nn.Module._call_impl.__code__


def frame_of_caller() -> FrameType:
    """The frame of the function that calls the one that calls this."""
    return sys._getframe(2)


def frame_at(depth: int) -> FrameType | None:
    """The frame ``depth`` functions away from the one that calls this; None if there are fewer, or ``depth`` is negative."""
    try:
        return sys._getframe(depth + 1) if depth >= 0 else None
    except ValueError:
        return None


def frames(frame: FrameType | None = None) -> Iterator[FrameType]:
    """The frames from ``frame`` on, innermost first; by default from the caller's."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


class _Files(dict[str, bool]):
    """By file, whether its code is opfuse's or torch's."""

    def __missing__(self, file: str) -> bool:
        self[file] = passes = file.startswith(_PACKAGES)
        return passes


_PACKAGES = (str(Path(__file__).parent.parent) + os.sep, str(Path(torch.__file__).parent) + os.sep)
_passes = _Files()


def place_of_call(code: CodeType, wrapped: str) -> tuple[int, Any] | None:
    """The offset in ``code`` at which it calls the module whose forward is running here, and its ``self``; None if another does.

    wrapped: passes over the forward of a module that has the called one as a submodule of this name.
    """
    frame = sys._getframe(1).f_back
    while frame is not None and frame.f_code is not code:
        if not (_passes[frame.f_code.co_filename] or _wraps(frame.f_locals.get("self"), wrapped)):
            return None
        frame = frame.f_back
    return None if frame is None else (frame.f_lasti, frame.f_locals.get("self"))


def is_followed_in(code: CodeType, wrapped: str) -> bool:
    """Whether dynamo follows such a call by ``code``, by the ``f_code`` of its own objects for frames."""
    for frame in frames(sys._getframe(1)):
        own = frame.f_locals.get("self")
        followed: CodeType | None = getattr(own, "f_code", None)
        if followed is code:
            return True
        if followed is None or _passes[followed.co_filename]:
            continue
        owner = getattr(own, "symbolic_locals", {}).get("self")
        if not _wraps(getattr(owner, "value", None), wrapped):
            return False
    return False


def _wraps(owner: Any, name: str) -> bool:
    return isinstance(owner, nn.Module) and name in owner._modules


def frames_of_threads() -> dict[int, FrameType]:
    """The innermost frame of each thread of this process, by the thread's number."""
    return sys._current_frames()


def place_around(passes: Callable[[str], bool]) -> tuple[str, int]:
    """File and line of the innermost frame around the caller whose file does not pass; of the outermost if all do."""
    frame = sys._getframe(1)
    while passes(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def place_of_block(passed: str) -> tuple[str, int, int]:
    """Where a with block stands: file, line and ``stacklevel`` of what calls the function that calls the one that calls this.

    passed: a file whose frames are passed over.
    """
    frame, level = sys._getframe(3), 3
    while frame.f_code.co_filename == passed and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    return frame.f_code.co_filename, frame.f_lineno, level


def module_that_calls() -> nn.Module | None:
    """The module whose call runs the function that calls this as its ``forward``; None if that was called otherwise."""
    frame = sys._getframe(2)
    module = frame.f_locals.get("self") if frame.f_code is _CALL else None
    return module if isinstance(module, nn.Module) else None


def owners() -> Iterator[Any]:
    """The objects whose methods are running, the innermost first."""
    for frame in frames(sys._getframe(1)):
        if "self" in frame.f_code.co_varnames[:1]:
            yield frame.f_locals.get("self")


def module_of_caller() -> str:
    """The name of the module whose code calls the function that calls this."""
    return str(sys._getframe(2).f_globals.get("__name__"))


def locals_of(traceback: TracebackType | None, *names: str) -> Iterator[Any]:
    """The local variables of these names on the way to an error, the outermost first; None for those that a function lacks."""
    while traceback is not None:
        yield from (traceback.tb_frame.f_locals.get(name) for name in names)
        traceback = traceback.tb_next
