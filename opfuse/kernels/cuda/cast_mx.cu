// cast_mx: FP8 codes of a matrix with one E8M0 scale for each 32 values of a row, of a column or both, from one read of it.
//
// x              [rows, columns] of IN, contiguous
// planes         their codes and scales, as in mx_tile.cuh
// SQUARE         one scale for each 32 x 32 values, repeated in its lines
// Non-finite     a block that holds one has the code 255, and NaN for each value
// Grid           cast_rows, for columns % 32 == 0 and not SQUARE: a block of 256 threads for each 8192 elements;
//                cast_tile: a block of TILE_THREADS for each TILE_ROWS x TILE_COLUMNS; ROWWISE and COLUMNWISE say which planes it stores
// JOINED         as joined.cuh has it
// RESIDENT       blocks of cast_tile that share a multiprocessor
// ALIGNED        x is on 16 bytes, and for cast_tile columns % 8 == 0; without it, anything goes
// Defined by     opfuse/numerics/casts.py, cast_mx.
#include "mx_tile.cuh"

struct Parameters {
    const IN* x;
    MxPlanes planes;
};
#include "joined.cuh"

constexpr int BLOCK = MX_BLOCK, THREADS = 256, PACKS = 4;

// A tile has DOWN x ACROSS warps of 32 x 64 values. Swizzled scales are stored as whole tiles of scales; compact ones are stored
// faster in long rows.
constexpr int DOWN = SWIZZLED ? 4 : 1, ACROSS = SWIZZLED ? 2 : 4;
constexpr int TILE_ROWS = 32 * DOWN, TILE_COLUMNS = 64 * ACROSS, TILE_THREADS = 32 * DOWN * ACROSS;
static_assert(!SWIZZLED || (TILE_ROWS == 128 && TILE_COLUMNS == 128), "the scales of a tile are one tile of scales");

// ------------------------------------------------------------------------------------------------------------------------ rows

// Four neighbouring lanes share a block of 32 values; a warp has eight blocks in each of its packs.
#if ENTRY_cast_rows
extern "C" __global__ void __launch_bounds__(THREADS) cast_rows(const __grid_constant__ Launched launched) {
    Own own = own_part(launched);
    const Parameters& parameters = own.parameters;
    const MxPlanes& p = parameters.planes;
    constexpr int STEP = 8 * 32;
    long long size = p.rows * p.columns, first = (long long)own.block * (8 * THREADS * PACKS);
    long long warp = first + threadIdx.x / 32 * (STEP * PACKS), lane = threadIdx.x % 32, at = warp + lane * 8;
    bool whole = ALIGNED && first + 8 * THREADS * PACKS <= size;
    Eight<IN> v[PACKS];
    if (whole) {
#pragma unroll
        for (int k = 0; k < PACKS; ++k) v[k] = load_eight(parameters.x + at + k * STEP);
    } else {
#pragma unroll
        for (int k = 0; k < PACKS; ++k) v[k] = load_some(parameters.x + at + k * STEP, size - at - k * STEP);
    }
    Maxima<IN, PACKS> amax = maxima_along(v);
    amax.across(1);
    amax.across(2);
    u32 codes = 0;
#pragma unroll
    for (int k = 0; k < PACKS; ++k) {
        u32 code = mx_code<IN>(amax.bits(k), p.bias);
        float multiplier = mx_multiplier(code);
        uint2 q = encode_eight<OUT>(v[k], [multiplier](int) { return multiplier; });
        codes |= code << 8 * k;
        if (whole)
            store_eight(p.rowwise + at + k * STEP, q);
        else
            store_some(p.rowwise + at + k * STEP, q, size - at - k * STEP);
    }
    // Each of the four lanes stores the scale of one pack.
    u32 mine = lane % 4, block = u32((warp + mine * STEP) / BLOCK + lane / 4), across = u32(p.columns / BLOCK);
    if ((long long)block * BLOCK < size) p.row_scale[row_scale_at(p.columns, block / across, block % across)] = u8(codes >> 8 * mine);
}
#endif

// ----------------------------------------------------------------------------------------------------------------------- tiles

// The values of a thread of a tile: of eight neighbouring columns, rows 4 (lane / 8) + 0 ... 3 of the warp's 32, and the same + 16.
struct Piece {
    int row, column;              // the first, in the tile
    long long tile_row, tile_column;
    OPFUSE_FN int own_row(int i) const { return row + i / 4 * 16 + i % 4; }
};

OPFUSE_FN Piece piece_of(u32 block, long long columns) {
    u32 tiles_across = u32((columns + TILE_COLUMNS - 1) / TILE_COLUMNS), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    return {int(warp / ACROSS * 32 + lane / 8 * 4), int(warp % ACROSS * 64 + lane % 8 * 8),
            (long long)(block / tiles_across) * TILE_ROWS, (long long)(block % tiles_across) * TILE_COLUMNS};
}

// The codes of the scales of a thread's values, for its rows or for its columns.
struct Codes {
    u32 of[8];
};

OPFUSE_FN Codes codes_along(const Eight<IN> (&v)[8], u32 bias) {
    Maxima<IN, 8> amax = maxima_along(v);
    amax.across(1);
    amax.across(2);
    Codes codes;
#pragma unroll
    for (int i = 0; i < 8; ++i) codes.of[i] = mx_code<IN>(amax.bits(i), bias);
    return codes;
}

OPFUSE_FN Codes codes_down(const Eight<IN> (&v)[8], u32 bias) {
    Maxima<IN, 8> amax = maxima_down(v);
    amax.across(8);
    amax.across(16);
    Codes codes;
    if constexpr (SQUARE) {
        u32 largest = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) largest = larger(largest, amax.bits(j));
        largest = larger(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = larger(largest, __shfl_xor_sync(~0u, largest, 2));
#pragma unroll
        for (int j = 0; j < 8; ++j) codes.of[j] = mx_code<IN>(largest, bias);
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) codes.of[j] = mx_code<IN>(amax.bits(j), bias);
    }
    return codes;
}

// Lines of a square past the matrix have no scale.
OPFUSE_FN Codes within(Codes codes, const bool (&there)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (SQUARE && !there[i]) codes.of[i] = 0;
    return codes;
}

#if ENTRY_cast_tile
extern "C" __global__ void __launch_bounds__(TILE_THREADS, RESIDENT) cast_tile(const __grid_constant__ Launched launched) {
    Own part = own_part(launched);
    const Parameters& parameters = part.parameters;
    const MxPlanes& p = parameters.planes;
    __shared__ __align__(4) u8 row_codes[TILE_ROWS * TILE_COLUMNS / BLOCK], column_codes[TILE_COLUMNS * 4];
    Piece own = piece_of(part.block, p.columns);
    long long column = own.tile_column + own.column, there = p.columns - column;
    Eight<IN> v[8];
    bool has_row[8], has_column[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        long long row = own.tile_row + own.own_row(i);
        const IN* x = parameters.x + row * p.columns + column;
        has_row[i] = row < p.rows, has_column[i] = i < there;
        if constexpr (ALIGNED)
            v[i] = has_row[i] && there > 0 ? load_eight(x) : Eight<IN>{};
        else
            v[i] = load_some(x, has_row[i] ? there : 0);
    }

    Codes down = COLUMNWISE || SQUARE ? codes_down(v, p.bias) : Codes{};
    Codes along = SQUARE ? down : ROWWISE ? codes_along(v, p.bias) : Codes{};
    if (ROWWISE)
        gather_row_codes<TILE_COLUMNS / BLOCK>(
            row_codes, own.column / BLOCK, within(along, has_row).of, [&](int step) { return own.own_row(4 * step); },
            [](int) { return true; });
    if (COLUMNWISE && threadIdx.x % 32 < 8) {
        Codes c = within(down, has_column);
        store_column_codes(p, c.of, column, (own.tile_row + own.row) / BLOCK, column_codes, own.column, own.row / BLOCK);
    }

#pragma unroll
    for (int i = 0; i < 8; ++i) {
        long long out = (own.tile_row + own.own_row(i)) * p.columns + column, count = has_row[i] ? there : 0;
        auto store = [count](u8* q, uint2 codes) {
            if constexpr (!ALIGNED)
                store_some(q, codes, count);
            else if (count > 0)
                store_eight(q, codes);
        };
        if (ROWWISE) store(p.rowwise + out, encode_eight<OUT>(v[i], [&](int) { return mx_multiplier(along.of[i]); }));
        if (COLUMNWISE) store(p.columnwise + out, encode_eight<OUT>(v[i], [&](int j) { return mx_multiplier(down.of[j]); }));
    }

    if (!ROWWISE && !SWIZZLED) return;
    __syncthreads();
    long long tile_down = own.tile_row / 128, tile_across = own.tile_column / 128;
    ScaleTiles tiles = {part.block, tile_across * (padded_lines(p.rows) / 128) + tile_down};
    store_scales<TILE_ROWS, TILE_COLUMNS, TILE_THREADS>(p, own.tile_row, own.tile_column, tiles, row_codes, column_codes);
}
#endif
