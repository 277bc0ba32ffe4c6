"""Operations on lists and trees of tensors, and those without a public name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opfuse.torch_private.names import private


def _copies(copy: Callable[..., Any]) -> bool:
    to = [torch.zeros(2), torch.zeros(3)]
    copy(to, [torch.ones(2), torch.ones(3)])
    return all(bool((each == 1).all()) for each in to)


copy_each: Callable[..., Any] = private(
    "torch._foreach_copy_",
    _copies,
    use="copying many tensors by one launch",
    breaks="weights that are cast together, and optimizers of quantized weights, would fail",
)
"""Copy a list of tensors into another list."""


def _zeroes(zero: Callable[..., Any]) -> bool:
    zero(given := [torch.ones(2), torch.ones(3)])
    return not any(bool(each.any()) for each in given)


zero_each: Callable[..., Any] = private(
    "torch._foreach_zero_", _zeroes, use="forgetting amaxes after an update", breaks="delayed scaling would fail"
)
"""Fill a list of tensors with zeros."""


def _stops(assert_true: Callable[[torch.Tensor, str], Any]) -> bool:
    assert_true(torch.tensor(True), "holds")
    try:
        assert_true(torch.tensor(False), "does not hold")
    except RuntimeError as error:
        return "does not hold" in str(error)
    return False


assert_on_device: Callable[[torch.Tensor, str], Any] = private(
    "torch._assert_async",
    _stops,
    use="checking split sizes that only the device knows",
    breaks="grouped products would fail, or read past the end of their operands",
)
"""Stop the device with a message if a value is false; the host does not wait."""


def _multiplies(product: Callable[..., torch.Tensor]) -> bool:
    names = [argument.name for argument in torch.ops.aten._scaled_mm_v2.default._schema.arguments]
    wanted = "self mat2 scale_a recipe_a swizzle_a scale_b recipe_b swizzle_b bias out_dtype contraction_dim use_fast_accum"
    return callable(product) and names == wanted.split()


scaled_mm_into: Callable[..., torch.Tensor] = private(
    "torch._scaled_mm_v2",
    _multiplies,
    use="products of quantized operands into memory that is there, as F.scaled_mm without an argument out",
    breaks="weight gradients that add to a buffer would fail",
)
"""``F.scaled_mm`` with lists of scales and the argument ``out``."""


def _maps(tree_map: Callable[..., Any]) -> bool:
    return bool(tree_map(lambda x: x + 1, {"a": [1, (2,)]}) == {"a": [2, (3,)]})


def _maps_only(tree_map: Callable[..., Any]) -> bool:
    return bool(tree_map(int, lambda x: x + 1, [1, ("a",)]) == [2, ("a",)])


tree_leaves: Callable[..., list[Any]] = private(
    "torch.utils._pytree.tree_leaves",
    lambda leaves: bool(leaves({"a": [1, (2, None)]}) == [1, 2, None]),
    use="finding tensors in nested arguments",
    breaks="tensors in lists and dictionaries would be missed",
)
"""What lists, tuples and dictionaries hold, in order."""

tree_map: Callable[..., Any] = private(
    "torch.utils._pytree.tree_map",
    _maps,
    use="replacing quantized tensors in nested arguments",
    breaks="operations on quantized tensors would fail",
)
"""The same structure over other leaves: ``tree_map(function, tree)``."""

tree_map_only: Callable[..., Any] = private(
    "torch.utils._pytree.tree_map_only",
    _maps_only,
    use="giving recorded operations the tensors of a later call",
    breaks="recorded calls could not be repeated",
)
"""The same, where a leaf is of a type: ``tree_map_only(type, function, tree)``."""
