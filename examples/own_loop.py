"""A Hugging Face Llama, trained in FP8 by your own training loop.

Run it: python examples/own_loop.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import opfuse

SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def main(steps: int = 20) -> list[float]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    # The one added line. Parameters stay the same objects, so the optimizer made above keeps working.
    report = opfuse.fuse_(model, opfuse.recipes.Float8CurrentScaling())
    print(report)

    words = torch.arange(32).repeat(8, 1) + torch.arange(8)[:, None]  # sequences of consecutive numbers
    losses = []
    for step in range(steps):
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step:3}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
