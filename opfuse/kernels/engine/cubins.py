"""Keeps compiled kernels on disk, in a directory that nobody else can write or replace, and trusts only intact files.

A file is called ``<key>-<sha256 of the file>.<kind>``; the key is a digest of all that it was made from but prose. So a rename
publishes a file at once, truncated and altered files are recognised, and processes that compile one kernel at the same time do
not disturb each other. Nothing waits until a file is on the disk: one that a power failure leaves in part is truncated like any
other. Where the directory cannot or must not be used, kernels are kept in memory while the process runs.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import stat
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import platformdirs

from opfuse.environment import variable
from opfuse.errors import OpfuseWarning, UnsupportedError, describe

ENVIRONMENT = "OPFUSE_CACHE_DIR"
CUBIN, FACTS = "cubin", "json"
"""Kinds of files: what the device loads, and the resources that the compiler reported."""

WANTED = "a directory of mode 0700 that only you can write or replace"

_STALE = 3600.0  # seconds; no process takes so long to write a file
_VERSION = "v2"  # of the contents: another version has another directory
_MOST_LINKS = 40  # links on the way to a directory, as Linux allows


@dataclass(frozen=True)
class CubinCache:
    """Compiled kernels by key: in ``directory`` while it is :func:`private`, else in ``memory``.

    Each use checks that, since the rights of a directory above may change. The first refusal warns. names: of the files, by key
    and kind, as last listed: there may be thousands. handles: of cubins in memory, by key.
    """

    directory: Path
    memory: dict[str, bytes] = field(default_factory=dict, compare=False, repr=False)
    handles: dict[str, int] = field(default_factory=dict, compare=False, repr=False)
    names: dict[str, frozenset[str]] = field(default_factory=dict, compare=False, repr=False)

    def find(self, key: str, kind: str = CUBIN) -> bytes | None:
        """What was stored under ``key``; files of that key that are not intact are removed."""
        if (kept := self.memory.get(f"{key}.{kind}")) is not None:
            return kept
        if not self._is_private():
            return None
        if (known := self._intact(key, kind)) is None:  # another process may have stored it since
            self._list()
            known = self._intact(key, kind)
        return known

    def path(self, key: str, content: bytes) -> str:
        """The path of a cubin, ``content``, which :meth:`find` or :meth:`store` has just had under ``key``.

        Where the directory is not used, it is a file in memory, open and so under this path alone while the process runs.
        """
        if f"{key}.{CUBIN}" not in self.memory:
            return str(self.directory / f"{key}-{digest(content)}.{CUBIN}")
        if (handle := self.handles.get(key)) is None:
            handle = self.handles[key] = os.memfd_create(f"{key}.{CUBIN}")
            with os.fdopen(handle, "wb", closefd=False) as file:
                file.write(content)
        return f"/proc/self/fd/{handle}"

    def _intact(self, key: str, kind: str) -> bytes | None:
        for name in sorted(self.names.get(f"{key}.{kind}", ())):
            path = self.directory / name
            content = read(path)
            if digest(content) == path.stem.partition("-")[2]:
                return content
            with contextlib.suppress(OSError):
                remove(path)
        return None

    def _list(self) -> None:
        """Look for the files that others wrote, and remove temporary ones that a crash left."""
        self.names.clear()
        with contextlib.suppress(OSError):
            for name in os.listdir(self.directory):
                self._note(name)
                if name.startswith(".") and name.endswith(".tmp"):
                    self._remove_stale(self.directory / name)

    def _note(self, name: str) -> None:
        key, _, rest = name.partition("-")
        of = f"{key}.{rest.partition('.')[2]}"
        self.names[of] = self.names.get(of, frozenset()) | {name}

    def store(self, key: str, content: bytes, kind: str = CUBIN) -> None:
        """Keep ``content`` under ``key`` for all processes of this user; for this process alone, if nothing can be written."""
        if not self._publish(f"{key}-{digest(content)}.{kind}", content):
            self.memory[f"{key}.{kind}"] = content

    def replace(self, key: str, content: bytes, kind: str = CUBIN) -> None:
        """Keep ``content`` under ``key``, and nothing that was kept under it before."""
        if self._is_private():
            self._list()
            for name in self.names.pop(f"{key}.{kind}", ()):
                with contextlib.suppress(OSError):
                    remove(self.directory / name)
        self.memory.pop(f"{key}.{kind}", None)
        self.store(key, content, kind)

    def store_source(self, key: str, source: str) -> None:
        """Keep the text that a cubin was compiled from, for people to read; nowhere if nothing can be written."""
        self._publish(f"{key}.cu", source.encode())

    def _is_private(self) -> bool:
        fault = private(self.directory)
        if fault is not None:
            _tell(self.directory, fault)
        return fault is None

    def _publish(self, name: str, content: bytes) -> bool:
        """Write a file; returns whether that was possible and allowed."""
        try:
            if self._is_private():
                make(self.directory)
                if self._is_private():
                    self._write(name, content)
                    return True
        except OSError as error:
            _tell(self.directory, _fault(error))
        return False

    def _write(self, name: str, content: bytes) -> None:
        """Write ``content`` as a whole or not at all: readers never see a part of it, and a crash leaves only a temporary file,
        which a later process removes.
        """
        handle, temporary = tempfile.mkstemp(dir=self.directory, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(temporary, self.directory / name)
            self._note(name)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    @staticmethod
    def _remove_stale(path: Path) -> None:
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > _STALE:
                path.unlink()


@functools.cache
def cubin_cache(directory: Path) -> CubinCache:
    """This process's cache in ``directory``, which need not exist."""
    return CubinCache(directory)


def digest(content: bytes) -> str:
    """The SHA-256 of ``content`` in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def root() -> Path:
    """``$OPFUSE_CACHE_DIR``, where ``~`` is the home directory; if it is not set, the user's cache directory.

    A user without a home, as in a container, has a path that begins with ``~``, which is not :func:`private`.
    """
    named = variable(ENVIRONMENT)
    if named:
        return Path(os.path.expanduser(named))
    try:
        return platformdirs.user_cache_path("opfuse")
    except RuntimeError:
        return Path("~/.cache/opfuse")


def location() -> Path:
    """Where cubins are kept."""
    return root() / f"kernels-{_VERSION}"


# -- whose directory it is ---------------------------------------------------------------------------------------------------


class Fault(NamedTuple):
    """What is wrong with a directory, and what mends it."""

    got: str
    cure: str


def private(directory: Path) -> Fault | None:
    """Why somebody else may have written, or may come to write, what is in ``directory``; None if nobody can.

    Code from such a directory must not run on the device. A private directory belongs to this user, with rights for nobody else,
    or does not exist yet. All directories above belong to this user or to root, and only their owners can write to them, unless
    they are sticky, as /tmp is, so that nobody can rename what belongs to others.
    """
    if directory.parts[:1] and directory.parts[0].startswith("~"):
        return Fault("a home directory that is not known", "set HOME")
    try:
        for place, state in _way(directory):
            if fault := _fault_on_the_way(place, state):
                return fault
        state = os.lstat(directory)
    except FileNotFoundError:
        return None
    except OSError as error:
        return _fault(error)
    return _fault_of_the_end(directory, state)


def _way(directory: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Every directory and every link above ``directory``, from the root down, with its state, links not followed."""
    here, ahead, links = Path("/"), [*reversed(directory.absolute().parts)][:-1], 0
    yield here, os.lstat(here)
    while len(ahead) > 1:
        step = ahead.pop()
        if step == "..":
            here = here.parent
            continue
        there = here / step
        state = os.lstat(there)
        yield there, state
        if not stat.S_ISLNK(state.st_mode):
            here = there
            continue
        if (links := links + 1) > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        target = Path(os.readlink(there))
        ahead += reversed(target.parts[1:] if target.is_absolute() else target.parts)
        here = Path("/") if target.is_absolute() else here


def _fault_on_the_way(place: Path, state: os.stat_result) -> Fault | None:
    if state.st_uid not in (0, os.geteuid()):
        return Fault(f"{place}, which belongs to user {state.st_uid}", "use a directory of your own")
    if stat.S_ISLNK(state.st_mode):
        return None
    if not stat.S_ISDIR(state.st_mode):
        return Fault(f"{place}, which is no directory", "write the path of one")
    if state.st_mode & 0o022 and not state.st_mode & stat.S_ISVTX:
        return Fault(f"{place} with the mode {stat.S_IMODE(state.st_mode):04o}, in which others can write", f"chmod go-w {place}")
    return None


def _fault_of_the_end(directory: Path, state: os.stat_result) -> Fault | None:
    if not stat.S_ISDIR(state.st_mode):
        return Fault("a symbolic link" if stat.S_ISLNK(state.st_mode) else "a file", f"rm {directory}")
    if state.st_uid != os.geteuid():
        return Fault(f"the owner {state.st_uid}", "use a directory of your own")
    if state.st_mode & 0o077:
        return Fault(f"the mode {stat.S_IMODE(state.st_mode):04o}", f"rm -r {directory}, since others may have written there")
    return None


def _fault(error: OSError) -> Fault:
    return Fault(f"{type(error).__name__}: {error.strerror}", "make it writable")


def checked(directory: Path) -> Path:
    """``directory``. UnsupportedError unless it is :func:`private`: who may not run what is in it may not remove it either."""
    fault = private(directory)
    if fault is not None:
        cure = f"{fault.cure}, or name another directory in {ENVIRONMENT}"
        raise UnsupportedError(describe(f"kernel cache {directory}", wanted=WANTED, got=fault.got, cure=cure))
    return directory


def make(directory: Path) -> None:
    """Make ``directory``, and what is missing above it, for this user alone. OSError if that cannot be done."""
    if not directory.exists():
        make(directory.parent)
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)


@functools.cache
def _tell(directory: Path, fault: Fault) -> None:
    """One warning for each fault in a process."""
    cure = f"{fault.cure}, or name another directory in {ENVIRONMENT}; until then each process compiles its kernels anew"
    text = describe(f"kernel cache {directory}", wanted=WANTED, got=fault.got, cure=cure)
    warnings.warn(text, OpfuseWarning, stacklevel=2)


# -- files -------------------------------------------------------------------------------------------------------------------


def read(path: Path) -> bytes:
    """The bytes of a regular file; none of anything else: a symbolic link, a directory, a pipe."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return b""
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a file, or an empty directory in its place. OSError if it is neither."""
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink()
