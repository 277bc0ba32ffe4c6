"""How far gradients are from what they stand for: recipes under every value of a field, at points of a training run."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch

from opfuse.config import Config, Train
from opfuse.errors import OpfuseError
from opfuse.formats import dtype_name
from opfuse.inspect.observe import CallInputs, observe
from opfuse.inspect.saved import CHOICES
from opfuse.recipes import Recipe, recipe_of
from opfuse.recipes.autocast import under
from opfuse.train.comparison import OnNamedStep, data_of, initial_model, overridden, usable
from opfuse.train.data import Batch, corpus, random_batches, spread_batches
from opfuse.train.exact import exact_gradients
from opfuse.train.loop import Curve, TrainStep, fit, loss
from opfuse.train.model import ByteModel

KINDS = ("fp8_current", "fp8_block", "mxfp8", "nvfp4")
"""Built-in recipes that take a backward override, which every study compares with their default fields."""

POINTS = 6
"""Points of the training run at which gradients are compared."""

CEILING = 300.0
"""dB that stand for no difference at all."""

NARROWED = {"nvfp4": {"disable_rht": True}}
"""Fields of a recipe outside bfloat16, which its rotation needs."""


OVERRIDE, KEPT = "backward_override", "keep"
"""Fields of recipes that are studied."""

Key = tuple[str | None, str | None]
"""A recipe and the value of the field."""


class Agreement(NamedTuple):
    """A comparison of two gradients over all parameters: signal to noise in dB, and the cosine of their angle."""

    sqnr: float
    cosine: float


@dataclass(frozen=True)
class Measurement:
    """One gradient at one point. kind None: no recipe. override: the value of the field that is studied. step: updates before it.
    dtype: of the pipeline.

    exact: agreement with the exact gradient of the forward pass that ran. plain: with the gradient without a recipe, None for
    that gradient itself.
    """

    step: int
    dtype: str
    kind: str | None
    override: str | None
    exact: Agreement
    plain: Agreement | None


@dataclass(frozen=True)
class Refusal:
    """A gradient that a recipe or a call refuses, and why. step, dtype, kind, override: as of a :class:`Measurement`."""

    step: int
    dtype: str
    kind: str
    override: str | None
    reason: str


@dataclass(frozen=True)
class Study:
    """What was measured and what could not be, and the run along which it was.

    field: of which every value was tried. saved: bytes that the pipeline keeps for a backward pass, beside its input.
    """

    config: Config
    settings: Train
    device: torch.device
    measurements: tuple[Measurement, ...]
    refusals: tuple[Refusal, ...]
    curve: Curve
    seconds: float
    field: str = OVERRIDE
    saved: Mapping[Key, int] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """The configuration's file name without its suffix."""
        return self.config.name

    @property
    def keys(self) -> tuple[Key, ...]:
        """No recipe, then each recipe that was compared under every value."""
        return (None, None), *product(recipes_of(self.config), CHOICES[self.field])


def study_overrides(
    config: Config,
    *,
    steps: int | None = None,
    seed: int | None = None,
    points: int = POINTS,
    field: str = OVERRIDE,
    device: str | torch.device = "cpu",
    on_step: OnNamedStep = lambda label, step: None,
) -> Study:
    """Train the configuration's model under its recipe, and at ``points`` steps, first and last among them, compare gradients.

    At each point, on one new batch, in evaluation mode, in the pipeline's dtype and in fp32: the gradient under every recipe
    of :func:`recipes_of` and every value of ``field``, which is ``backward_override`` or ``keep``, beside the exact one of the
    forward pass and beside the one without a recipe; for ``keep`` also the bytes that are saved. What a recipe or a call refuses
    is recorded as refused. steps, seed: instead of the configuration's.

    ConfigError if the configuration names no data; TrainingError if a loss is not finite; UnsupportedError without the device,
    or for an op with quantized operands that is no linear layer, grouped or not; what training itself raises.
    """
    settings = overridden(config.train, steps=steps, seed=seed)
    settings = overridden(settings, eval_every=settings.steps)
    data, place = data_of(config), usable(device)
    text = corpus(data, config.folder)
    model = initial_model(config, data, settings.seed, place)
    sizes = {"context": data.context, "batch_size": settings.batch_size}
    batches = random_batches(text.train, **sizes, seed=settings.seed)
    others = random_batches(text.train, **sizes, seed=settings.seed + 1)
    chosen = sorted({round(i * settings.steps / max(points - 1, 1)) for i in range(points)})
    found: list[Measurement | Refusal] = []
    start = time.perf_counter()

    def measure(step: int, last_loss: float) -> None:
        if step in chosen:
            found.extend(measured(model, next(others).to(place), config, step=step, seed=settings.seed, field=field))
            on_step("gradients", TrainStep(chosen.index(step) + 1, len(chosen), last_loss, None))

    def trained(step: TrainStep) -> None:
        on_step("training", step)
        measure(step.number, step.loss)

    measure(0, math.log(data.classes))
    held_out = spread_batches(text.validation, **sizes, count=1)
    curve = fit(model, batches, held_out, settings, recipe=config.recipe, on_step=trained)
    measurements = tuple(one for one in found if isinstance(one, Measurement))
    refusals = tuple(one for one in found if isinstance(one, Refusal))
    saved = dict(saved_bytes(model, next(others).to(place), config)) if field == KEPT else {}
    return Study(config, settings, place, measurements, refusals, curve, time.perf_counter() - start, field, saved)


def recipes_of(config: Config) -> dict[str, Recipe]:
    """The recipes that are compared, by kind: those of :data:`KINDS`, and the configuration's own with its fields."""
    own = {} if config.recipe is None else {config.recipe.kind: config.recipe}
    return {kind: recipe_of(kind, {}) for kind in KINDS} | own


def measured(
    model: ByteModel, batch: Batch, config: Config, *, step: int, seed: int, field: str
) -> Iterator[Measurement | Refusal]:
    """Every measurement of one point. The model stays as it is."""
    for dtype in dict.fromkeys((config.dtype, torch.float32)):
        name = dtype_name(dtype)
        twin = copy.deepcopy(model).eval()
        twin.pipeline.to(dtype)
        twin.dtype = dtype
        plain = gradients(twin, batch, None, seed=seed + step)
        yield Measurement(step, name, None, None, agreement(plain, exact_gradients(twin, batch, None)), None)
        for kind, recipe in recipes_of(config).items():
            exact = None  # the forward pass is the same under every value
            for override in CHOICES[field]:
                try:
                    changed = _under(recipe, field, override, dtype)
                    got = gradients(twin, batch, changed, seed=seed + step)
                except OpfuseError as error:
                    yield Refusal(step, name, kind, override, str(error))
                    continue
                exact = exact or exact_gradients(twin, batch, changed)
                yield Measurement(step, name, kind, override, agreement(got, exact), agreement(got, plain))


def _under(recipe: Recipe, field: str, value: str | None, dtype: torch.dtype) -> Recipe:
    """``recipe`` with another value of a field, for a pipeline in ``dtype``. RecipeError where it takes no such value."""
    fields = NARROWED.get(recipe.kind, {}) if dtype != torch.bfloat16 else {}
    changed = recipe.replace(**{field: value}, **fields)
    changed.check_trainable()
    return changed


def saved_bytes(model: ByteModel, batch: Batch, config: Config) -> Iterator[tuple[Key, int]]:
    """What the pipeline keeps for a backward pass beside its input, without a recipe and under every ``keep`` that runs."""
    recipes: list[tuple[str | None, Recipe | None]] = [(None, None), *recipes_of(config).items()]
    columns = model.embedding(batch.context).detach().flatten(1).to(model.dtype).requires_grad_()
    for kind, recipe in recipes:
        for value in CHOICES[KEPT] if recipe else (None,):
            with suppress(OpfuseError), under(recipe and recipe.replace(keep=value)):
                yield (kind, value), observe(model.pipeline, CallInputs((columns,), {})).totals.own


def gradients(model: ByteModel, batch: Batch, recipe: Recipe | None, *, seed: int) -> list[torch.Tensor]:
    """Gradients of the loss for all parameters, as training under ``recipe`` computes them; ``seed`` is for random rounding.

    The model stays as it is.
    """
    device = batch.context.device
    model = copy.deepcopy(model)  # the region's end moves delayed scales
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        with under(recipe):
            value = loss(model, batch)
        return list(torch.autograd.grad(value, list(model.parameters()), materialize_grads=True))


def agreement(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> Agreement:
    """The :class:`Agreement` of two gradients, in fp64: |wanted|^2 / |got - wanted|^2 in dB, at most CEILING; and the cosine."""
    left, right = (torch.cat([grad.double().flatten() for grad in grads]) for grads in (got, wanted))
    noise, size = float((left - right).norm()), float(right.norm())
    sqnr = CEILING if noise == 0 else min(20 * math.log10(max(size / noise, 10**-15)), CEILING)
    return Agreement(sqnr, float(torch.dot(left, right)) / max(float(left.norm()) * size, torch.finfo(torch.float64).tiny))


def mean(found: Sequence[Agreement]) -> Agreement:
    """The mean of each figure over the points."""
    return Agreement(*(math.fsum(figures) / len(found) for figures in zip(*found)))


def over_steps(study: Study, dtype: str, of: Callable[[Measurement], Agreement | None]) -> dict[Key, list[Agreement]]:
    """One figure of every recipe and override in the order of the steps, where there is one and none was refused."""
    refused = {(one.kind, one.override) for one in study.refusals if one.dtype == dtype}
    series: dict[Key, list[Agreement]] = {}
    for one in study.measurements:
        key = one.kind, one.override
        if one.dtype == dtype and key not in refused and (figure := of(one)) is not None:
            series.setdefault(key, []).append(figure)
    return series
