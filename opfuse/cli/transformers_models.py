"""Models of transformers, by their ``config.json``."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from opfuse.errors import ConfigError, UnsupportedError, describe


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
