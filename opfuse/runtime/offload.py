"""``opfuse.offloaded``: saved tensors go to pinned host memory while the device computes, and come back before they are read.

``torch.autograd.graph.save_on_cpu(pin_memory=True)`` copies on the computing stream, which waits for each copy. Here two streams
copy, one in each direction. Events order them against the computing stream, and against each other where host memory is reused.
So the host never waits, and which memory is free does not depend on how far the host is ahead of the device.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from opfuse.domains import checked_arguments
from opfuse.errors import PipelineError
from opfuse.kernels.engine.launch import check_capture
from opfuse.torch_private.tensors import version_of

MIB = 2**20


class offloaded(saved_tensors_hooks):
    """Inside, what the forward pass saves on a CUDA device goes to pinned memory of the host, until the backward pass reads it.

    modules: their parameters and buffers stay on the device. ahead: bytes that may be on the device on their way out, and as many
    on their way back: when a backward pass reads a tensor, those saved before it are fetched. The last ones are still there when
    it begins. least: bytes; smaller tensors stay, and so do quantized ones and all on a CPU.

    Make one object and enter it around the forward pass of each step: it keeps its host memory, as much as was ever in use at
    once, since pinned memory is slow to allocate. The backward pass may run outside. The bits are those of a call without it. As
    under ``save_on_cpu``, changes of saved tensors in place are not noticed.
    """

    @checked_arguments(PipelineError)
    def __init__(self, *modules: nn.Module, ahead: int = 256 * MIB, least: int = MIB) -> None:
        self.modules, self.ahead, self.least = modules, ahead, least
        self._staying: set[int] = set()
        self._leaving: deque[tuple[weakref.ref[_Away], int]] = deque()
        self._last: weakref.ref[_Away] | None = None
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}
        self._host: dict[tuple[torch.device, int], _Free] = {}
        super().__init__(self._pack, self._unpack)

    def __enter__(self) -> None:
        check_capture("opfuse.offloaded", got="copies to the host", cure="capture outside of it: graphs keep what they save")
        held = [tensor for module in self.modules for tensor in (*module.parameters(), *module.buffers())]
        self._staying = {tensor.untyped_storage().data_ptr() for tensor in held if _on_device(tensor)}
        self._last = None
        super().__enter__()

    def _leaves(self, tensor: torch.Tensor) -> bool:
        large = _on_device(tensor) and tensor.nbytes >= self.least
        return large and tensor.untyped_storage().data_ptr() not in self._staying

    def _pack(self, given: torch.Tensor) -> torch.Tensor | _Away:
        # A result that its own node saves knows that node: held as it came, both would stay until a backward pass.
        tensor = given if given.grad_fn is None else given.detach()
        if not self._leaves(tensor):
            return tensor
        for each in (saved() for saved, _ in self._leaving):
            if each is not None and each.is_copy_of(tensor):
                each.readers += 1
                return each
        (out, _), free = self._copying(tensor.device), self._host.setdefault((tensor.device, tensor.nbytes), [])
        memory, copied = free.pop() if free else (_on_host(tensor.nbytes), None)
        if copied is not None:
            out.wait_event(copied)
        made = _Away(tensor, out, memory, free, self._last)
        self._last = weakref.ref(made)
        self._leaving.append((self._last, tensor.nbytes))
        while len(self._leaving) > 1 and sum(size for _, size in self._leaving) > self.ahead:
            oldest = self._leaving.popleft()[0]()
            if oldest is not None:
                oldest.release()
        return made

    def _unpack(self, saved: torch.Tensor | _Away) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        _, back = self._copying(saved.device)
        found, room = saved.fetched_for_a_reader(back), self.ahead
        before = saved.before()
        while before is not None and room > 0:
            if before.readers:
                before.fetched(back)
                room -= before.host.nbytes
            before = before.before()
        return found

    def _copying(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """The streams that copy from a device, and to it."""
        if device not in self._streams:
            self._streams[device] = _new_stream(device), _new_stream(device)
        return self._streams[device]


_Free = list[tuple[torch.Tensor, torch.cuda.Event]]
"""Pieces of host memory, each free once the event of its last copy has passed."""


class _Away:
    """A saved tensor: on the host, and for a while on the device. before: a reference to the one saved before it.

    readers: how many nodes will still read it, in the first backward pass. free: the list to which its host memory returns.
    """

    here: torch.Tensor | None = None

    def __init__(
        self,
        tensor: torch.Tensor,
        out: torch.cuda.Stream,
        memory: torch.Tensor,
        free: _Free,
        before: weakref.ref[_Away] | None,
    ) -> None:
        self.device, self.before, self.readers = tensor.device, before or _nothing, 1
        self._memory, self._free = memory, free
        self._look = torch.empty_like(tensor, device="meta")
        self._order = sorted(range(tensor.dim()), key=self._look.stride, reverse=True)
        self.host = memory.view(tensor.dtype).as_strided(self._look.shape, self._look.stride())
        self.here = tensor
        self._copy(out, self.host, tensor)

    def _copy(self, stream: torch.cuda.Stream, to: torch.Tensor, source: torch.Tensor) -> None:
        self._computing = torch.cuda.current_stream(self.device)
        stream.wait_stream(self._computing)  # which makes the source, or used the memory before
        with torch.cuda.stream(stream):
            # In the order of memory ``to`` is contiguous: to any other torch copies through memory that is not pinned, and waits.
            to.permute(self._order).copy_(source.permute(self._order), non_blocking=True)
        self._copied = stream.record_event()
        self._copy_of = None if self.here is None else _place(self.here)  # with the version whose values were copied

    def is_copy_of(self, tensor: torch.Tensor) -> bool:
        """Whether it is of this very tensor, with these values."""
        return self.here is not None and self._copy_of == _place(tensor)

    def release(self) -> None:
        """Free the device memory; work that is queued from now on waits for the copy."""
        if self.here is not None:
            self._computing.wait_event(self._copied)
            self.here = None

    def __del__(self) -> None:
        self.release()
        self._free.append((self._memory, self._copied))

    def fetched(self, back: torch.cuda.Stream) -> torch.Tensor:
        """The tensor on the device, or on its way there."""
        if self.here is None:
            back.wait_event(self._copied)
            self.here = torch.empty_like(self._look, device=self.device)
            self._copy(back, self.here, self.host)
        return self.here

    def fetched_for_a_reader(self, back: torch.cuda.Stream) -> torch.Tensor:
        """The tensor on the device, for one of its readers; after the last, only the reader holds it."""
        found, self.readers = self.fetched(back), max(0, self.readers - 1)
        if self.readers:
            self._computing.wait_event(self._copied)
        else:
            self.release()
        return found


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _nothing() -> None:
    """A reference to nothing."""


def _on_device(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided


def _on_host(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, version_of(tensor)
