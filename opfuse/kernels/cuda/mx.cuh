// mx: E8M0 scales of blocks of 32 values, and where they are stored.
//
// Arrays      [lines, blocks], where lines are rows of one plane and columns of the other; padded to whole tiles of 128 x 4. Compact: row
//             by row; SWIZZLED: see swizzle.cuh
// Compiled    after vectors.cuh, with OUT and SWIZZLED
#pragma once
#include "vectors.cuh"
#include "swizzle.cuh"

constexpr int MX_BLOCK = 32;

// The code of a block of values of T from the bits of its amax; bias as in mx_tile.cuh.
template <class T>
OPFUSE_FN u32 mx_code(u32 amax, u32 bias) {
    return e8m0_of_block<OUT, T>(amax, bias);
}

// 2^(127 - code) for the code of a block; that of the largest finite amax is far below 254, so no result is subnormal.
OPFUSE_FN float mx_multiplier(u32 code) { return float_of(code == E8M0_NAN ? NAN_BITS : (254 - code) << 23); }

OPFUSE_FN u32 four_codes(u32 a, u32 b, u32 c, u32 d) { return a | b << 8 | c << 16 | d << 24; }

OPFUSE_FN long long padded_lines(long long lines) { return (lines + 127) / 128 * 128; }
OPFUSE_FN long long padded_blocks(long long length) { return (length + 127) / 128 * 4; }

// Where the code of a block of a row lies, in a matrix of so many columns.
OPFUSE_FN long long row_scale_at(long long columns, long long row, long long block) {
    return SWIZZLED ? swizzled_at(row, block, padded_blocks(columns) / 4) : row * padded_blocks(columns) + block;
}

// Stores a word of a tile of 128 x 4 scales, that of number `threadIdx.x % 128`; shared memory has the tile line by line.
OPFUSE_FN void store_scale_tile(u8* scales, long long tile, const u8* shared) {
    int word = threadIdx.x % 128, line = word % 4 * 32 + word / 4;
    reinterpret_cast<u32*>(scales + tile * 512)[word] = reinterpret_cast<const u32*>(shared)[line];
}
