"""Ops over the parameters of a model's own modules, which stay where they are, under their names.

An op reads its parameters at each call from the dictionary of a module that owns them. Where that is a module of the model, the
parameter itself is the op's. Where an op reads several parameters as one, or one transposed, a :class:`Made` owns what is
made of them at each call, with a graph of autograd behind it; so gradients arrive in the model's parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from opfuse.core.operation import BasicOperation
from opfuse.ops.linear import BasicLinear, BasicLinearSpec
from opfuse.ops.pointwise import Bias, BiasSpec

AnyOp = TypeVar("AnyOp", bound=BasicOperation)


def borrowing(kind: type[AnyOp], spec: Any, owner: nn.Module, *names: str) -> AnyOp:
    """An op of class ``kind`` whose parameters ``names`` are those of ``owner``; it has none of its own."""
    op = kind.__new__(kind)
    BasicOperation.__init__(op, spec, owner=owner)
    op.__dict__["borrows"] = names
    return op


@dataclass(frozen=True)
class Weight:
    """A module of the model that multiplies: y = x W^T + b for W (out, in); for W (in, out), ``transposed``, y = x W + b."""

    module: nn.Module
    in_features: int
    out_features: int
    transposed: bool = False

    @property
    def has_bias(self) -> bool:
        """Whether it adds a bias."""
        return self.module._parameters.get("bias") is not None

    def read(self, name: str) -> torch.Tensor:
        """A parameter as an op takes it."""
        value: Any = self.module._parameters[name]
        return value.t() if self.transposed and name == "weight" else value

    def agrees(self, other: Weight) -> bool:
        """Whether one product can do for both."""
        mine, others = self.module._parameters["weight"], other.module._parameters["weight"]
        if mine is None or others is None or (mine.dtype, mine.device) != (others.dtype, others.device):
            return False
        return (self.in_features, self.has_bias) == (other.in_features, other.has_bias)


class Made(nn.Module):
    """Owns the parameters of an op that are made anew for each call; between calls it keeps only what they look like."""

    weights: tuple[Weight, ...]
    names: tuple[str, ...]

    def __init__(self, weights: Sequence[Weight]) -> None:
        super().__init__()
        self.__dict__["weights"] = tuple(weights)
        self.__dict__["names"] = ("weight", "bias") if weights[0].has_bias else ("weight",)
        self.drop()

    def fill(self) -> None:
        """Make them, as autograd records it."""
        slots: dict[str, Any] = self._parameters
        for name in self.names:
            parts = [weight.read(name) for weight in self.weights]
            slots[name] = parts[0] if len(parts) == 1 else torch.cat(parts)

    def drop(self) -> None:
        """Let go of them. A backward pass asks for dtypes and shapes alone."""
        slots: dict[str, Any] = self._parameters
        for name in self.names:
            parts = [weight.read(name) for weight in self.weights]
            shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
            slots[name] = torch.empty((), dtype=parts[0].dtype, device=parts[0].device).expand(shape)


def product_of(weights: Sequence[Weight]) -> tuple[list[BasicOperation], Made | None]:
    """The ops of one product with all ``weights``, one after another in its columns; and the owner of what is made for it."""
    first, columns = weights[0], sum(weight.out_features for weight in weights)
    made = None if len(weights) == 1 and not first.transposed else Made(weights)
    owner: nn.Module = first.module if made is None else made
    ops: list[BasicOperation] = [borrowing(BasicLinear, BasicLinearSpec(first.in_features, columns), owner, "weight")]
    if first.has_bias:
        ops.append(borrowing(Bias, BiasSpec(columns), owner, "bias"))
    return ops, made
