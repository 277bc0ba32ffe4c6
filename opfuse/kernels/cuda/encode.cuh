// encode: what else becomes of a chain's result, and what a kernel is given for it.
//
// CAST           NOTHING; AMAX: *amax is raised to its largest magnitude, null for NOTHING; or codes as TENSOR, BLOCKS or MX
// Compiled       after vectors.cuh, with what the header of the cast asks for
#pragma once
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
using Encode = Blocks;
#elif CAST == MX
#include "mx_tile.cuh"
using Encode = MxPlanes;
#else
struct Encode {
    float* amax;
};
#endif
