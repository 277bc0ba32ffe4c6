"""What a call in a graph of torch.compile keeps for its backward pass, and how tensors enter and leave the op that it is."""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from opfuse.core.context import versions
from opfuse.kernels.engine.variants import VECTOR
from opfuse.recipes.counting import count_in, running_pass
from opfuse.runtime.compile.backward_tape import (
    BackwardTape,
    Copies,
    MaybeGradients,
    Repetition,
    check_unwritten,
)
from opfuse.runtime.interpret.checkpoint_replay import CheckpointedCall
from opfuse.runtime.replay.replayable import layout_key
from opfuse.tensors.tensor import QuantizedTensor
from opfuse.torch_private.dispatch import below_autograd, seen_by_autograd
from opfuse.torch_private.tensors import base_of


class SavedCall(ctypes.c_int64 * 1):  # type: ignore[misc]
    """What one call keeps for its backward pass, in an object that is also the memory of a one-element tensor, its token.

    backward: from the gradients of the outputs to those of the arguments that want one; True if it will be asked again; and the
    first input, if the graph has saved it.
    """

    backward: Callable[..., MaybeGradients]


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


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The dtype that torch.autocast has for the device of ``x``; None where it is off."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def autocast_like(x: torch.Tensor, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """torch.autocast as it is around the call in the code that was compiled."""
    kind = x.device.type
    if dtype == autocast_dtype(x) or not torch.amp.autocast_mode.is_autocast_available(kind):
        return _AS_IT_IS
    return torch.autocast(kind, dtype=dtype, enabled=dtype is not None)


_AS_IT_IS = nullcontext()


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


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of the first byte of a tensor, and the one behind its last byte."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return start, start + (last + 1) * tensor.element_size() if tensor.numel() else start


def _overlaps(start: int, end: int, occupied: Sequence[tuple[int, int]]) -> bool:
    for other, other_end in occupied:  # noqa: SIM110 - a generator takes twice as long, for each result of each call
        if start < other_end and other < end:
            return True
    return False


def apart(results: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``results``, copied where they share bytes with ``others`` or with each other: a compiler may overwrite each of them.

    Several may be parts of one block of memory, if each begins at an address from which kernels of a compiler can load vectors.
    """
    occupied, separate = [*map(_extent, others)], []
    with below_autograd():
        for result in results:
            whole = result
            if base_of(whole) is not None or whole.requires_grad or not whole.is_contiguous():
                whole = whole.detach().contiguous()
            start, end = _extent(whole)
            if start % VECTOR or _overlaps(start, end, occupied):
                whole = whole.clone()
                start, end = _extent(whole)
            occupied.append((start, end))
            separate.append(whole)
    return separate


def _no_view(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if base_of(tensor) is None else tensor.detach()


# -- calls that are repeated as a whole ----------------------------------------------------------------------------------------

CALLS = 8
"""Calls of a pipeline that are kept to be repeated; the oldest goes first."""

CallKey = tuple[Any, ...]


def _UNUSUAL(tensor: torch.Tensor) -> bool:
    """Whether kernels cannot read the values of an input as they lie, or autograd counts no writes to it."""
    return tensor.is_neg() or tensor.is_inference()


class RepeatedCalls(list[tuple[CallKey, Repetition]]):
    """Calls of a pipeline that can be made again as a whole, and all that each depends on; the latest is the last.

    A call whose steps are all repeated still looks each of them up: its plan, its program, where its weights lie and what its
    tape writes down, some forty functions, which take the host longer than to launch the kernels. A list, since to compare keys
    of the same objects takes less than to hash one.
    """

    def make(
        self, key: CallKey, arguments: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
    ) -> tuple[BackwardTape, list[torch.Tensor]] | None:
        """The tape and the results of a call with this key; None if it is to be made step by step."""
        for known, call in reversed(self):
            if known == key:
                with torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS:
                    return call(arguments, given)
        return None

    def enter(self, key: CallKey, call: Repetition | None) -> None:
        """Keep a call, or forget what was kept for its key."""
        others = [(known, other) for known, other in self if known != key]
        self[:] = [*others, (key, call)][-CALLS:] if call is not None else others


# -- a call inside of the op ---------------------------------------------------------------------------------------------------


class CallInside:
    """One call inside of the op. Its pipeline chooses what records it for the backward pass: a tape, or autograd.

    given: the inputs. parameters: those of the pipeline. wanted: for each of both, whether a gradient is wanted. autocast: the
    dtype of torch.autocast in the code. checkpointed: of a call that has a checkpoint around it in the code. input_saved: whether
    the graph saves the first input. trains: whether any gradient is wanted. saved_call: what the call keeps. repeated: whether it
    was made again as a whole.
    """

    repeated = False

    def __init__(
        self,
        given: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        wanted: Sequence[bool],
        autocast: torch.dtype | None,
        checkpointed: CheckpointedCall | None = None,
        *,
        input_saved: bool = False,
    ) -> None:
        self.given, self.parameters, self.wanted, self.autocast = given, parameters, wanted, autocast
        self.checkpointed, self.input_saved = checkpointed, input_saved
        self.trains = any(wanted)
        self.saved_call = SavedCall()
        self._tape: BackwardTape | None = None

    def _begin(self) -> None:
        """Before the steps of a call that is not repeated."""
        self._packer, self._writes = SavedTensorPacker(self.given), versions(*self.given)

    @property
    def has_written(self) -> bool:
        """Whether an input was written to since the call began."""
        return versions(*self.given) != self._writes

    @property
    def saved(self) -> Sequence[torch.Tensor]:
        """The tensors that are saved for the backward pass."""
        return self._packer.saved if self._tape is None else self._tape.saved

    def close(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The call is over; ``outputs`` are its own results. Returns those of the op, :func:`apart` from all that it has."""
        if self.repeated:  # as its first call, whose results were apart
            return [*map(_no_view, outputs)]
        results = apart(outputs, [*self.given, *self.parameters, *self.saved])
        if self._tape is not None:
            self._tape.close(outputs)
            calls, key = self._calls
            if key is not None and list(map(torch.Tensor.data_ptr, outputs)) == list(map(torch.Tensor.data_ptr, results)):
                calls.enter(key, self._tape.repetition())
        return results

    def recorded_on_tape(
        self, run: Callable[[Sequence[torch.Tensor], BackwardTape], Any], calls: RepeatedCalls, around: CallKey | None
    ) -> tuple[torch.Tensor, ...]:
        """The outputs of ``run(inputs, tape)``, which records on the tape every step that gradients pass.

        calls: of the pipeline. around: what this one depends on beside its tensors; None if it must not be repeated as a whole.
        """
        key = self._key(around)
        if key is not None and (made := calls.make(key, [*self.given, *self.parameters], self.given)) is not None:
            self.repeated, (tape, results) = True, made
            self.saved_call.backward = self._backward_of(tape)
            return tuple(results)
        self._calls = calls, key
        self._begin()
        # What steps save is on the tape, which the hooks of a checkpoint around do not see.
        with self._modes(), saved_tensors_hooks(self._packer.pack, SavedTensor.unpacked):
            entries = [tensor.detach().resolve_neg() for tensor in self.given]
            for entry, want in zip(entries, self.wanted):
                if want:
                    entry.requires_grad_()
            tape = self._tape = BackwardTape([*entries, *self.parameters], self.given, input_saved=self.input_saved)
            self.saved_call.backward = self._backward_of(tape)
            outputs = _listed(run(entries, tape))
        tape.check_read([entry for entry, want in zip(entries, self.wanted) if want], outputs)
        return outputs

    @contextmanager
    def _modes(self) -> Iterator[None]:
        """As in the code that was compiled: whether gradients are recorded, and torch.autocast."""
        with torch.set_grad_enabled(self.trains), autocast_like(self.given[0], self.autocast):
            yield

    def _key(self, around: CallKey | None) -> CallKey | None:
        """What a call depends on that is repeated as a whole; None if this one cannot be."""
        if around is None or not self.trains or True in map(_UNUSUAL, self.given):
            return None
        layout = layout_key([*self.given, *self.parameters])
        return None if layout is None else (around, self.autocast, self.input_saved, *self.wanted, *layout)

    def _backward_of(self, tape: BackwardTape) -> Callable[..., MaybeGradients]:
        places = [i for i, want in enumerate(self.wanted) if want]

        def backward(grads: MaybeGradients, keep: bool, x: torch.Tensor | None = None) -> MaybeGradients:
            found = tape.gradients(grads, keep=keep, x=x)
            return [found[i] for i in places]

        return backward

    def recorded_by_autograd(
        self, run: Callable[[Sequence[torch.Tensor], Mapping[int, torch.Tensor]], Any]
    ) -> tuple[torch.Tensor, ...]:
        """The outputs of ``run(inputs, instead)``, recorded by autograd. instead: stand-ins for parameters, by their ``id()``."""
        self._begin()
        pack, count = self._packer.pack, len(self.given)
        with self._modes(), seen_by_autograd(), saved_tensors_hooks(pack, SavedTensor.unpacked):
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
    ends: Sequence[torch.Tensor | None], begins: Sequence[GradientEdge], grads: MaybeGradients, keep: bool, *_: torch.Tensor
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
