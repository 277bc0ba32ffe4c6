"""``opfuse.graphed``: a call as CUDA graphs, one for each pass, whose capture leaves delayed-scaling states as they were."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from types import TracebackType
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from opfuse.core.operation import BasicOperation
from opfuse.domains import checked_arguments
from opfuse.errors import PipelineError, UnsupportedError, describe
from opfuse.recipes import Recipe, autocast
from opfuse.recipes.autocast import in_region
from opfuse.recipes.delayed import DelayedScalingState
from opfuse.runtime.graph_inputs import delayed_states
from opfuse.runtime.replay.dispatch import interpreted
from opfuse.runtime.weights.cast_cache import sharded_part
from opfuse.tensors.masters import stored_in
from opfuse.torch_private.operations import tree_leaves
from opfuse.torch_private.stack import locals_of

WHERE = "opfuse.graphed"
CALLS = 2
"""Warm-up calls before the one in which the host must not wait: they compile kernels and choose products."""


@checked_arguments(PipelineError)
def graphed(module: nn.Module, sample_args: Sequence[torch.Tensor], *, recipe: Recipe | None = None) -> nn.Module:
    """``module`` as a module whose forward and backward pass are a CUDA graph each, for inputs that look like ``sample_args``.

    It is ``torch.cuda.make_graphed_callables``, with three differences. Each call enters ``autocast(recipe=recipe)`` itself, so
    that the update of delayed scaling is a part of the graphs; None enters no region, for models that ``fuse_`` has converted.
    What warm-up does to scales, histories, buffers, ``main_grad`` and random state is undone, also if it fails. If the host waits
    for the device in a call, or reads tensors on a CPU, whose values graphs would keep, an UnsupportedError names the op before
    anything is captured.

    A call writes where the call before it wrote: results, and what is saved for the backward pass. So run one backward before the
    next call, and copy results that are needed longer. Gradients are added up as without graphs. While the module is in another
    mode than at the capture (``train``, ``eval``), calls run without graphs.

    The graphs hold the memory of everything that a step computes, and ``sample_args``, into which inputs are copied. Python's
    collector frees them: ``del`` the result, then ``gc.collect()``, since torch's autograd functions are in reference cycles.
    """
    _check(module, sample_args)
    call = _Call(module, recipe)
    with _undone(module), torch.random.fork_rng(device_type="cuda"):
        for _ in range(CALLS):
            _step(call, sample_args)
        with interpreted(), _unwaited():
            _step(call, sample_args)
        gc.collect()  # a graph that Python found to be garbage in the midst of the capture would invalidate that
        torch.cuda.make_graphed_callables(
            call, tuple(sample_args), allow_unused_input=True
        )  # which gives the module a new forward
    return _Graphed(call, vars(call).pop("forward"))


class _Call(nn.Module):
    """A module in a region of its own."""

    def __init__(self, module: nn.Module, recipe: Recipe | None) -> None:
        super().__init__()
        self.module, self.recipe = module, recipe
        self.training = module.training  # not by train(), which parts of the module in another mode would follow

    def forward(self, *args: torch.Tensor) -> Any:
        region: AbstractContextManager[Any] = nullcontext() if self.recipe is None else autocast(recipe=self.recipe)
        with region:
            return self.module(*args)


class _Graphed(_Call):
    """A call by graphs, in the mode in which they were captured."""

    def __init__(self, call: _Call, replay: Callable[..., Any]) -> None:
        super().__init__(call.module, call.recipe)
        self._replay, self._mode = replay, call.training
        self._written: list[tuple[ref[torch.Tensor], int]] = []

    def forward(self, *args: torch.Tensor) -> Any:
        if self.module.training != self._mode:
            return super().forward(*args)
        self._copy_gradients()
        result = self._replay(*args)
        node = next((leaf.grad_fn for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad), None)
        if node is not None:
            leaves = [getattr(each, "variable", None) for each, _ in node.next_functions]
            node.register_prehook(lambda _: self._copy_gradients())
            node.register_hook(lambda gradients, _: self._record_written(leaves, gradients))
        return result

    def _record_written(self, leaves: Sequence[torch.Tensor | None], gradients: Sequence[torch.Tensor | None]) -> None:
        """Note where the backward pass wrote what becomes the ``grad`` of leaves."""
        pairs = zip(leaves, gradients)
        self._written = [(ref(leaf), grad.data_ptr()) for leaf, grad in pairs if leaf is not None and grad is not None]

    def _copy_gradients(self) -> None:
        """Copy each ``grad`` that lies in memory of the graphs: autograd copies no first gradient, and either pass writes there,
        since what the forward pass lets go of is memory for the backward pass.
        """
        for held, address in self._written:
            leaf = held()
            if leaf is not None and leaf.grad is not None and leaf.grad.data_ptr() == address:
                leaf.grad = leaf.grad.clone()


def check_module(where: str, module: nn.Module) -> None:
    """UnsupportedError for a module whose parameters or gradients ranks exchange."""
    parts = (name for name, each in module.named_parameters() if stored_in(each) is not each)
    shared = sharded_part(module) or next(parts, None)
    if shared is not None:
        cure = "graph the parts of the model that one rank has to itself"
        raise _refusal("parameters that no ranks share", f"{shared} in shards, which hooks of torch exchange", cure, where)
    if any(isinstance(each, DistributedDataParallel) for each in module.modules()):
        cure = "graph the module inside, before DistributedDataParallel wraps it"
        raise _refusal("gradients that no ranks exchange", "a module under DistributedDataParallel", cure, where)


def _check(module: object, sample_args: Sequence[Any]) -> None:
    if not isinstance(module, nn.Module):
        raise _refusal("an nn.Module", type(module).__name__, "pass the model, or a module around the function")
    check_module(WHERE, module)
    if in_region():
        raise _refusal("a call outside of autocast", "an active region", "pass recipe=, which each call of the graph enters")
    for each in sample_args:
        if not isinstance(each, torch.Tensor) or not each.is_cuda:
            got = f"one on {each.device.type}" if isinstance(each, torch.Tensor) else f"a {type(each).__name__}"
            move = "move it to the GPU: a graph would keep the value that the host reads now"
            cure = (
                move if torch.cuda.is_available() else "call the module itself: this machine has no GPU, so it has no CUDA graphs"
            )
            raise _refusal("CUDA tensors", got, cure)


def _refusal(wanted: str, got: str, cure: str, where: str = WHERE) -> UnsupportedError:
    return UnsupportedError(describe(where, wanted=wanted, got=got, cure=cure))


def _step(call: nn.Module, args: Sequence[torch.Tensor]) -> None:
    """Forward and, where something wants a gradient, backward, as capture will run them; no gradient arrives anywhere."""
    outputs = call(*args)
    outputs = [each for each in (outputs if isinstance(outputs, (tuple, list)) else [outputs]) if each.requires_grad]
    wanted = [each for each in (*args, *call.parameters()) if each.requires_grad]
    if outputs and wanted and torch.is_grad_enabled():
        torch.autograd.grad(outputs, wanted, [torch.zeros_like(each) for each in outputs], allow_unused=True)


@contextmanager
def _unwaited() -> Iterator[None]:
    """UnsupportedError, with the op, where the host waits for a device inside the block."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        cure = "give the values to the host before the call, or leave this op out of the graph"
        where = f"{WHERE}, {_op_of(error.__traceback__)}"
        raise _refusal("a call that the host does not wait for", "values read from the device", cure, where) from error
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _op_of(traceback: TracebackType | None) -> str:
    """The innermost op on the way to an error."""
    found = "a module of torch"
    for owner in locals_of(traceback, "self", "cast", "made"):
        op = getattr(owner, "op", owner)  # a cast is made for an op
        found = op.label if isinstance(op, BasicOperation) else found
    return found


@contextmanager
def _undone(module: nn.Module) -> Iterator[None]:
    """Restore, at the end, the values of buffers, ``main_grad``, its flags and states that were used inside, in the same memory.

    Ops of converted models are no submodules, so all states of the process are saved. A state that serves another recipe than
    before has its values converted to that.
    """
    held = [*module.buffers(), *(p.main_grad for p in module.parameters() if hasattr(p, "main_grad"))]
    copies = [tensor.detach().clone() for tensor in held]
    flags = [(p, p.grad_added_to_main_grad) for p in module.parameters() if hasattr(p, "grad_added_to_main_grad")]
    before = {state: (deepcopy(state), state.generation) for state in delayed_states()}
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, copy in zip(held, copies):
                tensor.copy_(copy)
            for parameter, flag in flags:
                parameter.grad_added_to_main_grad = flag
            for state in delayed_states():
                state.drop_unfinished()
                kept, generation = before.get(state, (DelayedScalingState(device=state.scale.device), None))
                if generation != state.generation:
                    state.copy_from(kept)
