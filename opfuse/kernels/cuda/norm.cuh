// norm: a row of a matrix, by the threads that share it: its sums, its statistics, its normalised values.
//
// IN, WEIGHT       types of x, and of weight and bias
// KIND             RMS_NORM, LAYER_NORM or L2_NORM; gamma is the weight, or 1 + weight if ZERO_CENTERED
// TEAM             threads that share a row: a warp, for at most 1024 columns, or a block of 256
// PACKS            eights of columns that each of them has, a power of two; 0: any number, loaded anew whenever they are read
// Sums             in the order of norm.py, which depends on neither TEAM nor PACKS
// Rounding         every operation to nearest even in fp32, division and root included
// Compiled         after common.cuh; ALIGNED as in chain.cuh
// Defined by       opfuse/kernels/norm.py
#pragma once
#include "chain.cuh"

enum Kind { RMS_NORM, LAYER_NORM, L2_NORM };
constexpr bool CENTERED = KIND == LAYER_NORM, WEIGHTED = KIND != L2_NORM;
constexpr int TEAMS = THREADS / TEAM, LANES = 32, GROUPS = 8;
static_assert(TEAM == THREADS || (TEAM == LANES && PACKS > 0), "the warp of a short row has all of it");

struct Norm {
    const IN* x;
    const WEIGHT *weight, *bias;
    float *rstd, *mean;
    long long rows, columns;
    float eps;
    u32 packs;  // if PACKS is 0
};

// The row of a thread, which has no columns if there is none left, and the thread's place among those that share it.
struct Row {
    long long row, columns;
    int lane;

    OPFUSE_FN long long column(int u) const { return (long long)(lane + u * TEAM) * 8; }
    OPFUSE_FN long long count(int u) const { return columns - column(u); }
};

OPFUSE_FN Row row_of_block(const Norm& p, long long block) {
    long long row = block * TEAMS + threadIdx.x / TEAM;
    return {row, row < p.rows ? p.columns : 0, int(threadIdx.x % TEAM)};
}

// f(u) for each pack of a thread.
template <class F>
OPFUSE_FN void each_pack(const Norm& p, F f) {
    if constexpr (PACKS) {
#pragma unroll
        for (int u = 0; u < PACKS; ++u) f(u);
    } else {
#pragma unroll 1
        for (int u = 0; u < p.packs; ++u) f(u);
    }
}

// Pack u of what starts at `row`, 0 for what is missing.
template <class T>
OPFUSE_FN Pack<T, 8> load_pack(const T* row, const Row& at, int u) {
    return load(row, [](long long c) { return c; }, at.column(u), at.count(u));
}

template <class T>
OPFUSE_FN void store_pack(T* row, const Pack<T, 8>& v, const Row& at, int u) {
    store(row, v, [](long long c) { return c; }, at.column(u), at.count(u));
}

// The packs of a thread's row.
template <class T>
struct Packs {
    const T* row;
    Row at;
    Pack<T, 8> held[SOME(PACKS)];

    OPFUSE_FN Packs(const Norm& p, const T* x, const Row& at) : row(x + at.row * p.columns), at(at) {
#pragma unroll
        for (int u = 0; u < PACKS; ++u) held[u] = load_pack(row, at, u);
    }
    OPFUSE_FN Pack<T, 8> operator[](int u) const {
        if constexpr (PACKS)
            return held[u];
        else
            return load_pack(row, at, u);
    }
};

// ------------------------------------------------------------------------------------------------------------------------ sums

// The second half is added to the first until one is left.
template <int N>
OPFUSE_FN float by_halves(float (&v)[N]) {
#pragma unroll
    for (int half = N / 2; half > 0; half /= 2)
#pragma unroll
        for (int i = 0; i < half; ++i) v[i] += v[i + half];
    return v[0];
}

// N sums of a row at once: values(u, v) gives the eight values of each for pack u, 0 for what is missing. Every thread has the totals.
//
// With a block for a row this holds a barrier; `slot` is 0 and 1 in turn, so that none is overwritten while it is read.
template <int N, class F>
OPFUSE_FN void row_sums(float (&total)[N], const Norm& p, int slot, F values) {
    if constexpr (TEAM == LANES) {
        float group[N][SOME(PACKS)];
        each_pack(p, [&](int u) {
            float v[N][8];
            values(u, v);
#pragma unroll
            for (int s = 0; s < N; ++s) group[s][u] = by_halves(v[s]);
        });
#pragma unroll
        for (int s = 0; s < N; ++s) total[s] = by_halves(group[s]);
    } else {
        __shared__ float of_thread[2][N][THREADS];
        float sum[N][8] = {};
        each_pack(p, [&](int u) {
            float v[N][8];
            values(u, v);
#pragma unroll
            for (int s = 0; s < N; ++s)
#pragma unroll
                for (int i = 0; i < 8; ++i) sum[s][i] += v[s][i];
        });
#pragma unroll
        for (int s = 0; s < N; ++s) of_thread[slot][s][threadIdx.x] = by_halves(sum[s]);
        __syncthreads();
#pragma unroll
        for (int s = 0; s < N; ++s) {
            float group[GROUPS];
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) group[g] = of_thread[slot][s][g * LANES + threadIdx.x % LANES];
            total[s] = by_halves(group);
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

OPFUSE_FN float centered(const Pack<IN, 8>& x, int i, const Moments& m) { return CENTERED ? value(x, i) - m.mean : value(x, i); }

OPFUSE_FN float normal(const Pack<IN, 8>& x, int i, const Moments& m) { return centered(x, i, m) * m.rstd; }

OPFUSE_FN float gamma(const Pack<WEIGHT, 8>& weight, int i) { return ZERO_CENTERED ? 1.0f + value(weight, i) : value(weight, i); }

// Of a sum over a row: the mean, but for an L2 norm.
OPFUSE_FN float averaged(const Norm& p, float sum) { return KIND == L2_NORM ? sum : sum / float(p.columns); }

OPFUSE_FN Moments moments(const Norm& p, const Row& at, const Packs<IN>& x) {
    Moments m = {};
    float sum[1];
    if constexpr (CENTERED) {
        row_sums(sum, p, 0, [&](int u, float (&v)[1][8]) {
            Pack<IN, 8> pack = x[u];
#pragma unroll
            for (int i = 0; i < 8; ++i) v[0][i] = value(pack, i);
        });
        m.mean = averaged(p, sum[0]);
    }
    row_sums(sum, p, 1, [&](int u, float (&v)[1][8]) {
        Pack<IN, 8> pack = x[u];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float c = centered(pack, i, m);
            v[0][i] = !CENTERED || is_there(i, at.count(u)) ? c * c : 0.0f;
        }
    });
    m.rstd = 1.0f / sqrtf(averaged(p, sum[0]) + p.eps);
    return m;
}

// Statistics for the backward pass.
OPFUSE_FN void store_moments(const Norm& p, const Row& at, const Moments& m) {
    if (at.lane != 0 || at.columns == 0) return;
    p.rstd[at.row] = m.rstd;
    if (CENTERED) p.mean[at.row] = m.mean;
}

OPFUSE_FN Moments load_moments(const Norm& p, const Row& at) {
    if (at.columns == 0) return {};
    return {p.rstd[at.row], CENTERED ? p.mean[at.row] : 0.0f};
}

// Pack u of the normalised row, rounded to T, 0 for what is missing.
template <class T>
OPFUSE_FN Pack<T, 8> normalised(const Norm& p, const Row& at, int u, const Pack<IN, 8>& x, const Moments& m) {
    Pack<WEIGHT, 8> weight = {}, bias = {};
    if constexpr (WEIGHTED) weight = load_pack(p.weight, at, u);
    if constexpr (CENTERED) bias = load_pack(p.bias, at, u);
    Pack<T, 8> y = pack_of<T, 8>([&](int i) {
        float y = normal(x, i, m);
        if constexpr (WEIGHTED) y *= gamma(weight, i);
        if constexpr (CENTERED) y += value(bias, i);
        return y;
    });
    return first_of(y, at.count(u));
}
