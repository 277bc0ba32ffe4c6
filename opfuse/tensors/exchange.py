"""Collectives of torch.distributed that write into quantized tensors.

A broadcast sends bytes, for all ranks have a tensor of one format. The others are refused: what they write is there when their
work is done, which is later than their call, and the cast of values that were decoded for it is no copy of what was sent.

In lists of lists, as scatter has for what it sends, torch's dispatcher does not look for tensors of a class of their own: a back
end would take the address of their values, and they have none. So these collectives are looked at before they are dispatched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch.utils._pytree import tree_leaves

from opfuse.errors import QuantizedTensorError, describe
from opfuse.tensors.planes import map_tensors
from opfuse.tensors.quantized import Quantized

_READERS = frozenset(("send", "barrier", "monitored_barrier_", "check_for_nan"))
"""Operations of ``torch.ops.c10d`` that do not write to their first argument; no schema there says which do."""


def outputs(func: Any, args: Sequence[Any]) -> list[Any]:
    """What a collective writes to; nothing for another operation."""
    writes = func.namespace == "c10d" and func.__name__.partition(".")[0] not in _READERS
    return tree_leaves(args[0]) if writes else []


def refuse(func: Any, target: torch.Tensor) -> NoReturn:
    """QuantizedTensorError for a collective that would write into ``target``."""
    wanted, got = "a plain tensor to write into", "one that lives quantized"
    cure = "let it write into a plain one, and copy_ that; broadcast sends the bytes of a quantized tensor"
    raise QuantizedTensorError(describe(f"{func} on {target!r}", wanted=wanted, got=got, cure=cure))


def broadcast(func: Any, tensors: Sequence[torch.Tensor], *rest: Any) -> Any:
    """The bytes of one rank on all. They are there when it returns."""
    if not all(isinstance(each, Quantized) for each in tensors):
        return NotImplemented
    work = None
    for target in cast(Sequence[Quantized], tensors):
        target.check_writable("broadcast", casting=False)
        received = map_tensors(target.record, lambda held: held.clone(memory_format=torch.contiguous_format))
        for part in received.tensors():
            _, work = func([part.reshape(-1).view(torch.uint8)], *rest)
            torch._C._distributed_c10d.Work.unbox(work).wait()
        target.copy_(target.over(received))
    return tensors, work


_NESTED = ("scatter_", "reduce_scatter_", "gather_", "allgather_", "allgather_coalesced_")
"""Operations of ``torch.ops.c10d`` with a list of lists among their first two arguments."""


def _run_nested(func: Callable[..., Any], *args: Any) -> Any:
    """The collective; QuantizedTensorError if a tensor in its list of lists lives quantized."""
    for inner in (inner for outer in args[:2] for inner in outer if isinstance(inner, (list, tuple))):
        for tensor in inner:
            if isinstance(tensor, Quantized):
                wanted, got = "plain tensors in its lists", f"{tensor!r}"
                cure = "give it dequantize() of what it sends, and plain tensors to write into; broadcast sends the bytes"
                raise QuantizedTensorError(describe(str(func), wanted=wanted, got=got, cure=cure))
    with torch._C._AutoDispatchBelowAutograd():
        return func(*args)


if torch.distributed.is_available():
    _LIBRARY: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    for _name in _NESTED:
        _LIBRARY.impl(_name, partial(_run_nested, getattr(torch.ops.c10d, _name).default), "Autograd")
