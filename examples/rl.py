"""Reinforcement learning by policy gradients, where rollout and training compute the same probabilities, bit for bit.

Weights are stored in MXFP8. The rollout policy receives their bytes and computes the same products as the learner's forward
pass, so the importance ratio is exactly 1 before an update, and afterwards shows the effect of the update alone. An MXFP8 scale
belongs to 32 values of one row, so the other rows of a batch do not matter. The learner's backward pass uses
`backward_override="dequantized"`: its gradients are the chain rule of that forward pass.

Run it: python examples/rl.py
"""

import torch
from safetensors.torch import load, save
from torch import nn

import opfuse
from opfuse import ops

WORDS, CONTEXT, WIDTH = 32, 4, 32
ACTS = opfuse.recipes.MXFP8BlockScaling()
LEARNS = opfuse.recipes.MXFP8BlockScaling(backward_override="dequantized")


class Policy(nn.Module):
    """Logits of the next word, from the last few."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        with opfuse.quantized_model_init(recipe=ACTS, preserve_high_precision_init_val=True):
            self.layers = ops.Sequential(
                ops.RMSNorm(CONTEXT * WIDTH), ops.Linear(CONTEXT * WIDTH, 128), ops.SiLU(), ops.Linear(128, WORDS)
            )

    def forward(self, context: torch.Tensor) -> torch.Tensor:
        return self.layers(self.embedding(context).flatten(1)).log_softmax(-1)


def rollout(policy: Policy, episodes: int, length: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Episodes as (episodes, CONTEXT + length) words, and the log-probabilities of the words that were drawn."""
    words, drawn = torch.randint(WORDS, (episodes, CONTEXT)), []
    with torch.no_grad(), opfuse.autocast(recipe=ACTS):
        for _ in range(length):
            scores = policy(words[:, -CONTEXT:])
            word = scores.exp().multinomial(1)
            words = torch.cat((words, word), 1)
            drawn.append(scores.gather(1, word))
    return words, torch.cat(drawn, 1)


def scored(policy: Policy, words: torch.Tensor) -> torch.Tensor:
    """The same log-probabilities, computed by the learner."""
    steps = words.shape[1] - CONTEXT
    with opfuse.autocast(recipe=LEARNS):
        scores = [policy(words[:, i : i + CONTEXT]).gather(1, words[:, i + CONTEXT, None]) for i in range(steps)]
    return torch.cat(scores, 1)


def main(updates: int = 40, episodes: int = 64) -> tuple[list[float], list[float]]:
    """Learn to say the next letter of the alphabet. Returns mean rewards, and the largest differences of probabilities."""
    torch.manual_seed(0)
    learner, actor = Policy(), Policy()
    optimizer = opfuse.with_masters(torch.optim.AdamW(learner.parameters(), lr=1e-2))
    rewards, differences = [], []
    for update in range(updates):
        sent = save(opfuse.to_planes(learner.state_dict()))  # bytes: send them as you like
        actor.load_state_dict(load(sent))

        words, acted = rollout(actor, episodes)
        reward = (words[:, CONTEXT:] == (words[:, CONTEXT - 1 : -1] + 1) % WORDS).float()
        log_p = scored(learner, words)
        differences.append((log_p - acted).abs().max().item())

        ratio = (log_p - acted).exp()
        advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
        (-ratio * advantage).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        rewards.append(reward.mean().item())
        print(f"update {update:3}  {len(sent)} bytes  reward {rewards[-1]:.3f}  largest difference {differences[-1]}")
    return rewards, differences


if __name__ == "__main__":
    main()
