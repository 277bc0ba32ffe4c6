// joined: runs up to JOINED launches of a kernel as one launch. Without JOINED, a launch is what it is elsewhere.
//
// Launched       the kernel's parameter: Parameters or, with JOINED, `parts`, one for each launch, and `first`, the number of each
//                launch's first block. A launch has the blocks up to the next one's first; places without a launch begin behind all
//                blocks
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

// The parameters of the launch that a block of the grid belongs to, and the block's number in that launch.
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
