"""PyTorch Lightning: `configure_model` converts the model; nothing else in the LightningModule changes.

Run it: python examples/lightning_module.py
"""

import pytorch_lightning as lightning
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import opfuse

SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


class Llama(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(LlamaConfig(**SIZES))
        self.losses: list[float] = []

    def configure_model(self) -> None:
        """Lightning calls it before it moves or shards the model, possibly more than once."""
        opfuse.fuse_(self.model, opfuse.recipes.Float8CurrentScaling())

    def training_step(self, words: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.model(input_ids=words, labels=words).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(folder: str | None = None, steps: int = 8) -> list[float]:
    torch.manual_seed(0)
    module = Llama()
    words = [torch.arange(start, start + 32) for start in range(32)]  # sequences of consecutive numbers
    loader = torch.utils.data.DataLoader(words, batch_size=8)
    trainer = lightning.Trainer(max_steps=steps, default_root_dir=folder, logger=False, enable_progress_bar=False)
    trainer.fit(module, loader)
    return module.losses


if __name__ == "__main__":
    print(main())
