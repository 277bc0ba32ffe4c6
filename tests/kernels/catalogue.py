"""Every kernel of the library, with the calls that compare its launch with its definition. Tests and benchmarks read it."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from opfuse.errors import KernelError, describe
from opfuse.kernels.engine.registry import Arguments, Case, CaseTable, Kernel
from tests.kernels import cases


def tables() -> Iterator[tuple[str, CaseTable]]:
    """``CASES`` of each module in ``tests/kernels/cases``, by the name of the module."""
    for found in pkgutil.iter_modules(cases.__path__):
        yield found.name, importlib.import_module(f"{cases.__name__}.{found.name}").CASES


def joined(tables: Iterable[tuple[str, CaseTable]]) -> CaseTable:
    """One table of several, kernels by name. KernelError for a kernel that two of them have."""
    found: dict[Kernel[..., Any], Mapping[str, Case]] = {}
    places: dict[Kernel[..., Any], str] = {}
    for place, table in tables:
        for made, calls in table.items():
            if made in found:
                got, cure = f"cases/{places[made]}.py and cases/{place}.py", "name its cases in one of them"
                raise KernelError(describe(f"kernel {made.name}", wanted="one table of cases", got=got, cure=cure))
            found[made] = {name: functools.partial(_drawn, case) for name, case in calls.items()}
            places[made] = place
    return dict(sorted(found.items(), key=lambda entry: entry[0].name))


def _drawn(case: Case, device: torch.device) -> Arguments:
    """The arguments of a case, whose values are drawn on the CPU whatever torch's default device is."""
    if torch.get_default_device().type == "cpu":  # a mode that every call of torch goes through is most of what small draws take
        return case(device)
    with torch.device("cpu"):
        return case(device)


CASES = joined(tables())
"""Calls that reach every branch of a kernel and every variant that is ever compiled, by kernel and name."""
