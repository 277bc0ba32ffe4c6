"""``opfuse advise``: which layers of a model had better compute in low precision."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from opfuse.cli.output import echo, echo_json
from opfuse.config import load
from opfuse.convert.advise import advise as advise_model
from opfuse.errors import UnsupportedError, describe


def advise(model: Path, *, kind: str, rows: int, as_json: bool) -> None:
    """Print what is advised for a configuration's pipeline, or for a model of transformers by its ``config.json``."""
    found = advise_model(_model(model), kind=kind, rows=rows)
    echo_json(found.to_dict()) if as_json else echo(str(found))


def _model(path: Path) -> nn.Module:
    """The model without its values."""
    file = path / "config.json" if path.is_dir() else path
    if file.suffix != ".json":
        return load(path).build(device="meta")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        cure = "pip install transformers, or name a configuration of opfuse"
        raise UnsupportedError(describe(str(path), wanted="transformers, to read it", got=str(error), cure=cure)) from None
    with torch.device("meta"):
        made: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(file))
    return made
