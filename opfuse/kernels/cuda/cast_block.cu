// cast_block: FP8 codes of a matrix with an fp32 scale for each block of 128, by rows, by columns or both, from one read of it.
//
// x              [rows, columns] of IN, contiguous
// rowwise        [rows, columns] codes of OUT, if ROWWISE
// columnwise     [columns, rows] codes, if COLUMNWISE
// SQUARE = 0     blocks are 128 neighbours in a row for rowwise, in a column for columnwise; row_scale is [blocks, rows] and
//                column_scale [blocks, columns]
// SQUARE = 1     blocks are 128 x 128, and the planes hold the same bytes; row_scale is [row blocks, column blocks], column_scale its
//                transpose
// Scales         decode scales: the inverses of those of scale_from_amax with eps and inf_value, rounded down to powers of two if POW2.
//                Rows of scales are row_pitch and column_pitch long, up to 3 longer than needed; the rest becomes 0
// Non-finite     a block that holds one is cast under the scale 1, and its stored scale is NaN
// Grid           a block of 256 threads for each 128 x 128 tile; at the edges, blocks with one scale are smaller
// JOINED         as joined.cuh has it
// ALIGNED        x is on 16 bytes, columns % 8 == 0, and rows % 16 == 0 if there is columnwise; without it, anything goes
// Defined by     opfuse/numerics/casts.py, cast_block.
constexpr int TILE_ROWS = 128, TILE_COLUMNS = 128, TILE_THREADS = 256;
#include "tile.cuh"
#include "blocks.cuh"
#include "tile_values.cuh"

struct Parameters {
    const IN* x;
    Blocks blocks;
};

OPFUSE_FN void cast_block_of(const Parameters& parameters, u32 block) {
    const Blocks& p = parameters.blocks;
    __shared__ __align__(16) u32 shared[TILE_ROWS * TILE_COLUMNS / 4];
    Tile tile = tile_of_block(block, p.columns);
    Values v;
    load_values(v, parameters.x, p, tile);
    cast_tile(p, tile, v, shared);
    if constexpr (!COLUMNWISE) return;
    __syncthreads();
    store_columns<ALIGNED>(p.columnwise, shared, tile, p.rows, p.columns);
}

#include "joined.cuh"

extern "C" __global__ void __launch_bounds__(TILE_THREADS, RESIDENT) cast_block(const __grid_constant__ Launched launched) {
    Own own = own_part(launched);
    cast_block_of(own.parameters, own.block);
}
