"""The pipeline that a converted module runs, and which operands its recipe can cast.

Formats cut rows into blocks. For a number of tokens that does not fill the last block, the last row is repeated: rows of zeros
would be divided by their size in a norm without eps, and become NaN in the sums of its gradients; a row that is there already
changes no largest value, so no scale either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import nn

from opfuse.convert.weights import MadeParameters, Weight, product_of, stand_ins
from opfuse.core.operation import BasicOperation
from opfuse.errors import Described, OpfuseError, notice
from opfuse.formats import ROWWISE
from opfuse.numerics.layouts import Layout
from opfuse.ops.linear import BasicLinear
from opfuse.recipes import Recipe, current_recipe
from opfuse.runtime.compile.backward_tape import BackwardTape
from opfuse.runtime.fuser import OperationFuser

BLOCKS = (1, 16, 32, 128)
"""Formats need a number of rows that is a multiple of one of these."""

INPUT = -1
"""The index of the input itself, where an op reads it once more."""


@dataclass(eq=False)
class PipelineRun:
    """Ops that run as one pipeline.

    ops, names: the ops and their names. extras: indices of the further arguments that they read, or INPUT. made: owners of
    parameters that are made for each call. path: of the module, for messages. spare: how many copies of the last row to add, by
    recipe, rows and mode.
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

    def casting(self) -> dict[str, BasicOperation]:
        """The ops that cast, by name."""
        return {name: op for name, op in zip(self.names, self.ops) if op.quantizer_slots()}

    def parameters(self) -> list[torch.Tensor | None]:
        """The parameters of the model that its ops read."""
        sources = [source for made in self.made for own in made.sources.values() for source in own]
        return [
            *[module._parameters[name] for module, name, _ in sources],
            *[p for op in self.ops for p in op.parameter_values()],
        ]

    def change(self) -> Described | None:
        """What keeps weights from being one product, which they were when it was made; None: nothing."""
        for made in self.made:
            if got := made.why_apart:
                cure = "call opfuse.fuse_ again, which gives each a product of its own; until then modules run one by one"
                return notice(f"{self.path} has changed since fuse_", got=got, cure=cure)
        return None

    def __getstate__(self) -> dict[str, Any]:
        # Plans hold live ops; a copy makes its own.
        return {name: value for name, value in vars(self).items() if name != "lock"} | {"fuser": None, "spare": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=RLock())

    def pipeline(self) -> OperationFuser:
        """The pipeline, from the first call on."""
        if self.fuser is None:
            self.fuser = OperationFuser(self.ops, name=self.path or "model", names=self.names)
        return self.fuser

    def __call__(self, x: torch.Tensor, arguments: Sequence[torch.Tensor]) -> torch.Tensor:
        fuser = self.pipeline()
        given = *arguments, x
        extras = [given[i] for i in self.extras]
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
        instead = stand_ins()
        if isinstance(instead, BackwardTape):  # which records ops of the pipeline alone, and copies what they save
            whole: torch.Tensor = fuser(x, *extras, instead=instead)
            return whole
        if type(x) is torch.Tensor and not is_matrix(x) and isinstance(self.ops[0], BasicLinear):
            x = x.contiguous()  # of which torch's ``linear`` keeps a copy, too: the original may be written to from now on
        if not (spare := self.spare_of(x, torch.is_grad_enabled())):
            whole = fuser(x, *extras, instead=instead)
            return whole
        result: torch.Tensor = fuser(padded(x, spare), *[padded(extra, spare) for extra in extras], instead=instead)
        return result[: _rows(x)].view(*x.shape[:-1], -1)

    def spare_of(self, x: torch.Tensor, trains: bool) -> int:
        """How many copies of the last row the recipe needs after those of ``x``; 0 also if no number helps.

        trains: whether gradients are recorded.
        """
        rows, recipe = _rows(x), current_recipe()
        if not rows % BLOCKS[-1] or recipe is None:
            return 0
        key = recipe, rows % BLOCKS[-1], trains
        if key not in self.spare:
            products = [op for op in self.ops if isinstance(op, BasicLinear)]
            counts = [-(-rows // block) * block for block in BLOCKS]
            whole = next((count for count in counts if all(_fits(op, recipe, count, key[-1]) for op in products)), rows)
            self.spare[key] = whole - rows
        return self.spare[key]


def _rows(x: torch.Tensor) -> int:
    """None of a scalar or of rows without values, which the product refuses as they came."""
    return x.numel() // (x.shape[-1] or 1) if x.dim() else 0


def is_matrix(x: torch.Tensor) -> bool:
    """Whether ``x.view(-1, x.shape[-1])`` exists: its leading dimensions lie behind each other."""
    sizes = [(size, stride) for size, stride in zip(x.shape[:-1], x.stride()) if size != 1]
    return all(stride == size * inner for (_, stride), (size, inner) in pairwise(sizes))


def padded(x: torch.Tensor, spare: int) -> torch.Tensor:
    """``x`` of shape (..., n) as (rows + spare, n), its last row repeated at the end. It has at least one row."""
    flat = x.reshape(-1, x.shape[-1])
    return torch.cat((flat, flat[-1:].expand(spare, -1)))


# -- what a recipe can cast ------------------------------------------------------------------------------------------------------


def _fits(op: BasicLinear, recipe: Recipe, rows: int, trains: bool) -> bool:
    """Whether ``recipe`` can cast an input of ``op``, of ``rows`` rows, and, if it trains, the output's gradient."""
    shapes = {"input": (rows, op.in_features), "grad_output": (rows, op.out_features)}
    return _misfit(op, recipe, shapes if trains else {"input": shapes["input"]}, trains=trains) is None


class Unfit(NamedTuple):
    """Why a recipe cannot take a matrix. cure: empty where other sizes or another recipe are one."""

    wanted: str
    got: str
    cure: str = ""


def unfit(recipe: Recipe, module: nn.Module, columns: int, rows: int) -> Unfit | None:
    """Why a recipe cannot take a matrix (rows, columns) of ``module`` and what that multiplies; None: it can."""
    wide = any(parameter.dtype is torch.float64 for parameter in module.parameters(recurse=False))
    op = BasicLinear(columns, rows, device="meta", dtype=torch.float32)
    shapes = {"weight": (rows, columns), "input": (BLOCKS[-1], columns), "grad_output": (BLOCKS[-1], rows)}
    names = {"weight": ("output features", "input features"), "input": ("rows", "input features")}
    # What else a recipe asks of the dtype, torch.autocast may give it at each call; it leaves fp64 alone.
    match _misfit(op, recipe, shapes, trains=True, dtype=torch.float64 if wide else None):
        case None:
            return None
        case role, Layout() as layout, _:
            axis = layout.usage == ROWWISE
            size, name = shapes[role][axis], names.get(role, ("rows", "output features"))[axis]
            return Unfit(f"sizes divisible by {layout.format.multiple} for {type(recipe).__name__}", f"{size} {name}")
        case _, _, OpfuseError(args=[Described() as text]):
            return Unfit(text.wanted, text.got, "call model.to(torch.float32) before fuse_" if wide else "")
        case _, _, error:
            return Unfit("operands that its quantizers take", str(error))


def _misfit(
    op: BasicLinear,
    recipe: Recipe,
    shapes: Mapping[str, tuple[int, int]],
    *,
    trains: bool,
    dtype: torch.dtype | None = None,
) -> tuple[str, Layout | None, OpfuseError] | None:
    """The role of the first operand, of ``shapes`` by role, that the recipe cannot cast, the plane whose blocks its sizes do not
    fill, and the error; None: it can cast all of them. dtype: that of the operands; None: one that the quantizer takes.
    """
    for role, shape in shapes.items():
        found = list[Layout]()

        def told(layout: Layout, found: list[Layout] = found) -> str:
            found.append(layout)
            return ""

        widest, _ = op.make_quantizer(role, recipe)
        quantizer = op.narrow_quantizer(widest, role, recipe.backward_override, ("dgrad", "wgrad") if trains else ())
        if quantizer is None:
            continue
        try:
            quantizer.check(shape, dtype or (quantizer.input_dtypes or (torch.float32,))[0], where=role, cure=told)
        except OpfuseError as error:
            return role, found[0] if found else None, error
    return None
