"""The ops of :mod:`opfuse.ops` with the constructors of te.ops: keywords that opfuse lacks are accepted at their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from opfuse import ops
from opfuse.core.spec import check_keywords
from opfuse.te.keywords import Keywords, names_over, without

if TYPE_CHECKING:
    from opfuse.core.operation import FusibleOperation

_CUT = "leave it out, and call parallelize_module(model, mesh, opfuse.TensorParallel())"
_PARALLEL = {
    "tensor_parallel_mode": (None, _CUT),
    "tensor_parallel_group": (None, _CUT),
    "sequence_parallel": (False, _CUT),
    "rng_state_tracker_function": (None, "set the seed around the constructor"),
    "userbuffers_options": (None, "leave it out: products and communication do not overlap here"),
}
_SCALED = {"activation_recompute_in_mlp": (False, "leave it out: the input is kept, and torch.utils.checkpoint keeps less")}
_WARM_UP = "leave it out: kernels are compiled when they first run, for any size"
_MARGINS = {"sm_margin": (0, "leave it out: norms take the whole device")}

KEYWORDS: Mapping[str, Keywords] = {
    "Linear": _PARALLEL,
    "BasicLinear": _PARALLEL,
    "AllReduce": {"reduce_in_backward": (True, "leave it out: gradients are equal on all ranks, as in te.ops")},
    "GroupedLinear": {"rng_state_tracker_function": _PARALLEL["rng_state_tracker_function"]},
    **dict.fromkeys(("ScaledSwiGLU", "ScaledSiTUGLU", "ScaledClampedQGeGLU", "ScaledSReLU", "ScaledTanhSReLU"), _SCALED),
    "LayerNorm": _MARGINS,
    "RMSNorm": _MARGINS,
    "L2Normalization": {"seq_length": (None, _WARM_UP), "micro_batch_size": (None, _WARM_UP)},
    "Bias": {"tensor_parallel": (False, _CUT), "tensor_parallel_group": (None, _CUT)},
}
"""By op: keywords of te.ops that opfuse lacks, their defaults, and the cure for any other value."""


def _taking(name: str, extra: Keywords) -> type[FusibleOperation]:
    """The op of that name with a constructor that accepts ``extra`` at their defaults. UnsupportedError for other values.

    It has the kind of opfuse's own op, so patterns that name this kind match it, too.
    """
    base: type[FusibleOperation] = getattr(ops, name)

    def __init__(self: Any, *args: Any, **given: Any) -> None:
        base.__init__(self, *args, **_without(base, extra, given))

    def __new__(cls: type[Any], *args: Any, **given: Any) -> Any:
        return base.__new__(cls, *args, **_without(base, extra, given))

    as_there = {"__module__": __name__, "__doc__": base.__doc__, "kind": base.kind}
    return type(name, (base,), {"__init__": __init__, "__new__": __new__, **as_there})


def _without(base: type, extra: Keywords, given: Mapping[str, Any]) -> dict[str, Any]:
    known = without(f"te.ops.{base.__name__}", extra, given)
    check_keywords(base, known)
    return known


_ADAPTED = {name: _taking(name, extra) for name, extra in KEYWORDS.items()}

__getattr__, __dir__ = names_over(ops, _ADAPTED)
