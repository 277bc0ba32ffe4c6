// dequantize_fp4: a matrix from the E2M1 codes and the scales of one plane, of NVFP4 or of MXFP4.
//
// plane          see fp4_plane.cuh; without an amax, amax * unit is 1. Lines are rows of out for decode_rows, columns for decode_columns
// out            [rows, columns] of OUT, on 16 bytes
// PER_SCALE      16: scales of E4M3 under a global amax. 32: scales of E8M0, and no amax
// Arithmetic     fp32 (code * scale) * (amax * unit), or code * scale, then one conversion, where overflow gives inf
// ROTATED        before the conversion, each 16 values of a column are rotated back: times the Hadamard matrix and 1 / 4, then negated in
//                the rows whose bit in SIGNS is set; rows % 16 == 0
// Grid           decode_rows: blocks of 256 threads, a warp for each ROWS x 256 elements; decode_columns: a block of 256 for each
//                128 rows x 256 bytes
// JOINED         as joined.cuh has it
// ALIGNED        columns % 8 == 0, and codes on 4 bytes, for decode_rows; columns of whole 16 bytes, rows % 16 == 0, and codes on 8
//                bytes for decode_columns; without it lines are of even length
// Defined by     opfuse/numerics/dequantize.py.
#include "fp4_plane.cuh"
#include "hadamard.cuh"

struct Coded {
    const u8 *codes, *scales;
    const float* amax;
    long long quads;
};

struct Parameters {
    Coded plane;
    OUT* out;
    long long rows, columns;
    float unit;
    u32 swizzled, per_line, unused;
};
#include "joined.cuh"

// The plane, as the functions that find the places of codes and scales take it.
OPFUSE_FN Plane plane_of(const Parameters& p) {
    return {const_cast<u8*>(p.plane.codes), const_cast<u8*>(p.plane.scales), p.plane.amax, p.plane.quads};
}

constexpr int THREADS = 256, ROWS = 8, GROUP = 8;
static_assert(32 % ROWS == 0, "scales of a thread's rows lie at one distance");

// ---------------------------------------------------------------------------------------------------------------------- values

// Codes are read as fp16: with the three bits below the sign at the bottom of the exponent, the number is 2^-14 times the code's value.
// Products with scales 128 times too large are exact in fp16, and 2^-7 times too small; the level is 128 times too large in turn.
constexpr float SCALE_UP = 128.0f, LEVEL_UP = 128.0f;
constexpr bool MX = PER_SCALE == 32;

// A scale twice, as fp16. E8M0 has more exponents than that: there it is 1, and the scale is the level.
OPFUSE_FN u32 scale_halves(u32 code) {
    float scale = (MX ? 1.0f : decode_two<E4M3>(code).x) * SCALE_UP;
    return round_two<fp16>(scale, scale);
}

OPFUSE_FN float level_of(const Parameters& p, long long line) {
    return (p.plane.amax ? p.plane.amax[p.per_line ? line : 0] * p.unit : 1.0f) * LEVEL_UP;
}

OPFUSE_FN u32 product_of_halves(u32 a, u32 b) {
    u32 both;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
    return both;
}

// A product as fp32, under a level. Of MXFP4 the value of the code first, which is exact: times 128, a level could overflow.
OPFUSE_FN float under(u32 half, float level) {
    float product = to_fp32(fp16{u16(half)});
    return (MX ? product * LEVEL_UP : product) * level;
}

// The values of eight codes under a scale and a level.
OPFUSE_FN void decode_eight(u32 codes, u32 scale, float level, float* value) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 signs = codes << (12 - 4 * i) & 0x80008000, rest = i == 0 ? codes << 9 : i == 1 ? codes << 5 : i == 2 ? codes << 1 : codes >> 3;
        u32 both = product_of_halves(signs | (rest & 0x0e000e00), scale);
        value[i] = under(both, level), value[i + 4] = under(both >> 16, level);
    }
}

// ------------------------------------------------------------------------------------------------------------------------ rows

// The first `count` of eight codes.
OPFUSE_FN u32 load_codes(const u8* codes, long long count) {
    if constexpr (ALIGNED) return count > 0 ? *reinterpret_cast<const u32*>(codes) : 0;
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (2 * i < count) word |= u32(codes[i]) << 8 * i;
    return word;
}

template <class T>
OPFUSE_FN void store_values(T* out, const float (&value)[GROUP], long long count) {
    if constexpr (!ALIGNED) {
#pragma unroll
        for (int i = 0; i < GROUP; ++i)
            if (i < count) out[i] = from_fp32<T>(value[i]);
    } else if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int k = 0; k < GROUP; k += 4)
            store_words(out + k, make_uint4(bits_of(value[k]), bits_of(value[k + 1]), bits_of(value[k + 2]), bits_of(value[k + 3])));
    } else {
        u32 word[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) word[k] = round_two<T>(value[2 * k], value[2 * k + 1]);
        store_words(out, make_uint4(word[0], word[1], word[2], word[3]));
    }
}

#if ENTRY_decode_rows
extern "C" __global__ void __launch_bounds__(THREADS) decode_rows(const __grid_constant__ Launched launched) {
    Own own = own_part(launched);
    const Parameters& p = own.parameters;
    u32 across = u32((p.columns + 32 * GROUP - 1) / (32 * GROUP)), warp = own.block * (THREADS / 32) + threadIdx.x / 32;
    long long row = (long long)(warp / across) * ROWS, column = ((long long)(warp % across) * 32 + threadIdx.x % 32) * GROUP;
    long long count = p.columns - column;
    if (row >= p.rows || count <= 0) return;
    int there = p.rows - row < ROWS ? int(p.rows - row) : ROWS;
    Place place = place_of(plane_of(p), p.swizzled, row, p.columns, column);
    u32 codes[ROWS], scale[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        codes[i] = i < there ? load_codes(place.codes + i * place.next_codes, count) : 0;
        scale[i] = i < there ? place.scale[i * place.next_scale] : 0;
    }
    float level = level_of(p, row);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        if (i >= there) return;
        if constexpr (MX)
            level = decode_e8m0(scale[i]);
        else if (i && p.per_line)
            level = level_of(p, row + i);
        float value[GROUP];
        decode_eight(codes[i], scale_halves(scale[i]), level, value);
        store_values(p.out + (row + i) * p.columns + column, value, count);
    }
}
#endif

// --------------------------------------------------------------------------------------------------------------------- columns

// A tile has eight chunks of 16 rows of 256 bytes. In shared memory chunks begin so far apart that one column of all eight meets each
// bank once. A thread decodes 16 rows of two columns; neighbouring lanes have chunks below each other.
constexpr int CHUNKS = 8, TILE_ROWS = CHUNKS * BLOCK, ROW_WORDS = 64, CHUNK_WORDS = BLOCK * ROW_WORDS + 2 * sizeof(OUT);
constexpr int TILE_COLUMNS = 4 * ROW_WORDS / sizeof(OUT), PAIRS = TILE_COLUMNS * CHUNKS / 2 / THREADS, WORDS = sizeof(OUT) / 2;

struct Line {
    uint2 codes;
    u32 scale;
};

// Two neighbouring values of a row.
template <class T>
OPFUSE_FN void store_two(u32* to, float left, float right) {
    *to = round_two<T>(left, right);
}
template <>
OPFUSE_FN void store_two<float>(u32* to, float left, float right) {
    *reinterpret_cast<uint2*>(to) = make_uint2(bits_of(left), bits_of(right));
}

OPFUSE_FN Line load_line(const Place& place, int ahead, long long count) {
    if (count <= 0) return {};
    const u8* codes = place.codes + ahead * place.next_codes;
    u32 scale = place.scale[ahead * place.next_scale];
    if constexpr (ALIGNED)
        return {*reinterpret_cast<const uint2*>(codes), scale};
    else
        return {make_uint2(load_codes(codes, count), load_codes(codes + 4, count - 8)), scale};
}

OPFUSE_FN void decode_line(const Line& line, float level, float (&value)[BLOCK]) {
    if constexpr (MX) level = decode_e8m0(line.scale);
    u32 scale = scale_halves(line.scale);
    decode_eight(line.codes.x, scale, level, value);
    decode_eight(line.codes.y, scale, level, value + 8);
    if constexpr (ROTATED) {
        hadamard(value);
#pragma unroll
        for (int i = 0; i < BLOCK; ++i) value[i] = with_sign(value[i] * 0.25f, i);
    }
}

// How many blocks share a multiprocessor: one more hides the time of rotating back, if there are registers for it.
template <class T>
constexpr int RESIDENT = 4;
#if __CUDA_ARCH__ < 1200
template <>
constexpr int RESIDENT<bf16> = ROTATED && ALIGNED ? 5 : 4;
#endif

#if ENTRY_decode_columns
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT<OUT>) decode_columns(const __grid_constant__ Launched launched) {
    Own part = own_part(launched);
    const Parameters& p = part.parameters;
    __shared__ __align__(16) u32 shared[CHUNKS * CHUNK_WORDS];
    u32 tiles_across = u32((p.columns + TILE_COLUMNS - 1) / TILE_COLUMNS), chunk = threadIdx.x % CHUNKS, pair = threadIdx.x / CHUNKS;
    long long first_row = (long long)(part.block / tiles_across) * TILE_ROWS, first_column = (long long)(part.block % tiles_across) * TILE_COLUMNS;
    long long row = first_row + chunk * BLOCK, column = first_column + pair * 2, count = p.rows - row;
    Line line[PAIRS][2];
#pragma unroll
    for (int k = 0; k < PAIRS; ++k) {
        long long own = column + k * (TILE_COLUMNS / PAIRS);
        Place place = place_of(plane_of(p), p.swizzled, own, p.rows, row);
#pragma unroll
        for (int side = 0; side < 2; ++side) line[k][side] = load_line(place, side, own + side < p.columns ? count : 0);
    }
    float level = level_of(p, 0);
#pragma unroll
    for (int k = 0; k < PAIRS; ++k) {
        float value[2][BLOCK];
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            long long own = column + k * (TILE_COLUMNS / PAIRS) + side;
            if (p.per_line && own < p.columns) level = level_of(p, own);
            decode_line(line[k][side], level, value[side]);
        }
        u32* to = shared + chunk * CHUNK_WORDS + (pair + k * (TILE_COLUMNS / PAIRS / 2)) * WORDS;
#pragma unroll
        for (int i = 0; i < BLOCK; ++i) store_two<OUT>(to + i * ROW_WORDS, value[0][i], value[1][i]);
    }
    __syncthreads();
    constexpr int EACH = 16 / sizeof(OUT), ACROSS = TILE_COLUMNS / EACH;
    column = first_column + threadIdx.x % ACROSS * EACH;
#pragma unroll
    for (int y = threadIdx.x / ACROSS; y < TILE_ROWS; y += THREADS / ACROSS) {
        if (first_row + y >= p.rows || column >= p.columns) return;
        const u32* from = shared + y / BLOCK * CHUNK_WORDS + y % BLOCK * ROW_WORDS + threadIdx.x % ACROSS * 4;
        OUT* out = p.out + (first_row + y) * p.columns + column;
        if constexpr (ALIGNED) {
            store_words(out, *reinterpret_cast<const uint4*>(from));
        } else {
#pragma unroll
            for (int i = 0; i < EACH; ++i)
                if (i < p.columns - column) out[i] = reinterpret_cast<const OUT*>(from)[i];
        }
    }
}
#endif
