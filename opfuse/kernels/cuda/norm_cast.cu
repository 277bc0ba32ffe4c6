// norm_cast: a normalisation of the rows of a matrix, cast to FP8 codes by rows, with its statistics, from one read of it if rows fit in
// registers.
//
// x, codes       [rows, columns] of IN, contiguous, and of OUT
// y              [rows, columns] of IO, the result that is cast; it is stored as well if STORES
// rstd, mean     fp32 [rows]; mean of a LAYER_NORM alone
// CAST           Recording: one given scale, as in cast_tensor.cu with RECORD; RowScaled: as in cast_row.cu with POW2; Blocks: 1 x 128,
//                as in cast_block.cu with pow2 = POW2; Microscaled: 1 x 32, as in cast_mx.cu, SWIZZLED or not; the host has set the
//                padding of scales to 0
// Grid           a block of 256 threads for each 256 / TEAM rows
// RESIDENT       blocks that share a multiprocessor
// Defined by     opfuse/kernels/norms/cast.py, norm_then_cast
#include "norm.cuh"
#include "mx.cuh"

// Codes of N eights of a row. SHARING lanes share the blocks of their eights: lane k of them computes the scale of the block of eight k,
// by scale_of(k, bits of the amax), which is 0 for a k without an eight.
template <int SHARING, int N, class F>
OPFUSE_FN void cast_blocks(uint2 (&codes)[N], const Eight<IO> (&y)[N], F scale_of) {
    static_assert(N <= SHARING, "a lane for each scale");
    Eight<IO> even[(N + 1) / 2 * 2] = {};
#pragma unroll
    for (int k = 0; k < N; ++k) even[k] = y[k];
    auto amax = maxima_along(even);
#pragma unroll
    for (int mask = 1; mask < SHARING; mask *= 2) amax.across(mask);
    int own = threadIdx.x % SHARING;
    u32 bits = 0;
#pragma unroll
    for (int k = 0; k < N; ++k) bits = own == k ? amax.bits(k) : bits;
    float scale = scale_of(own, bits);
#pragma unroll
    for (int k = 0; k < N; ++k) {
        float of_eight = __shfl_sync(~0u, scale, k, SHARING);
        codes[k] = encode_eight<OUT>(y[k], [&](int) { return of_eight; });
    }
}

// Whether the block of eight u, which SHARING lanes share, starts in the row.
template <int SHARING>
OPFUSE_FN bool has_block(const Row& at, int u) {
    return at.exists && (WHOLE || at.column(u) / (SHARING * 8) * (SHARING * 8) < at.columns);
}

// The base of casts: begin(amax_of_row, at) runs before a row is cast, finish() after it. In most they do nothing.
struct Cast {
    template <class F>
    OPFUSE_FN void begin(F, const Row&) {}
    OPFUSE_FN void finish() {}
};

struct Recording : Cast {
    struct Target {
        const float* scale;
        float *amax, *decode_scale;
    };
    const Target& target;
    float scale;
    u32 best = 0;

    OPFUSE_FN Recording(const Target& target, const Norm&) : target(target), scale(*target.scale) {}

    template <int N>
    OPFUSE_FN void operator()(uint2 (&codes)[N], const Eight<IO> (&y)[N], const Row&, int) {
#pragma unroll
        for (int k = 0; k < N; ++k) {
            codes[k] = encode_eight<OUT>(y[k], [&](int) { return scale; });
            best = larger_magnitude(best, y[k]);
        }
        if (magnitude_bits<IO>(best) >= INF_BITS)
#pragma unroll
            for (int k = 0; k < N; ++k) codes[k] = show_nonfinite<OUT>(y[k], codes[k]);
    }
    OPFUSE_FN void finish() {
        if (blockIdx.x == 0 && threadIdx.x == 0) *target.decode_scale = 1.0f / scale;
        raise_amax<THREADS>(target.amax, magnitude_bits<IO>(best));
    }
};

struct RowScaled : Cast {
    struct Target {
        float* row_scale;
        float eps;
        u32 unused;
    };
    const Target& target;
    float scale = 1.0f;

    OPFUSE_FN RowScaled(const Target& target, const Norm&) : target(target) {}

    template <class F>
    OPFUSE_FN void begin(F amax_of_row, const Row& at) {
        float amax = amax_of_row();
        scale = block_scale<OUT>(amax, target.eps, LARGEST_FLOAT, POW2);
        if (at.lane == 0 && at.exists) target.row_scale[at.row] = block_decode_scale(scale, amax, POW2);
    }
    template <int N>
    OPFUSE_FN void operator()(uint2 (&codes)[N], const Eight<IO> (&y)[N], const Row&, int) {
#pragma unroll
        for (int k = 0; k < N; ++k) codes[k] = encode_eight<OUT>(y[k], [&](int) { return scale; });
    }
};

struct Blocks : Cast {
    struct Target {
        float* row_scale;  // [blocks, row_pitch], where row_pitch is up to 3 more than `rows`; the rest becomes 0
        long long row_pitch;
        float eps, inf_value;
    };
    const Target& target;
    long long rows;

    OPFUSE_FN Blocks(const Target& target, const Norm& p) : target(target), rows(p.rows) {}

    template <int N>
    OPFUSE_FN void operator()(uint2 (&codes)[N], const Eight<IO> (&y)[N], const Row& at, int first) {
        cast_blocks<16>(codes, y, [&](int k, u32 bits) {
            float amax = float_of(bits), scale = block_scale<OUT>(amax, target.eps, target.inf_value, POW2);
            if (k < N && has_block<16>(at, first + k)) store(block_decode_scale(scale, amax, POW2), at.row, at.column(first + k) / 128);
            return scale;
        });
    }
    OPFUSE_FN void store(float scale, long long row, long long block) const {
        float* stored = target.row_scale + block * target.row_pitch;
        stored[row] = scale;
        if (row + 1 == rows)
            for (long long r = rows; r < target.row_pitch; ++r) stored[r] = 0.0f;
    }
};

struct Microscaled : Cast {
    struct Target {
        u8* row_scale;
        u32 bias, unused;
    };
    const Target& target;
    long long columns;

    OPFUSE_FN Microscaled(const Target& target, const Norm& p) : target(target), columns(p.columns) {}

    template <int N>
    OPFUSE_FN void operator()(uint2 (&codes)[N], const Eight<IO> (&y)[N], const Row& at, int first) {
        cast_blocks<4>(codes, y, [&](int k, u32 bits) {
            u32 code = mx_code<IO>(bits, target.bias);
            if (k < N && has_block<4>(at, first + k))
                target.row_scale[row_scale_at(columns, at.row, at.column(first + k) / MX_BLOCK)] = u8(code);
            return mx_multiplier(code);
        });
    }
};

struct Parameters {
    Norm norm;
    u8* codes;
    IO* y;
    CAST::Target target;
};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "the fields that the host packs");

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) norm_cast(const __grid_constant__ Parameters parameters) {
    const Norm& p = parameters.norm;
    Row at = row_of_block(p, blockIdx.x);
    Eights<IN> x(p.x, at);
    x.load();
    Moments m = moments(p, at, x);
    store_moments(p, at, m);
    CAST cast(parameters.target, p);
    auto amax_of_row = [&] {
        u32 best = 0;
        each_eight(p, [&](int u) { best = larger_magnitude(best, normalised<IO>(p, at, u, x[u], m)); });
        return float_of(largest_in_team(magnitude_bits<IO>(best)));
    };
    cast.begin(amax_of_row, at);
    in_fours(p, [&](auto n, int u) {
        constexpr int N = decltype(n)::VALUE;
        Eight<IO> y[N];
        uint2 codes[N];
#pragma unroll
        for (int k = 0; k < N; ++k) y[k] = normalised<IO>(p, at, u + k, x[u + k], m);
        cast(codes, y, at, u);
        if constexpr (STORES)
#pragma unroll
            for (int k = 0; k < N; ++k) store_eight(parameters.y + at.row * p.columns, y[k], at, u + k);
#pragma unroll
        for (int k = 0; k < N; ++k) store_codes(parameters.codes + at.row * p.columns, codes[k], at, u + k);
    });
    cast.finish();
}
