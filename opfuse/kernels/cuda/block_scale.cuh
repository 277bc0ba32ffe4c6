// block_scale: planes of FP8 codes with an fp32 scale for each block, and the scale of a block.
//
// Blocks         what the host packs; its fields are described in cast_block.cu
// Compiled       after common.cuh, with OUT
#pragma once

struct Blocks {
    u8 *rowwise, *columnwise;
    float *row_scale, *column_scale;
    long long rows, columns, row_pitch, column_pitch;
    float eps, inf_value;
    u32 pow2, unused;
};

struct Scale {
    float encode, decode;
};

OPFUSE_FN Scale scale_of(const Blocks& p, u32 bits) {
    float amax = float_of(bits), scale = block_scale<OUT>(amax, p.eps, p.inf_value, p.pow2);
    return {scale, block_decode_scale(scale, amax, p.pow2)};
}

// Scale `at` of a row of scales, of which `used` hold something.
OPFUSE_FN void store_scale(float* scales, long long at, long long used, long long pitch, float value) {
    if (at < pitch) scales[at] = at < used ? value : 0.0f;
}
