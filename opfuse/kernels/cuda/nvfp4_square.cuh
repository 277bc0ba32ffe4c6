// nvfp4_square: squares of 16 x 16 values under one scale, cast once and stored by rows and by columns.
//
// A warp has eight squares side by side. A thread has four blocks of a square, its rows g, g + 4, g + 8 and g + 12, where g = lane / 8.
// Codes for columns are read from shared memory, transposed 8 x 8 at a time in registers, and stored in the plane.
// Compiled after nvfp4.cuh.
#pragma once
#include "nvfp4.cuh"

constexpr int THREADS = 256, TILE_ROWS = 128, SQUARES = 8, SQUARE_TILE = SQUARES * BLOCK, SQUARE_ROWS = 4;
// Rows of 64 bytes of codes, with two more words after each eight rows: no bank is met twice, along rows or across.
constexpr int EIGHT_WORDS = 8 * SQUARE_TILE / 8 + 2, SQUARE_WORDS = TILE_ROWS / 8 * EIGHT_WORDS;

struct Square {
    long long tile_row, tile_column, row, column;  // the thread's first row, and its first column
    int in_tile;                                   // the first row, in the tile
};

OPFUSE_FN Square this_square(const Nvfp4& p, u32 block) {
    u32 tiles_across = u32((p.columns + SQUARE_TILE - 1) / SQUARE_TILE);
    long long row = (long long)(block / tiles_across) * TILE_ROWS, column = (long long)(block % tiles_across) * SQUARE_TILE;
    int in_tile = threadIdx.x / 32 * BLOCK + threadIdx.x % 32 / SQUARES;
    return {row, column, row + in_tile, column + threadIdx.x % SQUARES * BLOCK, in_tile};
}

OPFUSE_FN int square_slot(int row, int word) { return row / 8 * EIGHT_WORDS + row % 8 * (SQUARE_TILE / 8) + word; }

// The sum of the errors of 16 rows, of which rows i and i + 8 are added first, then those 4, 2 and 1 apart.
OPFUSE_FN float sum_of_rows(float a, float b, float c, float d) {
    float sum = (a + c) + (b + d);
    sum += __shfl_xor_sync(~0u, sum, 2 * SQUARES);
    return sum + __shfl_xor_sync(~0u, sum, SQUARES);
}

// The four blocks of a thread, under the scale of their square.
OPFUSE_FN void encode_square(const Nvfp4& p, const Square& own, const Sixteen (&v)[SQUARE_ROWS], Encoded (&block)[SQUARE_ROWS]) {
    Level level = level_of(p, p.rowwise.codes ? p.rowwise : p.columnwise, 0);
    u32 amax = larger(larger(largest_of(v[0]), largest_of(v[1])), larger(largest_of(v[2]), largest_of(v[3])));
    amax = larger(amax, __shfl_xor_sync(~0u, amax, SQUARES));
    amax = larger(amax, __shfl_xor_sync(~0u, amax, 2 * SQUARES));
    if constexpr (CHOOSES) {
        Candidates c[SQUARE_ROWS];
#pragma unroll
        for (int i = 0; i < SQUARE_ROWS; ++i) c[i] = candidates(p, v[i], amax, level);
        float four = sum_of_rows(c[0].four.error, c[1].four.error, c[2].four.error, c[3].four.error);
        float six = sum_of_rows(c[0].six.error, c[1].six.error, c[2].six.error, c[3].six.error);
#pragma unroll
        for (int i = 0; i < SQUARE_ROWS; ++i) block[i] = with_signs(v[i], four < six ? c[i].four.block : c[i].six.block);
    } else {
#pragma unroll
        for (int i = 0; i < SQUARE_ROWS; ++i)
            block[i] = map_to_six(v[i], amax, level, random_bytes(p, (own.row + i * 4) * p.columns + own.column, 0));
    }
}

// Eight rows of eight codes to eight columns, each of the codes of rows 0 ... 7 from the lowest bits on.
OPFUSE_FN void transpose_codes(const u32 (&row)[8], u32 (&column)[8]) {
    u32 even[4], odd[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        even[i] = (row[2 * i] & 0x0f0f0f0f) | (row[2 * i + 1] & 0x0f0f0f0f) << 4;
        odd[i] = (row[2 * i] >> 4 & 0x0f0f0f0f) | (row[2 * i + 1] & 0xf0f0f0f0);
    }
    uint4 evens = transpose_bytes(even[0], even[1], even[2], even[3]), odds = transpose_bytes(odd[0], odd[1], odd[2], odd[3]);
    column[0] = evens.x, column[2] = evens.y, column[4] = evens.z, column[6] = evens.w;
    column[1] = odds.x, column[3] = odds.y, column[5] = odds.z, column[7] = odds.w;
}

// The tile's codes to `columnwise`: a thread has eight rows of eight columns, neighbouring lanes neighbouring rows.
OPFUSE_FN void store_transposed(const Nvfp4& p, const Square& own, const u32* codes) {
    int eight = threadIdx.x % 16, word = threadIdx.x / 16;
    long long row = own.tile_row + eight * 8, column = own.tile_column + word * 8;
    if (row >= p.rows) return;
    int there = int(smaller_of(p.columns - column, 8)), bytes = int(smaller_of((p.rows - row) / 2, 4));
    u32 rows[8], columns[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) rows[i] = codes[square_slot(eight * 8 + i, word)];
    transpose_codes(rows, columns);
    u8* out = p.columnwise.codes + ((column * p.rows + row) >> 1);
#pragma unroll
    for (int j = 0; j < 8; ++j, out += p.rows >> 1) {
        if (j >= there) return;
        if constexpr (ALIGNED)
            *reinterpret_cast<u32*>(out) = columns[j];
        else
            store_some(out, make_uint2(columns[j], 0), bytes);
    }
}

// Stores the scales of the tile's columns: a thread has those of four squares below each other, in one column; 0 outside of the matrix.
OPFUSE_FN void store_repeated(const Nvfp4& p, const Square& own, const u8* scales) {
    int line = threadIdx.x % SQUARE_TILE, first = threadIdx.x / SQUARE_TILE * 4;
    long long column = own.tile_column + line, row = own.tile_row + first * BLOCK;
    if (column >= p.columns || row >= p.rows) return;
    u32 four = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) four |= u32(scales[(first + i) * SQUARES + line / BLOCK]) << 8 * i;
    *reinterpret_cast<u32*>(place_of(p.columnwise, p.swizzled, column, p.rows, row).scale) = four;
}
