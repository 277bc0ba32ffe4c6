// hopper: what sm_90a alone has, under names: barriers that count bytes, copies of windows by the copy engine, products of the matrix
// unit of four warps.
//
// Window      a box of rows anywhere in memory, of which a part counts: what lies past the part's end is read as 0, and not written.
//             The engine clips boxes at the end of the one array that a map describes. So the map of a pitch describes a box alone, from
//             which two more dimensions reach every 16 bytes of memory, and a part is the end of the box: a map knows no address, no
//             shape and no group, and is made once for a pitch. The host has it from kernels/engine/windows.py.
// Swizzle     rows of 128 bytes lie in shared memory with their pieces of 16 bytes in another order, piece ^ (row & 7), on 1024 bytes
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

// To be called by the thread that made barriers, before others use them.
DEVICE_FN void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

DEVICE_FN void expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

DEVICE_FN void arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }

// Until the phase of this parity is over.
DEVICE_FN void wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Of so many threads, by number: one half waits for the other, which does not wait.
DEVICE_FN void meet(u32 number, u32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory"); }
DEVICE_FN void signal(u32 number, u32 threads) { asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory"); }

// ------------------------------------------------------------------------------------------------------------------- windows

constexpr u64 WINDOW_BASE = 256;  // where every map begins
constexpr int NEAR_BITS = 34;     // bytes that the third dimension reaches, in steps of 16; the fourth has the rest

// The part of a box of WIDE x HIGH elements that begins at `at`: so many elements of so many rows, `pitch` bytes apart.
struct Window {
    u32 x, y, near, far;
};

template <int WIDE, int HIGH, int BYTES>
DEVICE_FN Window window_at(const void* at, u64 pitch, u32 elements, u32 rows) {
    u32 x = WIDE - smaller(elements, WIDE), y = HIGH - smaller(rows, HIGH);
    u64 corner = reinterpret_cast<u64>(at) - x * BYTES - y * pitch - WINDOW_BASE;
    return {x, y, static_cast<u32>((corner & ((1ull << NEAR_BITS) - 1)) >> 4), static_cast<u32>(corner >> NEAR_BITS)};
}

DEVICE_FN void load_window(u32 to, const Map* map, const Window& w, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
        "l"(map), "r"(w.x), "r"(w.y), "r"(w.near), "r"(w.far), "r"(barrier)
        : "memory");
}

// ADDS: fp32 values are added to those in memory.
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

// Neighbouring bytes, a multiple of 16 on 16.
DEVICE_FN void load_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
                 "r"(barrier)
                 : "memory");
}

DEVICE_FN void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until at most N of the groups that this thread committed still read shared memory; of the second, are not written.
template <int N>
DEVICE_FN void wait_stores_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
DEVICE_FN void wait_stores_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Of threads that wrote shared memory which the copy engine reads next, before they meet.
DEVICE_FN void show_to_engine() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --------------------------------------------------------------------------------------------------------------- matrix unit

// Rows of 128 bytes in shared memory, swizzled: the low half of the operand that begins there, of which the high half is the same for
// all. 32 bytes further along the rows are 2 more, 64 rows 512.
DEVICE_FN u32 operand_at(u32 address) { return 0x10000 | (address & 0x3ffff) >> 4; }

constexpr u32 ALONG_32 = 2, DOWN_64 = 512;
constexpr u64 OPERAND_HIGH = 0x40000040ull << 32;

DEVICE_FN void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE_FN void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most N committed groups run. Who reads sums next says so, with `sums_are_ready`.
template <int N>
DEVICE_FN void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Nothing that reads these registers may be moved above.
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

// 64 lines of the left times 128 of the right over 32 elements, added to what d holds if `more`. Thread i of the four warps has lines
// (i / 32) * 16 + i % 32 / 4 and 8 below it, columns 8 j + i % 4 * 2 and its right neighbour: d[4 j], d[4 j + 1] above, the other two below.
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

// Four matrices of 8 x 8 16-bit elements, of which thread i gives pieces and the address of the row i % 8 of matrix i / 8.
DEVICE_FN void store_matrices(u32 to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// The same of the transposed matrices, of which thread i gives pieces of columns.
DEVICE_FN void store_transposed(u32 to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

DEVICE_FN void store_two(u32 to, float a, float b) { asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(a), "f"(b) : "memory"); }
DEVICE_FN void store_half(u32 to, u32 bits) { asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(static_cast<u16>(bits)) : "memory"); }

#endif
