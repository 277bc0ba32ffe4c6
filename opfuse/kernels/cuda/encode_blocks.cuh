// encode_blocks: FP8 codes of tiles with an fp32 scale for each block of 128, as in blocks.cuh.
//
// ROWS_ALIGNED   rows % 16 == 0, so that columns of the transpose start where vectors do
// Compiled       after chain.cuh, tile.cuh and encode.cuh, with IN, OUT, SQUARE and ALIGNED
#pragma once
#include "blocks.cuh"

struct Running {};

struct Held {
    Values v;
};

constexpr bool TOGETHER = false;
constexpr int STRAND_BYTES = 0, SHARED_BYTES = TILE_ROWS * TILE_COLUMNS;

OPFUSE_FN u32 own_block() { return blockIdx.x; }

OPFUSE_FN Running begin(const Encode&) { return {}; }

OPFUSE_FN void take(const Encode&, const Tile&, const Thread&, int i, const Eight<IN>& v, Held& held, u8*, Running&) { held.v[i] = v; }

OPFUSE_FN void prepare(const Encode& p, const Tile& tile, const Thread&, const Held& held, u8* shared) {
    if (p.rows > 0)  // always so; the condition keeps the compiler from moving parts of a cast among the rows of the chain, which need the registers
        cast_tile(p, tile, held.v, reinterpret_cast<u32*>(shared));
}

OPFUSE_FN void store_prepared(const Encode& p, const Tile& tile, u8* shared) {
    if constexpr (COLUMNWISE) store_columns<ROWS_ALIGNED>(p.columnwise, reinterpret_cast<u32*>(shared), tile, p.rows, p.columns);
}

OPFUSE_FN void leave(const Running&, u8*) {}

OPFUSE_FN void finish(const Encode&, const Running&, const u8*) {}
