// chain: what the generated code of a chain of elementwise ops is written in: packs of neighbouring values, halves of columns.
//
// ALIGNED = 1    packs start on 16 bytes (8 for bytes) and are whole: rows, and the groups of columns that alternate, are multiples of
//                eight elements. A thread whose pack is not there computes on one that is, and stores nothing
// ALIGNED = 0    anything goes: elements are moved one by one, and 0 stands for what is not there
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

// ---------------------------------------------------------------------------------------------------------------------- places

// A pack of eight columns of results, in row `row` + `down`: `row` and `column` are the same for many packs of a thread, so that
// wide arithmetic is done once. `count` of its elements are there, none if it is not positive.
struct Place {
    long long row, column;
    u32 down;
    int count;
};

// How a matrix of results is cut into tiles: of `groups` times 2^log_across packs of columns, by as many rows as the other threads
// are, `steps` times. n / tiles_across is n multiplier >> shift.
struct Cut {
    long long rows, columns;
    u32 log_across, groups, tiles_across, multiplier, shift, steps;
};

struct Thread {
    u32 tile, tile_column;  // the block's tile
    int lane;               // the thread's pack in its group
    long long first;        // the first column of its group
    long long row, column;  // of its first pack
    int rows, columns;      // from these on, the rows and columns that are there

    // The pack that lies so many rows below the first.
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

// A thread of a block whose rows are `lines` times `steps`, interleaved.
OPFUSE_FN Thread this_thread(const Cut& cut, int lines) {
    u32 tile = tile_of(cut, blockIdx.x), tile_column = blockIdx.x - tile * cut.tiles_across;
    int lane = threadIdx.x & ((1 << cut.log_across) - 1), line = threadIdx.x >> cut.log_across;
    return thread_at(cut, tile, tile_column, (long long)tile * (cut.steps * lines) + line, (long long)tile_column << cut.log_across + 3, lane);
}

// The column that half 0 or 1 of a gated unit has for column `column` of its `columns` results: behind one another if GROUP is 0,
// else alternating in groups of GROUP columns.
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

// The pack at a place of a matrix of `width` columns; column_of takes columns of results to its columns. Inputs are never written
// while a chain runs, which the read-only loads say: they may be moved ahead of stores.
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

// The number of a place's row in a vector of them; 0 where there is none.
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

// The values of a result for the functions of casts: nothing that is not there, whatever an op makes of that.
template <class T>
OPFUSE_FN Eight<T> eight_of(const Eight<T>& v, int count) {
    if constexpr (ALIGNED)
        return v;
    else
        return pack_of<T, 8>([&](int i) { return is_there(i, count) ? value(v, i) : 0.0f; });
}
