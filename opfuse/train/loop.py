"""Training a model under one recipe, with evaluations in between."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from opfuse.compiler.cover import FUSED
from opfuse.compiler.plan import Plan
from opfuse.config import Train
from opfuse.errors import TrainingError, describe
from opfuse.events import PlanUsed, collected
from opfuse.inspect.watch import memory_of
from opfuse.keys import leaves, plain
from opfuse.recipes import Recipe
from opfuse.recipes.autocast import under
from opfuse.runtime.plans.cache_info import CacheInfo
from opfuse.runtime.plans.trace import key_id
from opfuse.train.checkpoints import RunState
from opfuse.train.data import Batch
from opfuse.train.model import ByteModel

SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda part: 0.5 * (1 + math.cos(math.pi * part)),
    "linear": lambda part: 1 - part,
    "constant": lambda part: 1.0,
}
"""The learning rate after it has risen, as a part of the highest, by the part of the steps that have passed since."""

LAST = 50
"""Steps whose mean is the final training loss; of a short run, its last quarter."""

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


@dataclass(frozen=True)
class Curve:
    """One training run. Losses are cross entropies in nats per byte.

    losses: of every step, before its update. validation: (step, loss) of every evaluation. seconds: evaluations included.
    plans: those that ran, in the order in which they first did, as :func:`_plain_plan` has them. cache: the pipeline's plan cache
    after the run. fusions: (rule, direction, places) of every rule that fused in a training step, in the order of their claims.
    measured: of every step its number, milliseconds, and bytes of memory, as :func:`opfuse.inspect.watch.memory_of` has them.
    """

    losses: tuple[float, ...]
    validation: tuple[tuple[int, float], ...]
    seconds: float
    plans: tuple[dict[str, Any], ...]
    cache: CacheInfo
    fusions: tuple[tuple[str, str, int], ...] = ()
    measured: tuple[tuple[int, float, int, int], ...] = ()

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


class Interrupted(Exception):
    """Training was asked to stop, and kept where it stands."""

    def __init__(self, step: int, total: int) -> None:
        super().__init__(f"stopped after step {step} of {total}")


def fit(
    model: ByteModel,
    batches: Iterable[Batch],
    held_out: Sequence[Batch],
    settings: Train,
    *,
    recipe: Recipe | None,
    on_step: OnStep = lambda step: None,
    resumed: RunState | None = None,
    keep: Callable[[RunState], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Curve:
    """Train ``model`` in place under ``recipe``, None for high precision, and evaluate it on ``held_out`` as it learns.

    Evaluations are every ``settings.eval_every`` steps and after the last. The default random generators start from
    ``settings.seed`` and are restored afterwards. TrainingError as soon as a loss is not finite.

    resumed: go on from there; ``batches`` are those that come then. keep: takes where the run stands, every
    ``settings.checkpoint_every`` steps, after the last, and before Interrupted is raised. stop: asked after each step.
    """
    run = _Run(model, settings, resumed)
    every = settings.checkpoint_every or settings.eval_every
    device = model.embedding.weight.device
    generators = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(generators), _threads(model, settings), collected(PlanUsed) as used:
        run.seed(device)
        for number, batch in zip(range(run.first + 1, settings.steps + 1), batches):
            start = time.perf_counter()
            run.losses.append(_update(model, batch, run.optimizer, recipe))
            run.measured.append((number, round((time.perf_counter() - start) * 1e3, 3), *memory_of(device)))
            _check(run.losses, f"training loss at step {number}")
            run.schedule.step()
            last = number == settings.steps
            if number % settings.eval_every == 0 or last:
                run.validation.append((number, evaluate(model, held_out, recipe=recipe)))
                _check([value for _, value in run.validation], f"validation loss after step {number}")
            on_step(TrainStep(number, settings.steps, run.losses[-1], run.validation[-1][1] if run.validation else None))
            stopped = stop()
            if keep is not None and (number % every == 0 or last or stopped):
                keep(run.saved(number, used, device))
            if stopped and not last:
                raise Interrupted(number, settings.steps)
    return run.curve(used)


SMALL = 2**20
"""Elements of the largest activation of a step, below which one thread of the CPU computes it."""


@contextmanager
def _threads(model: nn.Module, settings: Train) -> Iterator[None]:
    """Inside, torch takes one thread for small steps: on two free cores the quickstart is as fast with one as with two, beside
    another process on these cores twice as fast, and its losses do not depend on how many cores a machine has.
    """
    before, widest = torch.get_num_threads(), max(max(parameter.shape, default=1) for parameter in model.parameters())
    torch.set_num_threads(1 if settings.batch_size * widest < SMALL else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Run:
    """What a run is made of, besides its model, and how far it has come."""

    def __init__(self, model: ByteModel, settings: Train, resumed: RunState | None) -> None:
        self.model, self.settings, self.resumed = model, settings, resumed
        made = OPTIMIZERS[settings.optimizer]
        self.optimizer = made(model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, partial(rate, settings=settings))
        self.losses: list[float] = []
        self.validation: list[tuple[int, float]] = []
        self.measured: list[tuple[int, float, int, int]] = []
        self.first, self.start = 0, time.perf_counter()
        if resumed is not None:
            model.load_state_dict(resumed.model)
            self.optimizer.load_state_dict(resumed.optimizer)
            self.schedule.load_state_dict(resumed.schedule)
            self.losses, self.validation = list(resumed.losses), list(map(tuple, resumed.validation))  # type: ignore[arg-type]
            self.measured = list(map(tuple, resumed.measured))  # type: ignore[arg-type]
            self.first, self.start = resumed.step, self.start - resumed.seconds

    def seed(self, device: torch.device) -> None:
        """Have the default generators begin, or go on."""
        if self.resumed is None:
            torch.manual_seed(self.settings.seed)
            return
        torch.set_rng_state(self.resumed.generators["cpu"])
        if device.type == "cuda":
            torch.cuda.set_rng_state(self.resumed.generators["cuda"], device)

    def saved(self, step: int, used: Sequence[PlanUsed], device: torch.device) -> RunState:
        """Where the run stands."""
        generators = {"cpu": torch.get_rng_state()}
        if device.type == "cuda":
            generators["cuda"] = torch.cuda.get_rng_state(device)
        states = self.model.state_dict(), self.optimizer.state_dict(), self.schedule.state_dict()
        curve = self.curve(used)
        figures = self.losses, self.validation, curve.seconds
        ran = list(curve.plans), curve.cache._asdict(), list(curve.fusions)
        return RunState(step, *states, generators, *figures, *ran, self.measured)

    def curve(self, used: Sequence[PlanUsed]) -> Curve:
        """The curve so far. What a run did before it was resumed counts, too."""
        distinct = tuple({id(event.plan): event.plan for event in used}.values())
        fusions, cache = fused_in(distinct), self.model.pipeline.cache_info()
        plans = {plan["key"]: plan for plan in map(_plain_plan, distinct)}
        if self.resumed is not None:
            before = CacheInfo(**self.resumed.cache)
            plans = {plan["key"]: plan for plan in self.resumed.plans} | plans
            fusions = fusions or tuple(map(tuple, self.resumed.fusions))  # type: ignore[arg-type]
            alive = cache if cache.plans else before
            last_miss = cache.last_miss or before.last_miss
            cache = alive._replace(hits=before.hits + cache.hits, misses=before.misses + cache.misses, last_miss=last_miss)
        seconds = time.perf_counter() - self.start
        figures = tuple(self.losses), tuple(self.validation), seconds
        return Curve(*figures, tuple(plans.values()), cache, fusions, tuple(self.measured))


def _plain_plan(plan: Plan) -> dict[str, Any]:
    """A plan by its key, value by value with sources, and what fused: as JSON has it, the same in every process."""
    own = [{"path": leaf.path, "value": plain(leaf.value), "source": leaf.source} for leaf in leaves(plan.key)]
    return {"key": key_id(leaves(plan.key)), "leaves": own, "fusions": list(plan.fusions)}


def fused_in(plans: Iterable[Plan]) -> tuple[tuple[str, str, int], ...]:
    """(rule, direction, places) of every rule that fused in a training step, in the order of their claims."""
    training = [plan for plan in plans if plan.key.env.grad]
    return tuple(
        (rule, direction, count)
        for (rule, direction), count in Counter(
            (outcome.rule, outcome.direction) for plan in training for outcome in plan.outcomes if outcome.status == FUSED
        ).items()
    )


def rate(step: int, settings: Train) -> float:
    """The learning rate of update ``step`` (from 0) as a part of the highest: a linear rise, then what the schedule says."""
    rise = max(1, round(settings.warm_up * settings.steps))
    if step < rise:
        return (step + 1) / rise
    return SCHEDULES[settings.schedule]((step - rise) / max(1, settings.steps - rise))


def evaluate(model: ByteModel, batches: Sequence[Batch], *, recipe: Recipe | None) -> float:
    """Mean cross entropy over ``batches`` of equal size, in evaluation mode and without gradients."""
    model.eval()
    # The region ends inside no_grad, so that no delayed scale moves.
    with torch.no_grad(), under(recipe):
        return math.fsum(float(loss(model, batch)) for batch in batches) / len(batches)


def loss(model: ByteModel, batch: Batch) -> torch.Tensor:
    """Mean cross entropy of the next byte, fp32 ()."""
    batch = batch.to(model.embedding.weight.device)
    return nn.functional.cross_entropy(model(batch.context), batch.target)


def _update(model: ByteModel, batch: Batch, optimizer: torch.optim.Optimizer, recipe: Recipe | None) -> float:
    model.train()
    optimizer.zero_grad()
    with under(recipe):
        value = loss(model, batch)
    value.backward()
    optimizer.step()
    return float(value.detach())


def _check(values: Sequence[float], where: str) -> None:
    if not math.isfinite(values[-1]):
        before = ", ".join(f"{value:.3f}" for value in values[-4:-1])
        got = f"{values[-1]} after {before}: training diverged" if before else values[-1]
        cure = "lower train.learning_rate, or choose a recipe or a pipeline.dtype with more range"
        raise TrainingError(describe(where, wanted="a finite number", got=got, cure=cure))
