"""FSDP2: each layer sharded over the processes of a group, with the sums and scales of one process.

Run it: torchrun --nproc-per-node 2 examples/fsdp2.py
"""

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import opfuse

SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def main(steps: int = 4) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)  # the same weights on every rank
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    opfuse.fuse_(model, opfuse.recipes.Float8CurrentScaling())  # convert first, then shard
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    words = torch.arange(32).repeat(4, 1) + torch.arange(4)[:, None] + 4 * dist.get_rank()  # a different batch on each rank
    losses = []
    for step in range(steps):
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())
        if dist.get_rank() == 0:
            print(f"step {step:3}  loss {losses[-1]:.4f}")
    # The whole model under Hugging Face's names, as LlamaForCausalLM.load_state_dict takes it.
    return losses, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
