"""The cast that a quantize node runs, what it cannot take and the cure, and its scales under delayed scaling."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from opfuse.core.context import Value
from opfuse.core.signature import Env
from opfuse.errors import DtypeError, QuantizerError, ShapeError, describe, number_of
from opfuse.formats import COLUMNWISE, ROWWISE
from opfuse.kernels.casts.encoding import EncodedArrays, Encoding
from opfuse.kernels.engine.launch import host_call, is_recorded
from opfuse.numerics.delayed import UpdateRule
from opfuse.numerics.layouts import Layout, round_up
from opfuse.recipes import DelayedScaling, Recipe
from opfuse.recipes.counting import count_backward, count_forward, quantizer_of_call
from opfuse.recipes.delayed import DelayedScalingState, LastUse
from opfuse.recipes.passes import current_pass, is_trained
from opfuse.recipes.pending import UsesByState
from opfuse.tensors.quantizers import Float8Quantizer, Quantizer
from opfuse.tensors.quantizers.base import SharedAmax
from opfuse.tensors.storage import QuantizedStorage
from opfuse.tensors.tensor import QuantizedTensor

if TYPE_CHECKING:
    from opfuse.core.operation import BasicOperation

GRADIENT = "grad_output"
"""The role of what flows back into an op; all other roles are operands of its forward."""


@functools.cache
def _example(dtype: torch.dtype) -> torch.Tensor:
    """A tensor of a dtype, for rules that ask for one."""
    return torch.empty(0, dtype=dtype, device="cpu")


class Fused(Protocol):
    """A cast that is made by the kernel which computes the tensor; ``encoding`` tells it how."""

    @property
    def encoding(self) -> Encoding: ...

    def storage(self, encoded: Sequence[EncodedArrays]) -> QuantizedStorage:
        """What a call of the cast returns, from the results of the encoding."""


@dataclass(frozen=True, eq=False)
class FusedCast:
    """That of a whole tensor, of ``shape`` and ``dtype``."""

    encoding: Encoding
    quantizer: Quantizer
    shape: torch.Size
    dtype: torch.dtype

    def storage(self, encoded: Sequence[EncodedArrays]) -> QuantizedStorage:
        return self.quantizer.storage(self.shape, self.dtype, self.encoding, encoded)


@dataclass(frozen=True, eq=False)
class Cast:
    """Quantizes a tensor for one role of one op, from the dtype in which the op computes; the nominal dtype stays the tensor's.

    quantizer: how, with the planes that will be read. where: the op and the role, for error messages. state: delayed-scaling
    state that scales come from and amaxes go to, or None. group: ranks that share those amaxes. whole: with the planes, too, that
    the backward pass will make anew, so that what they cannot take is refused before it; None: there are none.
    """

    role: str
    quantizer: Quantizer
    op: BasicOperation
    env: Env
    where: str
    state: DelayedScalingState | None = None
    group: Any = None
    whole: Quantizer | None = None

    @property
    def live_states(self) -> tuple[DelayedScalingState, ...]:
        """The states that its scales come from, if scaling is delayed; else none."""
        return () if self.state is None else (self.state,)

    def __call__(self, x: Value) -> QuantizedStorage:
        """Planes of ``x`` of shape (..., K). What is quantized already passes through, but a parameter is cast anew."""
        if isinstance(x, QuantizedTensor):
            x = x.detach().dequantize() if self.role in self.op.parameter_names else x.record
        if isinstance(x, QuantizedStorage):
            return x
        dtype = self.op.compute_dtype(self.env, x)
        storage = self._current(x.shape, dtype, x.device).quantize(x.to(dtype))
        if not isinstance(storage, (QuantizedStorage, torch.Tensor)):
            cure = "return the quantized tensor from its quantize"
            raise QuantizerError(describe(self.where, wanted="a quantized tensor", got=type(storage).__name__, cure=cure))
        return storage if storage.dtype == x.dtype else replace(storage, dtype=x.dtype)

    def by(self) -> Cast:
        """The cast with what its node reads beside the tensor."""
        return self

    def fused(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Fused | None:
        """The cast of a tensor of ``shape`` in ``dtype`` on ``device``, for the kernel that is about to compute the tensor.

        None if the tensor must exist first: then call this cast on it. A delayed-scaling state is due for an update from now on.
        """
        if not self._takes(dtype):
            return None
        quantizer = self._current(shape, dtype, device)
        encoding = quantizer.encoding(shape, dtype)
        return None if encoding is None else FusedCast(encoding, quantizer, shape, dtype)

    def _takes(self, dtype: torch.dtype) -> bool:
        """Whether the op computes in ``dtype`` on a tensor of it, so that the tensor is cast as it is."""
        return self.op.compute_dtype(self.env, _example(dtype)) == dtype

    def _current(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Quantizer:
        """The quantizer of such a tensor; a delayed-scaling state that it reads is due for an update from now on."""
        self.check(shape, dtype)
        return self.quantizer if self.state is None else self._delayed(self.state, device)

    def scale_of_call(self) -> torch.Tensor:
        """A copy of the delayed scale that the running call casts with, for a backward pass that repeats the cast."""
        state = cast(DelayedScalingState, self.state)
        return cast(Float8Quantizer, self._delayed(state, state.scale.device)).scale.clone()

    def under(self, scale: torch.Tensor) -> Cast:
        """A copy of the cast with a given scale, fp32 (1,); it counts no amax."""
        return replace(self, quantizer=fixed(cast(Float8Quantizer, self.quantizer), scale), state=None)

    def sharing(self, amax: SharedAmax) -> Cast | None:
        """A copy that finds or reads the amax of its tensor there (:meth:`Quantizer.sharing`); None if it needs no such amax."""
        quantizer = self.quantizer.sharing(amax)
        return None if quantizer is None else replace(self, quantizer=quantizer)

    def check(self, shape: Sequence[int], dtype: torch.dtype, quantizer: Quantizer | None = None) -> None:
        """ShapeError or DtypeError unless the cast takes a tensor of ``shape`` and ``dtype``; it says where the dtype comes from.

        quantizer: of another layout of the cast, whose blocks decide.
        """
        quantizer = quantizer or self.whole or self.quantizer
        if self.role == "input":
            check_features(self.op, shape)
        taken = quantizer.input_dtypes
        if taken and dtype not in taken and self.op.compute_dtype(self.env, _example(taken[0])) == dtype:
            source = "of torch.autocast" if self.env.autocast else "of the op's parameters"
            cures = list[str]()
            if dtype is torch.float64 or not self.env.autocast:
                cures.append(f"call model.to({taken[0]})")
            if dtype is not torch.float64:  # which torch.autocast leaves alone; it casts to 16 bits
                cures.append(f"use torch.autocast with dtype={next(each for each in taken if each.itemsize == 2)}")
            if any(fmt.rht for fmt in quantizer.formats):
                cures.append("do without the rotation (disable_rht=True of NVFP4BlockScaling)")
            got = f"{dtype}, the dtype {source}, in which the op computes whatever the input's"
            raise DtypeError(describe(self.where, wanted=", ".join(map(str, taken)), got=got, cure=", or ".join(cures)))
        quantizer.check(shape, dtype, where=self.where, cure=self._cure)

    def _cure(self, layout: Layout) -> str:
        recipe = cast(Recipe, self.env.recipe)
        overridable = recipe.takes_backward_override and recipe.backward_override is None
        return cure_of(self.op, self.op.quantizer_role(self.role).tensor_type, layout, overridable=overridable)

    def _delayed(self, state: DelayedScalingState, device: torch.device) -> Quantizer:
        """The quantizer over the live tensors of a state. If a program is being recorded, it will ask for them at every call."""
        if not is_recorded():
            return self._live(state, device)
        wanted = cast(Float8Quantizer, self.quantizer)
        scale, amax = host_call(_Live(self, state, device))
        return Float8Quantizer(scale, amax, wanted.fp8_dtype, rowwise=wanted.rowwise, columnwise=wanted.columnwise)

    def _live(self, state: DelayedScalingState, device: torch.device) -> Float8Quantizer:
        wanted, backward = cast(Float8Quantizer, self.quantizer), self.role == GRADIENT
        counts = self.counts or is_trained()
        return quantizer_of_call(state, wanted, self._delayed_scaling, self.use, device=device, counts=counts, backward=backward)

    @property
    def counts(self) -> bool:
        """Whether an ordinary call counts amaxes."""
        return self.role == GRADIENT or self.env.grad

    @property
    def rule(self) -> UpdateRule:
        """What makes a scale of amaxes, under a recipe with states."""
        recipe = self._delayed_scaling
        return recipe.backward_rule if self.role == GRADIENT else recipe.forward_rule

    @functools.cached_property
    def use(self) -> LastUse:
        """What an update needs to know of the cast, under a recipe with states."""
        return LastUse.under(self._delayed_scaling, self.rule, self.group, self.where, self.op.standing)

    @functools.cached_property
    def _delayed_scaling(self) -> DelayedScaling:
        """The recipe of the role, which has a state."""
        return cast(DelayedScaling, cast(Recipe, self.env.recipe).delayed_scaling(self.op.quantizer_role(self.role)))


def fixed(quantizer: Float8Quantizer, scale: torch.Tensor) -> Float8Quantizer:
    """``quantizer`` with another scale, fp32 (1,), and an amax that nobody reads."""
    usages = {"rowwise": quantizer.rowwise, "columnwise": quantizer.columnwise}
    amax = torch.zeros(scale.shape, dtype=scale.dtype, device=scale.device)
    return Float8Quantizer(scale, amax, quantizer.fp8_dtype, **usages)


class _Live:
    """The scale and amax of a cast's state, which a program asks for at every call; :meth:`together` joins those of its casts.

    It does what :meth:`Cast._live` does, but where no checkpoint runs and the state looks as it did when last ``seen``, the call
    is only counted. tensors: scale and amax, valid while the state looks as ``seen``. use: how a call is counted; None: it is
    not.
    """

    def __init__(self, cast: Cast, state: DelayedScalingState, device: torch.device) -> None:
        self._cast, self.state, self._device = cast, state, device
        self.count = count_backward if cast.role == GRADIENT else count_forward
        self.use = cast.use if cast.counts else None
        self.seen: object = None
        self.tensors: tuple[torch.Tensor, ...] = ()

    def __call__(self) -> tuple[torch.Tensor, ...]:
        live = self._cast._live(self.state, self._device)
        found = live.scale, live.amax
        if current_pass() is None and live.scale is self.state.scale:
            self.tensors, self.seen = found, self.state.tensors_id
        return found

    def together(self, others: Sequence[_Live]) -> _LiveTogether:
        """This one and ``others`` as one call."""
        return _LiveTogether((self, *others))


class _LiveTogether:
    """The live tensors of several casts of a pass, in their order."""

    def __init__(self, casts: Sequence[_Live]) -> None:
        self._casts, self._states = casts, [live.state for live in casts]
        uses: dict[Callable[[UsesByState], None], dict[DelayedScalingState, LastUse]] = {}
        for live in casts:
            if live.use is not None:
                uses.setdefault(live.count, {})[live.state] = live.use
        self._uses = tuple(uses.items())
        self._snapshot()

    def _snapshot(self) -> None:
        tensors = [tensor for live in self._casts for tensor in live.tensors]
        self._known = [live.seen for live in self._casts], tensors  # at once, for other threads

    def __call__(self) -> Sequence[torch.Tensor]:
        seen, known = self._known
        if [state.tensors_id for state in self._states] != seen or current_pass() is not None:
            tensors = [tensor for live in self._casts for tensor in live()]
            self._snapshot()
            return tensors
        for count, uses in self._uses:
            count(uses)
        return known


# -- sizes that no cast takes ----------------------------------------------------------------------------------------------------

_IN, _OUT, _WORDS, _ROWS = "in_features", "out_features", "vocabulary", ""

_SIZES = {
    ("input", ROWWISE): _IN,
    ("input", COLUMNWISE): _ROWS,
    ("weight", ROWWISE): _IN,
    ("weight", COLUMNWISE): _OUT,
    ("grad_output", ROWWISE): _OUT,
    ("grad_output", COLUMNWISE): _ROWS,
}
"""Along which size the lines of an operand's plane run: a hyper-parameter of the op, or the rows of its input."""

_CURES = {
    _IN: "build the op with in_features={whole} and pad its input, torch.nn.functional.pad(x, (0, {spare}))",
    _OUT: "build the op with out_features={whole} and cut its result, y[..., :{size}]",
    _WORDS: "build the op with vocabulary={whole}, of which no target names the last {spare}, or with quantized=False",
    _ROWS: "pad the rows, torch.nn.functional.pad(x.reshape(-1, x.shape[-1]), (0, 0, 0, {spare})), and cut the result, "
    "y[:{size}]",
}
_COLUMNS = "pad the last dimension, torch.nn.functional.pad(x, (0, {spare}))"
_OVERRIDE = ", or compute gradients in high precision, recipe.replace(backward_override='dequantized')"


def check_features(op: Any, shape: Sequence[int]) -> None:
    """ShapeError unless ``shape`` is (..., in_features), of an op that has these: said before any format has its say."""
    features = getattr(op, "in_features", None)
    if features is not None and tuple(shape[-1:]) != (features,):
        other = f", or build the op with in_features={shape[-1]}" if shape and shape[-1] else ""
        cure = f"pass {number_of(features, 'feature')}, or have the op before it make so many{other}"
        raise ShapeError(describe(f"{op.label} input", wanted=f"shape (..., {features})", got=tuple(shape), cure=cure))


def cure_of(op: Any, tensor_type: str, layout: Layout, *, overridable: bool) -> str:
    """The cure for a layout of the operand ``tensor_type`` of ``op`` whose lines are no whole blocks.

    overridable: whether a backward override would do without the planes that only a quantized backward pass reads.
    """
    size = layout.lines[1]
    whole = round_up(size, layout.format.multiple)
    what = _SIZES.get((tensor_type, layout.usage), _IN)
    what = _WORDS if what == _OUT and hasattr(op.spec, _WORDS) else what
    text = _CURES[what] if not what or hasattr(op.spec, what) else _COLUMNS
    spared = overridable and (layout.usage == COLUMNWISE or tensor_type == "grad_output")
    return text.format(whole=whole, spare=whole - size, size=size) + (_OVERRIDE if spared else "")
