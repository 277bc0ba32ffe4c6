// chain_backward: the gradients of a chain of elementwise ops, from one read of dy and of what was saved.
//
// Chain          generated: tensors and constants of the ops, load_inputs, run_chain, store_results, store_row_sum,
//                store_column_sum; ROW_SUMS and COLUMN_SUMS count the gradients that are sums over rows and over columns
// row_parts      fp32 [pieces of rows, ROW_SUMS, columns], column_parts fp32 [pieces of columns, COLUMN_SUMS, rows]: sums of one
//                piece each, which row_sums and column_sums add up. The order of every sum is fixed by the shape.
// Grid           chain_backward: a block of 256 threads for each piece that `cut` makes, which is at most 32 packs wide if there
//                are sums; row_sums and column_sums: one for each 32 sums
// Defined by     opfuse/kernels/epilogue.py, backward_chain; bitwise where no op approximates, sums in another order
#include "chain.cuh"
#include "generated.cuh"

static_assert(sizeof(Chain) == PARAMETER_BYTES, "the fields that the host packs");

// The row sums of a block's threads, added up over its lines in turn.
OPFUSE_FN void store_row_part(const Chain& p, const Thread& at, const float (&sum)[SOME(ROW_SUMS)][8]) {
    __shared__ float of_line[THREADS * 8];
    int width = 8 << p.cut.log_across;
    long long first = at.column - at.lane * 8;
#pragma unroll
    for (int k = 0; k < ROW_SUMS; ++k) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 8; ++i) of_line[at.line * width + at.lane * 8 + i] = sum[k][i];
        __syncthreads();
        for (int j = threadIdx.x; j < width && first + j < p.cut.columns; j += THREADS) {
            float total = 0.0f;
            for (int line = 0; line < at.lines; ++line) total += of_line[line * width + j];
            p.row_parts[((long long)at.tile * ROW_SUMS + k) * p.cut.columns + first + j] = total;
        }
    }
}

// The column sums of a row, over the lanes that share it.
OPFUSE_FN void store_column_part(const Chain& p, const Thread& at, const float (&value)[SOME(COLUMN_SUMS)][8], long long row,
                                 long long count) {
#pragma unroll
    for (int k = 0; k < COLUMN_SUMS; ++k) {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) total += i < count ? value[k][i] : 0.0f;
        for (int mask = 1 << p.cut.log_across >> 1; mask > 0; mask >>= 1) total += __shfl_xor_sync(~0u, total, mask);
        if (at.lane == 0 && row < p.cut.rows)
            p.column_parts[((long long)at.tile_column * COLUMN_SUMS + k) * p.cut.rows + row] = total;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) chain_backward(const __grid_constant__ Chain p) {
    Thread at = this_thread(p.cut);
    long long there = p.cut.columns - at.column;
    RowOperands<8> operands = load_row_operands(p, at.column, there);
    float sum[SOME(ROW_SUMS)][8] = {};
#pragma unroll 1
    for (u32 step = 0; step < p.cut.steps; step += PACKS) {
        Inputs<8> in[PACKS];
        long long row = at.row + step * at.lines;
#pragma unroll
        for (int k = 0; k < PACKS; ++k)
            in[k] = load_inputs(p, row + k * at.lines, at.column, row + k * at.lines < p.cut.rows ? there : 0);
#pragma unroll
        for (int k = 0; k < PACKS; ++k, row += at.lines) {
            long long count = row < p.cut.rows ? there : 0;
            Results<8> out = run_chain(p, operands, in[k]);
            store_results(p, out, row, at.column, count);
            store_column_part(p, at, out.column_sum, row, count);
#pragma unroll
            for (int j = 0; j < ROW_SUMS; ++j)
#pragma unroll
                for (int i = 0; i < 8; ++i) sum[j][i] += i < count ? out.row_sum[j][i] : 0.0f;
        }
    }
    store_row_part(p, at, sum);
}

// Sums of `parts` numbers that lie `size` apart: eight threads take every eighth, then their sums are added in turn.
template <class Store>
OPFUSE_FN void add_parts(const float* part, long long parts, long long size, Store store) {
    __shared__ float of_thread[THREADS];
    long long index = (long long)blockIdx.x * 32 + threadIdx.x % 32;
    float total = 0.0f;
    if (index < size)
        for (long long k = threadIdx.x / 32; k < parts; k += 8) total += part[k * size + index];
    of_thread[threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.x >= 32 || index >= size) return;
#pragma unroll
    for (int k = 1; k < 8; ++k) total += of_thread[threadIdx.x + k * 32];
    store(index, total);
}

extern "C" __global__ void __launch_bounds__(THREADS) row_sums(const __grid_constant__ Chain p) {
    add_parts(p.row_parts, p.row_pieces, ROW_SUMS * p.cut.columns,
              [&](long long i, float sum) { store_row_sum(p, int(i / p.cut.columns), i % p.cut.columns, sum); });
}

extern "C" __global__ void __launch_bounds__(THREADS) column_sums(const __grid_constant__ Chain p) {
    add_parts(p.column_parts, p.cut.tiles_across, COLUMN_SUMS * p.cut.rows,
              [&](long long i, float sum) { store_column_sum(p, int(i / p.cut.rows), i % p.cut.rows, sum); });
}
