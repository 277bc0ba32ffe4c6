// halves: the order in which a normalisation adds up the numbers of a row or of a column.
//
// Order      the second half is added to the first until one number is left, so the order depends only on how many there are
#pragma once
#include "common.cuh"

constexpr int BLOCKS = 256;  // at most so many blocks have sums of columns

template <int N>
OPFUSE_FN float by_halves(const float (&v)[N]) {
    static_assert((N & (N - 1)) == 0, "a power of two");
    if constexpr (N == 1) {
        return v[0];
    } else {
        float sums[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; ++i) sums[i] = v[i] + v[i + N / 2];
        return by_halves(sums);
    }
}
