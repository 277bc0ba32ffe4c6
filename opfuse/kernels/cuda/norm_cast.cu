// norm_cast: a normalisation of the rows of a matrix, cast to FP8 codes by rows, with its statistics, from one read of it.
//
// x, codes       [rows, columns] of IN, contiguous, and of OUT; what is cast is rounded to IO first
// rstd, mean     fp32 [rows]; mean of a LAYER_NORM alone
// CAST           Recording: one given scale, as in cast_tensor.cu with RECORD; Blocks: 1 x 128, as in cast_block.cu;
//                Microscaled: 1 x 32, as in cast_mx.cu, SWIZZLED or not, with scales that the host has set to 0 where padded
// Grid           a block of 256 threads for each row, or for each eight rows that are a warp's
// RESIDENT       blocks that share a multiprocessor
// Defined by     opfuse/kernels/norm_cast.py, norm_then_cast
#include "norm.cuh"

// Of the lanes that share a block of scales, in fp32 bits; every lane of a warp calls it.
template <int SHARING>
OPFUSE_FN float shared_amax(const Eight<IO>& y) {
    u32 bits = magnitude_bits<IO>(larger_magnitude(0, y));
#pragma unroll
    for (int mask = 1; mask < SHARING; mask *= 2) bits = larger(bits, __shfl_xor_sync(~0u, bits, mask));
    return float_of(bits);
}

struct Recording {
    struct Target {
        const float* scale;
        float *amax, *decode_scale;
    };
    const Target& target;
    float scale;
    u32 best = 0;

    OPFUSE_FN Recording(const Target& target, const Norm&) : target(target), scale(*target.scale) {}
    OPFUSE_FN uint2 operator()(const Row&, int, const Eight<IO>& y) {
        uint2 codes = encode_eight<OUT>(y, [&](int) { return scale; });
        best = larger_magnitude(best, y);
        return magnitude_bits<IO>(best) >= INF_BITS ? show_nonfinite<OUT>(y, codes) : codes;
    }
    OPFUSE_FN void finish() {
        if (blockIdx.x == 0 && threadIdx.x == 0) *target.decode_scale = 1.0f / scale;
        raise_amax<THREADS>(target.amax, magnitude_bits<IO>(best));
    }
};

struct Blocks {
    struct Target {
        float* scale;  // [blocks, rows], rows of which are `pitch` long, at most 3 more than are used; the rest becomes 0
        long long pitch;
        float eps, inf_value;
        u32 pow2, unused;
    };
    static constexpr int SHARING = 128 / 8;
    const Target& target;
    long long rows;

    OPFUSE_FN Blocks(const Target& target, const Norm& p) : target(target), rows(p.rows) {}
    OPFUSE_FN uint2 operator()(const Row& at, int u, const Eight<IO>& y) {
        float amax = shared_amax<SHARING>(y);
        float scale = scale_from_amax(amax, OUT::MAX, target.eps, target.inf_value);
        if (target.pow2) scale = pow2_floor(scale);
        if (at.lane % SHARING == 0 && at.count(u) > 0) {
            float* stored = target.scale + at.column(u) / 128 * target.pitch;
            stored[at.row] = decode_scale(scale, amax);
            for (long long row = at.row + 1; at.row + 1 == rows && row < target.pitch; ++row) stored[row] = 0.0f;
        }
        return encode_eight<OUT>(y, [&](int) { return scale; });
    }
    OPFUSE_FN void finish() {}
};

struct Microscaled {
    struct Target {
        u8* scale;
        u32 ceil, unused;
    };
    static constexpr int SHARING = 32 / 8;
    static constexpr u32 EXPONENT = OUT::MAX == 448.0f ? 8 : 15;  // of the largest code
    const Target& target;
    long long columns;

    OPFUSE_FN Microscaled(const Target& target, const Norm& p) : target(target), columns(p.columns) {}
    OPFUSE_FN uint2 operator()(const Row& at, int u, const Eight<IO>& y) {
        float amax = shared_amax<SHARING>(y);
        u32 code = larger(bits_of(amax) >> 23, EXPONENT) - EXPONENT;
        if (target.ceil || !is_finite(amax)) code = e8m0_from_amax<OUT>(amax);
        if (at.lane % SHARING == 0 && at.count(u) > 0) target.scale[place(at.row, at.column(u) / 32)] = u8(code);
        float multiplier = e8m0_multiplier(code);
        return encode_eight<OUT>(y, [&](int) { return multiplier; });
    }
    OPFUSE_FN long long place(long long row, long long block) const {
        long long tiles = (columns + 127) / 128;
        if (!SWIZZLED) return row * (tiles * 4) + block;
        return (row / 128 * tiles + block / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4;
    }
    OPFUSE_FN void finish() {}
};

struct Parameters {
    Norm norm;
    u8* codes;
    CAST::Target target;
};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "the fields that the host packs");

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) norm_cast(const __grid_constant__ Parameters parameters) {
    const Norm& p = parameters.norm;
    Row at = row_of_block(p, blockIdx.x);
    Packs<IN> x(p, p.x, at);
    Moments m = moments(p, at, x);
    store_moments(p, at, m);
    CAST cast(parameters.target, p);
    each_pack(p, [&](int u) {
        uint2 codes = cast(at, u, eight_of(normalised<IO>(p, at, u, x[u], m)));
        store_pack(parameters.codes + at.row * p.columns, Pack<u8, 8>{codes.x, codes.y}, at, u);
    });
    cast.finish();
}
