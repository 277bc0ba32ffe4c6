"""Expert parallelism of a converted mixture, as a style for ``torch.distributed.tensor.parallel.parallelize_module``.

Each rank keeps an equal part of the experts, as DTensors cut along their first dimension. At a call, the rows of its tokens go to
the ranks of their experts, and results come back (:mod:`opfuse.ops.all_to_all`); the router, and all before and behind, is every
rank's own. So the model's own forward of the module cannot run any more: it knows the experts of one rank. The pipeline runs for
every call, without a recipe in high precision, and a call that it is not for is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from opfuse.convert.converted import converted
from opfuse.convert.experts import Routed, Spread, pipeline_of, routed
from opfuse.core.tracers import break_graph, check_exported, outside
from opfuse.domains import checked_arguments
from opfuse.errors import ConversionError, ShapeError, describe, number_of
from opfuse.tensors.tensor import QuantizedTensor


class ExpertParallel(ParallelStyle):
    """``parallelize_module(model, mesh, {"layers.*.experts": ExpertParallel()})`` for experts that :func:`opfuse.fuse_` has
    converted, and a mesh of one dimension, of whose ranks each has tokens of its own, of any number.

    quantized: under a recipe, rows and gradients travel as the codes of the products' casts where the format can, in about half
    the bytes; False: always in 16 bits, so the products are those of one rank.

    A gradient of an expert is the sum over the tokens of all ranks. ``fully_shard`` along another dimension of the mesh goes
    around it. torch.compile breaks its graph at the experts. ConversionError for a module that is not converted, or whose experts
    are stored quantized, and for a call in which the pipeline cannot run; ShapeError for experts that the ranks cannot share.
    """

    @checked_arguments(ConversionError)
    def __init__(self, *, quantized: bool = True) -> None:
        super().__init__()
        self.quantized = quantized

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        before = _checked(module, device_mesh.size())
        for name, parameter in before.found.module._parameters.items():
            if parameter is not None:
                module._parameters[name] = _part(parameter, device_mesh)
        over = Spread(device_mesh.get_group(), device_mesh.get_local_rank(), device_mesh.size(), self.quantized)
        made = routed(SpreadExperts, before.found, pipeline_of(before.found, before.path, over), before.path, before.recipe)
        made.report, made.strict = before.report, before.strict
        for name, op in made.products.items():
            slots = [slot for _, slot in op.quantizer_slots()]
            op.__dict__["quantizer_states"] = before.products[name].quantizer_states.part(slots)
        made.install()
        return module


class SpreadExperts(Routed):
    """The forward of a module of whose experts this rank has a part."""

    takes_none = True  # of whose experts other ranks may have tokens
    over_ranks = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            check_exported("experts over ranks")
            break_graph("ranks exchange as many rows of experts as values say")
            return outside(_call_outside)(self, args, kwargs)
        return super().__call__(*args, **kwargs)

    def _run(self, args: Any, kwargs: Any) -> Any:
        given = self._given(args, kwargs)
        change = self.change()
        if given is None or change is not None or not self._is_proven(given):
            got = change or ", ".join(_told(each) for each in (*args, *kwargs.values()))
            wanted = f"{', '.join(self.arguments)}: tokens (n, width), experts (n, k), weights (n, k), in the experts' dtype"
            cure = "call it as the model did when fuse_ converted it"
            raise ConversionError(describe(f"{self.label}, experts over ranks", wanted=wanted, got=got, cure=cure))
        x, *arguments = given
        return self.compute(x, arguments)


def _told(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def _call_outside(forward: SpreadExperts, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What compiled code calls outside of its graphs."""
    return forward(*args, **kwargs)


def _checked(module: nn.Module, ranks: int) -> Routed:
    """The forward of converted experts; ConversionError or ShapeError for what cannot be spread over ``ranks``."""
    own, where = converted(module), f"ExpertParallel of {type(module).__name__}"
    if not isinstance(own, Routed) or isinstance(own, SpreadExperts):
        got = "one that is spread already" if isinstance(own, SpreadExperts) else "another module"
        cure = "call opfuse.fuse_(model) first, and name the modules that its report calls experts, once each"
        raise ConversionError(describe(where, wanted="experts in one module, converted", got=got, cure=cure))
    if any(isinstance(each, (QuantizedTensor, DTensor)) for each in module._parameters.values()):
        cure = "spread experts of plain parameters, before fully_shard; they are cast at each call"
        raise ConversionError(describe(where, wanted="plain parameters", got="stored quantized or sharded ones", cure=cure))
    experts, _, _ = own.found.sizes
    if experts % ranks:
        cure = "spread them over a number of ranks that divides theirs"
        wanted, got = f"{ranks} equal parts of the experts", number_of(experts, "expert")
        raise ShapeError(describe(where, wanted=wanted, got=got, cure=cure))
    return own


def _part(parameter: nn.Parameter, mesh: Any) -> nn.Parameter:
    """The experts of this rank, as a DTensor."""
    local = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
    return nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False), requires_grad=parameter.requires_grad)
