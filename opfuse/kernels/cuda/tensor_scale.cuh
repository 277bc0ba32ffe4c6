// tensor_scale: the one scale of a tensor, and what its codes are multiplied by.
//
// RECORD = 1     the scale is given; a cast raises *amax to the largest magnitude, and shows a non-finite value in its code
// RECORD = 0     the scale is that of *amax, by the rule of scale_from_amax with eps, rounded down to a power of two if pow2
// decode_scale   fp32; NaN if the scale is that of an amax that is not finite
// Compiled       after common.cuh, with OUT and RECORD
#pragma once

struct TensorScale {
    const float* scale;
    float *amax, *decode_scale;
    float eps;
    u32 pow2;
};

// Planes of codes under it, null where they are not made, of a [rows, columns] matrix and of its transpose.
struct TensorCodes {
    u8 *rowwise, *columnwise;
    TensorScale scale;
    long long rows, columns;
};

// What values are multiplied by, and what codes are.
struct Scales {
    float encode, decode;
};

OPFUSE_FN Scales scales_of(const TensorScale& p) {
    if constexpr (RECORD) {
        float scale = *p.scale;
        return {scale, 1.0f / scale};
    } else {
        float amax = *p.amax, scale = scale_from_amax(amax, OUT::MAX, p.eps, LARGEST_FLOAT);
        if (p.pow2) scale = pow2_floor(scale);
        return {scale, decode_scale(scale, amax)};
    }
}

// What values are multiplied by; the first thread of block 0 stores what codes are.
OPFUSE_FN float encode_scale(const TensorScale& p, u32 block) {
    Scales scales = scales_of(p);
    if (block == 0 && threadIdx.x == 0) *p.decode_scale = scales.decode;
    return scales.encode;
}

// The block's number in the matrix. After the pass that found the amax, what it read last is still in the cache: begin there.
OPFUSE_FN u32 own_block() { return RECORD ? blockIdx.x : block_from_end(); }
