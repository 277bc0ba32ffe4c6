// e2m1: E2M1 codes of many values by fp32 arithmetic, for hardware without a conversion to 4 bits.
//
// The codes of 0 ... 2, 2 ... 4 and 4 ... 6 are steps of 1/2, 1 and 2, so a code is the sum of three clamped values, each
// rounded to an integer. Next to 2^23 an fp32 addition rounds to integers, to nearest even like the code: where the second and
// third value are not 0, those before them have filled an even number of steps. Clamping to 0 ... 1 is part of an instruction.
// Compiled    as common.cuh; the fused additions here round once, of products that are exact.
// Defined by  opfuse/numerics/scalars.py, encode and encode_e2m1_stochastic, to the last bit for every magnitude but NaN.
#pragma once
#include "common.cuh"

// a b + c, rounded once.
OPFUSE_FN float multiply_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
    return __fmaf_rn(a, b, c);
#else
    return __builtin_fmaf(a, b, c);
#endif
}

// x within 0 ... 1; 0 for NaN.
OPFUSE_FN float clamped(float x) {
#if defined(__CUDA_ARCH__)
    return __saturatef(x);
#else
    return x > 0.0f ? x < 1.0f ? x : 1.0f : 0.0f;
#endif
}

// x 2^-126, rounded down: from bit 22 on, its bits are the E2M1 code of 0 <= x < 8, rounded down.
OPFUSE_FN u32 cut_e2m1(float x) {
#if defined(__CUDA_ARCH__)
    return bits_of(__fmul_rz(x, power_of_two<-126>()));
#else
    double units = double(x) * 0x1p23;  // of 2^-149
    return units < 0x1p24 ? u32(units) : bits_of(x) - (126u << 23);
#endif
}

// The sum of an integer, even and in 2^23 ... 2^24 - 8, and the code of a magnitude; inf has that of 6.
OPFUSE_FN float add_e2m1(float sum, float magnitude) {
    sum = multiply_add(clamped(magnitude * 0.5f), 4.0f, sum);
    sum = multiply_add(clamped(multiply_add(magnitude, 0.5f, -1.0f)), 2.0f, sum);
    return sum + clamped(multiply_add(magnitude, 0.5f, -2.0f));
}

// The codes of magnitude(0) ... magnitude(3), four bits each, the first in the lowest bits. Bits above the 16th are arbitrary.
template <class Magnitude>
OPFUSE_FN u32 four_e2m1(Magnitude magnitude) {
    constexpr float UNIT = 8388608.0f;  // 2^23
    float sum = add_e2m1(UNIT, magnitude(3));
    sum = add_e2m1(multiply_add(sum, 16.0f, -15.0f * UNIT), magnitude(2));
    sum = add_e2m1(multiply_add(sum, 16.0f, -15.0f * UNIT), magnitude(1));
    return bits_of(add_e2m1(multiply_add(sum, 16.0f, -15.0f * UNIT), magnitude(0)));
}

// Byte i of a word as 512ths: next to 64, an fp32 counts them in its second byte.
OPFUSE_FN float random_share(u32 word, int i) {
#if defined(__CUDA_ARCH__)
    u32 bits = __byte_perm(word, 0x42800000, 0x7604 | i << 4);
#else
    u32 bits = 0x42800000 | (word >> 8 * i & 0xff) << 8;
#endif
    return float_of(bits) - 64.0f;
}

// The code of a magnitude, raised by `share` of twice the step between codes there, then rounded down.
OPFUSE_FN u32 e2m1_stochastic(float magnitude, float share) {
    float x = magnitude < E2M1::MAX ? magnitude : E2M1::MAX;
    float twice_step = float_of(bits_of(x < 1.0f ? 1.0f : x) & INF_BITS);
    return cut_e2m1(multiply_add(share, twice_step, x)) >> 22;
}

// The value of a code without sign.
OPFUSE_FN float e2m1_value(u32 code) { return float_of(code << 22) * power_of_two<126>(); }
