// encode_blocks: FP8 codes of tiles with an fp32 scale for each block of 128, as in blocks.cuh.
//
// ROWS_ALIGNED   rows % 16 == 0, so that columns of the transpose start where vectors do
// GROUPED        groups of rows are cast apart, as in block_groups.cuh; `tile` then is where a tile's columns are stored
// HERE           if GROUPED: whether results are made row by row (ladder.py)
// Compiled       after chain.cuh, tile.cuh and encode.cuh, with IN, OUT, SQUARE and ALIGNED
#pragma once
#define APART GROUPED
#include "blocks.cuh"

struct Running {};

struct Held {
    Values v;
};

constexpr bool TOGETHER = false;
constexpr int STRAND_BYTES = 0, SHARED_BYTES = TILE_ROWS * TILE_COLUMNS;

OPFUSE_FN u32 own_block() { return blockIdx.x; }

OPFUSE_FN Running begin(const Encode&) { return {}; }

// Has the compiler make the results of a row where the row is, by a store that never happens: a matrix has rows. It else may keep what they
// are made of until they are cast, which takes more registers.
OPFUSE_FN void make_here([[maybe_unused]] const Encode& p, [[maybe_unused]] const Eight<IN>& v) {
#if GROUPED && HERE
    if (p.blocks.rows < 0) store_eight(reinterpret_cast<IN*>(p.blocks.rowwise), v);
#endif
}

// Zeros are stored behind the rows of a group.
OPFUSE_FN void take(const Encode& p, const Tile&, const Thread& at, int i, const Eight<IN>& v, Held& held, u8*, Running&) {
    make_here(p, v);
    held.v[i] = GROUPED && at.place(down_of(i)).count <= 0 ? Eight<IN>{} : v;
}

// Rows there always are; the condition keeps the compiler from moving parts of a cast among the rows of the chain, which need the registers.
#if GROUPED
OPFUSE_FN void prepare(const Encode& p, const Tile& stored, const Thread&, const Held& held, u8* shared) {
    Blocks own = p.blocks;
    Tile tile = tile_of_group(own, p.tiles[stored.row / TILE_ROWS], stored);
    if (p.blocks.rows > 0) cast_tile(own, tile, held.v, reinterpret_cast<u32*>(shared));
}

OPFUSE_FN void store_prepared(const Encode& p, const Tile& stored, u8* shared) {
    const Blocks& to = p.blocks;
    if constexpr (COLUMNWISE) store_columns<true>(to.columnwise, reinterpret_cast<u32*>(shared), stored, (long long)p.down * TILE_ROWS, to.columns);
}
#else
OPFUSE_FN void prepare(const Encode& p, const Tile& tile, const Thread&, const Held& held, u8* shared) {
    if (p.rows > 0) cast_tile(p, tile, held.v, reinterpret_cast<u32*>(shared));
}

OPFUSE_FN void store_prepared(const Encode& p, const Tile& tile, u8* shared) {
    if constexpr (COLUMNWISE) store_columns<ROWS_ALIGNED>(p.columnwise, reinterpret_cast<u32*>(shared), tile, p.rows, p.columns);
}
#endif

OPFUSE_FN void leave(const Running&, u8*) {}

OPFUSE_FN void finish(const Encode&, const Running&, const u8*) {}
