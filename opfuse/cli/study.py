"""``opfuse study``: measurements along a training run that answer one question."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from rich.table import Table
from torch import nn

from opfuse.cli.output import echo, echo_json
from opfuse.cli.progress import reporter
from opfuse.cli.results import device_for, directory_for, print_files, show, write_or_salvage, written
from opfuse.cli.transformers_models import model_of_transformers
from opfuse.config import load
from opfuse.errors import number_of
from opfuse.recipes import recipe_of
from opfuse.train.files import sole_writer, writable
from opfuse.train.layer_costs import layer_costs
from opfuse.train.study import Study, study_overrides
from opfuse.train.study_report import NAMES, dtype_of, reasons, refused, rows, study_text, summary, to_dict, write_study


def study(
    config: Path, *, subject: str, steps: int | None, points: int, seed: int | None, device: str, out: Path | None, as_json: bool
) -> None:
    """Measure under every value of the field that ``subject`` names, and write the table.

    None: what the configuration says, or ``runs/NAME``.
    """
    chosen, field = load(config), next(field for field, name in NAMES.items() if name == subject)
    place, directory = device_for(device), directory_for(chosen, out)
    with sole_writer(directory / f"{subject}.json"):
        with reporter() as on_step:
            found = study_overrides(chosen, steps=steps, seed=seed, points=points, field=field, device=place, on_step=on_step)
        if as_json:
            echo_json(to_dict(found))
        else:
            print_study(found, points)
        print_files(write_or_salvage(partial(write_study, found), directory, partial(study_text, found)), as_json=as_json)


def print_study(found: Study, points: int) -> None:
    """The table, and what could not be measured."""
    took = f"{number_of(found.settings.steps, 'step')} on {found.device} in {found.seconds:.0f} s"
    echo(f"{found.name}: {took}; SQNR in dB, means over {number_of(points, 'point')}")
    show(table(found))
    for reason in reasons(refused(found), found.field):
        echo(f"refused  {reason}")


def table(found: Study) -> Table:
    """The means over the steps."""
    head, *body = rows(dtype_of(found), summary(found), found.field)
    drawn = Table(*head, box=None, pad_edge=False)
    for row in body:
        drawn.add_row(*(cell.strip("`") for cell in row))
    return drawn


ROWS, TOKENS = 4, 32
"""Of the text that a model is made to say."""

SHARE = 10
"""One of so many layers stays plain by default."""


def study_layers(
    model: Path, *, kind: str, plain: int | None, seed: int | None, device: str, out: Path | None, as_json: bool
) -> None:
    """Rank the layers of a model of transformers, and write ``layers.yaml``, a policy that leaves the worst of them plain."""
    recipe, place = recipe_of(kind, {}), device_for(device)
    directory = writable(out or Path("runs") / (model.parent if model.is_file() else model).resolve().name)
    torch.manual_seed(seed or 0)
    made = model_of_transformers(model, values=True).to(place).eval()
    tokens = _said(made, place)
    found = layer_costs(made, recipe, lambda model: model(input_ids=tokens, labels=tokens, use_cache=False).loss)
    count = len([layer for layer in found.layers if not layer.refused])
    text = found.to_yaml(min(count, -(-count // SHARE) if plain is None else plain))
    echo_json(found.to_dict()) if as_json else echo(str(found))
    written(directory / "layers.yaml", text.encode(), "name a directory that can be written to by --out")
    if not as_json:
        echo(f"wrote    {directory / 'layers.yaml'}: opfuse.fuse_(model, **opfuse.load_policy(...)) reads it")


def _said(model: nn.Module, place: torch.device) -> torch.Tensor:
    """Tokens (ROWS, TOKENS) that the model says, from random first ones: text of which it knows the probabilities."""
    words = int(model.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]
    tokens = torch.randint(words, (ROWS, 1)).to(place)
    with torch.no_grad():
        while tokens.shape[1] < TOKENS:
            logits = model(input_ids=tokens, use_cache=False).logits[:, -1]
            tokens = torch.cat((tokens, logits.float().softmax(-1).multinomial(1)), 1)
    return tokens
