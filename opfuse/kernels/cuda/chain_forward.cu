// chain_forward: a chain of elementwise ops over a matrix, from one read of it: the result, and the boundaries that are kept.
//
// Chain          generated: the tensors and constants of the ops, load_inputs, run_chain, store_results
// Grid           a block of 256 threads for each piece that `cut` makes, with steps = PACKS
// Defined by     opfuse/kernels/epilogue.py, forward_chain; bitwise where no op approximates
#include "chain.cuh"
#include "generated.cuh"

static_assert(sizeof(Chain) == PARAMETER_BYTES, "the fields that the host packs");

extern "C" __global__ void __launch_bounds__(THREADS) chain_forward(const __grid_constant__ Chain p) {
    Thread at = this_thread(p.cut);
    long long count = p.cut.columns - at.column;
    if (count <= 0) return;
    RowOperands<8> operands = load_row_operands(p, at.column, count);
    Inputs<8> in[PACKS];
#pragma unroll
    for (int k = 0; k < PACKS; ++k) {
        long long row = at.row + k * at.lines;
        in[k] = load_inputs(p, row, at.column, row < p.cut.rows ? count : 0);
    }
#pragma unroll
    for (int k = 0; k < PACKS; ++k) {
        long long row = at.row + k * at.lines;
        store_results(p, in[k], run_chain(p, operands, in[k]), row, at.column, row < p.cut.rows ? count : 0);
    }
}
