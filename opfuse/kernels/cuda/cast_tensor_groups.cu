// cast_tensor_groups: FP8 codes of groups of rows, each group under a scale of its own, from one read of the matrix.
//
// x              [rows, columns] of IN, contiguous
// index          if INDEXED: for each row of the matrix, the number of a row of x; x then has any number of rows
// tiles          the tiles of 128 rows of row_groups.cu
// rowwise        [rows, columns] codes of OUT, if ROWWISE
// columnwise     [columns, 128 * down] codes, if COLUMNWISE; a group begins on a tile, with zeros behind its rows, and in tiles behind the
//                last one
// groups         the scales of `count` groups, at most 256; RECORD as in tensor_scale.cuh
// down           for how many tiles of rows there is memory
// Grid           a block of 256 threads for each 64 columns of a tile of rows
// ALIGNED        x is on 16 bytes, and columns % 8 == 0
// Defined by     opfuse/numerics/group_casts.py, cast_current_groups and cast_recording_groups.
constexpr int TILE_ROWS = 128, TILE_COLUMNS = 64, TILE_THREADS = 256;
#include "tile.cuh"
#include "row_index.cuh"
#include "row_tiles.cuh"
#include "tensor_scale.cuh"
#include "tensor_codes.cuh"

struct Parameters {
    const IN* x;
    const RowTile* tiles;
    u8 *rowwise, *columnwise;
    long long columns;
    u32 down, count;
    TensorScale groups[GROUPS];
    const long long* index;
};
static_assert(sizeof(Parameters) == PARAMETER_BYTES && TILE_ROWS == ROW_TILE, "the fields that the host packs");

extern "C" __global__ void __launch_bounds__(TILE_THREADS, 4) cast_tensor_groups(const __grid_constant__ Parameters p) {
    __shared__ __align__(16) u32 shared[TILE_ROWS * TILE_COLUMNS / 4];
    if (blockIdx.x == 0 && threadIdx.x < p.count) {  // of groups without rows, too
        const TensorScale& own = p.groups[threadIdx.x];
        *own.decode_scale = scales_of(own).decode;
    }
    Tile stored = tile_of_block(own_block(), p.columns), tile = stored;
    RowTile rows = p.tiles[stored.row / TILE_ROWS];
    tile.row = rows.first;
    long long row = tile.row + tile.group * 4, column = tile.column + tile.across * 8, there = p.columns - column;
    Eight<IN> v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const IN* x = p.x + row_read(p.index, row + i, row + i < rows.end) * p.columns + column;
        if constexpr (ALIGNED)
            v[i] = row + i < rows.end && there > 0 ? load_eight(x) : Eight<IN>{};
        else
            v[i] = load_some(x, row + i < rows.end ? there : 0);
    }
    const TensorScale& of = p.groups[rows.group];
    float scale = scales_of(of).encode;
    uint2 codes[4];
    u32 best = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        codes[i] = cast_eight(v[i], scale, best);
        if (!ROWWISE || row + i >= rows.end || there <= 0) continue;
        u8* out = p.rowwise + (row + i) * p.columns + column;
        if constexpr (ALIGNED)
            store_eight(out, codes[i]);
        else
            store_some(out, codes[i], there);
    }
    if constexpr (COLUMNWISE) transpose_into(shared, tile, codes);
    if constexpr (RECORD)
        raise_amax<TILE_THREADS>(of.amax, magnitude_bits<IN>(best));  // holds a barrier
    else if constexpr (COLUMNWISE)
        __syncthreads();
    if constexpr (COLUMNWISE) store_columns<true>(p.columnwise, shared, stored, (long long)p.down * TILE_ROWS, p.columns);
}
