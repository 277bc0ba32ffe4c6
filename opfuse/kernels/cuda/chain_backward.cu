// chain_backward: the gradients of a chain of elementwise ops, from one read of dy and of what was saved, where none is a sum.
//
// Chain          generated: tensors and constants of the ops, load_inputs, run_chain, store_results, and result if AMAX
// AMAX = 1       raises *amax to the largest magnitude of dx, as it is stored
// Grid           a block of 256 threads for each tile that `cut` makes, with steps = PACKS
// RESIDENT       blocks that share a multiprocessor
// Defined by     opfuse/numerics/chain.py, backward_chain; bitwise where no op approximates
#include "chain.cuh"
#include "generated.cuh"

struct Parameters {
    Chain chain;
    float* amax;
};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "the fields that the host packs");
static_assert(ROW_SUMS == 0 && COLUMN_SUMS == 0, "sums are those of chain_tile");

#if AMAX
template <int STRAND = 0>
OPFUSE_FN u32 larger_result(u32 best, const Inputs<8>& in, const Results<8>& out, int count) {
    best = larger_magnitude(best, eight_of(result<STRAND>(in, out), count));
    if constexpr (STRAND + 1 < STRANDS) best = larger_result<STRAND + 1>(best, in, out, count);
    return best;
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) chain_backward(const __grid_constant__ Parameters parameters) {
    const Chain& p = parameters.chain;
    int lines = THREADS >> p.cut.log_across;
    Thread at = this_thread(p.cut, lines);
    RowOperands<8> operands = load_row_operands(p, at.place(0));
    Inputs<8> in[PACKS];
#pragma unroll
    for (int k = 0; k < PACKS; ++k) in[k] = load_inputs(p, at.place(k * lines));
    u32 best = 0;
#pragma unroll
    for (int k = 0; k < PACKS; ++k) {
        Place place = at.place(k * lines);
        Results<8> out = run_chain(p, operands, in[k]);
        store_results(p, in[k], out, place);
#if AMAX
        best = larger_result(best, in[k], out, place.count);
#endif
    }
#if AMAX
    raise_amax<THREADS>(parameters.amax, magnitude_bits<IO>(best));
#endif
}
