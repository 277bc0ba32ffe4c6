// hopper: functions for instructions of sm_90a: barriers that count bytes, copies of windows by the copy engine (TMA), and products on
// the matrix unit, by four warps together.
//
// Window      a box of rows anywhere in memory, of which only a part counts: past the part's end, 0 is read and nothing is written. The
//             engine clips boxes at the end of the array that its map describes. So a map describes one box, with rows of a given pitch;
//             two more dimensions move that box over all of memory in steps of 16 bytes; and the part that counts is put at the end
//             of the box. Such a map depends on no address, shape or group. kernels/engine/windows.py makes one for each pitch
// Swizzle     rows of 128 bytes in shared memory, at multiples of 1024, have piece i of 16 bytes in place i ^ (row & 7)
// Compiled    for sm_90a; elsewhere the file is empty, and HOPPER is 0
#pragma once
#include "common.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HOPPER 1
#else
#define HOPPER 0
#endif

struct alignas(64) Map {
    u64 words[16];
};

#if HOPPER

#define DEVICE_FN __device__ __forceinline__

DEVICE_FN u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// ------------------------------------------------------------------------------------------------------------------ barriers

DEVICE_FN void init_barrier(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes new barriers known to other threads and to the engine; for the thread that made them.
DEVICE_FN void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

DEVICE_FN void expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

DEVICE_FN void arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }

// Waits until the phase of this parity is over.
DEVICE_FN void wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// A meeting of so many threads, by its number: `meet` waits until all have called one of the two, `signal` does not wait.
DEVICE_FN void meet(u32 number, u32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory"); }
DEVICE_FN void signal(u32 number, u32 threads) { asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory"); }

// ------------------------------------------------------------------------------------------------------------------- reading

// Read where they stand: the compiler would move a plain read to where its value is used, and products on the matrix unit make it late.
DEVICE_FN float load_shared(u32 address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    return x;
}
DEVICE_FN float2 load_shared_two(u32 address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
    return x;
}
DEVICE_FN float load_constant(const float* address) {
    float x;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(x) : "l"(address) : "memory");
    return x;
}

// ------------------------------------------------------------------------------------------------------------------- windows

constexpr u64 WINDOW_BASE = 256;  // the address at which every map begins
constexpr int NEAR_BITS = 34;     // the third dimension reaches 2^34 bytes, in steps of 16; the fourth the rest

struct Window {
    u32 x, y, near, far;
};

// A number of rows of a box, which are `pitch` bytes apart, from `at` on: how many rows lie before them in the box, and where the first does.
struct Rows {
    u64 corner;
    u32 before;
};

template <int HIGH>
DEVICE_FN Rows rows_at(const void* at, u64 pitch, u32 rows) {
    u32 before = HIGH - smaller(rows, HIGH);
    return {reinterpret_cast<u64>(at) - before * pitch - WINDOW_BASE, before};
}

// The part of a box of WIDE elements in each of its rows: so many, from `along` bytes behind the beginning of the rows on.
template <int WIDE, int BYTES>
DEVICE_FN Window window_of(const Rows& rows, u32 along, u32 elements) {
    u32 x = WIDE - smaller(elements, WIDE);
    u64 corner = rows.corner + along - x * BYTES;
    return {x, rows.before, static_cast<u32>((corner & ((1ull << NEAR_BITS) - 1)) >> 4), static_cast<u32>(corner >> NEAR_BITS)};
}

// The part of a box of WIDE x HIGH elements that begins at `at`: elements of a number of rows, which are `pitch` bytes apart.
template <int WIDE, int HIGH, int BYTES>
DEVICE_FN Window window_at(const void* at, u64 pitch, u32 elements, u32 rows) {
    return window_of<WIDE, BYTES>(rows_at<HIGH>(at, pitch, rows), 0, elements);
}

DEVICE_FN void load_window(u32 to, const Map* map, const Window& w, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
        "l"(map), "r"(w.x), "r"(w.y), "r"(w.near), "r"(w.far), "r"(barrier)
        : "memory");
}

// Stores a window. ADDS: fp32 values are added to those in memory.
template <bool ADDS = false>
DEVICE_FN void store_window(const Map* map, const Window& w, u32 from) {
    if constexpr (ADDS)
        asm volatile("cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map), "r"(from),
                     "r"(w.x), "r"(w.y), "r"(w.near), "r"(w.far)
                     : "memory");
    else
        asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map), "r"(from), "r"(w.x),
                     "r"(w.y), "r"(w.near), "r"(w.far)
                     : "memory");
}

// Copies neighbouring bytes; address and number are multiples of 16.
DEVICE_FN void load_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
                 "r"(barrier)
                 : "memory");
}

DEVICE_FN void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// The first waits until at most N groups of stores of this thread still read shared memory, the second until all are written.
template <int N>
DEVICE_FN void wait_stores_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
DEVICE_FN void wait_stores_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// For threads that wrote shared memory which the copy engine reads next; they call it before they meet.
DEVICE_FN void show_to_engine() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --------------------------------------------------------------------------------------------------------------- matrix unit

// The low half of the matrix unit's descriptor of an operand, swizzled rows of 128 bytes in shared memory; the high half is the same for
// all operands. Adding 2 moves 32 bytes along the rows, adding 512 moves 64 rows.
DEVICE_FN u32 operand_at(u32 address) { return 0x10000 | (address & 0x3ffff) >> 4; }

constexpr u32 ALONG_32 = 2, DOWN_64 = 512;
constexpr u64 OPERAND_HIGH = 0x40000040ull << 32;

DEVICE_FN void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE_FN void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most N committed groups of products run. Call `sums_are_ready` before sums are read.
template <int N>
DEVICE_FN void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Keeps the compiler from moving reads of these registers above this place.
template <int N>
DEVICE_FN void sums_are_ready(float (&sums)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

#define SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_16(i) SUMS_4(i), SUMS_4(i + 4), SUMS_4(i + 8), SUMS_4(i + 12)
#define ELEMENT_E4M3 "e4m3"
#define ELEMENT_E5M2 "e5m2"
#define NAME_OF_(element) ELEMENT_##element
#define NAME_OF(element) NAME_OF_(element)

// The product of 64 lines of the left and 128 of the right over 32 elements; added to d if `more`. Thread i of the four warps has line
// l = (i / 32) * 16 + i % 32 / 4 and line l + 8, of which d has columns c = 8 j + i % 4 * 2 and c + 1: d[4 j] and d[4 j + 1] of line l,
// d[4 j + 2] and d[4 j + 3] of line l + 8.
DEVICE_FN void multiply_64x128x32(float (&d)[64], u32 left, u32 right, bool more) {
    asm volatile(
        "{\n.reg .pred more;\nsetp.ne.b32 more, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32." NAME_OF(LEFT) "." NAME_OF(RIGHT) " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, %64, %65, more, 1, 1;\n}"
        : SUMS_16(0), SUMS_16(16), SUMS_16(32), SUMS_16(48)
        : "l"(OPERAND_HIGH | left), "l"(OPERAND_HIGH | right), "r"(static_cast<u32>(more)));
}

// ----------------------------------------------------------------------------------------------------------------- registers

template <int N>
DEVICE_FN void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
DEVICE_FN void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// Stores four matrices of 8 x 8 16-bit elements. Thread i gives a word of each, and the address of row i % 8 of matrix i / 8.
DEVICE_FN void store_matrices(u32 to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Stores the transposes of four such matrices.
DEVICE_FN void store_transposed(u32 to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

DEVICE_FN void store_two(u32 to, float a, float b) { asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(a), "f"(b) : "memory"); }
DEVICE_FN void store_half(u32 to, u32 bits) { asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(static_cast<u16>(bits)) : "memory"); }

#endif
