"""The backward pass behind a forward pass that was recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from opfuse.runtime.interpret.interpreter import GradOutputs, Interpreter, Result
from opfuse.runtime.replay.layout_key import layout_key, tensors_and_planes
from opfuse.runtime.replay.packing import Packing
from opfuse.runtime.replay.recorder import Recorder
from opfuse.runtime.replay.replayable import BACKWARD_LOOKS, REFUSED, Ran, Recorded, Replayable
from opfuse.torch_private.dispatch import active_modes


@dataclass(eq=False)
class BackwardPass:
    """The backward passes of a segment, for all calls that repeat one forward pass.

    interpreter: has the contexts of that pass, as they were when it was recorded. replayable: by what comes in. packs: whether it
    has yet to be decided which saved tensors go in blocks. packing: how they do, if some do. packed: by what comes in blocks.
    """

    interpreter: Interpreter
    replayable: Replayable
    packs: bool = False
    packing: Packing | None = None
    packed: Replayable | None = None

    @property
    def replayables(self) -> Sequence[Replayable]:
        """All that is repeated."""
        return (self.replayable,) if self.packed is None else (self.replayable, self.packed)

    def __call__(self, grads: GradOutputs, saved: list[torch.Tensor], forward: tuple[Replayable, Any]) -> Result:
        """The gradients of the interpreter for those of the outputs; both arguments are emptied.

        forward: where the forward pass is kept, and under which key, to have it save tensors in blocks.
        """
        unknown = None
        if self.packing is not None and self.packed is not None:
            key = self._key(grads, saved)
            found = self.packed.get(key)
            if isinstance(found, Recorded):
                return self._run(self.packed, key, grads, saved)
            saved[:], unknown = [*self.packing.unpacked(saved)], key if found is None else None
        key = self._key(grads, saved)
        if (self.packs or unknown is not None) and isinstance(found := self.replayable.get(key), Recorded):
            count = sum(grad is not None for grad in grads.values())
            if unknown is None:
                self._decide(found, count, len(saved), forward)
            else:
                self._enter_blocks(found, count, unknown)
        return self._run(self.replayable, key, grads, saved)

    def _key(self, grads: GradOutputs, saved: list[torch.Tensor]) -> tuple[Any, ...] | None:
        """What a program depends on; None if none may run."""
        if not self.replayable.limit or active_modes():
            return None
        layout = layout_key([*grads.values(), *saved])
        return None if layout is None else (*grads, *layout)

    def _run(self, replayable: Replayable, key: Any, grads: GradOutputs, saved: list[torch.Tensor]) -> Result:
        def interpret(recorder: Recorder | None) -> Ran:
            return Ran(self.interpreter.gradients(grads, _one_by_one(saved)), packs=self.packs or self.packing is not None)

        def release() -> None:
            saved.clear()
            grads.clear()

        result: Result = replayable(key, tensors_and_planes([*grads.values(), *saved]), interpret, release)[0]
        return result

    def _decide(self, backward: Recorded, grads: int, count: int, forward: tuple[Replayable, Any]) -> None:
        """Have later calls save in blocks what ``backward`` reads by address.

        grads: how many gradients come before the ``count`` saved tensors.
        """
        replayable, key = forward
        recorded = replayable.get(key)
        if not isinstance(recorded, Recorded) or recorded.rest is not self:
            return
        self.packs = False
        made, read = recorded.program.recording, backward.program.recording
        packing = None if made is None or read is None else Packing.of(made, read, grads=grads, count=count)
        if packing is None or made is None:
            backward.program.settle()
        else:
            packed = Replayable(replayable.device, replayable.where, BACKWARD_LOOKS)
            rest = BackwardPass(self.interpreter, self.replayable, packing=packing, packed=packed)
            replayable.add(key, replace(recorded, program=packing.forward(made), rest=rest, behind=rest.replayables))
        recorded.program.settle()

    def _enter_blocks(self, backward: Recorded, grads: int, key: Any) -> None:
        """Have the next call of which this is the key run ``backward`` over blocks, if it reads what is in them by address."""
        if self.packing is not None and self.packed is not None:
            program = self.packing.backward(backward.program.recording, grads)
            self.packed.add(key, REFUSED if program is None else replace(backward, program=program))
            backward.program.settle()


def _one_by_one(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors in order, each released when it is taken."""
    tensors.reverse()
    while tensors:
        yield tensors.pop()
