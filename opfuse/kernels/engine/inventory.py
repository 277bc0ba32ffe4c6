"""Lists the cache of compiled kernels: what each kernel was made from, whether its files are intact, whether it is still used."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from opfuse.kernels.engine.bindings import SOURCES
from opfuse.kernels.engine.compiling import ARCHITECTURES, architecture, code_of_file, compile_text
from opfuse.kernels.engine.cubins import CUBIN, FACTS, checked, digest, read, remove
from opfuse.kernels.engine.sources import cuda_code

GENERATED = "generated.cuh"
_SECTION = re.compile(r'^#line \d+ "([\w.]+)"$')
_DAY = 86400.0


@dataclass(frozen=True)
class KeptCubin:
    """The files of the cache under one key.

    source: the .cu file; empty where its text is missing. entries: registers, spilled bytes and shared memory, by kernel.
    digests: SHA-256 of each cubin. bytes: of all files. written: seconds since the epoch. faults: what is wrong. current: whether
    its text is that of this package's sources, so that a launch may ask for it.
    """

    key: str
    source: str
    entries: dict[str, Any]
    digests: tuple[str, ...]
    bytes: int
    written: float
    faults: tuple[str, ...]
    current: bool
    files: tuple[Path, ...]

    @property
    def days(self) -> float:
        """Its age in days."""
        return max(0.0, time.time() - self.written) / _DAY

    def record(self) -> dict[str, Any]:
        """The same as plain values."""
        names = ("key", "source", "entries", "digests", "bytes", "written", "faults", "current")
        return {name: getattr(self, name) for name in names} | {"files": [path.name for path in self.files]}


def inventory(directory: Path) -> list[KeptCubin]:
    """Everything in ``directory`` by key, newest first; temporary files that a crash left are keys of their own.

    UnsupportedError for a directory in which others may write, or that is a link to another one.
    """
    found: dict[str, list[Path]] = {}
    for path in sorted(directory.iterdir()) if checked(directory).is_dir() else ():
        found.setdefault(path.name if path.name.startswith(".") else path.stem.partition("-")[0], []).append(path)
    return sorted((_kept(key, paths) for key, paths in found.items()), key=lambda kept: -kept.written)


def _kept(key: str, paths: Sequence[Path]) -> KeptCubin:
    contents = {path: read(path) for path in paths}
    text = next((content.decode(errors="replace") for path, content in contents.items() if path.suffix == ".cu"), "")
    facts = next((content for path, content in contents.items() if path.suffix == f".{FACTS}"), b"")
    entries: Any = {}
    with contextlib.suppress(ValueError, RecursionError):
        entries = json.loads(facts or b"{}")
    named = _files(text)
    source = next((name for name in named if name.endswith(".cu")), "")
    return KeptCubin(
        key,
        source,
        entries if isinstance(entries, dict) else {},
        tuple(digest(content) for path, content in contents.items() if path.suffix == f".{CUBIN}"),
        sum(map(len, contents.values())),
        max(path.lstat().st_mtime for path in paths),
        tuple(_faults(key, contents)),
        bool(source) and all(cuda_code(found) == _code_now(name) for name, found in named.items() if name != GENERATED),
        tuple(paths),
    )


def recompiled(kept: KeptCubin) -> str | None:
    """What is wrong with a cubin, compared with what its text compiles to now; None if nothing is, or if there is no text.

    Tries one architecture after another, a second or less each. UnsupportedError without NVRTC.
    """
    texts = [read(path).decode(errors="replace") for path in kept.files if path.suffix == ".cu"]
    if not texts or not kept.digests or kept.faults:
        return None
    own = (architecture(device) for device in range(torch.cuda.device_count()))
    for arch in dict.fromkeys((*own, *ARCHITECTURES)):
        if digest(compile_text(texts[0], arch, kept.source).cubin) in kept.digests:
            return None
    return "its text compiles to something else: it was altered, or made by another NVRTC or for another architecture"


def _faults(key: str, contents: dict[Path, bytes]) -> Iterator[str]:
    if key.startswith("."):
        yield "left by a process that died while it wrote"
        return
    for path, content in contents.items():
        if path.suffix != ".cu" and digest(content) != path.stem.partition("-")[2]:
            yield f"{path.name} is not what was stored"
    cubins = [path for path in contents if path.suffix == f".{CUBIN}"]
    if len(cubins) > 1:
        yield f"{len(cubins)} cubins under one key: the compiler is not what the key says"
    if cubins and not any(path.suffix == f".{FACTS}" for path in contents):
        yield "nothing says what its kernels use"


def _files(text: str) -> dict[str, str]:
    """What an assembled text has of each file."""
    found: dict[str, str] = {}
    name = ""
    for line in text.splitlines(keepends=True):
        if start := _SECTION.match(line.rstrip()):
            name = start[1]
        elif name:
            found[name] = found.get(name, "") + line
    return found


@cache
def _code_now(name: str) -> str | None:
    """The code of a file of this package; None if there is none."""
    path = SOURCES / name
    return code_of_file(path) if path.is_file() else None


def prune(directory: Path, unwanted: Callable[[KeptCubin], bool]) -> list[KeptCubin]:
    """Remove what is ``unwanted``; returns what was removed. UnsupportedError as :func:`inventory`."""
    gone = [kept for kept in inventory(directory) if unwanted(kept)]
    for path in (path for kept in gone for path in kept.files):
        with contextlib.suppress(OSError):
            remove(path)
    return [kept for kept in gone if not any(map(os.path.lexists, kept.files))]
