"""Runs passes with the user's own code in steps.

A user's op, rule, fused op or quantizer may do what no tape sees. So the interpreter runs it at every call, with contexts. The
casts around it are the library's, and so are casts inside of it that a method of the library makes. Each of these casts has
programs of its own, by the look of the tensor that it is given, as elsewhere a whole segment has. A tensor from the user's code
may look different at each call; its cast is interpreted at first, and recorded when the same look comes again.

If the forward pass has such code and the backward pass has none, as behind a forward-only rule, the backward pass is a program.
If that has some, it is cut around it, and each stretch between is a program of its own (``stretches.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from opfuse.compiler.graph import BACKWARD
from opfuse.compiler.plan import Plan, Stretch
from opfuse.core.cast import Cast
from opfuse.core.context import Value, told_by
from opfuse.program.tape import Tape
from opfuse.runtime.backward import BackwardPass, GradOutputs, Result
from opfuse.runtime.gradients import Gradients
from opfuse.runtime.looks import given, look_of
from opfuse.runtime.own import is_own_cast
from opfuse.runtime.recorded import REFUSED, Programs, RecordedValues, program_of, structures_of, without_autocast
from opfuse.runtime.run import Runner
from opfuse.runtime.stretches import repeat
from opfuse.tensors.capture import is_capturing
from opfuse.torch_private.dispatch import active_modes, in_transform


class SteppedRunner(Runner):
    """The interpreter, but casts are programs, and so is what of a backward pass runs none of the user's own code."""

    def gradients(self, grad_outputs: GradOutputs, tensors: Iterator[torch.Tensor]) -> Result:
        """What the interpreter's method returns, from a program if there is one."""
        if self._stretches:
            return super().gradients(grad_outputs, tensors)
        programs = self._programs(BACKWARD)
        told = self._told if programs.limit else None
        return BackwardPass(self.plan, self.segment, super().gradients, programs, told)(grad_outputs, list(tensors))

    @property
    def _stretches(self) -> Sequence[Stretch]:
        return self.plan.own_code[self.segment.nodes.start].backward

    def _programs(self, *of: Any) -> Programs:
        """Those of a pass, or of a stretch of it."""
        key = (self.segment.nodes.start, *of)
        programs: Programs | None = self.plan.programs.get(key)
        if programs is None:
            programs = self.plan.programs[key] = Programs()
        return programs

    @cached_property
    def _told(self) -> tuple[Any, ...] | None:
        """What the contexts of the forward pass hold beside tensors; None if some of it is no plain value."""
        told = told_by(self.contexts.values())
        return None if told is None else (*self.contexts, *told, *self.places)

    @cached_property
    def _told_each(self) -> Sequence[tuple[Any, ...] | None]:
        """The same of the contexts that each stretch reads."""
        contexts, read = self.contexts, [(*stretch.nodes, *stretch.beside) for stretch in self._stretches]
        return [told_by([contexts[i] for i in nodes if i in contexts]) for nodes in read]

    def _backward_pass(self, grads: Gradients) -> None:
        stretches = self._stretches
        if not stretches or active_modes():
            return super()._backward_pass(grads)
        for at, (stretch, told) in enumerate(zip(stretches, self._told_each)):
            if stretch.repeats and told is not None:
                programs = self._programs(BACKWARD, at)
                repeat(stretch, grads, plan=self.plan, interpret=self._backward_groups, programs=programs, told=told)
            else:
                self._backward_groups(stretch.groups, grads)

    def _caster(self, node: int, cast: Cast) -> Callable[..., Value]:
        return _Repeated(self.plan, node, cast)


@dataclass(frozen=True, eq=False)
class _Repeated:
    """A cast that is interpreted, then recorded, then repeated for tensors of one look. node: its index, for the log."""

    plan: Plan
    node: int
    cast: Cast

    def __call__(self, source: Value, *by: Value) -> Value:
        """What the cast returns. by: further arguments of a cast in groups, whose sizes the host may have to read: no program."""
        programs = self.plan.programs.get(self.cast)
        if programs is None:
            programs = self.plan.programs[self.cast] = Programs() if is_own_cast(self.cast) else Programs(0)
        look = None if by or not programs.limit else _look(source)
        found = None if look is None else programs.get(look)
        if isinstance(found, RecordedValues):
            return found.values(without_autocast(self.plan.key.env.device, found.program, given([source])))[0]
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
    """The look of a tensor; None if no program may run, since a mode or a transform of torch, or autograd, follows each op."""
    seen = active_modes() or in_transform()
    if seen or not isinstance(source, torch.Tensor) or (source.requires_grad and torch.is_grad_enabled()):
        return None
    return look_of([source])
