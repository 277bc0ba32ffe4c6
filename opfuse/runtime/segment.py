"""The autograd node of a segment, its place in a tape, and a plan run segment by segment."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from opfuse.compiler.plan import Plan
from opfuse.core.context import Value, plain, versions
from opfuse.core.operation import BasicOperation
from opfuse.core.tracers import check_backward, check_batched
from opfuse.core.watched import ParameterPlaces
from opfuse.errors import UnsupportedError, describe
from opfuse.recipes.counting import count_in, running_pass
from opfuse.recipes.passes import Pass, current_pass
from opfuse.runtime.compile.backward_tape import (
    BackwardTape,
    SavedTensors,
    StepAgain,
    StepBackward,
    check_unwritten,
    never,
    written_since,
)
from opfuse.runtime.interpret.checkpoint_replay import check_once
from opfuse.runtime.interpret.interpreter import Interpreter, Kwargs
from opfuse.runtime.replay.dispatch import ReplayedSegment, popped, runner_of
from opfuse.runtime.replay.replayable import Recorded, tensors_and_planes
from opfuse.runtime.weights.packed import from_blocks, to_blocks_again
from opfuse.tensors.groups import sizes_read_once
from opfuse.tensors.storage import QuantizedStorage
from opfuse.tensors.tensor import QuantizedTensor
from opfuse.torch_private.autograd import are_of_checkpoint, is_profiling, saving_hooks
from opfuse.torch_private.tensors import base_of, share_memory

AnyRunner = Interpreter | ReplayedSegment


BACKWARD = ", backward"
"""What the name of a pipeline's backward pass ends with in a profile."""


def _profiled(runner: AnyRunner, end: str, run: Callable[..., Any], *given: Any) -> Any:
    """What ``run`` returns. A profile has it under the name of the pipeline."""
    if not is_profiling():
        return run(*given)
    with torch.profiler.record_function(runner.plan.name + end):
        return run(*given)


class _SegmentFunction(torch.autograd.Function):
    """The autograd node of one segment: inputs and parameters in, outputs out."""

    @staticmethod
    def forward(ctx: Any, runner: AnyRunner, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = _published(_profiled(runner, "", runner.forward, tensors[:count]), tensors)
        ctx.values = list(runner.segment.outputs)
        dirty: list[torch.Tensor] = []
        for value, tensor in runner.dirty:
            if any(tensor is each for each in tensors):
                ctx.mark_dirty(tensor)
                dirty.append(tensor)
                if not any(tensor is output for output in outputs):
                    outputs.append(tensor)
                    ctx.values.append(value)
                _check_view(runner, tensor, alone=tensor is tensors[0] and len(outputs) == 1)
        ctx.runner = runner
        ctx.count = count
        saved, hooks = runner.released(), saving_hooks(True)
        if runner.places and hooks is not None:  # a checkpoint's compare with a call that may find nothing kept
            saved = [*from_blocks(iter(saved), runner.places)]
        ctx.counted = hooks is not None and bool(saved) and are_of_checkpoint(hooks)
        ctx.save_for_backward(*saved, *([_writes_of(saved, dirty)] if ctx.counted else ()))
        ctx.set_materialize_grads(False)
        results = tuple(_distinct(outputs)) if len(outputs) > 1 else tuple(outputs)
        if constant := runner.segment.constant:
            ctx.mark_non_differentiable(*[each for value, each in zip(ctx.values, results) if value in constant])
        return results

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> tuple[Any, ...]:
        check_backward(ctx.runner.plan.name)
        if torch.is_grad_enabled():
            where, wanted, got = "backward of an opfuse pipeline", "create_graph=False", "a double backward"
            cure = "compute second derivatives with plain torch modules; quantized backward passes have none"
            raise UnsupportedError(describe(where, wanted=wanted, got=got, cure=cure))
        check_batched(f"backward of {ctx.runner.plan.name}", grad_outputs)
        if ctx.runner.plan.delays:
            _begin(ctx.runner)
        received: dict[int, torch.Tensor | None] = dict.fromkeys(ctx.values)
        for value, grad in zip(ctx.values, grad_outputs):
            if grad is not None:
                if not isinstance(grad, QuantizedTensor):
                    grad = grad.resolve_neg()  # kernels read what lies in memory
                earlier = received[value]
                received[value] = grad if earlier is None else earlier + grad
        return (None, None, *_profiled(ctx.runner, BACKWARD, ctx.runner.gradients, received, _handed_over(ctx)))


def _check_view(runner: AnyRunner, written: torch.Tensor, *, alone: bool) -> None:
    """UnsupportedError for a view that autograd cannot rebase: it must be its node's first input and only output."""
    if base_of(written) is not None and not alone:
        where, cure = f"{runner.plan.name} extra input", "clone it, or use in_place=False"
        wanted, got = "a tensor to overwrite that is no view", "a view beside other outputs"
        raise UnsupportedError(describe(where, wanted=wanted, got=got, cure=cure))


def _handed_over(ctx: Any) -> Iterator[torch.Tensor]:
    """The saved tensors, one by one. Unless the graph is retained, nothing else holds a tensor once it was yielded."""
    saved = _saved_tensors(ctx)
    ctx.maybe_clear_saved_tensors()
    if ctx.runner.places:
        saved = to_blocks_again(saved, ctx.runner.places)
    return popped([*saved])


def _saved_tensors(ctx: Any) -> Sequence[torch.Tensor]:
    try:
        saved: Sequence[torch.Tensor] = ctx.saved_tensors
    except RuntimeError as error:
        if "inplace" not in str(error):  # a saved tensor was written, or one that it is a view of
            raise
        raise written_since(_place(ctx.runner)) from error
    if ctx.counted:
        *saved, writes = saved
        check_unwritten(saved, writes.tolist(), _place(ctx.runner))
    return saved


def _place(runner: AnyRunner) -> str:
    nodes = runner.segment.nodes
    return f"backward of {runner.plan.name}, nodes {nodes[0]}..{nodes[-1]}"


def _writes_of(saved: Sequence[torch.Tensor], dirty: Sequence[torch.Tensor]) -> torch.Tensor:
    """How often each tensor of ``saved`` was written, as a tensor on the host that is saved beside them in a checkpoint.

    A checkpoint saves what its function saves when it runs again, and torch does not see a write after that. So the counts are of
    the run whose tensors they are compared with. Autograd itself counts one more write of ``dirty`` tensors. No operation makes
    the result, so that no mode keeps it from the first run.
    """
    counts = [count + sum(share_memory(each, tensor) for tensor in dirty) for each, count in zip(saved, versions(*saved))]
    return torch.frombuffer(array("q", counts), dtype=torch.int64)


def _check_inference(plan: Plan, *given: Sequence[torch.Tensor | None]) -> None:
    """UnsupportedError where autograd would have to save a tensor of inference mode, which counts no writes."""
    for tensor in (tensor for tensors in given for tensor in tensors):
        if tensor is not None and tensor.is_inference():
            cure = "clone it outside of torch.inference_mode(), or compute under torch.no_grad()"
            wanted, got = "tensors that autograd can save", f"one of shape {tuple(tensor.shape)} made in torch.inference_mode()"
            raise UnsupportedError(describe(plan.name, wanted=wanted, got=got, cure=cure))


def _published(values: Sequence[Value], given: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """``values`` as outputs of a node whose inputs and parameters are ``given``.

    A view of memory that the node alone made is detached, so that it is no view: autograd forbids writes in place to views from a
    node. It keeps its bytes and its count of writes, so a change of what was saved is still noticed.
    """
    outputs: list[Any] = [*values]
    for i, value in enumerate(values):
        if isinstance(value, QuantizedStorage):
            outputs[i] = QuantizedTensor(value)
    for i, tensor in enumerate(outputs):
        if base_of(tensor) is not None and _owns_memory(tensor, (*given, *outputs[:i], *outputs[i + 1 :])):
            outputs[i] = tensor.detach()
    return outputs


def _owns_memory(view: torch.Tensor, others: Sequence[torch.Tensor | None]) -> bool:
    """Whether ``view`` is detached from any graph and none of ``others`` lies in its memory; never so for a quantized tensor."""
    if view.requires_grad or isinstance(view, QuantizedTensor):
        return False
    return not any(other is not None and share_memory(view, other) for other in others)


def _distinct(outputs: Sequence[torch.Tensor], given: Sequence[torch.Tensor | None] = ()) -> Iterator[torch.Tensor]:
    seen = set(map(id, given))
    for tensor in outputs:
        yield tensor.view_as(tensor) if id(tensor) in seen else tensor
        seen.add(id(tensor))


# -- in a tape ---------------------------------------------------------------------------------------------------------------


def _recorded_on_tape(
    tape: BackwardTape, runner: AnyRunner, inputs: Sequence[torch.Tensor], read: Sequence[Any]
) -> list[torch.Tensor]:
    """The outputs of a segment whose backward pass is recorded on ``tape``."""
    with torch.no_grad():
        values = _profiled(runner, "", runner.forward, inputs)
        outputs = [QuantizedTensor(value) if isinstance(value, QuantizedStorage) else value for value in values]
        if not {*map(id, read)}.isdisjoint(map(id, outputs)) or len(outputs) > 1:
            outputs = [*_distinct(outputs, read)]
    tape.record(read, outputs, partial(_gradients, runner, tape.save(runner.released())), _again(runner, len(outputs)))
    return outputs


def _again(runner: AnyRunner, count: int) -> Callable[[], StepAgain | None]:
    """Finds what runs the segment of ``runner``, of so many outputs, again."""
    return partial(_SegmentAgain.of, runner, count) if isinstance(runner, ReplayedSegment) else never


class _SegmentAgain:
    """Runs a segment by the program that a call of it had. runner: of that call. count: of the outputs."""

    def __init__(self, runner: ReplayedSegment, count: int, found: Recorded) -> None:
        self.runner, self.count, self.found = runner, count, found
        self.sized, self.changes = runner.sized, runner.replayable.changes

    @classmethod
    def of(cls, runner: ReplayedSegment, count: int) -> _SegmentAgain | None:
        """None if the call has no program now."""
        found = runner.found()
        return None if found is None else cls(runner, count, found)

    def stands(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the program is still that of the call's key."""
        runner = self.runner
        return runner.replayable.changes == self.changes and (not self.sized or runner.has_sizes_of(tensors))

    def __call__(self, tensors: Sequence[torch.Tensor], tape: BackwardTape) -> tuple[Sequence[torch.Tensor], StepBackward | None]:
        """The outputs for inputs and parameters, and their backward pass."""
        runner, count = self.runner, self.count
        given = tensors[: runner.reads]
        results = _profiled(runner, "", self.found.repeat, runner.replayable.device, tensors_and_planes(given))
        if not runner.segment.requires_grad:
            return _published(results, given), None
        return results[:count], partial(_gradients, runner, tape.save(results[count:]))


def _gradients(
    runner: AnyRunner, saved: SavedTensors, received: list[torch.Tensor | None], keep: bool
) -> Sequence[torch.Tensor | None]:
    if runner.plan.delays:
        _begin(runner)
    grads = dict(zip(runner.segment.outputs, received))
    received.clear()
    tensors = popped(saved.unpack(keep))
    made: Sequence[torch.Tensor | None] = _profiled(runner, BACKWARD, runner.gradients, grads, tensors)
    return made


def _begin(runner: AnyRunner) -> None:
    """Before gradients have delayed scales: refuse a pass that runs twice, and have one inside of another be a part of that."""
    check_once(runner.plan.name)
    count_in(runner.outer)


# -- a plan --------------------------------------------------------------------------------------------------------------------


def run_plan(
    plan: Plan,
    ops: Sequence[BasicOperation],
    given: Sequence[torch.Tensor],
    kwargs: Kwargs,
    *,
    places: Sequence[ParameterPlaces],
    instead: Mapping[int, torch.Tensor] | BackwardTape | None = None,
) -> list[torch.Tensor]:
    """The pipeline's outputs, main first, for its inputs.

    places: where the parameters of each op are. instead: tensors that take the gradients of parameters, by their ``id()``; or a
    tape, in which segments note their backward passes in place of autograd nodes.
    """
    graph = plan.graph
    values: dict[int, torch.Tensor] = dict(zip((0, *graph.extra_inputs), given))
    for segment in plan.segments:
        inputs = [*map(values.__getitem__, segment.inputs)]
        # The last op first, as autograd meets ops that are nodes of their own: it sums gradients of one tensor in this order.
        params: list[Any] = [slot[name] for op in reversed(segment.ops) for slot, name in places[op]]
        # Autograd follows views by itself; a tape follows nothing that is not noted, and wants the interpreter's contexts.
        viewed = isinstance(instead, BackwardTape) and not segment.requires_grad and not graph.grads.isdisjoint(segment.outputs)
        runner = runner_of(plan, segment, ops, kwargs, None if viewed else [*inputs, *params])
        if segment.requires_grad or viewed:
            if plan.delays and current_pass() is Pass.RECOMPUTE:
                runner.outer = running_pass()
            again = [*map(values.__getitem__, segment.again)]
            if isinstance(instead, Mapping):
                params = [instead.get(id(p), p) for p in params]
            try:
                if isinstance(instead, BackwardTape):
                    outputs = _recorded_on_tape(instead, runner, inputs, [*inputs, *params, *again])
                else:
                    outputs = _SegmentFunction.apply(runner, len(inputs), *inputs, *params, *again)  # type: ignore[no-untyped-call]
            except RuntimeError:
                _check_inference(plan, inputs, params)
                raise
        else:
            outputs = _published(_profiled(runner, "", runner.forward, inputs), inputs)
            if isinstance(instead, BackwardTape):
                instead.record([*inputs, *params], outputs, None, _again(runner, len(outputs)))
        values.update(zip(segment.outputs, outputs))
    return [*map(values.__getitem__, graph.outputs)]


run_grouped = sizes_read_once()(run_plan)
"""The same for a plan that reads sizes of groups of rows: each tensor of them is read once."""


def outlined(plan: Plan, ops: Sequence[BasicOperation], given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of a plan without gradients for its inputs."""
    values: dict[int, Value] = dict(zip((0, *plan.graph.extra_inputs), given))
    for segment in plan.segments:
        inputs = [plain(values[value]) for value in segment.inputs]
        values.update(zip(segment.outputs, Interpreter(plan, segment, ops, ({},) * len(ops)).forward(inputs)))
    return [plain(values[value]) for value in plan.graph.outputs]
