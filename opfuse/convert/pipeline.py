"""The pipeline that a converted module runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

import torch

from opfuse.convert.rows import UNITS, padded, spare_rows
from opfuse.convert.weights import MadeParameters, Weight, product_of, stand_ins
from opfuse.core.operation import BasicOperation
from opfuse.recipes import current_recipe
from opfuse.runtime.fuser import OperationFuser


@dataclass(eq=False)
class PipelineRun:
    """Ops that run as one pipeline.

    ops, names: the ops and their names. extras: indices of the further arguments that they read. made: owners of parameters
    that are made for each call. path: of the module, for messages. spare: how many copies of the last row to add, by recipe,
    rows and mode.
    """

    ops: list[BasicOperation] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    extras: list[int] = field(default_factory=list)
    made: list[MadeParameters] = field(default_factory=list)
    path: str = ""
    fuser: OperationFuser | None = None
    spare: dict[Any, int] = field(default_factory=dict)
    lock: AbstractContextManager[Any] = field(default_factory=RLock)
    """PrecomputedCast while there are made parameters, so that another thread does not drop them."""

    def multiply(self, weights: Sequence[Weight], name: str, names: tuple[str, str]) -> None:
        """Append the product of ``weights``. name: for messages. names: of the product and its bias in the run."""
        ops, made = product_of(weights)
        ops[0].name = name
        self.ops += ops
        self.names += names[: len(ops)]
        if made is not None:
            self.made.append(made)

    def __getstate__(self) -> dict[str, Any]:
        # Plans hold live ops; a copy makes its own.
        return {name: value for name, value in vars(self).items() if name != "lock"} | {"fuser": None, "spare": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=RLock())

    def __call__(self, x: torch.Tensor, arguments: Sequence[torch.Tensor]) -> torch.Tensor:
        fuser = self.fuser
        if fuser is None:
            fuser = self.fuser = OperationFuser(self.ops, name=self.path or "model", names=self.names)
        extras = [arguments[i] for i in self.extras]
        if not self.made:
            return self._filled(fuser, x, extras)
        with self.lock:
            try:
                for made in self.made:
                    made.fill()
                result = self._filled(fuser, x, extras)
                for made in self.made:
                    made.watch(result)
                return result
            finally:
                for made in self.made:
                    made.drop()

    def _filled(self, fuser: OperationFuser, x: torch.Tensor, extras: Sequence[torch.Tensor]) -> torch.Tensor:
        """The result for ``x``, to which copies of the last row are added for the call if the recipe needs them."""
        spare = self.spare_of(x)
        if not spare:
            whole: torch.Tensor = fuser(x, *extras, instead=stand_ins())
            return whole
        result: torch.Tensor = fuser(padded(x, spare), *[padded(extra, spare) for extra in extras], instead=stand_ins())
        return result[: _rows(x)].view(*x.shape[:-1], -1)

    def spare_of(self, x: torch.Tensor) -> int:
        """How many copies of the last row the recipe needs after those of ``x``."""
        rows, recipe = _rows(x), current_recipe()
        if not rows % UNITS[-1] or recipe is None:
            return 0
        key = recipe, rows % UNITS[-1], torch.is_grad_enabled()
        if key not in self.spare:
            self.spare[key] = spare_rows(self.ops, recipe, rows, trains=key[-1])
        return self.spare[key]


def _rows(x: torch.Tensor) -> int:
    """None of a scalar or of rows without values, which the product refuses as they came."""
    return x.numel() // (x.shape[-1] or 1) if x.dim() else 0
