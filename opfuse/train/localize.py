"""The first op whose values differ between two runs: both are made again up to a step, which is then run op by op."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from opfuse.config import Config, load
from opfuse.errors import TraceError, describe
from opfuse.events import GroupRan
from opfuse.inspect.watch import LookedAt
from opfuse.runtime.plans.written import unsealed
from opfuse.tensors.storage import QuantizedStorage
from opfuse.train.comparison import data_of, initial_model, overridden, usable
from opfuse.train.data import corpus, random_batches
from opfuse.train.files import REPORT
from opfuse.train.loop import Interrupted, fit
from opfuse.train.runs import configuration_of


class SeenValue(NamedTuple):
    """What an op left in one pass. name: of its node. value: decoded, on the CPU."""

    side: str
    name: str
    value: torch.Tensor


@dataclass(frozen=True)
class ValueDifference:
    """The first value that two runs do not share. share: of elements that differ. largest: in parts of the largest value."""

    step: int
    side: str
    name: str
    share: float
    largest: float

    def __str__(self) -> str:
        where = f"step {self.step}, {self.side}: {self.name}"
        return f"values differ first in {where}: {self.share:.1%} of elements, by {self.largest:.2e} of the largest value"


def values_at(path: Path, step: int) -> list[SeenValue]:
    """The values of step ``step``, from 1, of a run that is made again: a directory of ``opfuse run``, or a configuration."""
    config, steps, seed, device, sha256 = _asked(path)
    settings, data = overridden(config.train, steps=steps, seed=seed), data_of(config)
    text = corpus(data, config.folder)
    if sha256 not in (None, text.sha256):
        got, cure = f"another one in {config.folder}", "put it back, or call from the folder in which the run was started"
        raise TraceError(describe(str(path), wanted="the text that the run had", got=got, cure=cure))
    model = initial_model(config, data, settings.seed, usable(device))
    batches = random_batches(text.train, context=data.context, batch_size=settings.batch_size, seed=settings.seed)
    seen: list[SeenValue] = []

    def listen(run: GroupRan) -> None:
        if run.result is not None:
            value = run.result.dequantize() if isinstance(run.result, QuantizedStorage) else run.result
            seen.append(SeenValue(run.side, run.nodes[-1], value.detach().to("cpu", torch.float32)))

    calls = LookedAt(model, lambda number: listen if number == step else None)
    late = settings.model_copy(update={"eval_every": settings.steps})
    try:
        fit(model, batches, (), late, recipe=config.recipe, stop=lambda: calls.step >= step)
    except Interrupted:
        pass
    finally:
        calls.close()
    return seen


def _asked(path: Path) -> tuple[Config, int | None, int | None, str, str | None]:
    """The configuration of a run, and the steps, the seed, the device and the text's sha256 that it had."""
    if not path.is_dir():
        return load(path), None, None, "cpu", None
    try:
        report = unsealed((path / REPORT).read_text(encoding="utf-8"))
        config = replace(configuration_of(path), path=report["config"])  # from whose folder its text counts
        return config, report["steps"], report["seed"], report["device"], report["data"]["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        cure = "name directories of `opfuse run`, or configurations"
        raise TraceError(describe(str(path), wanted="a run that can be made again", got=str(error), cure=cure)) from None


def first_difference(old: Path, new: Path, step: int, bound: float = 0.0) -> ValueDifference | None:
    """The first value in which two runs differ in ``step``, by more than ``bound`` of the largest one; None if none does.

    Values are compared in the order in which ops leave them, forward and then backward. TraceError if the pipelines differ.
    """
    left, right = values_at(old, step), values_at(new, step)
    for a, b in zip(left, right):
        _check(a, b)
        found = _difference(step, a, b)
        if found is not None and found.largest > bound:
            return found
    return None


def _check(a: SeenValue, b: SeenValue) -> None:
    if (a.side, a.name, a.value.shape) != (b.side, b.name, b.value.shape):
        shapes = [f"{tensor.side} {tensor.name} {tuple(tensor.value.shape)}" for tensor in (a, b)]
        cure = "compare runs of one pipeline; `opfuse diff` without --localize tells what differs"
        raise TraceError(describe("opfuse diff --localize", wanted=shapes[0], got=shapes[1], cure=cure))


def _difference(step: int, a: SeenValue, b: SeenValue) -> ValueDifference | None:
    unlike = ~((a.value == b.value) | (a.value.isnan() & b.value.isnan()))
    if not unlike.any():
        return None
    size = a.value[a.value.isfinite()].abs().amax() if a.value.isfinite().any() else torch.zeros(())
    gap = (a.value - b.value)[unlike].abs().nan_to_num(nan=math.inf).amax()  # NaN beside a number is no small difference
    largest = float(gap / size.clamp(min=torch.finfo(torch.float32).tiny))
    return ValueDifference(step, a.side, a.name, float(unlike.float().mean()), largest)
