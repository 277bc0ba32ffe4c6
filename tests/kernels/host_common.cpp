// Every function of common.cuh over arrays, for a test to call: on the host, or (ON_DEVICE) in one thread an element on a GPU;
// and the walks over all of fp32 that are too long for numpy, on the host.
#include "common.cuh"

// A probe writes its expression of x = in[i] to out[i]. c holds `constants` floats, or a second operand as c[i]. Returns 0, or a
// CUDA error.
#define EACH(name, OUT, IN, expression)                                                    \
    OPFUSE_FN void name##_at(OUT* out, const IN* in, const float* c, long long i) {        \
        IN x = in[i];                                                                      \
        out[i] = static_cast<OUT>(expression);                                             \
        (void)c;                                                                           \
    }                                                                                      \
    PROBE(name, OUT, IN)

#ifdef ON_DEVICE
#define PROBE(name, OUT, IN)                                                               \
    __global__ void name##_kernel(OUT* out, const IN* in, const float* c, long long n) {   \
        long long i = blockIdx.x * 256LL + threadIdx.x;                                    \
        if (i < n) name##_at(out, in, c, i);                                               \
    }                                                                                      \
    extern "C" int name(OUT* out, const IN* in, const float* c, long long n, long long constants) { \
        return on_device(name##_kernel, out, in, c, n, constants);                         \
    }

template <class OUT, class IN>
static int on_device(void (*kernel)(OUT*, const IN*, const float*, long long), OUT* out, const IN* in, const float* c, long long n,
                     long long constants) {
    OUT* out_there = nullptr;
    IN* in_there = nullptr;
    float* c_there = nullptr;
    cudaMalloc(&out_there, n * sizeof(OUT));
    cudaMalloc(&in_there, n * sizeof(IN));
    cudaMalloc(&c_there, constants * sizeof(float));
    cudaMemcpy(in_there, in, n * sizeof(IN), cudaMemcpyHostToDevice);
    cudaMemcpy(c_there, c, constants * sizeof(float), cudaMemcpyHostToDevice);
    kernel<<<unsigned((n + 255) / 256), 256>>>(out_there, in_there, c_there, n);
    cudaMemcpy(out, out_there, n * sizeof(OUT), cudaMemcpyDeviceToHost);
    cudaFree(out_there);
    cudaFree(in_there);
    cudaFree(c_there);
    return cudaGetLastError();
}

extern "C" int devices() {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}
#else
#define PROBE(name, OUT, IN)                                                                             \
    extern "C" int name(OUT* out, const IN* in, const float* c, long long n, long long /*constants*/) {  \
        for (long long i = 0; i < n; ++i) name##_at(out, in, c, i);                                      \
        return 0;                                                                                        \
    }
#endif

EACH(encode_e4m3, u8, float, encode<E4M3>(x))
EACH(encode_e5m2, u8, float, encode<E5M2>(x))
EACH(encode_e2m1, u8, float, encode<E2M1>(x))
EACH(encode_bf16, u16, float, from_fp32<bf16>(x).bits)
EACH(encode_fp16, u16, float, from_fp32<fp16>(x).bits)
EACH(decode_e4m3, float, u8, decode<E4M3>(x))
EACH(decode_e5m2, float, u8, decode<E5M2>(x))
EACH(decode_e2m1, float, u8, decode<E2M1>(x))
EACH(decode_bf16, float, u16, to_fp32(bf16{x}))
EACH(decode_fp16, float, u16, to_fp32(fp16{x}))
EACH(encode_nonfinite_e4m3, u8, float, encode_nonfinite<E4M3>(x))
EACH(encode_nonfinite_e5m2, u8, float, encode_nonfinite<E5M2>(x))
EACH(encode_e2m1_stochastic, u8, float, encode_e2m1_stochastic(x, u32(c[0])))
EACH(pack_e2m1, u8, u16, pack_e2m1(x & 0xff, x >> 8))

EACH(encode_e8m0, u8, float, encode_e8m0(x))
EACH(decode_e8m0, float, u8, decode_e8m0(x))
EACH(e8m0_multiplier, float, u8, e8m0_multiplier(x))
EACH(e8m0_from_amax_e4m3, u8, float, e8m0_from_amax<E4M3>(x))
EACH(e8m0_from_amax_e5m2, u8, float, e8m0_from_amax<E5M2>(x))
EACH(e8m0_from_amax_e2m1, u8, float, e8m0_from_amax<E2M1>(x))
EACH(e8m0_of_block_e4m3_bf16, u8, u32, (e8m0_of_block<E4M3, bf16>(x, bits_of(c[0]))))
EACH(e8m0_of_block_e5m2_bf16, u8, u32, (e8m0_of_block<E5M2, bf16>(x, bits_of(c[0]))))
EACH(e8m0_of_block_e4m3_fp32, u8, u32, (e8m0_of_block<E4M3, float>(x, bits_of(c[0]))))
EACH(e8m0_of_block_e5m2_fp32, u8, u32, (e8m0_of_block<E5M2, float>(x, bits_of(c[0]))))

EACH(pow2_floor, float, float, pow2_floor(x))
EACH(scale_from_amax, float, float, scale_from_amax(x, c[0], c[1], c[2]))
EACH(pow2_scale_from_amax, float, float, pow2_scale_from_amax(x, c[0], c[1], c[2]))
EACH(decode_scale, float, float, decode_scale(x, c[i]))
EACH(block_scale_e4m3, float, float, block_scale<E4M3>(x, c[0], c[1], c[2] != 0.0f))
EACH(block_decode_scale_e4m3, float, float, block_decode_scale(block_scale<E4M3>(x, c[0], c[1], c[2] != 0.0f), x, c[2] != 0.0f))
EACH(block_scale_e5m2, float, float, block_scale<E5M2>(x, c[0], c[1], c[2] != 0.0f))
EACH(block_decode_scale_e5m2, float, float, block_decode_scale(block_scale<E5M2>(x, c[0], c[1], c[2] != 0.0f), x, c[2] != 0.0f))
EACH(nvfp4_global_scale, float, float, nvfp4_global_scale(x, c[0]))
EACH(nvfp4_block_scale, u8, float, nvfp4_block_scale(x, c[i]))
EACH(nvfp4_multiplier, float, u8, nvfp4_multiplier(x, c[i]))

EACH(magnitude_of, u32, float, magnitude_of(x))
EACH(is_finite, u8, float, is_finite(x))
EACH(larger_magnitudes, u32, u32, larger_magnitudes(bits_of(c[i]) & 0x7fff7fff, x))
EACH(multiply, float, float, x * c[i])
EACH(product_then_sum, float, float, x * c[0] + c[1])

EACH(philox_counter, Words4, Words4, philox(x, u64(bits_of(c[1])) << 32 | bits_of(c[0])))
EACH(random_byte, u8, u64, random_byte(random_block(u64(bits_of(c[1])) << 32 | bits_of(c[0]), x / 16, bits_of(c[2])), int(x % 16)))

// Of all fp32 values, how many encode to another code than the number of passing points at or below their magnitude.
template <class E>
static u64 count_wrong_codes(const u32* passing, long long points) {
    u64 wrong = 0;
    u32 code = 0;
    for (u64 bits = 0; bits <= MAGNITUDE; ++bits) {
        while (code < points && bits >= passing[code]) ++code;
        bool nan = bits > INF_BITS;
        u32 positive = nan ? E::NAN_CODE : code, negative = nan ? E::NAN_CODE : code | E::SIGN;
        wrong += encode<E>(float_of(u32(bits))) != positive;
        wrong += encode<E>(float_of(u32(bits) | 0x80000000)) != negative;
    }
    return wrong;
}

extern "C" u64 wrong_codes_e4m3(const u32* passing, long long points) { return count_wrong_codes<E4M3>(passing, points); }
extern "C" u64 wrong_codes_e5m2(const u32* passing, long long points) { return count_wrong_codes<E5M2>(passing, points); }
extern "C" u64 wrong_codes_e2m1(const u32* passing, long long points) { return count_wrong_codes<E2M1>(passing, points); }
extern "C" u64 wrong_codes_bf16(const u32* passing, long long points) { return count_wrong_codes<BF16>(passing, points); }
extern "C" u64 wrong_codes_fp16(const u32* passing, long long points) { return count_wrong_codes<FP16>(passing, points); }

// Of all fp32 values >= 0, how many get an E8M0 code that is not the least one whose power of two is not below them.
extern "C" u64 wrong_e8m0_codes() {
    double power[256] = {5.877471754111438e-39};
    for (int code = 1; code < 256; ++code) power[code] = 2 * power[code - 1];
    u64 wrong = 0;
    for (u64 bits = 0; bits <= INF_BITS; ++bits) {
        double value = float_of(u32(bits));
        u32 code = encode_e8m0(float_of(u32(bits)));
        bool least = code == 0 || (code <= 254 && power[code - 1] < value);
        wrong += !least || (code < 254 && power[code] < value);
    }
    for (u64 bits = INF_BITS + 1; bits <= MAGNITUDE; ++bits) wrong += encode_e8m0(float_of(u32(bits))) != E8M0_NAN;
    return wrong;
}
