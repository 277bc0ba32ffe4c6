// product: the common part of FP8 products of groups of lines on the matrix unit of sm_90a: left times right transposed, tile by tile.
//
// left, right    lines of LEFT and RIGHT codes, `pitch` bytes apart; sums run along lines. Both operands of a group have lines of one
//                length. Lines begin on 16 bytes; lengths and pitches are multiples of 16
// result         [lines of the left, columns] of RESULT for each group, on 16 bytes. `columns`, the number of lines of the right, is the
//                same for all groups, a multiple of 16
// SCALING 0      TENSORS: one scale for the left and one for the right; their product multiplies the sums, once. FAST: the unit keeps the
//                sums; otherwise the sums of each 128 elements are added in fp32
//         1      TILES: a scale for 128 neighbours of a line of the left, [blocks, left_pitch], and for 128 x 128 codes of the right,
//                [blocks of lines, right_pitch]
//         2      LINES: a scale for 128 neighbours of a line on both sides, [blocks, left_pitch] and [blocks, right_pitch]
//                Under TILES and LINES the sums of a block are scaled and added in fp32. TILES: one fma with the product of both scales.
//                LINES: times the scale of the left, rounded, then one fma with that of the right. Scales that belong to lines begin on
//                16 bytes, and their pitches are multiples of 4
//         3      ROWS: a scale for each line, on 4 bytes. Sums as under TENSORS, FAST or not, times the scale of the right, rounded, then
//                times that of the left
// Order          of additions: that of the library's products (cuBLASLt) of the same formats, so results have the same bits, but where
//                the library parts a long sum of a small result among blocks
// groups         GROUPS at most; `first` is the number of a group's first tile. Windows of operands need a map: MAPS = 1 if all have one
//                pitch, otherwise one for each group
// RUNS           groups are runs of lines of one matrix, whose lengths only the device knows, from `table`, of row_groups.cu
//                0: they are not. OF_LINES: runs of the lines of one left and one result; `at` is the place of their tiles in the table.
//                OF_SUMS: runs along which sums are taken; `at` is the place of the groups in the table, each of which begins on a
//                tile; a group without rows has a result of zeros
// Grid           at most as many blocks as multiprocessors, of 3 x 128 threads; block b takes the tiles b, b + blocks, ... The first warp
//                loads; two consumers of four warps multiply. Dynamic shared memory: SHARED bytes, which the host knows
// FAST           a tile is 128 x 128, and the consumers take turns by tiles: one multiplies while the other stores
// otherwise      a tile is 256 x 128, and each consumer has half of its lines; the second follows the first, so that one multiplies while
//                the other adds. Under OF_LINES many groups may have few lines: consumers take 64 lines in turn, and leave out those behind
//                the last line. SHORT: a tile has 128 lines, so that more stages are on their way: of groups with few lines, what takes
//                time is to read the right
// End            what is done with the sums of a tile: a consumer calls `store` for its 128 lines and columns, and `finish` at last. It
//                stores through ROOMS rooms in shared memory. TURNED: each consumer has 128 x 128 bytes more, in place of a stage under
//                FAST, otherwise of two rooms
#pragma once
#include "vectors.cuh"
#include "hopper.cuh"

struct Group {
    const u8 *left, *right;
    RESULT* result;
    const float *left_scale, *right_scale;
    u32 lines, length, first, pitch, left_pitch, right_pitch;
};

struct Entry {  // of a table
    u32 x, y, z, w;
};

struct Product {
    Map result;
    Map windows[MAPS];
    Group groups[GROUPS];
    u32 count, tiles, columns;
    u32 at;
    const Entry* table;
    u32 unused[10];  // to the end of 64 bytes, on which maps lie
};
constexpr int TENSORS = 0, TILES = 1, LINES = 2, ROWS = 3;
constexpr bool BY_BLOCKS = SCALING == TILES || SCALING == LINES;
constexpr int OF_LINES = 1, OF_SUMS = 2;
constexpr int CONSUMER = 128, PRODUCT_THREADS = 3 * CONSUMER;

#ifndef RUNS
#define RUNS 0
#endif
#ifndef SHORT
#define SHORT 0
#endif
static_assert(!SHORT || (RUNS == OF_LINES && !FAST), "tiles that consumers share");

#if HOPPER

constexpr u32 BOX = 128;                              // lines, columns, and bytes along a sum
constexpr u32 TALL = FAST || SHORT ? 1 : 2;           // how many boxes of the left a tile has
constexpr u32 PART = 64;                              // lines that are multiplied at once
constexpr u32 OWN_PARTS = SHORT ? 1 : 2;              // of a tile, that a consumer has
constexpr bool IN_TURN = !FAST && RUNS == OF_LINES;   // a consumer's next part lies behind one of the other's
constexpr u32 NEXT_PART = IN_TURN ? 2 * PART : PART;
constexpr u32 STAGES = FAST ? 6 - TURNED : SHORT ? 5 : 3;
constexpr u32 ROOMS = FAST || SHORT || TURNED ? 2 : 4;        // for results, of a consumer
constexpr u32 BOX_BYTES = BOX * BOX, STAGE_BYTES = (TALL + 1) * BOX_BYTES;
constexpr u32 STORED_LINES = PART, STORED_PITCH = 128, STORED_BYTES = STORED_LINES * STORED_PITCH;  // one room for results
constexpr u32 LEFT_SCALE_BYTES = (TALL * BOX + 4) * sizeof(float);  // from a multiple of four lines on
constexpr u32 RIGHT_SCALE_BYTES = SCALING == LINES ? BOX * sizeof(float) : 0;
constexpr u32 SCALE_BYTES = BY_BLOCKS ? LEFT_SCALE_BYTES + RIGHT_SCALE_BYTES : 0;
constexpr u32 BAND = 8;                               // so many tiles of lines run over the same columns, which stay in the cache
constexpr u32 AT_STORED = STAGES * STAGE_BYTES, AT_TURNED = AT_STORED + 2 * ROOMS * STORED_BYTES;
constexpr u32 AT_SCALES = AT_TURNED + (TURNED ? 2 * BOX_BYTES : 0), AT_BARRIERS = AT_SCALES + STAGES * SCALE_BYTES;
static_assert(AT_BARRIERS + 2 * STAGES * 8 <= SHARED, "the shared memory that the host asks for");

// Numbers of meetings. Each consumer has one of OWN, and one of TURN; these are FAST's, STARTED and FOLLOW the others', with the same numbers.
constexpr u32 OWN = 1, TURN = 3, STARTED = 3, FOLLOW = 4;

struct Tile {
    u32 line, column, steps;
    u32 end, begin;  // of a run: the end of its lines, and the first block of its sums
};

DEVICE_FN u32 ceil_div(u32 n, u32 d) { return (n + d - 1) / d; }

DEVICE_FN u32 left_of(u32 size, u32 from) { return size > from ? size - from : 0; }

// How many lines the left has, up to the end of the group.
DEVICE_FN u32 lines_of(const Group& g, const Tile& tile) { return RUNS == OF_LINES ? tile.end : g.lines; }

// The number of the block, along sums, that a step reads.
DEVICE_FN u32 block_at(const Tile& tile, u32 step) { return RUNS == OF_SUMS ? tile.begin + step : step; }

DEVICE_FN bool has_steps(const Tile& tile) { return RUNS != OF_SUMS || tile.steps > 0; }

DEVICE_FN u32 tiles_of(const Product& p) {
    if constexpr (RUNS == OF_LINES) return (TALL == 1 ? p.table->x : p.table->y) * ceil_div(p.columns, BOX);
    return p.tiles;
}

// Tile t. `group` is set to its group, and held that of an earlier tile.
DEVICE_FN Tile tile_at(const Product& p, u32 t, u32& group) {
    if constexpr (RUNS == OF_LINES) {
        u32 across = ceil_div(p.columns, BOX), down = TALL == 1 ? p.table->x : p.table->y;
        u32 band = t / (BAND * across), rest = t - band * BAND * across, height = smaller(BAND, down - band * BAND);
        Entry of = p.table[p.at + band * BAND + rest % height];
        group = of.x;
        return {of.y, rest / height * BOX, ceil_div(p.groups[group].length, BOX), of.z, 0};
    }
    while (group + 1 < p.count && t >= p.groups[group + 1].first) ++group;
    const Group& g = p.groups[group];
    u32 across = ceil_div(p.columns, BOX), down = ceil_div(g.lines, TALL * BOX), within = t - g.first;
    u32 band = within / (BAND * across), rest = within - band * BAND * across, height = smaller(BAND, down - band * BAND);
    Tile tile = {(band * BAND + rest % height) * TALL * BOX, rest / height * BOX, ceil_div(g.length, BOX), 0, 0};
    if constexpr (RUNS == OF_SUMS) {
        Entry of = p.table[p.at + group];
        tile.begin = of.z, tile.steps = of.w;
    }
    return tile;
}

// The stages, in turn. Barrier `full` is over when the bytes of a stage are there, `empty` when all who read it are done.
struct Ring {
    u32 base, stage, parity;

    DEVICE_FN Ring(u32 base, u32 parity) : base(base), stage(0), parity(parity) {}
    DEVICE_FN u32 full() const { return base + AT_BARRIERS + stage * 8; }
    DEVICE_FN u32 empty() const { return base + AT_BARRIERS + (STAGES + stage) * 8; }
    DEVICE_FN u32 left() const { return base + stage * STAGE_BYTES; }
    DEVICE_FN u32 right() const { return left() + TALL * BOX_BYTES; }
    DEVICE_FN u32 scales() const { return base + AT_SCALES + stage * SCALE_BYTES; }
    DEVICE_FN void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    DEVICE_FN void skip(u32 steps) {
        u32 reached = stage + steps;
        parity ^= reached / STAGES & 1;
        stage = reached % STAGES;
    }
};

// ------------------------------------------------------------------------------------------------------------------- loading

DEVICE_FN void load_tiles(const Product& p, u32 base) {
    Ring ring(base, 1);
    u32 group = 0, tiles = tiles_of(p);
    for (u32 t = blockIdx.x; t < tiles; t += gridDim.x) {
        Tile tile = tile_at(p, t, group);
        const Group& g = p.groups[group];
        const Map* map = &p.windows[MAPS == 1 ? 0 : group];
        u32 lines = lines_of(g, tile) - tile.line, boxes = smaller(TALL, ceil_div(lines, BOX)), first_scale = tile.line & ~3u;
        Rows left[TALL], right = rows_at<BOX>(g.right + static_cast<u64>(tile.column) * g.pitch, g.pitch, p.columns - tile.column);
#pragma unroll
        for (u32 i = 0; i < TALL; ++i)
            left[i] = rows_at<BOX>(g.left + static_cast<u64>(tile.line + i * BOX) * g.pitch, g.pitch, left_of(lines, i * BOX));
        u32 left_scales = BY_BLOCKS ? smaller(LEFT_SCALE_BYTES, (g.left_pitch - first_scale) * 4) : 0;
        u32 right_scales = SCALING == LINES ? smaller(RIGHT_SCALE_BYTES, (g.right_pitch - tile.column) * 4) : 0;
        for (u32 k = 0; k < tile.steps; ++k, ring.advance()) {
            u32 block = block_at(tile, k), along = block * BOX, there = g.length - along;
            wait(ring.empty(), ring.parity);
            expect_bytes(ring.full(), (boxes + 1) * BOX_BYTES + left_scales + right_scales);
#pragma unroll
            for (u32 i = 0; i < TALL; ++i)  // no box beyond the last line: its address may be nobody's
                if (i < boxes) load_window(ring.left() + i * BOX_BYTES, map, window_of<BOX, 1>(left[i], along, there), ring.full());
            load_window(ring.right(), map, window_of<BOX, 1>(right, along, there), ring.full());
            if constexpr (BY_BLOCKS)
                load_bytes(ring.scales(), g.left_scale + static_cast<u64>(block) * g.left_pitch + first_scale, left_scales, ring.full());
            if constexpr (SCALING == LINES)
                load_bytes(ring.scales() + LEFT_SCALE_BYTES, g.right_scale + static_cast<u64>(block) * g.right_pitch + tile.column, right_scales,
                           ring.full());
        }
    }
}

// --------------------------------------------------------------------------------------------------------------- multiplying

// One of the consumers, and a thread's place in it.
struct Consumer {
    u32 number, thread, warp, lane;
};

// The first line of a consumer's part i, from the first line of its tile.
DEVICE_FN u32 line_of_part(const Consumer& own, u32 i) { return (FAST ? 0 : own.number * (IN_TURN ? PART : BOX)) + i * NEXT_PART; }

// How many of its parts a consumer multiplies.
DEVICE_FN u32 parts_of(const Group& g, const Tile& tile, const Consumer& own) {
    u32 lines = lines_of(g, tile) - tile.line;
    if constexpr (SHORT) return lines > line_of_part(own, 0);
    return IN_TURN ? (lines > line_of_part(own, 0)) + (lines > line_of_part(own, 1)) : 2;
}

// Done with a stage. A warp has waited for its products as one; scales each lane has read for itself, so each arrives.
constexpr u32 ARRIVALS = BY_BLOCKS ? 32 : 1;  // of a warp

DEVICE_FN void release(u32 empty, const Consumer& own) {
    if (own.lane < ARRIVALS) arrive(empty);
}

// Multiplies a part of the stage's left by its right.
DEVICE_FN void multiply_part(float (&sums)[64], u32 left, u32 right) {
#pragma unroll
    for (u32 k = 0; k < BOX / 32; ++k) multiply_64x128x32(sums, left + k * ALONG_32, right + k * ALONG_32, k != 0);
}

// The next N of the consumer's rooms for 64 rows of 128 bytes, once the engine has read what was in them; N divides ROOMS. The first lane of
// warp i stores room i, so that it waits for no other.
template <u32 N = 1>
DEVICE_FN u32 next_rooms(u32 base, const Consumer& own, u32& used) {
    u32 first = used % ROOMS;
    used += N;
    if (own.lane == 0 && own.warp - first < N) wait_stores_read<0>();
    meet(OWN + own.number, CONSUMER);
    return base + AT_STORED + (own.number * ROOMS + first) * STORED_BYTES;
}

// Whether this thread stores the newest room.
DEVICE_FN bool stores_room(const Consumer& own, u32 used) { return own.lane == 0 && own.warp == (used - 1) % ROOMS; }

// Makes what the consumer wrote to a room known to the engine.
DEVICE_FN void fill_room(const Consumer& own) {
    show_to_engine();
    meet(OWN + own.number, CONSUMER);
}

// Writes pairs of 16-bit results of 64 columns to a room: of each eight columns, those of a thread's two lines.
DEVICE_FN void write_pairs(u32 room, const Consumer& own, const u32 (&pairs)[8][2]) {
    u32 row = own.warp * 16 + (own.lane & 15);
#pragma unroll
    for (u32 j = 0; j < 8; j += 2) {
        u32 piece = j + (own.lane >> 4);
        store_matrices(room + row * STORED_PITCH + ((piece ^ (row & 7)) << 4), pairs[j][0], pairs[j][1], pairs[j + 1][0], pairs[j + 1][1]);
    }
}

// Stores a room in a matrix as wide as the result, from a line and column on. An empty group is committed as well.
template <bool ADDS = false, class T>
DEVICE_FN void store_room(const Product& p, const Map* map, u32 lines, T* matrix, u32 line, u32 column, u32 room) {
    constexpr u32 ACROSS = STORED_PITCH / sizeof(T);
    u32 rows = left_of(lines, line), columns = left_of(p.columns, column);
    T* to = matrix + static_cast<u64>(line) * p.columns + column;
    if (rows && columns)
        store_window<ADDS>(map, window_at<ACROSS, STORED_LINES, sizeof(T)>(to, static_cast<u64>(p.columns) * sizeof(T), columns, rows), room);
    commit_stores();
}

#include "product_scales.cuh"

// Consumers take turns by tiles: one multiplies while the other stores.
template <class End>
DEVICE_FN void multiply_in_turns(const Product& p, u32 base, const Consumer& own, End& end) {
    Ring ring(base, 0);
    u32 group = 0, count = 0, tiles = tiles_of(p);
    if (own.number == 1) signal(TURN, 2 * CONSUMER);
    for (u32 t = blockIdx.x; t < tiles; t += gridDim.x, ++count) {
        Tile tile = tile_at(p, t, group);
        if ((count & 1) != own.number) {
            ring.skip(tile.steps);
            continue;
        }
        const Group& g = p.groups[group];
        float scale = SCALING == TENSORS ? g.left_scale[0] * g.right_scale[0] : 1.0f;
        float sums[2][64];
#pragma unroll
        for (u32 e = 0; e < 128; ++e) sums[e / 64][e % 64] = 0.0f;  // so that the last sums take no registers once they are stored
        meet(TURN + own.number, 2 * CONSUMER);
        u32 before = 0;
        for (u32 k = 0; k < tile.steps; ++k, ring.advance()) {
            wait(ring.full(), ring.parity);
            u32 left = operand_at(ring.left()), right = operand_at(ring.right());
            begin_products();
#pragma unroll
            for (u32 e = 0; e < BOX / 32; ++e)
#pragma unroll
                for (u32 i = 0; i < 2; ++i)
                    multiply_64x128x32(sums[i], left + i * DOWN_64 + e * ALONG_32, right + e * ALONG_32, (k | e) != 0);
            commit_products();
            if (k > 0) {  // the unit still reads the newest stage
                wait_products<1>();
                release(before, own);
            }
            before = ring.empty();
        }
        signal(TURN + 1 - own.number, 2 * CONSUMER);
        wait_products<0>();
        sums_are_ready(sums[0]);
        sums_are_ready(sums[1]);
        if (has_steps(tile)) release(before, own);
        if constexpr (SCALING == ROWS) scale_rows(p, g, tile, tile.line + own.warp * 16 + own.lane / 4, tile.column + own.lane % 4 * 2, sums);
        end.store(p, g, tile, base, own, sums, scale);
    }
    if ((count & 1) == own.number) meet(TURN + own.number, 2 * CONSUMER);  // for the turn that has no tile
}

// Multiplies the first PARTS parts of a consumer in a tile. Sums of 128 elements are added in fp32. `follows`: consumer 0 has begun a tile.
template <u32 PARTS>
DEVICE_FN void multiply_parts(const Group& g, const Tile& tile, const Consumer& own, Ring& ring, float (&sums)[OWN_PARTS][64], bool& follows) {
    u32 own_scales = (tile.line % 4 + line_of_part(own, 0) + own.warp * 16 + own.lane / 4) * sizeof(float);  // from the first scale of a stage
    if constexpr (SCALING == TILES) asm volatile("" : "+r"(own_scales));  // else the compiler computes it anew in each step
    const float* of_tiles = g.right_scale + static_cast<u64>(tile.column / BOX) * g.right_pitch + block_at(tile, 0);
    float of_tile = SCALING == TILES && has_steps(tile) ? load_constant(of_tiles) : 1.0f;
    float part[64];
    for (u32 k = 0; k < tile.steps; ++k, ring.advance()) {
        BlockScales scales;
        wait(ring.full(), ring.parity);
        u32 left = operand_at(ring.left()) + line_of_part(own, 0) / PART * DOWN_64, right = operand_at(ring.right());
        if constexpr (SCALING == LINES && PARTS) scales.read_columns(ring.scales() + LEFT_SCALE_BYTES + own.lane % 4 * 2 * sizeof(float));
        float next_tile = SCALING == TILES && PARTS ? load_constant(of_tiles + smaller(k + 1, tile.steps - 1)) : 1.0f;
#pragma unroll
        for (u32 i = 0; i < PARTS; ++i) {
            if constexpr (BY_BLOCKS) scales.read_rows(ring.scales() + own_scales + i * NEXT_PART * sizeof(float));
            begin_products();
            multiply_part(part, left + i * NEXT_PART / PART * DOWN_64, right);
            commit_products();
            if (SCALING == TILES) scales.rows[0] *= of_tile, scales.rows[1] *= of_tile;
            if (i == 0 && k == 0 && own.number == 0) {  // the second consumer begins after the first, which waits for it once in each tile
                if (follows) meet(STARTED, 2 * CONSUMER);
                signal(FOLLOW, 2 * CONSUMER);
                follows = true;
            }
            wait_products<0>();
            sums_are_ready(part);
            if (i == PARTS - 1) release(ring.empty(), own);
            add_part(sums[i], part, scales);
        }
        if constexpr (PARTS == 0) release(ring.empty(), own);
        of_tile = next_tile;
    }
}

// Consumers share a tile; one adds while the other multiplies.
template <class End>
DEVICE_FN void multiply_together(const Product& p, u32 base, const Consumer& own, End& end) {
    Ring ring(base, 0);
    u32 group = 0, tiles = tiles_of(p);
    bool follows = false;
    float sums[OWN_PARTS][64];
    for (u32 t = blockIdx.x; t < tiles; t += gridDim.x) {
        Tile tile = tile_at(p, t, group);
        const Group& g = p.groups[group];
        float scale = SCALING == TENSORS ? g.left_scale[0] * g.right_scale[0] : 1.0f;
#pragma unroll
        for (u32 i = 0; i < OWN_PARTS; ++i)
#pragma unroll
            for (u32 j = 0; j < 64; ++j) sums[i][j] = 0.0f;
        if (own.number == 1 && has_steps(tile)) {
            meet(FOLLOW, 2 * CONSUMER);
            signal(STARTED, 2 * CONSUMER);
        }
        u32 parts = parts_of(g, tile, own);
        if (parts == 0)
            multiply_parts<0>(g, tile, own, ring, sums, follows);
        else if (parts == 1)
            multiply_parts<1>(g, tile, own, ring, sums, follows);
        else
            multiply_parts<OWN_PARTS>(g, tile, own, ring, sums, follows);
        u32 line = tile.line + line_of_part(own, 0) + own.warp * 16 + own.lane / 4;
        if constexpr (SCALING == ROWS) scale_rows(p, g, tile, line, tile.column + own.lane % 4 * 2, sums);
        end.store(p, g, tile, base, own, sums, scale);
    }
    if (own.number == 0 && follows) meet(STARTED, 2 * CONSUMER);
}

// What a block does: one warp loads, two consumers multiply and hand the sums of their tiles to `end`.
template <class End>
DEVICE_FN void multiply(const Product& p, End& end) {
    extern __shared__ __align__(1024) u8 shared[];
    u32 base = shared_address(shared), role = __shfl_sync(~0u, threadIdx.x / CONSUMER, 0);  // the same for a whole warp, as the compiler now knows
    if (threadIdx.x == 0) {
        for (Ring ring(base, 0); ring.parity == 0; ring.advance()) {
            init_barrier(ring.full(), 1);
            init_barrier(ring.empty(), (FAST ? 4 : 8) * ARRIVALS);  // of warps
        }
        publish_barriers();
    }
    __syncthreads();
    if (role == 0) {
        give_registers<40>();
        if (threadIdx.x == 0) load_tiles(p, base);
    } else {
        take_registers<232>();
        Consumer own = {role - 1, threadIdx.x % CONSUMER, threadIdx.x % CONSUMER / 32, threadIdx.x % 32};
        if constexpr (FAST)
            multiply_in_turns(p, base, own, end);
        else
            multiply_together(p, base, own, end);
        end.finish(own);
        if (own.lane == 0) wait_stores_done();
    }
}

#endif
