"""``opfuse explain``: what a configuration's pipeline fuses, what it does not, and why."""

from __future__ import annotations

from pathlib import Path

import torch

from opfuse.cli.output import echo, echo_json
from opfuse.config import Config, load
from opfuse.errors import ConfigError, describe
from opfuse.inspect.explain import Explanation
from opfuse.inspect.explain import explain as explain_call
from opfuse.recipes.autocast import under
from opfuse.train import usable


def explain(config: Path, *, why_not: str | None, format: str, device: str, all_of_it: bool = False) -> None:
    """Print the explanation of a training call as "text", "json" or "mermaid"; ``why_not``: of this rule alone.

    all_of_it: not a screenful of text but all, with the bytes that each override saves, which JSON has in any case.
    """
    found = explained(load(config), device, overrides=all_of_it or format == "json")
    if why_not is not None:
        found = found.narrowed(why_not)
    if format == "json":
        echo_json(found.to_dict())
    elif format == "mermaid":
        echo(found.mermaid())
    else:
        echo(found.details() if all_of_it else str(found))


def explained(config: Config, device: str = "cpu", *, overrides: bool = True) -> Explanation:
    """The explanation of a training call of ``config``'s pipeline on random data. overrides: with the bytes each saves."""
    columns = config.columns
    if columns is None:
        cure = "add a data section, or begin the pipeline with an op of a known size"
        raise ConfigError(describe(config.path, wanted="an input of known columns", got="none", cure=cure))
    place = usable(device)
    model = config.build(device=place)
    x = torch.randn(config.train.batch_size, columns, dtype=config.dtype, device=place, requires_grad=True)
    with under(config.recipe):
        return explain_call(model, x, overrides=overrides)
