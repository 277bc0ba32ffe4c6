"""What follows a call instead of running it: torch.compile, torch.export, jit, fx, torch.func, forward-mode AD.

A pipeline is no part of another graph: its plans come from values of this process, casts keep state, a backward pass is written
by hand. In a graph of torch.compile it is one op (``runtime/compile/custom_op.py``), or a graph break where it cannot be;
everything else is refused. On the way of a call stand cheap flags alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from opfuse.errors import UnsupportedError, describe
from opfuse.torch_private.autograd import in_forward_mode, is_followed
from opfuse.torch_private.compiler import break_graph as break_graph_because
from opfuse.torch_private.compiler import (
    compiled_autograd,
    frame_callback,
    in_export,
    in_fullgraph,
)
from opfuse.torch_private.dispatch import is_batched_gradient, is_transformed

WHY = "opfuse runs its own plans: a call is no op of a graph of torch.compile with "
"""How the reason of a graph break begins."""

_TORCH = "opfuse.unfuse_ a converted model; rebuild a pipeline of torch.nn modules, which load its state_dict"


def check_followed(label: str, tensors: Iterable[object]) -> None:
    """UnsupportedError in torch.jit.trace, and if a transform of torch.func wraps one of ``tensors`` or it has a tangent."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        _refuse(label, "a call that runs", "torch.jit.trace, which would record one plan as constants", _TORCH)
    for tensor in (tensor for tensor in tensors if isinstance(tensor, torch.Tensor)):
        if is_transformed(tensor):
            cure = "use torch.autograd.grad or backward(), and a batch dimension in place of vmap"
            _refuse(label, "plain tensors", "one that a torch.func transform (grad, vmap, jvp, ...) wraps", cure)
        if in_forward_mode() and forward_ad.unpack_dual(tensor).tangent is not None:
            cure = "use torch.autograd.grad or backward(); a product with a Jacobian is a sum of rows of it"
            _refuse(label, "plain tensors", "a dual tensor of forward-mode AD", cure)


def any_transformed(values: Iterable[object]) -> bool:
    """Whether a transform of torch.func wraps one of ``values``, or it has a tangent."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)] if is_followed() else ()
    dual = in_forward_mode()
    return any(is_transformed(value) or (dual and forward_ad.unpack_dual(value).tangent is not None) for value in tensors)


def check_batched(label: str, grads: Iterable[torch.Tensor | None]) -> None:
    """UnsupportedError for gradients that are many in one: a backward pass keeps scales and amaxes, one of each a call."""
    for grad in grads:
        if grad is not None and (is_batched_gradient(grad) or is_transformed(grad)):
            cure = "ask for one gradient after another: is_grads_batched=False, vectorize=False"
            _refuse(label, "plain gradients", "some that a transform (vmap, is_grads_batched=True) wraps", cure)


def check_backward(label: str) -> None:
    """UnsupportedError where compiled autograd runs a backward pass: dynamo would follow that of an eager call for minutes."""
    module = compiled_autograd()
    if module is not None and (module.in_compiled_autograd_region or torch.compiler.is_compiling()):
        cure = "call backward() outside of it: torch.compile(model) has a backward pass in its graph without it"
        _refuse(f"backward of {label}", "a backward pass of autograd's engine", "compiled autograd", cure)


def check_proxy(label: str, x: object) -> None:
    """UnsupportedError for what torch.fx traces with."""
    if isinstance(x, torch.fx.Proxy):
        cure = "make the pipeline a leaf (override Tracer.is_leaf_module), or " + _TORCH
        _refuse(label, "a torch.Tensor", "a torch.fx.Proxy: symbolic tracing does not run a call", cure)


def check_exported(label: str) -> None:
    """UnsupportedError under torch.export."""
    if in_export():
        _refuse(label, "a call that runs", "torch.export", _TORCH)


def break_graph(why: str) -> None:
    """Under torch.compile, a graph break that says whose it is and why."""
    break_graph_because(WHY + why)


def outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which torch.compile calls and does not look into. Made when called for: importing dynamo takes a second."""
    made: Callable[..., Any] = torch.compiler.disable(function, reason=WHY.partition(":")[0])
    return made


def check_partial(label: str) -> None:
    """UnsupportedError if the caller was compiled with ``fullgraph=True``.

    torch refuses a graph break there, but not one that an earlier compilation of the same code has met: it runs what that made.
    """
    if in_fullgraph():
        _refuse(label, "a graph break", "torch.compile(fullgraph=True)", "compile with fullgraph=False")


MADE_BEFORE = "make it before, as in the constructor of your module, or in a function under torch.compiler.disable"
"""What to do about an op that compiled code makes."""


def check_constructed_outside(label: str) -> None:
    """UnsupportedError where code under torch.compile makes an op or a pipeline.

    Dynamo breaks its graph there and follows the constructor next, with an object that is yet to be made. One that has an
    attribute already, as these have their ticket, it takes for a module that is made, and fails inside.
    """
    if torch.compiler.is_compiling():
        break_graph(f"an op that is made in it; {MADE_BEFORE}")
    if callable(frame_callback()):
        _refuse(label, "to be made before compiled code runs", "a constructor in code under torch.compile", MADE_BEFORE)


def _refuse(label: str, wanted: str, got: str, cure: str) -> NoReturn:
    raise UnsupportedError(describe(label, wanted=wanted, got=got, cure=cure))
