"""The forward of a module as a chain of steps, the same in every mode.

In a chain one value goes from the first argument to the result: each step reads it, and nothing else but parameters of
submodules, constants and, in a sum, a further argument of ``forward``. The only branch is a gated unit. Any other forward is no
chain, and NotRecorded says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import nn

from opfuse.convert.code import NotRecorded
from opfuse.convert.forms import ACTIVATIONS, X, expressions, text
from opfuse.convert.record import (
    LEADING,
    NotOfThisWidth,
    RecordedForward,
    describe_node,
    first_parameter,
    mode,
    record,
    recordings,
    required_arguments,
    rows,
)

MOST_ARGUMENTS = 2
"""Arguments that a forward cannot do without, at most. With more it routes and masks."""

MOST_WIDTHS = 4
"""How many sizes of parameters are tried as widths of the inputs."""

ChainStep = tuple[Any, ...]
"""What y is of x:

- ("call", path): the submodule at that path of x
- ("apply", name): that activation of x
- ("gate", step, gate, up): step(gate(x)) * up(x), of two submodules by their paths; without these, of the two halves of x
- ("add", index): x + the further argument of that index, the first being 0
"""


@dataclass(frozen=True)
class TracedChain:
    """The steps of a forward.

    arguments: the names of the one that the steps begin with, and of those that they add. dtype: the one dtype of inputs and
    parameters for which this holds, if the forward asks for it; None: any. widths: the columns of each argument. in_autocast: the
    same steps under torch.autocast.
    """

    arguments: tuple[str, ...]
    steps: tuple[ChainStep, ...]
    dtype: torch.dtype | None = None
    widths: tuple[int, ...] = ()
    in_autocast: bool = False


def chain_of(module: nn.Module) -> TracedChain:
    """The forward of ``module`` as a chain, for all leading dimensions. NotRecorded if it is none."""
    if type(module).forward is nn.Module.forward:
        raise NotRecorded("none", "a forward")
    names = required_arguments(module)
    if not 1 <= len(names) <= MOST_ARGUMENTS:
        got = f"one with {len(names)}: {', '.join(names)}" if names else "one without any"
        raise NotRecorded(got, f"a forward with 1 or {MOST_ARGUMENTS} required arguments")
    widths, chain = _first_chain(module, names)
    like = first_parameter(module)
    in_autocast = torch.amp.autocast_mode.is_autocast_available("cpu" if like is None else like.device.type)
    for name, is_autocast, run in recordings(module, widths):
        if is_autocast:
            in_autocast = in_autocast and _is_chain(run, chain)
        elif (other := _read(run())) != chain:
            raise NotRecorded(f"another chain in {name}: {other.steps}", "one chain, whose dropouts are submodules")
    return replace(chain, widths=tuple(widths.values()), in_autocast=in_autocast)


def _is_chain(run: Callable[[], RecordedForward], chain: TracedChain) -> bool:
    try:
        return _read(run()) == chain
    except NotRecorded:
        return False


def _first_chain(module: nn.Module, names: Sequence[str]) -> tuple[Mapping[str, int], TracedChain]:
    """The first widths of inputs, by name, on which a forward runs, and its chain there."""
    sizes = dict.fromkeys(size for p in module.parameters() for size in reversed(p.shape[:2]) if size > 1)
    like, failure = first_parameter(module), None
    with mode("training") as training:
        for widths in product([*sizes][:MOST_WIDTHS] or [8], repeat=len(names)):
            inputs = {name: rows(LEADING[0], width, like) for name, width in zip(names, widths)}
            try:
                return dict(zip(names, widths)), _read(record(module, inputs, training=training))
            except NotOfThisWidth as error:  # any other failure is that of all widths, as sizes are compared by none
                failure = failure or error
    raise failure or NotRecorded("no input", "inputs of some width")


def _read(recording: RecordedForward) -> TracedChain:
    """The chain of one run. Each node has to be a step, or a part of one, so that nothing is computed beside the steps."""
    first, *others = [node for node in recording.nodes if node.op == "placeholder"]
    known = expressions(recording.nodes, {first: X, **{node: ("argument", index) for index, node in enumerate(others)}})
    result: Any = recording.nodes[-1].args[0]
    steps, value = list[ChainStep](), known[result]
    parts = set[int]()  # expressions by their id(), as equal ones may be two values
    while value != X:
        step, inner, inside = _last_step(value)
        steps.append(step)
        parts.update(map(id, (value, *inside)))
        value = inner
    for node in recording.nodes:
        if node.op not in ("placeholder", "output"):
            if id(known[node]) not in parts:
                raise NotRecorded(f"{describe_node(node)} beside it", "one value from the argument to the result")
            parts.remove(id(known[node]))
    dtype = first.meta["dtype"] if recording.reads_dtype else None
    return TracedChain(tuple(str(node.target) for node in (first, *others)), tuple(reversed(steps)), dtype)


def _last_step(value: Any) -> tuple[ChainStep, Any, Sequence[Any]]:
    """The step that a value is the result of, what it is a step of, and the values inside of the step."""
    match value:
        case "sum", 0.0, (("argument", index), inner) | (inner, ("argument", index)):
            return ("add", index), inner, ()
        case "product", 1.0, ((one, 1), (other, 1)):
            for active, up in ((one, other), (other, one)):
                act, gate = _activated(active)
                match gate, up:
                    case ("call", path, inner), ("call", beside, same) if act and inner == same:
                        return ("gate", act, path, beside), inner, (active, gate, up)
                    case ("half", 0, ("halves", inner) as both), ("half", 1, same) if act and both == same:
                        return ("gate", act), inner, (active, gate, up, both)
    act, inner = _activated(value)
    if act is None:
        raise NotRecorded(text(value), "a submodule, an activation, act(gate(x)) * up(x) or a sum with an argument of forward")
    return act, inner, ()


def _activated(value: Any) -> tuple[ChainStep | None, Any]:
    """The submodule or the activation that a value is the result of, and its argument; None for any other value."""
    match value:
        case "call", path, inner:
            return ("call", path), inner
        case name, inner if (name, X) in ACTIVATIONS:
            return ("apply", ACTIVATIONS[name, X]), inner
    return None, None
