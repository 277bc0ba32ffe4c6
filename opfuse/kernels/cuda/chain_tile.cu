// chain_tile: a chain of elementwise ops, forward or backward, in tiles: gradients that are sums, and casts of the result.
//
// Chain          generated: tensors and constants of the ops, load_inputs, run_chain, store_results, store_row_sum,
//                store_column_sum, and result: STRANDS packs, whose columns are those of result_column
// CAST           what else is done with the result: see encode.cuh; the header of each cast says how
// Grid           a block of TILE_THREADS for each TILE_ROWS x TILE_COLUMNS of the chain's result, or of dy. With several strands, columns
//                are multiples of TILE_COLUMNS, and so are groups of halves
// RESIDENT       blocks that share a multiprocessor; AHEAD: how many rows of inputs a thread loads before it needs them, a divisor of
//                the number of its rows
// GROUPED        rows come in groups, in the tables of row_groups.cu, and no tile has rows of two. There are no sums over rows then
// Defined by     opfuse/kernels/chains/cast.py and, for sums alone, opfuse/numerics/chain.py, backward_chain
#include "tile.cuh"
#include "chain.cuh"
#include "generated.cuh"
#include "encode.cuh"
using IN = IO;
using Values = Eight<IN>[OWN_ROWS];

// Where the codes of the thread's rows are stored, in a plane of `width` columns.
OPFUSE_FN RowCodes codes_of_rows(u8* plane, long long width, const Thread& at) {
    return codes_of_rows(plane, width, at.row, at.column, at.rows, at.columns);
}

// A cast consists of the order of tiles (own_block), what a thread holds, and what it does with each row of a strand (take), with all
// rows before a barrier (prepare, leave), and after it (store_prepared, finish). TOGETHER: one barrier serves all strands.
#if CAST == TENSOR
#include "encode_tensor.cuh"
#elif CAST == BLOCKS
#include "encode_blocks.cuh"
#elif CAST == MX
#include "encode_mx.cuh"
#else
#include "encode_amax.cuh"
#endif

struct Parameters {
    Chain chain;
    Encode encode;
};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "the fields that the host packs");

#include "sums.cuh"

#if GROUPED
static_assert(ROW_SUMS == 0, "pieces of sums over rows are those of the matrix");
// The thread's place in the tile `rows`; a thread of a tile without rows computes on row 0, and stores nothing.
OPFUSE_FN Thread thread_of_tile(const Parameters& p, const Tile& tile, u32 down, u32 across) {
    RowTile rows = p.encode.tiles[down];
    Cut cut = p.chain.cut;
    cut.rows = rows.end;
    Thread at = thread_at(cut, down, across, rows.first + own_row(tile, 0), tile.column + tile.across / 8 * 64, tile.across % 8);
    if (at.row < 0) at.row = 0;
    return at;
}
#else
OPFUSE_FN Thread thread_of_tile(const Parameters& p, const Tile& tile, u32 down, u32 across) {
    return thread_at(p.chain.cut, down, across, tile.row + own_row(tile, 0), tile.column + tile.across / 8 * 64, tile.across % 8);
}
#endif

// Tile and thread of one strand, in the columns of the cast's matrix.
template <int STRAND>
OPFUSE_FN Tile tile_of_strand(const Cut& cut, Tile tile) {
    tile.column = result_column<STRAND>(cut, tile.column);
    return tile;
}
template <int STRAND>
OPFUSE_FN Thread thread_of_strand(const Cut& cut, Thread at) {
    at.column = result_column<STRAND>(cut, at.column);
    return at;
}

template <int STRAND = 0>
OPFUSE_FN void take_results(const Parameters& p, const Tile& tile, const Thread& at, int i, const Inputs<8>& in, const Results<8>& out,
                            int count, Held (&held)[STRANDS], u8* shared, Running& running) {
    const Cut& cut = p.chain.cut;
    take(p.encode, tile_of_strand<STRAND>(cut, tile), thread_of_strand<STRAND>(cut, at), i, eight_of(result<STRAND>(in, out), count),
         held[STRAND], shared + STRAND * STRAND_BYTES, running);
    if constexpr (STRAND + 1 < STRANDS) take_results<STRAND + 1>(p, tile, at, i, in, out, count, held, shared, running);
}

// Strands that go TOGETHER: copies of the text, among which the compiler finds work for the time that loads and stores take.
template <int STRAND = 0>
OPFUSE_FN void complete_together(const Parameters& p, const Tile& tile, const Thread& at, const Held (&held)[STRANDS], u8* shared) {
    constexpr bool LAST = STRAND + 1 == STRANDS;
    const Cut& cut = p.chain.cut;
    Tile own = tile_of_strand<STRAND>(cut, tile);
    shared += STRAND * STRAND_BYTES;
    prepare(p.encode, own, thread_of_strand<STRAND>(cut, at), held[STRAND], shared);
    if constexpr (LAST) __syncthreads();
    if constexpr (!LAST) complete_together<STRAND + 1>(p, tile, at, held, shared - STRAND * STRAND_BYTES);
    store_prepared(p.encode, own, shared);
}

// The columns of a strand, from STRAND on; `strand` may be known at run time alone.
template <int STRAND = 0>
OPFUSE_FN long long column_of_strand(const Cut& cut, int strand, long long column) {
    if constexpr (STRAND + 1 < STRANDS) {
        if (strand > STRAND) return column_of_strand<STRAND + 1>(cut, strand, column);
    }
    return result_column<STRAND>(cut, column);
}

// Strands between barriers: one text, which compiles in half of the time. Each strand in its turn is where the first one was.
OPFUSE_FN void complete_in_turn(const Parameters& p, const Tile& tile, const Thread& at, Held (&held)[STRANDS], u8* shared) {
    const Cut& cut = p.chain.cut;
    Tile own = tile;
    Thread thread = at;
#pragma unroll 1
    for (int strand = 0; strand < STRANDS; ++strand) {
        own.column = column_of_strand(cut, strand, tile.column), thread.column = column_of_strand(cut, strand, at.column);
        prepare(p.encode, own, thread, held[0], shared + strand * STRAND_BYTES);
#pragma unroll
        for (int next = 1; next < STRANDS; ++next) held[next - 1] = held[next];
        __syncthreads();
        store_prepared(p.encode, own, shared + strand * STRAND_BYTES);
    }
}

extern "C" __global__ void __launch_bounds__(TILE_THREADS, RESIDENT) chain_tile(const __grid_constant__ Parameters parameters) {
    __shared__ __align__(16) u8 shared[SHARED_BYTES];
    const Chain& p = parameters.chain;
    u32 block = own_block(), down = tile_of(p.cut, block), across = block - down * p.cut.tiles_across;
    Tile tile = tile_at(down, across);
    Thread at = thread_of_tile(parameters, tile, down, across);
    RowOperands<8> operands = load_row_operands(p, at.place(0));
    Running running = begin(parameters.encode);
    float sum[SOME(ROW_SUMS)][8] = {};
    __shared__ __align__(16) float of_sixteens[SOME(ROW_SUMS * OF_SIXTEENS)];

    Held held[STRANDS];
    Inputs<8> in[AHEAD];
#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i) {
        if (i % AHEAD == 0)
#pragma unroll
            for (int k = 0; k < AHEAD; ++k) in[k] = load_inputs(p, at.place(down_of(i + k)));
        Place place = at.place(down_of(i));
        Results<8> out = run_chain(p, operands, in[i % AHEAD]);
        store_results(p, in[i % AHEAD], out, place);
        store_column_part(p, at, out.column_sum, place);
        add_row(sum, out.row_sum, place.count);
        if (i % 4 == 3) leave_row_parts(tile, i / 4, sum, of_sixteens);
        take_results(parameters, tile, at, i, in[i % AHEAD], out, place.count, held, shared, running);
    }
    leave(running, shared);
    if constexpr (TOGETHER)
        complete_together(parameters, tile, at, held, shared);
    else
        complete_in_turn(parameters, tile, at, held, shared);
#pragma unroll
    for (int k = 0; k < ROW_SUMS; ++k) store_row_part(p, at, k, of_sixteens + k * OF_SIXTEENS);
    finish(parameters.encode, running, shared);
}
