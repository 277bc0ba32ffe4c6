// block_groups: planes of groups of rows, as cast_block_groups.cu describes them, and what a block of threads has of them.
//
// BlockGroups    packed by the host; tiles is a table of row_groups.cu, with room for `down` tiles
// Compiled       after tile.cuh for a tile of 128 x 128, with OUT and ROWWISE
#pragma once
#include "block_scale.cuh"
#include "row_tiles.cuh"

struct BlockGroups {
    Blocks blocks;
    const RowTile* tiles;
    u32 down, unused;
};

// The tile `rows` of the table, as it lies in the matrix; `stored` is where its columns are stored. The planes become those that the tile
// has: rows end with their group, and scales of columns begin so that the tile finds its own. The last rows come with the padding of scales.
OPFUSE_FN Tile tile_of_group(Blocks& p, RowTile rows, const Tile& stored) {
    Tile tile = stored;
    if (ROWWISE && rows.first + TILE_ROWS >= p.rows && rows.end == p.rows && threadIdx.x < p.row_pitch - p.rows)
        p.row_scale[tile.column / TILE_COLUMNS * p.row_pitch + p.rows + threadIdx.x] = 0.0f;
    tile.row = rows.first, p.rows = rows.end;
    p.column_scale += (stored.row / TILE_ROWS - tile.row / TILE_ROWS) * p.column_pitch;
    return tile;
}
