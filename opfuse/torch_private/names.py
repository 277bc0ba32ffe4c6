"""The table of what opfuse uses of torch that torch does not promise to keep.

Each entry is made where the name is bound, by one of the four functions below. They do not fail where a name is gone: what they
return then raises as it is used, so that ``opfuse doctor`` can say what a new torch has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, reduce
from importlib import import_module
from operator import attrgetter
from typing import Any, NoReturn

import torch

from opfuse.errors import UnsupportedError, describe

TRIED = ("2.11", "2.13", "2.14", "2.15")
"""The releases of torch on which a name was tried, unless its entry gives others; the oldest first."""

NEEDS: dict[str, Callable[[], bool]] = {
    "": lambda: True,
    "CUDA": torch.cuda.is_available,
    "torch.distributed": torch.distributed.is_available,
}
"""By what an entry needs in order to be checked: whether this machine has it."""


@dataclass(frozen=True)
class PrivateName:
    """One name of torch.

    use: what opfuse uses it for. breaks: what goes wrong if it changes. check: whether it still does what opfuse expects; it may
    also raise. needs: a key of :data:`NEEDS`. slow: the check imports parts of torch that take a second.
    """

    name: str
    use: str
    breaks: str
    check: Callable[[], bool]
    needs: str = ""
    slow: bool = False
    tried: tuple[str, ...] = TRIED

    def fault(self) -> str | None:
        """What is wrong with the name under this torch; None if nothing is."""
        try:
            holds = self.check()
        except Exception:
            holds = False
        if holds:
            return None
        return f"{self.name} is gone or behaves otherwise: opfuse uses it for {self.use}. Else {self.breaks}."


NAMES: dict[str, PrivateName] = {}
"""All entries, by name."""


def _enter(entry: PrivateName) -> None:
    if entry.name in NAMES:
        raise ValueError(describe("names of torch", wanted="each once", got=entry.name, cure="bind it once, and import that"))
    NAMES[entry.name] = entry


def faults(*, slow: bool) -> Iterator[str]:
    """What is wrong with the names that can be checked here. slow: also those whose check takes a second."""
    entries: Iterable[PrivateName] = NAMES.values()
    for entry in entries:
        with torch.device("cpu"):  # of tensors that a check makes, whatever torch's default device is
            fault = entry.fault() if NEEDS[entry.needs]() and entry.slow <= slow else ""
        if fault:
            yield fault


class GoneName:
    """Stands for a name that this torch lacks: UnsupportedError as soon as it is called or read."""

    def __init__(self, name: str, use: str) -> None:
        vars(self).update(name=name, use=use)

    def _raise(self, *_: object, **__: object) -> NoReturn:
        cure = f"use a torch that opfuse was tried with ({TRIED[0]} to {TRIED[-1]}); opfuse doctor lists what this one lacks"
        raise UnsupportedError(describe(f"torch {torch.__version__}", wanted=f"{self.name}, for {self.use}", got=None, cure=cure))

    __call__ = __instancecheck__ = _raise

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        self._raise()


def found(name: str) -> Any:
    """The object of a dotted name below torch; AttributeError if there is none."""
    return reduce(getattr, name.split(".")[1:], torch)


def private(name: str, check: Callable[[Any], bool], *, use: str, breaks: str, **entry: Any) -> Any:
    """Enter a dotted name below torch, and return its object; ``check`` takes it."""
    try:
        value = found(name)
    except AttributeError:
        value = GoneName(name, use)
    _enter(PrivateName(name, use, breaks, lambda: check(value), **entry))
    return value


def attribute(name: str, check: Callable[[Any], bool], *, use: str, breaks: str, **entry: Any) -> Any:
    """Enter an attribute of objects of a class of torch, and return what reads it; ``check`` takes that."""
    getter = attrgetter(name.rpartition(".")[2])
    _enter(PrivateName(name, use, breaks, lambda: check(getter), **entry))
    return getter


def deferred(name: str, check: Callable[[Any], bool], *, use: str, breaks: str, **entry: Any) -> Callable[[], Any]:
    """Enter an object of a module that takes long to import; returns a function that imports it. ``check`` takes the object."""

    @cache
    def load() -> Any:
        module, _, last = name.rpartition(".")
        return getattr(import_module(module), last)

    _enter(PrivateName(name, use, breaks, lambda: check(load()), slow=True, **entry))
    return load


def convention(name: str, check: Callable[[], bool], *, use: str, breaks: str, **entry: Any) -> str:
    """Enter what has a name in torch but is not read by it, as a method to override; returns the last part of the name."""
    _enter(PrivateName(name, use, breaks, check, **entry))
    return name.rpartition(".")[2]
