// amax_groups: raises an fp32 number for each group of rows to the largest magnitude in the group, as integers, so that inf and NaN
// propagate.
//
// x              [rows, columns] of IN, contiguous
// tiles          the tiles of 128 rows of row_groups.cu; blocks of tiles without rows do nothing
// amax           fp32 [groups], not negative
// Grid           one block of 256 threads for each tile of rows x 256 columns, of which a warp has 16 rows
// ALIGNED        x is on 16 bytes, and columns % 8 == 0; without it, anything goes
// Defined by     opfuse/numerics/group_casts.py, group_amaxes.
#include "vectors.cuh"
#include "row_tiles.cuh"

struct Parameters {
    const IN* x;
    const RowTile* tiles;
    float* amax;
    long long columns;
};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "the fields that the host packs");

constexpr int THREADS = 256, CHUNK = ROW_TILE / (THREADS / 32), ACROSS = 32 * 8;
constexpr int STEP = 16 / sizeof(IN);  // rows whose loads are under way together

extern "C" __global__ void __launch_bounds__(THREADS) amax_groups(const __grid_constant__ Parameters p) {
    u32 across = u32((p.columns + ACROSS - 1) / ACROSS);
    RowTile rows = p.tiles[blockIdx.x / across];
    if (rows.first >= rows.end) return;
    long long column = (long long)(blockIdx.x % across) * ACROSS + threadIdx.x % 32 * 8, there = p.columns - column;
    u32 row = rows.first + threadIdx.x / 32 * CHUNK, best = 0;
#pragma unroll 1
    for (u32 start = 0; start < CHUNK; start += STEP) {
        Eight<IN> v[STEP];
#pragma unroll
        for (u32 i = 0; i < STEP; ++i) {
            u32 at = row + start + i;
            const IN* x = p.x + at * p.columns + column;
            if constexpr (ALIGNED)
                v[i] = at < rows.end && there > 0 ? load_eight(x) : Eight<IN>{};
            else
                v[i] = load_some(x, at < rows.end ? there : 0);
        }
#pragma unroll
        for (u32 i = 0; i < STEP; ++i) best = larger_magnitude(best, v[i]);
    }
    raise_amax<THREADS>(p.amax + rows.group, magnitude_bits<IN>(best));
}
