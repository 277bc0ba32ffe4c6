"""Accelerate: prepare, accumulate, clip, save. With mixed_precision="bf16", pipelines compute in bf16, as torch.autocast says.

Run it: accelerate launch examples/accelerate_loop.py, or python examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

import opfuse

SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def main(steps: int = 10) -> list[float]:
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    opfuse.fuse_(model, opfuse.recipes.Float8BlockScaling())  # before prepare, which may wrap the model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    words = [torch.arange(start, start + 32) for start in range(32)]  # sequences of consecutive numbers
    loader = torch.utils.data.DataLoader(words, batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    losses: list[float] = []
    while len(losses) < steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            accelerator.print(f"batch {len(losses):3}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
