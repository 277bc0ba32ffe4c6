// chain_forward: a chain of elementwise ops over a matrix, from one read of it: the result, and the boundaries that are kept.
//
// Chain          generated: the tensors and constants of the ops, load_inputs, run_chain, store_results, and result
// AMAX = 1       raises *amax to the largest magnitude of the result, as it is stored
// Grid           a block of 256 threads for each tile that `cut` makes, with steps = PACKS
// RESIDENT       blocks that share a multiprocessor
// Defined by     opfuse/numerics/chain.py, forward_chain; bitwise where no op approximates
#include "chain.cuh"
#include "generated.cuh"

struct Parameters {
    Chain chain;
    float* amax;
};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "the fields that the host packs");

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) chain_forward(const __grid_constant__ Parameters parameters) {
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
        best = larger_magnitude(best, eight_of(result<0>(in[k], out), place.count));
    }
    if constexpr (AMAX) raise_amax<THREADS>(parameters.amax, magnitude_bits<IO>(best));
}
