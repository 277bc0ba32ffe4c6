// cast_tensor: FP8 codes of a matrix under one scale, by rows, by columns or both, from one read of it.
//
// x              [rows, columns] of IN, contiguous
// rowwise        [rows, columns] codes of OUT; cast_tile stores them if ROWWISE
// columnwise     [columns, rows] codes, the same bytes
// scale          one for all values; RECORD as in tensor_scale.cuh
// Grid           cast_rows: a block of 256 threads for each 4096 elements; cast_tile: one of 512 for each 256 x 64 tile
// JOINED         as joined.cuh has it
// ALIGNED        x is on 16 bytes, and for cast_tile columns % 8 == 0 and rows % 16 == 0; without it, anything goes
// Defined by     opfuse/numerics/casts.py, cast_recording and cast_current.
constexpr int TILE_ROWS = 256, TILE_COLUMNS = 64, TILE_THREADS = 512;
#include "tile.cuh"
#include "tensor_scale.cuh"
#include "tensor_codes.cuh"

struct Parameters {
    const IN* x;
    u8 *rowwise, *columnwise;
    TensorScale scale;
    long long rows, columns;
};
#include "joined.cuh"

constexpr int THREADS = 256, PACKS = 2;

#if ENTRY_cast_rows
extern "C" __global__ void __launch_bounds__(THREADS) cast_rows(const __grid_constant__ Launched launched) {
    Own own = own_part(launched, own_block());
    const Parameters& p = own.parameters;
    long long first = (long long)own.block * (8 * THREADS * PACKS), at = first + threadIdx.x * 8, size = p.rows * p.columns;
    Eight<IN> v[PACKS];
    u32 best = 0;
    if (ALIGNED && first + 8 * THREADS * PACKS <= size) {
#pragma unroll
        for (int k = 0; k < PACKS; ++k) v[k] = load_eight(p.x + at + k * 8 * THREADS);
        float scale = encode_scale(p.scale, own.block);
#pragma unroll
        for (int k = 0; k < PACKS; ++k) store_eight(p.rowwise + at + k * 8 * THREADS, cast_eight(v[k], scale, best));
    } else {
        float scale = encode_scale(p.scale, own.block);
#pragma unroll 1
        for (int k = 0; k < PACKS; ++k, at += 8 * THREADS)
            store_some(p.rowwise + at, cast_eight(load_some(p.x + at, size - at), scale, best), size - at);
    }
    if constexpr (RECORD) raise_amax<THREADS>(p.scale.amax, magnitude_bits<IN>(best));
}
#endif

#if ENTRY_cast_tile
extern "C" __global__ void __launch_bounds__(TILE_THREADS, 2) cast_tile(const __grid_constant__ Launched launched) {
    Own own = own_part(launched, own_block());
    const Parameters& p = own.parameters;
    __shared__ __align__(16) u32 shared[TILE_ROWS * TILE_COLUMNS / 4];
    Tile tile = tile_of_block(own.block, p.columns);
    long long row = tile.row + tile.group * 4, column = tile.column + tile.across * 8, there = p.columns - column;
    Eight<IN> v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const IN* x = p.x + (row + i) * p.columns + column;
        if constexpr (ALIGNED)
            v[i] = row + i < p.rows && there > 0 ? load_eight(x) : Eight<IN>{};
        else
            v[i] = load_some(x, row + i < p.rows ? there : 0);
    }
    float scale = encode_scale(p.scale, own.block);
    uint2 codes[4];
    u32 best = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        codes[i] = cast_eight(v[i], scale, best);
        if (!ROWWISE || row + i >= p.rows || there <= 0) continue;
        u8* out = p.rowwise + (row + i) * p.columns + column;
        if constexpr (ALIGNED)
            store_eight(out, codes[i]);
        else
            store_some(out, codes[i], there);
    }
    transpose_into(shared, tile, codes);
    if constexpr (RECORD)
        raise_amax<TILE_THREADS>(p.scale.amax, magnitude_bits<IN>(best));  // holds a barrier
    else
        __syncthreads();
    store_columns<ALIGNED>(p.columnwise, shared, tile, p.rows, p.columns);
}
#endif
