// sums: gradients of operands that are sums over rows or columns: first of each piece of the matrix, then of all pieces.
//
// row_parts      fp32 [pieces of SUMMED_ROWS rows, ROW_SUMS, columns]; column_parts fp32 [groups of 64 columns, COLUMN_SUMS, rows]
// Order          fixed, and the same for every tile and cast: four rows in a thread; the four threads of a warp's 16 rows, as a tree; the
//                16s of 64 rows, one after the other; then the pieces. Nothing is added atomically
// Grid           row_sums, column_sums: a block of 256 threads for each 32 sums
// Compiled       after tile.cuh and the generated text of a chain; Parameters has it as `chain`
#pragma once

constexpr int SUMMED_ROWS = 64, OF_SIXTEENS = SIXTEENS * TILE_COLUMNS;
static_assert(ROW_SUMS == 0 || TILE_ROWS % SUMMED_ROWS == 0, "tiles are whole pieces");

// Adds a row to a thread's row sums.
OPFUSE_FN void add_row(float (&sum)[SOME(ROW_SUMS)][8], const float (&value)[SOME(ROW_SUMS)][8], int count) {
    if (count <= 0) return;
#pragma unroll
    for (int k = 0; k < ROW_SUMS; ++k)
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[k][i] += value[k][i];  // nobody reads the sums of columns outside of the matrix
}

// Stores a warp's row sums of a step, over its 16 rows, in of_sixteens, to be read after a barrier; the thread's sums become 0.
OPFUSE_FN void leave_row_parts(const Tile& tile, int step, float (&sum)[SOME(ROW_SUMS)][8], float* of_sixteens) {
    float* own = of_sixteens + (tile.group / 4 + step) * TILE_COLUMNS + tile.across * 8;
#pragma unroll
    for (int k = 0; k < ROW_SUMS; ++k, own += OF_SIXTEENS) {
#pragma unroll
        for (int mask = 16; mask >= 8; mask >>= 1)
#pragma unroll
            for (int i = 0; i < 8; ++i) sum[k][i] += __shfl_xor_sync(~0u, sum[k][i], mask);
#pragma unroll
        for (int i = 0; i < 8; i += 4)
            if (threadIdx.x % 32 < 8)
                *reinterpret_cast<float4*>(own + i) = make_float4(sum[k][i], sum[k][i + 1], sum[k][i + 2], sum[k][i + 3]);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[k][i] = 0.0f;
    }
}

// Stores row sum k of each 64 rows.
OPFUSE_FN void store_row_part(const Chain& p, const Thread& at, int k, const float* of_sixteens) {
    constexpr int PIECES = TILE_ROWS / SUMMED_ROWS;
    for (int j = threadIdx.x; j < PIECES * TILE_COLUMNS; j += TILE_THREADS) {
        long long piece = (long long)at.tile * PIECES + j / TILE_COLUMNS, column = (long long)at.tile_column * TILE_COLUMNS + j % TILE_COLUMNS;
        if (piece >= p.row_pieces || column >= p.cut.columns) continue;
        const float* first = of_sixteens + j / TILE_COLUMNS * (4 * TILE_COLUMNS) + j % TILE_COLUMNS;
        float total = first[0];
#pragma unroll
        for (int s = 1; s < 4; ++s) total += first[s * TILE_COLUMNS];
        p.row_parts[(piece * ROW_SUMS + k) * p.cut.columns + column] = total;
    }
}

// Stores the column sums of a row, added over the lanes that share it.
OPFUSE_FN void store_column_part(const Chain& p, const Thread& at, const float (&value)[SOME(COLUMN_SUMS)][8], const Place& place) {
#pragma unroll
    for (int k = 0; k < COLUMN_SUMS; ++k) {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) total += is_there(i, place.count) ? value[k][i] : 0.0f;
#pragma unroll
        for (int mask = 4; mask > 0; mask >>= 1) total += __shfl_xor_sync(~0u, total, mask);
        if (at.lane == 0 && place.count > 0)
            p.column_parts[(at.first / 64 * COLUMN_SUMS + k) * p.cut.rows + place.row + place.down] = total;
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
