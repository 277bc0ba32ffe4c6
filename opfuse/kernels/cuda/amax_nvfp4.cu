// amax_nvfp4: the first levels of planes that have one of their own, from one read of a matrix: raises fp32 numbers to the largest
// magnitudes, as integer maxima, so that inf and NaN propagate.
//
// x              [rows, columns] of IN, contiguous
// rowwise        fp32, not negative, or null; columnwise likewise
// ROTATED = 0    of each row, and of each column
// ROTATED = 1    one of the matrix, and one of its columns after their rotation, which rounds to bf16: rows % 16 == 0, IN is bf16,
//                and the rows in SIGNS are negated
// Grid           one block of 256 threads for each 128 rows x 64 columns
// ALIGNED        x is on 8 bytes, and columns % 2 == 0; without it, anything goes
// Defined by     opfuse/kernels/quantize.py, amaxes_nv.
#include "vectors.cuh"
#include "hadamard.cuh"

struct Parameters {
    const IN* x;
    float *rowwise, *columnwise;
    long long rows, columns;
};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "the fields that the host packs");

constexpr int THREADS = 256, WARPS = THREADS / 32, CHUNK = 16, TILE_ROWS = WARPS * CHUNK, TILE_COLUMNS = 64;

// Two neighbouring values, in the words that they lie in.
struct Two {
    static constexpr int WORDS = sizeof(IN) / 2;
    u32 word[WORDS];
};

OPFUSE_FN Two load_two(const IN* x, long long count) {
    Two v = {};
    if constexpr (!ALIGNED) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (i < count) v.word[i * sizeof(IN) / 4] |= bits_in_word(x[i], i);
    } else if (count > 0) {
        if constexpr (sizeof(IN) == 4) {
            uint2 two = *reinterpret_cast<const uint2*>(x);
            v.word[0] = two.x, v.word[1] = two.y;
        } else {
            v.word[0] = *reinterpret_cast<const u32*>(x);
        }
    }
    return v;
}

// The fp32 bits of the magnitude of one of two, whose maxima are taken in pairs.
OPFUSE_FN Two larger_of(const Two& best, const Two& v) {
    Two out;
#pragma unroll
    for (int k = 0; k < Two::WORDS; ++k)
        out.word[k] = sizeof(IN) == 4 ? larger(best.word[k], v.word[k] & MAGNITUDE) : larger_magnitudes(best.word[k], v.word[k]);
    return out;
}

OPFUSE_FN u32 bits_in(const Two& v, int side) {
    if constexpr (sizeof(IN) == 4)
        return v.word[side];
    else
        return bits_of(to_fp32(IN{u16(side ? v.word[0] >> 16 : v.word[0])}));
}

OPFUSE_FN u32 larger_in(const Two& v) { return larger(bits_in(v, 0), bits_in(v, 1)); }

// The bits of the largest magnitude of a column's 16 values after rotation. Rounding keeps their order: one is rounded for all.
OPFUSE_FN u32 largest_rotated(const Two (&v)[CHUNK], int side) {
    float of[CHUNK];
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) of[i] = with_sign(float_of(side ? v[i].word[0] & 0xffff0000 : v[i].word[0] << 16), i);
    hadamard(of);
    u32 best = 0;
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) best = larger(best, magnitude_of(of[i]));
    return best;
}

// One number for each line: the warps' maxima of columns meet in shared memory, those of rows are a warp's own.
OPFUSE_FN void raise_lines(const Parameters& p, const Two (&v)[CHUNK], long long row, long long column) {
    __shared__ u32 of_column[TILE_COLUMNS];
    int lane = threadIdx.x % 32;
    if (p.rowwise) {
        u32 mine = 0;
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            u32 best = __reduce_max_sync(~0u, larger_in(larger_of(Two{}, v[i])));
            if (lane == i) mine = best;
        }
        if (lane < CHUNK && row + lane < p.rows) raise(p.rowwise + row + lane, mine);
    }
    if (!p.columnwise) return;
    if (threadIdx.x < TILE_COLUMNS) of_column[threadIdx.x] = 0;
    __syncthreads();
    Two best = {};
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) best = larger_of(best, v[i]);
    atomicMax(of_column + lane * 2, bits_in(best, 0));
    atomicMax(of_column + lane * 2 + 1, bits_in(best, 1));
    __syncthreads();
    long long own = column - lane * 2 + threadIdx.x;
    if (threadIdx.x < TILE_COLUMNS && own < p.columns) raise(p.columnwise + own, of_column[threadIdx.x]);
}

extern "C" __global__ void __launch_bounds__(THREADS) amax_nvfp4(const __grid_constant__ Parameters p) {
    u32 across = u32((p.columns + TILE_COLUMNS - 1) / TILE_COLUMNS);
    long long row = (long long)(blockIdx.x / across) * TILE_ROWS + threadIdx.x / 32 * CHUNK;
    long long column = (long long)(blockIdx.x % across) * TILE_COLUMNS + threadIdx.x % 32 * 2;
    Two v[CHUNK];
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) v[i] = load_two(p.x + (row + i) * p.columns + column, row + i < p.rows ? p.columns - column : 0);
    if constexpr (ROTATED) {
        if (p.rowwise) {
            Two best = {};
#pragma unroll
            for (int i = 0; i < CHUNK; ++i) best = larger_of(best, v[i]);
            raise_amax<THREADS>(p.rowwise, larger_in(best));
            __syncthreads();
        }
        float largest = float_of(larger(largest_rotated(v, 0), largest_rotated(v, 1)));
        raise_amax<THREADS>(p.columnwise, round_two<bf16>(largest * 0.25f, 0.0f) << 16);
    } else {
        raise_lines(p, v, row, column);
    }
}
