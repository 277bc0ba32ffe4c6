// norm_backward: the gradients of a normalisation, from one read of dy and x.
//
// x, dy, extra   [rows, columns] of IN, GRAD and EXTRA, contiguous; rstd, mean: what the forward pass stored
// dx             [rows, columns] of IO. ADD = 1: with extra added to dx as it is rounded; ADD = 2: before it is
// parts          fp32 [blocks, SUMS, columns rounded up to eight]: sums of the rows of a block, which norm_sums.cu adds up
// Order          team t of block b adds the rows r with r % (BLOCKS TEAMS) == b TEAMS + t, in turn; the sums of teams are added by
//                halves. Nothing is added atomically
// Grid           at most BLOCKS blocks of 256 threads, with SUMS PACKS 8 KiB of shared memory
// Defined by     opfuse/numerics/norm.py, norm_backward and norm_backward_add
#include "norm.cuh"

constexpr int SUMS = int(WEIGHTED) + int(CENTERED), ROW_SUMS = 1 + int(CENTERED);

struct Parameters {
    Norm norm;
    const GRAD* dy;
    const EXTRA* extra;
    IO* dx;
    float* parts;
    u32 pitch, unused;
};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "the fields that the host packs");

// ------------------------------------------------------------------------------------------------------- gradients of parameters

// Where a thread has four of its sums, those of half a pack: in shared memory or, if that has no room for its packs, in parts.
OPFUSE_FN float4* column_sums(const Parameters& parameters, float4* shared, const Row& at, int sum, int u, int half) {
    if constexpr (PACKS)
        return shared + ((sum * PACKS + u) * 2 + half) * THREADS + threadIdx.x;
    else
        return reinterpret_cast<float4*>(parameters.parts + ((long long)blockIdx.x * SUMS + sum) * parameters.pitch + at.column(u)) + half;
}

OPFUSE_FN void add_to(float4* sums, const float* v) {
    float4 s = *sums;
    *sums = make_float4(s.x + v[0], s.y + v[1], s.z + v[2], s.w + v[3]);
}

// Adds the sums of a block's teams and stores them in the block's part.
OPFUSE_FN void store_part(const Parameters& parameters, const float4* shared) {
    if constexpr (PACKS == 0) return;
    __syncthreads();
    float4* part = reinterpret_cast<float4*>(parameters.parts + (long long)blockIdx.x * SUMS * parameters.pitch);
#pragma unroll 1
    for (int k = threadIdx.x; k < SUMS * PACKS * 2 * TEAM; k += THREADS) {
        int lane = k % TEAM, half = k / TEAM % 2, u = k / (2 * TEAM) % HELD, sum = k / (2 * TEAM * HELD);
        float v[4][TEAMS];
#pragma unroll
        for (int team = 0; team < TEAMS; ++team) {
            float4 four = shared[k / TEAM * THREADS + team * TEAM + lane];
            v[0][team] = four.x, v[1][team] = four.y, v[2][team] = four.z, v[3][team] = four.w;
        }
        int column = (lane + u * TEAM) * 8 + half * 4;
        if (column < parameters.pitch)
            part[(sum * parameters.pitch + column) / 4] = make_float4(by_halves(v[0]), by_halves(v[1]), by_halves(v[2]), by_halves(v[3]));
    }
}

// --------------------------------------------------------------------------------------------------------- gradient of the input

// dy times gamma: the gradient of a normalised value.
OPFUSE_FN float scaled(const Eight<GRAD>& dy, const Eight<WEIGHT>& weight, int i) {
    return WEIGHTED ? value(dy, i) * gamma(weight, i) : value(dy, i);
}

OPFUSE_FN Eight<WEIGHT> load_weight(const Norm& p, const Row& at, int u) {
    if constexpr (WEIGHTED)
        return load_eight(p.weight, at, u);
    else
        return {};
}

// The sums of a row: of scaled dy times the normalised value, and of scaled dy. Also adds the row to the sums of the thread's columns.
template <class G>
OPFUSE_FN void add_row(const Parameters& parameters, const Row& at, const Moments& m, const Eights<IN>& x, const Eights<GRAD>& dy,
                       float (&along)[ROW_SUMS], int slot, float4* shared, G meanwhile) {
    const Norm& p = parameters.norm;
    auto products = [&](int u, float (&v)[ROW_SUMS][8]) {
        Eight<WEIGHT> weight = load_weight(p, at, u);
        Eight<IN> values = x[u];
        Eight<GRAD> grad = dy[u];
        float of_weight[8], of_bias[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float y = normal(values, i, m), s = scaled(grad, weight, i);
            v[0][i] = s * y;
            if (CENTERED) v[ROW_SUMS - 1][i] = s;
            of_weight[i] = value(grad, i) * y, of_bias[i] = value(grad, i);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (PACKS == 0 && at.count(u) <= 0) continue;
            if (WEIGHTED) add_to(column_sums(parameters, shared, at, 0, u, half), of_weight + half * 4);
            if (CENTERED) add_to(column_sums(parameters, shared, at, 1, u, half), of_bias + half * 4);
        }
    };
    row_sums(along, p, slot, products, meanwhile);
#pragma unroll
    for (int s = 0; s < ROW_SUMS; ++s) along[s] = averaged(p, along[s]);
}

// Pack u of dx.
OPFUSE_FN Eight<IO> input_gradient(const Parameters& parameters, const Row& at, const Moments& m, int u, const Eight<IN>& x,
                                     const Eight<GRAD>& dy, const Eight<EXTRA>& extra, const float (&along)[ROW_SUMS]) {
    Eight<WEIGHT> weight = load_weight(parameters.norm, at, u);
    auto dx = [&](int i) {
        float d = scaled(dy, weight, i) - normal(x, i, m) * along[0];
        if (CENTERED) d -= along[ROW_SUMS - 1];
        return m.rstd * d;
    };
    if constexpr (ADD == 2) return pack_of<IO, 8>([&](int i) { return dx(i) + value(extra, i); });
    Eight<IO> rounded_dx = pack_of<IO, 8>(dx);
    if constexpr (ADD == 0) return rounded_dx;
    return pack_of<IO, 8>([&](int i) { return value(rounded_dx, i) + value(extra, i); });
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) norm_backward(const __grid_constant__ Parameters parameters) {
    extern __shared__ __align__(16) float4 shared[];
    const Norm& p = parameters.norm;
    Row first = row_of_block(p, blockIdx.x);
    each_eight(p, [&](int u) {
#pragma unroll
        for (int k = 0; k < 2 * SUMS; ++k)
            if (PACKS || first.column(u) < parameters.pitch) *column_sums(parameters, shared, first, k / 2, u, k % 2) = {};
    });
    int slot = 0;
#pragma unroll 1
    for (long long block = blockIdx.x; block * TEAMS < p.rows; block += BLOCKS, slot ^= 1) {
        Row at = row_of_block(p, block);
        Eights<IN> x(p.x, at);
        Eights<GRAD> dy(parameters.dy, at);
        Eights<EXTRA> extra(parameters.extra, {at.row, at.columns, ADD && at.exists, at.lane});
        x.load();
        dy.load();
        Moments m = load_moments(p, at);
        float along[ROW_SUMS];
        add_row(parameters, at, m, x, dy, along, slot, shared, [&] { extra.load(); });
        each_eight(p, [&](int u) {
            store_eight(parameters.dx + at.row * p.columns, input_gradient(parameters, at, m, u, x[u], dy[u], extra[u], along), at, u);
        });
    }
    store_part(parameters, shared);
}
