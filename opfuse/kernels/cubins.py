"""Compiled kernels on disk: a directory that nobody else can write, files that are read only if they are what was written.

A file is ``<key>-<sha256 of the file>.<kind>``, where the key names all that it was made from. So one rename publishes it, a
truncated or altered file is seen at once, and processes that compile the same kernel at the same time do not disturb each other.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import stat
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from opfuse.errors import OpfuseWarning, describe

ENVIRONMENT = "OPFUSE_CACHE_DIR"
CUBIN, FACTS = "cubin", "json"
"""Kinds of files: what the device loads, and what the compiler said of it."""

_STALE = 3600.0  # seconds, for which no process writes one file
_VERSION = "v2"  # of the directory's contents: another one starts empty


@dataclass(frozen=True)
class CubinCache:
    """The cubins in ``directory``, which :func:`unsafe` has nothing to say about."""

    directory: Path

    def find(self, key: str, kind: str = CUBIN) -> Path | None:
        """The intact file of ``key``; files of that key that are not intact are removed."""
        for path in sorted(self.directory.glob(f"{key}-*.{kind}")):
            if digest(_read(path)) == path.stem.partition("-")[2]:
                return path
            with contextlib.suppress(OSError):
                path.unlink()
        return None

    def store(self, key: str, content: bytes, kind: str = CUBIN) -> Path:
        """Publish a file. OSError if that cannot be done."""
        return self._publish(f"{key}-{digest(content)}.{kind}", content)

    def store_source(self, key: str, source: str) -> Path:
        """Publish, for reading alone, the text that a cubin was compiled from. OSError if that cannot be done."""
        return self._publish(f"{key}.cu", source.encode())

    def _publish(self, name: str, content: bytes) -> Path:
        """Write ``content`` as a whole or not at all: readers never see a part, a crash leaves only a temporary file.

        What crashes left goes at a later write.
        """
        self._remove_stale()
        handle, temporary = tempfile.mkstemp(dir=self.directory, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.directory / name)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        return self.directory / name

    def _remove_stale(self) -> None:
        for path in self.directory.glob(".*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - path.lstat().st_mtime > _STALE:
                    path.unlink()

    def files(self) -> Iterator[Path]:
        """Everything in the directory: cubins, their facts and sources, what a crash left."""
        return (path for path in sorted(self.directory.iterdir()) if path.is_file() or path.is_symlink())


def digest(content: bytes) -> str:
    """The SHA-256 of ``content`` in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def location() -> Path:
    """Where cubins are kept: ``$OPFUSE_CACHE_DIR``, or the user's cache directory."""
    root = os.environ.get(ENVIRONMENT)
    return (Path(root) if root else platformdirs.user_cache_path("opfuse")) / f"kernels-{_VERSION}"


@functools.cache
def cubin_cache(directory: Path) -> CubinCache:
    """The cache in ``directory``, made if it is not there.

    Code from a directory that others can write must not run on the device. So one that is unsafe, or cannot be made, is left
    alone, with one warning, and the process keeps what it compiles in a private directory that goes when the process ends.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = unsafe(directory)
    except OSError as error:
        reason = f"{type(error).__name__}: {error.strerror}"
    return CubinCache(directory) if reason is None else private_cache(directory, reason)


@functools.cache
def private_cache(directory: Path, reason: str) -> CubinCache:
    """A cache of this process alone in place of ``directory``; says so once."""
    cure = f"remove it, or name another directory in {ENVIRONMENT}; until then kernels are compiled anew in each process"
    text = describe(f"kernel cache {directory}", wanted="a directory of your own with mode 0700", got=reason, cure=cure)
    warnings.warn(text, OpfuseWarning, stacklevel=2)
    return CubinCache(Path(_private_directory().name))


@functools.cache
def _private_directory() -> tempfile.TemporaryDirectory[str]:
    """Kept for as long as the process runs: its removal goes with the object."""
    return tempfile.TemporaryDirectory(prefix="opfuse-")


def unsafe(directory: Path) -> str | None:
    """Why ``directory`` could hold what somebody else wrote; None if it could not."""
    state = os.lstat(directory)
    if not stat.S_ISDIR(state.st_mode):
        return "a symbolic link" if stat.S_ISLNK(state.st_mode) else "a file"
    if state.st_uid != os.geteuid():
        return f"the owner {state.st_uid}"
    if state.st_mode & 0o077:
        return f"the mode {stat.S_IMODE(state.st_mode):04o}"
    return None


def _read(path: Path) -> bytes:
    """The bytes of a regular file; none of anything else, a symbolic link included."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    with os.fdopen(handle, "rb") as file:
        return file.read() if stat.S_ISREG(os.fstat(handle).st_mode) else b""
