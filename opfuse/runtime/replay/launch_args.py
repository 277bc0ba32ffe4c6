"""The memory that one call of a program writes: parameters of its launches, and descriptors of its products."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate as running_sums
from typing import Any, NamedTuple

import numpy as np

from opfuse.runtime.replay.cublaslt import Product, ProductForm
from opfuse.runtime.replay.instructions import WORD
from opfuse.runtime.replay.launch_graph import LaunchGraphs, QueueFunction


class Reader(NamedTuple):
    """Where an address is read: which launch or product, which word or operand there, and how many bytes after the address."""

    step: int
    place: int
    offset: int


class Readers(NamedTuple):
    """All readers of one address."""

    launches: list[Reader]
    products: list[Reader]


MANY = 24
"""Places of one address from which on numpy writes them in less time than a loop: a block of 128 experts' planes has 1500."""


class Frame:
    """Belongs to one call at a time. It remembers addresses, so one that has not changed costs a comparison.

    arguments: for each launch, the address that the driver takes. at: by base, the address that was last written. queue: what
    queues the steps of a program that has them together.
    """

    queue: LaunchGraphs | None = None

    def __init__(
        self,
        parameters: Sequence[bytes],
        forms: Sequence[ProductForm],
        readers: Mapping[int, Readers],
        queue: QueueFunction | None = None,
    ) -> None:
        """parameters: of the launches, as they are packed. readers: by base, a number that the program gives to an address.
        queue: queues launches, products, zeros and copies of a program whose steps are together.
        """
        self.products = [Product(form) for form in forms]
        sizes = [-(-len(parameter) // WORD) * WORD for parameter in parameters]
        starts = [*running_sums(sizes, initial=0)]
        packed = b"".join(parameter.ljust(size, b"\0") for parameter, size in zip(parameters, sizes))
        self._buffer = ctypes.create_string_buffer(packed, len(packed) or 1)
        address = ctypes.addressof(self._buffer)
        self._pointers = [(ctypes.c_void_p * 1)(address + start) for start in starts]
        self.arguments = [ctypes.addressof(pointer) for pointer in self._pointers]
        self.words = memoryview(self._buffer).cast("B")[: starts[-1]].cast("Q")
        self.at = [0] * len(readers)
        self._array = np.frombuffer(self.words, np.uint64)
        self._holes: list[list[tuple[int, int]]] = []
        self._many: dict[int, np.ndarray] = {}
        self._operands: list[list[tuple[Any, int, int]]] = []
        for base in range(len(readers)):
            launches, products = readers[base]
            holes = [(starts[step] // WORD + word, offset) for step, word, offset in launches]
            if len(holes) >= MANY:
                self._many[base], holes = np.array(holes, np.uint64).T.copy(), []
            self._holes.append(holes)
            self._operands.append([(self.products[step].addresses, at, offset) for step, at, offset in products])
        if queue is not None:
            self.queue = LaunchGraphs(partial(queue, self.at, self.arguments, self.products), self.at)

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters, and of the tables of where addresses go."""
        return self.words.nbytes + sum(table.nbytes for table in self._many.values())

    def move(self, base: int, address: int) -> None:
        """Write the address of ``base`` everywhere it is read."""
        self.at[base] = address
        words = self.words
        for word, offset in self._holes[base]:
            words[word] = address + offset
        if (many := self._many.get(base)) is not None:
            places, offsets = many
            self._array[places] = offsets + address
        for addresses, operand, offset in self._operands[base]:
            addresses[operand] = address + offset
