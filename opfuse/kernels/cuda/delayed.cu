// delayed: the update of delayed scaling for many tensors, in place: finds the scale for the next casts, and moves the history by a slot.
//
// history     fp32 [length]: slot 0 the amax since the last update, the others those of earlier steps, the latest last
// scale       fp32, what casts multiply by; kept where amax is 0
// left_out    int32, raised by 1 if slot 0 is not finite; nonfinite entries of the history count as 0
// Grid        one block of 256 threads for each state; the host packs only as many states
// Defined by  opfuse/numerics/delayed.py, delayed_update.
#include "common.cuh"

struct State {
    float* history;
    float* scale;
    int* left_out;
    int length;
    float fp8_max;
    int margin;
    u32 most_recent;
};
struct Parameters {
    State state[MOST];
};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "the fields that the host packs");

constexpr int THREADS = 256, SLOTS = 4;

OPFUSE_FN float finite(float x) { return is_finite(x) ? x : 0.0f; }

// The bits of a finite amax, which as integers order as amaxes do; 0 for a negative number or NaN.
OPFUSE_FN u32 amax_bits(float x) { return x > 0.0f ? bits_of(x) : 0; }

OPFUSE_FN float new_scale(const State& s, float amax) {
    float quotient = s.fp8_max / amax / ldexpf(1.0f, s.margin);
    return magnitude_of(quotient) == INF_BITS ? LARGEST_FLOAT : quotient;
}

extern "C" __global__ void __launch_bounds__(THREADS) delayed_update(const __grid_constant__ Parameters p) {
    __shared__ u32 of_warp[THREADS / 32];
    const State& s = p.state[blockIdx.x];
    float recorded = s.history[0], newest = finite(recorded);
    u32 best = 0;
    for (int first = 0; first < s.length; first += THREADS * SLOTS) {
        float next[SLOTS];
#pragma unroll
        for (int k = 0; k < SLOTS; ++k) {
            int from = first + k * THREADS + threadIdx.x + 1;
            next[k] = from < s.length ? finite(s.history[from]) : newest;
        }
        __syncthreads();  // each slot is read before it is written; the next turn reads slots behind all that this one writes
#pragma unroll
        for (int k = 0; k < SLOTS; ++k) {
            int to = first + k * THREADS + threadIdx.x;
            best = larger(best, amax_bits(next[k]));
            if (to < s.length) s.history[to] = to == 0 ? 0.0f : next[k];
        }
    }
    best = __reduce_max_sync(~0u, s.most_recent ? amax_bits(newest) : best);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (u32 of_other : of_warp) best = larger(best, of_other);
    if (best > 0) *s.scale = new_scale(s, float_of(best));
    if (!is_finite(recorded)) ++*s.left_out;
}
