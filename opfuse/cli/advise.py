"""``opfuse advise``: which layers of a model had better compute in low precision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from opfuse.cli.memory import estimated
from opfuse.cli.output import echo, echo_json
from opfuse.cli.transformers_models import model_of_transformers
from opfuse.config import Config, load
from opfuse.errors import ConfigError, describe
from opfuse.inspect.advise import Advice, LayerAdvice
from opfuse.inspect.advise import advise as advise_model


def advise(model: Path, *, kind: str, rows: int, budget: str | None, as_json: bool) -> None:
    """Print what is advised for a configuration's pipeline, or for a model of transformers by its ``config.json``.

    budget: memory of a GPU, for which a model of transformers is estimated with one sequence of ``rows`` tokens.
    """
    is_other = model.is_dir() or model.suffix == ".json"
    if budget is not None and not is_other:
        cure = "name the config.json of a transformers model, or leave --budget out"
        raise ConfigError(describe(f"{model} --budget", wanted="a model with a loss", got="a configuration of opfuse", cure=cure))
    made = model_of_transformers(model) if is_other else None
    found = advise_model(made, kind=kind, rows=rows) if made is not None else _of_configuration(load(model), kind, rows)
    step = None if budget is None else estimated(model, batch=1, sequence=rows, recipe=kind, budget=budget)
    if as_json:
        echo_json(found.to_dict() | ({} if step is None else {"memory": step.to_dict()}))
    else:
        echo(str(found) if step is None else f"{found}\n\n{step}")


def _of_configuration(config: Config, kind: str, rows: int) -> Advice:
    """Advice for a pipeline, by the ops and lines of its file; the last layer of one that trains makes its output."""
    made = config.build(device="meta")
    sized = [str(i) for i, op in enumerate(made) if hasattr(op, "out_features")]
    found = advise_model(made, kind=kind, rows=rows, heads=sized[-1:] if config.data is not None else ())

    def named(layer: LayerAdvice) -> LayerAdvice:
        entry = config.pipeline[int(layer.path.partition(".")[0])]
        return replace(layer, path=f"{Path(entry.source.rpartition(':')[0]).name} {entry.op}")

    return replace(found, layers=tuple(map(named, found.layers)))
