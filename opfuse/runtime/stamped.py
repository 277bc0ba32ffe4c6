"""Whether tensors in a graph of torch.compile were written since an earlier place in the graph.

Dynamo traces with tensors that have no values but count writes. Traced code cannot read that count, but it can read a size. So an
op returns a tensor whose one size is a number for the state of the tensors that it was given. No graph needs the tensor, and
compilers drop the op.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from opfuse.core.context import versions
from opfuse.tensors.dispatch import HANDLERS
from opfuse.tensors.tensor import QuantizedTensor


def stamp(tensors: Sequence[torch.Tensor]) -> int:
    """A number for the state of these tensors in the graph that is being traced.

    Equal numbers mean the same graph, the same tensors, and no write to any of them, or to a view of one, in between.
    """
    number: int = torch.ops.opfuse.stamp(tensors).shape[0]
    return number


def _stamp_fake(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The op as dynamo traces it. The same fake mode means the same graph."""
    known = _known.setdefault(getattr(tensors[0], "fake_mode", None) or torch._guards.detect_fake_mode(), {})
    state = *map(id, tensors), *versions(*tensors)
    return _sized(known.setdefault(state, next(_numbers)))


def _stamp_run(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The op in a graph that runs, where nobody reads the number any more."""
    return _sized(0)


def _sized(number: int) -> torch.Tensor:
    return torch.empty(number, dtype=torch.uint8, device="meta")


def _of_planes(op: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The op over the planes of quantized parameters, which count the writes."""
    parts = [each.record.tensors() if isinstance(each, QuantizedTensor) else (each,) for each in tensors]
    return op([*itertools.chain(*parts)])


_known: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], int]] = weakref.WeakKeyDictionary()
_numbers = itertools.count(1)

_LIBRARY: Any = torch.library.Library("opfuse", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("stamp(Tensor[] tensors) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("stamp", _stamp_run, "CompositeExplicitAutograd")
torch.library.register_fake("opfuse::stamp", _stamp_fake, lib=_LIBRARY)
HANDLERS[torch.ops.opfuse.stamp.default] = _of_planes
