// mx_tile: planes of FP8 codes and E8M0 scales, and how kernels that cast tiles store the scales of a tile.
//
// rowwise, columnwise    [rows, columns] codes of OUT, neither transposed, if ROWWISE and if COLUMNWISE
// row_scale              a code for each 32 values of a row; column_scale: for each 32 values of a column. In arrays as in mx.cuh, which
//                        the host has set to 0
// bias                   0x1fffff: the least scale under which nothing saturates; 0: the exponent of amax less that of the largest code
// Tiles                  of TILE_ROWS x TILE_COLUMNS. If SWIZZLED, these are 128 x 128, and their scales are one tile of scales
// Compiled               with what mx.cuh needs, and with ROWWISE and COLUMNWISE
#pragma once
#include "mx.cuh"

struct MxPlanes {
    u8 *rowwise, *row_scale, *columnwise, *column_scale;
    long long rows, columns;
    u32 bias, unused;
};

// Stores the scales' codes of eight columns from `column` on, of one block of rows; in shared memory, if SWIZZLED. first, down: column
// and block in the tile.
OPFUSE_FN void store_column_codes(const MxPlanes& p, const u32 (&code)[8], long long column, long long block, u8* shared, int first, int down) {
    if constexpr (SWIZZLED) {
#pragma unroll
        for (int j = 0; j < 8; ++j) shared[(first + j) * 4 + down] = u8(code[j]);
    } else if (column < padded_lines(p.columns)) {
        uint2 packed = {four_codes(code[0], code[1], code[2], code[3]), four_codes(code[4], code[5], code[6], code[7])};
        store_eight(p.column_scale + block * padded_lines(p.columns) + column, packed);
    }
}

// Stores the scales' codes of the thread's rows in shared memory, in lines of WIDTH: four rows of each step, from row_of(step) on. The
// four lanes of a block all have these codes; each stores one row's of a step: its code if there(step), else 0.
template <int WIDTH, int ROWS, class Row, class There>
OPFUSE_FN void gather_row_codes(u8* shared, int block, const u32 (&code)[ROWS], Row row_of, There there) {
    int mine = threadIdx.x % 4;
#pragma unroll
    for (int step = 0; step < ROWS / 4; ++step) {
        const u32* four = code + step * 4;
        u32 own = mine & 2 ? (mine & 1 ? four[3] : four[2]) : mine & 1 ? four[1] : four[0];
        shared[(row_of(step) + mine) * WIDTH + block] = there(step) ? u8(own) : 0;
    }
}

// Where the scales of a tile's rows, and those of its columns, are stored as whole tiles of scales.
struct ScaleTiles {
    long long of_rows, of_columns;
};

// Stores the scales of the HIGH x WIDE tile from `row` and `column` on, which COUNT threads left in shared memory before a barrier.
template <int HIGH, int WIDE, int COUNT>
OPFUSE_FN void store_scales(const MxPlanes& p, long long row, long long column, ScaleTiles at, const u8* row_codes, const u8* column_codes) {
    if constexpr (SWIZZLED) {
        if (ROWWISE && threadIdx.x < 128) store_scale_tile(p.row_scale, at.of_rows, row_codes);
        if (COLUMNWISE && threadIdx.x >= 128 && (COUNT == 256 || threadIdx.x < 256)) store_scale_tile(p.column_scale, at.of_columns, column_codes);
    } else {
        constexpr int WORDS = WIDE / MX_BLOCK / 4;
        static_assert(WIDE / MX_BLOCK % 4 == 0, "words of four codes");
        int line = threadIdx.x / WORDS, block = threadIdx.x % WORDS * 4;
        if (!ROWWISE || line >= HIGH || row + line >= p.rows) return;
        if (column / MX_BLOCK + block >= padded_blocks(p.columns)) return;
        u8* scale = p.row_scale + (row + line) * padded_blocks(p.columns) + column / MX_BLOCK + block;
        *reinterpret_cast<u32*>(scale) = reinterpret_cast<const u32*>(row_codes)[threadIdx.x];
    }
}
