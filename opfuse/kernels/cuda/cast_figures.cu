// cast_figures: compares a tensor with what a cast made of it, and reads each once: the amax, the error, and counts of elements.
//
// x           [size] of IN, contiguous
// q           fp32 [size]: decoded codes
// scale       fp32 decode scales: [size], or one for all elements if ONE_SCALE
// ALIGNED     each of these starts on 16 bytes
// amax        fp32, 0 at first
// parts       fp64 [blocks, 2]: each block's sums of x^2 and of (x - q)^2, where both are finite
// counts      u64 [4 + 256], 0 at first: nonfinite elements; finite ones that are not 0; of these, those that are 0 in q, and those
//             larger than reach * scale; then elements by the biased exponent of their scale
// Arithmetic  x - q and scale * reach in fp32; squares and sums in fp64, in an order that is fixed. Counts are integers
// Grid        one block of 256 threads for each 16384 elements
// Defined by  opfuse/numerics/figures.py.
#include "vectors.cuh"

struct Parameters {
    const IN* x;
    const float* q;
    const float* scale;
    float* amax;
    double* parts;
    u64* counts;
    long long size;
    float reach;
};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "the fields that the host packs");

constexpr int THREADS = 256, PACKS = 16384 / (8 * THREADS), FATES = 4, EXPONENTS = 256;

// The sum of the block's threads, added as a tree; thread 0 has it.
OPFUSE_FN double block_sum(double sum, double* of_warp) {
#pragma unroll
    for (int mask = 16; mask > 0; mask >>= 1) sum += __shfl_xor_sync(~0u, sum, mask);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    double total = 0.0;
    if (threadIdx.x == 0)
#pragma unroll
        for (int i = 0; i < THREADS / 32; ++i) total += of_warp[i];
    return total;
}

extern "C" __global__ void __launch_bounds__(THREADS) cast_figures(const __grid_constant__ Parameters p) {
    __shared__ u32 counted[FATES + EXPONENTS];
    __shared__ double of_warp[2][THREADS / 32];
    for (int i = threadIdx.x; i < FATES + EXPONENTS; i += THREADS) counted[i] = 0;
    __syncthreads();
    u32 fate[FATES] = {}, best = 0;
    double signal = 0.0, lost = 0.0;
    float one = ONE_SCALE ? p.scale[0] : 0.0f;
#pragma unroll 2
    for (int k = 0; k < PACKS; ++k) {
        long long at = ((long long)blockIdx.x * PACKS + k) * (8 * THREADS) + threadIdx.x * 8, count = p.size - at;
        if (count <= 0) break;
        bool whole = count >= 8;
        Eight<IN> x = ALIGNED && whole ? load_eight(p.x + at) : load_some(p.x + at, count);
        Eight<float> q = ALIGNED && whole ? load_eight(p.q + at) : load_some(p.q + at, count), scale;
        if (!ONE_SCALE) scale = ALIGNED && whole ? load_eight(p.scale + at) : load_some(p.scale + at, count);
        u32 exponent = 0, run = 0;  // neighbours mostly share a scale: they are counted together
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (!whole && i >= count) break;
            float v = value(x, i), made = value(q, i), s = ONE_SCALE ? one : value(scale, i), size = float_of(magnitude_of(v));
            bool finite = is_finite(v);
            fate[0] += !finite;
            if (finite) {
                best = larger(best, bits_of(size));
                fate[1] += size != 0.0f;
                fate[2] += size != 0.0f && made == 0.0f;
                fate[3] += size > s * p.reach;
                if (is_finite(made)) {
                    double difference = v - made;
                    signal += double(v) * double(v), lost += difference * difference;
                }
            }
            if (ONE_SCALE) continue;
            u32 own = bits_of(s) >> 23 & 255;
            if (run && own != exponent) atomicAdd(counted + FATES + exponent, run), run = 0;
            exponent = own, ++run;
        }
        if (run) atomicAdd(counted + FATES + exponent, run);
    }
#pragma unroll
    for (int i = 0; i < FATES; ++i) {
        u32 of_warps = __reduce_add_sync(~0u, fate[i]);
        if (threadIdx.x % 32 == 0 && of_warps) atomicAdd(counted + i, of_warps);
    }
    raise_amax<THREADS>(p.amax, best);
    signal = block_sum(signal, of_warp[0]), lost = block_sum(lost, of_warp[1]);
    if (threadIdx.x == 0) p.parts[2 * blockIdx.x] = signal, p.parts[2 * blockIdx.x + 1] = lost;
    for (int i = threadIdx.x; i < FATES + EXPONENTS; i += THREADS)
        if (counted[i]) atomicAdd(p.counts + i, u64(counted[i]));
    if (ONE_SCALE && blockIdx.x == 0 && threadIdx.x == 0) atomicAdd(p.counts + FATES + (bits_of(one) >> 23 & 255), u64(p.size));
}
