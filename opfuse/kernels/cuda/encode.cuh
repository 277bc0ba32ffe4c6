// encode: what a kernel does with the result of a chain beside storing it, and the fields that it takes for that.
//
// CAST           NOTHING (amax is null); AMAX: *amax is raised to the largest magnitude; TENSOR, BLOCKS and MX: the result is cast
// GROUPED        whether groups of rows are cast apart, of sizes that a table has; with BLOCKS
// Compiled       after vectors.cuh, with what the header of the cast asks for
#pragma once
#ifndef GROUPED
#define GROUPED 0
#endif
#define NOTHING 0
#define AMAX 1
#define TENSOR 2
#define BLOCKS 3
#define MX 4

#if CAST == TENSOR
#include "tensor_scale.cuh"
using Encode = TensorCodes;
#elif CAST == BLOCKS
#include "block_scale.cuh"
#if GROUPED
#include "block_groups.cuh"
using Encode = BlockGroups;
#else
using Encode = Blocks;
#endif
#elif CAST == MX
#include "mx_tile.cuh"
using Encode = MxPlanes;
#else
struct Encode {
    float* amax;
};
#endif
