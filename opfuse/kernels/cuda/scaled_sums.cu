// scaled_sums: fp32 sums times the two factors of their line and column, one after the other, rounded once.
//
// sums           [rows, columns] of fp32, contiguous
// left, right    fp32 factors: one number, or one for each row if LEFT_LINES, for each column if RIGHT_LINES. They are divided by
//                left_unit and right_unit; null: 1
// out            [rows, columns] of OUT, contiguous; may be the sums
// Arithmetic     fp32 (sum * a) * b, where a and b are left / left_unit and right / right_unit with their powers of two shared
// Grid           blocks of 256 threads, a warp for each ROWS x 256 elements
// JOINED         as joined.cuh has it
// ALIGNED        sums and out are on 16 bytes, and columns % 8 == 0; without it, anything goes
// Defined by     opfuse/numerics/sums.py, scaled_sums.
#include "vectors.cuh"

struct Parameters {
    const float *sums, *left, *right;
    OUT* out;
    long long rows, columns;
    float left_unit, right_unit;
};
#include "joined.cuh"

constexpr int THREADS = 256, ROWS = 2, EIGHT = 8;

// A number as a signed mantissa of magnitude [1/2, 1) and an exponent of two; 0 and nonfinite numbers are their own mantissa.
struct Parts {
    float mantissa;
    int power;
};

OPFUSE_FN Parts parts_of(float x) {
    u32 magnitude = magnitude_of(x);
    if (magnitude == 0 || magnitude >= INF_BITS) return {x, 0};
    bool subnormal = magnitude < 0x00800000;
    u32 bits = bits_of(subnormal ? x * 16777216.0f : x);
    return {float_of((bits & 0x807fffff) | 0x3f000000), int(bits >> 23 & 255) - 126 - (subnormal ? 24 : 0)};
}

// 2^power, cut off at the normal range.
OPFUSE_FN float power_of_two(int power) { return float_of(u32((power < -126 ? -126 : power > 127 ? 127 : power) + 127) << 23); }

OPFUSE_FN float scaled(float sum, const Parts& left, const Parts& right) {
    int both = left.power + right.power, half = both >> 1;
    return sum * (left.mantissa * power_of_two(half)) * (right.mantissa * power_of_two(both - half));
}

// The factor of a line, or the one of all lines.
template <bool LINES>
OPFUSE_FN Parts factor_of(const float* factors, float unit, long long line, bool is_there) {
    return parts_of(factors && is_there ? factors[LINES ? line : 0] / unit : 1.0f);
}

extern "C" __global__ void __launch_bounds__(THREADS) scaled_sums(const __grid_constant__ Launched launched) {
    Own own = own_part(launched);
    const Parameters& p = own.parameters;
    u32 across = u32((p.columns + 32 * EIGHT - 1) / (32 * EIGHT)), warp = own.block * (THREADS / 32) + threadIdx.x / 32;
    long long first = (long long)(warp / across) * ROWS, column = ((long long)(warp % across) * 32 + threadIdx.x % 32) * EIGHT;
    long long count = p.columns - column;
    if (first >= p.rows || count <= 0) return;
    Eight<float> v[ROWS];
#pragma unroll
    for (int k = 0; k < ROWS; ++k) {
        const float* sums = p.sums + (first + k) * p.columns + column;
        if (first + k < p.rows) v[k] = ALIGNED ? load_eight(sums) : load_some(sums, count);
    }
    Parts right[EIGHT];
#pragma unroll
    for (int i = 0; i < EIGHT; ++i) right[i] = i && !RIGHT_LINES ? right[0] : factor_of<RIGHT_LINES>(p.right, p.right_unit, column + i, i < count);
#pragma unroll
    for (int k = 0; k < ROWS; ++k) {
        if (first + k >= p.rows) return;
        Parts left = factor_of<LEFT_LINES>(p.left, p.left_unit, first + k, true);
        OUT* out = p.out + (first + k) * p.columns + column;
        if constexpr (ALIGNED) {
            store_eight(out, pack_of<OUT, EIGHT>([&](int i) { return scaled(value(v[k], i), left, right[i]); }));
        } else {
#pragma unroll
            for (int i = 0; i < EIGHT; ++i)
                if (i < count) out[i] = from_fp32<OUT>(scaled(value(v[k], i), left, right[i]));
        }
    }
}
