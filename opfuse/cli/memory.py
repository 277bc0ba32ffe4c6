"""``opfuse memory``: what a training step of a model of transformers takes of each GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from opfuse.cli.output import echo, echo_json
from opfuse.cli.results import written
from opfuse.cli.transformers_models import model_of_transformers
from opfuse.inspect.step_memory import Memory
from opfuse.recipes import recipe_of
from opfuse.train.memory import memory as memory_of

PLAIN = "none"
"""The kind of no recipe."""


@dataclass(frozen=True)
class StepOptions:
    """A training step. recipe: its kind, or :data:`PLAIN`."""

    batch: int
    sequence: int
    recipe: str
    keep: str | None = None
    optimizer: str = "adamw"
    world: int = 1
    checkpointing: str = "none"
    loss: str = "own"
    main_grads: bool = False
    budget: str | None = None


def memory(model: Path, options: StepOptions, *, html: Path | None, as_json: bool) -> None:
    """Print the estimate, or write its page too."""
    found = estimated(model, options)
    if html is not None:
        written(html, found.html().encode(), "name another file: --html FILE")
    echo_json(found.to_dict()) if as_json else echo(str(found))


def estimated(model: Path, options: StepOptions) -> Memory:
    """Of the causal language model of a ``config.json``, in bf16, which computes its loss and keeps no keys and values."""
    made = model_of_transformers(model).to(torch.bfloat16)
    made.train()
    made.config.use_cache = False  # type: ignore[union-attr]
    ids = torch.zeros(options.batch, options.sequence, dtype=torch.int64, device="meta")
    recipe = None if options.recipe == PLAIN else recipe_of(options.recipe, {"keep": options.keep})
    others = {name: value for name, value in vars(options).items() if name not in ("batch", "sequence", "recipe", "keep")}
    return memory_of(made, recipe=recipe, input_ids=ids, labels=ids, **others)
