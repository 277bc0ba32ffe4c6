"""The base classes of ops.

An op is an ``nn.Module`` around a frozen ``spec``, and knows only its own forward and backward. The compiler decides how a
pipeline of ops is computed, from the specs and from the signatures of the tensors.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import nn

from opfuse.core.context import Context, Value
from opfuse.core.numbered import NumberedMixin
from opfuse.core.protocol import Grouping, check_signatures, refuse_missing
from opfuse.core.quantizers import QuantizerSlotsMixin
from opfuse.core.signature import DTYPES, Env, checked_dtype
from opfuse.core.spec import NoSpec, argument, check_keywords, checked_spec, spec_fields
from opfuse.core.state import StatefulModule
from opfuse.core.tracers import check_proxy
from opfuse.core.watched import (
    CALLS,
    METHODS,
    WITHOUT,
    ParameterSlot,
    ParameterSlots,
    WatchedClass,
    adds_code,
    calls,
    is_unchanged,
    kind_of,
    place,
    word_of,
)
from opfuse.domains import BOOLEAN, INTEGER
from opfuse.errors import (
    ChannelError,
    OpfuseWarning,
    PipelineError,
    PipelineIndexError,
    PipelineTypeError,
    SpecError,
    describe,
    number_of,
)
from opfuse.formats import NumberFormat
from opfuse.recipes import Recipe
from opfuse.recipes.delayed import DelayedScalingState, DelayedScalingStates
from opfuse.recipes.recipe import cast_quantizer
from opfuse.recipes.standing import Standing
from opfuse.sources import DEFAULT, caller
from opfuse.tensors.conversion import converted
from opfuse.tensors.quantizers import Quantizer
from opfuse.tensors.ragged import RaggedProducts

OptionalTensors = Iterable[torch.Tensor | None]


@dataclass(frozen=True)
class Channel:
    """Names an extra tensor, so that an op of the same pipeline consumes what another one produces."""

    name: str | None = None
    to_caller: bool = True


def cure_of_extras(ops: Iterable[Any]) -> str:
    """What a caller of ``ops`` passes beside the input: a tensor for each extra input without a channel."""
    asking = [op.label for op in ops for channel in op.extra_input_channels if channel.name is None]
    return f"pass x, and a tensor for each of {', '.join(asking)}, in this order" if asking else "pass x alone"


_OUTPUT = "a call makes its outputs: copy what it returns, or have opfuse.graphed give them addresses that stay"
_BUFFERS = {
    "output": _OUTPUT,
    "out": _OUTPUT,
    "grad_input": "autograd takes the gradient: copy it in a hook of the input; that of a weight can go to its main_grad",
}
"""Buffers of the caller, as te.ops takes them, and what to do instead: fused kernels write results, so no op could fill one."""


def cure_of_keywords(unknown: Iterable[str]) -> str:
    """What a caller does instead of passing keyword arguments that an op does not take."""
    return next((_BUFFERS[name] for name in unknown if name in _BUFFERS), "check the names")


class Known(NamedTuple):
    """What the compiler may rely on in an op's methods; :class:`BasicOperation` explains each field."""

    word: str
    traits: frozenset[str]
    is_cast: bool
    accepts_quantized: bool
    casts_itself: bool


class FusibleOperation(StatefulModule, metaclass=WatchedClass):
    """What pipelines are made of: basic ops, and ops that stand for several basic ops in a row."""

    kind: ClassVar[str] = ""
    spec: Any
    run_alone: ClassVar[Callable[..., Any] | None] = None
    """The function that runs one op as a pipeline of its own; the compiler sets it."""
    run_by: ClassVar[tuple[str, ...]] = ()
    """The protocol methods of the class that the compiler calls; overriding another one is an error."""
    made_at: str = DEFAULT
    """The line of code or of a file that made the op."""
    pipelined: ClassVar[bool] = True
    """Whether ``forward`` only runs the op as a pipeline of one, so that a longer pipeline may leave it out."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.pipelined = cls.pipelined and is_unchanged(cls, ("pipelined",), CALLS)
        for method in METHODS:
            if method not in cls.run_by and hasattr(cls, method):
                run = ", ".join(("forward", *cls.run_by))
                cure = f"override one of {run}" if cls.run_by else "override forward, or an op of its basic_ops"
                got = f"{method}, which nobody calls"
                raise PipelineError(describe(f"class {cls.__name__}", wanted=f"methods that run: {run}", got=got, cure=cure))

    def __new__(cls, *_: object, **given: object) -> Self:
        check_keywords(cls, given)
        made = super().__new__(cls)
        made.__dict__["made_at"] = caller()
        return made

    @property
    @abstractmethod
    def basic_ops(self) -> tuple[BasicOperation, ...]:
        """The basic ops this one stands for, in forward order."""

    @property
    def joins(self) -> bool:
        """Whether it may join a pipeline; an op with a ``forward`` of its own is called like any other module."""
        return self.pipelined and not self.patches(CALLS)

    @property
    def label(self) -> str:
        """How errors and explanations call this op."""
        return f"{type(self).__name__}({self.extra_repr()})"

    @property
    def num_extra_inputs(self) -> int:
        """How many tensors it takes beside the main input."""
        return sum(op.num_extra_inputs for op in self.basic_ops)

    @property
    def num_extra_outputs(self) -> int:
        """How many tensors it returns beside the main output."""
        return sum(op.num_extra_outputs for op in self.basic_ops)

    # Hyper-parameters are attributes of the op that read the spec, and cannot be set.

    def __getattr__(self, name: str) -> Any:
        if name in spec_fields(self):
            return getattr(self.__dict__["spec"], name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "spec" or name in spec_fields(self):
            wanted = "no assignment: hyper-parameters are frozen"
            cure = f"build a new {type(self).__name__} and put it in the pipeline"
            raise SpecError(describe(f"{self.label}.{name}", wanted=wanted, got=repr(value), cure=cure))
        super().__setattr__(name, value)

    def forward(self, x: torch.Tensor, *extra_inputs: torch.Tensor, **kwargs: Any) -> Any:
        """Run this op alone, as a pipeline of one."""
        if type(x) is not torch.Tensor:
            check_proxy(self.label, x)
        if FusibleOperation.run_alone is None:
            raise PipelineError(
                describe(self.label, wanted="the opfuse compiler", got="only opfuse.core imported", cure="import opfuse")
            )
        return FusibleOperation.run_alone(self, x, *extra_inputs, **kwargs)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        with converted(self._parameters, fn):
            return super()._apply(fn, recurse)


class OwnProducts(NamedTuple):
    """Products of operands that an op itself casts.

    formats: of both operands, by names in GEMMS; None in high precision. sizes: a number that divides the rows of each input, its
    features, and those of the output.
    """

    formats: Mapping[str, tuple[NumberFormat | None, NumberFormat | None]]
    sizes: tuple[int, int, int]


class BasicOperation(NumberedMixin, QuantizerSlotsMixin, FusibleOperation):
    """One op with its own parameters, forward and backward.

    A subclass defines ``op_forward`` and ``op_backward``; one written for te.ops may define ``fuser_forward`` and
    ``fuser_backward``. A class declares:

    kind: its name in patterns and, without a module_type, in quantizer roles; by default the class name in snake case. saves: the
    names that ``ctx.save`` takes, or None if it calls ``ctx.save_for_backward``. roles: the operands that are quantized under a
    recipe, out of ``"input"``, ``"grad_output"`` and parameter names. forward_kwargs: the keyword arguments that callers may pass
    to its forward; None: those in the signature of ``op_forward``. reads_training: whether its methods read ``self.training``;
    True by default for a class with methods from outside of this package. derives: what else its methods keep in a context, as
    functions of what is always there.

    It also declares what holds for its methods, until a subclass replaces one of those in ``speaks_for`` and does not declare it
    anew. traits: properties that patterns may ask for; a fusion then computes what the methods would. is_cast: the op is nothing
    but its quantize nodes. accepts_quantized: the methods take quantized values; otherwise they get high-precision tensors.
    asks_casts: the methods call ``ctx.cast`` for what is not cast yet. If a subclass replaces one of them and declares no
    ``roles``, it gets uncast tensors, and the methods of its base cast them (``casts_itself``). word: what patterns call it, its
    kind or, if another class has that kind, ``module.kind``.
    """

    run_by = METHODS
    num_extra_inputs: ClassVar[int] = 0
    num_extra_outputs: ClassVar[int] = 0
    _channels: tuple[list[Channel], list[Channel]]
    speaks_for: ClassVar[tuple[str, ...]] = METHODS
    stored: tuple[str, ...] = ()
    """Parameters that were made inside ``quantized_model_init``."""
    borrows: tuple[str, ...] = ()
    """Parameters that always exist, before all others; an owner may hold them for the op."""
    word: ClassVar[str] = ""
    traits: ClassVar[frozenset[str]] = frozenset()
    saves: ClassVar[tuple[str, ...] | None] = None
    roles: ClassVar[tuple[str, ...]] = ()
    is_cast: ClassVar[bool] = False
    accepts_quantized: ClassVar[bool] = False
    forward_kwargs: ClassVar[tuple[str, ...] | None] = None
    reads_training: ClassVar[bool] = False
    asks_casts: ClassVar[bool] = False
    derives: ClassVar[Mapping[str, Callable[[Context], Any]]] = {}
    casts_itself: ClassVar[bool] = False
    standing = Standing()
    """Where it stands in the model, for ranks that share its amaxes; a pipeline that trains over ranks sets it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        named = "kind" in cls.__dict__
        if not named:
            cls.kind = kind_of(cls.__name__)
        trusted = is_unchanged(cls, ("traits",), cls.speaks_for)
        for name, value in WITHOUT.items():
            if not is_unchanged(cls, (name,), cls.speaks_for):
                setattr(cls, name, value)
        if not is_unchanged(cls, ("forward_kwargs",), ("op_forward", "fuser_forward")):
            cls.forward_kwargs = None
        cls.casts_itself = cls.asks_casts and not is_unchanged(cls, ("roles", "quantized_roles"), cls.speaks_for)
        if "reads_training" not in cls.__dict__ and adds_code(cls):
            cls.reads_training = True
        cls.word = word_of(cls, cls.kind, declared=named and trusted)
        check_signatures(cls, BasicOperation)
        for plain, outer in (("op_forward", "fuser_forward"), ("op_backward", "fuser_backward")):
            if plain in cls.__dict__ and place(cls, (outer,)) > 0 and not calls(cls, outer, plain):
                cure = f"override {outer}, which the compiler calls, or have it call {plain}"
                got = f"a {outer} that does not call it"
                message = describe(f"{cls.__name__}.{plain}", wanted=f"a {outer} that runs it", got=got, cure=cure)
                warnings.warn(message, OpfuseWarning, stacklevel=2)

    def __init__(self, spec: Any = None, *, owner: nn.Module | None = None) -> None:
        """spec: hyper-parameters, if the constructor does not declare them; checked, else SpecError. owner: of its parameters."""
        super().__init__()
        self.__dict__["owner"] = owner if owner is not None else self
        if spec is not None or "spec" not in self.__dict__:
            self.__dict__["spec"] = NoSpec() if spec is None else checked_spec(spec, type(self.owner).__name__)
        self.__dict__["_channels"] = (
            [Channel() for _ in range(self.num_extra_inputs)],
            [Channel() for _ in range(self.num_extra_outputs)],
        )
        self.__dict__["quantizer_states"] = DelayedScalingStates()
        self.__dict__["name"] = ""

    @property
    def writes_extras(self) -> bool:
        """Whether it writes into its extra inputs, which are tensors of the caller."""
        return self.num_extra_inputs > 0 and bool(getattr(self.spec, "in_place", False))

    def __getattr__(self, name: str) -> Any:
        owner = self.__dict__.get("owner", self)
        if owner is not self and name in owner._parameters:
            return owner._parameters[name]
        if name == "_channels":
            cure, cls = "call super().__init__() first in its constructor", type(self).__name__
            raise PipelineError(describe(f"class {cls}", wanted="the state of a BasicOperation", got="none", cure=cure))
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "name" and self.__dict__.get("_captured"):  # quantizer roles carry it, so plans depend on it
            wanted, cure = "a name given before the first call", "name the op before it enters a pipeline"
            raise SpecError(describe(f"{self.label}.name", wanted=wanted, got=repr(value), cure=cure))
        super().__setattr__(name, value)

    # -- what is known of its methods --------------------------------------------------------------------------------------

    @property
    def known(self) -> Known:
        """What the compiler may rely on: what the class declares, unless methods were replaced since."""
        if not self.patches(self.speaks_for):
            return Known(self.word, self.traits, self.is_cast, self.accepts_quantized, self.casts_itself)
        return Known(f"patched.{self.word}", **WITHOUT, casts_itself=self.asks_casts)

    @property
    def asks_quantizers(self) -> bool:
        """Whether its methods may ask for quantizers by number."""
        return type(self).num_quantizers is not BasicOperation.num_quantizers

    @property
    def knows_reads(self) -> bool:
        """Whether its class defines ``reads_saved``."""
        return type(self).reads_saved is not BasicOperation.reads_saved

    @property
    def promised(self) -> tuple[str, ...] | None:
        """The names that its forward saves; None if methods were replaced since its class declared them."""
        return self.saves if not self.patches(METHODS) and is_unchanged(type(self), ("saves",), METHODS) else None

    def extra_repr(self) -> str:
        shown = []
        for setting in fields(self.spec):
            if (value := getattr(self.spec, setting.name)) != setting.default:
                shown.append(f"{argument(setting.name)}={value!r}")
        return ", ".join(shown)

    # -- parameters --------------------------------------------------------------------------------------------------------

    def parameter_slots(self) -> tuple[ParameterSlot, ...]:
        """Each parameter's dotted name, and where it is found.

        ``op_backward`` returns gradients in this order. Slots stay valid when a parameter is replaced, moved or cast.
        """
        slots: tuple[ParameterSlot, ...] | None = self.__dict__.get("_slots")
        if slots is None:
            found = {name: ParameterSlot(name, self.owner._parameters, name) for name in self.borrows}
            for prefix, module in self.named_modules():
                for key in module._parameters:
                    name = f"{prefix}.{key}".lstrip(".")
                    found[name] = ParameterSlot(name, module._parameters, key)
            slots = ParameterSlots(found.values())
            if self._captured:
                self.__dict__["_slots"] = slots
        return slots

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of the parameters, in order."""
        return tuple([slot.name for slot in self.parameter_slots()])

    def parameter_values(self) -> tuple[nn.Parameter | None, ...]:
        """The parameters as they are now, in order."""
        return tuple([slot.held[slot.key] for slot in self.parameter_slots()])

    def parameter(self, name: str) -> nn.Parameter:
        """The parameter of that name as it is now; PipelineError if there is none."""
        for known, held, key in self.parameter_slots():
            if known == name and (value := held[key]) is not None:
                return value
        raise PipelineError(describe(f"{self.label}.{name}", wanted="a parameter", got=None, cure="assign one before the call"))

    # -- extra tensors, which come from the caller and go to it, unless they are given the name of a channel ------------------

    @property
    def extra_input_channels(self) -> tuple[Channel, ...]:
        """Channels of the extra inputs; a nameless one is given by the caller."""
        return tuple(self._channels[0])

    @property
    def extra_output_channels(self) -> tuple[Channel, ...]:
        """Channels of the extra outputs."""
        return tuple(self._channels[1])

    def set_extra_input_channel(self, index: int, name: str | None) -> None:
        """Take extra input ``index`` from the op of the same pipeline that produces ``name`` (None: from the caller)."""
        self._set_channel(0, index, Channel(self._channel_name(name)))

    def set_extra_output_channel(self, index: int, name: str | None, *, output_to_caller: bool = True) -> None:
        """Publish extra output ``index`` as ``name``; with ``output_to_caller=False`` the pipeline does not return it."""
        BOOLEAN.checked(f"{self.label} output_to_caller", output_to_caller, PipelineTypeError)
        self._set_channel(1, index, Channel(self._channel_name(name), output_to_caller))

    def _channel_name(self, name: str | None) -> str | None:
        if name is not None and (not isinstance(name, str) or not name):
            raise PipelineError(
                describe(f"{self.label} channel", wanted="a non-empty string or None", got=repr(name), cure="name the channel")
            )
        return name

    def _set_channel(self, side: int, index: int, channel: Channel) -> None:
        channels = self._channels[side]
        what = ("input", "output")[side]
        index = INTEGER.checked(f"{self.label} extra {what} channel", index, PipelineTypeError)
        if not 0 <= index < len(channels):
            wanted, cure = f"an index below {len(channels)}", f"this op has {number_of(len(channels), f'extra {what}')}"
            raise PipelineIndexError(describe(f"{self.label} extra {what} channel", wanted=wanted, got=index, cure=cure))
        if self._captured:
            wanted, got = "channels set before the first call", "a captured op"
            cure = "set channels before the op enters a pipeline, or build a new op"
            raise ChannelError(describe(f"{self.label} extra {what} {index}", wanted=wanted, got=got, cure=cure))
        channels[index] = channel

    # -- quantization ------------------------------------------------------------------------------------------------------

    def quantized_roles(self) -> tuple[str, ...]:
        """The operands that get a quantize node under a recipe."""
        return self.roles

    def compute_dtype(self, env: Env, x: Value) -> torch.dtype:
        """The dtype in which this op computes on ``x``: torch.autocast's, or that of ``x``. DtypeError for integers and bytes."""
        dtype = self.checked_dtype("input", x.dtype)
        return env.autocast or dtype

    def parameter_shape(self, name: str) -> tuple[int, ...] | None:
        """The shape that a parameter must have; None if any will do."""
        return None

    def checked_dtype(self, what: str, dtype: torch.dtype) -> torch.dtype:
        """``dtype``, if ops compute in it; else DtypeError. what: names the tensor in the error."""
        return dtype if dtype in DTYPES else checked_dtype(f"{self.label} {what}", dtype)

    def grouping(self, needs: Collection[str]) -> Grouping | None:
        """How its rows are in groups; None: they are not. needs: what wants a gradient, as in a context."""
        return None

    def own_products(self, env: Env, needs: Collection[str]) -> OwnProducts:
        """The products of operands that the op itself casts under a recipe, of which plans tell; none of most ops.

        needs: what wants a gradient, as in a context. Errors: those of its casts.
        """
        return OwnProducts({}, (1, 0, 0))

    def cast_groups(self, role: str) -> int:
        """How many groups of rows the operand is cast in, each by itself; 0: it is cast as one tensor."""
        return 0

    def ragged_products(self, quantizers: Mapping[str, Quantizer], env: Env, needs: Collection[str]) -> RaggedProducts | None:
        """The products of groups of rows, if the sizes of groups may stay on the device; else None.

        quantizers: by role. needs: what wants a gradient, as in a context.
        """
        return None

    def make_quantizer(self, role: str, recipe: Recipe) -> tuple[Quantizer, DelayedScalingState | None]:
        """The recipe's quantizer for one operand, and the op's state where scaling is delayed."""
        return self.quantizer_of(self.quantizer_role(role), recipe)

    def narrow_quantizer(
        self, quantizer: Quantizer, role: str, override: str | None, backward_gemms: tuple[str, ...]
    ) -> Quantizer | None:
        """``quantizer`` with the planes that will be read; None where the override needs no cast."""
        return cast_quantizer(quantizer, role, override, backward_gemms)

    def reads_saved(self, ctx: Context) -> Collection[str]:
        """The names in ``saves`` that the gradients wanted in this call read; by default all."""
        return self.saves or ()

    def remember(self, ctx: Context) -> None:
        """Put into ``ctx`` what ``op_forward`` would have put there beside saved values; called if a fusion ran in its place."""

    # -- as part of a pipeline ---------------------------------------------------------------------------------------------

    def pre_first_fuser_forward(self) -> None:
        """Called when a pipeline takes the op in, before it looks for the op's parameters."""

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        """Called before each forward pass of a pipeline. requires_grad: whether its backward pass reaches this op."""

    # -- one op, alone ---------------------------------------------------------------------------------------------------

    @property
    def basic_ops(self) -> tuple[BasicOperation, ...]:
        return (self,)

    def check_kwargs(self, kwargs: Iterable[str]) -> None:
        """PipelineError for keyword arguments that this op does not take."""
        known = None if self.patches(("op_forward", "fuser_forward")) else self.forward_kwargs
        unknown = () if known is None else tuple(name for name in kwargs if name not in known)
        if unknown:
            wanted = f"one of {known}" if known else "no keyword arguments"
            raise PipelineError(describe(f"{self.label} forward", wanted=wanted, got=unknown, cure=cure_of_keywords(unknown)))

    def op_forward(self, ctx: Context, input_: Any, **kwargs: Any) -> Any:
        """The output for ``input_``, or (output, *extra outputs). Saves in ``ctx`` what the backward pass needs.

        Extra inputs are ``ctx.extras``.
        """
        refuse_missing(self.label, "op_forward or fuser_forward")

    def op_backward(self, ctx: Context, grad_output: Any) -> Any:
        """Three gradients: that of the input, those of the parameters in the order of ``parameters()``, those of extra inputs.

        An op without extra inputs may leave the last out. Gradients of extra outputs are ``ctx.grad_extras``.
        """
        refuse_missing(self.label, "op_backward or fuser_backward")

    # -- what the backward pass makes anew ---------------------------------------------------------------------------------

    rematerialized_as: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """By role: the saved name of an operand that need not be saved, because its cast can be made again."""

    def remakes(self, ctx: Context) -> Literal["", "saved", "input"]:
        """From what the op's result can be made again: "saved", its saved state; "input", its input as well; "", nothing."""
        return ""

    def remake(self, contexts: Sequence[Context], cast: Any) -> Value:
        """The result of this op and of those behind it, made again from their contexts, and cast if there is a ``cast``."""
        got, cure = "remakes() says that there is one", 'define it, or have remakes() answer ""'
        raise PipelineError(describe(self.label, wanted="a method remake", got=got, cure=cure))
