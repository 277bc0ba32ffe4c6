"""High-precision masters of parameters that live quantized, whole or sharded by FSDP2."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from opfuse.errors import DtypeError, describe
from opfuse.tensors.shards import join
from opfuse.tensors.tensor import QuantizedTensor
from opfuse.torch_private.sharding import local_tensor


def stored_in(parameter: torch.Tensor) -> torch.Tensor:
    """The tensor that holds the values on this rank: that of a DTensor, or ``parameter`` itself."""
    held: torch.Tensor = local_tensor(parameter, parameter)
    return held


DTYPES = (torch.float32, torch.bfloat16)
"""What masters may have: fp16 has too few exponents for weights that a scale brings into range."""


def master_weights(parameters: Iterable[torch.Tensor], *, dtype: torch.dtype = torch.float32) -> dict[torch.Tensor, torch.Tensor]:
    """A master in ``dtype`` for each of ``parameters`` that is stored quantized, by the parameter; none for others.

    A master has the parameter's shape and device and, where ``fully_shard`` made it a DTensor, its placement: an optimizer
    updates it, and ``parameter.copy_(master)`` casts it, each rank its own rows. It starts from the values that
    ``quantized_model_init`` preserved, if the parameter still is their cast, else from the dequantized ones; always from these
    after ``fully_shard``, which keeps no attributes. A master in bf16 has these values rounded; it is for an optimizer that
    rounds its updates at random, since rounding to nearest loses those below 2**-9 of a value.
    DtypeError for what is no tensor, such as a module or the pairs of ``named_parameters()``, which would have no masters, and
    for a dtype that is neither torch.float32 nor torch.bfloat16.
    """
    checked(dtype, "master_weights")
    alone = isinstance(parameters, (torch.Tensor, torch.nn.Module)) or not isinstance(parameters, Iterable)
    given: list[Any] = [parameters] if alone else [*parameters]
    wrong = next((parameter for parameter in given if not isinstance(parameter, torch.Tensor)), None)
    if wrong is not None:
        got = f"an element of type {type(wrong).__name__}"
        raise DtypeError(describe("master_weights", wanted="parameters", got=got, cure="pass model.parameters()"))
    return {p: _master(p, dtype) for p in given if isinstance(stored_in(p), QuantizedTensor)}


def checked(dtype: torch.dtype, where: str) -> torch.dtype:
    """``dtype``, if masters may have it; else DtypeError."""
    if dtype not in DTYPES:
        cure = "leave dtype out, or pass torch.bfloat16 beside an optimizer that rounds at random"
        raise DtypeError(describe(where, wanted="masters in torch.float32 or torch.bfloat16", got=str(dtype), cure=cure))
    return dtype


def strayed(parameter: torch.Tensor, master: torch.Tensor) -> bool:
    """Whether something else wrote ``parameter``: on this rank it is neither the cast of ``master`` nor equal to it."""
    weight, master = stored_in(parameter).detach(), stored_in(master)
    values = weight.to(torch.float32)
    # The cast is one of all ranks, at all times, and from the master's own dtype, in which some scale rules compute.
    cast = weight.clone().copy_(master).to(torch.float32)
    return not torch.equal(values, master.to(torch.float32)) and not torch.equal(values, cast)


@torch.no_grad()
def _master(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    join(parameter)
    preserved = parameter.get_high_precision_init_val() if isinstance(parameter, QuantizedTensor) else None
    if preserved is not None:
        master = torch.empty_like(parameter, dtype=torch.float32).copy_(preserved)
        if not strayed(parameter, master):
            return master.to(dtype)
    return torch.empty_like(parameter, dtype=dtype).copy_(exact(parameter))


def exact(parameter: torch.Tensor) -> torch.Tensor:
    """The values of a parameter in fp32, without a rounding to its nominal dtype: a master at them is cast to the same bytes."""
    return parameter.detach().to(torch.float32)
