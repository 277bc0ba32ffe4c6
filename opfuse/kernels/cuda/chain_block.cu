// chain_block: a chain of elementwise ops forward, whose result is cast to FP8 codes with an fp32 scale for each block of 128.
//
// Chain          generated: the tensors and constants of the ops, load_inputs, run_chain, store_results, and result
// Blocks         as in cast_block.cu, for the chain's result
// Grid           a block of 256 threads for each 128 x 128 tile of the result
// AHEAD          rows of inputs that a thread loads before it needs them: 1, 2, 4 or 8
// Defined by     opfuse/kernels/chain_cast.py
constexpr int TILE_ROWS = 128, TILE_COLUMNS = 128, TILE_THREADS = 256;
#include "tile.cuh"
#include "chain.cuh"
#include "generated.cuh"
using IN = IO;
#include "blocks.cuh"

struct Parameters {
    Chain chain;
    Blocks blocks;
};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "the fields that the host packs");

extern "C" __global__ void __launch_bounds__(TILE_THREADS, RESIDENT) chain_block(const __grid_constant__ Parameters parameters) {
    __shared__ __align__(16) u32 shared[TILE_ROWS * TILE_COLUMNS / 4];
    const Chain& p = parameters.chain;
    const Blocks& blocks = parameters.blocks;
    Tile tile = this_tile(blocks.columns);
    long long column = tile.column + tile.across * 8, there = blocks.columns - column;
    RowOperands<8> operands = load_row_operands(p, column, there);
    Values v;
    Inputs<8> in[AHEAD];
#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i) {
        auto row_of = [&](int k) { return tile.row + own_row(tile, k); };
        auto count_of = [&](int k) { return row_of(k) < blocks.rows ? there : 0; };
        if (i % AHEAD == 0)
#pragma unroll
            for (int k = 0; k < AHEAD; ++k) in[k] = load_inputs(p, row_of(i + k), column, count_of(i + k));
        Results<8> out = run_chain(p, operands, in[i % AHEAD]);
        store_results(p, in[i % AHEAD], out, row_of(i), column, count_of(i));
        v[i] = eight_of(first_of(result<0>(in[i % AHEAD], out), count_of(i)));
    }
    cast_tile(blocks, tile, v, shared);
    if (!blocks.columnwise) return;
    __syncthreads();
    if (blocks.rows % 16 == 0)
        store_columns<true>(blocks.columnwise, shared, tile, blocks.rows, blocks.columns);
    else
        store_columns<false>(blocks.columnwise, shared, tile, blocks.rows, blocks.columns);
}
