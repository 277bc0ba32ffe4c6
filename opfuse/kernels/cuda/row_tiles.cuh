// row_tiles: groups of rows, and their tiles of 128 rows, as row_groups.cu has found them, for kernels that take tiles one by one.
//
// RowTile        those behind the last are zeros, and have no row
// RowGroup       first row, end, first tile and number of tiles
#pragma once

constexpr int ROW_TILE = 128;

struct RowTile {
    u32 group, first, end, spare;
};

struct RowGroup {
    u32 first, end, tile, tiles;
};
