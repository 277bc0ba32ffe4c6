// row: how a row of a matrix is distributed over the threads that share it.
//
// TEAM             threads that share a row, a power of two from a warp to the block of 256
// PACKS            how many eights of columns each thread holds; 0: any number, loaded again whenever they are read
// WHOLE            every thread has all of its eights
// ALIGNED = 1      every eight starts on the bytes of a vector, and is whole or missing; = 0: any size and address, elements are moved one
//                  by one
// P                a kernel's fields; read are `rows`, `columns` and, if PACKS is 0, `packs`, the number of eights of a thread
#pragma once
#include "vectors.cuh"

constexpr int THREADS = 256, TEAMS = THREADS / TEAM, LANES = 32, WARPS = TEAM / LANES;
constexpr int HELD = PACKS > 0 ? PACKS : 1;
static_assert(PACKS > 0 || (TEAM == THREADS && !WHOLE), "short rows are held");

// A thread's row, and its place in the team; behind the last row, all columns are missing.
struct Row {
    long long row, columns;
    bool exists;
    int lane;

    OPFUSE_FN long long column(int u) const { return (long long)(lane + u * TEAM) * 8; }
    OPFUSE_FN long long count(int u) const { return !exists ? 0 : WHOLE ? 8 : columns - column(u); }
};

template <class P>
OPFUSE_FN Row row_of_block(const P& p, long long block) {
    long long row = block * TEAMS + threadIdx.x / TEAM;
    return {row, p.columns, TEAMS == 1 || row < p.rows, int(threadIdx.x % TEAM)};
}

// f(u) for each eight of a thread.
template <class P, class F>
OPFUSE_FN void each_eight(const P& p, F f) {
    if constexpr (PACKS) {
#pragma unroll
        for (int u = 0; u < PACKS; ++u) f(u);
    } else {
#pragma unroll 1
        for (int u = 0; u < p.packs; ++u) f(u);
    }
}

template <int N>
struct Number {
    static constexpr int VALUE = N;
};

// f(Number<N>, u) for N <= 4 eights from u on, which f reads before it stores any of them.
template <class P, class F>
OPFUSE_FN void in_fours(const P& p, F f) {
    if constexpr (PACKS) {
#pragma unroll
        for (int u = 0; u + 4 <= PACKS; u += 4) f(Number<4>{}, u);
        if constexpr (PACKS % 4) f(Number<PACKS % 4>{}, PACKS / 4 * 4);
    } else {
#pragma unroll 1
        for (int u = 0; u < p.packs; ++u) f(Number<1>{}, u);
    }
}

// Eight u of the row that starts at `row`; missing elements are 0.
template <class T>
OPFUSE_FN Eight<T> load_eight(const T* row, const Row& at, int u) {
    row += at.column(u);
    if constexpr (ALIGNED)
        return at.count(u) > 0 ? load_eight(row) : Eight<T>{};
    else
        return load_some(row, at.count(u));
}

template <class T>
OPFUSE_FN void store_eight(T* row, const Eight<T>& v, const Row& at, int u) {
    row += at.column(u);
    if constexpr (!ALIGNED) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (is_there(i, at.count(u))) row[i] = element(v, i);
    } else if (at.count(u) > 0) {
        store_eight(row, v);
    }
}

OPFUSE_FN void store_codes(u8* row, uint2 codes, const Row& at, int u) {
    row += at.column(u);
    if constexpr (!ALIGNED)
        store_some(row, codes, at.count(u));
    else if (at.count(u) > 0)
        store_eight(row, codes);
}

// The eights of a thread's row.
template <class T>
struct Eights {
    const T* row;
    Row at;
    Eight<T> held[HELD];

    OPFUSE_FN Eights(const T* first, const Row& at) : row(first + at.row * at.columns), at(at) {}
    OPFUSE_FN void load() {
#pragma unroll
        for (int u = 0; u < PACKS; ++u) held[u] = load_eight(row, at, u);
    }
    OPFUSE_FN Eight<T> operator[](int u) const {
        if constexpr (PACKS)
            return held[u];
        else
            return load_eight(row, at, u);
    }
};

// Waits for the threads that share a row.
OPFUSE_FN void team_barrier() {
    if constexpr (TEAMS == 1)
        __syncthreads();
    else
        asm volatile("bar.sync %0, %1;" ::"r"(1 + threadIdx.x / TEAM), "n"(TEAM) : "memory");
}

// The largest `bits` of a team's threads.
OPFUSE_FN u32 largest_in_team(u32 bits) {
    bits = __reduce_max_sync(~0u, bits);
    if constexpr (WARPS > 1) {
        __shared__ u32 of_warp[THREADS / LANES];
        if (threadIdx.x % LANES == 0) of_warp[threadIdx.x / LANES] = bits;
        team_barrier();
        int first = threadIdx.x / TEAM * WARPS;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) bits = larger(bits, of_warp[first + w]);
    }
    return bits;
}
