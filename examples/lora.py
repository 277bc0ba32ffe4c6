"""LoRA with PEFT: frozen layers compute in FP8, adapters in high precision. PEFT reads the adapter without opfuse, bit for bit.

Run it: python examples/lora.py
"""

import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import opfuse

SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def pretrained() -> LlamaForCausalLM:
    """Of random weights here, the same each time."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def main(folder: str, steps: int = 10) -> tuple[list[float], torch.nn.Module, torch.nn.Module]:
    model = get_peft_model(pretrained(), LoraConfig(target_modules=["q_proj", "v_proj", "up_proj"]))
    print(opfuse.fuse_(model, opfuse.recipes.Float8CurrentScaling()))  # after the layers are wrapped
    optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=1e-2)

    words = torch.arange(32).repeat(8, 1) + torch.arange(8)[:, None]  # sequences of consecutive numbers
    losses = []
    for step in range(steps):
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step:3}  loss {losses[-1]:.4f}")

    model.save_pretrained(folder)  # the adapter alone
    return losses, model, PeftModel.from_pretrained(pretrained(), folder)  # read without opfuse


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
