// product_scales: the scaling of sums for product.cuh: sums of blocks as they are added, sums under scales of rows at the end of a tile.
#pragma once
#include "product.cuh"

constexpr u32 AHEAD = RUNS == OF_SUMS ? 7 : 8;  // how many of sixteen pairs of scales a thread reads once for both boxes; more would spill

// Line e of a thread's four lines, two of each 64, from `line` on; the last line, if there is no such line.
DEVICE_FN u32 line_of(const Group& g, const Tile& tile, u32 line, u32 e) { return smaller(line + e % 2 * 8 + e / 2 * 64, lines_of(g, tile) - 1); }

// ROWS: sums times the scale of their column, rounded, then times that of their line. Scales are read as if their memory could change;
// otherwise the compiler reads them sooner, before this consumer has let the other one multiply.
DEVICE_FN void scale_rows(const Product& p, const Group& g, const Tile& tile, u32 line, u32 column, float (&sums)[2][64]) {
    float rows[4];
#pragma unroll
    for (u32 e = 0; e < 4; ++e) rows[e] = g.left_scale[line_of(g, tile, line, e)];
#pragma unroll
    for (u32 j = 0; j < 16; ++j) {
        const float* scales = g.right_scale + smaller(column + j * 8, p.columns - 2);
        float columns[2] = {scales[0], scales[1]};
#pragma unroll
        for (u32 e = 0; e < 8; ++e) {
            float& sum = sums[e / 4][j * 4 + e % 4];
            sum = sum * columns[e % 2] * rows[e / 2];
        }
    }
}

// The scales of a thread's lines, two of each 64, times the scale of the right's tile, if there is one. Four threads share lines; each
// reads the scales of every fourth block, four blocks ahead. Every scale that was read is multiplied, if need be by `one`: the thread
// would wait at once for a load whose result it only copies.
struct LeftScales {
    float now[4], next[4], right;

    DEVICE_FN LeftScales(float one) : right(one) {}

    DEVICE_FN void load(const Group& g, const Tile& tile, u32 line, u32 block) {
        u64 k = block_at(tile, smaller(block, tile.steps - 1));
        const float* scales = g.left_scale + k * g.left_pitch;
#pragma unroll
        for (u32 e = 0; e < 4; ++e) next[e] = __ldg(scales + line_of(g, tile, line, e));
        if constexpr (SCALING == TILES) right = __ldg(g.right_scale + static_cast<u64>(tile.column / BOX) * g.right_pitch + k);
    }
    DEVICE_FN void advance() {
#pragma unroll
        for (u32 e = 0; e < 4; ++e) now[e] = next[e] * right;
    }
    DEVICE_FN float of(u32 e, u32 lane, u32 block) const { return __shfl_sync(~0u, now[e], lane / 4 * 4 + block % 4); }
};

// Adds a block's sums, scaled. `upper` and `lower` are the scales of the thread's two lines, `columns` those of its columns.
DEVICE_FN void add_part(float (&sums)[64], const float (&part)[64], float upper, float lower, const float2 (&ahead)[AHEAD], const float2* columns) {
#pragma unroll
    for (u32 j = 0; j < 16; ++j) {
        float2 column = SCALING != LINES ? float2{1.0f, 1.0f} : j < AHEAD ? ahead[j] : columns[j * 4];
#pragma unroll
        for (u32 e = 0; e < 4; ++e) {
            float x = part[j * 4 + e], row = e < 2 ? upper : lower;
            float& sum = sums[j * 4 + e];
            if constexpr (!BY_BLOCKS)
                sum += x;
            else
                sum = SCALING == TILES ? __fmaf_rn(x, row, sum) : __fmaf_rn(x * row, e % 2 ? column.y : column.x, sum);
        }
    }
}
