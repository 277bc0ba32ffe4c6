// cast_row: FP8 codes of a matrix with an fp32 scale for each row, from one read of it if rows fit in registers.
//
// x, codes       [rows, columns] of IN, contiguous, and of OUT
// index          if INDEXED: for each row of the matrix, the number of a row of x; x then has any number of rows
// scale          [rows], decode scales: the inverses of those of scale_from_amax with eps, rounded down to powers of two if POW2
// Non-finite     a row that holds one is cast under the scale 1, and its stored scale is NaN
// Grid           a block of 256 threads for each 256 / TEAM rows
// JOINED         as joined.cuh has it
// RESIDENT       blocks that share a multiprocessor at least
// Compiled       with what row.cuh asks for
// Defined by     opfuse/numerics/casts.py, cast_row.
#include "row.cuh"
#include "row_index.cuh"

struct Parameters {
    const IN* x;
    u8* codes;
    float* scale;
    long long rows, columns;
    float eps;
    u32 packs;
    const long long* index;
};
#include "joined.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) cast_row(const __grid_constant__ Launched launched) {
    Own own = own_part(launched);
    const Parameters& p = own.parameters;
    Row at = row_of_block(p, own.block);
    Row read = at;
    read.row = row_read(p.index, at.row, at.exists);
    Eights<IN> x(p.x, read);
    x.load();
    u32 best = 0;
    each_eight(p, [&](int u) { best = larger_magnitude(best, x[u]); });
    float amax = float_of(largest_in_team(magnitude_bits<IN>(best)));
    float scale = block_scale<OUT>(amax, p.eps, LARGEST_FLOAT, POW2);
    if (at.lane == 0 && at.exists) p.scale[at.row] = block_decode_scale(scale, amax, POW2);
    u8* codes = p.codes + at.row * p.columns;
    each_eight(p, [&](int u) { store_codes(codes, encode_eight<OUT>(x[u], [=](int) { return scale; }), at, u); });
}
