// cast_block_groups: the cast of cast_block.cu with SQUARE = 0, for groups of rows, each cast as a matrix of its own, in one launch.
//
// tiles          tiles of 128 rows, from row_groups.cu: [group, first row, end of the group, 0]; zeros behind the last tile
// x, rowwise     as in cast_block.cu; rowwise codes and scales do not depend on groups
// index          if INDEXED: for each row of the matrix, the number of a row of x; x then has any number of rows
// columnwise     [columns, 128 * down] codes; a group begins on a tile, with zeros behind its rows, and in tiles behind the last one
// column_scale   [down, columns], as in cast_block.cu
// down           for how many tiles of rows there is memory
// Grid           a block of 256 threads for each 128 columns of a tile of rows
// ALIGNED        x is on 16 bytes, and columns % 8 == 0
// Defined by     opfuse/numerics/casts.py, cast_block_groups.
#define SQUARE 0
#define APART 1
constexpr int TILE_ROWS = 128, TILE_COLUMNS = 128, TILE_THREADS = 256;
#include "tile.cuh"
#include "blocks.cuh"
#include "tile_values.cuh"
#include "block_groups.cuh"

struct Parameters {
    const IN* x;
    const RowTile* tiles;
    const long long* index;
    Blocks blocks;
    u32 down, unused;
};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "the fields that the host packs");

extern "C" __global__ void __launch_bounds__(TILE_THREADS, RESIDENT) cast_block_groups(const __grid_constant__ Parameters parameters) {
    Blocks p = parameters.blocks;
    __shared__ __align__(16) u32 shared[TILE_ROWS * TILE_COLUMNS / 4];
    Tile stored = tile_of_block(blockIdx.x, p.columns), tile = tile_of_group(p, parameters.tiles[stored.row / TILE_ROWS], stored);
    Values v;
    load_values(v, parameters.x, p, tile, parameters.index);
    cast_lines(p, tile, v, shared);
    if constexpr (!COLUMNWISE) return;
    __syncthreads();
    store_columns<true>(p.columnwise, shared, stored, (long long)parameters.down * TILE_ROWS, p.columns);
}
