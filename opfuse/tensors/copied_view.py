"""Views of a quantized tensor that no planes can express: copies of values, which nobody may write."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch

from opfuse.errors import QuantizedTensorError, describe
from opfuse.tensors.exchange import outputs
from opfuse.torch_private.dispatch import arguments_of
from opfuse.torch_private.operations import tree_map
from opfuse.torch_private.tensors import make_subclass, no_torch_function


class CopiedView(torch.Tensor):
    """``values`` as a view of the quantized tensor that they were decoded from.

    It is read like any tensor; operations return plain tensors, and views of it are such views again. Those that write raise
    QuantizedTensorError, because what they wrote would not reach the quantized tensor. A ``clone`` is a plain tensor.
    """

    __torch_function__ = no_torch_function
    _copied: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> CopiedView:
        view: CopiedView = make_subclass(cls, values)
        view._copied = values
        return view

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if written(cls, func, args, kwargs):
            wanted, got = "a tensor that holds its values", "a view of a QuantizedTensor, which is a copy"
            cure = "write to the whole: t[index] = value; or clone() the view"
            raise QuantizedTensorError(describe(f"{func}", wanted=wanted, got=got, cure=cure))
        result = func(*tree_map(_plain, args), **tree_map(_plain, kwargs))
        return copied_views(result) if func.is_view else result

    def numpy(self, *, force: bool = False) -> Any:
        """Values as an array that cannot be written either."""
        array = self.clone().numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """Python numbers, nested by dimension."""
        return self._copied.tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return deepcopy(self._copied, memo) if self.is_leaf else super().__deepcopy__(memo)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._copied.__reduce_ex__(protocol)


def copied_views(result: Any) -> Any:
    """``result`` of a view operation, its plain tensors as copied views."""
    return tree_map(lambda x: CopiedView(x) if type(x) is torch.Tensor else x, result)


def written(cls: type[torch.Tensor], func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors of ``cls`` that ``func`` writes to, by its schema or as a collective, each once."""
    found = {id(tensor): tensor for tensor in outputs(func, args) if isinstance(tensor, cls)}
    for position, argument in enumerate(arguments_of(func)):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, cls):
                found[id(tensor)] = tensor
    return list(found.values())


def _plain(x: Any) -> Any:
    return x._copied if isinstance(x, CopiedView) else x
