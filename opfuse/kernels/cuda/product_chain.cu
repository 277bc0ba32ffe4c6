// product_chain: an FP8 product, a chain of elementwise ops over its result, and the cast of the chain's result, in one launch.
//
// Product        one group, as in product.cuh. Its sums, rounded to IO, are the chain's x. `result` is null, and its map is for matrices of
//                the result's width and type
// Chain          generated, forward: constants and operands of the ops, run_chain, and what fragments.py writes, for packs of two
//                neighbours. `x` is null. STORED of its values are stored: inputs of ops that are kept and, if asked for, the result
// CAST           what else is done with the result: see encode.cuh. Not MX; of BLOCKS only 1 x 128, of its rows
// ROWWISE        whether codes of the result are stored. TURNED: whether, under TENSOR, codes of its transpose are; then lines are a
//                multiple of 16
// codes          the map of rowwise codes; `turned`: the map of columnwise ones
// Defined by     opfuse/kernels/products/chained.py; its bits are those of the product, and of the chain's own kernel
#define ALIGNED 1
#include "product.cuh"
#include "chain.cuh"
#include "generated.cuh"
#include "encode.cuh"

struct End {
    Chain chain;
    Encode encode;
};

struct alignas(64) Parameters {
    Product product;
    Map codes, turned;
    End end;
};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "the fields that the host packs");

#if HOPPER

// A thread's values of 64 lines and columns: of each eight columns two, in its line and in the line 8 below.
using Values = Pack<IO, 2>[8][2];

// Where a thread's values lie: its first line, which parts of its two lines count, and its first column.
struct At {
    u32 line, there[2], column;
};

struct Chained {
    const Parameters& p;
    float scale;   // of TENSOR
    u32 best, used;

    DEVICE_FN u32 columns_left(const At& at, u32 j) const { return left_of(p.product.columns, at.column + j * 8); }

    // The largest of `best` and the magnitudes of a line's values in the matrix.
    DEVICE_FN u32 larger_there(u32 best, const At& at, u32 half, const Values& v, u32 h) const {
#pragma unroll
        for (u32 j = 0; j < 8; ++j) best = larger_magnitudes(best, columns_left(at, half * 8 + j) ? v[j][h].word[0] & at.there[h] : 0);
        return best;
    }

    // Codes: of each eight columns, two of a line in the low half, and two of the line 8 below in the high half.
#if CAST == TENSOR
    DEVICE_FN void encode_half(const At& at, u32 half, const Values& v, u32* codes) {
#pragma unroll
        for (u32 j = 0; j < 8; ++j) codes[j] = pair_of(v[j][0], scale) | pair_of(v[j][1], scale) << 16;
        if constexpr (RECORD) {
            best = larger_there(larger_there(best, at, half, v, 0), at, half, v, 1);
            if (magnitude_bits<IO>(best) >= INF_BITS)
#pragma unroll
                for (u32 e = 0; e < 32; ++e) {
                    float x = value(v[e / 4][e / 2 % 2], e % 2);
                    u32 shift = e % 4 * 8;
                    if (!is_finite(x)) codes[e / 4] = (codes[e / 4] & ~(0xffu << shift)) | encode_nonfinite<OUT>(x) << shift;
                }
        }
    }
#elif CAST == BLOCKS
    DEVICE_FN void encode_blocks(const At& at, const Values (&v)[2], u32 (&codes)[16]) {
        const Encode& to = p.end.encode;
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            u32 most = larger_there(larger_there(0, at, 0, v[0], h), at, 1, v[1], h);
#pragma unroll
            for (u32 mask = 1; mask < 4; mask *= 2) most = __vmaxu2(most, __shfl_xor_sync(~0u, most, mask));
            Scale own = scale_of(to, magnitude_bits<IO>(most));
            if (threadIdx.x % 4 == 0)
                store_scale(to.row_scale + at.column / BOX * to.row_pitch, at.line + h * 8, to.rows, to.row_pitch, own.decode);
#pragma unroll
            for (u32 j = 0; j < 16; ++j) {
                u32 pair = pair_of(v[j / 8][j % 8][h], own.encode);
                codes[j] = h ? codes[j] | pair << 16 : pair;
            }
        }
    }
#endif

#if CAST == TENSOR || CAST == BLOCKS
    static DEVICE_FN u32 pair_of(const Pack<IO, 2>& v, float scale) { return encode_two<OUT>(value(v, 0) * scale, value(v, 1) * scale); }
#endif

    DEVICE_FN void write_codes(u32 room, const Consumer& own, const u32 (&codes)[16]) const {
        u32 row = own.warp * 16 + own.lane / 4, to = room + row * STORED_PITCH + own.lane % 4 * 2;
#pragma unroll
        for (u32 j = 0; j < 16; ++j) {
            u32 at = to + ((j / 2 ^ (row & 7)) << 4) + j % 2 * 8;
            store_half(at, codes[j]);
            store_half(at + 8 * STORED_PITCH, codes[j] >> 16);
        }
    }

    // Writes the codes of a warp's 16 lines, of 64 lines number i, to the columns of a box of the transpose. A thread stores codes of two
    // neighbouring lines, which it gets from two other threads.
    DEVICE_FN void write_turned(u32 box, const Consumer& own, u32 i, const u32 (&codes)[16]) const {
        u32 from = own.lane / 4 % 4 * 8 + own.lane % 4, lines = own.lane < 16 ? 0x5140 : 0x7362, row = own.lane % 8;
        u32 to = box + own.lane * BOX + ((i * 4 + own.warp ^ row) << 4);
#pragma unroll
        for (u32 j = 0; j < 16; j += 4) {
            u32 two[4];
#pragma unroll
            for (u32 e = 0; e < 4; ++e) {
                u32 upper = __shfl_sync(~0u, codes[j + e], from), lower = __shfl_sync(~0u, codes[j + e], from + 4);
                two[e] = __byte_perm(upper, lower, lines);
            }
            store_transposed(to + j * 8 * BOX, two[0], two[1], two[2], two[3]);
        }
    }

    // ---- values

    // Runs the chain over half of a tile's columns, and stores the values that are kept.
    DEVICE_FN void chain_half(const Group& g, u32 base, const Consumer& own, const At& at, u32 first, u32 half, const Values& sums, Values& made) {
        const Chain& chain = p.end.chain;
        RowOperands<2> operands[8];
        Inputs<2> in[8][2];
#pragma unroll
        for (u32 j = 0; j < 8; ++j) {
            u32 column = columns_left(at, half * 8 + j) ? at.column + half * 64 + j * 8 : at.column % 8;  // else a column that exists
            operands[j] = row_operands_at(chain, column);
#pragma unroll
            for (u32 h = 0; h < 2; ++h) in[j][h] = inputs_at(chain, p.product.columns, at.there[h] ? at.line + h * 8 : 0, column);
        }
        u32 stored[SOME(STORED)][8][2];
#pragma unroll
        for (u32 j = 0; j < 8; ++j)
#pragma unroll
            for (u32 h = 0; h < 2; ++h) {
                in[j][h].x_0 = sums[j][h];
                Results<2> out = run_chain(chain, operands[j], in[j][h]);
                made[j][h] = result_of(in[j][h], out);
                stored_of(in[j][h], out, [&](u32 k, const Pack<IO, 2>& v) { stored[k][j][h] = v.word[0]; });
            }
#pragma unroll
        for (int k = 0; k < STORED; ++k) {
            u32 room = next_rooms(base, own, used);
            write_pairs(room, own, stored[k]);
            fill_room(own);
            if (stores_room(own, used)) store_room(p.product, &p.product.result, g.lines, stored_at(chain, k), first, at.column / BOX * BOX + half * 64, room);
        }
    }

    DEVICE_FN void store(const Product& product, const Group& g, const Tile& tile, u32 base, const Consumer& own, float (&sums)[2][64],
                         float scale) {
        u32 top = tile.line + line_of_part(own, 0), box = base + AT_TURNED + own.number * BOX_BYTES;
        if constexpr (TURNED) {
            if (own.thread == 0) wait_stores_read<0>();
            meet(OWN + own.number, CONSUMER);
        }
        Values rounded[2][2];  // first, since rounded values take half of the registers
#pragma unroll
        for (u32 e = 0; e < 64; ++e) {
            const float* x = &sums[e / 32][e % 32 * 2];
            Pack<IO, 2>& pair = rounded[e / 32][e / 16 % 2][e / 2 % 8][e % 2];
            pair = pack_of<IO, 2>([&](int k) { return SCALING == TENSORS ? x[k] * scale : x[k]; });
            asm volatile("" : "+r"(pair.word[0]));
        }
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            u32 first = top + i * NEXT_PART, line = first + own.warp * 16 + own.lane / 4;
            At at = {line, {line < g.lines ? ~0u : 0, line + 8 < g.lines ? ~0u : 0}, tile.column + own.lane % 4 * 2};
            Values made[CAST == BLOCKS ? 2 : 1];
            u32 codes[16];
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                Values& v = made[CAST == BLOCKS ? half : 0];
                chain_half(g, base, own, at, first, half, rounded[i][half], v);
#if CAST == AMAX
                best = larger_there(larger_there(best, at, half, v, 0), at, half, v, 1);
#elif CAST == TENSOR
                encode_half(at, half, v, codes + half * 8);
#endif
            }
#if CAST == BLOCKS
            encode_blocks(at, made, codes);
#endif
            if constexpr (CAST == TENSOR || CAST == BLOCKS) {
                if constexpr (ROWWISE) {
                    u32 room = next_rooms(base, own, used);
                    write_codes(room, own, codes);
                    fill_room(own);
                    if (stores_room(own, used)) store_room(product, &p.codes, g.lines, rowwise(), first, tile.column, room);
                }
                if constexpr (TURNED) write_turned(box, own, i, codes);
            }
        }
        if constexpr (TURNED) {
            fill_room(own);
            u32 lines = left_of(g.lines, top), columns = left_of(product.columns, tile.column);
            if (own.thread == 0) {
                u8* to = columnwise() + static_cast<u64>(tile.column) * g.lines + top;
                if (lines) store_window(&p.turned, window_at<BOX, BOX, 1>(to, g.lines, lines, columns), box);
                commit_stores();
            }
        }
    }

    DEVICE_FN u8* rowwise() const {
#if CAST == TENSOR || CAST == BLOCKS
        return p.end.encode.rowwise;
#else
        return nullptr;
#endif
    }
    DEVICE_FN u8* columnwise() const {
#if CAST == TENSOR
        return p.end.encode.columnwise;
#else
        return nullptr;
#endif
    }

    DEVICE_FN void finish(const Consumer& own) {
#if CAST == AMAX
        float* amax = p.end.encode.amax;
#elif CAST == TENSOR
        float* amax = RECORD ? p.end.encode.scale.amax : nullptr;
#else
        float* amax = nullptr;
#endif
        if (amax == nullptr) return;
        u32 bits = __reduce_max_sync(~0u, magnitude_bits<IO>(best));
        if (own.lane == 0) raise(amax, bits);
    }
};

#endif

extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS, 1) product_chain(const __grid_constant__ Parameters p) {
#if HOPPER
#if CAST == TENSOR
    Chained end = {p, encode_scale(p.end.encode.scale, blockIdx.x), 0, 0};
#else
    Chained end = {p, 1.0f, 0, 0};
#endif
    multiply(p.product, end);
#endif
}
