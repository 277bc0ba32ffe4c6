"""Tensors: their memory, their views and their writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opfuse.torch_private.names import attribute, private


def _counts(read: Callable[[Tensor], int]) -> bool:
    x = torch.zeros(2)
    view, before = x[1:], read(x)
    x.add_(1)
    by_itself = read(x)
    view.add_(1)
    x.sum()
    return before < by_itself < read(x) == read(view) == read(x.detach())


version_of: Callable[[Tensor], int] = attribute(
    "torch.Tensor._version",
    _counts,
    use="noticing writes to weights and to saved tensors",
    breaks="a cast of a weight would outlive the optimizer's step",
)
"""How often a tensor, its views and what is detached from it were written. RuntimeError for one made in inference mode."""


def _is_base(read: Callable[[Tensor], Tensor | None]) -> bool:
    x = torch.zeros(4)
    return read(x) is None and read(x[1:][1:]) is x and read(x.detach()) is None


base_of: Callable[[Tensor], Tensor | None] = attribute(
    "torch.Tensor._base",
    _is_base,
    use="telling views from tensors of their own",
    breaks="a result in new memory could not be changed in place",
)
"""The tensor of which this one is a view, as autograd sees it; None if of none."""


def _numbers_storages(read: Callable[[Any], int]) -> bool:
    x, other = torch.empty(2, device="meta"), torch.empty(2, device="meta")
    one, same, third = (read(each.untyped_storage()) for each in (x, x[1:], other))
    return one == same != third and read(x) != read(other)


number_of: Callable[[Any], int] = attribute(
    "torch.UntypedStorage._cdata",
    _numbers_storages,
    use="telling blocks of memory apart, also those without bytes",
    breaks="tensors that share memory would be kept, counted or written as if they were apart",
)
"""The number of a storage, or of a tensor itself, among all that are alive."""


def storage_number(tensor: Tensor) -> int:
    """The number of the memory that a tensor lies in, the same for all of its views."""
    return number_of(tensor.untyped_storage())


def _sees_aliases(share: Callable[[Tensor, Tensor], bool]) -> bool:
    x = torch.zeros(4)
    return share(x[:2], x[2:]) and not share(x, x.clone())


share_memory: Callable[[Tensor, Tensor], bool] = private(
    "torch._C._is_alias_of",
    _sees_aliases,
    use="telling whether two tensors lie in one block of memory",
    breaks="an output that shares memory with an input would be handed out as a tensor of its own",
)
"""Whether two tensors lie in one block of memory, whichever parts of it they are."""


class _SampleTensor(Tensor):
    """A class to try."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return NotImplemented


def _over_memory(make: Callable[..., Tensor]) -> bool:
    x = torch.zeros(2)
    made = make(_SampleTensor, x)
    return type(made) is _SampleTensor and made.data_ptr() == x.data_ptr()


make_subclass: Callable[..., Any] = private(
    "torch.Tensor._make_subclass",
    _over_memory,
    use="views of a quantized tensor that are copied",
    breaks="reshaping a quantized tensor would fail",
)
"""An object of a subclass over the memory of a tensor."""


def _without_memory(make: Callable[..., Tensor]) -> bool:
    made = make(_SampleTensor, (2, 3), dtype=torch.bfloat16, device=torch.device("cpu"), requires_grad=False)
    return type(made) is _SampleTensor and made.shape == (2, 3) and made.dtype == torch.bfloat16


make_wrapper_subclass: Callable[..., Any] = private(
    "torch.Tensor._make_wrapper_subclass",
    _without_memory,
    use="QuantizedTensor, which has a shape and a dtype but no memory of its own",
    breaks="no quantized tensor could be made",
)
"""An object of a subclass with a shape, a dtype and a device, and no memory."""


def _is_left_out(function: Any) -> bool:
    kind = type("_Plain", (Tensor,), {"__torch_function__": function})
    result: object = torch.zeros(2).as_subclass(kind) + 1
    return type(result) is Tensor


no_torch_function: Any = private(
    "torch._C._disabled_torch_function_impl",
    _is_left_out,
    use="tensor classes that handle operations and not functions",
    breaks="each function on a quantized tensor would run twice, or return another class",
)
"""The ``__torch_function__`` of a class that has none."""


def _by_device(fits: Callable[[Tensor, Tensor], bool]) -> bool:
    return fits(torch.zeros(2), torch.ones(3)) and not fits(torch.zeros(2), torch.zeros(2, device="meta"))


can_be_assigned: Callable[[Any, Any], bool] = private(
    "torch._has_compatible_shallow_copy_type",
    _by_device,
    use="moving quantized parameters between devices",
    breaks="module.to() would fail, or lose the hooks of a parameter",
)
"""Whether ``one.data = other`` is allowed."""


def _holds_hooks(name: str, register: str) -> Callable[[Callable[[Tensor], Any]], bool]:
    def check(read: Callable[[Tensor], Any]) -> bool:
        parameter, other = (torch.zeros(2, requires_grad=True) for _ in range(2))
        called: list[Any] = []
        getattr(parameter, register)(called.append)
        setattr(other, name, read(parameter))
        other.sum().backward()
        return bool(called)

    return check


_backward_hooks: Callable[[Tensor], Any] = attribute(
    "torch.Tensor._backward_hooks",
    _holds_hooks("_backward_hooks", "register_hook"),
    use="moving quantized parameters to another device with their hooks",
    breaks="hooks on gradients would be lost by module.to()",
)
_post_accumulate_hooks: Callable[[Tensor], Any] = attribute(
    "torch.Tensor._post_accumulate_grad_hooks",
    _holds_hooks("_post_accumulate_grad_hooks", "register_post_accumulate_grad_hook"),
    use="moving quantized parameters to another device with their hooks",
    breaks="optimizers that step in a hook would no longer step after module.to()",
)


def hooks_of(tensor: Tensor) -> tuple[Any, Any]:
    """The hooks of a leaf, for :func:`give_hooks`."""
    return _backward_hooks(tensor), _post_accumulate_hooks(tensor)


def give_hooks(tensor: Any, hooks: tuple[Any, Any]) -> None:
    """Put the hooks of one leaf onto another."""
    tensor._backward_hooks, tensor._post_accumulate_grad_hooks = hooks
