// tile: the piece of a matrix that a block of threads reads once, to store its codes by rows and by columns.
//
// TILE_ROWS, TILE_COLUMNS and TILE_THREADS are constants defined before this file. A warp has TILE_STEPS pieces of 16 rows of 64
// columns below each other, a thread 4 rows of 8 columns of each: 8 neighbouring lanes load 8 x 16 bytes of a row. The thread
// transposes its codes 4 x 4 bytes at a time in registers and leaves them in shared memory, from where they are stored as
// 16 bytes along a column, 128 or 256 bytes by neighbouring lanes. The slots of shared memory are exchanged so that neither
// writing nor reading meets a bank twice.
#pragma once
#include "vectors.cuh"

static_assert(TILE_ROWS % 16 == 0 && TILE_COLUMNS % 64 == 0, "warps of 16 rows of 64 columns");
constexpr int TILE_STEPS = TILE_ROWS * TILE_COLUMNS / (32 * TILE_THREADS), WARPS_ACROSS = TILE_COLUMNS / 64, OWN_ROWS = 4 * TILE_STEPS;
constexpr int SIXTEENS = TILE_ROWS / 16;  // groups of 16 rows, whose codes are one store

struct Tile {
    long long row, column;  // of the tile in the matrix
    int group, across;      // the thread's first row in the tile, in fours, and its first column, in eights
};

OPFUSE_FN Tile tile_at(u32 down, u32 across) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    return {(long long)down * TILE_ROWS, (long long)across * TILE_COLUMNS, int(warp / WARPS_ACROSS * TILE_STEPS * 4 + lane / 8),
            int(warp % WARPS_ACROSS * 8 + lane % 8)};
}

OPFUSE_FN Tile tile_of_block(u32 block, long long columns) {
    u32 tiles_across = u32((columns + TILE_COLUMNS - 1) / TILE_COLUMNS);
    return tile_at(block / tiles_across, block % tiles_across);
}

// The thread's row i in the tile.
OPFUSE_FN int own_row(const Tile& tile, int i) { return (tile.group + i / 4 * 4) * 4 + i % 4; }

// The rows of a thread, from its first one on.
OPFUSE_FN u32 down_of(int i) { return i / 4 * 16 + i % 4; }

// Where the codes of a thread's rows are stored, in rows of `width`: its first pack, and how many rows and columns the matrix has from
// there on.
struct RowCodes {
    u8* first;
    u32 width;
    int rows, columns;

    OPFUSE_FN void store(int i, uint2 codes) const {
        u8* out = first + u64(down_of(i)) * width;
        if (int(down_of(i)) >= rows) return;
        if constexpr (ALIGNED)
            store_eight(out, codes);
        else
            store_some(out, codes, columns);
    }
};

OPFUSE_FN RowCodes codes_of_rows(u8* plane, long long width, long long row, long long column, int rows, int columns) {
    return {found(plane + (row * width + column)), u32(width), found(columns > 0 ? rows : 0), columns};
}

// The codes of a column's rows 16 s ... 16 s + 15 are a slot of four words. Eight slots fill the 32 banks, and are exchanged among each
// other; they are of one column, or of SHARING columns if a column has fewer.
constexpr int SHARING = SIXTEENS >= 8 ? 1 : 8 / SIXTEENS, LINE = SIXTEENS >= 8 ? 4 * SIXTEENS : 32;
constexpr int EIGHT_COLUMNS = 8 / SHARING * LINE;  // words

// Stores the codes of a thread's four rows of a step in shared memory.
OPFUSE_FN void transpose_into(u32* shared, const Tile& tile, const uint2 (&codes)[4], int step = 0) {
    uint4 low = transpose_bytes(codes[0].x, codes[1].x, codes[2].x, codes[3].x);
    uint4 high = transpose_bytes(codes[0].y, codes[1].y, codes[2].y, codes[3].y);
    u32 words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    int sixteen = tile.group / 4 + step;
    u32* at[SHARING];
#pragma unroll
    for (int j = 0; j < SHARING; ++j) {
        int slot = (sixteen % 8 + j * SIXTEENS) ^ tile.across % 8;
        at[j] = shared + found(tile.across * EIGHT_COLUMNS + sixteen / 8 * 32 + slot * 4 + tile.group % 4);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) at[j % SHARING][j / SHARING * LINE] = words[j];
}

// Stores the tile's codes in `columnwise` [columns, rows]; after a barrier.
template <bool ALIGNED_ROWS>
OPFUSE_FN void store_columns(u8* columnwise, const u32* shared, const Tile& tile, long long rows, long long columns) {
    constexpr int STEP = TILE_THREADS / SIXTEENS;  // from one column of a thread to its next
    static_assert(STEP % 8 == 0 && (STEP & (STEP - 1)) == 0, "bits of `first` and of multiples of STEP do not meet");
    int first = threadIdx.x / SIXTEENS, sixteen = threadIdx.x % SIXTEENS;
    int slot = (sixteen % 8 + first % SHARING * SIXTEENS) ^ first / 8 % 8;
    const u32* own = shared + first / SHARING * LINE + sixteen / 8 * 32;
    long long row = tile.row + sixteen * 16, left = columns - tile.column;
    int there = row < rows ? int(left < TILE_COLUMNS ? left : TILE_COLUMNS) - first : 0;
    u8* out = found(columnwise + (tile.column + first) * rows + row);
#pragma unroll
    for (int k = 0; k < TILE_COLUMNS; k += STEP, out += STEP * rows) {
        uint4 codes = *reinterpret_cast<const uint4*>(own + (slot ^ k / 8 % 8) * 4 + k / SHARING * LINE);
        if (k >= there) continue;
        if constexpr (ALIGNED_ROWS)
            *reinterpret_cast<uint4*>(out) = codes;
        else
            store_some(out, codes, rows - row);
    }
}
