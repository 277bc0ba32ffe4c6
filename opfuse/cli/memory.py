"""``opfuse memory``: what a training step of a model of transformers takes of each GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from opfuse.cli.output import echo, echo_json
from opfuse.cli.results import written
from opfuse.cli.transformers_models import model_of_transformers
from opfuse.config import load_policy
from opfuse.config.policies import Choices
from opfuse.errors import ConfigError, describe
from opfuse.inspect.step_memory import Memory
from opfuse.recipes import recipe_of
from opfuse.train.memory import memory as memory_of

PLAIN = "none"
"""The kind of no recipe."""


def memory(model: Path, *, html: Path | None, as_json: bool, **step: Any) -> None:
    """Print the estimate, or write its page too. step: as of :func:`estimated`."""
    found = estimated(model, **step)
    if html is not None:
        written(html, found.html().encode(), "name another file: --html FILE")
    echo_json(found.to_dict()) if as_json else echo(str(found))


def estimated(
    model: Path, *, batch: int, sequence: int, recipe: str, keep: str | None = None, policy: Path | None = None, **settings: Any
) -> Memory:
    """Of the causal language model of a ``config.json``, in bf16, which computes its loss and keeps no keys and values.

    recipe: its kind, or :data:`PLAIN`. policy: a file with recipe and policy, in place of recipe and keep. settings: further ones
    of :func:`opfuse.memory`.
    """
    if policy is not None and (recipe != PLAIN or keep is not None):
        cure = "write the recipe into the file, and leave --recipe and --keep out"
        raise ConfigError(describe("--policy", wanted="a recipe in the file alone", got="another beside it", cure=cure))
    if policy is not None:
        choices = load_policy(policy)
    else:
        choices = Choices(recipe=None if recipe == PLAIN else recipe_of(recipe, {"keep": keep}), policy={})
    made = model_of_transformers(model).to(torch.bfloat16)
    made.train()
    made.config.use_cache = False  # type: ignore[union-attr]
    ids = torch.zeros(batch, sequence, dtype=torch.int64, device="meta")
    return memory_of(made, recipe=choices["recipe"], policy=choices["policy"] or None, input_ids=ids, labels=ids, **settings)
