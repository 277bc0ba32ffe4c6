// amax_lines: raises fp32 numbers to the largest magnitudes of the rows and columns of a matrix, from one read of it; as integers, so
// that inf and NaN propagate.
//
// x              [rows, columns] of IN, contiguous
// rowwise        fp32 [rows], not negative, or null; columnwise [columns] likewise
// Grid           one block of 256 threads for each 128 rows x 256 columns, of which a warp has 16 rows
// GROUPED        rows come in groups, in the tiles of row_groups.cu; columnwise is [groups, columns], the amaxes of each group's columns
// index          if INDEXED, with GROUPED: for each row of the matrix, the number of a row of x; x then has any number of rows
// JOINED         as joined.cuh has it
// ALIGNED        x is on 16 bytes, and columns % 8 == 0; without it, anything goes
// Defined by     opfuse/numerics/casts.py, line_amaxes; GROUPED: opfuse/numerics/group_casts.py, group_line_amaxes.
#include "vectors.cuh"
#include "row_index.cuh"
#include "row_tiles.cuh"

struct Parameters {
    const IN* x;
    float *rowwise, *columnwise;
    long long rows, columns;
    const RowTile* tiles;
    const long long* index;
};
#include "joined.cuh"

#ifndef GROUPED
#define GROUPED 0
#endif

constexpr int THREADS = 256, WARPS = THREADS / 32, CHUNK = 16, TILE_ROWS = WARPS * CHUNK, TILE_COLUMNS = 32 * 8;
constexpr int STEP = 16 / sizeof(IN);  // rows whose loads are under way together

// The largest magnitude of a row's eights; the lane that raises the row's amax gets it.
template <int N>
OPFUSE_FN void take_rows(const Eight<IN> (&v)[N], int first, u32& mine) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        u32 best = __reduce_max_sync(~0u, magnitude_bits<IN>(larger_magnitude(0, v[i])));
        if (threadIdx.x % 32 == first + i) mine = best;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) amax_lines(const __grid_constant__ Launched launched) {
    Own own = own_part(launched);
    const Parameters& p = own.parameters;
    __shared__ u32 of_column[TILE_COLUMNS];
    u32 across = u32((p.columns + TILE_COLUMNS - 1) / TILE_COLUMNS), lane = threadIdx.x % 32;
    u32 down = own.block / across;
    long long row = (long long)down * TILE_ROWS, end = p.rows;
    float* columnwise = p.columnwise;
    if constexpr (GROUPED) {
        RowTile rows = p.tiles[down];
        if (rows.first >= rows.end) return;
        row = rows.first, end = rows.end;
        if (columnwise) columnwise += rows.group * p.columns;
    }
    row += threadIdx.x / 32 * CHUNK;
    long long first = (long long)(own.block % across) * TILE_COLUMNS, column = first + lane * 8, there = p.columns - column;
    u32 mine = 0;
    Maxima<IN, 8> of_columns = {};
#pragma unroll 1
    for (int start = 0; start < CHUNK; start += STEP) {
        Eight<IN> v[STEP];
#pragma unroll
        for (int i = 0; i < STEP; ++i) {
            const IN* x = p.x + row_read(p.index, row + start + i, row + start + i < end) * p.columns + column;
            if constexpr (ALIGNED)
                v[i] = row + start + i < end && there > 0 ? load_eight(x) : Eight<IN>{};
            else
                v[i] = load_some(x, row + start + i < end ? there : 0);
        }
        if (p.rowwise) take_rows(v, start, mine);
        if (columnwise) of_columns.raise(maxima_down(v));
    }
    if (p.rowwise && lane < CHUNK && row + lane < end) raise(p.rowwise + row + lane, mine);
    if (!columnwise) return;
    of_column[threadIdx.x] = 0;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 8; ++j) atomicMax(of_column + lane * 8 + j, of_columns.bits(j));
    __syncthreads();
    if (first + threadIdx.x < p.columns) raise(columnwise + first + threadIdx.x, of_column[threadIdx.x]);
}
