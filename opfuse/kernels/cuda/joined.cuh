// joined: one launch of a kernel, or JOINED launches of it as one: their parameters one after another, and the first block of each.
//
// JOINED         if it is there, so many launches at most are one: each has the blocks from its `first` on, up to the next one's
// Launched       what the kernel takes: Parameters, or with JOINED so many of them; parts that are not there begin behind all blocks
// Compiled       after the struct Parameters of the source
#pragma once

#ifdef JOINED
struct Launched {
    Parameters parts[JOINED];
    u32 first[JOINED];
};
#else
using Launched = Parameters;
#endif
static_assert(sizeof(Launched) == PARAMETER_BYTES, "the fields that the host packs");

struct Own {
    const Parameters& parameters;
    u32 block;
};

// The parameters of a block of the grid, and which block of theirs it is.
OPFUSE_FN Own own_part(const Launched& launched, u32 block = blockIdx.x) {
#ifdef JOINED
    u32 part = 0;
#pragma unroll
    for (u32 i = 1; i < JOINED; ++i) part += block >= launched.first[i];
    return {launched.parts[part], block - launched.first[part]};
#else
    return {launched, block};
#endif
}
