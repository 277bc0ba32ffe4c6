// amax_nvfp4: the global amaxes of NVFP4 planes of which the columnwise one is rotated, from one read of a matrix: raises fp32 numbers
// to the largest magnitudes, as integers, so that inf and NaN propagate.
//
// x              [rows, columns] of bf16, contiguous; rows % 16 == 0
// rowwise        fp32, not negative: the amax of the matrix; or null
// columnwise     fp32, not negative: the amax of its rotated columns, rounded to bf16; rows whose bit in SIGNS is set are negated first
// Grid           one block of 256 threads for each 128 rows x 64 columns
// JOINED         as joined.cuh has it
// ALIGNED        x is on 4 bytes, and columns % 2 == 0; without it, anything goes
// Defined by     opfuse/numerics/casts.py, amaxes_nv.
#include "vectors.cuh"
#include "hadamard.cuh"

struct Parameters {
    const bf16* x;
    float *rowwise, *columnwise;
    long long rows, columns;
};
#include "joined.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, CHUNK = 16, TILE_ROWS = WARPS * CHUNK, TILE_COLUMNS = 64;

// The first `count` of two neighbouring values, then zeros.
OPFUSE_FN u32 load_two(const bf16* x, long long count) {
    if constexpr (ALIGNED) return count > 0 ? *reinterpret_cast<const u32*>(x) : 0;
    return (count > 0 ? u32(x[0].bits) : 0) | (count > 1 ? u32(x[1].bits) << 16 : 0);
}

// The bits of the largest magnitude of 16 rotated values of a column. Rounding keeps order, so only the largest is rounded.
OPFUSE_FN u32 largest_rotated(const u32 (&v)[CHUNK], int side) {
    float of[CHUNK];
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) of[i] = with_sign(float_of(side ? v[i] & 0xffff0000 : v[i] << 16), i);
    hadamard(of);
    u32 best = 0;
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) best = larger(best, magnitude_of(of[i]));
    return best;
}

extern "C" __global__ void __launch_bounds__(THREADS) amax_nvfp4(const __grid_constant__ Launched launched) {
    Own own = own_part(launched);
    const Parameters& p = own.parameters;
    u32 across = u32((p.columns + TILE_COLUMNS - 1) / TILE_COLUMNS);
    long long row = (long long)(own.block / across) * TILE_ROWS + threadIdx.x / 32 * CHUNK;
    long long column = (long long)(own.block % across) * TILE_COLUMNS + threadIdx.x % 32 * 2;
    u32 v[CHUNK];
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) v[i] = load_two(p.x + (row + i) * p.columns + column, row + i < p.rows ? p.columns - column : 0);
    if (p.rowwise) {
        u32 best = 0;
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) best = larger_magnitudes(best, v[i]);
        raise_amax<THREADS>(p.rowwise, magnitude_bits<bf16>(best));
        __syncthreads();
    }
    float largest = float_of(larger(largest_rotated(v, 0), largest_rotated(v, 1)));
    raise_amax<THREADS>(p.columnwise, round_two<bf16>(largest * 0.25f, 0.0f) << 16);
}
