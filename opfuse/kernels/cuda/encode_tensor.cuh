// encode_tensor: FP8 codes of tiles under one scale, by rows, by columns or both; records the amax if the scale is given.
//
// rowwise        [rows, columns] codes of OUT, if ROWWISE; columnwise: those of the transpose, if COLUMNWISE
// scale          one for all values; RECORD as in tensor_scale.cuh
// ROWS_ALIGNED   rows % 16 == 0, so that columns of the transpose start where vectors do
// Compiled       after chain.cuh, tile.cuh and encode.cuh, with IN, OUT and ALIGNED
#pragma once

// What a thread remembers of the values that it has cast so far.
struct Running {
    float scale;
    u32 best;
};

// How many rows of a strand are searched for nonfinite values at once; four are also transposed at once. With several strands, or beside
// sums, values of four rows would take too many registers.
constexpr int LOOKED_AT = STRANDS > 1 || ROW_SUMS > 0 ? 1 : 4;

struct Held {
    Eight<IN> v[LOOKED_AT];
    uint2 codes[4];
};

constexpr bool TOGETHER = true;
constexpr int STRAND_BYTES = TILE_ROWS * TILE_COLUMNS, AMAX_AT = STRANDS * STRAND_BYTES, SHARED_BYTES = AMAX_AT + TILE_THREADS / 8;

// Whether a nonfinite value is in a running maximum.
OPFUSE_FN bool holds_nonfinite(u32 best) {
    if constexpr (sizeof(IN) == 4)
        return best >= INF_BITS;
    else
        return (best + BEYOND_FINITE<IN>) & 0x80008000;
}

OPFUSE_FN Running begin(const Encode& p) { return {encode_scale(p.scale, blockIdx.x), 0}; }

OPFUSE_FN void take(const Encode& p, const Tile& tile, const Thread& at, int i, const Eight<IN>& v, Held& held, u8* shared, Running& running) {
    held.v[i % LOOKED_AT] = v;
    held.codes[i % 4] = encode_eight<OUT>(v, [&](int) { return running.scale; });
    if constexpr (RECORD) running.best = larger_magnitude(running.best, v);
    if (RECORD && i % LOOKED_AT == LOOKED_AT - 1 && __any_sync(~0u, holds_nonfinite(running.best)))
#pragma unroll
        for (int k = 0; k < LOOKED_AT; ++k) {
            uint2& codes = held.codes[i % 4 / LOOKED_AT * LOOKED_AT + k];
            codes = show_nonfinite<OUT>(held.v[k], codes);
        }
    if (i % 4 != 3) return;
    if constexpr (ROWWISE) {
        RowCodes rows = codes_of_rows(p.rowwise, p.columns, at);
#pragma unroll
        for (int k = 0; k < 4; ++k) rows.store(i - 3 + k, held.codes[k]);
    }
    if constexpr (COLUMNWISE) transpose_into(reinterpret_cast<u32*>(shared), tile, held.codes, i / 4);
}

OPFUSE_FN void prepare(const Encode&, const Tile&, const Thread&, const Held&, u8*) {}

OPFUSE_FN void store_prepared(const Encode& p, const Tile& tile, u8* shared) {
    if constexpr (COLUMNWISE) store_columns<ROWS_ALIGNED>(p.columnwise, reinterpret_cast<u32*>(shared), tile, p.rows, p.columns);
}

OPFUSE_FN void leave(const Running& running, u8* shared) {
    if constexpr (RECORD) leave_amax(reinterpret_cast<u32*>(shared + AMAX_AT), magnitude_bits<IN>(running.best));
}

OPFUSE_FN void finish(const Encode& p, const Running& running, const u8* shared) {
    if constexpr (RECORD) raise_left<TILE_THREADS>(p.scale.amax, reinterpret_cast<const u32*>(shared + AMAX_AT));
}
