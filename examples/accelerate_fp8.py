"""Accelerate by its own way of asking for FP8: a handler with the recipe. ``prepare`` converts the model, and may then wrap it.

Run it: accelerate launch examples/accelerate_fp8.py, or python examples/accelerate_fp8.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import opfuse
from opfuse.convert.accelerate import Accelerator, OpfuseRecipeKwargs  # pip install opfuse[accelerate]

SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def main(steps: int = 10) -> tuple[list[float], LlamaForCausalLM]:
    handler = OpfuseRecipeKwargs(recipe=opfuse.recipes.Float8BlockScaling(), policy={"model.layers.0": None})
    accelerator = Accelerator(mixed_precision="bf16", kwargs_handlers=[handler], cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    words = [torch.arange(start, start + 32) for start in range(32)]  # sequences of consecutive numbers
    loader = torch.utils.data.DataLoader(words, batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.print(opfuse.report(accelerator.unwrap_model(model)))  # what each module became

    losses: list[float] = []
    while len(losses) < steps:
        for batch in loader:
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            accelerator.print(f"batch {len(losses):3}  loss {losses[-1]:.4f}")
    return losses, model


if __name__ == "__main__":
    main()
