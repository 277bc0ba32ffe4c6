"""Text by a byte model: one byte after another, each from the few before it."""

from __future__ import annotations

from pathlib import Path

import torch

from opfuse.config import Config, TokenFile, load
from opfuse.errors import OutputError, UnsupportedError, describe
from opfuse.recipes.autocast import under
from opfuse.train.checkpoints import CONFIGURATION, Checkpoints, difference, read
from opfuse.train.comparison import data_of, initial_model, labels
from opfuse.train.model import ByteModel

FILLER = b"\n"
"""What stands before a prompt that is shorter than the model's context."""


def restored(directory: Path, device: torch.device) -> tuple[ByteModel, Config, int]:
    """The model of a run under its recipe, its configuration, and after how many steps. OutputError if there is no run."""
    path = directory / CONFIGURATION
    if not path.exists():
        cure = "pass a directory that `opfuse run` wrote, such as runs/quickstart"
        raise OutputError(describe(str(directory), wanted="a run", got=f"no {CONFIGURATION} in it", cure=cure))
    config = load(path)
    last = Checkpoints(directory, {}).path(labels(config)[0])
    found, text = read(last), path.read_text(encoding="utf-8")
    if found["run"].get("configuration", text) != text:
        wanted, got = difference(found["run"]["configuration"], text)
        cure = f"put back what the run had, which {last} holds"
        raise OutputError(describe(str(path), wanted=wanted, got=got, cure=cure))
    model = initial_model(config, data_of(config), 0, device)
    model.load_state_dict(found["model"])
    return model.eval(), config, found["step"]


def written(model: ByteModel, config: Config, prompt: bytes, *, length: int, temperature: float, seed: int) -> bytes:
    """``length`` bytes that go on from ``prompt``, drawn at ``temperature``; at 0 the likeliest each time.

    Formats with blocks of rows want many rows: they are all the same one, as many as a batch has.
    """
    if isinstance(config.data, TokenFile):
        got, cure = (
            "one of tokens, which the file does not spell",
            "call the model on tokens, and decode them by the tokenizer that made them",
        )
        raise UnsupportedError(describe(config.path, wanted="a model of bytes", got=got, cure=cure))
    context, device = data_of(config).context, model.embedding.weight.device
    text = list((FILLER * context + prompt)[-context:])
    draw = torch.Generator().manual_seed(seed)
    for _ in range(length):
        last = torch.tensor(text[-context:], device=device).expand(config.train.batch_size, -1)
        with torch.no_grad(), under(config.recipe):
            logits = model(last)[0].cpu()
        chances = ((logits - logits.max()) / temperature).softmax(-1) if temperature else (logits == logits.max()).float()
        text.append(int(chances.multinomial(1, generator=draw)))
    return bytes(text[context:])
