// norm_forward: normalises the rows of a matrix and stores their statistics, from one read of the matrix.
//
// x, y           [rows, columns] of IN and of IO, contiguous; y is stored if STORES
// rstd, mean     fp32 [rows]; mean of a LAYER_NORM alone
// amax           fp32, raised to the largest magnitude of y, rounded to IO, if MEASURES
// Grid           a block of 256 threads for each 256 / TEAM rows
// RESIDENT       blocks that share a multiprocessor
// Defined by     opfuse/numerics/norm.py, norm_forward
#include "norm.cuh"

struct Parameters {
    Norm norm;
    IO* y;
    float* amax;
};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "the fields that the host packs");

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) norm_forward(const __grid_constant__ Parameters parameters) {
    const Norm& p = parameters.norm;
    Row at = row_of_block(p, blockIdx.x);
    Eights<IN> x(p.x, at);
    x.load();
    Moments m = moments(p, at, x);
    store_moments(p, at, m);
    if (!STORES && !MEASURES) return;
    u32 best = 0;
    in_fours(p, [&](auto n, int u) {
        constexpr int N = decltype(n)::VALUE;
        Eight<IO> y[N];
#pragma unroll
        for (int k = 0; k < N; ++k) y[k] = normalised<IO>(p, at, u + k, x[u + k], m);
#pragma unroll
        for (int k = 0; k < N; ++k) {
            if (STORES) store_eight(parameters.y + at.row * p.columns, y[k], at, u + k);
            if (MEASURES) best = larger_magnitude(best, y[k]);
        }
    });
    if (MEASURES) raise_amax<THREADS>(parameters.amax, magnitude_bits<IO>(best));
}
