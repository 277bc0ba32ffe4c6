"""Quantizers of other classes, as they are: what they cast is dequantized, and products multiply these values."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from opfuse.errors import QuantizerError, describe
from opfuse.formats import COLUMNWISE, DEQUANTIZED, ROWWISE, NumberFormat, Usage
from opfuse.numerics.layouts import lines_of
from opfuse.tensors.quantizers.base import Quantizer
from opfuse.tensors.storage import Plane, matrix_shape


@dataclass(frozen=True, repr=False)
class ForeignQuantizer(Quantizer):
    """A quantizer that is no opfuse one: a plain class with ``quantize(x)``, as TransformerEngine's reference quantizers are.

    own: the object. What its ``quantize`` returns of a matrix has ``dequantize()``; or codes and scales, ``data`` and ``scale``,
        and ``data_t`` and ``scale_t`` of the transposed matrix, which ``own.dequantize(data, scale, dtype)`` turns into values.

    Values are kept in high precision, so products are emulated and casts save nothing. Two are equal when their classes are, and
    the plain values that their objects hold.
    """

    runs_code_of_others: ClassVar[bool] = True

    own: Any = field(compare=False)
    identity: tuple[Any, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        kind = type(self.own)
        held = sorted((name, _plain(value)) for name, value in getattr(self.own, "__dict__", {}).items() if name not in _USAGES)
        object.__setattr__(self, "identity", (f"{kind.__module__}:{kind.__qualname__}", *held))

    @property
    def formats(self) -> tuple[NumberFormat, NumberFormat]:
        return DEQUANTIZED, DEQUANTIZED

    def _planes(self, x: torch.Tensor) -> list[Plane]:
        foreign = copy.copy(self.own)
        for name, usage in _USAGES.items():
            if hasattr(foreign, name):
                setattr(foreign, name, usage in self.usages or usage == ROWWISE)
        result = foreign.quantize(x.detach().reshape(matrix_shape(x.shape)))
        values = {usage: _values(foreign, result, usage, x) for usage in self.usages}
        return [Plane(layout.usage, layout.format, layout.shape, values[layout.usage]) for layout in self._layouts(x.shape)]

    def _empty_planes(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None) -> list[Plane]:
        return self._planes(torch.zeros(tuple(shape), dtype=dtype, device=device))


_USAGES: dict[str, Usage] = {"rowwise_usage": ROWWISE, "columnwise_usage": COLUMNWISE}
"""Attributes of a quantizer that say which directions it makes; set for each cast."""


def _plain(value: object) -> str:
    """A value as text: that of numbers, names and dtypes, the class of anything else."""
    known = value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device, tuple))
    return repr(value) if known else type(value).__qualname__


def _values(own: Any, made: Any, usage: Usage, x: torch.Tensor) -> torch.Tensor:
    """The dequantized values of a plane of the cast of ``x``, in its shape and dtype. QuantizerError if the cast has none."""
    codes, scale = (getattr(made, f"{name}{'_t' * (usage == COLUMNWISE)}", None) for name in ("data", "scale"))
    if isinstance(codes, torch.Tensor) and callable(getattr(own, "dequantize", None)):
        values = lines_of(own.dequantize(codes, scale, x.dtype), usage)
    elif callable(getattr(made, "dequantize", None)):
        values = made.dequantize()
    elif isinstance(made, torch.Tensor):
        values = made
    else:
        where, wanted = f"{type(own).__name__}.quantize", "a result with dequantize(), or data and scale of each direction"
        cure = "give the result's class a dequantize()"
        raise QuantizerError(describe(where, wanted=wanted, got=type(made).__name__, cure=cure))
    if values.numel() != x.numel():
        where, wanted = f"{type(own).__name__}.quantize", f"values of shape {matrix_shape(x.shape)}, the matrix that it got"
        cure = "return as many values as it was given"
        raise QuantizerError(describe(where, wanted=wanted, got=tuple(values.shape), cure=cure))
    return values.to(x.dtype).reshape(x.shape)
