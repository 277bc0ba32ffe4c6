// nvfp4_plane: where the codes and the scale of a block of 16 values of a line are stored.
//
// Lines       rows of a matrix in its rowwise plane, columns in its columnwise one
// codes       of E2M1, two to a byte, the first in the low half; lines one after the other
// scales      of E4M3, lines by blocks, padded to whole tiles of 128 x 4; a row has `quads` fours. Compact: row by row.
//             swizzled: tile after tile, and in a tile line 32 g + i and block b at byte 16 i + 4 g + b
// amax        fp32, of all lines, or one for each
// Defined by  opfuse/kernels/layouts.py and swizzle.py.
#pragma once
#include "vectors.cuh"

constexpr int BLOCK = 16;

struct Plane {
    u8 *codes, *scales;
    const float* amax;
    long long quads;
};

// Of a block, and how far ahead those of the next line are: so far also for lines after it, up to a multiple of 32.
struct Place {
    u8 *codes, *scale;
    long long next_codes, next_scale;
};

OPFUSE_FN Place place_of(const Plane& plane, u32 swizzled, long long line, long long length, long long position) {
    long long block = position / BLOCK, compact = line * plane.quads * 4 + block;
    long long tiled = (line / 128 * plane.quads + block / 4) * 512 + line % 32 * 16 + line % 128 / 32 * 4 + block % 4;
    u8* scale = plane.scales + (swizzled ? tiled : compact);
    return {plane.codes + (line * length + position) / 2, scale, length / 2, swizzled ? 16 : plane.quads * 4};
}
