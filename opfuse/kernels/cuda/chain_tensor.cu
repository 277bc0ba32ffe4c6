// chain_tensor: a chain of elementwise ops, forward or backward, whose result is cast to FP8 codes under one given scale.
//
// Chain          generated: the tensors and constants of the ops, load_inputs, run_chain, store_results, and result: STRANDS packs
// rowwise        codes of OUT of the result, or null; columnwise: those of its transpose, or null
// scale          fp32, what values are multiplied by; *decode_scale becomes its inverse, and *amax is raised to the largest
//                magnitude of the result, as it would be stored. A non-finite element shows in its code
// Grid           a block of 256 threads for each 128 x 64 tile of what the chain's result, or dy, is
// ALIGNED        packs start on vectors and are whole; with columnwise and several strands, groups of halves are multiples of 64
// BLOCKS, AHEAD  blocks that share a multiprocessor, and rows of inputs that a thread loads before it needs them: 1, 2 or 4
// Defined by     opfuse/kernels/chain_cast.py
constexpr int TILE_ROWS = 128, TILE_COLUMNS = 64, TILE_THREADS = 256;
#include "tile.cuh"
#include "chain.cuh"
#include "generated.cuh"

struct Parameters {
    Chain chain;
    u8 *rowwise, *columnwise;
    const float* scale;
    float *amax, *decode_scale;
};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "the fields that the host packs");

#include "sums.cuh"

// The codes of one strand of a tile, by rows and by columns.
template <int STRAND>
OPFUSE_FN void cast_strand(const Parameters& parameters, const Thread& at, const Tile& tile, const Pack<IO, 8> (&v)[STRANDS][4],
                           float scale, u32& best, u32* shared) {
    const Cut& cut = parameters.chain.cut;
    long long there = cut.columns - at.column;
    auto place = [&](long long c) { return result_column<STRAND>(cut, c); };
    uint2 codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        codes[i] = encode_eight<OUT>(eight_of(v[STRAND][i]), [scale](int) { return scale; });
        best = larger_magnitude(best, eight_of(v[STRAND][i]));
    }
    if (magnitude_bits<IO>(best) >= INF_BITS)
#pragma unroll
        for (int i = 0; i < 4; ++i) codes[i] = show_nonfinite<OUT>(eight_of(v[STRAND][i]), codes[i]);
    if (parameters.rowwise)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            store(parameters.rowwise + (at.row + i) * (cut.columns * STRANDS), Pack<u8, 8>{codes[i].x, codes[i].y}, place, at.column,
                  at.row + i < cut.rows ? there : 0);
    if (!parameters.columnwise) return;
    if (STRAND > 0) __syncthreads();
    transpose_into(shared, tile, codes);
    __syncthreads();
    u8* columnwise = parameters.columnwise + (place(tile.column) - tile.column) * cut.rows;
    if (cut.rows % 16 == 0)
        store_columns<true>(columnwise, shared, tile, cut.rows, cut.columns);
    else
        store_columns<false>(columnwise, shared, tile, cut.rows, cut.columns);
}

template <int STRAND>
OPFUSE_FN void cast_strands(const Parameters& parameters, const Thread& at, const Tile& tile, const Pack<IO, 8> (&v)[STRANDS][4],
                            float scale, u32& best, u32* shared) {
    cast_strand<STRAND>(parameters, at, tile, v, scale, best, shared);
    if constexpr (STRAND + 1 < STRANDS) cast_strands<STRAND + 1>(parameters, at, tile, v, scale, best, shared);
}

template <int STRAND>
OPFUSE_FN void take_results(Pack<IO, 8> (&v)[STRANDS][4], int i, const Inputs<8>& in, const Results<8>& out, long long count) {
    v[STRAND][i] = first_of(result<STRAND>(in, out), count);
    if constexpr (STRAND + 1 < STRANDS) take_results<STRAND + 1>(v, i, in, out, count);
}

extern "C" __global__ void __launch_bounds__(TILE_THREADS, BLOCKS) chain_tensor(const __grid_constant__ Parameters parameters) {
    __shared__ __align__(16) u32 shared[TILE_ROWS * TILE_COLUMNS / 4];
    const Chain& p = parameters.chain;
    Tile tile = this_tile(p.cut.columns);
    Thread at = {int(blockIdx.x / p.cut.tiles_across), int(blockIdx.x % p.cut.tiles_across), tile.across, tile.group, TILE_ROWS / 4,
                 tile.row + tile.group * 4, tile.column + tile.across * 8};
    long long there = p.cut.columns - at.column;
    RowOperands<8> operands = load_row_operands(p, at.column, there);
    float scale = *parameters.scale, sum[SOME(ROW_SUMS)][8] = {};
    if (blockIdx.x == 0 && threadIdx.x == 0) *parameters.decode_scale = 1.0f / scale;

    Pack<IO, 8> v[STRANDS][4];
    Inputs<8> in[AHEAD];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        auto count_of = [&](int k) { return at.row + k < p.cut.rows ? there : 0; };
        if (i % AHEAD == 0)
#pragma unroll
            for (int k = 0; k < AHEAD; ++k) in[k] = load_inputs(p, at.row + i + k, at.column, count_of(i + k));
        long long count = count_of(i);
        Results<8> out = run_chain(p, operands, in[i % AHEAD]);
        store_results(p, in[i % AHEAD], out, at.row + i, at.column, count);
        store_column_part(p, at, out.column_sum, at.row + i, count);
        add_row(sum, out.row_sum, count);
        take_results<0>(v, i, in[i % AHEAD], out, count);
    }
    u32 best = 0;
    cast_strands<0>(parameters, at, tile, v, scale, best, shared);
    store_row_part(p, at, sum);
    raise_amax<TILE_THREADS>(parameters.amax, magnitude_bits<IO>(best));
}
