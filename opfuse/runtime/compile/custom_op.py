"""A pipeline in a graph of torch.compile: one op of torch.library runs it, and another its backward pass.

Dynamo follows a call as far as :func:`follow` and puts ``opfuse::pipeline`` into its graph, with inputs and parameters as
arguments. When the op runs, it asks for the rest: the active recipe, and the plan of the call. So the graph depends on nothing
that a plan depends on, and another recipe compiles nothing anew.

What the backward pass needs stays with the call, in a :class:`SavedCall`. The op returns a token, a tensor of one element whose
memory is that object. torch saves the token as it saves other tensors for a backward pass; when it lets the token go, the object
goes, too. A compiler may overwrite an argument that its graph reads no more. So the call keeps copies of saved tensors that share
memory with an input.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import islice
from operator import is_
from typing import Any, NoReturn, Protocol

import torch

from opfuse.core.operation import BasicOperation
from opfuse.core.signature import DTYPES, Slots
from opfuse.core.watched import enrolled, prepared
from opfuse.errors import OpfuseWarning, SavedTensorError, UnsupportedError, describe, notice
from opfuse.runtime.compile.saved_call import CallInside, apart, autocast_dtype, autocast_like, saved_call_of, token_of
from opfuse.runtime.compile.write_version import write_version
from opfuse.runtime.interpret.checkpoint_replay import CheckpointedCall, check_recomputed_in_graph
from opfuse.tensors.dispatch import HANDLERS
from opfuse.tensors.tensor import QuantizedTensor
from opfuse.torch_private.autograd import is_saved_by_its_node, keeps_graph
from opfuse.torch_private.compiler import dynamic_shape_error, fake_tensor_mode, makes_cuda_graphs, not_traced
from opfuse.torch_private.dispatch import active_modes, below_autograd, in_transform


class CompiledPipeline(Protocol):
    """A pipeline that an op of the graph runs.

    form: pipelines of one form can share a graph. slots: where its parameters are found. get_ready: before a call. outline: what
    its outputs look like. reach: which arguments a gradient can reach, empty if that is not known. run_inside: a call.
    """

    label: str
    ticket: torch.Tensor
    ops: tuple[BasicOperation, ...]

    @property
    def form(self) -> str: ...

    @property
    def slots(self) -> Slots: ...

    def get_ready(self) -> None: ...

    def outline(self, given: Sequence[torch.Tensor], autocast: torch.dtype | None) -> list[torch.Tensor]: ...

    def reach(self, given: Sequence[torch.Tensor], autocast: torch.dtype | None) -> Sequence[bool]: ...

    def run_inside(self, call: CallInside) -> tuple[torch.Tensor, ...]: ...


# -- what dynamo follows -------------------------------------------------------------------------------------------------------


def follow(pipeline: CompiledPipeline, x: torch.Tensor, extras: Sequence[torch.Tensor]) -> Any:
    """Call a pipeline as an op of the graph that is being traced; returns what the call returns."""
    call = *prepared(pipeline.ticket, pipeline.form), 0
    tensors = [x, *extras, *parameters_of(pipeline), pipeline.ticket]
    grad = torch.is_grad_enabled()
    wanted = [grad and tensor.requires_grad for tensor in tensors]
    made = torch.ops.opfuse.pipeline(tensors, wanted, 1 + len(extras), call, autocast_dtype(x))
    outputs = made[:-1] if any(wanted) else made
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def parameters_of(pipeline: CompiledPipeline) -> list[torch.Tensor]:
    """The parameters of a pipeline, as they are now."""
    found = [slot.get(name) for slot, name in pipeline.slots]  # dynamo, which follows this, knows no := here
    return [parameter for parameter in found if parameter is not None]


def moment(pipeline: CompiledPipeline, *tensors: torch.Tensor) -> tuple[Any, ...]:
    """What a call depends on in the graph that is being traced: ``tensors``, its parameters, writes to both, and modes."""
    return write_version([*tensors, *parameters_of(pipeline)]), torch.is_grad_enabled(), autocast_dtype(tensors[0])


def hindrance(pipeline: CompiledPipeline, x: torch.Tensor, extras: Sequence[torch.Tensor], kwargs: Any) -> str:
    """Why a call cannot be an op of a graph, and the cure, in words; empty if it can."""
    if kwargs:
        return "keyword arguments of an op. Cure: give them to the op when it is made"
    for op in pipeline.ops:
        if op.writes_extras:
            return f"{op.label}, which writes into a tensor of the caller. Cure: use in_place=False"
    if not all(type(each) in _PLAIN for each in [x, *extras]):
        return "an input that is quantized or in shards. Cure: have the pipeline itself quantize it, or call dequantize() on it"
    if in_transform():
        return (
            "a transform of torch.func (grad, vmap, ...). Cure: use torch.autograd.grad, and a batch dimension in place of vmap"
        )
    if not all(type(each) in _KNOWN for each in parameters_of(pipeline)):
        return "parameters in shards. Cure: compile modules without them, or without fullgraph"
    return ""


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_OWN = frozenset(_PLAIN)
_KNOWN = (*_PLAIN, QuantizedTensor)


NONE = -1
"""Stands for the rank of an argument that gets no gradient because no result depends on it, as in graphs of torch's own ops."""


# -- the ops ---------------------------------------------------------------------------------------------------------------------


def pipeline_op(
    tensors: Sequence[torch.Tensor], wanted: Sequence[bool], count: int, call: Sequence[int], autocast: torch.dtype | None
) -> list[torch.Tensor]:
    """The outputs of a pipeline and, if a gradient is wanted, the token of what the call keeps.

    tensors: ``count`` inputs, then the parameters, and last the ticket. wanted: for each, whether its gradient is wanted. call:
    numbers of the pipeline that was traced, which is this one or one of its form, and of the call in the code, so that no
    compiler merges two calls, whether the code has a checkpoint around it, those that keep its files apart (``prepared``), and
    whether the graph saves the first input, so that the call need not. autocast: the dtype of torch.autocast in the code.
    Errors: those of the call; UnsupportedError for an op that writes to an input, a quantized output, and parameters other than
    the pipeline's own.
    """
    *tensors, ticket = tensors
    pipeline: CompiledPipeline = enrolled(int(ticket))
    pipeline.get_ready()
    _, number, inside, *_, input_saved = call
    if not inside:
        check_recomputed_in_graph(pipeline.label)
    given = tensors[:count]
    parameters = _checked_parameters(pipeline, tensors[count:])
    checkpointed = CheckpointedCall(number, tensors[0].device) if inside else None
    inner = CallInside(given, parameters, wanted, autocast, checkpointed, input_saved=bool(input_saved))
    outputs = pipeline.run_inside(inner)
    if not inner.repeated:
        _check_result(pipeline, inner.has_written, outputs)
    results = inner.close(outputs)
    return [*results, token_of(inner.saved_call)] if inner.trains else results


def backward_op(
    saved: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
    sizes: Sequence[int],
    signatures: Sequence[int],
    device: torch.device,
) -> list[torch.Tensor]:
    """From the gradients of the outputs to those of the arguments that want one; zeros where there is none.

    saved: the token of the call, and its first input, if the graph has saved that. signatures: for each of these arguments its
    rank and the index of its dtype in ``DTYPES``. sizes: their shapes, one after another. device: theirs. An argument of rank
    ``NONE`` has no gradient in the graph. Errors: UnsupportedError if it gets one, and for create_graph=True; SavedTensorError if
    what the call kept is gone or was written to.
    """
    where = "backward of a compiled pipeline"
    token, *inputs = saved
    call = saved_call_of(token)
    if call is None:
        cure = "leave hooks of saved tensors that copy them (save_on_cpu) outside of what is compiled"
        got = "a copy of the tensor that stands for it"
        raise SavedTensorError(describe(where, wanted="what the forward pass has kept", got=got, cure=cure))
    if torch.is_grad_enabled():
        cure = "compute second derivatives with plain torch modules; quantized backward passes have none"
        raise UnsupportedError(describe(where, wanted="create_graph=False", got="a double backward", cure=cure))
    grads = [None if grad is None else grad.resolve_neg() for grad in grads]
    found = call.backward(grads, keeps_graph(), *inputs)
    made, at = list[torch.Tensor](), 0
    for grad, rank, dtype in zip(found, signatures[::2], signatures[1::2]):
        if rank == NONE:
            if grad is not None:
                cure = "call torch._dynamo.reset() after such a change; set TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 if files had it"
                got = "one for a parameter that no result depended on when it was compiled"
                raise UnsupportedError(describe(where, wanted="the gradients of its graph", got=got, cure=cure))
            continue
        made.append(torch.zeros(sizes[at : at + rank], dtype=DTYPES[dtype], device=device) if grad is None else grad)
        at += rank
    return apart(made, [grad for grad in grads if grad is not None])


class _PipelineNode(torch.autograd.Function):
    """The node of the op in autograd's graph: where a compiler traces it, and where a graph runs without being compiled."""

    @staticmethod
    def forward(ctx: Any, reach: Sequence[bool], rest: Sequence[Any], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = _run_pipeline(tensors, *rest)
        ctx.set_materialize_grads(False)
        *_, input_saved = rest[2]
        ctx.save_for_backward(made[-1], *tensors[:input_saved])
        likes = {i: tensors[i] for i, want in enumerate(rest[0]) if want}
        ctx.places = [i for i in likes if not reach or reach[i]]
        ctx.sizes = [size for i in ctx.places for size in likes[i].shape]
        ranks = [like.ndim if i in ctx.places else NONE for i, like in likes.items()]
        ctx.signatures = [n for rank, like in zip(ranks, likes.values()) for n in (rank, DTYPES.index(like.dtype))]
        ctx.device, ctx.count = tensors[0].device, len(tensors)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        gradients = torch.ops.opfuse.pipeline_backward(ctx.saved_tensors, grads[:-1], ctx.sizes, ctx.signatures, ctx.device)
        by_place = dict(zip(ctx.places, gradients))
        return (None, None, *[by_place.get(i) for i in range(ctx.count)])


def _seen_pipeline(
    tensors: Sequence[torch.Tensor], wanted: Sequence[bool], count: int, call: Sequence[int], autocast: torch.dtype | None
) -> list[torch.Tensor]:
    """The op with a node of autograd, if a gradient is wanted that can reach an argument.

    The node saves the first input where the op that made it does so in any case: then the call keeps neither it nor its cast.
    """
    if torch.is_grad_enabled() and any(wanted):
        reach = enrolled(call[0]).reach(tensors[:count], autocast)
        if not reach or any(want and there for want, there in zip(wanted, reach)):
            x = tensors[0]
            rest = wanted, count, [*call[:-1], int(x.is_contiguous() and is_saved_by_its_node(x))], autocast
            return list(_PipelineNode.apply(reach, rest, *tensors))  # type: ignore[no-untyped-call]
    return _run_pipeline(tensors, wanted, count, call, autocast)


def _run_pipeline(tensors: Sequence[torch.Tensor], *rest: Any) -> list[torch.Tensor]:
    """Run the op, or hand it to torch's dispatcher, if a mode or a class of tensors follows the call."""
    if _is_run(tensors):
        return pipeline_op(tensors, *rest)
    with below_autograd():
        made: list[torch.Tensor] = torch.ops.opfuse.pipeline.default(list(tensors), *rest)
    return made


def _run_backward(saved: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None], *rest: Any) -> list[torch.Tensor]:
    """Run the backward op, or hand it to torch's dispatcher, as :func:`_run_pipeline` does."""
    if _is_run((*saved, *[grad for grad in grads if grad is not None])):
        return backward_op(saved, grads, *rest)
    with below_autograd():
        made: list[torch.Tensor] = torch.ops.opfuse.pipeline_backward.default(list(saved), list(grads), *rest)
    return made


def _is_run(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether no mode of torch's dispatcher and no class of tensors follows the call."""
    return not active_modes() and _OWN.issuperset(map(type, tensors))


def _checked_parameters(pipeline: CompiledPipeline, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parameters that the pipeline reads; UnsupportedError unless ``given`` are their memory."""
    own = parameters_of(pipeline)
    if len(own) == len(given) and all(map(is_, own, given)):
        return own
    arrays = [*map(_memory, own)]
    if len(own) == len(given) and all(map(is_, arrays, given)):
        return own
    if list(map(_place, arrays)) != list(map(_place, given)):
        if True in map(torch.Tensor.is_neg, own):  # of which a graph may make a copy
            cure = "assign it anew: weight.data = weight.data.resolve_neg()"
            raise _refusal(pipeline, "parameters to read as they lie in memory", "one with the negative bit", cure)
        wanted = "the parameters of its ops"
        got = "others, as torch.func.functional_call passes them, or what the graph wrote to them"
        cure = "assign parameters to the ops, write to them outside of the graph, and compile the model itself"
        raise _refusal(pipeline, wanted, got, cure)
    return own


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or the first array of one that lives quantized."""
    return next(iter(tensor.record.named_tensors.values())) if isinstance(tensor, QuantizedTensor) else tensor


def _by_memory(op: Any, tensors: Sequence[torch.Tensor], *rest: Any) -> Any:
    """Run an op over the first arrays of parameters that live quantized; by now torch knows whose gradients are wanted."""
    return op([_memory(tensor) for tensor in tensors], *rest)


def _check_result(pipeline: CompiledPipeline, written: bool, outputs: Sequence[torch.Tensor]) -> None:
    if written:
        raise _refusal(pipeline, "inputs that a call only reads", "an op that writes into one", "use in_place=False")
    if QuantizedTensor in map(type, outputs):
        raise _refusal(pipeline, "plain outputs", "one that is quantized", "end the pipeline with an op that computes")


def _refusal(pipeline: CompiledPipeline, wanted: str, got: str, cure: str) -> UnsupportedError:
    return UnsupportedError(describe(f"{pipeline.label} in a graph of torch.compile", wanted=wanted, got=got, cure=cure))


# -- what a compiler asks --------------------------------------------------------------------------------------------------------


def pipeline_fake(
    tensors: Sequence[torch.Tensor], wanted: Sequence[bool], count: int, call: Sequence[int], autocast: torch.dtype | None
) -> list[torch.Tensor]:
    """Tensors like those that the op returns, found by running the ops without a recipe on tensors without values.

    If that fails, dynamo is told that the shapes depend on values. Then it runs the call outside of its graphs, which raises the
    error that says what is wrong.
    """
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    pipeline: CompiledPipeline = enrolled(call[0])
    x = tensors[0]
    shapes = getattr(getattr(x, "fake_mode", None), "shape_env", None)
    known: dict[Any, list[Any]] = {} if shapes is None else _known_looks.setdefault(shapes, {})
    _warn_of_cuda_graphs()
    key = *call, autocast, *((str(tensor.shape), str(tensor.stride()), tensor.dtype) for tensor in tensors[:count])
    if key not in known:
        mode = fake_tensor_mode()(shape_env=shapes, allow_non_fake_inputs=True)
        values_read = nullcontext() if shapes is None else shapes.ignore_fresh_unbacked_symbols()
        with mode, values_read, torch.no_grad(), autocast_like(x, autocast):
            given = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors[:count]]
            try:
                outputs = pipeline.outline(given, autocast)
            except Exception as error:
                raise dynamic_shape_error()(torch.ops.opfuse.pipeline.default) from error
        if free_unbacked_symbols(outputs):
            raise dynamic_shape_error()(torch.ops.opfuse.pipeline.default)
        known[key] = [(output.shape, output.dtype, output.device) for output in outputs]
    made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in known[key]]
    return [*made, torch.empty(1, dtype=torch.int64, device="cpu")] if any(wanted) else made


def _warn_of_cuda_graphs() -> None:
    """Warn whoever compiles with a mode of CUDA graphs that they end in front of each pipeline; docs/torch.md has the figures."""
    if makes_cuda_graphs():
        got = "its CUDA graphs end in front of each pipeline, whose calls take the CPU as long as without the mode"
        cure = "compile without it, and make the whole step one graph: opfuse.graphed_step"
        text = notice('torch.compile(mode="reduce-overhead"), or "max-autotune"', got=got, cure=cure)
        warnings.warn(text, OpfuseWarning, stacklevel=2)


_known_looks: weakref.WeakKeyDictionary[Any, dict[Any, list[Any]]] = weakref.WeakKeyDictionary()
"""Shapes, dtypes and devices of outputs, by the symbols that sizes are made of: compilers ask several times for each call."""


def backward_fake(
    saved: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
    sizes: Sequence[int],
    signatures: Sequence[int],
    device: torch.device,
) -> list[torch.Tensor]:
    """Tensors like the gradients that the backward op returns."""
    rest, pairs = iter(sizes), zip(signatures[::2], signatures[1::2])
    return [torch.empty([*islice(rest, rank)], dtype=DTYPES[at], device=device) for rank, at in pairs if rank != NONE]


# -- what torch knows of both ----------------------------------------------------------------------------------------------------


_SCHEMAS = {
    "pipeline": "(Tensor[] tensors, bool[] wanted, int count, int[] call, ScalarType? autocast) -> Tensor[]",
    "pipeline_backward": "(Tensor[] saved, Tensor?[] grads, SymInt[] sizes, int[] signatures, Device device) -> Tensor[]",
}
_RUNS: dict[str, tuple[Any, Any, Any]] = {
    "pipeline": (_seen_pipeline, pipeline_op, pipeline_fake),
    "pipeline_backward": (_run_backward, backward_op, backward_fake),
}
"""By op: the functions that run where autograd is on, where it is off, and where a compiler asks what results look like."""


def _refuse_batched(*arguments: Any) -> NoReturn:
    cure = "ask for one gradient after another: is_grads_batched=False, vectorize=False"
    got = "some that a transform (vmap, is_grads_batched=True) wraps"
    raise UnsupportedError(describe("a compiled pipeline", wanted="plain tensors and gradients", got=got, cure=cure))


_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
"""What inductor knows of them. In mode "reduce-overhead" it makes CUDA graphs of the code between them: what a call keeps for its
backward pass is no output of the graph, and inductor refuses memory of its CUDA graphs that it knows nothing of.
"""

# torch.library.custom_op would wrap each of them five times over, which takes the host about as long as the call itself.
_LIBRARY: Any = torch.library.Library("opfuse", "FRAGMENT")
for _name, (_seen, _run, _fake) in _RUNS.items():
    _LIBRARY.define(_name + _SCHEMAS[_name], tags=_TAGS)
    for _function, _key in ((_seen, "Autograd"), (_run, "CompositeExplicitAutograd")):
        _LIBRARY.impl(_name, not_traced(_function), _key)  # where a graph broke, dynamo would look into it
    for _key in ("FuncTorchBatched", "Batched"):
        _LIBRARY.impl(_name, _refuse_batched, _key)
    torch.library.register_fake(f"opfuse::{_name}", _fake, lib=_LIBRARY)

HANDLERS[torch.ops.opfuse.pipeline.default] = _by_memory
