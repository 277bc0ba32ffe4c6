"""The dispatcher: modes, keys, transforms of torch.func, and schemas of operations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opfuse.torch_private.names import attribute, convention, private


class UncompiledMode(TorchDispatchMode):
    """A mode whose method torch does not wrap, which would import torch.compile at its first call and take seconds.

    Nothing is lost: what opfuse runs inside of compiled code is a custom op, where dynamo does not look.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _NotedOperations(UncompiledMode):
    """Notes the operations that it sees."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def _sees_operations() -> bool:
    with _NotedOperations() as mode:
        torch.zeros(1).exp()
    return bool(mode.seen[-1] == "aten.exp.default")


convention(
    "torch.utils._python_dispatch.TorchDispatchMode",
    _sees_operations,
    use="recording what a call does",
    breaks="no call would be recorded, and each would be interpreted",
)


def _is_plain() -> bool:
    return _NotedOperations.__torch_dispatch__.__qualname__.startswith("_NotedOperations.") and not hasattr(
        _NotedOperations.__torch_dispatch__, "__wrapped__"
    )


convention(
    "torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo",
    _is_plain,
    use="recording calls without importing torch.compile",
    breaks="the first recorded call would take seconds",
)


def _counts_modes(count: Callable[[], int]) -> bool:
    with _NotedOperations():
        inside = count()
    return count() == 0 and inside == 1


active_modes: Callable[[], int] = private(
    "torch._C._len_torch_dispatch_stack",
    _counts_modes,
    use="interpreting calls that a mode of torch's dispatcher follows",
    breaks="such modes would not see the operations of a repeated call",
)
"""How many modes of torch's dispatcher follow operations."""


def _hides_modes(disable: Callable[[], Any]) -> bool:
    with _NotedOperations() as mode, disable():
        torch.zeros(1)
    return not mode.seen


without_modes: Callable[[], Any] = private(
    "torch.utils._python_dispatch._disable_current_modes",
    _hides_modes,
    use="making plain tensors while torch traces",
    breaks="tickets of pipelines would have no values, and calls could not be compiled",
)
"""A context in which no mode follows operations."""


def _sees_fake_mode(_: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        inside = in_fake_mode()
    return inside and not in_fake_mode()


_mode: Callable[[Any], Any] = private(
    "torch._C._get_dispatch_mode",
    _sees_fake_mode,
    use="launching no kernel on tensors without memory",
    breaks="kernels would be launched with addresses that do not exist",
    slow=True,
)
_FAKE: Any = private(
    "torch._C._TorchDispatchModeKey.FAKE",
    _sees_fake_mode,
    use="launching no kernel on tensors without memory",
    breaks="kernels would be launched with addresses that do not exist",
    slow=True,
)


def in_fake_mode() -> bool:
    """Whether operations make tensors without memory."""
    return _mode(_FAKE) is not None


# -- torch.func ------------------------------------------------------------------------------------------------------------------


def _in_vmap(read: Callable[[torch.Tensor], Any]) -> Any:
    seen: list[Any] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append(read(x))
        return x

    torch.func.vmap(note)(torch.zeros(2))
    return seen[0]


in_transform: Callable[[], bool] = private(
    "torch._C._are_functorch_transforms_active",
    lambda active: not active() and _in_vmap(lambda _: active()),
    use="refusing transforms of torch.func in words",
    breaks="vmap and grad of a pipeline would compute something else",
)
"""Whether a transform of torch.func runs (grad, vmap, jvp, ...)."""

is_transformed: Callable[[torch.Tensor], bool] = private(
    "torch._C._functorch.is_functorch_wrapped_tensor",
    lambda wrapped: not wrapped(torch.zeros(2)) and _in_vmap(wrapped),
    use="refusing tensors of torch.func in words",
    breaks="vmap and grad of a pipeline would compute something else",
)
"""Whether a transform of torch.func wraps a tensor."""


def _in_batched_backward(batched: Callable[[torch.Tensor], bool]) -> bool:
    seen: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(batched(grad)))
    torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True)
    return seen == [True] and not batched(x)


is_batched_gradient: Callable[[torch.Tensor], bool] = private(
    "torch._C._functorch.is_legacy_batchedtensor",
    _in_batched_backward,
    use="refusing gradients that are many in one",
    breaks="is_grads_batched=True would compute something else",
)
"""Whether a gradient is one of ``is_grads_batched=True``."""


# -- keys ------------------------------------------------------------------------------------------------------------------------


def _is_off(below: Callable[[], Any]) -> bool:
    x = torch.zeros(2, requires_grad=True)
    with below():
        inside = x * 2
    return not inside.requires_grad and (x * 2).requires_grad


below_autograd: Callable[[], Any] = private(
    "torch._C._AutoDispatchBelowAutograd",
    _is_off,
    use="handing out results of a compiled call as tensors of their own",
    breaks="results could not be changed in place",
)
"""A context in which autograd is off, so that a detached tensor is no view of the original."""

_AUTOGRAD_KEYS = ("AutogradFunctionality", "AutogradOther", "AutogradCPU", "AutogradCUDA")


def _records_again(_: Any) -> bool:
    x = torch.zeros(2, requires_grad=True)
    with below_autograd():
        with seen_by_autograd():
            inside = (x * 2).requires_grad
        outside = (x * 2).requires_grad
    return inside and not outside


_use = {
    "use": "computing gradients inside of an operation of a compiled graph",
    "breaks": "compiled calls would have no backward pass",
}
_preserved: Callable[[], Any] = private("torch._C._PreserveDispatchKeyGuard", _records_again, **_use)
_exclude: Callable[[Any, bool], None] = private("torch._C._dispatch_tls_set_dispatch_key_excluded", _records_again, **_use)


@contextlib.contextmanager
def seen_by_autograd() -> Iterator[None]:
    """Have autograd record torch's operations inside of an operation, where it is off."""
    with _preserved():
        for name in _AUTOGRAD_KEYS:
            _exclude(getattr(torch._C.DispatchKey, name), False)
        yield


def _orders_keys(after: Callable[[Any], Any]) -> bool:
    keys = after(torch._C.DispatchKey.BackendSelect)
    return bool(keys.has(torch._C.DispatchKey.CPU)) and not keys.has(torch._C.DispatchKey.AutogradCPU)


keys_after: Callable[[Any], Any] = private(
    "torch._C._dispatch_keyset_full_after",
    _orders_keys,
    use="finding quantized tensors in lists that a collective is given",
    breaks="collectives over lists of quantized tensors would fail",
)
"""The dispatch keys that come after one."""

DispatchKey: Any = private(
    "torch._C.DispatchKey",
    lambda keys: all(hasattr(keys, name) for name in ("BackendSelect", *_AUTOGRAD_KEYS)),
    use="naming the kernels of an operation that are skipped",
    breaks="collectives and compiled calls would fail",
)

# -- operations ------------------------------------------------------------------------------------------------------------------

OpOverload: Any = private(
    "torch._ops.OpOverload",
    lambda kind: isinstance(torch.ops.aten.add.Tensor, kind) and not isinstance(torch.ops.aten.add, kind),
    use="finding writes in a graph of torch.compile",
    breaks="modules that share a product might read an input before it is written",
)
OpOverloadPacket: Any = private(
    "torch._ops.OpOverloadPacket",
    lambda kind: isinstance(torch.ops.aten.add, kind) and not isinstance(torch.ops.aten.add.Tensor, kind),
    use="finding writes in a graph of torch.compile",
    breaks="modules that share a product might read an input before it is written",
)
HigherOrderOperator: Any = private(
    "torch._ops.HigherOrderOperator",
    lambda kind: isinstance(torch.ops.higher_order.cond, kind),
    use="finding writes in a graph of torch.compile",
    breaks="modules that share a product might read an input before it is written",
    slow=True,
)


def _describes(read: Callable[[Any], Any]) -> bool:
    schema, in_place = read(torch.ops.aten.addmm.default), read(torch.ops.aten.add_.Tensor)
    names = [argument.name for argument in schema.arguments]
    writes = [argument.is_write for argument in in_place.arguments]
    view = read(torch.ops.aten.view.default).arguments[0]
    said = schema.name == "aten::addmm" and names[:3] == ["self", "mat1", "mat2"] and not schema.is_mutable
    return said and bool(in_place.is_mutable and writes[0] and view.alias_info is not None)


schema_of: Callable[[Any], Any] = attribute(
    "torch._ops.OpOverload._schema",
    _describes,
    use="telling which arguments an operation reads, writes and returns",
    breaks="recorded calls would miss writes, and operations on quantized tensors their defaults",
)
"""The schema of an operation: its name, its arguments, and whether it writes."""

schemas_of: Callable[[Any], dict[str, Any]] = attribute(
    "torch._ops.OpOverloadPacket._schemas",
    lambda read: any(each.is_mutable for each in read(torch.ops.aten.add).values()),
    use="finding writes in a graph of torch.compile",
    breaks="modules that share a product might read an input before it is written",
)
"""The schemas of the overloads of an operation, by name."""


def may_write(operation: Any) -> bool:
    """Whether a function in a graph of torch.compile may write to its arguments."""
    if isinstance(operation, OpOverloadPacket):
        return any(each.is_mutable for each in schemas_of(operation).values())
    if isinstance(operation, OpOverload):
        return bool(schema_of(operation).is_mutable)
    return isinstance(operation, HigherOrderOperator) or operation.__name__.endswith("_")


def arguments_of(operation: Any) -> Sequence[Any]:
    """The arguments of an operation, as its schema declares them."""
    arguments: Sequence[Any] = schema_of(operation).arguments
    return arguments


def _names_grad_mode() -> bool:
    from torch.overrides import TorchFunctionMode

    seen: list[str] = []

    class FunctionNames(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with FunctionNames(), torch.no_grad():
        pass
    return set(seen) == {"_set_grad_enabled"}


GRAD_MODE = convention(
    "torch._C._set_grad_enabled",
    _names_grad_mode,
    use="leaving torch.no_grad() out of the forward that fuse_ reads",
    breaks="models that use it would not be converted",
)
"""The name of the function by which ``torch.no_grad()`` and the like set their mode."""
