// tile_values: loads a tile of a matrix, as the values that a block of threads casts.
//
// Compiled       after blocks.cuh
#pragma once
#include "row_index.cuh"

// Loads a thread's values; 0 outside of the matrix of p.
OPFUSE_FN void load_values(Values& v, const IN* from, const Blocks& p, const Tile& tile, const long long* index = nullptr) {
    long long column = tile.column + tile.across * 8, there = p.columns - column;
#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i) {
        long long row = tile.row + own_row(tile, i);
        const IN* x = from + row_read(index, row, row < p.rows) * p.columns + column;
        if constexpr (ALIGNED)
            v[i] = row < p.rows && there > 0 ? load_eight(x) : Eight<IN>{};
        else
            v[i] = load_some(x, row < p.rows ? there : 0);
    }
}

// Without conversion instructions, codes take more registers.
constexpr int RESIDENT = sizeof(IN) == 2 && ALIGNED && __CUDA_ARCH__ >= 890 ? 4 : 2;
