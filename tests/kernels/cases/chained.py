"""Cases of products with a chain and a cast in one launch; all sums are exact."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import NamedTuple

import torch

from opfuse.formats import COLUMNWISE, E4M3, E5M2, ROWWISE, Element, Usage
from opfuse.kernels.engine.registry import Arguments, CaseTable
from opfuse.kernels.products.chained import product_chain
from tests.kernels.cases.chain_casts import encoding_of
from tests.kernels.cases.chains import BF16, FP16, ChainCase
from tests.kernels.cases.products import FORMATS, stored


class ChainedCase(NamedTuple):
    """A product of two operands in the formats of ``kind``, and a chain of ``ops`` over it; without ``cast``, it is stored."""

    ops: tuple[str, ...]
    sizes: tuple[int, int, int]
    cast: str = ""
    usages: tuple[Usage, ...] = (ROWWISE,)
    keep: Collection[int] = ()
    kind: str = "tensors"
    fast: bool = True
    io: torch.dtype = BF16
    element: Element = E4M3

    def arguments(self, device: torch.device) -> Arguments:
        lines, columns, length = self.sizes
        chain = ChainCase(self.ops, (lines, columns), self.io)
        generator = chain.generator()
        _, stages = chain.stages(device, generator)
        formats = zip(FORMATS[self.kind], (lines, columns))
        left, right = (stored(fmt, count, length, generator, device) for fmt, count in formats)
        encode = encoding_of(self.cast, self.element, self.usages, (lines, columns), device) if self.cast else None
        options = {"dtype": self.io, "keep": self.keep, "fast": self.fast}
        return Arguments((left, right, stages, encode), {"shape": torch.Size((lines, columns)), **options})

    @property
    def name(self) -> str:
        planes = f"{self.cast} {'+'.join(self.usages)}" if self.cast else "stored"
        return f"{', '.join(self.ops)}, {self.kind}, {planes}, {'x'.join(map(str, self.sizes))}, {len(self.keep)} kept"


BOTH: tuple[Usage, ...] = (ROWWISE, COLUMNWISE)
_GELU = ("bias", "gelu")

_CALLS = (
    ChainedCase(_GELU, (300, 272, 144), "delayed"),
    ChainedCase(_GELU, (272, 144, 1040), "delayed", BOTH, keep=(1,)),
    ChainedCase(_GELU, (1168, 1168, 144), "delayed", (COLUMNWISE,), element=E5M2),
    ChainedCase(_GELU, (272, 144, 400), "delayed", BOTH, keep=(1,), fast=False),
    ChainedCase(("srelu",), (16, 16, 16), "delayed", keep=(0,), io=FP16),
    ChainedCase(_GELU, (257, 272, 144), "current"),
    ChainedCase(_GELU, (257, 272, 144), "current", BOTH, keep=(1,)),
    ChainedCase(("bias",), (1, 16, 16)),
    ChainedCase(("bias", "add"), (130, 272, 144)),
    ChainedCase(_GELU, (300, 272, 400), "1x128", keep=(1,), kind="1x128, 128x128", fast=False),
    ChainedCase(_GELU, (514, 400, 272), "1x128", kind="1x128, 128x128", fast=False),
    ChainedCase(("bias",), (300, 272, 272), kind="1x128, 128x128", fast=False),
)

CASES: CaseTable = {product_chain: {call.name: functools.partial(ChainedCase.arguments, call) for call in _CALLS}}
