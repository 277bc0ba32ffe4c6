// blocks: FP8 codes and fp32 scales of a tile that a block of threads holds: 1 x 128 and 128 x 1 blocks, or 128 x 128.
//
// Values         of a thread: OWN_ROWS rows of eight neighbours; outside of the matrix they are 0 or repeat others of the tile
// Blocks         packed by the host; cast_block.cu describes its fields
// APART          whether rows behind the tile's last one belong to another group, which stores their scales
// Compiled       after tile.cuh for a tile of 128 x 128 and 256 or more threads, with IN, OUT, SQUARE, ROWWISE, COLUMNWISE and ALIGNED
#pragma once
#include "block_scale.cuh"

#ifndef APART
#define APART 0
#endif

constexpr int BLOCK = 128, WARPS = TILE_THREADS / 32, WARPS_DOWN = WARPS / WARPS_ACROSS;
static_assert(TILE_ROWS == BLOCK && TILE_COLUMNS == BLOCK && TILE_THREADS >= 2 * BLOCK, "a tile is a block of scales");

using Values = Eight<IN>[OWN_ROWS];

OPFUSE_FN RowCodes rowwise_codes(const Blocks& p, const Tile& tile) {
    long long row = tile.row + own_row(tile, 0), column = tile.column + tile.across * 8, rows = p.rows - row, columns = p.columns - column;
    return codes_of_rows(p.rowwise, p.columns, row, column, at_most(rows, BLOCK), at_most(columns, 8));
}

// ------------------------------------------------------------------------------------------------------------- 128 x 128 blocks

OPFUSE_FN void cast_square(const Blocks& p, const Tile& tile, const Values& v, u32* shared) {
    __shared__ u32 of_warp[WARPS];
    u32 best = 0;
#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i) best = larger_magnitude(best, v[i]);
    best = __reduce_max_sync(~0u, magnitude_bits<IN>(best));
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = best;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; ++w) best = larger(best, of_warp[w]);
    Scale scale = scale_of(p, best);
    // The last tile in a row of scales stores its padding as well.
    long long y = tile.row / BLOCK, x = tile.column / BLOCK, down = (p.rows + BLOCK - 1) / BLOCK, across = (p.columns + BLOCK - 1) / BLOCK;
    if (ROWWISE && threadIdx.x < (x + 1 == across ? 4 : 1))
        store_scale(p.row_scale + y * p.row_pitch, x + threadIdx.x, across, p.row_pitch, scale.decode);
    if (COLUMNWISE && threadIdx.x < (y + 1 == down ? 4 : 1))
        store_scale(p.column_scale + x * p.column_pitch, y + threadIdx.x, down, p.column_pitch, scale.decode);
    RowCodes rows = rowwise_codes(p, tile);
#pragma unroll
    for (int step = 0; step < TILE_STEPS; ++step) {
        uint2 codes[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            codes[i] = encode_eight<OUT>(v[step * 4 + i], [scale](int) { return scale.encode; });
            if (ROWWISE) rows.store(step * 4 + i, codes[i]);
        }
        if (COLUMNWISE) transpose_into(shared, tile, codes, step);
    }
}

// ----------------------------------------------------------------------------------------------------- 1 x 128 and 128 x 1 blocks

static_assert(WARPS_ACROSS == 2, "two warps share a row of a block");

// Encode scales of the thread's rows. A row lies in two warps, which wait for each other. Eight lanes share eight rows, and each computes
// the scale of one.
OPFUSE_FN void scales_along(const Blocks& p, const Tile& tile, const Values& v, float (&scale)[OWN_ROWS]) {
    __shared__ u32 amax[WARPS_ACROSS][BLOCK];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, mine = own_row(tile, lane % OWN_ROWS);
    Maxima<IN, OWN_ROWS> along = maxima_along(v);
    along.across(1), along.across(2), along.across(4);
    if (lane % 8 == 0)
#pragma unroll
        for (int i = 0; i < OWN_ROWS; ++i) amax[warp % 2][own_row(tile, i)] = along.bits(i);
    asm volatile("bar.sync %0, 64;" ::"r"(warp / 2 + 1) : "memory");
    Scale own = scale_of(p, larger(amax[0][mine], amax[1][mine]));
    if (warp % 2 == 0 && lane % 8 < OWN_ROWS)
        store_scale(p.row_scale + tile.column / BLOCK * p.row_pitch, tile.row + mine, p.rows, APART ? p.rows : p.row_pitch, own.decode);
#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i) scale[i] = __shfl_sync(~0u, own.encode, (lane & 24) + i);
}

// Encode scales of the thread's columns, from the amaxes that each warp stored before a barrier. Four lanes share eight columns, and
// each computes the scales of two.
OPFUSE_FN void scales_down(const Blocks& p, const Tile& tile, const u32 (&amax)[WARPS_DOWN][BLOCK], float (&scale)[8]) {
    int lane = threadIdx.x % 32, mine = tile.across * 8 + lane / 8 * 2;
    Scale own[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        u32 bits = amax[0][mine + j];
#pragma unroll
        for (int w = 1; w < WARPS_DOWN; ++w) bits = larger(bits, amax[w][mine + j]);
        own[j] = scale_of(p, bits);
        if (threadIdx.x / 32 < WARPS_ACROSS)
            store_scale(p.column_scale + tile.row / BLOCK * p.column_pitch, tile.column + mine + j, p.columns, p.column_pitch, own[j].decode);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) scale[j] = __shfl_sync(~0u, own[j % 2].encode, j / 2 * 8 + lane % 8);
}

OPFUSE_FN void cast_lines(const Blocks& p, const Tile& tile, const Values& v, u32* shared) {
    __shared__ u32 column_amax[WARPS_DOWN][BLOCK];
    if constexpr (COLUMNWISE) {
        Maxima<IN, 8> down = maxima_down(v);
        down.across(8), down.across(16);
        if (threadIdx.x % 32 < 8)
#pragma unroll
            for (int j = 0; j < 8; ++j) column_amax[threadIdx.x / 32 / WARPS_ACROSS][tile.across * 8 + j] = down.bits(j);
    }
    if (p.rowwise) {  // always so if there is the plane; as a condition it keeps the codes of both planes from taking registers at once
        float scale[OWN_ROWS];
        scales_along(p, tile, v, scale);
        RowCodes rows = rowwise_codes(p, tile);
#pragma unroll
        for (int i = 0; i < OWN_ROWS; ++i) rows.store(i, encode_eight<OUT>(v[i], [&](int) { return scale[i]; }));
    }
    if constexpr (!COLUMNWISE) return;
    __syncthreads();
    float scale[8];
    scales_down(p, tile, column_amax, scale);
#pragma unroll
    for (int step = 0; step < TILE_STEPS; ++step) {
        uint2 codes[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) codes[i] = encode_eight<OUT>(v[step * 4 + i], [&](int j) { return scale[j]; });
        transpose_into(shared, tile, codes, step);
    }
}

// Casts a tile: stores its codes and scales, but leaves the codes of columns in shared memory.
OPFUSE_FN void cast_tile(const Blocks& p, const Tile& tile, const Values& v, u32* shared) {
    if constexpr (SQUARE)
        cast_square(p, tile, v, shared);
    else
        cast_lines(p, tile, v, shared);
}
