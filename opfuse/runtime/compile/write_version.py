"""Whether tensors in a graph of torch.compile were written since an earlier place in the graph.

Dynamo traces with tensors that have no values but count writes. Traced code cannot read that count, but it can read a size. So an
op returns a tensor whose one size is a number for the state of the tensors that it was given. No graph needs the tensor, and
compilers drop the op.

Some writes these tensors do not count: those to lists of tensors (``torch._foreach_add_``), by ops of other libraries, by kernels
of Triton. After a call of that kind in the graph all tensors have another state.
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
from opfuse.torch_private.compiler import detect_fake_mode, traced_graph
from opfuse.torch_private.dispatch import may_write


def write_version(tensors: Sequence[torch.Tensor]) -> int:
    """A number for the state of these tensors in the graph that is being traced.

    Equal numbers mean the same graph, the same tensors, and no write to any of them, or to a view of one, in between.
    """
    number: int = torch.ops.opfuse.write_version(tensors).shape[0]
    return number


def _stamp_fake(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The op as dynamo traces it. The same fake mode means the same graph."""
    known = _known.setdefault(getattr(tensors[0], "fake_mode", None) or detect_fake_mode(), {})
    state = _uncounted_writes(), *map(id, tensors), *versions(*tensors)
    return _sized(known.setdefault(state, next(_numbers)))


def _uncounted_writes() -> int:
    """How many calls the graph has so far that may write and that tensors without values do not count."""
    graph = traced_graph()
    if graph is None:  # another tracer, which reads no numbers
        return 0
    last, count = _counted.get(graph, (None, 0))
    coming = itertools.takewhile(lambda node: node is not last, reversed(graph.nodes))
    count += sum(1 for node in coming if node.op == "call_function" and may_write(node.target))
    _counted[graph] = next(iter(reversed(graph.nodes)), None), count
    return count


def _stamp_run(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The op in a graph that runs, where nobody reads the number any more."""
    return _sized(0)


def _sized(number: int) -> torch.Tensor:
    return torch.empty(number, dtype=torch.uint8, device="meta")


def _of_planes(op: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The op over the planes of quantized parameters, which count the writes."""
    parts = [tensor.record.tensors() if isinstance(tensor, QuantizedTensor) else (tensor,) for tensor in tensors]
    return op([*itertools.chain(*parts)])


_known: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], int]] = weakref.WeakKeyDictionary()
_counted: weakref.WeakKeyDictionary[Any, tuple[Any, int]] = weakref.WeakKeyDictionary()
"""By graph: its last node when somebody last counted, and the count."""
_numbers = itertools.count(1)

_LIBRARY: Any = torch.library.Library("opfuse", "FRAGMENT")
_LIBRARY.define("write_version(Tensor[] tensors) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("write_version", _stamp_run, "CompositeExplicitAutograd")
torch.library.register_fake("opfuse::write_version", _stamp_fake, lib=_LIBRARY)
HANDLERS[torch.ops.opfuse.write_version.default] = _of_planes
