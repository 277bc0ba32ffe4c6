// chain: the functions that the generated code of a chain of elementwise ops calls: packs of neighbouring values, halves of columns.
//
// ALIGNED = 1    packs start on 16 bytes (8 for bytes) and are whole: rows, and the alternating groups of columns, are multiples of eight
//                elements. A thread whose pack lies outside of the matrix computes on another one, and stores nothing
// ALIGNED = 0    any size and address: elements are moved one by one, and missing ones are 0
// Rounding       to nearest even, 16-bit floats to inf; a pair takes one conversion
// Compiled       after common.cuh, with the definition ALIGNED
#pragma once
#include "vectors.cuh"
#include "activations.cuh"

#define SOME(count) ((count) > 0 ? (count) : 1)  // the length of an array that may have no elements

// A number as fp32.
OPFUSE_FN float value(float x) { return x; }
OPFUSE_FN float value(bf16 x) { return to_fp32(x); }
OPFUSE_FN float value(fp16 x) { return to_fp32(x); }
OPFUSE_FN float value(u8 x) { return float(x); }

template <class T, class S>
constexpr bool SAME = false;
template <class T>
constexpr bool SAME<T, T> = true;

// The pack, converted to another type.
template <class T, class S, int N>
OPFUSE_FN Pack<T, N> rounded(const Pack<S, N>& v) {
    if constexpr (SAME<T, S>)
        return v;
    else
        return pack_of<T, N>([&](int i) { return value(v, i); });
}

// a + b, rounded to T. An fma of packed 16-bit floats has the bits of the fp32 sum rounded to them: fp32 has more than twice the digits.
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

// ---------------------------------------------------------------------------------------------------------------------- places

// A pack of eight columns of results, in row `row` + `down`. Many packs of a thread share `row` and `column`, so that their 64-bit
// arithmetic is done once. The first `count` elements are in the matrix; none, if that is not positive.
struct Place {
    long long row, column;
    u32 down;
    int count;
};

// How a matrix of results is cut into tiles. A tile is `groups` times 2^log_across packs wide; the block's other threads are below each
// other, and each has `steps` rows. n / tiles_across is computed as n multiplier >> shift.
struct Cut {
    long long rows, columns;
    u32 log_across, groups, tiles_across, multiplier, shift, steps;
};

struct Thread {
    u32 tile, tile_column;  // the block's tile
    int lane;               // the thread's pack in its group
    long long first;        // the first column of its group
    long long row, column;  // of its first pack
    int rows, columns;      // how many rows and columns of the matrix there are from `row` and `column` on

    // The pack that lies `down` rows below the first.
    OPFUSE_FN Place place(u32 down) const {
        if constexpr (ALIGNED)
            return {row, column, smaller(down, rows > 0 ? rows - 1 : 0), int(down) < rows ? columns : 0};
        else
            return {row, column, down, int(down) < rows ? columns : 0};
    }
};

// A thread of tile `tile`, `tile_column` whose first pack is at `row` and number `lane` from column `first` on.
OPFUSE_FN Thread thread_at(const Cut& cut, u32 tile, u32 tile_column, long long row, long long first, int lane) {
    long long column = first + lane * 8, rows = cut.rows - row, columns = cut.columns - column;
    if (ALIGNED && rows <= 0) row = cut.rows - 1;
    if (ALIGNED && columns <= 0) column = cut.columns - 8;
    return {tile, tile_column, lane, first, row, column, at_most(rows, 1 << 20), at_most(columns, 8)};
}

OPFUSE_FN u32 tile_of(const Cut& cut, u32 block) { return u32(u64(block) * cut.multiplier >> cut.shift); }

constexpr int THREADS = 256;

// The thread's place in its block, which has `lines` times `steps` rows, interleaved.
OPFUSE_FN Thread this_thread(const Cut& cut, int lines) {
    u32 tile = tile_of(cut, blockIdx.x), tile_column = blockIdx.x - tile * cut.tiles_across;
    int lane = threadIdx.x & ((1 << cut.log_across) - 1), line = threadIdx.x >> cut.log_across;
    return thread_at(cut, tile, tile_column, (long long)tile * (cut.steps * lines) + line, (long long)tile_column << cut.log_across + 3, lane);
}

// The column of half 0 or 1 of a gated unit's input that belongs to `column` of its `columns` results. GROUP 0: one half lies behind
// the other; else they alternate in groups of GROUP columns.
template <int GROUP>
OPFUSE_FN long long half_column(long long column, int half, long long columns) {
    if constexpr (GROUP == 0)
        return column + half * columns;
    else
        return column / GROUP * (2 * GROUP) + half * GROUP + column % GROUP;
}

// --------------------------------------------------------------------------------------------------------------- loads, stores

OPFUSE_FN u32 word_of(u8 x, int i) { return u32(x) << i % 4 * 8; }
template <class T>
OPFUSE_FN u32 word_of(T x, int i) { return bits_in_word(x, i); }

// The row of a place in a matrix of `width` columns.
template <class T>
OPFUSE_FN T* row_of(T* x, long long width, const Place& at) { return x + at.row * width + u64(at.down) * u32(width); }

// The pack of a place, or the place itself if elements are moved one by one.
template <class T, class Columns>
OPFUSE_FN T* pack_at(T* x, long long width, Columns column_of, const Place& at) {
    return found(x + (at.row * width + column_of(at.column))) + u64(at.down) * u32(width);
}

// The pack at a place of a matrix of `width` columns; column_of maps columns of results to its columns. Nothing writes to inputs while a
// chain runs; read-only loads say so, and the compiler may move them ahead of stores.
template <class T, class Columns>
OPFUSE_FN Pack<T, 8> load(const T* x, long long width, Columns column_of, const Place& at) {
    Pack<T, 8> v = {};
    if constexpr (!ALIGNED) {
        x = row_of(x, width, at);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (is_there(i, at.count)) v.word[i * sizeof(T) / 4] |= word_of(x[column_of(at.column + i)], i);
    } else {
        x = pack_at(x, width, column_of, at);
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

// A vector's number for the row of a place; 0 if the row is not in the matrix.
template <class T>
OPFUSE_FN float load_of_row(const T* x, const Place& at) { return ALIGNED || at.count > 0 ? value(x[at.row + at.down]) : 0.0f; }

template <class T, class Columns>
OPFUSE_FN void store(T* x, long long width, Columns column_of, const Place& at, const Pack<T, 8>& v) {
    if constexpr (!ALIGNED) {
        x = row_of(x, width, at);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (is_there(i, at.count)) x[column_of(at.column + i)] = element(v, i);
    } else if (at.count > 0) {
        x = pack_at(x, width, column_of, at);
        if constexpr (sizeof(T) == 1)
            *reinterpret_cast<uint2*>(x) = make_uint2(v.word[0], v.word[1]);
        else
            store_eight(x, v);
    }
}

// A result for the functions of casts. Without ALIGNED, elements outside of the matrix become 0, whatever the ops computed there.
template <class T>
OPFUSE_FN Eight<T> eight_of(const Eight<T>& v, int count) {
    if constexpr (ALIGNED)
        return v;
    else
        return pack_of<T, 8>([&](int i) { return is_there(i, count) ? value(v, i) : 0.0f; });
}
