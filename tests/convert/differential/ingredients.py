"""What generated models are made of, beside torch: modules as people write them, among them many that are not what they seem.

Sources of cases read ``from tests.convert.differential.ingredients import *``.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as of_all
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

__all__ = ["F", "SimpleNamespace", "checkpoint", "copy", "functools", "nn", "of_all", "torch"]
"""Names of ``import *``; every class and function below adds its own."""


def ingredient(made: Any) -> Any:
    __all__.append(made.__name__)
    return made


class Stop(Exception):
    """What a generated forward raises."""


class Out(NamedTuple):
    h: torch.Tensor
    other: object


for each in (Stop, Out):
    ingredient(each)


# -- norms -------------------------------------------------------------------------------------------------------------------


class Weighted(nn.Module):
    """A norm with one weight; ``normed`` is what the weight multiplies."""

    def __init__(self, width: int = 16, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.eps = eps


@ingredient
class LlamaNorm(nn.Module):
    def __init__(self, width: int = 16, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


@ingredient
class GemmaNorm(nn.Module):
    """Zero-centered."""

    def __init__(self, dim: int = 16, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.linspace(-0.5, 0.5, dim))

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        output = self._norm(x.float())
        output = output * (1.0 + self.weight.float())
        return output.type_as(x)


@ingredient
class GammaNorm(nn.Module):
    """An RMS norm by other names, computed in the dtype of its input."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.gamma, self.epsilon = nn.Parameter(torch.linspace(0.5, 1.5, width)), 1e-5

    def forward(self, x):
        return x / (x.square().mean(dim=-1, keepdim=True) + self.epsilon).sqrt() * self.gamma


@ingredient
class OutsideNorm(Weighted):
    """eps beside the root, not in it."""

    def forward(self, x):
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps) * self.weight


@ingredient
class BareNorm(Weighted):
    """No eps."""

    def forward(self, x):
        return x * x.pow(2).mean(-1, keepdim=True).rsqrt() * self.weight


@ingredient
class ClampedNorm(Weighted):
    """What it reads is bounded."""

    def forward(self, x):
        x = x.clamp(-1e3, 1e3)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


@ingredient
class FirstNorm(Weighted):
    """Reduces dimension 1, which is the last of a matrix only."""

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + self.eps) * self.weight


@ingredient
class FunctionalNorm(Weighted):
    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@ingredient
class MeanNorm(Weighted):
    """A layer norm by hand."""

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + self.eps) * self.weight


@ingredient
class ModalNorm(Weighted):
    """Another norm in evaluation, and where no gradient is wanted."""

    def forward(self, x):
        eps = self.eps if self.training and torch.is_grad_enabled() else 1.0
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self.weight


@ingredient
class ConfigNorm(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.weight, self.config = nn.Parameter(torch.linspace(0.5, 1.5, width)), SimpleNamespace(eps=1e-5)

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.eps) * self.weight


@ingredient
class CountingNorm(Weighted):
    """Keeps how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


@ingredient
class DoubledNorm(nn.RMSNorm):
    """A forward that calls that of its base."""

    def forward(self, x):
        return 2 * super().forward(x)


# -- activations -------------------------------------------------------------------------------------------------------------


@ingredient
class ClampedReLU(nn.Module):
    def forward(self, x):
        return torch.relu(x).clamp(max=65504)


@ingredient
class SafeSiLU(nn.Module):
    def forward(self, x):
        return torch.nan_to_num(F.silu(x))


@ingredient
class FarSiLU(nn.Module):
    """Another function beyond what anybody samples."""

    def forward(self, x):
        return torch.where(x.abs() > 200, x * 0.5, F.silu(x))


@ingredient
class StraightThrough(nn.Module):
    def forward(self, x):
        return x + (torch.relu(x) - x).detach()


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.silu(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return dy * s * (1 + x * (1 - s))


@ingredient
class OwnBackward(nn.Module):
    def forward(self, x):
        return _Backward.apply(x)


@ingredient
class TanhGELU(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


@ingredient
class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


@ingredient
class SquaredReLU(nn.Module):
    def forward(self, x):
        return torch.square(F.relu(x))


@ingredient
class PartialGELU(nn.Module):
    """What it calls can be changed later, from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.function = functools.partial(F.gelu, approximate="tanh")

    def forward(self, x):
        return self.function(x)


@ingredient
class Sloped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = 0.0

    def forward(self, x):
        return F.leaky_relu(x, self.slope)


@ingredient
class ConfigAct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(slope=0.0)

    def forward(self, x):
        return F.leaky_relu(x, self.config.slope)


@ingredient
class ModalAct(nn.Module):
    """Another function in evaluation."""

    def forward(self, x):
        return F.silu(x) if self.training else F.relu(x)


@ingredient
class AskingAct(nn.Module):
    """Takes what is no tensor for something else."""

    def forward(self, x):
        if type(x) is torch.Tensor and torch.is_tensor(x):
            return F.relu(x)
        return x


@ingredient
class NarrowAct(nn.Module):
    """Another function in other dtypes."""

    def forward(self, x):
        return F.silu(x) if x.dtype == torch.float64 else F.relu(x)


@ingredient
class WritingAct(nn.Module):
    def forward(self, x):
        return x.mul_(torch.sigmoid(x))


@ingredient
class LoggingAct(nn.Module):
    """Tells how often it is called."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log

    def forward(self, x):
        self.log.append((type(self).__name__,))
        return F.relu(x)


# -- products ----------------------------------------------------------------------------------------------------------------


@ingredient
class Conv1D(nn.Module):
    """As in GPT-2."""

    def __init__(self, columns: int = 16, rows: int = 16) -> None:
        super().__init__()
        self.nf = columns
        self.weight = nn.Parameter(torch.randn(rows, columns) / rows**0.5)
        self.bias = nn.Parameter(torch.randn(columns))

    def forward(self, x):
        size_out = x.size()[:-1] + (self.nf,)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size_out)


@ingredient
class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base_layer, self.lora_A, self.lora_B = nn.Linear(16, 16), nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)
        self.scaling = 2.0

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x)) * self.scaling


@ingredient
class NamedLinear(nn.Linear):
    pass


@ingredient
class OwnLinear(nn.Linear):
    def forward(self, input):
        return F.linear(input, self.weight * 2, self.bias)


@ingredient
class CalledLinear(nn.Linear):
    """Does more than its forward."""

    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs) + 1


@ingredient
def normalized() -> nn.Module:
    return torch.nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))


class Experts(nn.Module):
    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.count = count
        self.gate_up_proj = nn.Parameter(torch.randn(count, 16, 16) / 4)
        self.down_proj = nn.Parameter(torch.randn(count, 16, 8) / 4)
        self.act_fn = nn.SiLU()

    def forward(self, hidden, chosen, weights):
        result = torch.zeros_like(hidden)
        for expert in range(self.count):
            token, place = torch.where(chosen == expert)
            gate, up = F.linear(hidden[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            y = F.linear(self.act_fn(gate) * up, self.down_proj[expert]) * weights[token, place, None]
            result.index_add_(0, token, y.to(result.dtype))
        return result


@ingredient
class Sparse(nn.Module):
    """A mixture whose last expert gets no token."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 3, bias=False), Experts()

    def forward(self, x):
        rows = x.reshape(-1, 16)
        scores = self.gate(rows)
        scores = torch.softmax(scores - torch.tensor([0.0, 0.0, 1e4]).to(scores), -1)
        weights, chosen = scores.topk(2, dim=-1)
        return self.experts(rows, chosen, weights.to(x.dtype)).view(x.shape)


@ingredient
class Dense(nn.Module):
    """A gated unit whose names are those of a router."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


# -- what is done to models, from outside ------------------------------------------------------------------------------------


class Log(list[tuple[Any, ...]]):
    """What hooks have seen, each with the name of whose hook it was. undo: what takes back changes that outlive a model."""

    def __init__(self) -> None:
        super().__init__()
        self.undo: list[Callable[[], object]] = []

    def close(self) -> None:
        while self.undo:
            self.undo.pop()()


def noted(value: Any) -> Any:
    """``value`` as it is now."""
    return tree_map(lambda each: each.detach().clone() if isinstance(each, torch.Tensor) else each, value)


def _scaled(value: Any) -> Any:
    return tree_map(lambda each: each * 1.5 if isinstance(each, torch.Tensor) and each.is_floating_point() else each, value)


@ingredient
def captured(log: Log) -> Callable[..., None]:
    """A hook of any kind that keeps what it is given."""
    return lambda module, *given: log.append((type(module).__name__, *noted(given)))


@ingredient
def replaced(module: nn.Module, *given: Any) -> Any:
    """A hook that gives others another value: a pre hook, or one of a result."""
    return _scaled(given[-1])


@ingredient
def replaced_gradients(module: nn.Module, dx: Any, dy: Any) -> Any:
    return _scaled(dx)


@ingredient
def tapped(log: Log) -> Callable[..., Any]:
    """A forward hook that gives a copy of the result a hook of its own; torch loses hooks of views that are written later."""

    def hook(module, args, result):
        return tree_map(tap, result)

    def tap(value):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            value = value * 1
            value.register_hook(lambda gradient: log.append(("tensor", noted(gradient))))
        return value

    return hook


@ingredient
def writing(module: nn.Module, args: Any, result: Any) -> None:
    """A forward hook that writes to the result."""
    with torch.no_grad():
        result.mul_(2)


@ingredient
def everywhere(log: Log, handle: Any) -> None:
    """Keep a hook of all modules until the case ends."""
    log.undo.append(handle.remove)


@ingredient
def wrap(module: nn.Module) -> None:
    """Give an object a forward around the one that it has, as accelerate does."""
    before = module.forward
    module.forward = lambda *args, **kwargs: _scaled(before(*args, **kwargs))


@ingredient
def patch(module: nn.Module) -> None:
    """Give an object a forward of its own that reads its class's, as Liger and unsloth do."""
    before = type(module).forward
    module.forward = types.MethodType(lambda self, *args, **kwargs: _scaled(before(self, *args, **kwargs)), module)


@ingredient
def patch_class(log: Log, module: nn.Module) -> None:
    """Give the class of an object another forward until the case ends."""
    kind, before = type(module), type(module).__dict__.get("forward")

    def forward(self, *args, **kwargs):
        return _scaled(before(self, *args, **kwargs))

    if before is not None:
        kind.forward = forward
        log.undo.append(lambda: setattr(kind, "forward", before))


@ingredient
def change(owner: Any) -> None:
    """Change the numbers among the attributes of a module, a config or the keywords of a partial."""
    for name, value in vars(owner).items():
        if type(value) is float:
            setattr(owner, name, (value + 0.5) / 2)
        elif isinstance(value, SimpleNamespace):
            change(value)
        elif isinstance(value, functools.partial):
            value.keywords["approximate"] = "none"


@ingredient
def renew(module: nn.Module) -> None:
    """Give a module other parameters."""
    for name, value in [*module.named_parameters(recurse=False)]:
        setattr(module, name, nn.Parameter(value.detach() * 0.7))


@ingredient
def step(model: nn.Module) -> None:
    """Write to all parameters, as an optimizer does."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


# -- arguments ---------------------------------------------------------------------------------------------------------------


@ingredient
def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.requires_grad_()


@ingredient
def made(x: torch.Tensor) -> torch.Tensor:
    """A result of something, which may be written."""
    y = x.requires_grad_() * 1
    y.retain_grad()
    return y


@ingredient
def padded(x: torch.Tensor) -> torch.Tensor:
    """``x`` with a row of zeros."""
    x[..., -1, :] = 0
    return x


@ingredient
def spoiled(x: torch.Tensor, value: float) -> torch.Tensor:
    x[..., -1, 3] = value
    return x


@ingredient
def stop(fail: bool) -> None:
    if fail:
        raise Stop("between a norm and its reader")
