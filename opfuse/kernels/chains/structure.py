"""The structure of a chain of elementwise ops: all that its code depends on, so calls of one structure share a kernel.

A gated op reads two columns for each of its results. So the ops before it run as two *strands*, one for each column; before d
gated ops there are 2^d strands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from opfuse.kernels.engine.variants import PACK
from opfuse.numerics.pointwise import Pointwise

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class StageCode:
    """One op of a chain, as far as its code depends on it.

    operands: C types of the operands that are read, by name.
    grads: C types of the operand gradients that are stored, by name.
    saved: C type of the saved input that the backward pass reads, or of the input that the forward pass keeps; None for neither.
    interleave: columns of the groups in which a gated unit's halves alternate, 0 for one half behind the other.
    """

    math: Pointwise
    operands: tuple[tuple[str, str], ...] = ()
    grads: tuple[tuple[str, str], ...] = ()
    saved: str | None = None
    interleave: int = 0


@dataclass(frozen=True)
class ChainCode:
    """The structure of a chain. source: C type of x, or of dy; io: of results; between: of what flows between two ops.

    stores, casts: whether the last result, or dx, is stored as it is; whether the kernel makes something else of it.
    """

    direction: Direction
    stages: tuple[StageCode, ...]
    source: str
    io: str
    between: str
    stores: bool = True
    casts: bool = False

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.direction, self.stages, self.source, self.io, self.between, self.stores, self.casts))

    @property
    def interned(self) -> ChainCode:
        """The one object of this structure, so that what follows from it is found once."""
        return _INTERNED.setdefault(self, self)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """For the input of each stage, and the chain's result, the number of gated ops that follow."""
        gated = [stage.math.is_gated for stage in self.stages]
        return tuple(sum(gated[i:]) for i in range(len(gated) + 1))

    def strands(self, level: int) -> range:
        """The strands at the input of stage ``level``, or at the chain's result."""
        return range(1 << self.depths[level])

    @cached_property
    def packs(self) -> int:
        """Packs of eight results that a thread has in flight: with more strands, each has more loads of its own."""
        return 1 if self.depths[0] else 2

    @cached_property
    def is_flat(self) -> bool:
        """Whether the code does not depend on where rows end."""
        kinds = {kind for stage in self.stages for kind in stage.math.operands.values()}
        return not self.depths[0] and kinds <= {"full"}

    @cached_property
    def name(self) -> str:
        """The names of the ops."""
        return ", ".join(stage.math.name for stage in self.stages)

    def of_kind(self, *kinds: str) -> Iterator[tuple[int, str, str, str]]:
        """(stage, name, C type, kind) of the operands of these kinds that are read."""
        return self._tensors("operands", kinds)

    def grads_of_kind(self, *kinds: str) -> Iterator[tuple[int, str, str, str]]:
        """(stage, name, C type, kind) of the operand gradients of these kinds that are stored."""
        return self._tensors("grads", kinds)

    def _tensors(self, field: str, kinds: tuple[str, ...]) -> Iterator[tuple[int, str, str, str]]:
        for i, stage in enumerate(self.stages):
            for name, c_type in getattr(stage, field):
                if (kind := stage.math.operands[name]) in kinds:
                    yield i, name, c_type, kind

    @cached_property
    def saved(self) -> list[tuple[int, str]]:
        """(stage, C type) of saved inputs."""
        return [(i, stage.saved) for i, stage in enumerate(self.stages) if stage.saved is not None]

    @cached_property
    def row_sums(self) -> list[tuple[int, str, str, int]]:
        """(stage, name, C type, strand) of every sum over rows."""
        return [(i, name, t, s) for i, name, t, _ in self.grads_of_kind("row") for s in self.strands(i + 1)]

    @cached_property
    def column_sums(self) -> list[tuple[int, str, str]]:
        """(stage, name, C type) of every sum over columns, that of all strands together."""
        return [(i, name, t) for i, name, t, _ in self.grads_of_kind("column")]

    @cached_property
    def constants(self) -> list[tuple[int, str]]:
        """(stage, name) of the constants, in the order in which they are parameters."""
        return [(i, name) for i, stage in enumerate(self.stages) for name in stage.math.constants]

    @cached_property
    def has_sums(self) -> bool:
        """Whether gradients of operands are added up."""
        return bool(self.row_sums or self.column_sums)

    @cached_property
    def on_vectors(self) -> bool:
        """Whether the halves of gated units alternate in whole packs of eight, if they do."""
        return all(stage.interleave % PACK == 0 for stage in self.stages)

    @property
    def final(self) -> int:
        """The level of the result: where x flows to, or where dy flows back to."""
        return len(self.stages) if self.direction == "forward" else 0


_INTERNED: dict[ChainCode, ChainCode] = {}
