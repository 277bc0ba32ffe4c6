// activations: the built-in elementwise ops on single fp32 values, for the device and for a host.
//
// Names       f(x, ...) is y; f_backward(dy, x, ...) is the gradient of x; f_backward_a and f_backward_b are those of the two
//             inputs of a gated unit. A fused chain and an op alone call the same functions.
// Rounding    to nearest even in fp32. Ops without an exponential (relu, srelu, the clamps) equal their definition bit for bit. The
//             relative error of a sigmoid of z is at most (|z| + 5) 2^-23, and on the device it is 0 below 2^-126; that of the normal
//             distribution at x is at most (x^2 + 5) 2^-23.
// Non-finite  selections let NaN through; inf * 0 is NaN, as in x * sigmoid(x) at minus infinity.
// Compiled    without ftz, without implicit fma, as common.cuh, which comes first; a host needs <math.h> as well.
// Defined by  opfuse/numerics/activations.py.
#pragma once

constexpr float LOG2_E = 1.4426950408889634f;

// 1 / (1 + 2^t): the sigmoid of z for t = -z log2(e). A power of two that is flushed to 0 does not show beside 1.
OPFUSE_FN float logistic(float t) {
#if defined(__CUDA_ARCH__)
    float power, y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(t));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + power));
    return y;
#else
    return 1.0f / (1.0f + exp2f(t));
#endif
}

OPFUSE_FN float sigmoid(float x) { return logistic(x * -LOG2_E); }

// s - s^2, the slope of a sigmoid whose value is s.
OPFUSE_FN float sigmoid_slope(float s) { return fmaf(-s, s, s); }

OPFUSE_FN float sigmoid_backward(float dy, float x) { return dy * sigmoid_slope(sigmoid(x)); }

// sigmoid(2u) with 2u = 2 sqrt(2/pi) (x + 0.044715 x^3), so that the tanh form 0.5 x (1 + tanh(u)) is x sigmoid(2u). The factors
// are -2 sqrt(2/pi) log2(e), and 0.044715 times that.
OPFUSE_FN float gelu_sigmoid(float x) { return logistic(x * fmaf(x * x, -0.1029432395800235f, -2.302208198144325f)); }

OPFUSE_FN float gelu(float x) { return x * gelu_sigmoid(x); }

// An x^2 that overflows never meets a 0.
OPFUSE_FN float gelu_backward(float dy, float x) {
    float s = gelu_sigmoid(x), z = x * sigmoid_slope(s);
    return dy * fmaf(z * x * x, 0.21406444881780073f, fmaf(z, 1.5957691216057308f, s));
}

// Phi(x), the normal distribution: erfc(-x / sqrt 2) / 2.
OPFUSE_FN float normal_cdf(float x) { return 0.5f * erfcf(x * -0.7071067811865476f); }

OPFUSE_FN float gelu_erf(float x) { return x * normal_cdf(x); }

// An x^2 that overflows makes the density 0.
OPFUSE_FN float gelu_erf_backward(float dy, float x) {
    float density = 0.3989422804014327f * exp2f(x * x * (-0.5f * LOG2_E));
    return dy * fmaf(x, density, normal_cdf(x));
}

OPFUSE_FN float swish(float x, float alpha) { return x * logistic(x * (alpha * -LOG2_E)); }

OPFUSE_FN float swish_backward(float dy, float x, float alpha) {
    float s = logistic(x * (alpha * -LOG2_E));
    return dy * fmaf(alpha, x * sigmoid_slope(s), s);
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

OPFUSE_FN float tanh_srelu(float x, float scale) {
    float cap = softcap(x, scale);
    return x <= 0.0f ? 0.0f : cap * cap;
}

OPFUSE_FN float tanh_srelu_backward(float dy, float x, float scale) {
    float t = tanhf(x / scale);
    return x <= 0.0f ? 0.0f : dy * (2.0f * (scale * t) * (1.0f - t * t));
}

OPFUSE_FN float situglu(float a, float b, float beta1, float beta2) {
    return softcap(a, beta1) * sigmoid(a) * softcap(b, beta2);
}

OPFUSE_FN float situglu_backward_a(float dy, float a, float b, float beta1, float beta2) {
    float s = sigmoid(a), t = tanhf(a / beta1);
    float slope = (1.0f - t * t) * s + beta1 * t * sigmoid_slope(s);
    return dy * softcap(b, beta2) * slope;
}

OPFUSE_FN float situglu_backward_b(float dy, float a, float b, float beta1, float beta2) {
    float t = tanhf(b / beta2);
    return dy * (softcap(a, beta1) * sigmoid(a)) * (1.0f - t * t);
}
