"""A model converter for TorchTitan, by the ModelConverter protocol of its releases up to 0.2.2.

TorchTitan creates the model on the meta device, converts it, shards it, and then allocates and initializes it. Register
the class once, and name it in the job's TOML: `[model] converters = ["opfuse"]`.

    from torchtitan.protocols.model_converter import register_model_converter
    register_model_converter(OpfuseConverter, "opfuse")

TorchTitan 0.3 has no such protocol: call `opfuse.fuse_` at the top of the model's parallelize function.
"""

import torch
from torch import nn

import opfuse


class OpfuseConverter:
    """Implements `torchtitan.protocols.model_converter.ModelConverter`: two methods, and these arguments.

    The first and the last block and the output head stay in high precision; other blocks compute under the recipe.
    """

    def __init__(self, job_config: object, parallel_dims: object) -> None:
        self.recipe = opfuse.recipes.Float8CurrentScaling()

    def convert(self, model: nn.Module) -> None:
        policy = {"layers.0": None, "layers.-1": None, "output": None}
        print(opfuse.fuse_(model, self.recipe, policy=policy))

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Nothing to do: scales are found in each call."""


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
    def __init__(self, width: int = 64, depth: int = 4, vocabulary: int = 128) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleDict({str(i): Block(width) for i in range(depth)})
        self.norm, self.output = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(words)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))

    def init_weights(self) -> None:
        for module in self.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()


def main(steps: int = 5) -> list[float]:
    """What TorchTitan's Trainer does with a converter, on one process."""
    converter = OpfuseConverter(job_config=None, parallel_dims=None)
    with torch.device("meta"):
        model = Model()
    converter.convert(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer.register_step_post_hook(lambda *_: converter.post_optimizer_hook(model))

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
