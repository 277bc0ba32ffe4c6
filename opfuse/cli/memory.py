"""``opfuse memory``: what a training step of a model of transformers takes of each GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from opfuse.cli.output import echo, echo_json
from opfuse.cli.results import written
from opfuse.cli.transformers_models import model_of_transformers
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


def estimated(model: Path, *, batch: int, sequence: int, recipe: str, keep: str | None = None, **settings: Any) -> Memory:
    """Of the causal language model of a ``config.json``, in bf16, which computes its loss and keeps no keys and values.

    recipe: its kind, or :data:`PLAIN`. settings: further ones of :func:`opfuse.memory`.
    """
    made = model_of_transformers(model).to(torch.bfloat16)
    made.train()
    made.config.use_cache = False  # type: ignore[union-attr]
    ids = torch.zeros(batch, sequence, dtype=torch.int64, device="meta")
    chosen = None if recipe == PLAIN else recipe_of(recipe, {"keep": keep})
    return memory_of(made, recipe=chosen, input_ids=ids, labels=ids, **settings)
