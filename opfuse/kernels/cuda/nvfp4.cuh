// nvfp4: blocks of 16 values of a line, each held by one thread: their scale, their E2M1 codes, and where both are stored.
//
// IN, ALIGNED and ROUNDING are defined before this file. ROUNDING says what a value between two codes becomes:
// NEAREST        the nearest code, under the scale that maps the largest value of the block to 6
// STOCHASTIC     the next or the previous code, by a random byte of the element's own
// MAE, MSE       the nearest code, under the scale that maps the largest value to 4 if the block's error is then strictly less than with 6
// Lines          rows of x in the rowwise plane, columns in the columnwise one
// Nvfp4          packed by the host; cast_nvfp4.cu describes its fields
// Non-finite     a block that holds one has the scale NaN and the code of 6 for each value
// Defined by     opfuse/numerics/casts.py, cast_nv.
#pragma once
#include "fp4_plane.cuh"
#include "e2m1.cuh"

enum Mode { NEAREST, STOCHASTIC, MAE, MSE };
constexpr Mode MODE = ROUNDING;
constexpr bool CHOOSES = MODE == MAE || MODE == MSE;

struct Nvfp4 {
    Plane rowwise, columnwise;
    const u64* seed;
    long long rows, columns;
    float encode_max;
    u32 swizzled, per_line, unused;
};

OPFUSE_FN long long smaller_of(long long a, long long b) { return a < b ? a : b; }

// ---------------------------------------------------------------------------------------------------------------------- values

struct Sixteen {
    Eight<IN> half[2];
};

// The 16 elements from x on, of which the first `count` are in the matrix; the others are 0.
OPFUSE_FN Sixteen load_sixteen(const IN* x, long long count) {
    if constexpr (ALIGNED)
        return count > 0 ? Sixteen{load_eight(x), load_eight(x + 8)} : Sixteen{};
    else
        return {load_some(x, count), load_some(x + 8, count - 8)};
}

// The fp32 bits of the largest magnitude.
OPFUSE_FN u32 largest_of(const Sixteen& v) { return magnitude_bits<IN>(larger_magnitude(larger_magnitude(0, v.half[0]), v.half[1])); }

OPFUSE_FN float magnitude(const Eight<IN>& v, int i) { return fabsf(value(v, i)); }

// The signs of eight values, as eight codes have them: that of element i in bit 4 i + 3.
OPFUSE_FN u32 signs_of(const Eight<IN>& v) {
    u32 first, second;  // the bytes with the signs of elements 0 1 2 3, and of 4 5 6 7
    if constexpr (sizeof(IN) == 4) {
        first = __byte_perm(__byte_perm(v.word[0], v.word[1], 0x73), __byte_perm(v.word[2], v.word[3], 0x73), 0x5410);
        second = __byte_perm(__byte_perm(v.word[4], v.word[5], 0x73), __byte_perm(v.word[6], v.word[7], 0x73), 0x5410);
    } else {
        first = __byte_perm(v.word[0], v.word[1], 0x7531), second = __byte_perm(v.word[2], v.word[3], 0x7531);
    }
    u32 even = __byte_perm(first, second, 0x6420), odd = __byte_perm(first, second, 0x7531);
    return (even >> 4 & 0x08080808) | (odd & 0x80808080);
}

// ---------------------------------------------------------------------------------------------------------------------- scales

// The global scale, and what follows from it for every block.
struct Level {
    float amax, encode, sixth, decode;
};

OPFUSE_FN Level level_of(const Nvfp4& p, const Plane& plane, long long line) {
    constexpr float SIXTH = 1.0f / E2M1::MAX;
    float amax = plane.amax[p.per_line ? line : 0], encode = nvfp4_global_scale(amax, p.encode_max);
    return {amax, encode, encode * SIXTH, 1.0f / encode};
}

// The E4M3 code of a block's scale, given in fp32; E4M3_NAN if a value of the block is not finite.
OPFUSE_FN u32 scale_code(u32 amax, float scale) { return amax < INF_BITS ? encode_two<E4M3>(scale, 0.0f) & 0xff : E4M3_NAN; }

// By what values are multiplied; any number for a NaN scale.
OPFUSE_FN float multiplier_of(u32 scale, const Level& level) { return fminf(1.0f / (decode_two<E4M3>(scale).x * level.decode), LARGEST_FLOAT); }

// ----------------------------------------------------------------------------------------------------------------------- codes

// Random bytes of 16 elements of a plane, from its element `first` on.
OPFUSE_FN Words4 random_bytes(const Nvfp4& p, long long first, u32 stream) {
    if constexpr (MODE != STOCHASTIC) return {};
    u64 seed = __ldg(p.seed), block = u64(first) / 16;
    Words4 random = random_block(seed, block, stream);
    if constexpr (!ALIGNED) {
        u32 skip = u32(first) % 16;
        Words4 more = skip ? random_block(seed, block + 1, stream) : Words4{};
        u32 word[8] = {random.word[0], random.word[1], random.word[2], random.word[3], more.word[0], more.word[1], more.word[2], more.word[3]};
#pragma unroll
        for (int i = 0; i < 6; ++i) word[i] = skip & 8 ? word[i + 2] : word[i];
#pragma unroll
        for (int i = 0; i < 5; ++i) word[i] = skip & 4 ? word[i + 1] : word[i];
#pragma unroll
        for (int i = 0; i < 4; ++i) random.word[i] = __funnelshift_r(word[i], word[i + 1], skip % 4 * 8);
    }
    return random;
}

// Codes of 16 values times `multiplier`, without signs.
OPFUSE_FN uint2 codes_of(const Sixteen& v, float multiplier, const Words4& random) {
    u32 codes[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const Eight<IN>& of = v.half[h];
        if constexpr (MODE == STOCHASTIC) {
            codes[h] = 0;
#pragma unroll
            for (int i = 7; i >= 0; --i)
                codes[h] = codes[h] * 16 + e2m1_stochastic(magnitude(of, i) * multiplier, random_share(random.word[2 * h + i / 4], i % 4));
        } else {
            u32 low = four_e2m1([&](int i) { return magnitude(of, i) * multiplier; });
            u32 high = four_e2m1([&](int i) { return magnitude(of, i + 4) * multiplier; });
            codes[h] = __byte_perm(low, high, 0x5410);
        }
    }
    return make_uint2(codes[0], codes[1]);
}

struct Encoded {
    u32 scale;
    uint2 codes;  // element 0 in the lowest bits
};

// Adds the signs of the values to the codes of a block.
OPFUSE_FN Encoded with_signs(const Sixteen& v, const Encoded& block) {
    u32 first = block.codes.x | signs_of(v.half[0]), second = block.codes.y | signs_of(v.half[1]);
    bool nan = block.scale == E4M3_NAN;
    return {block.scale, make_uint2(nan ? 0x77777777 : first, nan ? 0x77777777 : second)};
}

// The block, under the scale that maps its largest magnitude, whose bits are `amax`, to 6.
OPFUSE_FN Encoded map_to_six(const Sixteen& v, u32 amax, const Level& level, const Words4& random) {
    u32 scale = scale_code(amax, float_of(amax) * level.sixth);
    return with_signs(v, {scale, codes_of(v, multiplier_of(scale, level), random)});
}

// ---------------------------------------------------------------------------------------------------------------- four or six

struct Candidate {
    Encoded block;
    float error;  // summed from the first to the last value
};

// The block, under the scale that maps its largest magnitude to 6 / expand, and its error.
OPFUSE_FN Candidate candidate(const Nvfp4& p, const Sixteen& v, u32 amax, const Level& level, float expand) {
    u32 scale = scale_code(amax, float_of(amax) / E2M1::MAX * level.encode * expand);
    Candidate c = {{scale, codes_of(v, multiplier_of(scale, level), Words4{})}, 0.0f};
    float decoded = decode_two<E4M3>(scale).x;
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) {
        u32 code = (i < 8 ? c.block.codes.x : c.block.codes.y) >> i % 8 * 4 & 7;
        float stored = e2m1_value(code) * decoded * level.amax / (E2M1::MAX * p.encode_max);
        float difference = stored - magnitude(v.half[i / 8], i % 8);
        c.error += MODE == MAE ? fabsf(difference) : difference * difference;
    }
    return c;
}

struct Candidates {
    Candidate four, six;
};

OPFUSE_FN Candidates candidates(const Nvfp4& p, const Sixteen& v, u32 amax, const Level& level) {
    return {candidate(p, v, amax, level, 1.5f), candidate(p, v, amax, level, 1.0f)};
}

// ------------------------------------------------------------------------------------------------------------- blocks of a line

// A block with a scale of its own, from the bits of its amax; it starts at element `first` of plane `stream`, 0 rowwise, 1 columnwise.
OPFUSE_FN Encoded encode_block(const Nvfp4& p, const Sixteen& v, const Level& level, long long first, u32 stream) {
    u32 amax = largest_of(v);
    if constexpr (CHOOSES) {
        Candidates c = candidates(p, v, amax, level);
        return with_signs(v, c.four.error < c.six.error ? c.four.block : c.six.block);
    } else {
        return map_to_six(v, amax, level, random_bytes(p, first, stream));
    }
}

// Stores a block in line `ahead` from its place on; its first `count` values are in the matrix.
OPFUSE_FN void store_block(const Place& place, int ahead, const Encoded& block, long long count) {
    place.scale[ahead * place.next_scale] = u8(block.scale);
    u8* codes = place.codes + ahead * place.next_codes;
    if constexpr (ALIGNED)
        store_eight(codes, block.codes);
    else
        store_some(codes, block.codes, count / 2);
}
