// block_scales: fp32 scales of FP8 blocks, powers of two, as the E8M0 scales of MXFP8 in swizzled order.
//
// scale          fp32, rows of `pitch`: [blocks, pitch] with a line in each column, or [blocks of 128 lines, pitch] with a block of
//                128 elements in each column if SQUARE
// out            whole tiles of 128 lines x 4 blocks of 32 elements in swizzled order (swizzle.cuh), on 4 bytes, padding included
// lines, quads   of the plane: lines, and blocks of 128 elements in a line; blocks: of 32, of which the last quad may have fewer
// Arithmetic     by bits: 2^-127 to 2^127 exactly, zero as 2^-127, all else as NaN
// Grid           blocks of 256 threads, a thread for each word of four scales
// Defined by     opfuse/numerics/scales.py, scales_of_blocks.
#include "swizzle.cuh"

struct Parameters {
    const float* scale;
    u32* out;
    long long lines, quads, blocks, pitch;
};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "the fields that the host packs");

constexpr u32 SMALLEST = 0x00400000, FRACTION = 0x007fffff, NOT_A_POWER = 255;  // SMALLEST: 2^-127

OPFUSE_FN u32 e8m0_of_power(float x) {
    u32 word = bits_of(x);
    if (magnitude_of(x) == 0 || word == SMALLEST) return 0;
    return word & FRACTION || word < SMALLEST || word >= INF_BITS ? NOT_A_POWER : word >> 23;
}

extern "C" __global__ void __launch_bounds__(256) block_scales(const __grid_constant__ Parameters p) {
    long long at = (long long)blockIdx.x * 256 + threadIdx.x, tile = at / 128;
    u32 word = u32(at) % 128;  // of a tile: line 32 (word % 4) + word / 4
    long long quad = tile % p.quads, line = tile / p.quads * 128 + word % 4 * 32 + word / 4;
    if (tile / p.quads * 128 >= p.lines) return;
    u32 four = 0;
    if (line < p.lines) {
        long long there = p.blocks - 4 * quad;
        u32 code = e8m0_of_power(SQUARE ? p.scale[line / 128 * p.pitch + quad] : p.scale[quad * p.pitch + line]);
        four = code * 0x01010101u & (there < 4 ? (1u << 8 * there) - 1 : ~0u);
    }
    p.out[at] = four;
}
