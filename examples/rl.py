"""Reinforcement learning by policy gradients, where rollout and training compute the same probabilities, bit for bit.

The learner is a small causal language model of transformers that trains in FP8 blocks; the actor is another one, that holds no
other weights than FP8 codes and scales. After each update the actor gets the bytes that the learner multiplies, samples with a
KV cache, token by token, and the learner scores whole episodes. ``opfuse.invariant`` has both compute the same bits, so the
importance ratio is exactly 1 before an update, and afterwards shows the effect of the update alone. The learner's backward pass
uses ``backward_override="dequantized"``: its gradients are the chain rule of that forward pass.

Run it: python examples/rl.py, or, for a mixture of experts, python examples/rl.py --mixture
"""

import argparse
import re

import torch
from transformers import FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

import opfuse

WORDS, PROMPT, LENGTH = 32, 2, 6
LAYOUT = "deepseek"
RECIPE = opfuse.recipes.Float8BlockScaling(
    scale_rule="deepgemm", use_f32_scales=True, batch_invariant=True, backward_override="dequantized"
)
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


def model_of(mixture: bool) -> torch.nn.Module:
    """A policy with plain weights."""
    if mixture:
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS))
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def learner_of(mixture: bool) -> torch.nn.Module:
    model = model_of(mixture)
    opfuse.fuse_(model, RECIPE)
    opfuse.invariant(model)
    return model


def actor_of(mixture: bool, learner: torch.nn.Module) -> torch.nn.Module:
    """The same in the modules that transformers makes for an FP8 checkpoint, with the learner's weights."""
    model, config = model_of(mixture), FineGrainedFP8Config(weight_block_size=(128, 128))
    model = replace_with_fp8_linear(model, ["lm_head", "gate"], quantization_config=config)
    sync(learner, model, assign=True)  # in the place of weights without memory
    opfuse.fuse_(model, RECIPE)
    opfuse.invariant(model)
    return model


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``tensors`` with the experts of each layer in one array, as the model holds them; files have them one by one."""
    made, experts = {}, {}
    for name, tensor in tensors.items():
        if found := re.fullmatch(r"(.*\.experts)\.\d+\.(gate|up|down)_proj\.weight(.*)", name):
            path, matrix, suffix = found.groups()
            experts.setdefault((path, suffix), {}).setdefault(matrix, []).append(tensor)
        else:
            made[name] = tensor
    for (path, suffix), matrices in experts.items():
        pairs = zip(matrices["gate"], matrices["up"])
        made[f"{path}.gate_up_proj{suffix}"] = torch.stack([torch.cat(pair) for pair in pairs])
        made[f"{path}.down_proj{suffix}"] = torch.stack(matrices["down"])
    return made


def sync(learner: torch.nn.Module, actor: torch.nn.Module, assign: bool = False) -> int:
    """Give ``actor`` the bytes that ``learner`` multiplies. Returns how many there are."""
    tensors, size = {}, 0
    for bucket in opfuse.weight_updates(learner, LAYOUT, recipe=RECIPE):  # bucket.data: send it as you like
        tensors |= bucket.tensors()
        size += bucket.data.nbytes
    actor.load_state_dict(stacked(tensors), assign=assign)
    return size


@torch.no_grad()
def rollout(actor: torch.nn.Module, episodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Episodes (episodes, PROMPT + LENGTH) of words, and the log-probabilities of the words that were drawn."""
    words, new, cache, acted = torch.randint(WORDS, (episodes, PROMPT)), None, None, []
    for _ in range(LENGTH):
        out = actor(input_ids=words if new is None else new, past_key_values=cache, use_cache=True)
        logits, cache = out.logits[:, -1], out.past_key_values
        new = logits.softmax(-1).multinomial(1)
        acted.append(opfuse.log_probs(logits, new[:, 0]))
        words = torch.cat((words, new), 1)
    return words, torch.stack(acted, 1)


def scored(learner: torch.nn.Module, words: torch.Tensor) -> torch.Tensor:
    """The same log-probabilities, computed by the learner in one call."""
    logits = learner(input_ids=words, use_cache=False).logits
    return opfuse.log_probs(logits[:, PROMPT - 1 : -1], words[:, PROMPT:])


def main(updates: int = 100, episodes: int = 64, mixture: bool = False) -> tuple[list[float], list[float]]:
    """Learn to say the next letter of the alphabet. Returns mean rewards, and the largest differences of probabilities."""
    torch.manual_seed(0)
    learner = learner_of(mixture)
    actor = actor_of(mixture, learner)
    optimizer = torch.optim.AdamW(learner.parameters(), lr=3e-3)
    rewards, differences = [], []
    for update in range(updates):
        size = sync(learner, actor)
        words, acted = rollout(actor, episodes)
        reward = (words[:, PROMPT:] == (words[:, PROMPT - 1 : -1] + 1) % WORDS).float()
        log_p = scored(learner, words)
        differences.append((log_p - acted).abs().max().item())

        ratio = (log_p - acted).exp()
        advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
        (-ratio * advantage).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        rewards.append(reward.mean().item())
        print(f"update {update:3}  {size} bytes  reward {rewards[-1]:.3f}  largest difference {differences[-1]}")
    assert max(differences) == 0
    return rewards, differences


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixture", action="store_true")
    torch.set_num_threads(1)  # more of them only wait for each other in so small a model
    main(mixture=parser.parse_args().mixture)
