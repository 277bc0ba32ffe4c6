"""What quantizing each layer of a model alone costs: in its gradient, and in its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from opfuse.convert.converted import converted, is_converted
from opfuse.convert.experts import experts_of
from opfuse.convert.fuse import fuse_, unfuse_
from opfuse.convert.leaves import weight_of
from opfuse.convert.policy import Policies
from opfuse.domains import checked_arguments
from opfuse.errors import ConversionError, describe
from opfuse.recipes import Recipe, as_recipe
from opfuse.train.study import agreement

Loss = Callable[[nn.Module], torch.Tensor]


@dataclass(frozen=True)
class LayerCost:
    """What quantizing one layer alone costs. sqnr: of the gradient for all parameters against that of the plain model, in dB: the
    lower, the more it costs. loss: how much higher the loss is. refused: why its recipe cannot take it, with sqnr and loss 0.
    """

    path: str
    sqnr: float
    loss: float
    refused: str = ""

    def __str__(self) -> str:
        return f"{self.path:<48} " + (
            f"refused: {self.refused}" if self.refused else f"{self.sqnr:7.2f} dB  loss {self.loss:+.2e}"
        )


@dataclass(frozen=True)
class LayerCosts:
    """The costs of all layers, the highest first. loss: of the plain model."""

    recipe: Recipe
    loss: float
    layers: tuple[LayerCost, ...] = field(repr=False)

    def policy(self, plain: int) -> dict[str, None]:
        """The policy of :func:`opfuse.fuse_` that leaves the ``plain`` layers of the highest costs in high precision."""
        return {layer.path: None for layer in self._measured[:plain]}

    @property
    def _measured(self) -> list[LayerCost]:
        return [layer for layer in self.layers if not layer.refused]

    def to_yaml(self, plain: int) -> str:
        """The same as a file for :func:`opfuse.load_policy`; the recipe has the default fields of its kind."""
        lines = ["version: 1", f"recipe: {{kind: {self.recipe.kind}}}", f"policy:{'' if plain else ' {}'}"]
        told = [f"  {each.path}: {{kind: none}}  # {each.sqnr:.2f} dB, loss {each.loss:+.2e}" for each in self._measured[:plain]]
        return "\n".join((*lines, *told, ""))

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"recipe": self.recipe.kind, "loss": self.loss, "layers": [asdict(layer) for layer in self.layers]}

    def __str__(self) -> str:
        return "\n".join((*map(str, self.layers), f"loss of the plain model: {self.loss:.6g}"))


@checked_arguments(ConversionError, but="model")
def layer_costs(model: nn.Module, recipe: object, loss: Loss) -> LayerCosts:
    """Quantize each layer of ``model`` alone under ``recipe``, and measure what that costs; the model stays as it is.

    loss: a function of the model that returns the loss of one fixed batch, a scalar with gradients. Layers are the linear layers
    and the experts of mixtures that :func:`opfuse.fuse_` converts by default. Each takes one forward and one backward pass, with
    the same random numbers, or two under delayed scaling, since the first has no scales yet; two gradients are held at once.
    ConversionError for a model that is converted already, and for one without such layers.
    """
    chosen = as_recipe(recipe)
    if is_converted(model):
        cure = "opfuse.unfuse_(model) first"
        raise ConversionError(describe("layer_costs", wanted="a model that is not converted", got="one that is", cure=cure))
    layers = list(_layers(model, chosen))
    if not layers:
        cure = "pass a model with linear layers beside its head"
        raise ConversionError(describe("layer_costs", wanted="layers that fuse_ converts", got="none", cure=cure))
    plain, gradient = _measured(model, loss)
    found = []
    for path, module in layers:
        try:
            fuse_(module, chosen)
        except ConversionError as error:
            found.append(LayerCost(path, 0.0, 0.0, str(error)))
            continue
        try:
            value, got = _measured(model, loss)
            if _scales_follow_calls(module):
                value, got = _measured(model, loss)
        finally:
            unfuse_(module)
        found.append(LayerCost(path, agreement(got, gradient).sqnr, value - plain))
    return LayerCosts(chosen, plain, tuple(sorted(found, key=lambda layer: (bool(layer.refused), layer.sqnr))))


def _layers(model: nn.Module, recipe: Recipe) -> Iterator[tuple[str, nn.Module]]:
    policies = Policies(model, recipe, None, None)
    for path, module in model.named_modules():
        if (weight_of(module) is not None or experts_of(module) is not None) and policies.of(module, path).convert:
            yield path, module


def _scales_follow_calls(module: nn.Module) -> bool:
    """Whether casts have scales of earlier calls, as in delayed scaling, so that the first call had none."""
    forwards = (converted(part) for part in module.modules())
    return any([*op.quantizer_states] for each in forwards if each is not None for op in each.products.values())


def _measured(model: nn.Module, loss: Loss) -> tuple[float, Sequence[torch.Tensor]]:
    """The loss, and its gradients."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    devices = {p.device for p in parameters if p.is_cuda}
    with torch.random.fork_rng(devices), torch.enable_grad(), _buffers_kept(model):
        torch.manual_seed(0)
        value = loss(model)
        gradients = torch.autograd.grad(value, parameters, materialize_grads=True)
    return float(value.detach()), gradients


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards buffers are as they were, such as the running means of a BatchNorm, which calls in training move."""
    before = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in before:
                module._buffers[name] = buffer.copy_(value)
