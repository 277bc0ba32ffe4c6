"""What a call in a graph of torch.compile keeps for its backward pass, and how tensors enter and leave the op that it is."""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from opfuse.core.context import versions
from opfuse.kernels.engine.variants import VECTOR
from opfuse.recipes.counting import count_in, running_pass
from opfuse.runtime.compile.backward_tape import BackwardTape, Copies, MaybeGradients, check_unwritten, shares_memory
from opfuse.tensors.tensor import QuantizedTensor
from opfuse.torch_private.dispatch import below_autograd, seen_by_autograd
from opfuse.torch_private.tensors import base_of, share_memory


class SavedCall(ctypes.c_int64 * 1):  # type: ignore[misc]
    """What one call keeps for its backward pass, in an object that is also the memory of a one-element tensor, its token.

    backward: from the gradients of the outputs to those of the arguments that want one; True if it will be asked again.
    """

    backward: Callable[[MaybeGradients, bool], MaybeGradients]


_calls: weakref.WeakValueDictionary[int, SavedCall] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def saved_calls() -> int:
    """How many calls of compiled pipelines keep something for a backward pass."""
    return len(_calls)


def token_of(call: SavedCall) -> torch.Tensor:
    """The token of a call, int64 (1,). Its memory is ``call`` itself, which so lives as long as any tensor over that memory."""
    call[0] = next(_numbers)
    _calls[call[0]] = call
    return torch.frombuffer(call, dtype=torch.int64)


def saved_call_of(token: torch.Tensor) -> SavedCall | None:
    """The call of a token; None for a copy of a token that is gone."""
    return _calls.get(int(token))


class SavedTensor(NamedTuple):
    """A tensor that an op saved, and its version count, which autograd does not check under hooks."""

    tensor: torch.Tensor
    writes: list[int]

    def unpacked(self) -> torch.Tensor:
        """The tensor, for autograd's hook. SavedTensorError if it was written since."""
        check_unwritten([self.tensor], self.writes)
        return self.tensor


class SavedTensorPacker:
    """Keeps what a call saves; of tensors that share memory with ``given``, a copy.

    takes_blocks: it may get blocks of memory in place of the tensors that lie in them.
    """

    takes_blocks = True

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        self.saved: list[torch.Tensor] = []
        self._copies = Copies(given)

    def pack(self, tensor: torch.Tensor) -> SavedTensor:
        """Keep a tensor, as autograd's hook."""
        copy = self._copies.unshared(tensor)
        self.saved.append(copy)
        return SavedTensor(copy, versions(copy))


def _overlaps(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    """Whether ``tensor`` shares a byte with one of ``others``."""
    if not shares_memory(tensor, others):
        return False
    start, end = _extent(tensor)
    extents = [_extent(other) for other in others if share_memory(tensor, other)]
    return any(start < other_end and other_start < end for other_start, other_end in extents)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of the first byte of a tensor, and the one behind its last byte."""
    start = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return start, start + (last + 1) * tensor.element_size() if tensor.numel() else start


def apart(results: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``results``, copied where they share bytes with ``others`` or with each other: a compiler may overwrite each of them.

    Several may be parts of one block of memory, if each begins at an address from which kernels of a compiler can load vectors.
    """
    occupied, separate = [*others], list[torch.Tensor]()
    for result in results:
        whole = result
        if base_of(whole) is not None or whole.requires_grad or not whole.is_contiguous():
            with below_autograd():
                whole = whole.detach().contiguous()
        if whole.data_ptr() % VECTOR or _overlaps(whole, occupied):
            with below_autograd():
                whole = whole.clone()
        occupied.append(whole)
        separate.append(whole)
    return separate


# -- a call inside of the op ---------------------------------------------------------------------------------------------------


class CallInside:
    """One call inside of the op. Its pipeline chooses what records it for the backward pass: a tape, or autograd.

    given: the inputs. parameters: those of the pipeline. wanted: for each of both, whether a gradient is wanted. trains: whether
    any is. saved_call: what the call keeps.
    """

    def __init__(self, given: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], wanted: Sequence[bool]) -> None:
        self.given, self.parameters, self.wanted = given, parameters, wanted
        self.trains = any(wanted)
        self.saved_call = SavedCall()
        self._tape: BackwardTape | None = None
        self._packer = SavedTensorPacker(given)

    @property
    def saved(self) -> Sequence[torch.Tensor]:
        """The tensors that are saved for the backward pass."""
        return self._packer.saved if self._tape is None else self._tape.saved

    def close(self, outputs: Sequence[torch.Tensor]) -> None:
        """The call is over; ``outputs`` are its results."""
        if self._tape is not None:
            self._tape.close(outputs)

    def recorded_on_tape(self, run: Callable[[Sequence[torch.Tensor], BackwardTape], Any]) -> tuple[torch.Tensor, ...]:
        """The outputs of ``run(inputs, tape)``, which records on the tape every step that gradients pass."""
        entries = [tensor.detach().resolve_neg() for tensor in self.given]
        for entry, want in zip(entries, self.wanted):
            if want:
                entry.requires_grad_()
        tape = self._tape = BackwardTape([*entries, *self.parameters], self.given)
        places = [i for i, want in enumerate(self.wanted) if want]

        def backward(grads: MaybeGradients, keep: bool) -> MaybeGradients:
            found = tape.gradients(grads, keep=keep)
            return [found[i] for i in places]

        self.saved_call.backward = backward
        outputs = _listed(run(entries, tape))
        tape.check_read([entry for entry, want in zip(entries, self.wanted) if want], outputs)
        return outputs

    def recorded_by_autograd(
        self, run: Callable[[Sequence[torch.Tensor], Mapping[int, torch.Tensor]], Any]
    ) -> tuple[torch.Tensor, ...]:
        """The outputs of ``run(inputs, instead)``, recorded by autograd. instead: stand-ins for parameters, by their ``id()``."""
        pack, count = self._packer.pack, len(self.given)
        with seen_by_autograd(), saved_tensors_hooks(pack, SavedTensor.unpacked):
            root = torch.empty((), requires_grad=self.trains)
            arguments = [*self.given, *self.parameters]
            entries = [_enter(root, argument) if want else argument.detach() for argument, want in zip(arguments, self.wanted)]
            instead: dict[int, torch.Tensor] = {}
            for parameter, entry in zip(self.parameters, entries[count:]):
                instead.setdefault(id(parameter), entry)
            outputs = _listed(run(entries[:count], instead))
            ends = [_leave(output) if output.requires_grad else None for output in outputs]
            begins = [get_gradient_edge(entry) for entry, want in zip(entries, self.wanted) if want]
        self.saved_call.backward = partial(_by_autograd, ends, begins)
        return outputs


def _listed(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _by_autograd(
    ends: Sequence[torch.Tensor | None], begins: Sequence[GradientEdge], grads: MaybeGradients, keep: bool
) -> MaybeGradients:
    pairs = [(end, grad) for end, grad in zip(ends, grads) if end is not None and grad is not None]
    if not pairs:
        return [None] * len(begins)
    outputs, gradients = zip(*pairs)
    outer = running_pass()
    for end in outputs:
        end.grad_fn.outer = outer
    return torch.autograd.grad(outputs, begins, gradients, retain_graph=keep, allow_unused=True)


class _ArgumentNode(torch.autograd.Function):
    """An argument in the autograd graph inside of the op: the gradient of its node is that of the argument. It saves nothing.

    A parameter that lives quantized gets a stand-in with the memory of one element; ops read the parameter itself.
    """

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, QuantizedTensor):
            return torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> NoReturn:
        raise RuntimeError("no gradient goes beyond the arguments of a compiled pipeline")


class _ResultNode(torch.autograd.Function):
    """A tensor that looks like an output and has the memory of one element, at which a backward pass inside of the op begins.

    torch 2.11 begins none at the edge of a Function's node. outer: the backward pass around, for delayed scales.
    """

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        ctx.outer = None
        return output.new_empty(()).expand(output.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        count_in(ctx.outer)
        return grads[0]


_enter: Callable[..., torch.Tensor] = _ArgumentNode.apply
_leave: Callable[..., torch.Tensor] = _ResultNode.apply
