"""Recipes: frozen values that say in which formats a model computes.

Names follow TransformerEngine's recipes where it has one. A recipe is checked when it is built, by real exceptions, and never
changes afterwards; :meth:`Recipe.replace` builds and checks another one. Two recipes are equal when their class and every
field are equal in value and type; where a value came from is kept beside it in :attr:`Recipe.sources` and never compared.
"""

from __future__ import annotations

import enum
import functools
import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol, Self, TypeVar, cast

import torch

from opfuse import formats, keys
from opfuse.domains import BOOLEAN, keywords, one_of
from opfuse.errors import OpfuseWarning, RecipeError, UnknownFieldError, describe, nearest
from opfuse.formats import COLUMNWISE, IDENTITY, ROWWISE
from opfuse.recipes.settings import Resolved, Setting, environment_value, resolve, setting, settings_of
from opfuse.sources import DEFAULT
from opfuse.tensors.gemm import GEMMS
from opfuse.tensors.quantizers import Float8BlockQuantizer, HybridQuantizer, IdentityQuantizer, Quantizer
from opfuse.tensors.storage import QuantizedStorage

AnyRecipe = TypeVar("AnyRecipe", bound="Recipe")
Entry = TypeVar("Entry")
BackwardOverride = Literal["high_precision", "dequantized"] | None
KeepMode = Literal["all", "recompute", "quantized"] | None

TENSOR_TYPES = ("input", "weight", "grad_output")
"""Operands of the three matrix products of a linear: the roles every built-in recipe has a quantizer for."""


class Format(enum.Enum):
    """Elements of an FP8 recipe: (forward, backward). HYBRID is E4M3 for activations and weights, E5M2 for gradients."""

    E4M3 = (formats.E4M3, formats.E4M3)
    E5M2 = (formats.E5M2, formats.E5M2)
    HYBRID = (formats.E4M3, formats.E5M2)

    def element(self, role: QuantizerRole) -> formats.Element:
        """The element that encodes tensors of ``role``."""
        return self.value[role.is_gradient]

    def __repr__(self) -> str:
        return f"Format.{self.name}"


@dataclass(frozen=True)
class QuantizerRole:
    """Which tensor of which module a quantizer is for; ``name`` is what the caller named the module."""

    module_type: str = "linear"
    tensor_type: str = "input"
    name: str = ""

    @property
    def is_gradient(self) -> bool:
        """Whether the tensor exists in the backward pass only."""
        return self.tensor_type.startswith("grad")


def for_tensor_type(
    table: Mapping[str, Entry], role: QuantizerRole, *, where: str, cure: str = "use one of these, or a CustomRecipe"
) -> Entry:
    """The entry for the tensor type of ``role``; RecipeError, which speaks of ``where``, if the table has none."""
    if role.tensor_type not in table:
        got = f"{role}{nearest(role.tensor_type, table)}"
        raise RecipeError(describe(where, wanted=f"a tensor_type of {', '.join(table)}", got=got, cure=cure))
    return table[role.tensor_type]


class ScaleHistory(Protocol):
    """What a recipe needs of a delayed-scaling state: :class:`~opfuse.recipes.delayed.DelayedScalingState` has it."""

    def live_quantizer(self, fp8_dtype: torch.dtype) -> Quantizer:
        """A quantizer that casts with the state's scale and counts into its amax."""


OVERRIDE = one_of(
    None, "high_precision", "dequantized", renamed={"unquant": "high_precision", "dequant": "dequantized", "default": None}
)

KEEPS = one_of(None, "all", "recompute", "quantized")
_KEEP = setting(cast(KeepMode, None), KEEPS)

_OVERRIDE = setting(cast(BackwardOverride, None), OVERRIDE, "OPFUSE_BACKWARD_OVERRIDE", "NVTE_BACKWARD_OVERRIDE")

_HINTS = {  # keywords of other interfaces
    "quantize_forward": "backward_override says how the backward pass computes; the forward is always quantized",
    "quantize_backward": "write backward_override='high_precision' or 'dequantized'",
    "keep_backward_unquantized": "write backward_override='high_precision'",
    "fp8_dpa": "attention is not quantized here",
    "fp8_mha": "attention is not quantized here",
    "fp8_quant_fwd_inp": "set the recipe's own fields, such as use_power_2_scales and amax_epsilon",
    "fp8_quant_fwd_weight": "set the recipe's own fields, such as use_power_2_scales and amax_epsilon",
    "fp8_quant_bwd_grad": "set the recipe's own fields, such as use_power_2_scales and amax_epsilon",
    "fp8_gemm_fprop": "set split_accumulator",
    "fp8_gemm_dgrad": "set split_accumulator",
    "fp8_gemm_wgrad": "set split_accumulator",
    "scaling_factor_compute_algo": "name a scale_rule of numerics/rules.py",
    "scale_rounding": "write scale_rule='te' in place of 'ceil', scale_rule='ocp_floor' in place of 'floor'",
}


def _refuse_unknown(where: str, given: Iterable[str], known: Collection[str]) -> None:
    if unknown := set(given).difference(known):
        name = min(unknown)
        cure = _HINTS.get(name) or f"name one of {', '.join(sorted(known))}"
        got = f"{name!r}{nearest(name, known)}"
        raise UnknownFieldError(describe(where, wanted="fields of this recipe", got=got, cure=cure))


@functools.cache
def _hidden_field(cls: type) -> str | None:
    """An attribute that a subclass meant as a field but that ``fields()`` does not see, so that no key would either."""
    known = {field.name for field in fields(cls)}
    for base in cls.__mro__:
        annotations = inspect.get_annotations(base) if issubclass(base, Recipe) else {}
        hidden = {name for name, kind in annotations.items() if name not in known and "ClassVar" not in str(kind)}
        hidden |= {name for name in vars(base) if name in known and name not in annotations}
        if hidden:
            return min(hidden)
    return None


@dataclass(frozen=True, kw_only=True, eq=False)
class Recipe(ABC):
    """Base of all recipes.

    backward_override: what the backward pass computes with. None: quantized operands; ``"high_precision"``: the original
        tensors; ``"dequantized"``: the dequantized operands of the forward.
    rounding: ``"per_op"`` rounds to the I/O dtype after every op, fused or not; ``"single"`` lets a fused chain round once.
    on_recipe_change: what to do with a parameter that lives quantized in another format than this recipe casts it to.
        ``"error"``: refuse the call; ``"dequantize"``: cast its dequantized values for each call, and leave its bytes alone;
        ``"keep"``: multiply it as it is.
    allow_mixed_emulation: multiply two formats that cannot meet by dequantizing both to fp32, instead of refusing the plan.
    split_accumulator: which products add partial sums in fp32, ``"all"``, ``"backward"`` (dgrad and wgrad) or ``"none"``, where
        the matrix unit could keep them in fewer bits, faster and less accurately: per-tensor FP8 on compute capability 9.0.
    keep: what is saved for the backward pass where it could also be made anew. None: the operands that its products read, but
        for casts of weights, which take a byte for each parameter of the model, of results of norms, and of rows for experts.
        ``"all"``: these, too. ``"recompute"``: only the inputs that ops save; casts of results of activations are made anew as
        well. No bit changes. ``"quantized"``: as ``"recompute"``, and inputs of activations and norms are saved in E4M3, with a
        scale for each 128 columns of a row (of a LayerNorm less its mean), so that gradients are those of the dequantized input.
    batch_invariant: a row of the result of a forward pass has the same bits whatever other rows are in the batch. Inputs are cast
        row by row, under scales of their own or scales that were there before the batch, and each product has one order of sums
        for any number of rows. Gradients of parameters are sums over all rows of the batch.

    A subclass is a frozen, keyword-only dataclass, or adds no field; it may override :meth:`check` and :meth:`quantizer`.
    """

    kind: ClassVar[str]
    takes_backward_override: ClassVar[bool] = True

    backward_override: BackwardOverride = _OVERRIDE
    rounding: Literal["per_op", "single"] = setting("per_op", one_of("per_op", "single"))
    on_recipe_change: Literal["error", "dequantize", "keep"] = setting("error", one_of("error", "dequantize", "keep"))
    allow_mixed_emulation: bool = setting(False, BOOLEAN)
    split_accumulator: Literal["backward", "all", "none"] = setting("backward", one_of("backward", "all", "none"))
    keep: KeepMode = _KEEP
    batch_invariant: bool = setting(False, BOOLEAN)

    def __new__(cls, *_: object, **given: object) -> Self:
        if (known := keywords(cls)) is not None:
            _refuse_unknown(cls.__name__, given, known)
        return super().__new__(cls)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # The dataclass decorator leaves methods of the class body alone, so a subclass compares and shows like its parents.
        cls.__eq__, cls.__hash__ = Recipe.__eq__, Recipe.__hash__  # type: ignore[method-assign]
        if "__repr__" not in vars(cls):
            cls.__repr__ = Recipe.__repr__  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        cls = type(self)
        if hidden := _hidden_field(cls):
            cure = "annotate the attribute and decorate the class with @dataclass(frozen=True, kw_only=True)"
            raise RecipeError(describe(cls.__name__, wanted="dataclass fields", got=f"attribute {hidden!r}", cure=cure))
        values, sources = {}, {}
        for name, declared in settings_of(cls).items():
            values[name], sources[name] = self._resolve(name, declared)
        # Still construction: after this function nothing writes to the instance.
        vars(self).update(values, _sources=MappingProxyType(sources))
        self.check()
        self._check_batch_invariant()
        vars(self)["_digest"] = keys.digest(self, cls.__name__)

    def _resolve(self, name: str, declared: tuple[object, Setting | None]) -> Resolved:
        value = getattr(self, name)
        if value is _OVERRIDE and not self.takes_backward_override:
            if (found := environment_value(_OVERRIDE)) is not None:
                text = f"{type(self).__name__} takes no {name}: {found[0]}={found[1]} is ignored for it"
                warnings.warn(text, OpfuseWarning, stacklevel=4)
            return Resolved(None, DEFAULT)
        return resolve(f"{type(self).__name__}.{name}", value, declared)

    def check(self) -> None:
        """Refuse fields that contradict each other (RecipeError). Called once, at construction."""
        if self.backward_override is not None and not self.takes_backward_override:
            got = f"backward_override={self.backward_override!r}"
            cure = "use another recipe with this override, such as Float8CurrentScaling, or leave the override out"
            raise RecipeError(describe(type(self).__name__, wanted="backward_override=None", got=got, cure=cure))
        self._check_keep()

    def _check_batch_invariant(self) -> None:
        """RecipeError if what casts inputs breaks that promise. After :meth:`check`: only fields that agree make a quantizer."""
        if self.batch_invariant and (quantizer := self.known_quantizer()) is not None:
            self.check_row_local(type(self).__name__, quantizer)

    def _check_keep(self) -> None:
        """RecipeError for a ``keep`` that contradicts what another field promises."""
        override, got = self.backward_override, f"keep={self.keep!r}"
        if self.keep == "quantized" and override is not None:
            wanted = f"another keep: backward_override={override!r} is for gradients of what ran"
            cure = "write keep='recompute', which changes no bit, or leave the override out"
            raise RecipeError(describe(type(self).__name__, wanted=wanted, got=got, cure=cure))
        if self.keep == "recompute" and self.rounding == "single":
            wanted = "rounding='per_op', under which the result of an activation follows from what is saved of its input"
            cure = "write rounding='per_op', or keep='quantized', which does not keep bits"
            raise RecipeError(describe(type(self).__name__, wanted=wanted, got=f"{got}, rounding='single'", cure=cure))

    def known_quantizer(self) -> Quantizer | None:
        """What casts the input of a linear layer, as far as the fields alone tell; None: the op's state or its name decides."""
        return self.quantizer(QuantizerRole())

    def check_row_local(self, where: str, quantizer: Quantizer) -> None:
        """RecipeError under ``batch_invariant`` if a row of an input that ``quantizer`` casts depends on other rows."""
        if self.batch_invariant and not quantizer.row_local:
            wanted = "inputs cast row by row, for batch_invariant=True"
            got = f"{quantizer!r}, under which rows share what is found in the batch"
            cure = "use scales of a row's own (Float8BlockScaling with x_block_scaling_dim=1, MXFP8BlockScaling, "
            cure += (
                "NVFP4BlockScaling with row_scaled_activation=True and disable_rht=True, the preset fp8_row_scaled), or those "
            )
            cure += "of earlier steps (DelayedScaling; not for a quantized LinearCrossEntropy, which keeps no scales)"
            raise RecipeError(describe(where, wanted=wanted, got=got, cure=cure))

    def current(self) -> Recipe:
        """The recipe for a region that begins now: itself, unless a function that it asks answers otherwise by now."""
        return self

    def training_refusal(self) -> str | None:
        """Why no backward pass can be computed under this recipe; None: it can."""
        return None

    def check_trainable(self) -> None:
        """RecipeError with the :meth:`training_refusal`, if there is one."""
        if refusal := self.training_refusal():
            raise RecipeError(refusal)

    @abstractmethod
    def quantizer(self, role: QuantizerRole, *, state: ScaleHistory | None = None) -> Quantizer:
        """The quantizer of ``role``, both directions on. ``state`` is read by delayed scaling only."""

    def delayed_scaling(self, role: QuantizerRole) -> Recipe | None:
        """The DelayedScaling by which the scale of ``role`` follows from earlier steps; None: a cast finds it in the tensor."""
        return None

    @property
    def sources(self) -> Mapping[str, str]:
        """Where each field's value came from: ``default``, ``environment NAME``, ``train.py:88`` or what was attached."""
        return cast(Mapping[str, str], vars(self)["_sources"])

    @property
    def digest(self) -> str:
        """Type-tagged identity of class and fields; computed once."""
        return cast(str, vars(self)["_digest"])

    def values(self) -> dict[str, Any]:
        """The fields by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def replace(self, **changes: Any) -> Self:
        """A new, checked recipe with some fields changed; unchanged fields keep their source."""
        _refuse_unknown(f"{type(self).__name__}.replace", changes, self.sources)
        kept = {name: source for name, source in self.sources.items() if name not in changes}
        return _rebuild(type(self), {**self.values(), **changes}, kept)

    def with_sources(self, sources: Mapping[str, str]) -> Self:
        """A copy of the recipe that names the sources of its fields, e.g. ``{"margin": "fp8.yaml:7:12"}``."""
        _refuse_unknown(f"{type(self).__name__}.with_sources", sources, self.sources)
        recipe = object.__new__(type(self))
        vars(recipe).update(vars(self), _sources=MappingProxyType({**self.sources, **sources}))
        return recipe

    def __eq__(self, other: object) -> bool:
        return vars(self)["_digest"] == vars(other)["_digest"] if isinstance(other, Recipe) else NotImplemented

    def __hash__(self) -> int:
        return hash(vars(self)["_digest"])

    def __repr__(self) -> str:
        """The class, and the fields that differ from its defaults; :meth:`values` has all."""
        declared = ((name, default) for name, (default, _) in settings_of(type(self)).items())
        usual = {name: default.value if isinstance(default, Setting) else default for name, default in declared}
        chosen = (f"{name}={value!r}" for name, value in self.values().items() if value != usual[name])
        return f"{type(self).__name__}({', '.join(chosen)})"

    def __reduce__(self) -> tuple[Any, ...]:
        # The digest is one process's: a copy or another process makes its own.
        return _rebuild, (type(self), self.values(), dict(self.sources))


def _rebuild(cls: type[AnyRecipe], values: dict[str, Any], sources: Mapping[str, str]) -> AnyRecipe:
    """A checked recipe with these fields, whatever arguments the constructor of ``cls`` takes."""
    recipe = object.__new__(cls)
    vars(recipe).update(values)
    recipe.__post_init__()
    return recipe.with_sources(sources)


# -- what a backward override means for the three products of a linear layer; GEMMS says which plane a product reads ------------


@dataclass(frozen=True)
class OverridePolicy:
    """What a backward override keeps: ``saved`` operands, and the precision in which the backward products run."""

    saved: Literal["columnwise", "rowwise", "original"]
    backward: Literal["quantized", "high_precision"]


OVERRIDES: Mapping[str | None, OverridePolicy] = {
    None: OverridePolicy(saved="columnwise", backward="quantized"),
    "dequantized": OverridePolicy(saved="rowwise", backward="high_precision"),
    "high_precision": OverridePolicy(saved="original", backward="high_precision"),
}
"""By a recipe's ``backward_override``. Its ``keep`` is another matter: it says which saved operands are made anew instead."""

SPLIT: dict[str, frozenset[str]] = {
    "backward": frozenset(("dgrad", "wgrad")),
    "all": frozenset(GEMMS),
    "none": frozenset(),
}
"""The products whose partial sums are added in fp32, by a recipe's ``split_accumulator``."""

KEPT_INPUT = Float8BlockQuantizer(torch.float8_e4m3fn, rowwise=True, columnwise=False, block_scaling_dim=1)
"""How ``keep="quantized"`` saves the input of an activation or a norm. Blocks of a row have scales of their own: a residual
stream has few columns a thousand times larger than the others, no value depends on another token, and one kernel does it all.
"""


@functools.cache
def planes(role: str, gemms: tuple[str, ...]) -> frozenset[str]:
    """The planes of ``role`` that ``gemms`` read."""
    reads = [
        pair
        for gemm in gemms
        for pair in ((GEMMS[gemm].left, GEMMS[gemm].left_plane), (GEMMS[gemm].right, GEMMS[gemm].right_plane))
    ]
    return frozenset(plane for reader, plane in reads if reader == role)


def cast_quantizer(quantizer: Quantizer, role: str, override: str | None, backward_gemms: tuple[str, ...]) -> Quantizer | None:
    """``quantizer`` narrowed to the planes that the products of a linear layer read; None if they read none.

    Under ``high_precision`` the columnwise plane of a forward operand is the caller's tensor itself, so that what is saved
    for backward is the original and not a copy.
    """
    policy = OVERRIDES[override]
    forward = () if role == "grad_output" else ("fprop",)
    backward = planes(role, backward_gemms)
    if policy.backward == "quantized":
        wanted = planes(role, forward + backward_gemms)
        return quantizer.wanting(rowwise=ROWWISE in wanted, columnwise=COLUMNWISE in wanted) if wanted else None
    if not forward:
        return None
    rowwise = quantizer.wanting(rowwise=True, columnwise=False)
    if policy.saved == "original" and backward:
        return HybridQuantizer(rowwise, IdentityQuantizer())
    return rowwise


def saved_planes(operand: QuantizedStorage, override: str | None) -> QuantizedStorage | object:
    """The part of a forward operand that the backward products read under ``override``."""
    saved = OVERRIDES[override].saved
    if saved == "original":
        plane = operand.columnwise
        if plane is not None and plane.format.family == IDENTITY.family:
            return plane.data
        saved = "rowwise"  # the only original of an operand that came quantized is its dequantized value
    why = f"backward_override={override!r} saves the {saved} plane only"
    return operand.only(ROWWISE if saved == "rowwise" else COLUMNWISE, why=why)
