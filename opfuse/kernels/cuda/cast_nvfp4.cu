// cast_nvfp4: E2M1 codes of a matrix, two to a byte, with an E4M3 scale for each 16 values of a line, by rows, by columns or both.
//
// x              [rows, columns] of IN, contiguous
// rowwise        codes [rows, columns / 2], or null; columnwise codes [columns, rows / 2], or null
// scales         [lines, blocks], padded to whole tiles of 128 x 4, which the host has set to 0; a row of scales has `quads` fours.
//                Compact: row by row; swizzled: see swizzle.cuh
// amax           fp32, the global amax of a plane: one for all lines or, if per_line, one for each
// encode_max     to which the largest scale of a block is mapped
// ROUNDING       how values are rounded: see nvfp4.cuh; STOCHASTIC takes random bytes from *seed
// ROTATED        columns are rotated, 16 rows at a time, by the Hadamard matrix with the rows in SIGNS negated; IN is bf16
// Non-finite     a block that holds one has a NaN scale, and the code of 6 for each value
// Grid           cast_rows: blocks of 256 threads, a warp for each ROWS x 512 elements, for rowwise alone;
//                cast_tile: a block of 256 for each 128 rows x 256 bytes; cast_square: one for each 128 x 128, where 16 x 16 values
//                share a scale, which is repeated in their lines, and the planes hold the same codes
// JOINED         as joined.cuh has it
// ALIGNED        x is on 16 bytes, columns % 16 == 0, and rows % 16 == 0 if there is columnwise; without it lines are of even
//                length, and rows % 16 == 0 if they are rotated
// Defined by     opfuse/numerics/casts.py, cast_nv.
#include "nvfp4.cuh"
#include "nvfp4_square.cuh"
#include "hadamard.cuh"

struct Parameters {
    const IN* x;
    Nvfp4 planes;
};
#include "joined.cuh"

constexpr int ROWS = 4;  // of a warp in cast_rows; a divisor of 32

// How many blocks share a multiprocessor, with enough registers for each.
template <class T>
constexpr int RESIDENT = CHOOSES ? 1 : 2;
template <>
constexpr int RESIDENT<bf16> = CHOOSES ? 1 : !ALIGNED ? 2 : MODE == NEAREST ? 4 : 3;

#if ENTRY_cast_rows
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT<IN>) cast_rows(const __grid_constant__ Launched launched) {
    Own part = own_part(launched, block_from_end());
    const Parameters& parameters = part.parameters;
    const Nvfp4& p = parameters.planes;
    u32 across = u32((p.columns + 32 * BLOCK - 1) / (32 * BLOCK)), warp = part.block * (THREADS / 32) + threadIdx.x / 32;
    long long row = (long long)(warp / across) * ROWS, column = ((long long)(warp % across) * 32 + threadIdx.x % 32) * BLOCK;
    if (row >= p.rows || column >= p.columns) return;
    int there = int(smaller_of(p.rows - row, ROWS));
    Sixteen v[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
        v[i] = load_sixteen(parameters.x + (row + i) * p.columns + column, i < there ? p.columns - column : 0);
    Level level = level_of(p, p.rowwise, row);
    Place place = place_of(p.rowwise, p.swizzled, row, p.columns, column);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        if (i >= there) return;
        if (i && p.per_line) level = level_of(p, p.rowwise, row + i);
        store_block(place, i, encode_block(p, v[i], level, (row + i) * p.columns + column, 0), p.columns - column);
    }
}
#endif

// ----------------------------------------------------------------------------------------------------------------------- tiles

// A tile has eight chunks of 16 rows of 256 bytes, one for each warp. In shared memory chunks begin so far apart that one column of
// all eight meets each bank once.
constexpr int CHUNKS = TILE_ROWS / BLOCK, ROW_WORDS = 64, CHUNK_WORDS = BLOCK * ROW_WORDS + 2 * sizeof(IN);
constexpr int TILE_COLUMNS = 4 * ROW_WORDS / sizeof(IN), ACROSS = TILE_COLUMNS / BLOCK, STEP = 32 / ACROSS, ITEMS = BLOCK / STEP;
constexpr int PAIRS = TILE_COLUMNS / 64;  // of columns, to a thread

// Stores 16 values of a row as its block number `across`.
OPFUSE_FN void store_shared(u32* row, int across, const Sixteen& v) {
    constexpr int WORDS = Eight<IN>::WORDS;
#pragma unroll
    for (int k = 0; k < 2 * WORDS; k += 4) {
        const u32* from = v.half[k / WORDS].word + k % WORDS;
        *reinterpret_cast<uint4*>(row + across * 2 * WORDS + k) = make_uint4(from[0], from[1], from[2], from[3]);
    }
}

// The values of two neighbouring columns of a chunk.
struct Columns {
    static constexpr int WORDS = sizeof(IN) / 2;
    u32 word[BLOCK][WORDS];
};

OPFUSE_FN Columns load_columns(const u32* chunk, int pair) {
    Columns c;
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) {
        const u32* from = chunk + i * ROW_WORDS + pair * Columns::WORDS;
        if constexpr (sizeof(IN) == 4) {
            uint2 two = *reinterpret_cast<const uint2*>(from);
            c.word[i][0] = two.x, c.word[i][1] = two.y;
        } else {
            c.word[i][0] = *from;
        }
    }
    return c;
}

// Column `side`, rotated: bf16 values times the Hadamard matrix and 1 / 4, in fp32, by stages of distance 1, 2, 4 and 8, rounded once.
OPFUSE_FN Sixteen rotated(const Columns& c, int side) {
    float v[BLOCK];
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) {
        float x = float_of(side ? c.word[i][0] & 0xffff0000 : c.word[i][0] << 16);
        v[i] = with_sign(x, i);
    }
    hadamard(v);
    Sixteen out;
#pragma unroll
    for (int i = 0; i < BLOCK; i += 2) out.half[i / 8].word[i % 8 / 2] = round_two<bf16>(v[i] * 0.25f, v[i + 1] * 0.25f);
    return out;
}

// One of the two columns.
OPFUSE_FN Sixteen column_of(const Columns& c, int side) {
    if constexpr (ROTATED) return rotated(c, side);
    Sixteen out;
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) {
        if constexpr (sizeof(IN) == 4)
            out.half[i / 8].word[i % 8] = c.word[i][side];
        else if (i % 2 == 0)
            out.half[i / 8].word[i % 8 / 2] = __byte_perm(c.word[i][0], c.word[i + 1][0], side ? 0x7632 : 0x5410);
    }
    return out;
}

#if ENTRY_cast_tile
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT<IN>) cast_tile(const __grid_constant__ Launched launched) {
    Own part = own_part(launched, block_from_end());
    const Parameters& parameters = part.parameters;
    const Nvfp4& p = parameters.planes;
    __shared__ __align__(16) u32 shared[CHUNKS * CHUNK_WORDS];
    u32 tiles_across = u32((p.columns + TILE_COLUMNS - 1) / TILE_COLUMNS), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 block = part.block;
    long long first_row = (long long)(block / tiles_across) * TILE_ROWS, first_column = (long long)(block % tiles_across) * TILE_COLUMNS;

    int across = lane % ACROSS, down = lane / ACROSS;
    long long row = first_row + warp * BLOCK + down, column = first_column + across * BLOCK;
    int there = int(smaller_of(p.rows - row, BLOCK));  // of the rows from `row` on
    Sixteen v[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        v[i] = load_sixteen(parameters.x + (row + i * STEP) * p.columns + column, i * STEP < there ? p.columns - column : 0);
    if (p.columnwise.codes)
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) store_shared(shared + warp * CHUNK_WORDS + (down + i * STEP) * ROW_WORDS, across, v[i]);
    if (p.rowwise.codes && column < p.columns && there > 0) {
        Level level = level_of(p, p.rowwise, row);
        Place place = place_of(p.rowwise, p.swizzled, row, p.columns, column);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (i * STEP >= there) break;
            if (i && p.per_line) level = level_of(p, p.rowwise, row + i * STEP);
            Encoded block = encode_block(p, v[i], level, (row + i * STEP) * p.columns + column, 0);
            store_block(place, i * STEP, block, p.columns - column);
        }
    }
    if (!p.columnwise.codes) return;
    __syncthreads();

    // Neighbouring lanes have neighbouring chunks, whose codes lie side by side.
    int chunk = lane % CHUNKS, pair = warp * (32 / CHUNKS) + lane / CHUNKS;
    row = first_row + chunk * BLOCK, column = first_column + pair * 2;
    if (row >= p.rows || column >= p.columns) return;
    Level level = level_of(p, p.columnwise, column);
    Place place = place_of(p.columnwise, p.swizzled, column, p.rows, row);
#pragma unroll
    for (int k = 0; k < PAIRS; ++k) {
        Columns c = load_columns(shared + chunk * CHUNK_WORDS, pair + k * 32);
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            if (column + side >= p.columns) return;
            if (p.per_line) level = level_of(p, p.columnwise, column + side);
            Encoded block = encode_block(p, column_of(c, side), level, (column + side) * p.rows + row, 1);
            store_block(place, side, block, p.rows - row);
        }
        place = ahead_64(place, p.swizzled), column += 64;
    }
}
#endif

// --------------------------------------------------------------------------------------------------------------------- squares

#if ENTRY_cast_square
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT<IN>) cast_square(const __grid_constant__ Launched launched) {
    Own part = own_part(launched, block_from_end());
    const Parameters& parameters = part.parameters;
    __shared__ __align__(16) u32 codes[SQUARE_WORDS];
    __shared__ __align__(8) u8 scales[CHUNKS][SQUARES];
    const Nvfp4& p = parameters.planes;
    Square own = this_square(p, part.block);
    int there = own.column < p.columns ? int(smaller_of(p.rows - own.row, BLOCK)) : 0;  // of the rows from the thread's first on
    Sixteen v[SQUARE_ROWS];
#pragma unroll
    for (int i = 0; i < SQUARE_ROWS; ++i)
        v[i] = load_sixteen(parameters.x + (own.row + i * 4) * p.columns + own.column, i * 4 < there ? p.columns - own.column : 0);
    Encoded block[SQUARE_ROWS];
    encode_square(p, own, v, block);
    Place place = place_of(p.rowwise, p.swizzled, own.row, p.columns, own.column);
#pragma unroll
    for (int i = 0; i < SQUARE_ROWS; ++i) {
        if (p.rowwise.codes && i * 4 < there) store_block(place, i * 4, block[i], p.columns - own.column);
        *reinterpret_cast<uint2*>(codes + square_slot(own.in_tile + i * 4, threadIdx.x % SQUARES * 2)) = block[i].codes;
    }
    if (!p.columnwise.codes) return;
    if (threadIdx.x % 32 < SQUARES) scales[threadIdx.x / 32][threadIdx.x % 32] = u8(block[0].scale);
    __syncthreads();
    store_transposed(p, own, codes);
    store_repeated(p, own, &scales[0][0]);
}
#endif
