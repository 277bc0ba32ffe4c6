"""Modules that have an op as their counterpart: each function of LEAVES recognises a kind of module and makes its op.

A module is recognised by what it computes: by its forward if that is torch's own, by its trace, or by its values, and never by
the name of its class.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from opfuse.convert.chain import Tracer, changes_modes
from opfuse.convert.members import has_hooks
from opfuse.convert.probe import UNGATED, activation_of_module, found_in_both_modes, rms_norm_of
from opfuse.convert.weights import Weight, borrowing
from opfuse.core.operation import BasicOperation
from opfuse.core.signature import is_foreign
from opfuse.ops import activation
from opfuse.ops.norm import LayerNorm, RMSNorm
from opfuse.ops.pointwise import Dropout
from opfuse.ops.structure import Identity

GATED: dict[str, type[activation.GatedActivation]] = {
    "gelu": activation.GEGLU,
    "gelu_erf": activation.GEGLUErf,
    "qgelu": activation.QGEGLU,
    "silu": activation.SwiGLU,
    "relu": activation.ReGLU,
    "srelu": activation.SReGLU,
}
"""The unit that an activation gates, by the name of the activation."""


def runs(module: nn.Module, *classes: type[nn.Module]) -> bool:
    """Whether the forward of ``module`` is that of one of ``classes``, whatever its own class is called."""
    return any(isinstance(module, cls) and type(module).forward is cls.forward for cls in classes)


def weight_of(module: nn.Module) -> Weight | None:
    """What a module multiplies with, if it is nothing but a product and a bias."""
    if runs(module, nn.Linear):
        linear: nn.Linear = module  # type: ignore[assignment]
        return Weight(module, linear.in_features, linear.out_features)
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or module._modules or not module._parameters.keys() <= {"weight", "bias"}:
        return None
    if not found_in_both_modes(module, lambda: _is_transposed_product(module)):
        return None
    return Weight(module, weight.shape[0], weight.shape[1], transposed=True)


def why_refused(module: nn.Module) -> tuple[str, str, str]:
    """Of a module with matrices that :func:`weight_of` does not know: what it would have to be, what it is, and the cure."""
    kind, named = type(module).__name__, {name: p.dim() for name, p in module._parameters.items() if p is not None}
    if named.get("weight") == 2 and named.keys() <= {"weight", "bias"} and not module._modules:
        got = f"{kind}, whose forward is neither that of nn.Linear nor torch.addmm(bias, x, weight)"
        return "a plain product", got, "call an nn.Linear, and have a module around it do what else that forward does"
    got = f"{kind}, whose own {', '.join(name for name, dim in named.items() if dim > 1)} no linear layer holds"
    return "linear layers", got, "where it multiplies by them, write that of nn.Linear and activations, or of opfuse.ops"


VIEWS = ("view", "reshape")
"""What a forward may do to a tensor beside its product."""


def _is_transposed_product(module: nn.Module) -> bool:
    """Whether the forward is ``addmm(bias, x, weight)``, views around it, and nothing else: y = x W + b for W (in, out)."""
    try:
        with torch.enable_grad():
            graph = Tracer().trace(module)
        nodes = list(graph.nodes)
        alone = not changes_modes(graph) and not any("stored" in node.meta for node in nodes)
        return alone and _is_addmm(nodes) and _keeps_rows(module)
    except Exception:  # of a stranger's code, on values that are none
        return False


def _is_addmm(nodes: Sequence[fx.Node]) -> bool:
    *_, output = nodes
    product = _source(output.args[0])
    if product.target is not torch.addmm or product.kwargs or [str(arg) for arg in product.args[::2]] != ["bias", "weight"]:
        return False
    x, sizes = _source(product.args[1]), set[fx.Node]()
    for node in nodes:
        if _is_size(node, x, sizes):
            sizes.add(node)
    known = {x, product, *_views(output.args[0]), *_views(product.args[1]), *sizes, output}
    return x.op == "placeholder" and all(node in known or node.op == "get_attr" for node in nodes)


def _is_size(node: fx.Node, x: fx.Node, sizes: Collection[fx.Node]) -> bool:
    """Whether a node is the size of ``x``, a part of a size, or one beside another."""
    given = node.all_input_nodes
    if node.target == "size" or (node.target is getattr and node.args[1] == "shape"):
        return given == [x]
    return node.target in (operator.getitem, operator.add) and bool(given) and all(each in sizes for each in given)


def _views(value: Any) -> Iterator[fx.Node]:
    """The views on the way back to what they show."""
    while value.op == "call_method" and value.target in VIEWS:
        yield value
        value = value.args[0]


def _source(value: Any) -> Any:
    *_, last = (value, *(node.args[0] for node in _views(value)))
    return last


def _keeps_rows(module: nn.Module) -> bool:
    """Whether results have the leading dimensions of the input."""
    parameters = {name: p.to("meta") for name, p in module._parameters.items() if p is not None}
    weight, leading = parameters["weight"], (3, 5)
    x = weight.new_empty(*leading, weight.shape[0])
    result: torch.Tensor = torch.func.functional_call(module, parameters, (x,))
    return result.shape == (*leading, weight.shape[1])


def _layer_norm(module: nn.Module) -> BasicOperation | None:
    if not runs(module, nn.LayerNorm) or module._parameters.get("weight") is None or module._parameters.get("bias") is None:
        return None
    norm: nn.LayerNorm = module  # type: ignore[assignment]
    return borrowing(LayerNorm, (norm.normalized_shape, norm.eps), module, "weight", "bias")


def _rms_norm(module: nn.Module) -> BasicOperation | None:
    """One of torch, and any module with a weight that computes the same."""
    weight = module._parameters.get("weight")
    if weight is None:
        return None
    if runs(module, nn.RMSNorm):
        norm: nn.RMSNorm = module  # type: ignore[assignment]
        computed = torch.promote_types(weight.dtype, torch.float32)  # by torch, whose default is the eps of that
        eps = torch.finfo(computed).eps if norm.eps is None else norm.eps
        return borrowing(RMSNorm, (norm.normalized_shape, eps), module, "weight")
    found = rms_norm_of(module)
    return None if found is None else borrowing(RMSNorm, (tuple(weight.shape), *found), module, "weight")


def norm_of(module: nn.Module) -> BasicOperation | None:
    """The op that a norm is; None for a module that is none."""
    return _layer_norm(module) or _rms_norm(module)


def _dropout(module: nn.Module) -> BasicOperation | None:
    if not runs(module, nn.Dropout):
        return None
    p: float = module.p  # type: ignore[assignment]
    return Identity() if p == 0 else Dropout(p) if p < 1 else None


def _identity(module: nn.Module) -> BasicOperation | None:
    return Identity() if runs(module, nn.Identity) else None


def _activation(module: nn.Module) -> BasicOperation | None:
    name = activation_of_module(module)
    return None if name is None else UNGATED[name]()


def _own(module: nn.Module) -> BasicOperation | None:
    """An activation of opfuse, or one that is derived from it: the op that it is, with the spec that it has."""
    known = isinstance(module, activation.Activation) and type(module).forward is activation.Activation.forward
    return copy.deepcopy(module) if known and not module.num_extra_inputs else None  # type: ignore[return-value]


LEAVES: tuple[Callable[[nn.Module], BasicOperation | None], ...] = (
    _layer_norm,
    _rms_norm,
    _dropout,
    _identity,
    _own,
    _activation,
)
"""What each makes of a module: an op with its parameters, None for one that it does not recognise. Products are not among them:
:func:`weight_of` recognises these, since several can become one.
"""


def op_of(module: nn.Module) -> BasicOperation | None:
    """The op that ``module`` is, by the first of :data:`LEAVES` that recognises it."""
    return next((op for recognised in LEAVES if (op := recognised(module)) is not None), None)


def obstacle(module: nn.Module, *, called: bool = False) -> tuple[str, str] | None:
    """What keeps a module from being an op, and the cure; None: nothing. called: the module is still called, so its hooks
    run.
    """
    return next(_obstacles(module, called), None)


CALLS = ("__call__", "_call_impl")
"""Methods by which a module runs its forward."""


def _obstacles(module: nn.Module, called: bool) -> Iterator[tuple[str, str]]:
    kind = type(module)
    if not called and has_hooks(module):
        yield "hooks of the module, which would not run", "register them on the module around it, or after unfuse_"
    if not called and any(getattr(kind, name) is not getattr(nn.Module, name) for name in CALLS):
        yield "a call of its own around its forward", "write it as a forward, or as a module around this one"
    if "forward" in vars(module):
        yield "a forward of this very object", "convert the model before others replace its forward"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        yield "a matrix that nn.MultiheadAttention reads without calling the module", "write attention of nn.Linear modules"
    if is_parametrized(module):
        yield "a parametrization", "remove it first: torch.nn.utils.parametrize.remove_parametrizations"
    for name in ("weight", "bias"):
        if getattr(module, name, None) is not module._parameters.get(name):
            yield f"a {name} that is no parameter", "remove the weight norm, the pruning or the property that makes it"
    for name, value in module._parameters.items():
        if value is not None and is_foreign(value):
            yield f"{name} as a {type(value).__name__}", "convert the model before it is sharded"
