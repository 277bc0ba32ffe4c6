"""A converter for TorchTitan, by the protocol of its release 0.3: it is given a model's config, and returns one.

TorchTitan builds the model on the meta device, shards it, and then allocates and initializes it. The converter's config builds
the same model and converts it, before anything shards it. Name the converter where the model's spec is made:

    spec = model_registry("8B", converters=[OpfuseConverter.Config()])

Without torchtitan the script runs a small model whose config has the same protocol.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import opfuse

try:
    from torchtitan.protocols.model import ModelConfigConverter
except ImportError:  # what the protocol asks for

    class ModelConfigConverter:  # type: ignore[no-redef]
        class Config:
            _owner: Any = None

            def build(self) -> Any:
                return self._owner(self)

        def __init_subclass__(cls) -> None:
            cls.Config._owner = cls


POLICY = {"layers.0": None, "layers.-1": None}
"""The first and the last block stay in high precision, as the output head does by default."""


class OpfuseConverter(ModelConfigConverter):
    """Implements ``ModelConfigConverter``."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        recipe: str = "Float8CurrentScaling"

    def __init__(self, config: Config) -> None:
        self.recipe = getattr(opfuse.recipes, config.recipe)()

    def convert(self, model_config: Any) -> Any:
        kind, recipe = type(model_config), self.recipe

        class Converted(kind):  # of the same fields; a config has slots, so its build cannot be replaced
            __slots__ = ()

            def build(self, **options: Any) -> nn.Module:
                model = kind.build(self, **options)
                print(opfuse.fuse_(model, recipe, policy=POLICY))
                return model

        model_config.__class__ = Converted
        return model_config


class FeedForward(nn.Module):
    """With the names of TorchTitan's Llama."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.w2 = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """The second half of a transformer layer, without attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.feed_forward, self.ffn_norm = FeedForward(width), nn.RMSNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.feed_forward(self.ffn_norm(x))


class Model(nn.Module):
    @dataclass(kw_only=True, slots=True)
    class Config:
        width: int = 64
        depth: int = 4
        vocabulary: int = 128

        def build(self) -> nn.Module:
            return Model(self)

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.tok_embeddings = nn.Embedding(config.vocabulary, width)
        self.layers = nn.ModuleDict({str(i): Block(width) for i in range(config.depth)})
        self.norm, self.lm_head = nn.RMSNorm(width), nn.Linear(width, config.vocabulary, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(words)
        for layer in self.layers.values():
            x = layer(x)
        return self.lm_head(self.norm(x))

    def init_weights(self) -> None:
        for module in self.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()


def main(steps: int = 5) -> list[float]:
    """What TorchTitan's Trainer does with a model's config, on one process."""
    config = OpfuseConverter.Config().build().convert(Model.Config())
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    words = torch.arange(33).repeat(4, 1) + torch.arange(4)[:, None]
    losses = []
    for _ in range(steps):
        logits = model(words[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(main())
