"""From a .cu file to a cubin: assemble one text, compile it, keep what was made.

The text that is compiled holds everything: the definitions, the headers and the kernel. NVRTC is called with flags of our own,
since CuPy's own compilation always flushes subnormals, which E8M0 scales need. Compiling needs no GPU.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from dataclasses import dataclass
from typing import NamedTuple

import torch

from opfuse.errors import KernelError, describe
from opfuse.kernels.engine.bindings import SOURCES, nvrtc
from opfuse.kernels.engine.cubins import CUBIN, FACTS, CubinCache
from opfuse.kernels.engine.ladder import rungs
from opfuse.kernels.engine.nvrtc import NvrtcError

ARCHITECTURES = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a")
"""What every kernel is compiled for in the tests; a device of another architecture gets its own."""

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
"""From CUDA 13 on NVRTC keeps results of its own, without their logs; what is kept is ours to decide, and logs are read.

And it leaves out declarations, of textures and the runtime, that no kernel here uses: a third of what it reads of a short text.
"""

_INCLUDE = re.compile(r'#include "(\w+\.cuh)"')
_ENTRY = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers([^\n]*)", re.S
)
_SHARED = re.compile(r"(\d+) bytes smem")
_GENERATED = "generated.cuh"


class Variant(NamedTuple):
    """One compilation of a .cu file: the file's name, definitions ``NAME=value`` of its free names, and text written for it.

    The text takes the place of ``#include "generated.cuh"``.
    """

    source: str
    defines: tuple[str, ...] = ()
    generated: str = ""


class Resources(NamedTuple):
    """What one thread or block of a kernel uses: registers, spilled bytes, bytes of static shared memory."""

    registers: int
    spills: int
    shared: int


@dataclass(frozen=True)
class Compiled:
    """What NVRTC made of one text. ``entries`` has the resources of each kernel in it, by name."""

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
    path = SOURCES / name
    if not path.is_file():
        cure = "write it: docs/kernels.md says what is in one"
        raise KernelError(describe(where, wanted=f"a file cuda/{name}", got="none", cure=cure))
    return path.read_text()


@functools.cache
def assemble(variant: Variant) -> str:
    """The one text of a variant: definitions, then the file with every header in place of its first #include.

    ``#line`` makes messages speak of the files.
    """
    seen: set[str] = set()

    def paste(name: str) -> list[str]:
        lines = [f'#line 1 "{name}"']
        text = variant.generated if name == _GENERATED else source_text(name, f"kernel source {variant.source}")
        for number, line in enumerate(text.splitlines(), 1):
            include = _INCLUDE.match(line)
            if include is None:
                lines.append("" if line == "#pragma once" else line)
            elif include[1] not in seen:
                seen.add(include[1])
                lines += [*paste(include[1]), f'#line {number + 1} "{name}"']
            else:
                lines.append("")
        return lines

    defines = [f"#define {define.replace('=', ' ', 1)}" for define in variant.defines]
    return "\n".join([*defines, *paste(variant.source), ""])


def compile_text(text: str, arch: str, name: str = "kernel.cu") -> Compiled:
    """``text`` for ``arch``, such as ``"sm_90a"``; no GPU is needed. KernelError with the compiler's messages if it refuses."""
    try:
        made = nvrtc().compile(text, name, (f"-arch={arch}", *_flags()))
    except NvrtcError as error:
        raise KernelError(f"{name} for {arch} does not compile.\n{error}") from None
    return Compiled(arch, *made, text)


def _flags() -> tuple[str, ...]:
    return (*FLAGS, *(SINCE_13 if nvrtc().version >= (13, 0) else ()))


def architectures() -> tuple[str, ...]:
    """What this NVRTC compiles for, with the targets of one device (a) and of a family (f); UnsupportedError without NVRTC."""
    oldest = {"": 0, "a": 90, "f": 100}
    numbers = sorted(nvrtc().architectures())
    return tuple(f"sm_{number}{suffix}" for number in numbers for suffix, first in oldest.items() if number >= first)


def compile_variant(variant: Variant, arch: str) -> Compiled:
    """The variant for ``arch`` on the first of its :func:`rungs` whose kernels spill nothing; else on that which spills least."""
    tried: list[Compiled] = []
    for defines in rungs(variant.defines):
        tried.append(compile_text(assemble(variant._replace(defines=defines)), arch, variant.source))
        if not tried[-1].spills:
            return tried[-1]
    return min(tried, key=lambda made: made.spills)


def cubin(variant: Variant, arch: str, cache: CubinCache) -> bytes:
    """The variant's cubin, compiled if the cache does not have it."""
    return _made(variant, arch, cache, CUBIN)


def is_compiled(variant: Variant, arch: str, cache: CubinCache) -> bool:
    """Whether the cache has the variant's cubin."""
    return cache.find(_key(variant, arch), CUBIN) is not None


def resources(variant: Variant, arch: str, cache: CubinCache) -> dict[str, Resources]:
    """What each kernel of the variant uses, by entry; compiled if the cache does not know."""
    found = json.loads(_made(variant, arch, cache, FACTS))
    return {entry: Resources(**used) for entry, used in found.items()}


def cache_key(*parts: str) -> str:
    """The name in the cache of what is made from ``parts`` by this compiler and these flags."""
    return hashlib.sha256("\0".join([*parts, *_flags(), *map(str, nvrtc().version)]).encode()).hexdigest()


def _key(variant: Variant, arch: str) -> str:
    return cache_key(assemble(variant), arch, *map(" ".join, rungs(variant.defines)))


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
    """The target of a CUDA device, with its own instructions where it has any of its own."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"
