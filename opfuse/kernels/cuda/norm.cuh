// norm: the sums, statistics and normalised values of a row of a matrix, computed by the threads that share it.
//
// IN, WEIGHT       types of x, and of weight and bias
// KIND             RMS_NORM, LAYER_NORM or L2_NORM; gamma is the weight, or 1 + weight if ZERO_CENTERED
// Sums             in the order of norm.py, which depends on neither TEAM nor PACKS
// Rounding         every operation to nearest even in fp32, division and root included
// Compiled         with what row.cuh asks for
// Defined by       opfuse/numerics/norm.py
#pragma once
#include "halves.cuh"
#include "row.cuh"

enum Kind { RMS_NORM, LAYER_NORM, L2_NORM };
constexpr bool CENTERED = KIND == LAYER_NORM, WEIGHTED = KIND != L2_NORM;

struct Norm {
    const IN* x;
    const WEIGHT *weight, *bias;
    float *rstd, *mean;
    long long rows, columns;
    float size, eps;  // size: `columns` as a float
    u32 packs;        // see row.cuh
};

// ------------------------------------------------------------------------------------------------------------------------ sums

constexpr int power_of_two_above(int n) { return n <= 1 ? 1 : 2 * power_of_two_above((n + 1) / 2); }

// A thread's share of N sums: it adds up its eights in turn, in each of its groups, then the eight sums of a group, then those of groups.
template <int N, class F>
OPFUSE_FN void own_sums(float (&own)[N], const Norm& p, F values) {
    constexpr int GROUPS = HELD < TEAMS ? HELD : TEAMS;
    float group[N][power_of_two_above(GROUPS)] = {};
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        float sum[N][8] = {}, v[N][8];
        if constexpr (PACKS) {
            values(g, sum);
#pragma unroll
            for (int u = g + TEAMS; u < PACKS; u += TEAMS) {
                values(u, v);
#pragma unroll
                for (int k = 0; k < 8 * N; ++k) sum[k / 8][k % 8] += v[k / 8][k % 8];
            }
        } else {
#pragma unroll 1
            for (int u = 0; u < p.packs; ++u) {
                values(u, v);
#pragma unroll
                for (int k = 0; k < 8 * N; ++k) sum[k / 8][k % 8] += v[k / 8][k % 8];
            }
        }
#pragma unroll
        for (int s = 0; s < N; ++s) group[s][g] = by_halves(sum[s]);
    }
#pragma unroll
    for (int s = 0; s < N; ++s) own[s] = by_halves(group[s]);
}

// N sums of a row, which every thread gets. values(u, v) sets v to eight values of each sum, those of eight u; 0 for missing ones.
//
// If it holds a barrier, a thread does `meanwhile` right before that. `slot` must be 0 and 1 in turn, so that nothing is overwritten
// while it is read.
template <int N, class F, class G>
OPFUSE_FN void row_sums(float (&total)[N], const Norm& p, int slot, F values, G meanwhile) {
    own_sums(total, p, values);
    asm volatile("" ::: "memory");
    meanwhile();
    if constexpr (WARPS > 1) {
        __shared__ float of_thread[2][N][THREADS];
        int first = threadIdx.x / TEAM * TEAM + threadIdx.x % LANES;
#pragma unroll
        for (int s = 0; s < N; ++s) of_thread[slot][s][threadIdx.x] = total[s];
        team_barrier();
#pragma unroll
        for (int s = 0; s < N; ++s) {
            float of_warp[WARPS];
#pragma unroll
            for (int w = 0; w < WARPS; ++w) of_warp[w] = of_thread[slot][s][first + w * LANES];
            total[s] = by_halves(of_warp);
        }
    }
#pragma unroll
    for (int s = 0; s < N; ++s) {
#pragma unroll
        for (int mask = LANES / 2; mask > 0; mask /= 2) total[s] += __shfl_xor_sync(~0u, total[s], mask);
        total[s] += 0.0f;  // where all is -0
    }
}

// ------------------------------------------------------------------------------------------------------------------ statistics

struct Moments {
    float rstd, mean;
};

OPFUSE_FN float centered(const Eight<IN>& x, int i, const Moments& m) { return CENTERED ? value(x, i) - m.mean : value(x, i); }

OPFUSE_FN float normal(const Eight<IN>& x, int i, const Moments& m) { return centered(x, i, m) * m.rstd; }

OPFUSE_FN float gamma(const Eight<WEIGHT>& weight, int i) { return ZERO_CENTERED ? 1.0f + value(weight, i) : value(weight, i); }

// The mean of a row from its sum; for an L2 norm the sum itself.
OPFUSE_FN float averaged(const Norm& p, float sum) { return KIND == L2_NORM ? sum : sum / p.size; }

OPFUSE_FN Moments moments(const Norm& p, const Row& at, const Eights<IN>& x) {
    Moments m = {};
    float sum[1];
    if constexpr (CENTERED) {
        auto values = [&](int u, float (&v)[1][8]) {
            Eight<IN> pack = x[u];
#pragma unroll
            for (int i = 0; i < 8; ++i) v[0][i] = value(pack, i);
        };
        row_sums(sum, p, 0, values, [] {});
        m.mean = averaged(p, sum[0]);
    }
    auto squares = [&](int u, float (&v)[1][8]) {
        Eight<IN> pack = x[u];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float c = centered(pack, i, m);
            v[0][i] = !CENTERED || is_there(i, at.count(u)) ? c * c : 0.0f;
        }
    };
    row_sums(sum, p, 1, squares, [] {});
    m.rstd = 1.0f / sqrtf(averaged(p, sum[0]) + p.eps);
    return m;
}

// Stores the statistics, for the backward pass.
OPFUSE_FN void store_moments(const Norm& p, const Row& at, const Moments& m) {
    if (at.lane != 0 || !at.exists) return;
    p.rstd[at.row] = m.rstd;
    if (CENTERED) p.mean[at.row] = m.mean;
}

OPFUSE_FN Moments load_moments(const Norm& p, const Row& at) {
    if (!at.exists) return {};
    return {p.rstd[at.row], CENTERED ? p.mean[at.row] : 0.0f};
}

// Eight u of the normalised row, rounded to T; missing values are 0.
template <class T>
OPFUSE_FN Eight<T> normalised(const Norm& p, const Row& at, int u, const Eight<IN>& x, const Moments& m) {
    Eight<WEIGHT> weight = {}, bias = {};
    if constexpr (WEIGHTED) weight = load_eight(p.weight, at, u);
    if constexpr (CENTERED) bias = load_eight(p.bias, at, u);
    if (ALIGNED && !is_there(0, at.count(u))) return {};
    return pack_of<T, 8>([&](int i) {
        float y = normal(x, i, m);
        if constexpr (WEIGHTED) y *= gamma(weight, i);
        if constexpr (CENTERED) y += value(bias, i);
        return is_there(i, at.count(u)) ? y : 0.0f;
    });
}
