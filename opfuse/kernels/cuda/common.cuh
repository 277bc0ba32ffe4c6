// common: conversions of single values, and the rules that make scales from amax; the same text for the device and for a host.
//
// Rounding    to nearest even, on the bits; 8- and 4-bit elements saturate, 16-bit floats overflow to inf. The sign of zero is
//             kept. NaN becomes the canonical code, without a sign. E8M0 codes of a decode scale are rounded up.
// Non-finite  amax is the integer maximum of the bits of magnitudes, so inf and NaN propagate. A block that holds one gets a NaN
//             scale, so that it shows in the decoded values.
// Compiled    without ftz, without implicit fma, with correctly rounded division: -fmad=false -prec-div=true, on a host
//             -ffp-contract=off. No header is included: NVRTC has none, and a host needs none.
// Defined by  opfuse/numerics/scalars.py, scales.py and philox.py; equal to them bit for bit, every bf16 and fp16 value included.
#pragma once

#if defined(__CUDACC__)
#define OPFUSE_FN __host__ __device__ __forceinline__
#else
#define OPFUSE_FN inline
#endif

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8, "integer types of 16, 32 and 64 bits");

constexpr u32 INF_BITS = 0x7f800000, NAN_BITS = 0x7fc00000, MAGNITUDE = 0x7fffffff;
constexpr float LARGEST_FLOAT = 3.4028234663852886e38f;
constexpr u32 E8M0_NAN = 255, E4M3_NAN = 0x7f;

// ---------------------------------------------------------------------------------------------------------------- fp32 bits

OPFUSE_FN u32 bits_of(float x) {
#if defined(__CUDA_ARCH__)
    return __float_as_uint(x);
#else
    u32 bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
#endif
}

OPFUSE_FN float float_of(u32 bits) {
#if defined(__CUDA_ARCH__)
    return __uint_as_float(bits);
#else
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
#endif
}

// The bits of |x|. As integers they order as the magnitudes do, with inf and then NaN on top.
OPFUSE_FN u32 magnitude_of(float x) { return bits_of(x) & MAGNITUDE; }

OPFUSE_FN bool is_finite(float x) { return magnitude_of(x) < INF_BITS; }

OPFUSE_FN u32 larger(u32 a, u32 b) { return a > b ? a : b; }

OPFUSE_FN u32 smaller(u32 a, u32 b) { return a < b ? a : b; }

// x >= 0 rounded down to a power of two (a subnormal becomes 0).
OPFUSE_FN float pow2_floor(float x) { return float_of(bits_of(x) & 0xff800000); }

// ------------------------------------------------------------------------------------------------ elements and 16-bit floats

// TOP is the code that large magnitudes become, NAN_CODE the one that NaN becomes; INF is the code of inf, 0 where there is none.
template <int BITS_, int MANTISSA_BITS_, int BIAS_, u32 TOP_, u32 NAN_CODE_, u32 INF_>
struct Encoding {
    static constexpr int BITS = BITS_, MANTISSA_BITS = MANTISSA_BITS_, BIAS = BIAS_;
    static constexpr u32 TOP = TOP_, NAN_CODE = NAN_CODE_, INF = INF_, SIGN = 1u << (BITS_ - 1);
};

struct E4M3 : Encoding<8, 3, 7, 0x7e, 0x7f, 0> {
    static constexpr float MAX = 448.0f;
};
struct E5M2 : Encoding<8, 2, 15, 0x7b, 0x7f, 0x7c> {
    static constexpr float MAX = 57344.0f;
};
struct E2M1 : Encoding<4, 1, 1, 0x7, 0x7, 0> {
    static constexpr float MAX = 6.0f;
};
struct FP16 : Encoding<16, 10, 15, 0x7c00, 0x7fff, 0x7c00> {};
struct BF16 : Encoding<16, 7, 127, 0x7f80, 0x7fff, 0x7f80> {};

template <int EXPONENT>
OPFUSE_FN float power_of_two() {
    static_assert(EXPONENT >= -149 && EXPONENT <= 127, "a power of two that fp32 holds");
    return float_of(EXPONENT < -126 ? 1u << ((EXPONENT + 149) & 31) : u32(EXPONENT + 127) << 23);
}

// The code of x in the low E::BITS bits.
template <class E>
OPFUSE_FN u32 encode(float x) {
    constexpr int SHIFT = 23 - E::MANTISSA_BITS;
    constexpr u32 SMALLEST_NORMAL = u32(128 - E::BIAS) << 23;
    u32 magnitude = magnitude_of(x), code;
    if (magnitude > INF_BITS) return E::NAN_CODE;
    if (magnitude < SMALLEST_NORMAL) {
        // The codes are evenly spaced here. Next to a power of two whose last place is one code, the addition itself rounds to
        // nearest even and leaves the code in the low bits of the sum.
        float aligner = power_of_two<24 - E::BIAS - E::MANTISSA_BITS>();
        code = bits_of(float_of(magnitude) + aligner) - bits_of(aligner);
    } else {
        u32 odd = (magnitude >> SHIFT) & 1;
        code = ((magnitude + (1u << (SHIFT - 1)) - 1 + odd) >> SHIFT) - (u32(127 - E::BIAS) << E::MANTISSA_BITS);
    }
    return smaller(code, E::TOP) | (bits_of(x) >> 31) * E::SIGN;
}

// The exact value of a code.
template <class E>
OPFUSE_FN float decode(u32 code) {
    u32 magnitude = code & (E::SIGN - 1), bits;
    if (magnitude < 1u << E::MANTISSA_BITS)
        bits = bits_of(float(magnitude) * power_of_two<1 - E::BIAS - E::MANTISSA_BITS>());
    else if (magnitude > larger(E::TOP, E::INF))
        bits = NAN_BITS;
    else if (magnitude == E::INF)
        bits = INF_BITS;
    else
        bits = (magnitude << (23 - E::MANTISSA_BITS)) + (u32(127 - E::BIAS) << 23);
    return float_of(bits | (code & E::SIGN ? 0x80000000 : 0));
}

// The 8-bit code that shows a non-finite x as it is: inf where E has it, NaN otherwise.
template <class E>
OPFUSE_FN u32 encode_nonfinite(float x) {
    return E::INF && magnitude_of(x) == INF_BITS ? E::INF | (bits_of(x) >> 31) * E::SIGN : E::NAN_CODE;
}

// Two E2M1 codes in one byte, the even index in the low nibble.
OPFUSE_FN u8 pack_e2m1(u32 even, u32 odd) { return u8(even | odd << 4); }

// E2M1 with |x| raised by random / 256 of the step at |x|, in fp32, then cut to the grid; random is 0..255.
OPFUSE_FN u32 encode_e2m1_stochastic(float x, u32 random) {
    u32 magnitude = magnitude_of(x);
    if (magnitude > INF_BITS) return E2M1::NAN_CODE;
    float x_abs = float_of(magnitude);
    float step = x_abs < 2.0f ? 0.5f : x_abs < 4.0f ? 1.0f : 2.0f;
    float raised = x_abs + float(random) * 0.00390625f * step;
    u32 code = raised < 1.0f ? raised >= 0.5f : (bits_of(raised) >> 22) - (126u << 1);
    return smaller(code, E2M1::TOP) | (bits_of(x) >> 31) * E2M1::SIGN;
}

// I/O types of kernels: a value of T by to_fp32(x), and back by from_fp32<T>(y).
struct bf16 {
    u16 bits;
};
struct fp16 {
    u16 bits;
};

OPFUSE_FN float to_fp32(float x) { return x; }
OPFUSE_FN float to_fp32(bf16 x) { return float_of(u32(x.bits) << 16); }
OPFUSE_FN float to_fp32(fp16 x) {
#if defined(__CUDA_ARCH__)
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
#else
    return decode<FP16>(x.bits);
#endif
}

template <class T>
OPFUSE_FN T from_fp32(float x);
template <>
OPFUSE_FN float from_fp32<float>(float x) { return x; }
template <>
OPFUSE_FN bf16 from_fp32<bf16>(float x) { return {u16(encode<BF16>(x))}; }
template <>
OPFUSE_FN fp16 from_fp32<fp16>(float x) { return {u16(encode<FP16>(x))}; }

// Two maxima of 16-bit magnitudes at once: the halves of `best` against those of a pair of bf16 or fp16 values.
OPFUSE_FN u32 larger_magnitudes(u32 best, u32 pair) {
#if defined(__CUDA_ARCH__)
    return __vmaxu2(best, pair & 0x7fff7fff);
#else
    return larger(best & 0xffff, pair & 0x7fff) | larger(best & 0xffff0000, pair & 0x7fff0000);
#endif
}

// ----------------------------------------------------------------------------------------------------------------- E8M0 scales

// The code of the smallest power of two not below v >= 0; 254 for inf, 255 for NaN.
OPFUSE_FN u32 encode_e8m0(float v) {
    u32 magnitude = magnitude_of(v);
    if (magnitude > INF_BITS) return E8M0_NAN;
    if (magnitude <= 0x00400000) return 0;
    return smaller((magnitude + 0x007fffff) >> 23, 254);
}

// 2^(code - 127); code 0 is the subnormal 2^-127.
OPFUSE_FN float decode_e8m0(u32 code) {
    return float_of(code == E8M0_NAN ? NAN_BITS : code == 0 ? 0x00400000 : code << 23);
}

// 2^(127 - code), what a cast multiplies by.
OPFUSE_FN float e8m0_multiplier(u32 code) { return decode_e8m0(code == E8M0_NAN ? code : 254 - code); }

// The code of a block's decode scale: amax fl32(1 / max) rounded up, 255 where amax is not finite.
template <class E>
OPFUSE_FN u32 e8m0_from_amax(float amax) {
    constexpr float RECIPROCAL = 1.0f / E::MAX;
    return is_finite(amax) ? encode_e8m0(amax * RECIPROCAL) : E8M0_NAN;
}

// The code of a block of values of T, from the bits of its amax. bias 0x1fffff: rounded up, as by e8m0_from_amax; bias 0: the exponent
// of amax less that of the largest code, at least 0. The integer rule holds for every bf16 and fp16 amax, but not for an fp32 one whose
// scale is subnormal.
template <class E, class T>
OPFUSE_FN u32 e8m0_of_block(u32 amax, u32 bias) {
    static_assert(E::MAX == 448.0f || E::MAX == 57344.0f, "maximum 1.75 * 2^n");
    constexpr u32 EXPONENT = E::MAX == 448.0f ? 8 : 15;
    if (amax >= INF_BITS) return E8M0_NAN;
    if (sizeof(T) == 4 && bias) return e8m0_from_amax<E>(float_of(amax));
    return larger((amax + bias) >> 23, EXPONENT) - EXPONENT;
}

// ----------------------------------------------------------------------------------------------------------------- fp32 scales

// Encode scale largest / max(amax, eps): 1 where amax is 0, inf or NaN, inf_value where the quotient overflows.
OPFUSE_FN float scale_from_amax(float amax, float largest, float eps, float inf_value) {
    float safe = amax < eps ? eps : amax;
    if (safe == 0.0f || !is_finite(safe)) return 1.0f;
    float scale = largest / safe;
    return is_finite(scale) ? scale : inf_value;
}

// pow2_floor(scale_from_amax(...)) without a division: the exponent of a quotient is the difference of the exponents, less one if the
// divisor has the larger mantissa. largest >= 4, so that no quotient is subnormal.
OPFUSE_FN float pow2_scale_from_amax(float amax, float largest, float eps, float inf_value) {
    u32 safe = bits_of(amax < eps ? eps : amax);
    u32 exponent = 127 + (bits_of(largest) >> 23) - ((safe + (~bits_of(largest) & 0x7fffff)) >> 23);
    u32 scale = exponent > 254 ? bits_of(pow2_floor(inf_value)) : exponent << 23;
    return float_of(safe - 1 >= INF_BITS - 1 ? bits_of(1.0f) : scale);  // 0 wraps around
}

// 1 / scale; NaN if amax is not finite, which the encode scale, then 1, must not hide.
OPFUSE_FN float decode_scale(float scale, float amax) { return is_finite(amax) ? 1.0f / scale : float_of(NAN_BITS); }

// The encode scale of a block, by which values are multiplied: that of scale_from_amax, rounded down to a power of two if `pow2`.
template <class E>
OPFUSE_FN float block_scale(float amax, float eps, float inf_value, u32 pow2) {
    return pow2 ? pow2_scale_from_amax(amax, E::MAX, eps, inf_value) : scale_from_amax(amax, E::MAX, eps, inf_value);
}

// The decode scale of a block with a finite encode scale: decode_scale(scale, amax), without a division for a power of two.
OPFUSE_FN float block_decode_scale(float scale, float amax, u32 pow2) {
    if (!pow2) return decode_scale(scale, amax);
    u32 inverse = larger((254u << 23) - bits_of(scale), 0x00400000);  // that of 2^127 is subnormal
    return is_finite(amax) ? float_of(inverse) : float_of(NAN_BITS);
}

// --------------------------------------------------------------------------------------------------------------- NVFP4 scales

// First level: encode_max 6 / amax, 1 unless that is a positive finite number.
OPFUSE_FN float nvfp4_global_scale(float amax, float encode_max) {
    float scale = encode_max * E2M1::MAX / amax;
    return is_finite(scale) && scale != 0.0f ? scale : 1.0f;
}

// Second level: the E4M3 byte of block_amax (global_scale fl32(1/6)), NaN where block_amax is not finite.
OPFUSE_FN u32 nvfp4_block_scale(float block_amax, float global_scale) {
    constexpr float SIXTH = 1.0f / E2M1::MAX;
    return is_finite(block_amax) ? encode<E4M3>(block_amax * (global_scale * SIXTH)) : E4M3_NAN;
}

// min(1 / (block_scale (1 / global_scale)), LARGEST_FLOAT), what a cast multiplies by; NaN for a NaN byte.
OPFUSE_FN float nvfp4_multiplier(u32 block_scale, float global_scale) {
    float reciprocal = 1.0f / (decode<E4M3>(block_scale) * (1.0f / global_scale));
    return reciprocal > LARGEST_FLOAT ? LARGEST_FLOAT : reciprocal;
}

// ---------------------------------------------------------------------------------------------------------------- random bits

struct Words4 {
    u32 word[4];
};

// All 64 bits of a product. From the plain expression the compiler makes a 64-bit product, and adds a 0 at every use.
OPFUSE_FN u64 wide_product(u32 a, u32 b) {
#if defined(__CUDA_ARCH__)
    u64 product;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
    return product;
#else
    return u64(a) * b;
#endif
}

// Philox4x32-10 (Salmon et al., SC 2011): four random words for a counter, under a 64-bit key.
OPFUSE_FN Words4 philox(Words4 counter, u64 key) {
    u32 c0 = counter.word[0], c1 = counter.word[1], c2 = counter.word[2], c3 = counter.word[3];
    u32 k0 = u32(key), k1 = u32(key >> 32);
    for (int round = 0; round < 10; ++round) {
        u64 p0 = wide_product(0xd2511f53, c0), p1 = wide_product(0xcd9e8d57, c2);
        c0 = u32(p1 >> 32) ^ c1 ^ k0, c1 = u32(p1);
        c2 = u32(p0 >> 32) ^ c3 ^ k1, c3 = u32(p0);
        k0 += 0x9e3779b9, k1 += 0xbb67ae85;
    }
    return {{c0, c1, c2, c3}};
}

// Random bytes of elements 16 block ... 16 block + 15 of a plane (stream 0 rowwise, 1 columnwise): element i has byte i % 16.
OPFUSE_FN Words4 random_block(u64 seed, u64 block, u32 stream) { return philox({{u32(block), u32(block >> 32), stream, 0}}, seed); }

OPFUSE_FN u32 random_byte(const Words4& random, int element) { return random.word[element / 4 & 3] >> element % 4 * 8 & 0xff; }
