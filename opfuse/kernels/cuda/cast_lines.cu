// cast_lines: FP8 codes of a matrix with an fp32 scale for each row, for each column or for both, from known amaxes and one read of
// the matrix.
//
// x              [rows, columns] of IN, contiguous
// row            codes of OUT [rows, columns] under the scales of rows, if ROWWISE; amax and scale [rows]
// column         codes [columns, rows] under the scales of columns, if COLUMNWISE; amax and scale [columns]
// scale          decode scales: the inverses of those of scale_from_amax with eps, rounded down to powers of two if POW2
// Non-finite     a line that holds one is cast under the scale 1, and its stored scale is NaN
// Grid           a block of 512 threads for each 256 x 64 tile, the last tile first: the kernel that found the amaxes has just read it
// GROUPED        rows come in groups, in the tables of row_groups.cu. column has codes [columns, 128 * down]; a group begins on a tile of
//                128 rows, with zeros behind its rows, and in tiles behind the last one. amax and scale are [groups, columns]; scales
//                of a group without rows are not written. A block has 256 threads and a tile of 128 x 64
// index          if INDEXED, with GROUPED: for each row of the matrix, the number of a row of x; x then has any number of rows
// JOINED         as joined.cuh has it
// ALIGNED        x is on 16 bytes, columns % 8 == 0, and rows % 16 == 0 if COLUMNWISE and not GROUPED; without it, anything goes
// Defined by     opfuse/numerics/casts.py, cast_lines; GROUPED: opfuse/numerics/group_casts.py, cast_lines_groups.
#ifndef GROUPED
#define GROUPED 0
#endif
constexpr int TILE_ROWS = GROUPED ? 128 : 256, TILE_COLUMNS = 64, TILE_THREADS = 2 * TILE_ROWS;
#include "tile.cuh"
#include "row_index.cuh"
#include "row_tiles.cuh"

struct Lines {
    u8* codes;
    const float* amax;
    float* scale;
};

struct Parameters {
    const IN* x;
    Lines row, column;
    long long rows, columns;
    float eps;
    u32 down;
    const RowTile* tiles;
    const RowGroup* groups;
    const long long* index;
};
#include "joined.cuh"

// The encode scale of line i of `count` lines; blocks with `stores` store its decode scale.
OPFUSE_FN float encode_scale(const Lines& lines, long long i, long long count, float eps, bool stores) {
    if (i >= count) return 1.0f;
    float amax = lines.amax[i], scale = block_scale<OUT>(amax, eps, LARGEST_FLOAT, POW2);
    if (stores) lines.scale[i] = block_decode_scale(scale, amax, POW2);
    return scale;
}

extern "C" __global__ void __launch_bounds__(TILE_THREADS, ALIGNED ? 1024 / TILE_THREADS : 1) cast_lines(const __grid_constant__ Launched launched) {
    Own part = own_part(launched, block_from_end());
    const Parameters& p = part.parameters;
    __shared__ __align__(16) u32 shared[TILE_ROWS * TILE_COLUMNS / 4];
    __shared__ __align__(16) float of_row[TILE_ROWS], of_column[TILE_COLUMNS];
    Tile stored = tile_of_block(part.block, p.columns), tile = stored;
    Lines of_columns = p.column;
    long long end = p.rows, down = p.rows;
    bool is_first = tile.row == 0;
    if constexpr (GROUPED) {
        RowTile rows = p.tiles[stored.row / TILE_ROWS];
        tile.row = rows.first, end = rows.end, down = (long long)p.down * TILE_ROWS;
        is_first = rows.first < rows.end && rows.first == p.groups[rows.group].first;
        of_columns.amax += rows.group * p.columns, of_columns.scale += rows.group * p.columns;
    }
    long long row = tile.row + tile.group * 4, column = tile.column + tile.across * 8, there = p.columns - column;
    Eight<IN> v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const IN* x = p.x + row_read(p.index, row + i, row + i < end) * p.columns + column;
        if constexpr (ALIGNED)
            v[i] = row + i < end && there > 0 ? load_eight(x) : Eight<IN>{};
        else
            v[i] = load_some(x, row + i < end ? there : 0);
    }
    int own = threadIdx.x - TILE_ROWS;
    if (ROWWISE && own < 0) of_row[threadIdx.x] = encode_scale(p.row, tile.row + threadIdx.x, end, p.eps, tile.column == 0);
    if (COLUMNWISE && own >= 0 && own < TILE_COLUMNS) of_column[own] = encode_scale(of_columns, tile.column + own, p.columns, p.eps, is_first);
    __syncthreads();
    if constexpr (ROWWISE) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float scale = of_row[tile.group * 4 + i];
            uint2 codes = encode_eight<OUT>(v[i], [=](int) { return scale; });
            if (row + i >= end || there <= 0) continue;
            u8* out = p.row.codes + (row + i) * p.columns + column;
            if constexpr (ALIGNED)
                store_eight(out, codes);
            else
                store_some(out, codes, there);
        }
    }
    if constexpr (COLUMNWISE) {
        Eight<float> scale = load_eight(of_column + tile.across * 8);
        uint2 codes[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) codes[i] = encode_eight<OUT>(v[i], [&](int j) { return value(scale, j); });
        transpose_into(shared, tile, codes);
        __syncthreads();
        store_columns<ALIGNED || GROUPED>(p.column.codes, shared, stored, down, p.columns);
    }
}
