"""What a callable computes, found by its values: an activation is known by what it does, whatever class or library it is of."""

from __future__ import annotations

import operator
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard, TypeVar

import numpy as np
import torch
from torch import nn

from opfuse.numerics.norm import Norm, NormGradients, Statistics, norm_backward, norm_forward
from opfuse.ops import OPS
from opfuse.ops.activation import Activation, GatedActivation

T = TypeVar("T")

UNGATED: Mapping[str, type[Activation]] = {
    name: cls
    for name, cls in OPS.items()
    if issubclass(cls, Activation) and not issubclass(cls, GatedActivation) and not cls.math.operands
}
"""The activations of one tensor, by name."""


CONTAINERS = (list, dict, set, deque)
"""What a forward may keep values in, as an attribute or inside of another one."""


class _Attributes:
    """The attributes of a module as they were: what each is, what containers in it hold, and how often buffers were written."""

    def __init__(self, module: nn.Module, prefix: str) -> None:
        self.module, self.prefix = module, prefix
        self.values = dict(vars(module))
        self.held = {name: [(each, _parts(each)) for each in _containers(value)] for name, value in self.values.items()}
        self.buffers = [(name, each, each._version) for name, each in module._buffers.items() if _counts_writes(each)]

    def changed(self) -> Iterator[str]:
        """Names of attributes that were assigned, deleted or written to."""
        now = vars(self.module)
        for name in dict.fromkeys((*self.values, *now)):
            same = name in now and name in self.values and now[name] is self.values[name]
            if not same or not all(_are_same(_parts(each), before) for each, before in self.held[name]):
                yield f"{self.prefix}{name}"
        yield from (f"{self.prefix}{name}" for name, each, version in self.buffers if each._version != version)

    def restore(self) -> None:
        """Have all attributes and containers what they had. A forward that runs for its values alone writes to no buffer."""
        for each, before in (pair for pairs in self.held.values() for pair in pairs):
            if not _are_same(_parts(each), before):
                each.clear()
                each.update(before) if isinstance(each, (dict, set)) else each.extend(before)
        vars(self.module).clear()
        vars(self.module).update(self.values)


def _counts_writes(buffer: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    return buffer is not None and not buffer.is_inference()


def _containers(value: Any, seen: tuple[int, ...] = ()) -> Iterator[Any]:
    """``value`` and what it holds, as far as these are containers."""
    if isinstance(value, CONTAINERS) and id(value) not in seen:
        yield value
        for each in value.values() if isinstance(value, dict) else value:
            yield from _containers(each, (*seen, id(value)))


def _parts(container: Any) -> list[Any]:
    """Keys and values of a dictionary as pairs, the parts of another container."""
    return list(container.items()) if isinstance(container, dict) else list(container)


def _are_same(parts: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether these are the same objects in the same order."""
    flat, other = ([each for part in all_ for each in (part if isinstance(part, tuple) else (part,))] for all_ in (parts, others))
    return len(flat) == len(other) and all(map(operator.is_, flat, other))


@contextmanager
def kept(module: nn.Module, **instead: Any) -> Iterator[Callable[[], list[str]]]:
    """Give the module other attributes inside the block; afterwards its attributes and those of its submodules are what they
    were, and so is what lists, dictionaries, sets and queues among them hold.

    Yields a function that returns the names of the attributes, buffers too, that were assigned or written to since.
    """
    before = dict(vars(module))
    vars(module).update(instead)
    parts = [_Attributes(part, f"{name}." * bool(name)) for name, part in (("", module), *module.named_children())]
    try:
        yield lambda: [name for part in parts for name in part.changed()]
    finally:
        for part in parts:
            part.restore()
        vars(module).clear()
        vars(module).update(before)


def random_states() -> tuple[Any, ...]:
    """The states of the host's random generators, which are equal as long as nobody draws."""
    _, numbers, *rest = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), np.asarray(numbers).tobytes(), rest


def found_in_both_modes(module: nn.Module, probe: Callable[[], T]) -> T | None:
    """What ``probe()`` finds of the module; None if that differs in training and evaluation, if random numbers were drawn, or if
    the module's forward assigned an attribute or wrote to one, such as a count.
    """
    before, found = random_states(), list[T]()
    for training in (True, False):
        with kept(module, training=training) as assigned:
            found.append(probe())
            if assigned():
                return None
    return found[0] if found[0] == found[1] and random_states() == before else None


_NEAR = torch.linspace(-12, 12, 2049, dtype=torch.float64, device="cpu")
_FAR = torch.logspace(1.1, 4.7, 64, dtype=torch.float64, device="cpu")
GRID = torch.cat((_NEAR, _FAR, -_FAR))
"""Points at which activations are compared. The forms of GELU differ by 5e-4 near 0, and fp32 rounding makes 1e-6; some
activations are clamped far out.
"""

CLOSE = 4e-6
"""The difference up to which values are the same: absolute up to 1, relative above."""


def activation_of(function: Callable[[torch.Tensor], Any]) -> str | None:
    """The name in UNGATED of what ``function`` computes on fp64 values, as its gradient does; None where it is none of them."""
    found = with_gradients(function, GRID)
    if found is None or found[0].shape != GRID.shape:
        return None
    y, slope = found
    for name, cls in UNGATED.items():
        (wanted,) = cls.math.grad(torch.ones_like(_NEAR), _NEAR)
        if _is_close(y, cls.math.value(GRID)) and _is_close(slope[: len(_NEAR)], wanted):  # far out autograd has inf / inf
            return name
    return None


def with_gradients(function: Callable[..., Any], *given: torch.Tensor) -> list[torch.Tensor] | None:
    """What ``function`` makes of the tensors ``given``, and the gradients of its sum for each of them.

    None where it fails, as on values that it does not know, where the result is no tensor of numbers, and where some of them get
    no gradient. Values do not tell of gradients: a straight-through estimate has the values of one function and the gradient of
    another.
    """
    with torch.inference_mode(mode=False), torch.enable_grad():
        leaves = [each.clone().requires_grad_() for each in given]
        try:
            y = function(*[leaf.clone() for leaf in leaves])  # which it may write
            if not isinstance(y, torch.Tensor) or not y.is_floating_point():
                return None
            return [y.detach(), *torch.autograd.grad(y.sum(), leaves)]
        except Exception:  # whatever a stranger's code raises, it is none of ours
            return None


class ActivationOf(torch.autograd.Function):
    """The activation of an op, and its gradient, on fp64 values."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, op: type[Activation]) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.math = op.math
        return op.math.value(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        (dx,) = ctx.math.grad(dy, *ctx.saved_tensors)
        return dx, None


def _is_close(y: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool(((y - wanted).abs() < CLOSE * wanted.abs().clamp(min=1)).all())


def activation_of_module(module: nn.Module) -> str | None:
    """The name in UNGATED of a module without parameters, buffers and submodules, the same in training and evaluation, or None.

    Hooks do not run, and attributes that its forward sets are restored.
    """
    if any(True for part in (module.parameters(), module.buffers(), module.children()) for _ in part):
        return None
    return found_in_both_modes(module, lambda: activation_of(module.forward))


def rms_norm_of(module: nn.Module) -> tuple[float, bool] | None:
    """For a module that computes an RMS norm with its one weight: eps, and whether the weight is zero-centered; None for others.

    The module is run on rows of several magnitudes, with another weight, in fp64 on the CPU; eps must be one of its attributes.
    It must compute the same in training and in evaluation.
    """
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 1 or len(module._parameters) > 1 or module._modules or module._buffers:
        return None
    return found_in_both_modes(module, lambda: _rms_norm_now(module, weight))


def _rms_norm_now(module: nn.Module, weight: torch.Tensor) -> tuple[float, bool] | None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(4, weight.numel(), generator=draw, dtype=torch.float64, device="cpu")
    x = x * torch.tensor([1e-4, 1e-2, 1.0, 100.0], dtype=torch.float64, device="cpu").unsqueeze(-1)
    other = torch.rand(weight.numel(), generator=draw, dtype=torch.float64, device="cpu") + 0.5
    found = with_gradients(lambda x, weight: torch.func.functional_call(module, {"weight": weight}, (x,)), x, other)
    if found is None or found[0].shape != x.shape:
        return None
    attributes = [value for value in vars(module).values() if isinstance(value, float) and 0 <= value < 1]
    for eps in dict.fromkeys((*attributes, 0.0)):
        for centered in (False, True):
            norm = Norm("rms_norm", other, None, eps, centered)
            wanted, statistics = norm_forward(x, norm)
            slopes = norm_backward(torch.ones_like(x), x, norm, statistics)
            if torch.allclose(found[0].double(), wanted, rtol=1e-5, atol=1e-6) and _are_gradients(found[1:], slopes, statistics):
                return eps, centered
    return None


def _are_gradients(found: Sequence[torch.Tensor], wanted: NormGradients, statistics: Statistics) -> bool:
    """Whether gradients of an input and a weight differ by what rounding in fp32 does to the terms that they are sums of."""
    pairs = (found[0], wanted.x, statistics.rstd), (found[1], wanted.weight, torch.ones(1, dtype=torch.float64, device="cpu"))
    return all(each is not None and bool(((got - each).abs().amax(-1) < 1e-4 * size).all()) for got, each, size in pairs)
