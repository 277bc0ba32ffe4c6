"""The elementwise ops that come with opfuse: tables of declared math. Their CUDA functions are in cuda/activations.cuh.

Non-finite inputs stay visible: a NaN in gives a NaN out, ReLU included (as ``torch.relu``; there a NaN also passes the
gradient, as a positive input does). Minus infinity gives NaN where the formula is x * sigmoid(...), a product of inf and 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from opfuse.numerics.formula import formula, sigmoid
from opfuse.numerics.pointwise import Pointwise, gated, scaled

Derivatives = tuple[Tensor, ...]

# 2u of the tanh form: 2 sqrt(2/pi) (x + 0.044715 x^3), and its slope's quadratic coefficient.
GELU_LINEAR = 2 * math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715
GELU_SLOPE = 3 * GELU_LINEAR * GELU_CUBIC
# Of the exact form, x Phi(x): the argument of erfc is x times the first, the density of Phi exp(-x^2 / 2) times the second.
ERFC_LINEAR = -math.sqrt(0.5)
NORMAL_DENSITY = 1 / math.sqrt(2 * math.pi)


def gelu(x: Tensor) -> Tensor:
    """x * sigmoid(2u): the tanh form 0.5 x (1 + tanh(u)) without its cancellation for x < -4."""
    return x * sigmoid(GELU_LINEAR * (x + GELU_CUBIC * (x * x * x)))


def gelu_backward(dy: Tensor, x: Tensor) -> Derivatives:
    """dy * (s + x s (1 - s) (2u)'), multiplied so that an overflowing x^2 never meets a zero."""
    s = sigmoid(GELU_LINEAR * (x + GELU_CUBIC * (x * x * x)))
    z = x * (s * (1 - s))
    return (dy * (s + (GELU_LINEAR * z + GELU_SLOPE * (z * x * x))),)


def normal_cdf(x: Tensor) -> Tensor:
    """Phi(x) = erfc(-x / sqrt 2) / 2, which has none of the cancellation of (1 + erf(x / sqrt 2)) / 2 for x < -2."""
    cdf: torch.Tensor = 0.5 * torch.special.erfc(ERFC_LINEAR * x)
    return cdf


def gelu_erf(x: Tensor) -> Tensor:
    """x * Phi(x): GELU as it is defined, not its tanh form."""
    return x * normal_cdf(x)


def gelu_erf_backward(dy: Tensor, x: Tensor) -> Derivatives:
    """dy * (Phi(x) + x phi(x)), phi the density; an overflowing x^2 makes it 0."""
    return (dy * (normal_cdf(x) + x * (NORMAL_DENSITY * torch.exp(-0.5 * (x * x)))),)


def swish(x: Tensor, alpha: float) -> Tensor:
    """x * sigmoid(alpha x): SiLU for alpha 1, QGELU for alpha 1.702."""
    return x * sigmoid(alpha * x)


def swish_backward(dy: Tensor, x: Tensor, alpha: float) -> Tensor:
    """dy * (s + alpha x s (1 - s))."""
    s = sigmoid(alpha * x)
    return dy * (s + alpha * (x * (s * (1 - s))))


def zero_where(dead: Tensor, value: Tensor) -> Tensor:
    """``value`` with +0 where ``dead``: a selection, so NaN in ``value`` does not pass where it is dead."""
    return torch.where(dead, 0.0, value)


def clamp_gate(a: Tensor, limit: float) -> Tensor:
    """min(a, limit); NaN stays."""
    return torch.where(a > limit, limit, a)


def clamp_linear(b: Tensor, limit: float) -> Tensor:
    """b limited to [-limit, limit]; NaN stays."""
    return torch.where(b < -limit, -limit, clamp_gate(b, limit))


def clamped_swiglu(a: Tensor, b: Tensor, *, limit: float, alpha: float, glu_linear_offset: float) -> Tensor:
    """swish(min(a, limit), alpha) * (clamp(b, -limit, limit) + glu_linear_offset)."""
    return swish(clamp_gate(a, limit), alpha) * (clamp_linear(b, limit) + glu_linear_offset)


def clamped_swiglu_backward(
    dy: Tensor, a: Tensor, b: Tensor, *, limit: float, alpha: float, glu_linear_offset: float
) -> Derivatives:
    """Gradients of :func:`clamped_swiglu`: zero where a half was cut, untouched at the limit itself."""
    gate, linear = clamp_gate(a, limit), clamp_linear(b, limit) + glu_linear_offset
    da = zero_where(a > limit, swish_backward(dy * linear, gate, alpha))
    return da, zero_where((b > limit) | (b < -limit), dy * swish(gate, alpha))


def softcap(x: Tensor, beta: float) -> Tensor:
    """beta * tanh(x / beta)."""
    return beta * torch.tanh(x / beta)


def tanh_srelu(x: Tensor, *, tanh_clamp_scale: float) -> Tensor:
    """softcap(x, tanh_clamp_scale)^2 for x > 0, else 0: at most tanh_clamp_scale^2."""
    cap = softcap(x, tanh_clamp_scale)
    return zero_where(x <= 0, cap * cap)


def tanh_srelu_backward(dy: Tensor, x: Tensor, *, tanh_clamp_scale: float) -> Derivatives:
    """dy * 2 s t (1 - t^2), s the scale, t = tanh(x / s)."""
    t = torch.tanh(x / tanh_clamp_scale)
    return (zero_where(x <= 0, dy * (2 * (tanh_clamp_scale * t) * (1 - t * t))),)


def situglu(a: Tensor, b: Tensor, *, beta1: float, beta2: float) -> Tensor:
    """softcap(a, beta1) * sigmoid(a) * softcap(b, beta2)."""
    return softcap(a, beta1) * sigmoid(a) * softcap(b, beta2)


def situglu_backward(dy: Tensor, a: Tensor, b: Tensor, *, beta1: float, beta2: float) -> Derivatives:
    """Gradients of :func:`situglu`."""
    s, ta, tb = sigmoid(a), torch.tanh(a / beta1), torch.tanh(b / beta2)
    slope = (1 - ta * ta) * s + beta1 * ta * (s * (1 - s))
    return dy * (beta2 * tb) * slope, dy * (beta1 * ta * s) * (1 - tb * tb)


def table(*entries: Pointwise) -> dict[str, Pointwise]:
    """The entries by name."""
    return {p.name: p for p in entries}


def swish_op(name: str, alpha: float) -> Pointwise:
    """y = x * sigmoid(alpha x)."""
    return Pointwise(
        name,
        forward=f"swish(x, {alpha}f)",
        backward=(f"swish_backward(dy, x, {alpha}f)",),
        value=lambda x: swish(x, alpha),
        grad=lambda dy, x: (swish_backward(dy, x, alpha),),
    )


SIGMOID = Pointwise(
    "sigmoid",
    forward="sigmoid(x)",
    backward=("sigmoid_backward(dy, x)",),
    value=sigmoid,
    grad=lambda dy, x: (dy * (sigmoid(x) * (1 - sigmoid(x))),),
)
GELU = Pointwise("gelu", forward="gelu(x)", backward=("gelu_backward(dy, x)",), value=gelu, grad=gelu_backward)
GELU_ERF = Pointwise(
    "gelu_erf",
    forward="gelu_erf(x)",
    backward=("gelu_erf_backward(dy, x)",),
    value=gelu_erf,
    grad=gelu_erf_backward,
)
QGELU = swish_op("qgelu", 1.702)
SILU = swish_op("silu", 1.0)
RELU = Pointwise(
    "relu",
    forward="relu(x)",
    backward=("relu_backward(dy, x)",),
    value=lambda x: zero_where(x <= 0, x),
    grad=lambda dy, x: (zero_where(x <= 0, dy),),
)
SRELU = Pointwise(
    "srelu",
    forward="srelu(x)",
    backward=("srelu_backward(dy, x)",),
    value=lambda x: zero_where(x <= 0, x * x),
    grad=lambda dy, x: (zero_where(x <= 0, dy * (2 * x)),),
)
TANH_SRELU = Pointwise(
    "tanh_srelu",
    forward="tanh_srelu(x, tanh_clamp_scale)",
    backward=("tanh_srelu_backward(dy, x, tanh_clamp_scale)",),
    value=tanh_srelu,
    grad=tanh_srelu_backward,
    constants=("tanh_clamp_scale",),
)

CLAMPED_SWIGLU = Pointwise(
    "clamped_swiglu",
    forward="clamped_swiglu(a, b, limit, alpha, glu_linear_offset)",
    backward=(
        "clamped_swiglu_backward_a(dy, a, b, limit, alpha, glu_linear_offset)",
        "clamped_swiglu_backward_b(dy, a, b, limit, alpha)",
    ),
    value=clamped_swiglu,
    grad=clamped_swiglu_backward,
    inputs=("a", "b"),
    constants=("limit", "alpha", "glu_linear_offset"),
)
SITUGLU = Pointwise(
    "situglu",
    forward="situglu(a, b, beta1, beta2)",
    backward=("situglu_backward_a(dy, a, b, beta1, beta2)", "situglu_backward_b(dy, a, b, beta1, beta2)"),
    value=situglu,
    grad=situglu_backward,
    inputs=("a", "b"),
    constants=("beta1", "beta2"),
)

BIAS = formula("bias", lambda x, bias: x + bias, operands={"bias": "row"})
CONSTANT_SCALE = formula("constant_scale", lambda x, scale: x * scale, constants=("scale",))
ADD = formula("add", lambda x, residual: x + residual, operands={"residual": "full"})
# The mask holds 0 and 1 and ``scale`` is 1 / (1 - p): a mask scaled beforehand would round 1 / (1 - p) to its own dtype.
DROPOUT = Pointwise(
    "dropout",
    forward="(x * mask) * scale",
    backward=("(dy * mask) * scale",),
    value=lambda x, mask, scale: (x * mask) * scale,
    grad=lambda dy, x, mask, scale: ((dy * mask) * scale,),
    operands={"mask": "full"},
    constants=("scale",),
)

ACTIVATIONS = table(GELU, GELU_ERF, QGELU, RELU, SRELU, SILU)
"""Unary: y has the shape of x."""

GATED = table(
    gated(SIGMOID, "glu"),
    gated(GELU, "geglu"),
    gated(GELU_ERF, "geglu_erf"),
    gated(QGELU, "qgeglu"),
    gated(RELU, "reglu"),
    gated(SRELU, "sreglu"),
    gated(SILU, "swiglu"),
    CLAMPED_SWIGLU,
    SITUGLU,
)
"""y has half the columns of x; the first half is the gated one."""

SCALED = table(
    scaled(GATED["swiglu"], "scaled_swiglu"),
    scaled(GATED["geglu"], "scaled_geglu"),
    scaled(SITUGLU, "scaled_situglu"),
    scaled(CLAMPED_SWIGLU, "scaled_clamped_qgeglu"),
    scaled(SRELU, "scaled_srelu"),
    scaled(TANH_SRELU, "scaled_tanh_srelu"),
)
"""y times one differentiable scale for each row."""

ARITHMETIC = table(BIAS, CONSTANT_SCALE, ADD, DROPOUT)
"""Ops without transcendental functions and without saved input."""

POINTWISE = {**ACTIVATIONS, **GATED, **SCALED, **ARITHMETIC}
"""Every built-in op by name."""
