"""Tensor and sequence parallelism of a pipeline, as a style for ``torch.distributed.tensor.parallel.parallelize_module``.

The weight of the first linear layer of a pipeline is cut along its rows, that of the last one along its columns. Each rank has a
part of the features in between, and its results are summands. So each layer takes in a collective, before the first product and
behind the last. Under sequence parallelism each rank also has a part of the tokens at both ends: ops before the first product
see those alone, and the collectives gather and scatter rows, in their quantized form where the format allows
(:mod:`opfuse.compiler.collectives`).

Parameters are DTensors, as optimizers, clipping and torch.distributed.checkpoint see them. A pipeline computes on plain tensors,
so during a call the local tensors stand in the parameters' places.

torch's own tensor-parallel styles hook single modules, which a pipeline does not call. An exception restores the parameters,
too. Casts of parts find over the ranks what the whole tensor would share, so every product multiplies the values that it
multiplies on one rank.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from opfuse.core.operation import FusibleOperation
from opfuse.domains import checked_arguments
from opfuse.errors import PipelineError, ShapeError, describe
from opfuse.ops.activation import GatedActivation
from opfuse.ops.collective import AllGather, AllReduce, ReduceScatter, SumGradients
from opfuse.ops.linear import Linear
from opfuse.ops.sequential import Sequential
from opfuse.tensors.quantizers import Quantizer
from opfuse.tensors.shards import join
from opfuse.tensors.tensor import QuantizedTensor

_ALONE = "the ranks of a tensor-parallel pipeline meet around it. Cure: compile the pipeline by itself, pipeline.compile()"


class TensorParallel(ParallelStyle):
    """``parallelize_module(pipeline, mesh, TensorParallel())`` for a ``Sequential`` of ops and a mesh of one dimension.

    The pipeline ends with a ``Linear``, which is cut along its columns; the first one is cut along its rows. Ops before that see
    the rank's tokens; those between work on features one by one. Parameters become DTensors, in place, with the names they had.
    Ranks start from the same values, and under scales of whole tensors they find them together.

    sequence_dim: the dimension of input and result of which each rank has a part, of one size; None: each rank has all of both.
    Rows travel along the first dimension, so any other than 0 costs a copy of the input.

    A gated activation between the two must find its halves side by side on each rank: give it a ``glu_interleave_size``. Weights
    that live quantized are cast anew from the values of their parts; one scale is found over the ranks.

    PipelineError for another module, or a pipeline that is not so; ShapeError for features that the ranks cannot share.
    """

    @checked_arguments(PipelineError)
    def __init__(self, *, sequence_dim: int | None = None) -> None:
        super().__init__()
        self.sequence_dim = sequence_dim

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        first, last = _checked(module)
        pipeline = cast(Sequential, module)
        gated = next((op for op in pipeline[first + 1 : last] if isinstance(op, GatedActivation)), None)
        parts = {first: _part(pipeline[first], 0, device_mesh, gated), last: _part(pipeline[last], 1, device_mesh, None)}
        if device_mesh.size() > 1:
            _join(parts[first], parts[last], device_mesh.get_group(), in_parts=self.sequence_dim is not None)
        for i, op in enumerate(pipeline):
            if i in parts:
                pipeline[i] = parts[i]
            else:
                for name, parameter in list(op.named_parameters(recurse=False)):
                    setattr(op, name, _spread(parameter, Replicate(), device_mesh))
        own = _Locals(pipeline, sums=self.sequence_dim is not None and device_mesh.size() > 1, mesh=device_mesh)
        first_dim = self.sequence_dim or 0

        def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            tokens = _moved(args[0], first_dim, 0).contiguous() if first_dim else args[0]
            own.enter()
            return (tokens, *args[1:])

        def leave(_: nn.Module, args: tuple[Any, ...], result: torch.Tensor | None) -> torch.Tensor | None:
            own.leave()
            return result if result is None or not first_dim else _moved(result, 0, first_dim)  # None: the call raised

        # Compiled code would hold the parameters that stand there at run time for those that stood there when it was traced.
        before, after = (torch.compiler.disable(hook, reason=_ALONE) for hook in (enter, leave))
        pipeline.register_forward_pre_hook(before)
        pipeline.register_forward_hook(after, always_call=True)
        return pipeline


class _Locals:
    """The local tensors of a pipeline's parameters, which stand in their places during a call."""

    def __init__(self, pipeline: Sequential, *, sums: bool, mesh: Any) -> None:
        self._slots = [(op._parameters, name) for op in pipeline for name, p in op._parameters.items() if p is not None]
        self._sums, self._group = sums, mesh.get_group()
        self._gathered: list[Any] = []

    def enter(self) -> None:
        if self._gathered:
            cure = "call it once at a time, not from a hook or a thread in the midst of its own call"
            raise PipelineError(describe("a parallel pipeline", wanted="no call that runs", got="one", cure=cure))
        self._gathered = [slot[name] for slot, name in self._slots]
        for (slot, name), parameter in zip(self._slots, self._gathered):
            slot[name] = self._local(parameter)  # type: ignore[assignment]

    def leave(self) -> None:
        for (slot, name), parameter in zip(self._slots, self._gathered):
            slot[name] = parameter
        self._gathered = []

    def _local(self, parameter: DTensor) -> torch.Tensor:
        """The rank's tensor. Of a parameter that all ranks have, each sees its own tokens: its gradient is summed."""
        local: torch.Tensor = parameter.to_local()
        if self._sums and parameter.placements[0].is_replicate() and local.requires_grad and torch.is_grad_enabled():
            local.register_hook(self._sum)
        return local

    def _sum(self, grad: torch.Tensor) -> torch.Tensor:
        total = grad.clone()
        dist.all_reduce(total, group=self._group)
        return total


def _checked(module: nn.Module) -> tuple[int, int]:
    """Where the two linear layers stand; PipelineError for another pipeline."""
    members: list[Any] = list(module) if isinstance(module, Sequential) else []
    products = [i for i, op in enumerate(members) if isinstance(op, Linear)]
    between = members[products[0] + 1 : products[-1]] if products else []
    strange = [op for op in members if not isinstance(op, FusibleOperation) or op.num_extra_inputs or op.num_extra_outputs]
    strange += [op for op in between if list(op.parameters()) or not all("elementwise" in part.traits for part in op.basic_ops)]
    if len(products) != 2 or products[-1] != len(members) - 1 or strange:
        wanted = "a Sequential of ops that ends with the second of two Linear, with elementwise ops between them"
        got = f"{type(module).__name__}({', '.join(type(op).__name__ for op in members)})"
        cure = "parallelize such a part of the model alone, and give ops of other tensors a pipeline of their own"
        raise PipelineError(describe("TensorParallel", wanted=wanted, got=got, cure=cure))
    return products[0], products[-1]


def _moved(x: torch.Tensor, source: int, target: int) -> torch.Tensor:
    """``x`` with a dimension of tokens elsewhere. ShapeError where it has none of that number beside its features."""
    number = source or target
    if not -x.dim() <= number < x.dim() - 1 or number == -1:
        wanted, cure = f"a dimension {number} of tokens before the features", "choose another sequence_dim"
        raise ShapeError(describe("TensorParallel input", wanted=wanted, got=f"shape {tuple(x.shape)}", cure=cure))
    return x.movedim(source, target)


def _join(first: Linear, last: Linear, group: Any, *, in_parts: bool) -> None:
    """Have the ranks meet before the product of the first layer and behind that of the last, whose bias is added to the sum."""
    before, behind = (AllGather(group), ReduceScatter(group)) if in_parts else (SumGradients(group), AllReduce(group))
    for layer, place, collective in ((first, 0, before), (last, 1, behind)):
        parts = list(layer.basic_ops)
        parts.insert(place, collective)
        layer.__dict__["parts"] = tuple(parts)


def _part(op: Linear, dim: int, mesh: Any, gated: GatedActivation | None) -> Linear:
    """The part of a linear layer on this rank, cut along ``dim`` of its weight. ShapeError if there are no equal parts."""
    sizes = [op.out_features, op.in_features]
    block = 1 if gated is None else 2 * (gated.glu_interleave_size or op.out_features // 2)
    if sizes[dim] % (block * mesh.size()):
        wanted, got = f"{mesh.size()} equal parts of the features, of a multiple of {block}", sizes[dim]
        cure = "change the number of features or of ranks" + (
            ", or the activation's glu_interleave_size" if gated is not None else ""
        )
        raise ShapeError(describe(f"TensorParallel {op.label}", wanted=wanted, got=got, cure=cure))
    sizes[dim] //= mesh.size()
    made = Linear(sizes[1], sizes[0], op.bias is not None, device="meta", dtype=op.weight.dtype).train(op.training)
    made.name = op.name
    made._product.__dict__["stored"] = op._product.stored
    made._product.__dict__["cut_over"] = dict.fromkeys(("weight", "input" if dim else "grad_output"), mesh.get_group())
    made.weight = _spread(op.weight, Shard(dim), mesh)
    if op.bias is not None:
        made.bias = _spread(op.bias, Replicate() if dim else Shard(0), mesh)
    return made


def _spread(parameter: nn.Parameter, placement: Placement, mesh: Any) -> nn.Parameter:
    """The parameter as a DTensor, of which this rank has a part or all."""
    local = parameter.detach()
    if isinstance(placement, Shard):
        local = _local_part(local, placement.dim, mesh)
    made = nn.Parameter(DTensor.from_local(local, mesh, [placement], run_check=False), requires_grad=parameter.requires_grad)
    join(made)
    return made


def _local_part(whole: torch.Tensor, dim: int, mesh: Any) -> torch.Tensor:
    """This rank's part; of a quantized tensor its rows as they are, or the cast of its values under one scale of all ranks."""
    part = whole.chunk(mesh.size(), dim)[mesh.get_local_rank()]
    if not isinstance(whole, QuantizedTensor) or isinstance(part, QuantizedTensor):
        rows: torch.Tensor = part.clone().contiguous()
        return rows
    quantizer = cast(Quantizer, whole.quantizer)
    cast_together = quantizer.reducing(mesh.get_group()) or quantizer
    return QuantizedTensor(cast_together.quantize(part.clone().contiguous()), quantizer=quantizer)
