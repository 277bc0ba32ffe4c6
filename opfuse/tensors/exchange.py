"""Collectives of torch.distributed over quantized tensors.

Collectives that read a quantized tensor read its values, as any operation does. A broadcast sends bytes, for all ranks have a
tensor of one format. Others that write into a quantized tensor are refused: they write decoded values after their call has
returned, and casting these again would not give what was sent. A rank that refuses still takes part, with plain tensors: it may
be the only one that refuses, and the others would wait for it.

torch's dispatcher does not look for tensor subclasses in lists of lists, such as those that scatter sends: a back end would take
the address of their values, and they have none. So these collectives are checked before they are dispatched, from the first
quantized tensor in the process on: the check takes longer than a small collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NoReturn, cast

import torch

from opfuse.errors import QuantizedTensorError, describe
from opfuse.tensors.planes import map_tensors, with_formats
from opfuse.tensors.quantized import Quantized
from opfuse.torch_private.dispatch import DispatchKey, keys_after
from opfuse.torch_private.operations import tree_leaves, tree_map

_READERS = frozenset(("send", "barrier", "monitored_barrier_", "check_for_nan"))
"""Operations of ``torch.ops.c10d`` that do not write to their first argument; no schema there says which do."""


def outputs(func: Any, args: Sequence[Any]) -> list[Any]:
    """What a collective writes to; nothing for another operation."""
    writes = func.namespace == "c10d" and func.__name__.partition(".")[0] not in _READERS
    return tree_leaves(args[0]) if writes else []


def refuse(func: Any, run: Callable[..., Any], args: Sequence[Any], target: torch.Tensor) -> NoReturn:
    """QuantizedTensorError for a collective that would write into ``target``, once this rank has taken part by ``run``."""
    for made in tree_leaves(run(*tree_map(_copied_values, tuple(args)))):
        if isinstance(made, torch.ScriptObject):
            _wait(made)
    wanted, got = "a plain tensor to write into", "one that lives quantized"
    cure = "let it write into a plain one, and copy_ that; broadcast sends the bytes of a quantized tensor"
    raise QuantizedTensorError(describe(f"{func} on {target!r}", wanted=wanted, got=got, cure=cure))


def _wait(boxed: Any) -> None:
    """Wait for a collective. One that NCCL ran on the current stream has no work to wait for."""
    work = torch.distributed.Work.unbox(boxed)
    if work is not None:
        work.wait()


def _copied_values(x: Any) -> Any:
    """A copy of the values of a quantized tensor, which may be written."""
    return x.dequantize().clone() if isinstance(x, Quantized) else x


def _values(x: Any) -> Any:
    """The values of a quantized tensor, to be read."""
    return x.dequantize() if isinstance(x, Quantized) else x


def broadcast(func: Any, tensors: Sequence[torch.Tensor], *rest: Any) -> Any:
    """The bytes of one rank on all. They are there when it returns."""
    if not all(isinstance(tensor, Quantized) for tensor in tensors):
        return NotImplemented
    work = None
    for target in cast(Sequence[Quantized], tensors):
        target.check_writable("broadcast", casting=False)
        record = with_formats(target.record, {})  # what this rank knows of its own values says nothing of those that come
        received = map_tensors(record, lambda held: held.clone(memory_format=torch.contiguous_format))
        for part in received.tensors():
            _, work = func([part.reshape(-1).view(torch.uint8)], *rest)
            _wait(work)
        target.copy_(target.over(received))
    return tensors, work


_NESTED = ("scatter_", "reduce_scatter_", "gather_", "allgather_", "allgather_coalesced_")
"""Operations of ``torch.ops.c10d`` that read or write a list of lists: their first argument is written, their second one read."""


def _run_nested(func: Any, keys: Any, written: Sequence[Any], read: Sequence[Any], *rest: Any) -> Any:
    """The collective over values; QuantizedTensorError if one of ``written`` lives quantized."""
    run = partial(func.redispatch, keys & _BACK_ENDS)
    target = next(_quantized(written), None)
    if target is not None:
        refuse(func, run, (written, read, *rest), target)
    return run(written, tree_map(_values, read) if any(True for _ in _quantized(read)) else read, *rest)


def _quantized(lists: Sequence[Any]) -> Iterator[Quantized]:
    """The quantized tensors in a list of tensors, or of lists of tensors."""
    for each in lists:
        for tensor in each if isinstance(each, (list, tuple)) else (each,):
            if isinstance(tensor, Quantized):
                yield tensor


_BACK_ENDS = keys_after(DispatchKey.BackendSelect)
"""The dispatch keys after BackendSelect, the last one that all calls have, in inference mode too."""


@cache
def register_nested_lists() -> None:
    """Have collectives find quantized tensors in lists of lists, from now on."""
    if torch.distributed.is_available():
        for name in _NESTED:
            _library().impl(name, partial(_run_nested, getattr(torch.ops.c10d, name).default), "BackendSelect", with_keyset=True)


@cache
def _library() -> Any:
    """Holds the registrations: they end with it."""
    return torch.library.Library("c10d", "IMPL")
