// row_losses: the loss of each row of logits, from one reading of them; if GRADIENT, its gradient from a second one, in their memory.
//
// logits         fp32 [rows, columns], contiguous
// gradient       OUT [rows, columns], which ends each row's memory of the logits: all of it if OUT is float, else its second half
// targets        int64 [rows]: a column, ignore_index (loss and gradient 0), or anything else (both NaN)
// scales         fp32 [rows], what the gradient of a row is multiplied by; null: 1
// losses         fp32 [rows]
// kept, spread   1 - s and s of label smoothing s, read if SMOOTHED; each = s / columns
// z, twice_z     the weight of the squared log of the sum, and twice that, read if PENALIZED
// cap, per_cap   of the softcap cap * tanh(logit * per_cap), read if CAPPED
// Order          of numerics/cross_entropy.py: a thread adds up what it has of each tile, then the block what threads have
// In place       a row is read again from its end, where L2 still has it. An element of the gradient is written where a column was that
//                is not below its own, in a tile that all threads have read: a barrier stands between. What is read meanwhile, of the
//                next tile, is below
// Grid           a block of 512 threads for each row
// ALIGNED        logits are on 16 bytes, and columns % 8 == 0; without it, anything goes
// Defined by     opfuse/numerics/cross_entropy.py
#include "exponential.cuh"
#include "halves.cuh"
#include "vectors.cuh"

struct Parameters {
    float* logits;
    const long long* targets;
    const float* scales;
    float* losses;
    long long columns, ignore_index;
    float per_column, kept, spread, each, z, twice_z, cap, per_cap;
};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "the fields that the host packs");

constexpr int THREADS = 512, EIGHTS = 2, OWN = EIGHTS * 8, STRIDE = THREADS * 8, TILE = EIGHTS * STRIDE;
constexpr int LANES = 32, WARPS = THREADS / LANES;
static_assert((WARPS & (WARPS - 1)) == 0, "threads are added by halves");
constexpr u32 MINUS_INF_BITS = 0xff800000;

// What a thread has of a tile: eights of neighbouring columns, STRIDE apart; minus infinity in place of columns that are not there.
struct Own {
    Eight<float> eight[EIGHTS];
};

OPFUSE_FN Own load(const float* row, long long column, long long columns) {
    Own v;
#pragma unroll
    for (int k = 0; k < EIGHTS; ++k, column += STRIDE) {
        if (ALIGNED && column < columns) {
            v.eight[k] = load_eight(row + column);
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                v.eight[k].word[i] = !ALIGNED && column + i < columns ? bits_of(row[column + i]) : MINUS_INF_BITS;
        }
    }
    return v;
}

// A logit, whose tanh is `tangent` where it is capped.
OPFUSE_FN float capped(const Parameters& p, float x, float& tangent) {
    if (!CAPPED) return x;
    tangent = hyperbolic_tangent(x * p.per_cap);
    return tangent * p.cap;
}

// What a row is, once all of it was read.
struct Row {
    float log_sum, weight, factor;
};

// The sum over the threads of a block, by one warp.
OPFUSE_FN float added(const float* of_thread, int lane) {
    float of_group[WARPS];
#pragma unroll
    for (int g = 0; g < WARPS; ++g) of_group[g] = of_thread[g * LANES + lane];
    float sum = by_halves(of_group);
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) row_losses(const __grid_constant__ Parameters p) {
    __shared__ float sums[THREADS], totals[SMOOTHED ? THREADS : 1], tops[WARPS];
    __shared__ Row shared_row;
    float* logits = p.logits + (long long)blockIdx.x * p.columns;
    int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, first = threadIdx.x * 8;
    float tangent, top = float_of(MINUS_INF_BITS), sum = 0.0f, total = 0.0f;

    Own v = load(logits, first, p.columns);
#pragma unroll 1
    for (long long column = first; column < p.columns; column += TILE) {
        Own next = load(logits, column + TILE, p.columns);
        float l[OWN], higher = top;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            l[i] = capped(p, value(v.eight[i / 8], i % 8), tangent);
            if (CAPPED && !is_there(i % 8, p.columns - column - i / 8 * STRIDE)) l[i] = float_of(MINUS_INF_BITS);
            higher = fmaxf(higher, l[i]);
        }
        if (SMOOTHED) {
            float there[OWN];
#pragma unroll
            for (int i = 0; i < OWN; ++i) there[i] = is_there(i % 8, p.columns - column - i / 8 * STRIDE) ? l[i] : 0.0f;
            total += by_halves(there);
        }
        float base = higher == float_of(MINUS_INF_BITS) ? 0.0f : higher;
#pragma unroll
        for (int i = 0; i < OWN; ++i) l[i] = exponential(l[i] - base);
        sum = sum * exponential(top - base) + by_halves(l);
        top = higher;
        v = next;
    }

    float most = top;
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    if (lane == 0) tops[warp] = most;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; ++w) most = fmaxf(most, tops[w]);
    sums[threadIdx.x] = sum * exponential(top - most);
    if (SMOOTHED) totals[threadIdx.x] = total;
    __syncthreads();

    long long target = p.targets[blockIdx.x];
    bool ignored = target == p.ignore_index, outside = !ignored && (target < 0 || target >= p.columns);
    if (ignored || outside) target = 0;
    if (warp == 0) {
        sum = added(sums, lane);
        total = SMOOTHED ? added(totals, lane) : 0.0f;
        if (lane == 0) {
            float log_sum = float(log(double(sum))), whole = most + log_sum;
            float loss = log_sum - (capped(p, logits[target], tangent) - most);
            if (SMOOTHED) loss = loss * p.kept + (log_sum - (total * p.per_column - most)) * p.spread;
            if (PENALIZED) loss += whole * whole * p.z;
            p.losses[blockIdx.x] = ignored ? 0.0f : outside ? float_of(NAN_BITS) : loss;
            float scale = p.scales ? p.scales[blockIdx.x] : 1.0f;
            shared_row = {log_sum, whole * p.twice_z + 1.0f, ignored ? 0.0f : outside ? float_of(NAN_BITS) : scale};
        }
    }
    if (!GRADIENT) return;

    OUT* gradient = reinterpret_cast<OUT*>(logits + p.columns) - p.columns;
    long long tile = (p.columns - 1) / TILE * TILE;
    v = load(logits, tile + first, p.columns);
    __syncthreads();  // the row is known, and all have read the tile
    Row row = shared_row;
    float kept = SMOOTHED ? p.kept : 1.0f;
#pragma unroll 1
    for (; tile >= 0; tile -= TILE) {
        Own next = v;
        if (tile > 0) next = load(logits, tile - TILE + first, p.columns);
#pragma unroll
        for (int k = 0; k < EIGHTS; ++k) {
            long long column = tile + first + k * STRIDE, there = p.columns - column;
            float y[8], slope[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                y[i] = exponential(capped(p, value(v.eight[k], i), tangent) - most - row.log_sum);
                if (PENALIZED) y[i] *= row.weight;
                if (SMOOTHED) y[i] -= p.each;
                if (CAPPED) slope[i] = 1.0f - tangent * tangent;
            }
            if (target >= column && target < column + 8) {
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    if (target == column + i) y[i] -= kept;
            }
            Eight<OUT> made = pack_of<OUT, 8>([&](int i) { return (CAPPED ? y[i] * slope[i] : y[i]) * row.factor; });
            if (!ALIGNED) {
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    if (i < there) gradient[column + i] = element(made, i);
            } else if (there > 0) {
                store_eight(gradient + column, made);
            }
        }
        v = next;
        __syncthreads();  // all have read the next tile
    }
}
