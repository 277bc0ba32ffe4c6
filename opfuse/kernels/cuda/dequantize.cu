// dequantize: a matrix from the FP8 codes and scales of one plane, of any format, usage and scale layout.
//
// data           ELEMENT codes; [rows, columns] for dequantize_rows, [columns, rows] for dequantize_tile
// scale          SCALE values, padded to any width. The scale of element (row, column) is number (row >> row_shift) * row_stride +
//                (column >> column_shift) * column_stride or, if tiles_across is not 0, lies as in swizzle.cuh, where the side whose
//                shift is 0 counts lines
// ACROSS         for dequantize_rows: each column has scales of its own, one for each 32 rows; without it, the columns of a group
//                share one scale in each row
// out            [rows, columns] of OUT, on 16 bytes
// Arithmetic     fp32 code * scale, then one conversion, where overflow gives inf
// Grid           dequantize_rows: blocks of 256 threads, a warp for each ROWS x 512 bytes of out; dequantize_tile: a block of 256
//                for each 128 x 128 tile
// JOINED         as joined.cuh has it
// ALIGNED        the codes of values that fill 16 bytes are one load: `data` is on 8 bytes, columns fill whole groups of such codes,
//                except in a single row, and so each line begins with a group
// Defined by     opfuse/numerics/dequantize.py.
#include "vectors.cuh"
#include "swizzle.cuh"

struct Parameters {
    const u8* data;
    const SCALE* scale;
    OUT* out;
    long long rows, columns, row_stride, column_stride;
    int row_shift, column_shift;
    u32 tiles_across, unused;
};
#include "joined.cuh"

constexpr bool E8M0 = sizeof(SCALE) == 1;
constexpr int THREADS = 256, TILE = 128, GROUP = 16 / sizeof(OUT);

// N neighbouring codes, at an address that is a multiple of N.
template <int N>
struct alignas(N) Codes {
    u32 word[N / 4];
};

// The first `count` of N codes, count <= 0 included, then zeros.
template <int N>
OPFUSE_FN Codes<N> load_some_codes(const u8* data, long long count) {
    Codes<N> codes = {};
#pragma unroll
    for (int i = 0; i < N; ++i)
        if (i < count) codes.word[i / 4] |= u32(data[i]) << i % 4 * 8;
    return codes;
}

template <int N>
OPFUSE_FN Codes<N> load_line(const Parameters& p, long long at, long long count) {
    return ALIGNED && count >= N ? *reinterpret_cast<const Codes<N>*>(p.data + at) : load_some_codes<N>(p.data + at, count);
}

// Word k of values as OUT: two 16-bit values, the first in the low half, or the bits of one.
template <class T>
OPFUSE_FN u32 word_of(const float* value, int k, T) { return round_two<T>(value[2 * k], value[2 * k + 1]); }
OPFUSE_FN u32 word_of(const float* value, int k, float) { return bits_of(value[k]); }

// Scales are read in two steps: a thread loads all before it decodes any, so it waits once.
OPFUSE_FN SCALE stored_scale(const Parameters& p, long long row, long long column) {
    if (row >= p.rows || column >= p.columns) return SCALE{};
    long long r = row >> p.row_shift, c = column >> p.column_shift;
    if (!E8M0 || !p.tiles_across) return p.scale[r * p.row_stride + c * p.column_stride];
    long long line = p.row_shift ? c : r, block = p.row_shift ? r : c;
    return p.scale[swizzled_at(line, block, p.tiles_across)];
}

OPFUSE_FN float decoded_scale(SCALE stored) {
    if constexpr (E8M0)
        return decode_e8m0(stored);
    else
        return stored;
}

// Stores the first `count` of a group of values; `scale(i)` is that of code i.
template <class Scale>
OPFUSE_FN void store_values(const Parameters& p, long long at, const Codes<GROUP>& codes, long long count, Scale scale) {
    float value[GROUP];
#pragma unroll
    for (int i = 0; i < GROUP; i += 2) {
        float2 two = decode_two<ELEMENT>(codes.word[i / 4] >> i % 4 * 8);
        value[i] = two.x * scale(i), value[i + 1] = two.y * scale(i + 1);
    }
    if (ALIGNED && count >= GROUP) {
        uint4 words = {word_of(value, 0, OUT{}), word_of(value, 1, OUT{}), word_of(value, 2, OUT{}), word_of(value, 3, OUT{})};
        store_words(p.out + at, words);
    } else {
#pragma unroll
        for (int i = 0; i < GROUP; ++i)
            if (i < count) p.out[at + i] = from_fp32<OUT>(value[i]);
    }
}

#if ENTRY_dequantize_rows
extern "C" __global__ void __launch_bounds__(THREADS) dequantize_rows(const __grid_constant__ Launched launched) {
    Own own = own_part(launched);
    const Parameters& p = own.parameters;
    u32 across = u32((p.columns + 32 * GROUP - 1) / (32 * GROUP)), warp = own.block * (THREADS / 32) + threadIdx.x / 32;
    long long row = (long long)(warp / across) * ROWS, column = ((long long)(warp % across) * 32 + threadIdx.x % 32) * GROUP;
    long long at = row * p.columns + column, count = p.columns - column;
    if (row >= p.rows || count <= 0) return;
    Codes<GROUP> codes[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) codes[i] = load_line<GROUP>(p, at + i * p.columns, row + i < p.rows ? count : 0);
    if constexpr (!ACROSS) {
        SCALE scale[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) scale[i] = stored_scale(p, row + i, column);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            float each = decoded_scale(scale[i]);
            if (row + i < p.rows) store_values(p, at + i * p.columns, codes[i], count, [=](int) { return each; });
        }
    } else {
        static_assert(32 % ROWS == 0, "the rows of a thread share the scales of its columns");
        SCALE stored[GROUP];
        float scale[GROUP];
#pragma unroll
        for (int j = 0; j < GROUP; ++j) stored[j] = stored_scale(p, row, column + j);
#pragma unroll
        for (int j = 0; j < GROUP; ++j) scale[j] = decoded_scale(stored[j]);
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
            if (row + i < p.rows) store_values(p, at + i * p.columns, codes[i], count, [&](int j) { return scale[j]; });
    }
}
#endif

// The scales of a group of codes.
struct alignas(16) Factors {
    float of[GROUP];
};

// The word of shared memory that has the codes of lines 4 quad ... 4 quad + 3 at a position. Neither writing four neighbouring
// positions nor reading along lines meets a bank twice.
OPFUSE_FN int tile_slot(int position, int quad) { return position * (TILE / 4) + (quad ^ (position / 8 * 2)); }

#if ENTRY_dequantize_tile
extern "C" __global__ void __launch_bounds__(THREADS) dequantize_tile(const __grid_constant__ Launched launched) {
    Own part = own_part(launched);
    const Parameters& p = part.parameters;
    constexpr int QUADS = TILE / 4, STEPS = QUADS * 16 / THREADS;
    __shared__ __align__(16) u32 shared[TILE * QUADS];
    __shared__ __align__(16) float scales[TILE];
    u32 across = u32((p.columns + TILE - 1) / TILE);
    long long first_row = (long long)(part.block / across) * TILE, first_column = (long long)(part.block % across) * TILE;
    SCALE stored = threadIdx.x < TILE ? stored_scale(p, first_row, first_column + threadIdx.x) : SCALE{};
    int position = threadIdx.x % 16 * 8, quad = threadIdx.x / 16;
    Codes<8> codes[STEPS][4];
#pragma unroll
    for (int i = 0; i < STEPS * 4; ++i) {
        long long line = first_column + (quad + i / 4 * (QUADS / STEPS)) * 4 + i % 4, start = first_row + position;
        codes[i / 4][i % 4] = load_line<8>(p, line * p.rows + start, line < p.columns ? p.rows - start : 0);
    }
    if (threadIdx.x < TILE) scales[threadIdx.x] = decoded_scale(stored);
#pragma unroll
    for (int i = 0; i < STEPS * 2; ++i) {
        const Codes<8>(&four)[4] = codes[i / 2];
        int half = i % 2, first = position + half * 4, line = quad + i / 2 * (QUADS / STEPS);
        uint4 words = transpose_bytes(four[0].word[half], four[1].word[half], four[2].word[half], four[3].word[half]);
        shared[tile_slot(first, line)] = words.x, shared[tile_slot(first + 1, line)] = words.y;
        shared[tile_slot(first + 2, line)] = words.z, shared[tile_slot(first + 3, line)] = words.w;
    }
    __syncthreads();
    constexpr int GROUPS = TILE / GROUP;
    int group = threadIdx.x % GROUPS * GROUP;
    long long column = first_column + group, count = p.columns - column;
    Factors scale = *reinterpret_cast<const Factors*>(scales + group);
#pragma unroll
    for (int y = threadIdx.x / GROUPS; y < TILE; y += THREADS / GROUPS) {
        long long row = first_row + y;
        if (row >= p.rows || count <= 0) return;
        Codes<GROUP> own = *reinterpret_cast<const Codes<GROUP>*>(shared + tile_slot(y, group / 4));
        store_values(p, row * p.columns + column, own, count, [&](int j) { return scale.of[j]; });
    }
}
#endif
