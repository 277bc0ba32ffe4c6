// row_tiles: the entries of the table that row_groups.cu writes, for kernels that take groups of rows tile by tile.
//
// RowTile        a tile of 128 rows: its group, its first row, and the end of the group; zeros behind the last tile
// RowGroup       first row, end, first tile and number of tiles
#pragma once

constexpr int ROW_TILE = 128;

struct RowTile {
    u32 group, first, end, spare;
};

struct RowGroup {
    u32 first, end, tile, tiles;
};
