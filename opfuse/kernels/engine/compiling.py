"""From a .cu file to a cubin: assembles one text, compiles it, and keeps the result.

The text has everything in it: definitions, headers and the kernel. ``nvrtc.py`` says why CuPy does not compile it. Compiling
needs no GPU.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from opfuse.errors import KernelError, describe
from opfuse.kernels.engine.bindings import SOURCES, nvrtc, nvrtc_version
from opfuse.kernels.engine.cubins import CUBIN, FACTS, CubinCache
from opfuse.kernels.engine.ladder import rungs
from opfuse.kernels.engine.nvrtc import NvrtcError
from opfuse.kernels.engine.sources import cuda_code

ARCHITECTURES = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")
"""The architectures for which tests compile every kernel; a device of another one compiles for its own."""

FLAGS = (
    "-ftz=false",
    "-fmad=false",
    "-prec-div=true",
    "-prec-sqrt=true",
    "--std=c++17",
    "-default-device",
    "--ptxas-options=-v",
)
SINCE_13 = ("--no-cache", "--minimal")
"""Flags from CUDA 13 on. --no-cache: NVRTC would keep results itself, without the logs, which are read here. --minimal: leaves
out declarations of textures and the runtime that no kernel uses, a third of what NVRTC reads for a short text."""

_INCLUDE = re.compile(r'#include "(\w+\.cuh)"')
_ENTRY = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers([^\n]*)", re.S
)
_SHARED = re.compile(r"(\d+) bytes smem")
_GENERATED = "generated.cuh"


class Variant(NamedTuple):
    """What one compilation of a .cu file depends on.

    source: the file's name. defines: values ``NAME=value`` of its macros. generated: the text in place of ``#include
    "generated.cuh"``.
    """

    source: str
    defines: tuple[str, ...] = ()
    generated: str = ""


class Resources(NamedTuple):
    """What a kernel uses: registers and spilled bytes of a thread, bytes of static shared memory of a block."""

    registers: int
    spills: int
    shared: int


@dataclass(frozen=True)
class Compiled:
    """The result of compiling one text. ``entries`` has the resources of each kernel in it, by name."""

    arch: str
    cubin: bytes
    ptx: str
    log: str
    text: str

    @property
    def entries(self) -> dict[str, Resources]:
        found = {}
        for name, stores, loads, registers, rest in _ENTRY.findall(self.log):
            shared = _SHARED.search(rest)
            found[name] = Resources(int(registers), int(stores) + int(loads), int(shared[1]) if shared else 0)
        return found

    @property
    def spills(self) -> int:
        """Bytes that the threads of all kernels spill."""
        return sum(used.spills for used in self.entries.values())


def source_text(name: str, where: str) -> str:
    """The text of a source or header. KernelError, which speaks of ``where``, if there is none."""
    return _path(name, where).read_text()


def _path(name: str, where: str) -> Path:
    path = SOURCES / name
    if not path.is_file():
        cure = "write it: docs/kernels.md says what is in one"
        raise KernelError(describe(where, wanted=f"a file cuda/{name}", got="none", cure=cure))
    return path


class _Section(NamedTuple):
    """Lines of a text up to an #include, the header's name, and the number of the line behind it. The last has no header."""

    lines: str
    header: str = ""
    behind: int = 0


def _sections(text: str) -> Iterator[_Section]:
    lines = ""
    for number, line in enumerate(text.splitlines(), 1):
        if include := _INCLUDE.match(line):
            yield _Section(lines, include[1], number + 1)
            lines = ""
        else:
            lines += "\n" if line == "#pragma once" else f"{line}\n"
    yield _Section(lines)


@functools.cache
def _sections_of(path: Path) -> tuple[_Section, ...]:
    """Those of a file, which is read once: most headers are in most texts."""
    return tuple(_sections(path.read_text()))


def code_of_file(path: Path) -> str:
    """The code that a source or header has itself."""
    return "".join(_code(section.lines) for section in _sections_of(path))


@functools.cache
def assemble(variant: Variant) -> str:
    """The text of a variant: definitions, then the file, with each header in place of its first #include.

    Lines ``#line`` let messages name the files.
    """
    return "".join(_parts(variant))


@functools.cache
def code_of(variant: Variant) -> str:
    """The text of a variant without prose. What has the same code compiles to the same cubin."""
    return "".join(map(_code, _parts(variant)))


_code = functools.cache(cuda_code)
"""By part, since most texts have most headers."""


def _parts(variant: Variant) -> Iterator[str]:
    """The definitions of a variant, its lines between headers, and where each begins."""
    seen, where = set[str](), f"kernel source {variant.source}"

    def paste(name: str) -> Iterator[str]:
        yield f'#line 1 "{name}"\n'
        for lines, header, behind in _sections(variant.generated) if name == _GENERATED else _sections_of(_path(name, where)):
            yield lines
            if header in seen:
                yield "\n"
            elif header:
                seen.add(header)
                yield from paste(header)
                yield f'#line {behind} "{name}"\n'

    yield from (f"#define {define.replace('=', ' ', 1)}\n" for define in variant.defines)
    yield from paste(variant.source)


def compile_text(text: str, arch: str, name: str = "kernel.cu") -> Compiled:
    """``text`` for ``arch``, such as ``"sm_90a"``; no GPU is needed. KernelError with the compiler's messages if it refuses."""
    try:
        made = nvrtc().compile(text, name, (f"-arch={arch}", *_flags()))
    except NvrtcError as error:
        raise KernelError(f"{name} for {arch} does not compile.\n{error}") from None
    return Compiled(arch, *made, text)


def _flags() -> tuple[str, ...]:
    return (*FLAGS, *(SINCE_13 if nvrtc_version() >= (13, 0) else ()))


def compile_variant(variant: Variant, arch: str) -> Compiled:
    """The variant for ``arch``, on the first of its :func:`rungs` on which nothing spills; else on the one that spills least."""
    tried: list[Compiled] = []
    for defines in rungs(variant.defines):
        tried.append(compile_text(assemble(variant._replace(defines=defines)), arch, variant.source))
        if not tried[-1].spills:
            return tried[-1]
    return min(tried, key=lambda made: made.spills)


def cubin(variant: Variant, arch: str, cache: CubinCache) -> bytes:
    """The variant's cubin, compiled if the cache does not have it."""
    return _made(variant, arch, cache, CUBIN)


def cubin_path(variant: Variant, arch: str, cache: CubinCache) -> str:
    """Where CuPy finds the variant's cubin: the path of an intact file, compiled if the cache does not have it."""
    return cache.path(_key(variant, arch), cubin(variant, arch, cache))


def is_compiled(variant: Variant, arch: str, cache: CubinCache) -> bool:
    """Whether the cache has the variant's cubin."""
    return cache.find(_key(variant, arch), CUBIN) is not None


def resources(variant: Variant, arch: str, cache: CubinCache) -> dict[str, Resources]:
    """What each kernel of the variant uses, by entry; compiled if the cache does not know."""
    found = json.loads(_made(variant, arch, cache, FACTS))
    return {entry: Resources(**used) for entry, used in found.items()}


def _key(variant: Variant, arch: str) -> str:
    """The cache's key of the variant: of all that its cubin depends on, also this compiler and its flags."""
    parts = (code_of(variant), arch, *map(" ".join, rungs(variant.defines)), *_flags(), *map(str, nvrtc_version()))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _made(variant: Variant, arch: str, cache: CubinCache, kind: str) -> bytes:
    key = _key(variant, arch)
    found = cache.find(key, kind)
    if found is not None:
        return found
    made = compile_variant(variant, arch)
    facts = {entry: used._asdict() for entry, used in made.entries.items()}
    contents = {FACTS: json.dumps(facts).encode(), CUBIN: made.cubin}
    cache.store_source(key, made.text)
    for each, content in contents.items():
        cache.store(key, content, each)
    return contents[kind]


def architecture(device: int) -> str:
    """The architecture to compile for on a CUDA device, such as ``"sm_90a"``; ``a``: with instructions of that device alone."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"
