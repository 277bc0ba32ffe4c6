// vectors: eight neighbouring values at a time, as the 16 or 32 bytes of one or two loads: magnitudes, casts to FP8, stores.
//
// Addresses   `at` counts elements from the start of an array, in 64 bits. ALIGNED: addresses are multiples of 16 bytes (of 8 for
//             eight codes). Without it, and at ends of arrays, elements are moved one by one, and missing ones are 0.
// Rounding    that of common.cuh; the conversion instructions of sm_89 and newer do the same.
// Hints       none: loads marked no_allocate, evict_first or streaming cost 7 to 10 % on Hopper.
// Compiled    with ALIGNED
#pragma once
#include "common.cuh"

// N neighbouring values as they lie in memory.
template <class T, int N>
struct Pack {
    static constexpr int WORDS = (N * sizeof(T) + 3) / 4;
    u32 word[WORDS];
};
template <class T>
using Eight = Pack<T, 8>;

// Element i as fp32.
template <int N>
OPFUSE_FN float value(const Pack<float, N>& v, int i) { return float_of(v.word[i]); }
template <int N>
OPFUSE_FN float value(const Pack<bf16, N>& v, int i) { return float_of(i & 1 ? v.word[i / 2] & 0xffff0000 : v.word[i / 2] << 16); }
template <int N>
OPFUSE_FN float value(const Pack<fp16, N>& v, int i) { return to_fp32(fp16{u16(i & 1 ? v.word[i / 2] >> 16 : v.word[i / 2])}); }
template <int N>
OPFUSE_FN float value(const Pack<u8, N>& v, int i) { return float(v.word[i / 4] >> i % 4 * 8 & 0xff); }

// Element i as it is.
template <class T>
OPFUSE_FN T element(const Eight<T>& v, int i) { return T{u16(v.word[i / 2] >> i % 2 * 16)}; }
template <>
OPFUSE_FN float element(const Eight<float>& v, int i) { return float_of(v.word[i]); }
template <>
OPFUSE_FN u8 element(const Eight<u8>& v, int i) { return u8(v.word[i / 4] >> i % 4 * 8); }

// Whether element i of a pack is there, if the first `count` are; none are if that is not positive.
template <class Count>
OPFUSE_FN bool is_there(int i, Count count) { return ALIGNED ? count > 0 : i < count; }

// --------------------------------------------------------------------------------------------------------------- loads, stores

template <class T>
OPFUSE_FN Eight<T> load_eight(const T* x) {
    Eight<T> v;
#pragma unroll
    for (int k = 0; k < Eight<T>::WORDS / 4; ++k) {
        uint4 four = reinterpret_cast<const uint4*>(x)[k];
        v.word[4 * k] = four.x, v.word[4 * k + 1] = four.y, v.word[4 * k + 2] = four.z, v.word[4 * k + 3] = four.w;
    }
    return v;
}

OPFUSE_FN u32 bits_in_word(float x, int) { return bits_of(x); }
template <class T>
OPFUSE_FN u32 bits_in_word(T x, int i) { return u32(x.bits) << 16 * (i & 1); }

// The first `count` of eight elements, count <= 0 included.
template <class T>
OPFUSE_FN Eight<T> load_some(const T* x, long long count) {
    Eight<T> v = {};
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (i < count) v.word[i * sizeof(T) / 4] |= bits_in_word(x[i], i);
    return v;
}

// Stores 16 bytes at a multiple of 16, in one instruction; an assignment becomes four if the compiler cannot see the alignment.
OPFUSE_FN void store_words(void* to, uint4 words) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" : : "l"(to), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w) : "memory");
}

OPFUSE_FN int at_most(long long x, int most) { return x < most ? int(x) : most; }

// A number, or a pointer to global memory, that is computed once; otherwise compilers compute it again under each condition.
OPFUSE_FN int found(int x) {
    asm("" : "+r"(x));
    return x;
}
template <class T>
OPFUSE_FN T* found(T* x) {
    T* y;
    asm("mov.b64 %0, %1;" : "=l"(y) : "l"(x));
    __builtin_assume(__isGlobal(y));
    return y;
}

OPFUSE_FN void store_eight(u8* q, uint2 codes) { *reinterpret_cast<uint2*>(q) = codes; }

template <class T>
OPFUSE_FN void store_eight(T* x, const Eight<T>& v) {
#pragma unroll
    for (int k = 0; k < v.WORDS; k += 4)
        reinterpret_cast<uint4*>(x)[k / 4] = make_uint4(v.word[k], v.word[k + 1], v.word[k + 2], v.word[k + 3]);
}

OPFUSE_FN void store_some(u8* q, uint2 codes, long long count) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (i < count) q[i] = u8((i < 4 ? codes.x : codes.y) >> i % 4 * 8);
}

OPFUSE_FN void store_some(u8* q, uint4 codes, long long count) {
    store_some(q, make_uint2(codes.x, codes.y), count);
    store_some(q + 8, make_uint2(codes.z, codes.w), count - 8);
}

// The block's number, counted from the end of the grid: a cast that follows a pass for the amax begins with what that pass read
// last, which is still in the cache.
OPFUSE_FN u32 block_from_end() { return gridDim.x - 1 - blockIdx.x; }

// ------------------------------------------------------------------------------------------------------------------ magnitudes

// A running maximum of magnitudes: fp32 bits, or two 16-bit maxima in one word.
OPFUSE_FN u32 larger_magnitude(u32 best, const Eight<float>& v) {
#pragma unroll
    for (int i = 0; i < 8; ++i) best = larger(best, v.word[i] & MAGNITUDE);
    return best;
}
template <class T>
OPFUSE_FN u32 larger_magnitude(u32 best, const Eight<T>& v) {
#pragma unroll
    for (int i = 0; i < 4; ++i) best = larger_magnitudes(best, v.word[i]);
    return best;
}

// The fp32 bits of a running maximum.
template <class T>
OPFUSE_FN u32 magnitude_bits(u32 best) {
    return bits_of(to_fp32(T{u16(larger(best & 0xffff, best >> 16))}));
}
template <>
OPFUSE_FN u32 magnitude_bits<float>(u32 best) { return best; }

OPFUSE_FN u32 larger_of_both(u32 a, u32 b, float) { return larger(a, b); }
template <class T>
OPFUSE_FN u32 larger_of_both(u32 a, u32 b, T) { return __vmaxu2(a, b); }

// The largest magnitudes of N groups of values, those of two groups in one word where values have 16 bits.
template <class T, int N>
struct Maxima {
    static constexpr int WORDS = N * sizeof(T) / 4;
    u32 word[WORDS];

    // Maxima of this lane and of the one whose number differs from its own in the bits of `mask`.
    OPFUSE_FN void across(int mask) {
#pragma unroll
        for (int k = 0; k < WORDS; ++k) word[k] = larger_of_both(word[k], __shfl_xor_sync(~0u, word[k], mask), T{});
    }

    // Maxima of these and of others.
    OPFUSE_FN void raise(const Maxima& others) {
#pragma unroll
        for (int k = 0; k < WORDS; ++k) word[k] = larger_of_both(word[k], others.word[k], T{});
    }

    // The fp32 bits of group i.
    OPFUSE_FN u32 bits(int i) const {
        if constexpr (sizeof(T) == 4)
            return word[i];
        else
            return bits_of(to_fp32(T{u16(i & 1 ? word[i / 2] >> 16 : word[i / 2])}));
    }
};

// The maxima of N groups of eight neighbours.
template <class T, int N>
OPFUSE_FN Maxima<T, N> maxima_along(const Eight<T> (&v)[N]) {
    Maxima<T, N> m;
#pragma unroll
    for (int k = 0; k < Maxima<T, N>::WORDS; ++k) {
        if constexpr (sizeof(T) == 4) {
            m.word[k] = larger_magnitude(0, v[k]);
        } else {
            u32 even = larger_magnitude(0, v[2 * k]), odd = larger_magnitude(0, v[2 * k + 1]);
            m.word[k] = __vmaxu2(__byte_perm(even, odd, 0x5410), __byte_perm(even, odd, 0x7632));
        }
    }
    return m;
}

// The maxima of eight groups: group i has element i of every v.
template <class T, int N>
OPFUSE_FN Maxima<T, 8> maxima_down(const Eight<T> (&v)[N]) {
    Maxima<T, 8> m = {};
    constexpr u32 MAGNITUDES = sizeof(T) == 4 ? MAGNITUDE : 0x7fff7fff;
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
        for (int k = 0; k < Maxima<T, 8>::WORDS; ++k) m.word[k] = larger_of_both(m.word[k], v[i].word[k] & MAGNITUDES, T{});
    return m;
}

// Raises *amax to `bits`. It is read first, which is cheaper than an atomic, since most threads find a larger number there.
OPFUSE_FN void raise(float* amax, u32 bits) {
    u32 known;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(known) : "l"(amax) : "memory");
    if (bits > known) atomicMax(reinterpret_cast<u32*>(amax), bits);
}

// Two steps with a barrier between them: leave_amax stores the largest `bits` of each warp, raise_left raises *amax to the largest.
OPFUSE_FN void leave_amax(u32* of_warp, u32 bits) {
    bits = __reduce_max_sync(~0u, bits);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = bits;
}

template <int THREADS>
OPFUSE_FN void raise_left(float* amax, const u32* of_warp) {
    if (threadIdx.x >= 32) return;
    u32 bits = __reduce_max_sync(~0u, threadIdx.x < THREADS / 32 ? of_warp[threadIdx.x] : 0);
    if (threadIdx.x == 0) raise(amax, bits);
}

// Raises *amax to the largest `bits` of the block's threads, which all call it, once. Holds a barrier.
template <int THREADS>
OPFUSE_FN void raise_amax(float* amax, u32 bits) {
    __shared__ u32 of_warp[THREADS / 32];
    leave_amax(of_warp, bits);
    __syncthreads();
    raise_left<THREADS>(amax, of_warp);
}

// ----------------------------------------------------------------------------------------------------------------------- casts

// Two values as 16-bit floats, the first in the low half.
template <class T>
OPFUSE_FN u32 round_two(float low, float high);
template <>
OPFUSE_FN u32 round_two<bf16>(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
template <>
OPFUSE_FN u32 round_two<fp16>(float low, float high) {
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

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

// Codes of two values, the first in the low byte.
template <class E>
OPFUSE_FN u32 encode_two(float low, float high) {
#if __CUDA_ARCH__ >= 890
    u16 codes;
    if constexpr (E::MANTISSA_BITS == 3)
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    else
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
#else
    return encode<E>(low) | encode<E>(high) << 8;
#endif
}

// The values of two codes, as they lie in the low 16 bits.
template <class E>
OPFUSE_FN float2 decode_two(u32 codes) {
#if __CUDA_ARCH__ >= 890
    u32 halves;
    if constexpr (E::MANTISSA_BITS == 3)
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(u16(codes)));
    else
        asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(u16(codes)));
    return make_float2(to_fp32(fp16{u16(halves)}), to_fp32(fp16{u16(halves >> 16)}));
#else
    return make_float2(decode<E>(codes & 0xff), decode<E>(codes >> 8 & 0xff));
#endif
}

// Codes of value i times scale(i).
template <class E, class T, class Scale>
OPFUSE_FN uint2 encode_eight(const Eight<T>& v, Scale scale) {
    static_assert(E::BITS == 8, "one code a byte");
    u32 two[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) two[k] = encode_two<E>(value(v, 2 * k) * scale(2 * k), value(v, 2 * k + 1) * scale(2 * k + 1));
    return make_uint2(two[0] | two[1] << 16, two[2] | two[3] << 16);
}

// All ones in the byte of each of four 16-bit numbers, two in a word, whose highest bit is set; else zeros.
OPFUSE_FN u32 bytes_of_signs(u32 a, u32 b) {
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, 0xfdb9;" : "=r"(bytes) : "r"(a), "r"(b));
    return bytes;
}

// Added to two 16-bit magnitudes, it sets the sign's bits of those that are not finite; less one of each, of NaN alone.
template <class T>
constexpr u32 BEYOND_FINITE = 0;
template <>
constexpr u32 BEYOND_FINITE<bf16> = 0x00800080;
template <>
constexpr u32 BEYOND_FINITE<fp16> = 0x04000400;

// Four codes, but those of non-finite values, which are in two words, show them.
template <class E, class T>
OPFUSE_FN u32 show_nonfinite_of_four(u32 a, u32 b, u32 codes) {
    constexpr u32 ONES = 0x00010001, EACH = 0x01010101, MAGNITUDES = 0x7fff7fff;
    u32 large_a = (a & MAGNITUDES) + BEYOND_FINITE<T>, large_b = (b & MAGNITUDES) + BEYOND_FINITE<T>;
    u32 nonfinite = bytes_of_signs(large_a, large_b), shown = EACH * E::NAN_CODE;
    if constexpr (E::INF != 0) {
        u32 nan = bytes_of_signs(large_a - ONES, large_b - ONES);
        shown = (shown & nan) | ((EACH * E::INF | (bytes_of_signs(a, b) & EACH * E::SIGN)) & ~nan);
    }
    return (codes & ~nonfinite) | (shown & nonfinite);
}

// `codes`, but non-finite values have the codes that show them.
template <class E, class T>
OPFUSE_FN uint2 show_nonfinite(const Eight<T>& v, uint2 codes) {
    if constexpr (sizeof(T) == 2) {
        codes.x = show_nonfinite_of_four<E, T>(v.word[0], v.word[1], codes.x);
        codes.y = show_nonfinite_of_four<E, T>(v.word[2], v.word[3], codes.y);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            u32& word = i < 4 ? codes.x : codes.y;
            int shift = i % 4 * 8;
            if (!is_finite(value(v, i))) word = (word & ~(0xffu << shift)) | encode_nonfinite<E>(value(v, i)) << shift;
        }
    }
    return codes;
}

// -------------------------------------------------------------------------------------------------------------- transposition

// Four rows of four bytes to four columns.
OPFUSE_FN uint4 transpose_bytes(u32 a, u32 b, u32 c, u32 d) {
    u32 ab_low = __byte_perm(a, b, 0x5140), ab_high = __byte_perm(a, b, 0x7362);
    u32 cd_low = __byte_perm(c, d, 0x5140), cd_high = __byte_perm(c, d, 0x7362);
    return make_uint4(__byte_perm(ab_low, cd_low, 0x5410), __byte_perm(ab_low, cd_low, 0x7632),
                      __byte_perm(ab_high, cd_high, 0x5410), __byte_perm(ab_high, cd_high, 0x7632));
}
