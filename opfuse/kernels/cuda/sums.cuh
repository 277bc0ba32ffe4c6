// sums: gradients of operands that are sums over rows or columns: one for each tile of the matrix, then the sum of these.
//
// row_parts      fp32 [tiles down, ROW_SUMS, columns]; column_parts fp32 [groups across, COLUMN_SUMS, rows]
// Order          of every addition fixed by the shape: nothing is added atomically
// Grid           row_sums, column_sums: a block of 256 threads for each 32 sums
// Compiled       after the generated text of a chain; Parameters has it as `chain`. A block has BLOCK_THREADS, whose warps are
//                beside each other in `groups` of 2^log_across lanes; 2^log_across divides 32 if there are sums
#pragma once

// A row's part of the row sums of a thread.
OPFUSE_FN void add_row(float (&sum)[SOME(ROW_SUMS)][8], const float (&value)[SOME(ROW_SUMS)][8], int count) {
    if (count <= 0) return;
#pragma unroll
    for (int k = 0; k < ROW_SUMS; ++k)
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[k][i] += value[k][i];  // columns that are not there have sums that nobody reads
}

// Row sum k of a block's threads: over the lines of each warp as a tree, to of_warp; after a barrier, over the warps of a group in
// turn. of_warp has BLOCK_THREADS / 32 times the columns of a group.
OPFUSE_FN void leave_row_part(const Chain& p, const Thread& at, float (&sum)[8], float* of_warp) {
    for (int mask = 16; mask >> p.cut.log_across; mask >>= 1)
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] += __shfl_xor_sync(~0u, sum[i], mask);
    if (threadIdx.x % 32 >> p.cut.log_across != 0) return;
    float* own = of_warp + (threadIdx.x / 32 << p.cut.log_across + 3) + at.lane * 8;
#pragma unroll
    for (int i = 0; i < 8; i += 4) *reinterpret_cast<float4*>(own + i) = make_float4(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]);
}

OPFUSE_FN void store_row_part(const Chain& p, const Thread& at, int k, const float* of_warp) {
    int tile = p.cut.groups * 8 << p.cut.log_across, all = BLOCK_THREADS / 4 << p.cut.log_across;
    long long first = (long long)at.tile_column * tile;
    for (int j = threadIdx.x; j < tile && first + j < p.cut.columns; j += BLOCK_THREADS) {
        float total = of_warp[j];
        for (int i = j + tile; i < all; i += tile) total += of_warp[i];
        p.row_parts[((long long)at.tile * ROW_SUMS + k) * p.cut.columns + first + j] = total;
    }
}

// The column sums of a row, over the lanes that share it.
OPFUSE_FN void store_column_part(const Chain& p, const Thread& at, const float (&value)[SOME(COLUMN_SUMS)][8], const Place& place) {
    long long group = at.first >> p.cut.log_across + 3;
#pragma unroll
    for (int k = 0; k < COLUMN_SUMS; ++k) {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) total += is_there(i, place.count) ? value[k][i] : 0.0f;
        for (int mask = 1 << p.cut.log_across >> 1; mask > 0; mask >>= 1) total += __shfl_xor_sync(~0u, total, mask);
        if (at.lane == 0 && place.count > 0) p.column_parts[(group * COLUMN_SUMS + k) * p.cut.rows + place.row + place.down] = total;
    }
}

// Sums of `parts` numbers that lie `size` apart: eight threads take every eighth, then their sums are added in turn.
template <class Store>
OPFUSE_FN void add_parts(const float* part, long long parts, long long size, Store store) {
    __shared__ float of_thread[THREADS];
    long long index = (long long)blockIdx.x * 32 + threadIdx.x % 32;
    float total = 0.0f;
    if (index < size)
#pragma unroll 8
        for (long long k = threadIdx.x / 32; k < parts; k += 8) total += part[k * size + index];
    of_thread[threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.x >= 32 || index >= size) return;
#pragma unroll
    for (int k = 1; k < 8; ++k) total += of_thread[threadIdx.x + k * 32];
    store(index, total);
}

extern "C" __global__ void __launch_bounds__(THREADS) row_sums(const __grid_constant__ Parameters parameters) {
    const Chain& p = parameters.chain;
    add_parts(p.row_parts, p.row_pieces, ROW_SUMS * p.cut.columns,
              [&](long long i, float sum) { store_row_sum(p, int(i / p.cut.columns), i % p.cut.columns, sum); });
}

extern "C" __global__ void __launch_bounds__(THREADS) column_sums(const __grid_constant__ Parameters parameters) {
    const Chain& p = parameters.chain;
    add_parts(p.column_parts, p.column_pieces, COLUMN_SUMS * p.cut.rows,
              [&](long long i, float sum) { store_column_sum(p, int(i / p.cut.rows), i % p.cut.rows, sum); });
}
