"""The main job: a configuration's model trained under its recipe, beside the same model in high precision."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from opfuse.config import Config, Text, Train, Watching
from opfuse.errors import ConfigError, UnsupportedError, describe, nearest
from opfuse.formats import dtype_name
from opfuse.inspect.watch import RECORDS, watch
from opfuse.recipes import Recipe, Support, support
from opfuse.train.checkpoints import Checkpoints, RunState
from opfuse.train.data import Corpus, corpus, random_batches, spread_batches
from opfuse.train.loop import Curve, TrainStep, fit
from opfuse.train.model import ByteModel

EVALUATION_SAMPLES = 2048
"""Samples of one evaluation, rounded up to whole batches."""

OnNamedStep = Callable[[str, TrainStep], None]
"""Takes a label of :attr:`Comparison.labels` and where that run stands."""

Found = tuple[Mapping[str, Any], ...]
"""What was found of each cast, in order."""

AUTO = "auto"
"""A GPU where there is one, else the CPU."""

HIGH_PRECISION = Support("native", "without a recipe, products are torch's own")


@dataclass(frozen=True)
class Comparison:
    """What came of a configuration. baseline: the run without a recipe, None if the configuration has no recipe either.

    watched: what its casts did, in the steps that were looked at.
    """

    config: Config
    settings: Train
    device: torch.device
    corpus: Corpus
    run: Curve
    baseline: Curve | None
    watched: Found = ()

    @property
    def name(self) -> str:
        """The configuration's file name without its suffix."""
        return self.config.name

    @property
    def labels(self) -> tuple[str, str]:
        """What the run and the baseline compute in: ``("mxfp8", "float32")``."""
        return labels(self.config)

    @property
    def backend(self) -> Support:
        """Whether the recipe's products are native on the device, and why."""
        recipe = self.config.recipe
        arch = torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else (0, 0)
        return HIGH_PRECISION if recipe is None else support(recipe, arch)


def compare(
    config: Config,
    *,
    steps: int | None = None,
    seed: int | None = None,
    device: str | torch.device = "cpu",
    on_step: OnNamedStep = lambda label, step: None,
    checkpoints: Checkpoints | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Comparison:
    """Train twice from the same weights on the same batches: under the recipe, and in high precision in the same dtype.

    steps, seed: instead of the configuration's. on_step: called after each step. checkpoints: where both runs are kept, and
    what they may go on from. stop: asked after each step; Interrupted if it says so.

    ConfigError if the configuration names no data; TrainingError if a loss is not finite; UnsupportedError without the device.
    """
    settings = overridden(config.train, steps=steps, seed=seed)
    data = data_of(config)
    place = usable(device)
    text = corpus(data, config.folder)
    if checkpoints is not None:
        checkpoints = replace(checkpoints, run={**checkpoints.run, "text": text.sha256})
    initial = initial_model(config, data, settings.seed, place)
    held_out = spread_batches(
        text.validation,
        context=data.context,
        batch_size=settings.batch_size,
        count=-(-EVALUATION_SAMPLES // settings.batch_size),
    )

    def curve(label: str, recipe: Recipe | None, watching: Watching | None = None) -> tuple[Curve, Found]:
        resumed = None if checkpoints is None else checkpoints.load(label)
        sizes = {"context": data.context, "batch_size": settings.batch_size, "skip": 0 if resumed is None else resumed.step}
        model = copy.deepcopy(initial)
        before = () if resumed is None else tuple(resumed.watched)
        with watched(model, watching, step=sizes["skip"], before=before) as records:

            def keep(state: RunState) -> None:
                if checkpoints is not None:
                    checkpoints.save(label, replace(state, watched=[*records()]))

            made = fit(
                model,
                random_batches(text.train, **sizes, seed=settings.seed),
                held_out,
                settings,
                recipe=recipe,
                on_step=lambda step: on_step(label, step),
                resumed=resumed,
                keep=None if checkpoints is None else keep,
                stop=stop,
            )
        return made, records()

    label, plain = labels(config)
    run, found = curve(label, config.recipe, config.watch)
    baseline = None if config.recipe is None else curve(plain, None)[0]
    return Comparison(config, settings, place, text, run, baseline, found)


def labels(config: Config) -> tuple[str, str]:
    """What the run of a configuration and its baseline compute in."""
    plain = dtype_name(config.dtype)
    return (plain if config.recipe is None else config.recipe.kind), plain


def data_of(config: Config) -> Text:
    """The data that a configuration trains on. ConfigError if it has no such section."""
    if config.data is None:
        cure = "add `data: {kind: text, path: FILE}` or `data: {kind: pydoc_topics}` to the file"
        raise ConfigError(describe(config.path, wanted="data to train on", got="no data section", cure=cure))
    return config.data


def initial_model(config: Config, data: Text, seed: int, device: torch.device) -> ByteModel:
    """The model before its first step. Drawn on the CPU, so that it is the same on every device."""
    with torch.device("cpu"), torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return ByteModel(config.build(), embedding=data.embedding, dtype=config.dtype, classes=data.classes).to(device)


def overridden(settings: Train, **given: int | None) -> Train:
    """``settings`` with what is not None replaced; ConfigError for a value that the configuration would refuse too."""
    try:
        return Train.model_validate(settings.model_dump() | {name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        where = f"train.{'.'.join(map(str, first['loc']))}"
        raise ConfigError(describe(where, wanted=first["msg"], got=first["input"], cure="choose another value")) from None


def usable(device: str | torch.device) -> torch.device:
    """``device`` as torch knows it, "auto" for a GPU if there is one; UnsupportedError if it is not here, or computes nothing."""
    if device == AUTO:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.empty(0, device=device).device
        got = f"{str(device)!r}, which has no data" if found.type == "meta" else ""
    except (RuntimeError, AssertionError) as error:
        got = f"{str(device)!r} ({str(error).partition(chr(10))[0]})"
    if got:
        here = [AUTO, "cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        cure = f"choose one of {', '.join(here)}{nearest(str(device), here)}"
        raise UnsupportedError(describe("device", wanted="a device that torch can use here", got=got, cure=cure))
    return found


# -- the casts of a run looked at, as its file asks ----------------------------------------------------------------------------


@contextmanager
def watched(model: nn.Module, watching: Watching | None, *, step: int = 0, before: Found = ()) -> Iterator[Callable[[], Found]]:
    """Look at ``model``, after ``step`` steps in which ``before`` was found. ConfigError without the writer's package."""
    if watching is None:
        yield tuple
        return
    alarms = watching.alarms.model_dump()
    with _writer(watching.to) as writer, watch(model, every=watching.every, to=writer, alarms=alarms) as looking:
        looking.step = step
        yield lambda: (*before, *looking.records)[-RECORDS:]


@contextmanager
def _writer(to: str) -> Iterator[Any]:
    """The writer of a package that need not be here, closed at the end; None: records go into a file beside the report."""
    writer, close = _opened(to)
    try:
        yield writer
    finally:
        close()


def _opened(to: str) -> tuple[Any, Callable[[], None]]:
    """A writer, and the function that flushes and closes it."""
    if to == "jsonl":
        return None, lambda: None
    try:
        if to == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter()
            return writer, writer.close
        import wandb

        run = wandb.init()
        return run, run.finish
    except ImportError as error:
        cure = f"pip install {to}, or write `to: jsonl`"
        raise ConfigError(describe("watch.to", wanted=f"an installed {to}", got=str(error), cure=cure)) from None
