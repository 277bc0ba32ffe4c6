"""When delayed scales are updated: states that a cast uses are counted for the update that follows.

Forward states are updated when the outermost autocast region ends, backward states once after the backward pass that used
them. Only calls that record gradients count: a call under ``torch.no_grad()``, inside a region or around it, casts with the scale
that there is and counts no amax, so validation changes no training, whatever its data and its recipe. A second backward pass of
the same graph (``retain_graph=True``) casts gradients with the scale that the first one updated, and updates it again.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import TypeAlias

import torch

from opfuse.errors import RecipeError, UnsupportedError, describe
from opfuse.recipes.autocast import at_outermost_exit
from opfuse.recipes.builtin import DelayedScaling
from opfuse.recipes.delayed import DelayedScalingState, LastUse
from opfuse.recipes.passes import in_compiled_autograd, is_recomputing
from opfuse.recipes.pending import Pending, UsesByState
from opfuse.tensors.quantizers import Float8Quantizer
from opfuse.torch_private.autograd import after_backward, backward_pass


def count_forward(uses: UsesByState) -> None:
    """Have states be updated when the outermost region ends. RecipeError outside any region."""
    at_outermost_exit("delayed scaling", Pending).add(uses)


_BACKWARD_PASSES: dict[int, weakref.ref[Pending]] = {}
"""Pending updates by backward pass. The engine's callback alone keeps them alive: a pass that fails takes its own along."""


def count_backward(uses: UsesByState) -> None:
    """Have states be updated once after the running backward pass.

    RecipeError outside of one; UnsupportedError where compiled autograd runs it.
    """
    if in_compiled_autograd():
        cure = "call backward() outside of it, or take a recipe without state: torch.compile(model) does without it"
        got = "compiled autograd, which does not say when a pass is over"
        raise UnsupportedError(describe("delayed scaling", wanted="a backward pass of autograd's engine", got=got, cure=cure))
    _pending().add(uses)


def quantizer_of_call(
    state: DelayedScalingState,
    like: Float8Quantizer,
    recipe: DelayedScaling,
    use: LastUse,
    *,
    device: torch.device,
    counts: bool,
    backward: bool,
) -> Float8Quantizer:
    """A quantizer over ``state`` by which the running call casts a tensor on ``device``, with the format and planes of ``like``.

    counts: whether the amax counts. If it does, ``state`` serves ``recipe`` from now on, and is due for an update, which follows
    the running backward pass (``backward``) or the outermost region; a recomputation counts nothing. Errors: of
    :func:`count_backward` and :func:`count_forward`.
    """
    state.to(device)
    if counts and not is_recomputing():
        state.adopt(recipe, use.rule, where=use.name)
        count = count_backward if backward else count_forward
        count({state: use})
    return state.quantizer(like.fp8_dtype, rowwise=like.rowwise, columnwise=like.columnwise, counts=counts, rule=use.rule)


PassAround: TypeAlias = "weakref.ref[Pending] | None"
"""The pending update of a backward pass, of which one inside of it is to be a part; None if there is none."""


def running_pass() -> PassAround:
    """The pending update of the running backward pass, for :func:`count_in` of a pass inside of it; None if none runs."""
    return None if backward_pass() < 0 else weakref.ref(_pending())


def count_in(outer: PassAround) -> None:
    """Make the running backward pass a part of ``outer``, so that a state that both use is updated once, after both."""
    pending = None if outer is None else outer()
    if pending is not None:
        with _LOCK:
            _remember(backward_pass(), pending)


def _remember(task: int, pending: Pending) -> None:
    # A weak-value dictionary calls three functions of Python for this. pop() takes the dead reference for its default.
    _BACKWARD_PASSES[task] = weakref.ref(pending, functools.partial(_BACKWARD_PASSES.pop, task))


def _pending() -> Pending:
    task = backward_pass()
    if task < 0:
        cure = "call it from the backward of an autograd.Function"
        raise RecipeError(describe("delayed scaling of a gradient", wanted="a running backward pass", got=None, cure=cure))
    with _LOCK:
        known = _BACKWARD_PASSES.get(task)
        pending = None if known is None else known()
        if pending is None:
            pending = Pending()
            _remember(task, pending)
            after_backward(pending)
    return pending


_LOCK = threading.Lock()
"""The engine runs one thread a device, and a pass may use states on several."""
