"""Shapes of tensors without data, without torch.compile, which takes as long to import as torch and has no part in them.

Most ops of meta tensors are Python functions of torch's, and those are wrapped by ``torch._disable_dynamo``: the first call of
each imports torch.compile, to have it never look inside. The wrapper asks an attribute of the function first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from opfuse.torch_private.compiler import is_compiler_loaded, not_traced
from opfuse.torch_private.names import convention, deferred

ASKED = "__dynamo_disable"
"""The attribute that the wrapper asks for what to call."""

_WRAPPER = not_traced(lambda: None).__code__

_tables = deferred(
    "torch._decomp.global_decomposition_table",
    lambda tables: isinstance(tables, dict) and any(_wrapped()),
    use="computing shapes without torch.compile",
    breaks="opfuse check would import torch.compile, which takes a second",
)


def _asks() -> bool:
    def function() -> int:
        return 1

    setattr(function, ASKED, lambda: 2)
    return not_traced(function)() == 2


convention(
    "torch._compile._disable_dynamo.__dynamo_disable",
    _asks,
    use="computing shapes without torch.compile",
    breaks="opfuse check would import torch.compile, which takes a second",
)


@contextmanager
def without_compiler() -> Iterator[None]:
    """Meta tensors compute their shapes without torch.compile, unless it is loaded. Nothing of this is left at the end."""
    functions = [] if is_compiler_loaded() else [each for each in _wrapped() if ASKED not in vars(each)]
    for function in functions:
        setattr(function, ASKED, function)
    try:
        yield
    finally:
        for function in functions:
            vars(function).pop(ASKED, None)


def _wrapped() -> Iterator[Callable[..., Any]]:
    """The functions inside of torch's wrappers; none where torch writes them in another way."""
    for table in _tables().values():
        for each in table.values():
            found: Any = each
            while isinstance(found, FunctionType):
                inside = _inside(found)
                if found.__code__ is _WRAPPER and inside is not None:
                    yield inside
                found = inside


def _inside(function: FunctionType) -> Any:
    """What a decorator of torch's wraps; None for what is wrapped by none."""
    held = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    return held["fn"].cell_contents if "fn" in held else None
