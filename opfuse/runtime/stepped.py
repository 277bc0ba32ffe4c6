"""Passes with code of the user's own, in steps.

An op, a rule, a fused op or a quantizer of the user's own may do what no tape sees. So it is run at every call, with contexts, as
the interpreter runs it. The casts around it are the library's, as are those that methods of the library make where a user's
method calls them: each is a program, by the looks of what it is given, as a whole segment is elsewhere. What the user's code
returns may look another way at each call; a cast of it is then interpreted, and recorded if such a tensor comes again.

A backward pass that is all the library's, as behind a forward-only rule, is a program by what that code has left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from opfuse.compiler.graph import BACKWARD
from opfuse.compiler.plan import Plan
from opfuse.core.cast import Cast
from opfuse.core.context import Value
from opfuse.program.tape import Tape
from opfuse.runtime.backward import BackwardPass, GradOutputs, Result
from opfuse.runtime.looks import given, look_of
from opfuse.runtime.own import is_own_cast
from opfuse.runtime.recorded import REFUSED, Programs, RecordedValues, program_of, structures_of, without_autocast
from opfuse.runtime.run import Runner
from opfuse.tensors.capture import is_capturing


class SteppedRunner(Runner):
    """The interpreter, with programs for casts, and one for a backward pass without code of the user's own."""

    def gradients(self, grad_outputs: GradOutputs, tensors: Iterator[torch.Tensor]) -> Result:
        """As of the interpreter."""
        programs = self._programs()
        told = self._told() if programs.limit else None
        return BackwardPass(self.plan, self.segment, super().gradients, programs, told)(grad_outputs, list(tensors))

    def _programs(self) -> Programs:
        """Those of the backward pass; none where it has code of the user's own."""
        start = self.segment.nodes.start
        programs: Programs | None = self.plan.programs.get((start, BACKWARD))
        if programs is None:
            programs = Programs(0) if BACKWARD in self.plan.own_code[start].why else Programs()
            self.plan.programs[start, BACKWARD] = programs
        return programs

    def _told(self) -> tuple[Any, ...] | None:
        """What the forward pass left for this one beside tensors; None where some of that is known to its code alone."""
        told = [context.told() for context in self.contexts.values()]
        return None if None in told else (*self.contexts, *told)

    def _caster(self, node: int, cast: Cast) -> Callable[..., Value]:
        return _Repeated(self.plan, node, cast)


@dataclass(frozen=True, eq=False)
class _Repeated:
    """A cast: by a program, where it has made one of such a tensor twice. node: for the log."""

    plan: Plan
    node: int
    cast: Cast

    def __call__(self, source: Value, *by: Value) -> Value:
        """As of the cast. by: the rows of groups, whose sizes the host may have to read."""
        programs = self.plan.programs.get(self.cast)
        if programs is None:
            programs = self.plan.programs[self.cast] = Programs() if is_own_cast(self.cast) else Programs(0)
        look = None if by or not programs.limit else _look(source)
        found = None if look is None else programs.get(look)
        if isinstance(found, RecordedValues):
            with without_autocast(self.plan.key.env.device):
                return found.values(found.program(given([source])))[0]
        if look is None or found is REFUSED or programs.is_new(look) or is_capturing():
            return self.cast(source, *by)
        return self._recorded(source, look, programs)

    def _recorded(self, source: Value, look: tuple[Any, ...], programs: Programs) -> Value:
        tape = Tape(given([source]))
        with tape.recording():
            value = self.cast(source)
        structures, tensors = structures_of([value])
        program = program_of(tape, tensors, self.plan.name, range(self.node, self.node + 1))
        programs.note(look, REFUSED if program is None else RecordedValues(program, structures))
        return value


def _look(source: Value) -> tuple[Any, ...] | None:
    """None where no program may run: a mode or a transform sees each op, or autograd follows them."""
    seen = torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active()
    if seen or not isinstance(source, torch.Tensor) or (source.requires_grad and torch.is_grad_enabled()):
        return None
    return look_of([source])
