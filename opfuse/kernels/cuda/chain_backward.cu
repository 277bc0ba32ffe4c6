// chain_backward: the gradients of a chain of elementwise ops, from one read of dy and of what was saved.
//
// Chain          generated: tensors and constants of the ops, load_inputs, run_chain, store_results, store_row_sum,
//                store_column_sum, and result if AMAX; ROW_SUMS and COLUMN_SUMS count the gradients that are sums over rows and
//                over columns, whose second pass is in sums.cuh
// AMAX = 1       raises *amax to the largest magnitude of dx, as it is stored
// Grid           chain_backward: a block of 256 threads for each tile that `cut` makes, which is at most 32 packs wide if there
//                are sums
// Defined by     opfuse/kernels/epilogue.py, backward_chain; bitwise where no op approximates, sums in another order
#include "chain.cuh"
constexpr int BLOCK_THREADS = THREADS;
#include "generated.cuh"

struct Parameters {
    Chain chain;
    float* amax;
};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "the fields that the host packs");

#include "sums.cuh"

#if AMAX
template <int STRAND = 0>
OPFUSE_FN u32 larger_result(u32 best, const Inputs<8>& in, const Results<8>& out, int count) {
    best = larger_magnitude(best, eight_of(result<STRAND>(in, out), count));
    if constexpr (STRAND + 1 < STRANDS) best = larger_result<STRAND + 1>(best, in, out, count);
    return best;
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS) chain_backward(const __grid_constant__ Parameters parameters) {
    const Chain& p = parameters.chain;
    int lines = THREADS >> p.cut.log_across;
    Thread at = this_thread(p.cut, lines);
    RowOperands<8> operands = load_row_operands(p, at.place(0));
    float sum[SOME(ROW_SUMS)][8] = {};
    u32 best = 0;
#pragma unroll 1
    for (u32 step = 0; step < p.cut.steps; step += PACKS) {
        Inputs<8> in[PACKS];
#pragma unroll
        for (int k = 0; k < PACKS; ++k) in[k] = load_inputs(p, at.place((step + k) * lines));
#pragma unroll
        for (int k = 0; k < PACKS; ++k) {
            Place place = at.place((step + k) * lines);
            Results<8> out = run_chain(p, operands, in[k]);
            store_results(p, in[k], out, place);
            store_column_part(p, at, out.column_sum, place);
            add_row(sum, out.row_sum, place.count);
#if AMAX
            best = larger_result(best, in[k], out, place.count);
#endif
        }
    }
    __shared__ __align__(16) float of_warp[BLOCK_THREADS * 8];
#pragma unroll
    for (int k = 0; k < ROW_SUMS; ++k) {
        __syncthreads();
        leave_row_part(p, at, sum[k], of_warp);
        __syncthreads();
        store_row_part(p, at, k, of_warp);
    }
#if AMAX
    raise_amax<THREADS>(parameters.amax, magnitude_bits<IO>(best));
#endif
}
