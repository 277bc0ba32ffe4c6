"""Hugging Face's Trainer with gradient checkpointing. transformers reads the saved model without opfuse, bit for bit.

Run it: python examples/hf_trainer.py
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import opfuse

SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def sentences() -> list[dict[str, torch.Tensor]]:
    """Sequences of consecutive numbers."""
    words = [torch.arange(start, start + 32) for start in range(32)]
    return [{"input_ids": each, "labels": each} for each in words]


def main(folder: str, steps: int = 10) -> tuple[Trainer, LlamaForCausalLM]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    print(opfuse.fuse_(model, opfuse.recipes.MXFP8BlockScaling(), policy={"model.layers.0": None}))

    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        learning_rate=3e-3,
        per_device_train_batch_size=8,
        gradient_checkpointing=True,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=sentences())
    trainer.train()

    model.save_pretrained(folder)
    return trainer, LlamaForCausalLM.from_pretrained(folder)  # read without opfuse


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
