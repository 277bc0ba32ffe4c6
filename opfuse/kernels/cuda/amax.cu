// amax: raises the fp32 *amax to the largest magnitude in x, found as an integer maximum, so that inf and NaN propagate.
//
// x           [size] of IN, contiguous, on 16 bytes if ALIGNED
// amax        fp32, not negative; 0 at first for the amax of x alone
// Grid        one block of 256 threads for each 8192 elements
// JOINED      as joined.cuh has it
// Defined by  opfuse/numerics/scales.py, amax.
#include "vectors.cuh"

struct Parameters {
    const IN* x;
    float* amax;
    long long size;
};
#include "joined.cuh"

constexpr int THREADS = 256, PACKS = 8192 / (8 * THREADS);

extern "C" __global__ void __launch_bounds__(THREADS) amax(const __grid_constant__ Launched launched) {
    Own own = own_part(launched);
    const Parameters& p = own.parameters;
    long long first = (long long)own.block * (8 * THREADS * PACKS), at = first + threadIdx.x * 8;
    bool whole = ALIGNED && first + 8 * THREADS * PACKS <= p.size;
    Eight<IN> v[PACKS];
    if (whole) {
#pragma unroll
        for (int k = 0; k < PACKS; ++k) v[k] = load_eight(p.x + at + k * 8 * THREADS);
    } else {
#pragma unroll
        for (int k = 0; k < PACKS; ++k) v[k] = load_some(p.x + at + k * 8 * THREADS, p.size - at - k * 8 * THREADS);
    }
    u32 best = 0;
#pragma unroll
    for (int k = 0; k < PACKS; ++k) best = larger_magnitude(best, v[k]);
    raise_amax<THREADS>(p.amax, magnitude_bits<IN>(best));
}
