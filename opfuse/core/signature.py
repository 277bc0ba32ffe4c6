"""What a plan may depend on, as values: the environment of a call and the signature of every tensor that enters it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from opfuse.errors import DtypeError, describe, nearest
from opfuse.formats import ROWWISE
from opfuse.recipes import Recipe
from opfuse.recipes.recipe import SPLIT
from opfuse.tensors.copied_view import CopiedView
from opfuse.tensors.tensor import QuantizedTensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""What ops compute in. fp64 is for checks of gradients; no recipe takes it."""


def checked_dtype(where: str, dtype: torch.dtype) -> torch.dtype:
    """``dtype`` itself; DtypeError unless ops compute in it."""
    if dtype not in DTYPES:
        word = nearest(dtype, (str(known) for known in DTYPES)) if isinstance(dtype, str) else ""
        raise DtypeError(describe(where, wanted=f"a dtype of {DTYPES}", got=f"{dtype!r}{word}", cure="cast it to one of these"))
    return dtype


class TensorSig(NamedTuple):
    """What a plan knows of a tensor: never its values.

    ``quantized`` is None for a plain tensor, the formats and usages of the planes of a quantized one, and the class of one that
    :func:`is_foreign`, so that its key is never that of a plain tensor.
    """

    dtype: torch.dtype
    shape: torch.Size | None
    requires_grad: bool
    device: torch.device
    quantized: tuple[str, ...] | None


class Env(NamedTuple):
    """Everything around the ops that guards and lowering may read.

    recipe: the active recipe, or None. amax_group: name of the process group that amaxes are reduced over. grad: whether
    autograd records. autocast: dtype of torch.autocast, or None. device: device type. arch: compute capability, (0, 0) on
    a CPU. rows_class: gcd(M, 128) of the input's M rows (128 also for M = 0). aligned: data pointer divides by 16.
    level: fusion level (0 none, 1 bitwise-equal rules only, 2 all). input_saved: whether the op that made the input saves it for
    its own backward pass, so that to save it once more takes no memory.
    """

    recipe: Recipe | None
    amax_group: str | None
    grad: bool
    autocast: torch.dtype | None
    device: str
    arch: tuple[int, int]
    rows_class: int
    aligned: bool
    level: int
    input_saved: bool = False

    @property
    def backward_override(self) -> str | None:
        """The recipe's override; None without a recipe."""
        return self.recipe.backward_override if self.recipe is not None else None

    @property
    def keep(self) -> str | None:
        """What the recipe has kept for the backward pass; None without a recipe."""
        return self.recipe.keep if self.recipe is not None else None

    def product(self, name: str) -> dict[str, Any]:
        """How the recipe has the product ``name`` made: options of :func:`opfuse.tensors.gemm.gemm`."""
        recipe = self.recipe
        if recipe is None:
            return {}
        options = {"mixed": recipe.allow_mixed_emulation, "fast": name not in SPLIT[recipe.split_accumulator]}
        return {**options, "invariant": True} if name == "fprop" and recipe.batch_invariant else options

    @property
    def rounding(self) -> Literal["per_op", "single"]:
        """The recipe's rounding rule; ``per_op`` without a recipe."""
        return self.recipe.rounding if self.recipe is not None else "per_op"


Slots = Sequence[tuple[Mapping[str, Parameter | None], str]]
"""Where parameters are found as they are now: dictionaries and keys."""

NEGATIVE = ("negative bit",)
"""``TensorSig.quantized`` of a parameter with torch's negative bit: its values are those in memory, negated. Calls refuse it."""

Signature = tuple[torch.dtype, torch.Size | None, bool, torch.device, tuple[str, ...] | None]
"""A :class:`TensorSig` as a plain tuple: equal to it, and made in a fraction of the time."""


def is_foreign(x: torch.Tensor) -> bool:
    """Whether operations on ``x`` are another library's to run: a DTensor or another wrapper, whose memory no kernel can read."""
    kind = type(x)
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ and not issubclass(kind, (QuantizedTensor, CopiedView))


def _kind(x: torch.Tensor) -> tuple[str, ...] | None:
    """``TensorSig.quantized`` of anything but a plain Tensor or Parameter."""
    if isinstance(x, QuantizedTensor) and ROWWISE in x.away:
        x.fetch()  # a call reads it, also one that is repeated in the backward pass
    signature: tuple[str, ...] | None = getattr(x, "signature", None)
    return signature or ((type(x).__qualname__,) if is_foreign(x) else None)


def _parameter_kind(p: torch.Tensor) -> tuple[str, ...] | None:
    return NEGATIVE if p.is_neg() else _kind(p)


def input_signature(x: torch.Tensor) -> Signature:
    """Signature of an input; its shape counts by ``Env.rows_class`` only."""
    return x.dtype, None, x.requires_grad, x.device, None if type(x) is Tensor else _kind(x)


def parameter_signatures(slots: Slots) -> tuple[Signature | None, ...]:
    """Signatures of the parameters in ``slots``; None where there is none."""
    return tuple(
        [
            None
            if (p := slot[name]) is None
            else (
                p.dtype,
                p.shape,
                p.requires_grad,
                p.device,
                None if type(p) is Parameter and not p.is_neg() else _parameter_kind(p),
            )
            for slot, name in slots
        ]
    )
