"""The backward pass of a segment where all of it is the library's, whatever ran forward.

It is interpreted when what comes in looks new, recorded when it looks so again, and repeated from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from opfuse.compiler.plan import Plan, Segment
from opfuse.program.tape import Tape
from opfuse.runtime.looks import given, look_of
from opfuse.runtime.recorded import REFUSED, Programs, RecordedBackward, program_of, without_autocast
from opfuse.tensors.capture import is_capturing
from opfuse.torch_private.dispatch import active_modes

GradOutputs = dict[int, torch.Tensor | None]
"""Gradients of a segment's outputs, by value number."""

Result = list[torch.Tensor | None]


@dataclass(eq=False)
class BackwardPass:
    """Of a segment whose forward pass left what ``interpret`` reads.

    interpret: the interpreter's method. programs: by looks of what comes in. told: what else the pass depends on; None where
    that cannot be said. packs: whether what a program of the pass reads may yet be saved in blocks.
    """

    plan: Plan
    segment: Segment
    interpret: Callable[[GradOutputs, Iterator[torch.Tensor]], Result]
    programs: Programs
    told: tuple[Any, ...] | None = ()
    packs: bool = False

    def look(self, grad_outputs: GradOutputs, saved: list[torch.Tensor]) -> tuple[Any, ...] | None:
        """How what comes in looks; None if no program may run."""
        if self.told is None or not self.programs.limit or active_modes():
            return None
        look = look_of([*grad_outputs.values(), *saved])
        return None if look is None else (*self.told, *grad_outputs, *look)

    def __call__(self, grad_outputs: GradOutputs, saved: list[torch.Tensor]) -> Result:
        """The gradients of the interpreter. ``saved`` is emptied."""
        look = self.look(grad_outputs, saved)
        return self.run(grad_outputs, saved, look, self.programs.get(look))

    def run(self, grad_outputs: GradOutputs, saved: list[torch.Tensor], look: tuple[Any, ...] | None, found: Any) -> Result:
        """The same, for what was found of the look."""
        if isinstance(found, RecordedBackward):
            return self.repeated(found, grad_outputs, saved)
        if look is None or found is REFUSED or self.programs.is_new(look) or is_capturing():
            return self.interpret(grad_outputs, _one_by_one(saved))
        tape = Tape(given([*grad_outputs.values(), *saved]))
        with tape.recording():
            result = self.interpret(grad_outputs, iter(saved))
        grads = [grad for grad in result if grad is not None]
        program = program_of(tape, grads, self.plan.name, self.segment.nodes, packs=self.packs)
        made = REFUSED if program is None else RecordedBackward(program, tuple(grad is not None for grad in result))
        self.programs.note(look, made)
        return result

    def repeated(self, backward: RecordedBackward, grad_outputs: GradOutputs, saved: list[torch.Tensor]) -> Result:
        """By a program, which alone holds what came, and lets each go when it is read."""
        handed = given([*grad_outputs.values(), *saved])
        saved.clear()
        grad_outputs.clear()
        results = iter(without_autocast(self.plan.key.env.device, backward.program, handed))
        return [next(results) if present else None for present in backward.present]


def _one_by_one(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors in order, each of which is let go when it is taken."""
    tensors.reverse()
    while tensors:
        yield tensors.pop()
