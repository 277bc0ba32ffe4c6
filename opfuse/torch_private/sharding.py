"""Parameters and activations over several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opfuse.torch_private.names import attribute, private


def _of_dtensors(read: Any) -> bool:
    from torch.distributed.tensor import DTensor

    return hasattr(DTensor, "_local_tensor") or "_local_tensor" in DTensor.__annotations__


_local: Callable[[Any], torch.Tensor] = attribute(
    "torch.distributed.tensor.DTensor._local_tensor",
    _of_dtensors,
    use="the shard of a parameter, which to_local() would hide from autograd",
    breaks="sharded quantized parameters would be taken for plain ones",
    needs="torch.distributed",
    slow=True,
)


def local_tensor(tensor: Any, default: Any) -> Any:
    """The tensor of this rank in a DTensor, itself and no view; ``default`` for what is no DTensor."""
    try:
        return _local(tensor)
    except AttributeError:
        return default


def _is_flat(read: Callable[[Any], bool]) -> bool:
    from torch.distributed.fsdp._flat_param import FlatParameter

    flat = torch.nn.Parameter(torch.zeros(2))
    plain = isinstance(flat, FlatParameter)
    flat._is_flat_param = True  # type: ignore[attr-defined]
    return isinstance(flat, FlatParameter) and not plain


_flat: Callable[[Any], bool] = attribute(
    "torch.distributed.fsdp.FlatParameter._is_flat_param",
    _is_flat,
    use="recognising parameters that FullyShardedDataParallel has flattened",
    breaks="they would fail with an error about shapes instead of one that names the cure",
    needs="torch.distributed",
    slow=True,
)


def is_flat_parameter(tensor: Any) -> bool:
    """Whether a tensor is a flat parameter of ``FullyShardedDataParallel``."""
    try:
        return bool(_flat(tensor))
    except AttributeError:
        return False


def _group_attributes(*names: str) -> Callable[[Any], bool]:
    def check(read: Any) -> bool:
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import (  # type: ignore[attr-defined]
            FSDPParamGroup,
            TrainingState,
        )

        assigned = set(FSDPParamGroup.__init__.__code__.co_names) | set(dir(FSDPParamGroup))
        return assigned.issuperset(names) and hasattr(TrainingState, "PRE_BACKWARD")

    return check


training_state: Callable[[Any], Any] = attribute(
    "torch.distributed.fsdp.FSDPParamGroup._training_state",
    _group_attributes("_training_state"),
    use="telling which pass FSDP2 gathers for",
    breaks="both planes of a quantized parameter would travel in each pass, or the wrong one",
    needs="torch.distributed",
    slow=True,
)
reshards_after_forward: Callable[[Any], bool] = attribute(
    "torch.distributed.fsdp.FSDPParamGroup._reshard_after_forward",
    _group_attributes("_reshard_after_forward"),
    use="telling whether FSDP2 gathers again for the backward pass",
    breaks="a plane that is needed would not be gathered",
    needs="torch.distributed",
    slow=True,
)


def is_parameter_group(owner: object) -> bool:
    """Whether an object is FSDP2's group of parameters."""
    return hasattr(owner, "_training_state") and hasattr(owner, "_reshard_after_forward")


def _has_collectives(namespace: Any) -> bool:
    return all(hasattr(namespace, name) for name in ("all_gather_into_tensor", "all_reduce", "wait_tensor"))


functional_collectives: Any = private(
    "torch.ops._c10d_functional",
    _has_collectives,
    use="gathering quantized activations over ranks",
    breaks="tensor parallelism with quantized collectives would fail",
    needs="torch.distributed",
)
"""Collectives as operations that return their results."""
