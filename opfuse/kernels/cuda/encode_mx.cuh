// encode_mx: FP8 codes of tiles with an E8M0 scale for each 32 values of a row, of a column or both, in the planes of mx_tile.cuh.
//
// Warps       with 16 rows exchange the maxima of columns with the warps that have the other 16 rows of a block of scales
// Compiled    after chain.cuh, tile.cuh and encode.cuh, with IN, OUT and ALIGNED
#pragma once

struct Running {};

struct Held {
    Values v;
};

constexpr bool TOGETHER = true;
constexpr int BLOCKS_ACROSS = TILE_COLUMNS / MX_BLOCK, WARPS = TILE_THREADS / 32, ROW_CODES = TILE_ROWS * BLOCKS_ACROSS;
constexpr int COLUMN_WORDS = 8 * 2 * sizeof(IN), EXCHANGE = TILE_STEPS == 1 ? WARPS * COLUMN_WORDS * 4 : 0;
constexpr int STRAND_BYTES = EXCHANGE + ROW_CODES + TILE_COLUMNS * 4, SHARED_BYTES = STRANDS * STRAND_BYTES;
static_assert(SWIZZLED || TILE_ROWS * BLOCKS_ACROSS / 4 <= TILE_THREADS, "a word of scales for each thread");
static_assert(TILE_STEPS <= 2 && (!SWIZZLED || (TILE_ROWS == 128 && TILE_COLUMNS == 128)), "tiles that scales can be found in");

OPFUSE_FN u32 own_block() { return blockIdx.x; }

OPFUSE_FN Running begin(const Encode&) { return {}; }

// The largest magnitudes of columns in a block of 32 rows, of which a warp has all or half. All lanes of a column get them.
OPFUSE_FN Maxima<IN, 8> maxima_of_blocks(const Values& v, u32* exchange) {
    Maxima<IN, 8> down = maxima_down(v);
    down.across(8), down.across(16);
    if constexpr (TILE_STEPS == 1) {
        constexpr int WORDS = Maxima<IN, 8>::WORDS;
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32, other = warp ^ WARPS_ACROSS;
        uint4* own = reinterpret_cast<uint4*>(exchange + warp * COLUMN_WORDS + lane * WORDS);
        if (lane < 8)
#pragma unroll
            for (int k = 0; k < WORDS / 4; ++k)
                own[k] = make_uint4(down.word[4 * k], down.word[4 * k + 1], down.word[4 * k + 2], down.word[4 * k + 3]);
        int pair = warp / (2 * WARPS_ACROSS) * WARPS_ACROSS + warp % WARPS_ACROSS;
        asm volatile("bar.sync %0, 64;" ::"r"(pair + 1) : "memory");
        const uint4* others = reinterpret_cast<const uint4*>(exchange + other * COLUMN_WORDS + lane % 8 * WORDS);
        Maxima<IN, 8> theirs;
#pragma unroll
        for (int k = 0; k < WORDS / 4; ++k) {
            uint4 four = others[k];
            theirs.word[4 * k] = four.x, theirs.word[4 * k + 1] = four.y, theirs.word[4 * k + 2] = four.z, theirs.word[4 * k + 3] = four.w;
        }
#pragma unroll
        for (int k = 0; k < WORDS; ++k) down.word[k] = larger_of_both(down.word[k], theirs.word[k], IN{});
    }
    return down;
}

// Stores the scales' codes of eight columns, of which at.columns are in the matrix; lanes 0 ... 7 of the warps with a block's first
// rows do it.
OPFUSE_FN void store_columns_there(const Encode& p, const Tile& tile, const Thread& at, const u32 (&code)[8], u8* column_codes) {
    if (threadIdx.x % 32 >= 8 || tile.group % 8 != 0) return;
    u32 mine[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) mine[j] = at.rows > 0 && is_there(j, at.columns) ? code[j] : 0;
    long long column = tile.column + tile.across * 8, block = tile.row / MX_BLOCK + tile.group / 8;
    if (SWIZZLED || at.rows > 0) store_column_codes(p, mine, column, block, column_codes, tile.across * 8, tile.group / 8);
}

OPFUSE_FN void take(const Encode&, const Tile&, const Thread&, int i, const Eight<IN>& v, Held& held, u8*, Running&) { held.v[i] = v; }

OPFUSE_FN void prepare(const Encode& p, const Tile& tile, const Thread& at, const Held& held, u8* shared) {
    const Values& v = held.v;
    u32* exchange = reinterpret_cast<u32*>(shared);
    u8 *row_codes = shared + EXCHANGE, *column_codes = row_codes + ROW_CODES;
    // The conditions always hold if there is the plane; they keep the codes of both planes from taking registers at once.
    if (p.columnwise) {
        Maxima<IN, 8> down = maxima_of_blocks(v, exchange);
        u32 code[8];
        float multiplier[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) code[j] = mx_code<IN>(down.bits(j), p.bias), multiplier[j] = mx_multiplier(code[j]);
        store_columns_there(p, tile, at, code, column_codes);
        RowCodes rows = codes_of_rows(p.columnwise, p.columns, at);
#pragma unroll
        for (int i = 0; i < OWN_ROWS; ++i) rows.store(i, encode_eight<OUT>(v[i], [&](int j) { return multiplier[j]; }));
    }
    if (p.rowwise) {
        Maxima<IN, OWN_ROWS> along = maxima_along(v);
        along.across(1), along.across(2);
        RowCodes rows = codes_of_rows(p.rowwise, p.columns, at);
        u32 code[OWN_ROWS];
#pragma unroll
        for (int i = 0; i < OWN_ROWS; ++i) {
            code[i] = mx_code<IN>(along.bits(i), p.bias);
            float multiplier = mx_multiplier(code[i]);
            rows.store(i, encode_eight<OUT>(v[i], [&](int) { return multiplier; }));
        }
        bool has_block = tile.column + tile.across / 4 * MX_BLOCK < p.columns;
        gather_row_codes<BLOCKS_ACROSS>(
            row_codes, tile.across / 4, code, [&](int step) { return own_row(tile, step * 4); },
            [&](int step) { return has_block && step * 16 + int(threadIdx.x % 4) < at.rows; });
    }
}

OPFUSE_FN void store_prepared(const Encode& p, const Tile& tile, u8* shared) {
    long long down = tile.row / 128, across = tile.column / 128;
    ScaleTiles tiles = {down * (padded_blocks(p.columns) / 4) + across, across * (padded_lines(p.rows) / 128) + down};
    store_scales<TILE_ROWS, TILE_COLUMNS, TILE_THREADS>(p, tile.row, tile.column, tiles, shared + EXCHANGE, shared + EXCHANGE + ROW_CODES);
}

OPFUSE_FN void leave(const Running&, u8*) {}

OPFUSE_FN void finish(const Encode&, const Running&, const u8*) {}
