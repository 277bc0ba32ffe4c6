// fp4_plane: where the codes of 16 values of a line, and their scale, are stored.
//
// Lines       rows of a matrix in its rowwise plane, columns in its columnwise one
// codes       of E2M1, two to a byte, the first in the low half; lines one after the other
// scales      a byte for PER_SCALE values, 16 of NVFP4 or 32 of MXFP4, [lines, blocks], padded to whole tiles of 128 x 4; a row has
//             `quads` fours. Compact: row by row; swizzled: see swizzle.cuh
// amax        fp32, the global amax: one of all lines, or one for each
// Defined by  opfuse/numerics/layouts.py.
#pragma once
#include "vectors.cuh"
#include "swizzle.cuh"

#ifndef PER_SCALE
#define PER_SCALE 16
#endif

constexpr int BLOCK = 16, SCALE_SHIFT = PER_SCALE == 32 ? 5 : 4;

struct Plane {
    u8 *codes, *scales;
    const float* amax;
    long long quads;
};

// Where codes and scale of a block are, and how far those of the next line are from them; the same distance holds for the lines after
// that, up to a multiple of 32.
struct Place {
    u8 *codes, *scale;
    long long next_codes, next_scale;
};

OPFUSE_FN Place place_of(const Plane& plane, u32 swizzled, long long line, long long length, long long position) {
    long long block = position >> SCALE_SHIFT, compact = line * plane.quads * 4 + block, in_tiles = swizzled_at(line, block, plane.quads);
    u8* scale = plane.scales + (swizzled ? in_tiles : compact);
    return {plane.codes + ((line * length + position) >> 1), scale, length >> 1, swizzled ? 16 : plane.quads * 4};
}

// The place of the values 64 lines below, in the same tile of 128.
OPFUSE_FN Place ahead_64(const Place& place, u32 swizzled) {
    return {place.codes + 64 * place.next_codes, place.scale + (swizzled ? 8 : 64 * place.next_scale), place.next_codes, place.next_scale};
}
