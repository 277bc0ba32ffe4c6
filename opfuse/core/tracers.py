"""What follows a call instead of running it: torch.compile, torch.export, jit, fx, torch.func, forward-mode AD.

A pipeline is no part of another graph: its plans come from values of this process, casts keep state, a backward pass is written
by hand. In a graph of torch.compile it is one op (``runtime/compile/custom_op.py``), or a graph break where it cannot be;
everything else is refused. On the way of a call stand cheap flags alone.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, Self
from zlib import crc32

import torch
from torch import nn
from torch.autograd import forward_ad

from opfuse.errors import UnsupportedError, describe
from opfuse.sources import class_code, package_code
from opfuse.torch_private.autograd import in_forward_mode, is_followed
from opfuse.torch_private.compiler import break_graph as break_graph_because
from opfuse.torch_private.compiler import (
    compiled_autograd,
    constant_when_traced,
    frame_callback,
    in_body,
    in_export,
    in_fullgraph,
)
from opfuse.torch_private.dispatch import is_batched_gradient, is_transformed, without_modes

WHY = "opfuse runs its own plans: a call is no op of a graph of torch.compile with "
"""How the reason of a graph break begins."""

_TORCH = "rebuild it of torch.nn modules, which load its state_dict"


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


_enrolled: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers, _sites = itertools.count(1), itertools.count(1)


def enroll(thing: Any) -> torch.Tensor:
    """A ticket by which a graph knows an object of this process: an int64 tensor () that holds the object's number.

    Dynamo treats a number or a name as a constant and compiles anew for each object; a tensor is an input of the graph.
    """
    number = next(_numbers)
    _enrolled[number] = thing
    with torch.inference_mode(False), without_modes():
        return torch.tensor(number, dtype=torch.int64, device="cpu")


def enrolled(number: int) -> Any:
    """The object of that number; UnsupportedError if there is none."""
    thing = _enrolled.get(number)
    if thing is None:
        got, cure = "a graph that outlived it", "compile the model anew"
        _refuse(f"pipeline {number} in a graph of torch.compile", "a model that is alive", got, cure)
    return thing


def all_enrolled() -> list[Any]:
    """The objects that are alive, oldest first."""
    # ``values()`` runs Python code, in which another thread, or a finalizer, may change what is iterated over.
    return [thing for ref in _enrolled.valuerefs() if (thing := ref()) is not None]


@constant_when_traced
def prepared(ticket: torch.Tensor, form: str = "") -> tuple[int, ...]:
    """Get the object of a ticket ready to be traced; returns its number, one for the place of the call, whether that is in a
    checkpoint, and those that keep files of compilers apart: for the object's code, or that of its ops, for its form, and for the
    code of this package.

    Dynamo runs this function while it traces, without looking into it. The result becomes a constant of the graph, guarded by
    ``form``: objects of one form share the graph. They all get ready now, since what is made later fails a guard.
    """
    number = int(ticket)
    thing = enrolled(number)
    thing.get_ready()
    for other in all_enrolled():
        if type(other) is type(thing) and hasattr(thing, "resembles") and other.resembles(thing):
            other.get_ready()
    code = getattr(thing, "code", None) or class_code(type(op) for op in getattr(thing, "ops", ()))
    return number, next(_sites), int(in_body()), code, crc32(form.encode()), package_code()


class Enrolled(nn.Module):
    """A module that graphs of torch.compile know by ``ticket``, which a copy has anew."""

    ticket: torch.Tensor

    def __new__(cls, *_: object, **__: object) -> Self:
        check_constructed_outside(cls.__name__)
        made = super().__new__(cls)
        made.__dict__["ticket"] = enroll(made)
        return made

    def get_ready(self) -> Any:
        """Make what dynamo reads but must not follow the making of."""

    def resembles(self, other: Any) -> bool:
        """Whether a graph that was made for ``other``, of the same class, may do for this one."""
        mine, others = self.__dict__.get("spec"), other.__dict__.get("spec")
        return bool(mine == others)


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
