// tensor_scale: the one scale of a tensor, by which values are multiplied, and its decode scale, by which codes are.
//
// RECORD = 1     the scale is given; a cast raises *amax to the largest magnitude, and shows a non-finite value in its code
// RECORD = 0     the scale is that of scale_from_amax(*amax, ...) with eps, rounded down to a power of two if pow2
// decode_scale   fp32; NaN if RECORD = 0 and *amax is not finite
// Compiled       after common.cuh, with OUT and RECORD
#pragma once

struct TensorScale {
    const float* scale;
    float *amax, *decode_scale;
    float eps;
    u32 pow2;
};

// The planes of a [rows, columns] matrix: its codes and those of its transpose; null for a plane that is not made.
struct TensorCodes {
    u8 *rowwise, *columnwise;
    TensorScale scale;
    long long rows, columns;
};

// The encode scale and the decode scale.
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

// The encode scale; the first thread of block 0 stores the decode scale.
OPFUSE_FN float encode_scale(const TensorScale& p, u32 block) {
    Scales scales = scales_of(p);
    if (block == 0 && threadIdx.x == 0) *p.decode_scale = scales.decode;
    return scales.encode;
}

// The block's number in the matrix: after a pass that found the amax, from the end, which is still in the cache.
OPFUSE_FN u32 own_block() { return RECORD ? blockIdx.x : block_from_end(); }
