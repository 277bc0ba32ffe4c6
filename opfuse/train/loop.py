"""Training a model under one recipe, with evaluations in between."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from opfuse.compiler.plan import Plan
from opfuse.config import Train
from opfuse.errors import TrainingError, describe
from opfuse.recipes import Recipe, autocast
from opfuse.runtime.caches import CacheInfo
from opfuse.runtime.recording import recorded_plans
from opfuse.train.data import Batch
from opfuse.train.model import ByteModel

WARM_UP = 0.05
"""Part of the steps in which the learning rate rises."""

LAST = 50
"""Steps whose mean is the final training loss; of a short run, its last quarter."""

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


@dataclass(frozen=True)
class Curve:
    """One training run. Losses are cross entropies in nats per byte.

    losses: of every step, before its update. validation: (step, loss) of every evaluation. seconds: evaluations included.
    plans: what ran first for training and for evaluation. cache: the pipeline's plan cache after the run.
    """

    losses: tuple[float, ...]
    validation: tuple[tuple[int, float], ...]
    seconds: float
    plans: tuple[Plan, ...]
    cache: CacheInfo

    @property
    def last_steps(self) -> int:
        """Steps that :attr:`last` is the mean of."""
        return min(LAST, math.ceil(len(self.losses) / 4))

    @property
    def last(self) -> float:
        """Mean training loss of the last steps."""
        return math.fsum(self.losses[-self.last_steps :]) / self.last_steps


@dataclass(frozen=True)
class TrainStep:
    """Where a run stands after step ``number`` of ``total``. validation: the latest evaluation, None before the first."""

    number: int
    total: int
    loss: float
    validation: float | None


OnStep = Callable[[TrainStep], None]


def fit(
    model: ByteModel,
    batches: Iterable[Batch],
    held_out: Sequence[Batch],
    settings: Train,
    *,
    recipe: Recipe | None,
    on_step: OnStep = lambda step: None,
) -> Curve:
    """Train ``model`` in place under ``recipe``, None for high precision, and evaluate it on ``held_out`` as it learns.

    Evaluations are every ``settings.eval_every`` steps and after the last. The default random generators start from
    ``settings.seed`` and are restored afterwards. TrainingError as soon as a loss is not finite.
    """
    optimizer = OPTIMIZERS[settings.optimizer](model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(rate, steps=settings.steps))
    losses: list[float] = []
    validation: list[tuple[int, float]] = []
    start = time.perf_counter()
    device = model.embedding.weight.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []), recorded_plans() as plans:
        torch.manual_seed(settings.seed)
        for number, batch in zip(range(1, settings.steps + 1), batches):
            losses.append(_update(model, batch, optimizer, recipe))
            _check(losses[-1], f"training loss at step {number}")
            schedule.step()
            if number % settings.eval_every == 0 or number == settings.steps:
                validation.append((number, evaluate(model, held_out, recipe=recipe)))
                _check(validation[-1][1], f"validation loss after step {number}")
            on_step(TrainStep(number, settings.steps, losses[-1], validation[-1][1] if validation else None))
    seconds = time.perf_counter() - start
    distinct = {id(plan): plan for plan in plans}
    return Curve(tuple(losses), tuple(validation), seconds, tuple(distinct.values()), model.pipeline.cache_info())


def rate(step: int, *, steps: int) -> float:
    """The learning rate of update ``step`` (from 0) as a part of the highest: a linear rise, then half a cosine down to 0."""
    rise = max(1, round(WARM_UP * steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def evaluate(model: ByteModel, batches: Sequence[Batch], *, recipe: Recipe | None) -> float:
    """Mean cross entropy over ``batches`` of equal size, in evaluation mode and without gradients."""
    model.eval()
    # The region ends inside no_grad, so that no delayed scale moves.
    with torch.no_grad(), region(recipe):
        return math.fsum(float(loss(model, batch)) for batch in batches) / len(batches)


def region(recipe: Recipe | None) -> AbstractContextManager[object]:
    """The block in which a model computes under ``recipe``."""
    return autocast(enabled=recipe is not None, recipe=recipe)


def loss(model: ByteModel, batch: Batch) -> torch.Tensor:
    """Mean cross entropy of the next byte, fp32 ()."""
    batch = batch.to(model.embedding.weight.device)
    return nn.functional.cross_entropy(model(batch.context), batch.target)


def _update(model: ByteModel, batch: Batch, optimizer: torch.optim.Optimizer, recipe: Recipe | None) -> float:
    model.train()
    optimizer.zero_grad()
    with region(recipe):
        value = loss(model, batch)
    value.backward()
    optimizer.step()
    return float(value.detach())


def _check(value: float, where: str) -> None:
    if not math.isfinite(value):
        cure = "lower train.learning_rate, or choose a recipe or a pipeline.dtype with more range"
        raise TrainingError(describe(where, wanted="a finite number", got=value, cure=cure))
