// norm_sums: the gradients of the parameters of a normalisation, from the sums of each block of norm_backward.
//
// parts          fp32 [blocks, sums, pitch], blocks <= BLOCKS: sums for the weight, then for the bias if there is one
// d_weight, d_bias  [columns] of WEIGHT; d_bias null without a bias
// Order          blocks b with equal b % 8 by halves, then these eight sums by halves
// Grid           one block of 256 threads for each 32 sums
// Defined by     opfuse/numerics/norm.py, norm_backward
#include "halves.cuh"

struct Parameters {
    const float* parts;
    WEIGHT *d_weight, *d_bias;
    long long columns, pitch;
    u32 blocks, unused;
};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "the fields that the host packs");

constexpr int THREADS = 256, ADDERS = 32, EACH = THREADS / ADDERS, LOADS = BLOCKS / EACH;

extern "C" __global__ void __launch_bounds__(THREADS) norm_sums(const __grid_constant__ Parameters p) {
    __shared__ float of_thread[EACH][ADDERS];
    u32 first = threadIdx.x / ADDERS, own = threadIdx.x % ADDERS;
    long long index = (long long)blockIdx.x * ADDERS + own, size = p.d_bias ? 2 * p.pitch : p.pitch;
    u32 blocks = index < size ? p.blocks : 0;
    const float* part = p.parts + first * size + index;
    float v[LOADS];
#pragma unroll
    for (int k = 0; k < LOADS; ++k, part += EACH * size) v[k] = first + k * EACH < blocks ? *part : 0.0f;
    of_thread[first][own] = by_halves(v);
    __syncthreads();
    if (first > 0 || index >= size) return;
    float sum[EACH];
#pragma unroll
    for (int k = 0; k < EACH; ++k) sum[k] = of_thread[k][own];
    float total = by_halves(sum) + 0.0f;  // where all is -0
    long long column = index < p.pitch ? index : index - p.pitch;
    if (column < p.columns) (index < p.pitch ? p.d_weight : p.d_bias)[column] = from_fp32<WEIGHT>(total);
}
