// cast_block: FP8 codes of a matrix with an fp32 scale for each block of 128, by rows, by columns or both, from one read of it.
//
// x              [rows, columns] of IN, contiguous
// rowwise        [rows, columns] codes of OUT, or null
// columnwise     [columns, rows] codes, or null
// SQUARE = 0     blocks are 128 neighbours in a row for rowwise, in a column for columnwise; row_scale is [blocks, rows] and
//                column_scale [blocks, columns]
// SQUARE = 1     blocks are 128 x 128, and the planes hold the same bytes; row_scale is [row blocks, column blocks], column_scale its
//                transpose
// Scales         what codes are multiplied by: the inverse of that of scale_from_amax with eps and inf_value, rounded down to a power
//                of two if pow2. Rows of scales are row_pitch and column_pitch long, at most 3 more than are used; the rest becomes 0
// Non-finite     a block that holds one is cast under the scale 1, and its stored scale is NaN
// Grid           a block of 256 threads for each 128 x 128 tile; at the edges, blocks of scales are parts
// ALIGNED        x is on 16 bytes, columns % 8 == 0, and rows % 16 == 0 if there is columnwise; without it, anything goes
// Defined by     opfuse/kernels/quantize.py, cast_block.
constexpr int TILE_ROWS = 128, TILE_COLUMNS = 128, TILE_THREADS = 256;
#include "tile.cuh"

struct Parameters {
    const IN* x;
    u8 *rowwise, *columnwise;
    float *row_scale, *column_scale;
    long long rows, columns, row_pitch, column_pitch;
    float eps, inf_value;
    u32 pow2, unused;
};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "the fields that the host packs");

constexpr int BLOCK = 128, OWN_ROWS = 4 * TILE_STEPS, WARPS = TILE_THREADS / 32, WARPS_DOWN = WARPS / WARPS_ACROSS;
static_assert(TILE_ROWS == BLOCK && TILE_COLUMNS == BLOCK && TILE_THREADS == 2 * BLOCK, "a tile is a block of scales");

using Values = Eight<IN>[OWN_ROWS];

struct Scale {
    float encode, decode;
};

OPFUSE_FN Scale scale_of(const Parameters& p, u32 bits) {
    float amax = float_of(bits), scale = scale_from_amax(amax, OUT::MAX, p.eps, p.inf_value);
    if (p.pow2) scale = pow2_floor(scale);
    return {scale, decode_scale(scale, amax)};
}

// The thread's row i in the tile.
OPFUSE_FN int own_row(const Tile& tile, int i) { return (tile.group + i / 4 * 4) * 4 + i % 4; }

OPFUSE_FN void load_values(Values& v, const Parameters& p, const Tile& tile) {
    long long column = tile.column + tile.across * 8, there = p.columns - column;
#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i) {
        long long row = tile.row + own_row(tile, i);
        const IN* x = p.x + row * p.columns + column;
        if constexpr (ALIGNED)
            v[i] = row < p.rows && there > 0 ? load_eight(x) : Eight<IN>{};
        else
            v[i] = load_some(x, row < p.rows ? there : 0);
    }
}

OPFUSE_FN void store_row(const Parameters& p, const Tile& tile, int i, uint2 codes) {
    long long row = tile.row + own_row(tile, i), column = tile.column + tile.across * 8, there = p.columns - column;
    if (row >= p.rows || there <= 0) return;
    if constexpr (ALIGNED)
        store_eight(p.rowwise + row * p.columns + column, codes);
    else
        store_some(p.rowwise + row * p.columns + column, codes, there);
}

// Scale `at` of a row of scales, of which `used` hold something.
OPFUSE_FN void store_scale(float* scales, long long at, long long used, long long pitch, float value) {
    if (at < pitch) scales[at] = at < used ? value : 0.0f;
}

// ------------------------------------------------------------------------------------------------------------- 128 x 128 blocks

OPFUSE_FN void cast_square(const Parameters& p, const Tile& tile, const Values& v, u32* shared) {
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
    if (p.rowwise && threadIdx.x < (x + 1 == across ? 4 : 1))
        store_scale(p.row_scale + y * p.row_pitch, x + threadIdx.x, across, p.row_pitch, scale.decode);
    if (p.columnwise && threadIdx.x < (y + 1 == down ? 4 : 1))
        store_scale(p.column_scale + x * p.column_pitch, y + threadIdx.x, down, p.column_pitch, scale.decode);
#pragma unroll
    for (int step = 0; step < TILE_STEPS; ++step) {
        uint2 codes[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            codes[i] = encode_eight<OUT>(v[step * 4 + i], [scale](int) { return scale.encode; });
            if (p.rowwise) store_row(p, tile, step * 4 + i, codes[i]);
        }
        if (p.columnwise) transpose_into(shared, tile, codes, step);
    }
}

// ----------------------------------------------------------------------------------------------------- 1 x 128 and 128 x 1 blocks

OPFUSE_FN void cast_lines(const Parameters& p, const Tile& tile, const Values& v, u32* shared) {
    __shared__ u32 row_amax[WARPS_ACROSS][BLOCK], column_amax[WARPS_DOWN][BLOCK];
    __shared__ float row_scale[BLOCK], column_scale[BLOCK];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, line = threadIdx.x % BLOCK;
    if (p.rowwise) {
        Maxima<IN, OWN_ROWS> along = maxima_along(v);
        along.across(1), along.across(2), along.across(4);
        if (lane % 8 == 0)
#pragma unroll
            for (int i = 0; i < OWN_ROWS; ++i) row_amax[warp % WARPS_ACROSS][own_row(tile, i)] = along.bits(i);
    }
    if (p.columnwise) {
        Maxima<IN, 8> down = maxima_down(v);
        down.across(8), down.across(16);
        if (lane < 8)
#pragma unroll
            for (int j = 0; j < 8; ++j) column_amax[warp / WARPS_ACROSS][tile.across * 8 + j] = down.bits(j);
    }
    __syncthreads();
    if (threadIdx.x < BLOCK && p.rowwise) {
        Scale scale = scale_of(p, larger(row_amax[0][line], row_amax[1][line]));
        row_scale[line] = scale.encode;
        store_scale(p.row_scale + tile.column / BLOCK * p.row_pitch, tile.row + line, p.rows, p.row_pitch, scale.decode);
    }
    if (threadIdx.x >= BLOCK && p.columnwise) {
        u32 amax = 0;
#pragma unroll
        for (int w = 0; w < WARPS_DOWN; ++w) amax = larger(amax, column_amax[w][line]);
        Scale scale = scale_of(p, amax);
        column_scale[line] = scale.encode;
        store_scale(p.column_scale + tile.row / BLOCK * p.column_pitch, tile.column + line, p.columns, p.column_pitch, scale.decode);
    }
    __syncthreads();
    if (p.rowwise)
#pragma unroll
        for (int i = 0; i < OWN_ROWS; ++i) {
            float scale = row_scale[own_row(tile, i)];
            store_row(p, tile, i, encode_eight<OUT>(v[i], [scale](int) { return scale; }));
        }
    if (p.columnwise) {
        float scale[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) scale[j] = column_scale[tile.across * 8 + j];
#pragma unroll
        for (int step = 0; step < TILE_STEPS; ++step) {
            uint2 codes[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) codes[i] = encode_eight<OUT>(v[step * 4 + i], [&](int j) { return scale[j]; });
            transpose_into(shared, tile, codes, step);
        }
    }
}

extern "C" __global__ void __launch_bounds__(TILE_THREADS, sizeof(IN) == 2 && ALIGNED ? 4 : 2) cast_block(const __grid_constant__ Parameters p) {
    __shared__ __align__(16) u32 shared[TILE_ROWS * TILE_COLUMNS / 4];
    Tile tile = this_tile(p.columns);
    Values v;
    load_values(v, p, tile);
    if constexpr (SQUARE)
        cast_square(p, tile, v, shared);
    else
        cast_lines(p, tile, v, shared);
    if (!p.columnwise) return;
    __syncthreads();
    store_columns<ALIGNED>(p.columnwise, shared, tile, p.rows, p.columns);
}
