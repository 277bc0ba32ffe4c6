// encode_amax: for tiles that are not cast: does nothing or, if CAST == AMAX, finds the largest magnitude.
//
// Compiled       after chain.cuh, tile.cuh and encode.cuh, with IN
#pragma once

struct Running {
    u32 best;
};

struct Held {};

constexpr bool TOGETHER = true;
constexpr int STRAND_BYTES = 0, SHARED_BYTES = TILE_THREADS / 8;

OPFUSE_FN u32 own_block() { return blockIdx.x; }

OPFUSE_FN Running begin(const Encode&) { return {0}; }

OPFUSE_FN void take(const Encode&, const Tile&, const Thread&, int, const Eight<IN>& v, Held&, u8*, Running& running) {
    if constexpr (CAST == AMAX) running.best = larger_magnitude(running.best, v);
}

OPFUSE_FN void prepare(const Encode&, const Tile&, const Thread&, const Held&, u8*) {}

OPFUSE_FN void store_prepared(const Encode&, const Tile&, u8*) {}

OPFUSE_FN void leave(const Running& running, u8* shared) {
    if constexpr (CAST == AMAX) leave_amax(reinterpret_cast<u32*>(shared), magnitude_bits<IN>(running.best));
}

OPFUSE_FN void finish(const Encode& p, const Running&, const u8* shared) {
    if constexpr (CAST == AMAX) raise_left<TILE_THREADS>(p.amax, reinterpret_cast<const u32*>(shared));
}
