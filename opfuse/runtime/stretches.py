"""Stretches of a backward pass between code of the user's own.

What comes to a stretch, the user's code may have made, so each has programs by the look of that in this call, and by what the
contexts hold beside tensors. A look that is new is interpreted, from where the pass is: nothing has to be undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch

from opfuse.compiler.cover import Group
from opfuse.compiler.plan import Plan, Stretch
from opfuse.core.context import Context, Value, identity
from opfuse.program.tape import Tape
from opfuse.runtime.gradients import Gradients
from opfuse.runtime.looks import given, look_of
from opfuse.runtime.recorded import REFUSED, Programs, RecordedStretch, program_of, structures_of, without_autocast
from opfuse.tensors.capture import is_capturing
from opfuse.tensors.storage import QuantizedStorage

Interpret = Callable[[Sequence[Group], Gradients], None]
"""Runs groups of a backward pass one by one."""

_WANTS_GRADIENT = attrgetter("requires_grad")


def repeat(
    stretch: Stretch, grads: Gradients, *, plan: Plan, interpret: Interpret, programs: Programs, told: tuple[Any, ...]
) -> None:
    """Run a stretch: interpreted when what comes looks new, recorded when it looks so again, and repeated from then on.

    grads: those so far, to which its own are added. told: what the contexts that it reads hold beside tensors.
    """
    values, saved = _parts(grads.values.values()), _saved(stretch, grads)
    seen = _look(grads, values, saved)
    look = None if seen is None else (*told, *seen)
    found = programs.get(look)
    if isinstance(found, RecordedStretch):
        handed = given([*values, *saved])
        values.clear()
        saved.clear()
        _let_go(stretch, grads)
        grads.enter(found.left, found.values(without_autocast(plan.key.env.device, found.program, handed)))
    elif look is None or found is REFUSED or programs.is_new(look) or is_capturing():
        values.clear()
        saved.clear()
        interpret(stretch.groups, grads)
    else:
        programs.note(look, _recorded(plan, stretch, interpret, grads, Tape(given([*values, *saved]))))


def _look(grads: Gradients, values: Sequence[torch.Tensor], saved: Sequence[torch.Tensor]) -> tuple[Any, ...] | None:
    """How what comes looks; None if no program may run."""
    look = None if any(map(_WANTS_GRADIENT, values)) else look_of([*values, *saved])
    if look is None:
        return None
    try:
        structures = [identity(each) for each in grads.values.values() if isinstance(each, QuantizedStorage)]
    except KeyError:  # a record of another class
        return None
    kinds = map(type, grads.values.values())
    return (*grads.values, *kinds, *structures, *look)


def _recorded(plan: Plan, stretch: Stretch, interpret: Interpret, grads: Gradients, tape: Tape) -> RecordedStretch | str:
    rest = grads.rest()
    with tape.recording():
        interpret(stretch.groups, rest)
    left, values = rest.left()
    structures, tensors = structures_of(values)
    first = min(stretch.nodes)
    program = program_of(tape, tensors, plan.name, range(first, max(stretch.nodes) + 1))
    grads.enter(left, values)
    return REFUSED if program is None else RecordedStretch(program, structures, left)


def _parts(values: Iterable[Value]) -> list[torch.Tensor]:
    """The tensors of values, and of the planes of records."""
    return [part for value in values for part in (value.tensors() if isinstance(value, QuantizedStorage) else (value,))]


def _saved(stretch: Stretch, grads: Gradients) -> list[torch.Tensor]:
    """What a stretch reads of what was saved."""
    contexts = grads.contexts
    found = [Context.parts(contexts[i]) for i in (*stretch.nodes, *stretch.beside) if i in contexts]
    return [part for parts in found for part in parts]


def _let_go(stretch: Stretch, grads: Gradients) -> None:
    """Have a program alone hold what comes to a stretch."""
    grads.values.clear()
    for i in stretch.nodes:
        if i in grads.contexts:
            grads.contexts[i].forget()
