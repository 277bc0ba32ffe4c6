// swizzle: where the scale of a block lies in swizzled order, which matrix products read.
//
// Arrays      padded to whole tiles of 128 lines x 4 blocks, tile after tile, `quads` of them side by side; in a tile, line 32 g + i
//             and block b are at byte 16 i + 4 g + b
// Defined by  opfuse/numerics/layouts.py.
#pragma once
#include "common.cuh"

OPFUSE_FN long long swizzled_at(long long line, long long block, long long quads) {
    u32 in_tile = (u32(line) & 31) << 4 | (u32(line) >> 5 & 3) << 2 | (u32(block) & 3);
    return ((line >> 7) * quads + (block >> 2)) * 512 + in_tile;
}
