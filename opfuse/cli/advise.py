"""``opfuse advise``: which layers of a model had better compute in low precision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from opfuse.cli.output import echo, echo_json
from opfuse.config import Config, load
from opfuse.errors import ConfigError, UnsupportedError, describe
from opfuse.inspect.advise import Advice, LayerAdvice
from opfuse.inspect.advise import advise as advise_model


def advise(model: Path, *, kind: str, rows: int, as_json: bool) -> None:
    """Print what is advised for a configuration's pipeline, or for a model of transformers by its ``config.json``."""
    is_other = model.is_dir() or model.suffix == ".json"
    made = model_of_transformers(model) if is_other else None
    found = advise_model(made, kind=kind, rows=rows) if made is not None else _of_configuration(load(model), kind, rows)
    echo_json(found.to_dict()) if as_json else echo(str(found))


def _of_configuration(config: Config, kind: str, rows: int) -> Advice:
    """Advice for a pipeline, by the ops and lines of its file; the last layer of one that trains makes its output."""
    made = config.build(device="meta")
    sized = [str(i) for i, op in enumerate(made) if hasattr(op, "out_features")]
    found = advise_model(made, kind=kind, rows=rows, heads=sized[-1:] if config.data is not None else ())

    def named(layer: LayerAdvice) -> LayerAdvice:
        entry = config.pipeline[int(layer.path.partition(".")[0])]
        return replace(layer, path=f"{Path(entry.source.rpartition(':')[0]).name} {entry.op}")

    return replace(found, layers=tuple(map(named, found.layers)))


def model_of_transformers(model: Path, *, values: bool = False) -> nn.Module:
    """The model of a ``config.json``, or of the folder that has it, without its values.

    values: with them, from the folder; random ones where that has none.
    """
    folder, file = (model, model / "config.json") if model.is_dir() else (model.parent, model)
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        cure = "pip install transformers, or name a configuration of opfuse"
        raise UnsupportedError(describe(str(file), wanted="transformers, to read it", got=str(error), cure=cure)) from None
    if not file.exists():
        cure = "name a configuration of opfuse, a config.json, or a folder that has one"
        raise ConfigError(describe(str(file), wanted="a file or a folder", got="none there", cure=cure))
    try:
        if values and any(folder.glob("*.safetensors")):
            read: nn.Module = AutoModelForCausalLM.from_pretrained(folder)
            return read
        with torch.device("cpu" if values else "meta"):
            made: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(file))
    except Exception as error:  # of many types, as the libraries below have them
        got = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        cure = "name the config.json of a model that transformers knows as a causal language model"
        raise ConfigError(describe(str(file), wanted="a model that transformers can make", got=got, cure=cure)) from None
    return made
