// row_groups: a table of where the groups of rows of a matrix lie, one group after another, for kernels that take them tile by tile.
//
// splits         [groups] of SPLIT: how many rows each group has
// table          entries of four numbers, as in opfuse/numerics/row_groups.py: header, groups, tiles of 128 rows, tiles of 256 rows
// tiles, tall    for how many tiles of 128 and of 256 rows the table has room; entries behind the last tile become 0
// Sizes          below 0 count as 0, and rows behind the last one of the matrix are cut off, so that no kernel leaves it. If sizes do not
//                add up to the rows, the device stops with an assertion, after the table is written
// Grid           one block of THREADS threads; at most MOST groups
// Defined by     opfuse/numerics/row_groups.py, row_groups, but for the assertion.
#include "common.cuh"

struct Parameters {
    const SPLIT* splits;
    u32* table;
    long long rows;
    u32 groups, tiles, tall, unused;
};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "the fields that the host packs");

extern "C" __device__ void __assertfail(const char*, const char*, u32, const char*, decltype(sizeof(0)));

constexpr u32 THREADS = 256, MOST = 128;
constexpr u32 HEIGHTS[2] = {128, 256};

struct Four {
    u32 x, y, z, w;
};

extern "C" __global__ void __launch_bounds__(THREADS) row_groups(const __grid_constant__ Parameters p) {
    __shared__ long long size[MOST];
    __shared__ u32 first[MOST + 1], tile[2][MOST + 1];  // of each group, and behind the last
    __shared__ bool wrong;
    u32 own = threadIdx.x;
    Four* table = reinterpret_cast<Four*>(p.table);
    if (own == 0) wrong = false;
    __syncthreads();
    if (own < p.groups) {
        long long given = p.splits[own];
        if (given < 0) wrong = true;
        size[own] = given < 0 ? 0 : given < p.rows ? given : p.rows + (given > p.rows);  // too large by one, so that the sum shows it
    }
    __syncthreads();
    if (own <= p.groups) {
        long long before = 0;
        for (u32 i = 0; i < own; ++i) before += size[i];
        if (own == p.groups && before != p.rows) wrong = true;
        first[own] = u32(before < p.rows ? before : p.rows);
    }
    __syncthreads();
    if (own <= p.groups)
        for (u32 h = 0; h < 2; ++h) {
            u32 before = 0;
            for (u32 i = 0; i < own; ++i) before += (first[i + 1] - first[i] + HEIGHTS[h] - 1) / HEIGHTS[h];
            tile[h][own] = before;
        }
    __syncthreads();
    if (own == 0) table[0] = {tile[0][p.groups], tile[1][p.groups], 0, 0};
    if (own < p.groups) table[1 + own] = {first[own], first[own + 1], tile[0][own], tile[0][own + 1] - tile[0][own]};
    u32 most[2] = {p.tiles, p.tall};
    table += 1 + p.groups;
    for (u32 h = 0; h < 2; table += most[h++])
        for (u32 t = own; t < most[h]; t += THREADS) {
            u32 low = 0, high = p.groups;  // the last group that begins at this tile or before it; empty ones begin where the next does
            while (high - low > 1) {
                u32 middle = (low + high) / 2;
                (tile[h][middle] <= t ? low : high) = middle;
            }
            table[t] = t < tile[h][p.groups] ? Four{low, first[low] + (t - tile[h][low]) * HEIGHTS[h], first[low + 1], 0} : Four{0, 0, 0, 0};
        }
    __syncthreads();
    if (own == 0 && wrong) __assertfail("split sizes add up to the rows of the input", "opfuse/kernels/cuda/row_groups.cu", 0, "row_groups", 1);
}
