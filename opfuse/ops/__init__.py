"""Ops to compose pipelines of, and the means to add more."""

from typing import TYPE_CHECKING

from opfuse.compiler.registry import (
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
    register_fusion,
)
from opfuse.core.context import Context
from opfuse.core.fused import FusedOperation
from opfuse.core.operation import BasicOperation, FusibleOperation
from opfuse.errors import only_names
from opfuse.numerics.formula import formula
from opfuse.numerics.pointwise import Pointwise
from opfuse.ops.activation import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    Activation,
    ClampedSwiGLU,
    GatedActivation,
    GEGLUErf,
    GELUErf,
    ReGLU,
    ReLU,
    ScaledClampedQGeGLU,
    ScaledGEGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    ScaledTanhSReLU,
    SiLU,
    SiTUGLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from opfuse.ops.all_to_all import AllToAllDispatch, AllToAllReturn
from opfuse.ops.collective import AllGather, AllReduce, ReduceScatter
from opfuse.ops.cross_entropy import LinearCrossEntropy
from opfuse.ops.grouped_linear import GroupedLinear
from opfuse.ops.linear import BasicLinear, Linear
from opfuse.ops.norm import L2Normalization, LayerNorm, RMSNorm
from opfuse.ops.pointwise import AddExtraInput, Bias, ConstantScale, Dropout, PointwiseOperation
from opfuse.ops.raw_kernel import RawKernelOperation, raw_kernel
from opfuse.ops.routing import TokenCombine, TokenDispatch, TokenPermute
from opfuse.ops.sequential import Sequential
from opfuse.ops.structure import Identity, MakeExtraOutput, Quantize, Reshape

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "OPS",
    "QGEGLU",
    "QGELU",
    "Activation",
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "AllToAllDispatch",
    "AllToAllReturn",
    "BasicLinear",
    "BasicOperation",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "Context",
    "Dropout",
    "FusedOperation",
    "FusibleOperation",
    "GEGLUErf",
    "GELUErf",
    "GatedActivation",
    "GroupedLinear",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "Linear",
    "LinearCrossEntropy",
    "MakeExtraOutput",
    "Pointwise",
    "PointwiseOperation",
    "Quantize",
    "RMSNorm",
    "RawKernelOperation",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "SReGLU",
    "SReLU",
    "ScaledClampedQGeGLU",
    "ScaledGEGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "ScaledTanhSReLU",
    "Sequential",
    "SiLU",
    "SiTUGLU",
    "SwiGLU",
    "TokenCombine",
    "TokenDispatch",
    "TokenPermute",
    "formula",
    "raw_kernel",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
    "register_fusion",
]

OPS: dict[str, type[FusibleOperation]] = {
    cls.kind: cls
    for cls in (
        *(Linear, BasicLinear, Bias, GELU, GELUErf, QGELU, ReLU, SReLU, SiLU),
        *(GLU, GEGLU, GEGLUErf, QGEGLU, ReGLU, SReGLU, SwiGLU, ClampedSwiGLU, SiTUGLU),
        *(ScaledSwiGLU, ScaledGEGLU, ScaledSiTUGLU, ScaledClampedQGeGLU, ScaledSReLU, ScaledTanhSReLU),
        *(AddExtraInput, MakeExtraOutput, ConstantScale, Identity),
        *(Reshape, Quantize, Dropout, LayerNorm, RMSNorm, L2Normalization),
        *(GroupedLinear, TokenDispatch, TokenPermute, TokenCombine, LinearCrossEntropy),
    )
}
"""Built-in ops by the name that configurations use."""

if not TYPE_CHECKING:  # with which any name would pass
    __getattr__, __dir__ = only_names(__name__, __all__)
