// halves: the order in which numbers are added up that a normalisation has of each row, or of each column.
//
// Order      the second half is added to the first until one is left, so that it depends on how many there are and on nothing else
#pragma once
#include "common.cuh"

constexpr int BLOCKS = 256;  // at most, whose sums of columns are added up

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
