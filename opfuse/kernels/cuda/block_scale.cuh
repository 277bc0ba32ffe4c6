// block_scale: the fields that say where planes of FP8 codes with an fp32 scale for each block lie, and how such scales are stored.
//
// Blocks         packed by the host; cast_block.cu describes its fields
// Compiled       after common.cuh, with OUT and POW2
#pragma once

struct Blocks {
    u8 *rowwise, *columnwise;
    float *row_scale, *column_scale;
    long long rows, columns, row_pitch, column_pitch;
    float eps, inf_value;
};

struct Scale {
    float encode, decode;
};

OPFUSE_FN Scale scale_of(const Blocks& p, u32 bits) {
    float amax = float_of(bits), scale = block_scale<OUT>(amax, p.eps, p.inf_value, POW2);
    return {scale, block_decode_scale(scale, amax, POW2)};
}

// Stores scale `at` of a row of `pitch` scales: `value` if it is one of the first `used`, else 0.
OPFUSE_FN void store_scale(float* scales, long long at, long long used, long long pitch, float value) {
    if (at < pitch) scales[at] = at < used ? value : 0.0f;
}
