"""Where values come from: the line of the user's code at which something was made or called.

A place is found when a thing is made and kept beside it; it is part of no key, so that the same value from elsewhere is the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from zlib import crc32

import torch

from opfuse.torch_private.stack import place_around

DEFAULT, ARGUMENT, COMMAND = "default", "argument", "a call by opfuse itself"
"""What is said of values that no line of the user's code gave, or none that can be found."""

_PACKAGE = str(Path(__file__).parent) + os.sep
_COMMANDS = os.path.join(_PACKAGE, "cli", "")
_PASSED = (
    _PACKAGE,
    str(Path(torch.__file__).parent) + os.sep,
    contextlib.__file__,
    dataclasses.__file__,
    functools.__file__,
    "<string>",
)


Site = tuple[str, int]
"""A file and a line."""


class _PassedFiles(dict[str, bool]):
    """By file, whether its lines are of opfuse or of torch."""

    def __missing__(self, file: str) -> bool:
        self[file] = passed = file.startswith(_PASSED) and not file.startswith(_COMMANDS)
        return passed


_passes = _PassedFiles()


site: Callable[[], Site] = functools.partial(place_around, _passes.__getitem__)
"""The innermost line around a call that is neither of opfuse nor of torch; :func:`site_text` says how it is written."""


def site_text(place: Site) -> str:
    """``train.py:88``, from the working directory if it is below.

    ``default`` for what opfuse makes when it is imported, ``a call by opfuse itself`` for what a command of it makes or calls,
    ``argument`` where no line of the user's is around, as in a thread of torch's.
    """
    file, line = place
    if file.startswith(_COMMANDS):
        return COMMAND
    if file.startswith(_PASSED):
        return ARGUMENT
    return DEFAULT if file.startswith("<frozen importlib") else f"{file.removeprefix(os.getcwd() + os.sep)}:{line}"


@functools.cache
def package_code() -> int:
    """A number for the code and the version of this package, the same in every process that runs these."""
    root = Path(__file__).parent
    files = (f"{path.relative_to(root)}\0".encode() + path.read_bytes() for path in sorted(root.rglob("*.py")))
    return crc32(b"".join((sys.modules["opfuse"].__version__.encode(), *files)))


def class_code(kinds: Iterable[type]) -> int:
    """A number for the files of classes and their bases, but those of this package and of torch; 0 where there are no others."""
    names = {base.__module__ for kind in kinds for base in kind.__mro__}
    files = (getattr(sys.modules.get(name), "__file__", None) for name in sorted(names))
    own = [Path(file).read_bytes() for file in files if file and not file.startswith(_PASSED) and os.path.exists(file)]
    return crc32(b"".join(own)) if own else 0


def caller() -> str:
    """The :func:`site` of this call, as :func:`site_text` writes it."""
    return site_text(site())
