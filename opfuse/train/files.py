"""Results on disk: whether a directory takes them is known before they are computed, and no file is ever there in part."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from opfuse.errors import OutputError, describe, told_of

REPORT, VALUES = "report.json", "values.jsonl"
"""Files of a run: what it found, and what its casts did to values."""


def writable(directory: Path) -> Path:
    """``directory``, made if it is not there. OutputError if no file can be written in it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"\0")
    except OSError as error:
        cure = "name another directory with --out"
        raise OutputError(describe(str(directory), wanted="a directory to write in", got=told_of(error), cure=cure)) from None
    return directory


def write(path: Path, content: bytes) -> Path:
    """Write ``content`` as a whole, in place of what is there; or leave that as it is. OSError if it cannot be done."""
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    return path
