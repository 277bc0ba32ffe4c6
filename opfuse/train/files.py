"""Results on disk: whether a directory takes them is known before they are computed, and no file is ever there in part."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import tempfile
import warnings
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from opfuse.errors import OpfuseWarning, OutputError, describe, os_error_text
from opfuse.runtime.plans.written import OWNER_ONLY, owner_only

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT, VALUES, PLOT = "report.json", "values.jsonl", "loss.png"
"""Files of a run that has ended: what it found, what its casts did to values, and its losses as a picture."""


def writable(directory: Path) -> Path:
    """``directory``, made if it is not there. OutputError if no file can be written in it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"\0")
    except OSError as error:
        got, cure = os_error_text(error), "name another directory with --out"
        raise OutputError(describe(str(directory), wanted="a directory to write in", got=got, cure=cure)) from None
    return directory


def write(path: Path, content: bytes, *, kept: Path | None = None, mode: int = OWNER_ONLY) -> Path:
    """Write ``content`` as a whole, in place of what is there, which ``kept`` takes over. OSError, with all as it was, if that
    cannot be done. mode: of the file, where the umask allows it.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb", opener=partial(os.open, mode=mode)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if kept is not None and path.exists():
            os.replace(path, kept)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    return path


@contextlib.contextmanager
def sole_writer(path: Path) -> Iterator[None]:
    """Have no other process write ``path`` meanwhile. OutputError if one does already.

    The system takes its lock back when a process ends, however it ends. OpfuseWarning where a file system has none.
    """
    with open(path.with_name(f".{path.name}.lock"), "ab", opener=owner_only) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            got, cure = "one in which a run is going on", "wait until it ends, or name another directory with --out"
            wanted = "a directory in which no other run writes"
            raise OutputError(describe(str(path.parent), wanted=wanted, got=got, cure=cure)) from None
        except OSError as error:
            wanted, cure = "a file system with locks", "see to it yourself that no second run writes there"
            text = describe(str(path.parent), wanted=wanted, got=os_error_text(error), cure=cure)
            warnings.warn(text, OpfuseWarning, stacklevel=3)
        yield


# -- plots, where matplotlib is installed: it is an extra of the package -------------------------------------------------------


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def png(figure: Figure) -> bytes:
    """``figure`` as a PNG with 120 dots per inch."""
    image = io.BytesIO()
    figure.savefig(image, dpi=120, format="png")
    return image.getvalue()
