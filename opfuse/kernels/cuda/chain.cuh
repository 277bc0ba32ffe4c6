// chain: what the generated code of a chain of elementwise ops is written in: packs of neighbouring values, halves of columns.
//
// ALIGNED = 1    packs start on 16 bytes (8 for bytes) and are whole or missing: rows, and the groups of columns that alternate,
//                are multiples of eight elements; = 0: anything goes, elements are moved one by one, 0 stands for what is missing
// Rounding       to nearest even, 16-bit floats to inf; a pair takes one conversion
// Compiled       after common.cuh, with the definition ALIGNED
#pragma once
#include "vectors.cuh"
#include "activations.cuh"

#define SOME(count) ((count) > 0 ? (count) : 1)  // the length of an array that may have no elements

// N neighbouring values as they lie in memory.
template <class T, int N>
struct Pack {
    static constexpr int BYTES = N * sizeof(T), WORDS = (BYTES + 3) / 4;
    u32 word[WORDS];
};

// Element i as fp32.
template <int N>
OPFUSE_FN float value(const Pack<float, N>& v, int i) { return float_of(v.word[i]); }
template <int N>
OPFUSE_FN float value(const Pack<bf16, N>& v, int i) { return float_of(i & 1 ? v.word[i / 2] & 0xffff0000 : v.word[i / 2] << 16); }
template <int N>
OPFUSE_FN float value(const Pack<fp16, N>& v, int i) { return to_fp32(fp16{u16(i & 1 ? v.word[i / 2] >> 16 : v.word[i / 2])}); }
template <int N>
OPFUSE_FN float value(const Pack<u8, N>& v, int i) { return float(v.word[i / 4] >> i % 4 * 8 & 0xff); }

OPFUSE_FN float value(float x) { return x; }
OPFUSE_FN float value(bf16 x) { return to_fp32(x); }
OPFUSE_FN float value(fp16 x) { return to_fp32(x); }
OPFUSE_FN float value(u8 x) { return float(x); }

// The pack of f(0) ... f(N - 1), rounded to T.
template <class T, int N, class F>
OPFUSE_FN Pack<T, N> pack_of(F f) {
    Pack<T, N> v;
#pragma unroll
    for (int k = 0; k < v.WORDS; ++k) {
        if constexpr (sizeof(T) == 4)
            v.word[k] = bits_of(f(k));
        else
            v.word[k] = round_two<T>(f(2 * k), f(2 * k + 1));
    }
    return v;
}

template <class T, class S>
constexpr bool SAME = false;
template <class T>
constexpr bool SAME<T, T> = true;

// The pack in another type.
template <class T, class S, int N>
OPFUSE_FN Pack<T, N> rounded(const Pack<S, N>& v) {
    if constexpr (SAME<T, S>)
        return v;
    else
        return pack_of<T, N>([&](int i) { return value(v, i); });
}

// a + b, rounded to T. One fma of packed halves rounds as the fp32 sum that is then rounded: fp32 has more than twice their digits.
template <class T, int N>
OPFUSE_FN Pack<T, N> sum_of(const Pack<T, N>& a, const Pack<T, N>& b) {
    if constexpr (sizeof(T) == 4) {
        return pack_of<T, N>([&](int i) { return value(a, i) + value(b, i); });
    } else {
        Pack<T, N> v;
#pragma unroll
        for (int k = 0; k < v.WORDS; ++k) {
            if constexpr (SAME<T, bf16>)
                asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(v.word[k]) : "r"(a.word[k]), "r"(0x3f803f80), "r"(b.word[k]));
            else
                asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(v.word[k]) : "r"(a.word[k]), "r"(0x3c003c00), "r"(b.word[k]));
        }
        return v;
    }
}

// --------------------------------------------------------------------------------------------------------------- loads, stores

// Whether element i of a pack is there.
OPFUSE_FN bool is_there(int i, long long count) { return ALIGNED ? count > 0 : i < count; }

template <class T>
OPFUSE_FN T element(const Pack<T, 8>& v, int i) { return T{u16(v.word[i / 2] >> i % 2 * 16)}; }
template <>
OPFUSE_FN float element(const Pack<float, 8>& v, int i) { return float_of(v.word[i]); }
template <>
OPFUSE_FN u8 element(const Pack<u8, 8>& v, int i) { return u8(v.word[i / 4] >> i % 4 * 8); }

OPFUSE_FN u32 word_of(u8 x, int i) { return u32(x) << i % 4 * 8; }
template <class T>
OPFUSE_FN u32 word_of(T x, int i) { return bits_in_word(x, i); }

// Inputs are never written while a chain runs, which the read-only loads say: they may be moved ahead of stores.
//
// Elements `column` ... `column` + 7 of what starts at x; column_of says where they lie. The first `count` of them are there.
template <class T, class Place>
OPFUSE_FN Pack<T, 8> load(const T* x, Place column_of, long long column, long long count) {
    Pack<T, 8> v = {};
    if constexpr (!ALIGNED) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (is_there(i, count)) v.word[i * sizeof(T) / 4] |= word_of(x[column_of(column + i)], i);
    } else if (count > 0) {
        x += column_of(column);
        if constexpr (sizeof(T) == 1) {
            uint2 two = __ldg(reinterpret_cast<const uint2*>(x));
            v.word[0] = two.x, v.word[1] = two.y;
        } else {
#pragma unroll
            for (int k = 0; k < v.WORDS; k += 4) {
                uint4 four = __ldg(reinterpret_cast<const uint4*>(x) + k / 4);
                v.word[k] = four.x, v.word[k + 1] = four.y, v.word[k + 2] = four.z, v.word[k + 3] = four.w;
            }
        }
    }
    return v;
}

template <class T, class Place>
OPFUSE_FN void store(T* x, const Pack<T, 8>& v, Place column_of, long long column, long long count) {
    if constexpr (!ALIGNED) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (is_there(i, count)) x[column_of(column + i)] = element(v, i);
    } else if (count > 0) {
        x += column_of(column);
        if constexpr (sizeof(T) == 1)
            *reinterpret_cast<uint2*>(x) = make_uint2(v.word[0], v.word[1]);
        else
#pragma unroll
            for (int k = 0; k < v.WORDS; k += 4)
                reinterpret_cast<uint4*>(x)[k / 4] = make_uint4(v.word[k], v.word[k + 1], v.word[k + 2], v.word[k + 3]);
    }
}

// The pack with 0 for what is missing, whatever an op makes of that.
template <class T>
OPFUSE_FN Pack<T, 8> first_of(const Pack<T, 8>& v, long long count) {
    if constexpr (ALIGNED)
        return count > 0 ? v : Pack<T, 8>{};
    else
        return pack_of<T, 8>([&](int i) { return is_there(i, count) ? value(v, i) : 0.0f; });
}

// ---------------------------------------------------------------------------------------------------------------------- places

// The column that half 0 or 1 of a gated unit has for column `column` of its `columns` results: behind one another if GROUP is 0,
// else alternating in groups of GROUP columns.
template <int GROUP>
OPFUSE_FN long long half_column(long long column, int half, long long columns) {
    if constexpr (GROUP == 0)
        return column + half * columns;
    else
        return column / GROUP * (2 * GROUP) + half * GROUP + column % GROUP;
}

// How a matrix is cut into blocks of 2^log_across packs of columns by as many rows as its threads have, `steps` times.
struct Cut {
    long long rows, columns;
    u32 log_across, tiles_across, steps;
};

constexpr int THREADS = 256;

// The same values for the functions of casts.
template <class T>
OPFUSE_FN Eight<T> eight_of(const Pack<T, 8>& v) {
    Eight<T> eight;
#pragma unroll
    for (int k = 0; k < v.WORDS; ++k) eight.word[k] = v.word[k];
    return eight;
}

struct Thread {
    int tile, tile_column, lane, line, lines;  // the block's rows and columns; the thread's column and row in it
    long long row, column;
};

OPFUSE_FN Thread this_thread(const Cut& cut) {
    int lines = THREADS >> cut.log_across, lane = threadIdx.x & ((1 << cut.log_across) - 1), line = threadIdx.x >> cut.log_across;
    int tile = blockIdx.x / cut.tiles_across, tile_column = blockIdx.x % cut.tiles_across;
    return {tile, tile_column, lane, line, lines, (long long)tile * cut.steps * lines + line,
            (((long long)tile_column << cut.log_across) + lane) * 8};
}
