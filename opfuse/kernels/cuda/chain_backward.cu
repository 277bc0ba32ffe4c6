// chain_backward: the gradients of a chain of elementwise ops, from one read of dy and of what was saved.
//
// Chain          generated: tensors and constants of the ops, load_inputs, run_chain, store_results, store_row_sum,
//                store_column_sum; ROW_SUMS and COLUMN_SUMS count the gradients that are sums over rows and over columns, whose
//                second pass is in sums.cuh
// Grid           chain_backward: a block of 256 threads for each piece that `cut` makes, which is at most 32 packs wide if
//                there are sums
// Defined by     opfuse/kernels/epilogue.py, backward_chain; bitwise where no op approximates, sums in another order
#include "chain.cuh"
#include "generated.cuh"

struct Parameters {
    Chain chain;
};

#include "sums.cuh"

static_assert(sizeof(Parameters) == PARAMETER_BYTES, "the fields that the host packs");

extern "C" __global__ void __launch_bounds__(THREADS) chain_backward(const __grid_constant__ Parameters parameters) {
    const Chain& p = parameters.chain;
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
            store_results(p, in[k], out, row, at.column, count);
            store_column_part(p, at, out.column_sum, row, count);
            add_row(sum, out.row_sum, count);
        }
    }
    store_row_part(p, at, sum);
}
