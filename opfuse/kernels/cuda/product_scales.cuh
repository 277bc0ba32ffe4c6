// product_scales: the scaling of sums for product.cuh: sums of blocks as they are added, sums under scales of rows at the end of a tile.
#pragma once
#include "product.cuh"

// Line e of a thread's lines, two of each part, from `line` on; the last line, if there is no such line.
DEVICE_FN u32 line_of(const Group& g, const Tile& tile, u32 line, u32 e) {
    return smaller(line + e % 2 * 8 + e / 2 * NEXT_PART, lines_of(g, tile) - 1);
}

// ROWS: sums times the scale of their column, rounded, then times that of their line. Scales are read as if their memory could change;
// otherwise the compiler reads them sooner, before this consumer has let the other one multiply.
DEVICE_FN void scale_rows(const Product& p, const Group& g, const Tile& tile, u32 line, u32 column, float (&sums)[OWN_PARTS][64]) {
    float rows[2 * OWN_PARTS];
#pragma unroll
    for (u32 e = 0; e < 2 * OWN_PARTS; ++e) rows[e] = g.left_scale[line_of(g, tile, line, e)];
#pragma unroll
    for (u32 j = 0; j < 16; ++j) {
        const float* scales = g.right_scale + smaller(column + j * 8, p.columns - 2);
        float columns[2] = {scales[0], scales[1]};
#pragma unroll
        for (u32 e = 0; e < 4 * OWN_PARTS; ++e) {
            float& sum = sums[e / 4][j * 4 + e % 4];
            sum = sum * columns[e % 2] * rows[e / 2];
        }
    }
}

// The scales of a block that a thread multiplies by: of its two lines in 64, and under LINES of its pairs of columns. They are read from
// shared memory before the products whose sums they multiply are asked for: beside these a read takes so long that sums would wait for it.
struct BlockScales {
    float rows[2];
    float2 columns[SCALING == LINES ? 16 : 1];

    // From where that of the first line lies.
    DEVICE_FN void read_rows(u32 at) {
#pragma unroll
        for (u32 e = 0; e < 2; ++e) rows[e] = load_shared(at + e * 8 * sizeof(float));
    }
    DEVICE_FN void read_columns(u32 at) {
#pragma unroll
        for (u32 j = 0; j < 16; ++j) columns[j] = load_shared_two(at + j * 8 * sizeof(float));
    }
};

// Adds the sums of a block for 64 lines, scaled.
DEVICE_FN void add_part(float (&sums)[64], const float (&part)[64], const BlockScales& by) {
#pragma unroll
    for (u32 j = 0; j < 16; ++j)
#pragma unroll
        for (u32 e = 0; e < 4; ++e) {
            float x = part[j * 4 + e], row = by.rows[e / 2];
            float& sum = sums[j * 4 + e];
            if constexpr (SCALING == TILES)
                sum = __fmaf_rn(x, row, sum);
            else if constexpr (SCALING == LINES)
                sum = __fmaf_rn(x * row, e % 2 ? by.columns[j].y : by.columns[j].x, sum);
            else
                sum += x;
        }
}
