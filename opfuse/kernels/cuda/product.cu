// product: FP8 products of groups of lines in one launch, result = left times right transposed, on the matrix unit of sm_90a.
//
// result         as in product.cuh, rounded once from the sums. RESULT: bf16, fp16, or float
// ACCUMULATE     fp32 sums are added to the result in place; under OF_SUMS, the result of a group without rows stays as it is
// Defined by     opfuse/kernels/products/emulated.py, grouped_product; equal where its sums are exact
#define TURNED 0
#include "product.cuh"

static_assert(sizeof(Product) == PARAMETER_BYTES, "the fields that the host packs");

#if HOPPER

// Stores sums times a scale, rounded, in the result: 128 bytes of 64 lines are a room. BATCH rooms are filled between two meetings, where both
// consumers store at the same time: meetings around each room cost products with sums of 768 elements 3 %.
struct Rounded {
    static constexpr u32 ACROSS = STORED_PITCH / sizeof(RESULT), PIECES = BOX / ACROSS;
    static constexpr u32 BATCH = FAST ? 1 : ROOMS / (PIECES / 2);
    u32 used;

    DEVICE_FN void store(const Product& p, const Group& g, const Tile& tile, u32 base, const Consumer& own, float (&sums)[OWN_PARTS][64], float scale) {
        if (ACCUMULATE && !has_steps(tile)) return;
        u32 parts = parts_of(g, tile, own), rooms;
#pragma unroll
        for (u32 i = 0; i < OWN_PARTS; ++i) {
            if (i == parts) break;
#pragma unroll
            for (u32 c = 0; c < PIECES; ++c) {
                u32 n = i * PIECES + c, place = n % BATCH;
                if (place == 0) rooms = next_rooms<BATCH>(base, own, used);
                write(rooms + place * STORED_BYTES, own, &sums[i][c * ACROSS / 2], scale, RESULT{});
                if (place < BATCH - 1 && (c < PIECES - 1 || i + 1 < parts)) continue;
                fill_room(own);
                u32 e = own.warp - (used - BATCH) % ROOMS, from = n - place + e;  // of the batch, the room of this warp, if any
                u32 line = tile.line + line_of_part(own, from / PIECES), column = tile.column + from % PIECES * ACROSS;
                if (own.lane == 0 && e <= place)
                    store_room<ACCUMULATE>(p, &p.result, lines_of(g, tile), g.result, line, column, rooms + e * STORED_BYTES);
            }
        }
    }

    // Of each eight columns, a pair in both lines. The sums stay in the registers of the matrix unit; results take others.
    template <class T>
    DEVICE_FN void write(u32 room, const Consumer& own, const float* x, float scale, T) const {
        u32 pairs[8][2];
#pragma unroll
        for (u32 e = 0; e < 16; ++e)
            pairs[e / 2][e % 2] = SCALING == TENSORS ? round_two<T>(x[2 * e] * scale, x[2 * e + 1] * scale) : round_two<T>(x[2 * e], x[2 * e + 1]);
        write_pairs(room, own, pairs);
    }
    DEVICE_FN void write(u32 room, const Consumer& own, const float* x, float scale, float) const {
#pragma unroll
        for (u32 e = 0; e < 8; ++e) {
            u32 row = own.warp * 16 + own.lane / 4 + e % 2 * 8, piece = e / 2 * 2 + own.lane % 4 / 2;
            u32 at = room + row * STORED_PITCH + ((piece ^ (row & 7)) << 4) + own.lane % 2 * 8;
            store_two(at, SCALING == TENSORS ? x[2 * e] * scale : x[2 * e], SCALING == TENSORS ? x[2 * e + 1] * scale : x[2 * e + 1]);
        }
    }

    DEVICE_FN void finish(const Consumer&) {}
};

#endif

extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS, 1) product(const __grid_constant__ Product p) {
#if HOPPER
    Rounded end = {0};
    multiply(p, end);
#endif
}
