// exponential: exp of what is not positive, and tanh, for the device and for a host.
//
// Rounding    to nearest even in fp32, each operation alone: equal to the definition bit for bit
// Compiled    without ftz, without implicit fma, as common.cuh
// Defined by  opfuse/numerics/exponential.py
#pragma once
#include "common.cuh"

// 2^t = scale (1 + q), t <= 0; below -126 the scale is anything.
struct Power {
    float q, scale;
};

OPFUSE_FN Power power_of(float t) {
    constexpr float WHOLE = 12583039.0f;
    float shifted = t + WHOLE;
    float f = t - (shifted - WHOLE);
    float q = f * 1.53533621e-04f;
    q = (q + 1.33988746e-03f) * f;
    q = (q + 9.61843736e-03f) * f;
    q = (q + 5.55033247e-02f) * f;
    q = (q + 2.40226479e-01f) * f;
    q = (q + 6.93147203e-01f) * f;
    return {q, float_of(bits_of(shifted) << 23)};
}

OPFUSE_FN float exponential(float x) {
    float t = x * 1.4426950408889634f;
    Power power = power_of(t);
    return t < -126.0f ? 0.0f : (power.q + 1.0f) * power.scale;
}

OPFUSE_FN float hyperbolic_tangent(float x) {
    float t = float_of(magnitude_of(x)) * -2.8853900817779268f;
    Power power = power_of(t);
    float less_one = t < -126.0f ? -1.0f : power.scale * power.q + (power.scale - 1.0f);
    float y = -less_one / (less_one + 2.0f);
    return float_of(magnitude_of(y) | (bits_of(x) & ~MAGNITUDE));
}
