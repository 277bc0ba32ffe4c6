"""The kernels for users who launch them: CuPy's RawKernel of a source, and the contract under which it may be launched."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from opfuse.errors import KernelError, UnsupportedError, describe, nearest
from opfuse.kernels.engine.bindings import SOURCES
from opfuse.kernels.engine.compiling import Variant, code_of, source_text
from opfuse.kernels.engine.launch import loaded
from opfuse.kernels.engine.parameters import CStruct, FieldValue, parameter_of
from opfuse.kernels.engine.variants import C_TYPES, variant_of

_ENTRY = re.compile(r'extern "C" __global__ [^{;]*?(\w+)\(const __grid_constant__ (\w+) \w+\)')
_HEADER = re.compile(r"\w+\.cuh")
_JOINABLE = "Launched"  # of joined.cuh: the struct of one launch, where nothing is joined
_GENERATED = '#include "generated.cuh"'


class ContractedKernel(NamedTuple):
    """A kernel to launch.

    kernel: CuPy's RawKernel, loaded on the current device. contract: what its tensors, its grid and its blocks must be.
    parameters: the struct that is its one argument.
    """

    kernel: Any
    contract: str
    parameters: CStruct

    def argument(self, **fields: FieldValue) -> np.ndarray:
        """The struct of ``fields``, by value, as RawKernel takes it. Tensors are given by their ``data_ptr()``.

        KernelError for a missing or unknown field.
        """
        packed = self.parameters.layout.pack(*self.parameters(**fields))
        return np.frombuffer(packed, dtype=np.dtype((np.void, len(packed))))


def raw(name: str, **macros: int | str | torch.dtype) -> ContractedKernel:
    """The kernel ``name`` of opfuse as CuPy's RawKernel, compiled for the current device and these macros, with its contract.

    name: of the source, as ``"transpose"``, or ``"cast_mx.cast_rows"`` of one with several kernels. macros: what the contract
    names in capitals, such as ``ALIGNED=1`` and ``IN=torch.bfloat16``. A launch by the RawKernel goes to CuPy's current stream;
    its keyword ``stream`` names another one. KernelError for a name that is none, for a chain, whose text follows from its ops,
    and, with the compiler's messages, if a macro is missing. UnsupportedError without a GPU or CuPy.
    """
    source, entry, struct = _found(name)
    values = {macro: C_TYPES.get(value, value) if isinstance(value, torch.dtype) else value for macro, value in macros.items()}
    for macro, value in values.items():
        if not isinstance(value, int | str):
            cure = f"name one of {', '.join(map(str, C_TYPES))}, or write the C++ type as a string"
            raise KernelError(describe(f"kernel {name} {macro}", wanted="an integer or a C++ name", got=repr(value), cure=cure))
    parameters = parameter_of(source, struct, **{macro: value for macro, value in values.items() if isinstance(value, int)})
    if not torch.cuda.is_available():
        cure = "run it on a machine that has one"
        raise UnsupportedError(describe(f"kernel {name}", wanted="an NVIDIA GPU", got="none", cure=cure))
    several = f"ENTRY_{entry}" in code_of(Variant(source))
    variant = variant_of(source, parameters.layout, entry=entry if several else None, **values)
    kernel = loaded(variant, entry, torch.cuda.current_device()).kernel
    return ContractedKernel(kernel, contract_of(source), parameters)


def contract_of(source: str) -> str:
    """The comment on top of a source, and those of the headers that it names for more."""
    texts, names = list[str](), [source]
    for each in names:  # grows while headers name others
        lines = source_text(each, f"contract of {source}").removeprefix("#pragma once\n").splitlines()
        texts.append("\n".join(line.removeprefix("//").removeprefix(" ") for line in _leading_comment(lines)))
        names += [header for header in _HEADER.findall(texts[-1]) if header not in names]
    return "\n\n".join(texts)


def _leading_comment(lines: list[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith("//"):
            return
        yield line


def _found(name: str) -> tuple[str, str, str]:
    """Source, entry and struct of a kernel."""
    stem, _, entry = name.partition(".")
    known = sorted(path.stem for path in SOURCES.glob("*.cu"))
    if stem not in known:
        got = f"{name!r}{nearest(stem, known)}"
        raise KernelError(describe("opfuse.kernels.raw", wanted="the name of a source", got=got, cure=f"name one of {known}"))
    source = f"{stem}.cu"
    if _GENERATED in source_text(source, name):
        cure = "run it as an op: opfuse.ops has the elementwise ones"
        raise KernelError(describe(f"kernel {name}", wanted="a source with all of its text", got="a chain of ops", cure=cure))
    entries = dict(_ENTRY.findall(code_of(Variant(source))))
    if entry not in entries and (entry or len(entries) != 1):
        cure = f"name one: {', '.join(f'{stem}.{each}' for each in entries)}"
        raise KernelError(describe(f"kernel {name}", wanted="one kernel of its source", got=f"{len(entries)}", cure=cure))
    entry = entry or next(iter(entries))
    return source, entry, "Parameters" if entries[entry] == _JOINABLE else entries[entry]
