// norm_forward: a normalisation of the rows of a matrix, with its statistics, from one read of it.
//
// x, y           [rows, columns] of IN and of IO, contiguous; y is stored if STORES
// rstd, mean     fp32 [rows]; mean of a LAYER_NORM alone
// amax           fp32, raised to the largest magnitude of y, as it would be stored, if MEASURES
// Grid           a block of 256 threads for each row, or for each eight rows that are a warp's
// RESIDENT       blocks that share a multiprocessor
// Defined by     opfuse/kernels/norm.py, norm_forward
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
    Packs<IN> x(p, p.x, at);
    Moments m = moments(p, at, x);
    store_moments(p, at, m);
    if (!STORES && !MEASURES) return;
    u32 best = 0;
    each_pack(p, [&](int u) {
        Pack<IO, 8> y = normalised<IO>(p, at, u, x[u], m);
        if (STORES) store_pack(parameters.y + at.row * p.columns, y, at, u);
        if (MEASURES) best = larger_magnitude(best, eight_of(y));
    });
    if (MEASURES) raise_amax<THREADS>(parameters.amax, magnitude_bits<IO>(best));
}
