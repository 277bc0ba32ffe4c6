"""Sizes that can be calculated with, and whose value nobody is told: torch's ``SymInt`` over a node of our own."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from opfuse.torch_private.names import private


class UntoldSize:
    """What a ``SymInt`` asks for its value, and calculates with. columns: the size counts columns alone. refuse: raises.

    A number of rows gives no quotient or rest: those may be one for all numbers that are tried, and another for the next.
    """

    def __init__(self, value: int, columns: bool, refuse: Callable[[], NoReturn]) -> None:
        self.value, self.columns, self.refuse = value, columns, refuse

    def is_int(self) -> bool:
        return True

    def is_float(self) -> bool:
        return False

    is_bool = is_nested_int = is_constant = is_float

    def is_symbolic(self) -> bool:
        return True

    def maybe_as_int(self) -> None:
        return None

    def wrap_int(self, value: int) -> UntoldSize:
        return UntoldSize(value, True, self.refuse)

    def _calculated(self, function: Callable[..., int], *others: UntoldSize) -> UntoldSize:
        columns = self.columns and all(other.columns for other in others)
        return UntoldSize(function(self.value, *[other.value for other in others]), columns, self.refuse)

    def add(self, other: UntoldSize) -> UntoldSize:
        return self._calculated(operator.add, other)

    def sub(self, other: UntoldSize) -> UntoldSize:
        return self._calculated(operator.sub, other)

    def mul(self, other: UntoldSize) -> UntoldSize:
        return self._calculated(operator.mul, other)

    def neg(self) -> UntoldSize:
        return self._calculated(operator.neg)

    def int_floordiv(self, other: UntoldSize) -> UntoldSize:
        return self._of_columns(operator.floordiv, other)

    floordiv = int_floordiv

    def mod(self, other: UntoldSize) -> UntoldSize:
        return self._of_columns(operator.mod, other)

    def _of_columns(self, function: Callable[..., int], other: UntoldSize) -> UntoldSize:
        if not (self.columns and other.columns and other.value):
            self.refuse()
        return self._calculated(function, other)

    def __getattr__(self, name: str) -> Any:
        """Anything else would tell the value: comparisons, indices, texts."""
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: self.refuse()


def _tells_nothing(make: Callable[[UntoldSize], Any]) -> bool:
    class Told(Exception):
        pass

    def refuse() -> NoReturn:
        raise Told

    size = make(UntoldSize(6, True, refuse))
    for tell in (bool, [0, 1].__getitem__, "{}".format, lambda n: n < 3, lambda n: n == 3, lambda n: n % 2 == 0):
        try:
            tell(size)
        except Told:
            continue
        return False
    return bool(((2 * size + 1 - size) // 2).node.value == 3)


_made: Any = private(
    "torch.SymInt",
    _tells_nothing,
    use="sizes that a recorded forward may calculate with and not read",
    breaks="a forward that decides by a size would be taken for one that does not",
)


def untold(value: int, columns: bool, refuse: Callable[[], NoReturn]) -> torch.SymInt:
    """A size; ``refuse`` runs where its value is asked for, and raises. columns: it counts columns, and not rows."""
    size: torch.SymInt = _made(UntoldSize(value, columns, refuse))
    return size


def is_untold(value: object) -> bool:
    """Whether this is such a size."""
    return isinstance(value, torch.SymInt) and isinstance(value.node, UntoldSize)


def told(value: Any) -> Any:
    """The number, of such a size; anything else as it is."""
    return value.node.value if is_untold(value) else value
