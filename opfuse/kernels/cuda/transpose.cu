// transpose: a matrix of bytes with its rows as columns, from one read of it.
//
// x              [rows, columns] bytes, contiguous
// turned         [columns, rows] bytes
// Grid           a block of 512 threads for each 256 x 64 tile
// ALIGNED        x is on 8 bytes, columns % 8 == 0 and rows % 16 == 0; without it, anything goes
// Defined by     opfuse/numerics/layouts.py, transposed.
constexpr int TILE_ROWS = 256, TILE_COLUMNS = 64, TILE_THREADS = 512;
#include "tile.cuh"

struct Parameters {
    const u8* x;
    u8* turned;
    long long rows, columns;
};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "the fields that the host packs");

// Eight bytes of a row, of which the first `count` are there, count <= 0 included.
OPFUSE_FN uint2 load_bytes(const u8* x, long long count) {
    if constexpr (ALIGNED) return count > 0 ? *reinterpret_cast<const uint2*>(x) : make_uint2(0, 0);
    u32 word[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (i < count) word[i / 4] |= u32(x[i]) << i % 4 * 8;
    return make_uint2(word[0], word[1]);
}

extern "C" __global__ void __launch_bounds__(TILE_THREADS, 3) transpose(const __grid_constant__ Parameters p) {
    __shared__ __align__(16) u32 shared[TILE_ROWS * TILE_COLUMNS / 4];
    Tile tile = tile_of_block(blockIdx.x, p.columns);
    long long row = tile.row + tile.group * 4, column = tile.column + tile.across * 8, there = p.columns - column;
    uint2 bytes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) bytes[i] = load_bytes(p.x + (row + i) * p.columns + column, row + i < p.rows ? there : 0);
    transpose_into(shared, tile, bytes);
    __syncthreads();
    store_columns<ALIGNED>(p.turned, shared, tile, p.rows, p.columns);
}
