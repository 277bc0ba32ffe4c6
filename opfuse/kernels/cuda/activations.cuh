// activations: the built-in elementwise ops on single fp32 values, for the device and for a host.
//
// Names       f(x, ...) is y; f_backward(dy, x, ...) is the gradient of x; f_backward_a and f_backward_b are those of the two
//             inputs of a gated unit. A fused chain and an op alone call the same functions.
// Rounding    every operation to nearest even in fp32, in the order of the definition. What holds no exponential (relu, srelu,
//             the clamps) is equal to it bit for bit; a sigmoid on the device is off by at most (|x| + 5) 2^-23 of its value.
// Non-finite  selections let NaN through; inf * 0 is NaN, as in x * sigmoid(x) at minus infinity.
// Compiled    without ftz, without implicit fma, as common.cuh, which comes first; a host needs <math.h> as well.
// Defined by  opfuse/kernels/activations.py.
#pragma once

// exp(x). On the device 2^(x log2(e)), whose one rounding of the argument costs |x| 2^-24, and the flush of results below 2^-126
// does not show in 1 + exp(x), the only use.
OPFUSE_FN float exponential(float x) {
#if defined(__CUDA_ARCH__)
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
    return y;
#else
    return expf(x);
#endif
}

// 1 / x, on the device to one unit in the last place; a result below 2^-126 is kept, as in the definition.
OPFUSE_FN float reciprocal(float x) {
#if defined(__CUDA_ARCH__)
    float y;
    asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return 1.0f / x;
#endif
}

OPFUSE_FN float sigmoid(float x) { return reciprocal(1.0f + exponential(-x)); }

OPFUSE_FN float sigmoid_backward(float dy, float x) {
    float s = sigmoid(x);
    return dy * (s * (1.0f - s));
}

// 2u = 2 sqrt(2/pi) (x + 0.044715 x^3), so that the tanh form 0.5 x (1 + tanh(u)) is x sigmoid(2u).
OPFUSE_FN float gelu_argument(float x) { return 1.5957691216057308f * (x + 0.044715f * (x * x * x)); }

OPFUSE_FN float gelu(float x) { return x * sigmoid(gelu_argument(x)); }

OPFUSE_FN float gelu_backward(float dy, float x) {
    float s = sigmoid(gelu_argument(x));
    float z = x * (s * (1.0f - s));
    return dy * (s + (1.5957691216057308f * z + 0.21406444881780073f * (z * x * x)));
}

OPFUSE_FN float swish(float x, float alpha) { return x * sigmoid(alpha * x); }

OPFUSE_FN float swish_backward(float dy, float x, float alpha) {
    float s = sigmoid(alpha * x);
    return dy * (s + alpha * (x * (s * (1.0f - s))));
}

OPFUSE_FN float relu(float x) { return x <= 0.0f ? 0.0f : x; }

OPFUSE_FN float relu_backward(float dy, float x) { return x <= 0.0f ? 0.0f : dy; }

OPFUSE_FN float srelu(float x) { return x <= 0.0f ? 0.0f : x * x; }

OPFUSE_FN float srelu_backward(float dy, float x) { return x <= 0.0f ? 0.0f : dy * (2.0f * x); }

OPFUSE_FN float clamp_gate(float a, float limit) { return a > limit ? limit : a; }

OPFUSE_FN float clamp_linear(float b, float limit) { return b < -limit ? -limit : clamp_gate(b, limit); }

OPFUSE_FN float clamped_swiglu(float a, float b, float limit, float alpha, float offset) {
    return swish(clamp_gate(a, limit), alpha) * (clamp_linear(b, limit) + offset);
}

OPFUSE_FN float clamped_swiglu_backward_a(float dy, float a, float b, float limit, float alpha, float offset) {
    float da = swish_backward(dy * (clamp_linear(b, limit) + offset), clamp_gate(a, limit), alpha);
    return a > limit ? 0.0f : da;
}

OPFUSE_FN float clamped_swiglu_backward_b(float dy, float a, float b, float limit, float alpha) {
    float db = dy * swish(clamp_gate(a, limit), alpha);
    return b > limit || b < -limit ? 0.0f : db;
}

OPFUSE_FN float softcap(float x, float beta) { return beta * tanhf(x / beta); }

OPFUSE_FN float situglu(float a, float b, float beta1, float beta2) {
    return softcap(a, beta1) * sigmoid(a) * softcap(b, beta2);
}

OPFUSE_FN float situglu_backward_a(float dy, float a, float b, float beta1, float beta2) {
    float s = sigmoid(a), t = tanhf(a / beta1);
    float slope = (1.0f - t * t) * s + beta1 * t * (s * (1.0f - s));
    return dy * softcap(b, beta2) * slope;
}

OPFUSE_FN float situglu_backward_b(float dy, float a, float b, float beta1, float beta2) {
    float t = tanhf(b / beta2);
    return dy * (softcap(a, beta1) * sigmoid(a)) * (1.0f - t * t);
}
