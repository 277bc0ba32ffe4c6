"""Modules that have an op as their counterpart: each function of LEAVES recognises a kind of module and makes its op.

A module is recognised by its forward, if that is torch's own, or by the formula that its forward computes in every mode
(``forms.py``), and never by the name of its class or by its values.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from opfuse.convert.code import CONSTANTS, NotRecorded
from opfuse.convert.forms import ACTIVATIONS, expression, products, rms_norm_form
from opfuse.convert.record import recordings, required_arguments
from opfuse.convert.weights import MadeParameters, Weight, borrowing
from opfuse.core.operation import BasicOperation
from opfuse.core.signature import is_foreign
from opfuse.errors import with_article
from opfuse.ops import OPS, activation
from opfuse.ops.activation import Activation, GatedActivation
from opfuse.ops.norm import LayerNorm, RMSNorm
from opfuse.ops.structure import Identity
from opfuse.torch_private.modules import CALL, has_hooks

AnyAnswer = TypeVar("AnyAnswer")

UNGATED: Mapping[str, type[Activation]] = {
    name: cls
    for name, cls in OPS.items()
    if issubclass(cls, Activation) and not issubclass(cls, GatedActivation) and not cls.math.operands
}
"""The activations of one tensor, by name."""

GATED: dict[str, type[activation.GatedActivation]] = {
    "gelu": activation.GEGLU,
    "gelu_erf": activation.GEGLUErf,
    "qgelu": activation.QGEGLU,
    "silu": activation.SwiGLU,
    "relu": activation.ReGLU,
    "srelu": activation.SReGLU,
}
"""The unit that an activation gates, by the name of the activation."""


class LeafModule(NamedTuple):
    """What a module is.

    name: of an activation. keeps_dtype: under torch.autocast its result has the dtype of its input, on every device. dtypes:
    of inputs and parameters in which its forward was read; empty: all are alike. made: owns the parameter if the op calls it
    by another name than the module.
    """

    op: BasicOperation
    name: str = ""
    keeps_dtype: bool = False
    dtypes: tuple[torch.dtype, ...] = ()
    made: MadeParameters | None = None


def runs(module: nn.Module, *classes: type[nn.Module]) -> bool:
    """Whether the forward of ``module`` is that of one of ``classes``, whatever its own class is called."""
    return any(isinstance(module, cls) and type(module).forward is cls.forward for cls in classes)


# -- what is asked once ----------------------------------------------------------------------------------------------------------

_answers: ContextVar[dict[Any, Any] | None] = ContextVar("opfuse_answers", default=None)


@contextmanager
def asked_once() -> Iterator[None]:
    """Inside, where no module changes, :func:`once` looks once for each answer: to read a forward takes 10 to 100 ms, and the
    layers of a model have the same ones.
    """
    reset = _answers.set({})
    try:
        yield
    finally:
        _answers.reset(reset)


def once(question: Hashable, find: Callable[[], AnyAnswer]) -> AnyAnswer:
    """What ``find()`` gives, or gave to the same question since :func:`asked_once` was entered."""
    answers = _answers.get()
    if answers is None:
        return find()
    if question not in answers:
        answers[question] = find()
    answer: AnyAnswer = answers[question]
    return answer


def likeness(module: nn.Module) -> tuple[Hashable, ...]:
    """All that a forward may read of a module but the values of its parameters: while no module changes, those of one likeness
    compute the same. Objects are alike if they are the same one, so some that compute the same are not.
    """
    named: list[Hashable] = []
    for name, value in vars(module).items():
        if name == "_modules":
            named += [(key, None if part is None else likeness(part)) for key, part in value.items()]
        elif name == "_parameters":
            named += [(key, None if p is None else (type(p), *_LAYOUT(p), p.stride())) for key, p in value.items()]
        else:
            named.append((name, _likeness(value)))
    return type(module), *named


_LAYOUT = attrgetter("shape", "dtype", "device", "layout", "requires_grad")


def _likeness(value: Any) -> Hashable:
    kind = type(value)
    if kind in (tuple, list):
        return kind, *map(_likeness, value)
    if kind in CONSTANTS:
        return kind, repr(value)  # which tells 0.0 from -0.0
    return kind, None if kind in _CONTAINERS and not value else id(value)


_CONTAINERS = (dict, OrderedDict, set)
"""Of these a module has some that are empty, such as those of its hooks."""


# -- by formula ------------------------------------------------------------------------------------------------------------------


class ModuleFormula(NamedTuple):
    """What the forward of a module with one argument computes, and the functions that it calls."""

    expression: Any
    functions: frozenset[str]


def formula(module: nn.Module, width: int, dtypes: Sequence[torch.dtype | None] = (None,)) -> ModuleFormula | None:
    """The one formula of a module in all modes and ``dtypes``, for rows of any leading dimensions; None if there is none.

    The module has no submodules.
    """
    names = required_arguments(module)
    if len(names) != 1 or module._modules:
        return None
    return once((likeness(module), width, *dtypes), partial(_formula, module, names[0], width, dtypes))


def _formula(module: nn.Module, argument: str, width: int, dtypes: Sequence[torch.dtype | None]) -> ModuleFormula | None:
    first: ModuleFormula | None = None
    for _, in_autocast, run in recordings(module, {argument: width}, dtypes, may_write=True):
        try:
            recording = run()
            now = expression(recording, in_autocast=in_autocast)
        except NotRecorded:
            return None
        if first is None:
            called = (str(node.target) for node in recording.nodes if node.op == "call_method")
            first = ModuleFormula(now, frozenset(called))
        if first.expression != now:
            return None
    return first


def weight_of(module: nn.Module) -> Weight | None:
    """What a module multiplies with, if it is nothing but a product and a bias."""
    return once(module, partial(_weight_of, module))


def _weight_of(module: nn.Module) -> Weight | None:
    weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
    if (weight is not None and 0 in weight.shape) or (bias is not None and bias.dim() != 1):
        return None
    if runs(module, nn.Linear):
        linear: nn.Linear = module  # type: ignore[assignment]
        sizes = linear.in_features, linear.out_features
        # Of a weight that is another module's, its own shape counts, whatever the module says.
        into, out = sizes if weight is None else (weight.shape[1], weight.shape[0])
        return Weight(module, into, out) if weight is None or weight.dim() == 2 else None
    if weight is None or weight.dim() != 2 or module._modules or not module._parameters.keys() <= {"weight", "bias"}:
        return None
    forms = products(module._parameters.get("bias") is not None)
    for transposed, (into, out) in ((False, weight.shape[::-1]), (True, weight.shape)):
        found = formula(module, into)
        if found is not None and forms.get(found.expression) is transposed:
            return Weight(module, into, out, transposed=transposed)
    return None


def why_refused(module: nn.Module) -> tuple[str, str, str] | None:
    """Of a module that looks like a linear layer and that :func:`weight_of` does not know: what it would have to be, what it is,
    and the cure. None for any other module.
    """
    named = {name: p.dim() for name, p in module._parameters.items() if p is not None}
    if named.get("weight") != 2 or not named.keys() <= {"weight", "bias"} or module._modules:
        return None
    got = f"{with_article(type(module).__name__)}, whose forward computes something else"
    return "a linear layer, x W^T + b or x W + b", got, "call an nn.Linear, and have a module around it do what else is done"


# -- ops -------------------------------------------------------------------------------------------------------------------------


def _layer_norm(module: nn.Module) -> LeafModule | None:
    if not runs(module, nn.LayerNorm) or module._parameters.get("weight") is None or module._parameters.get("bias") is None:
        return None
    norm: nn.LayerNorm = module  # type: ignore[assignment]
    return LeafModule(borrowing(LayerNorm, (norm.normalized_shape, norm.eps), module, "weight", "bias"))


NORM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes in which a norm has to be the same formula; it is converted for those alone."""


def _rms_norm(module: nn.Module) -> LeafModule | None:
    """One of torch, and any module with one vector of parameters, of whatever name, that computes the same."""
    own = {name: p for name, p in module._parameters.items() if p is not None}
    if len(own) != 1 or module._buffers or module._modules:
        return None
    ((name, weight),) = own.items()
    if runs(module, nn.RMSNorm):
        norm: nn.RMSNorm = module  # type: ignore[assignment]
        computed = torch.promote_types(weight.dtype, torch.float32)  # by torch, whose default is the eps of that
        eps = torch.finfo(computed).eps if norm.eps is None else norm.eps
        return LeafModule(borrowing(RMSNorm, (norm.normalized_shape, eps), module, "weight"))
    if weight.dim() != 1 or not weight.is_floating_point():
        return None
    found = formula(module, weight.numel(), NORM_DTYPES)
    form = found and rms_norm_form(found.expression, name, weight.numel())
    if form is None:
        return None
    fields = tuple(weight.shape), *form
    if name == "weight":
        return LeafModule(borrowing(RMSNorm, fields, module, "weight"), dtypes=NORM_DTYPES)
    made = MadeParameters({"weight": ((module, name, False),)})
    return LeafModule(borrowing(RMSNorm, fields, made, "weight"), dtypes=NORM_DTYPES, made=made)


def norm_of(module: nn.Module) -> LeafModule | None:
    """What a norm is; None for a module that is none."""
    return _layer_norm(module) or _rms_norm(module)


def _identity(module: nn.Module) -> LeafModule | None:
    """Also a dropout, which draws nothing in evaluation. In training the module itself draws its mask, as torch does."""
    return LeafModule(Identity(), keeps_dtype=True) if runs(module, nn.Identity, nn.Dropout) else None


DTYPES = (*NORM_DTYPES, torch.float64)
"""Dtypes in which an activation has to be the same formula."""

KEEPING = {"relu", "silu", "gelu", "sigmoid", "tanh", "mul", "add"}
"""Functions that torch.autocast casts on no device."""


def _activation(module: nn.Module) -> LeafModule | None:
    if any(True for part in (module.parameters(), module.buffers(), module.children()) for _ in part):
        return None
    found = formula(module, 8, DTYPES)
    name = found and ACTIVATIONS.get(found.expression)
    if not found or not name:
        return None
    return LeafModule(UNGATED[name](), name, keeps_dtype=found.functions <= KEEPING, dtypes=DTYPES)


def _own(module: nn.Module) -> LeafModule | None:
    """An activation of opfuse, or one that is derived from it: the op that it is, with the spec that it has."""
    known = isinstance(module, activation.Activation) and type(module).forward is activation.Activation.forward
    name = next((name for name, cls in UNGATED.items() if type(module) is cls), "")
    return LeafModule(copy.deepcopy(module), name, keeps_dtype=True) if known and not module.num_extra_inputs else None  # type: ignore[arg-type]


LEAVES: tuple[Callable[[nn.Module], LeafModule | None], ...] = (_layer_norm, _rms_norm, _identity, _own, _activation)
"""What each makes of a module: its op with its parameters, None for one that it does not recognise. Products are not among them:
:func:`weight_of` recognises these, since several can become one.
"""


def leaf_of(module: nn.Module) -> LeafModule | None:
    """What ``module`` is, by the first of :data:`LEAVES` that recognises it."""
    return next((leaf for recognised in LEAVES if (leaf := recognised(module)) is not None), None)


def obstacle(module: nn.Module, *, called: bool = False) -> tuple[str, str] | None:
    """What keeps a module from being an op, and the cure; None: nothing. called: the module is still called, so its hooks
    run.
    """
    return next(_obstacles(module, called), None)


CALLS = ("__call__", CALL)
"""Methods by which a module runs its forward."""


def _obstacles(module: nn.Module, called: bool) -> Iterator[tuple[str, str]]:
    kind = type(module)
    if not called and has_hooks(module):
        yield "hooks of the module, which would not run", "register them on the module around it, or after unfuse_"
    if not called and any(getattr(kind, name) is not getattr(nn.Module, name) for name in CALLS):
        yield "a call of its own around its forward", "write it as a forward, or as a module around this one"
    if "forward" in vars(module):
        yield "a forward that was put in the place of its own", "convert the model before others replace its forward"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        yield "a matrix that nn.MultiheadAttention reads without calling the module", "write attention of nn.Linear modules"
    if is_parametrized(module):
        yield "a parametrization", "remove it first: torch.nn.utils.parametrize.remove_parametrizations"
    for name in ("weight", "bias"):
        if getattr(module, name, None) is not module._parameters.get(name):
            yield f"a {name} that is no parameter", "remove the weight norm, the pruning or the property that makes it"
    for name, value in module._parameters.items():
        if value is not None and is_foreign(value):
            yield f"a {name} that is {with_article(type(value).__name__)}", "convert the model before it is sharded"
