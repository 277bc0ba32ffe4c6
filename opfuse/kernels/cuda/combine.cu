// combine_rows: sums the rows of each token, weighted, from one read of them. combine_rows_backward: the gradients of the rows and
// of the weights, from one read of the rows and of dy.
//
// rows, d_rows   [tokens * top_k, columns] of IO, contiguous
// y, dy          [tokens, columns] of OUT, contiguous
// places         int64 [tokens, top_k]: where the rows of a token lie, each once; ~p: row p, which adds nothing
// weights        [tokens, top_k] of WEIGHT, read if WEIGHTED
// d_weights      likewise, written if SCORED; only then are rows read in the backward pass
// Order          of k from 0 on, products and sums in fp32, rounded once; a score as row_sums of norm.py adds up a row
// Grid           a block of 256 threads for each token; a thread has eight columns of each 2048
// ALIGNED        rows and y are on 16 bytes, and columns % 8 == 0; without it, anything goes
// Defined by     opfuse/numerics/combine.py
#include "halves.cuh"
#include "vectors.cuh"

struct Parameters {
    const IO* rows;
    const OUT* dy;
    const long long* places;
    const WEIGHT* weights;
    OUT* y;
    IO* d_rows;
    WEIGHT* d_weights;
    long long columns;
    u32 top_k, unused;
};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "the fields that the host packs");

constexpr int THREADS = 256, CHUNK = THREADS * 8, LANES = 32, WARPS = THREADS / LANES;
constexpr int TOGETHER = SCORED ? 2 : 4;  // rows whose loads are under way together

OPFUSE_FN float weight_at(const WEIGHT* weights, long long at) { return WEIGHTED ? to_fp32(weights[at]) : 1.0f; }

// The eight columns from `column` on of a row, of which `there` are left.
template <class T>
OPFUSE_FN Eight<T> load(const T* row, long long column, long long there) {
    if constexpr (ALIGNED)
        return there > 0 ? load_eight(row + column) : Eight<T>{};
    else
        return load_some(row + column, there);
}

template <class T>
OPFUSE_FN void store(T* row, long long column, long long there, const Eight<T>& v) {
    row += column;
    if constexpr (!ALIGNED) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (i < there) row[i] = element(v, i);
    } else if (there > 0) {
        store_eight(row, v);
    }
}

#if ENTRY_combine_rows
extern "C" __global__ void __launch_bounds__(THREADS) combine_rows(const __grid_constant__ Parameters p) {
    long long token = blockIdx.x, first = token * p.top_k;
#pragma unroll 1
    for (long long column = threadIdx.x * 8; column < p.columns; column += CHUNK) {
        long long there = p.columns - column;
        float sum[8] = {};
#pragma unroll 1
        for (u32 k = 0; k < p.top_k; k += TOGETHER) {
            Eight<IO> v[TOGETHER];
            float weight[TOGETHER];
            bool counts[TOGETHER];
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) {
                bool exists = k + i < p.top_k;
                long long place = exists ? p.places[first + k + i] : -1;
                counts[i] = place >= 0;
                weight[i] = counts[i] ? weight_at(p.weights, first + k + i) : 0.0f;
                v[i] = load(p.rows + (counts[i] ? place : 0) * p.columns, column, counts[i] ? there : 0);
            }
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i)
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    if (counts[i]) sum[j] += WEIGHTED ? value(v[i], j) * weight[i] : value(v[i], j);
        }
        store(p.y + token * p.columns, column, there, pack_of<OUT, 8>([&](int j) { return sum[j]; }));
    }
}
#endif

#if ENTRY_combine_rows_backward
extern "C" __global__ void __launch_bounds__(THREADS) combine_rows_backward(const __grid_constant__ Parameters p) {
    __shared__ float parts[TOGETHER][THREADS];
    long long token = blockIdx.x, first = token * p.top_k;
    int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
#pragma unroll 1
    for (u32 k = 0; k < p.top_k; k += TOGETHER) {
        float sum[TOGETHER][8] = {};
        long long row[TOGETHER];
        float weight[TOGETHER];
        bool exists[TOGETHER], counts[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            exists[i] = k + i < p.top_k;
            long long place = exists[i] ? p.places[first + k + i] : -1;
            counts[i] = place >= 0;
            row[i] = counts[i] ? place : ~place;
            weight[i] = counts[i] ? weight_at(p.weights, first + k + i) : 0.0f;
        }
#pragma unroll 1
        for (long long column = threadIdx.x * 8; column < p.columns; column += CHUNK) {
            long long there = p.columns - column;
            Eight<OUT> dy = load(p.dy + token * p.columns, column, there);
            Eight<IO> v[TOGETHER];
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i)
                if (SCORED) v[i] = load(p.rows + row[i] * p.columns, column, counts[i] ? there : 0);
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) {
                if (SCORED)
#pragma unroll
                    for (int j = 0; j < 8; ++j) sum[i][j] += value(v[i], j) * value(dy, j);
                if (exists[i]) {
                    auto grad = [&](int j) { return counts[i] ? (WEIGHTED ? value(dy, j) * weight[i] : value(dy, j)) : 0.0f; };
                    store(p.d_rows + row[i] * p.columns, column, there, pack_of<IO, 8>(grad));
                }
            }
        }
        if (SCORED) {
            __syncthreads();  // the parts of the scores before have been read
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) parts[i][threadIdx.x] = by_halves(sum[i]);
            __syncthreads();
            if (warp < TOGETHER && k + warp < p.top_k) {
                float of_group[WARPS];
#pragma unroll
                for (int g = 0; g < WARPS; ++g) of_group[g] = parts[warp][g * LANES + lane];
                float score = by_halves(of_group);
#pragma unroll
                for (int step = LANES / 2; step > 0; step /= 2) score += __shfl_xor_sync(~0u, score, step);
                bool counted = p.places[first + k + warp] >= 0;
                if (lane == 0) p.d_weights[first + k + warp] = from_fp32<WEIGHT>(counted ? score + 0.0f : 0.0f);
            }
        }
    }
}
#endif
