// hadamard: multiplies 16 values of a thread by the Hadamard matrix; the signs of the rotation.
//
// Defined by opfuse/numerics/hadamard.py: in fp32, by stages of distance 1, 2, 4 and 8, each (a, b) -> (a + b, a - b).
#pragma once
#include "common.cuh"

OPFUSE_FN void hadamard(float (&v)[16]) {
#pragma unroll
    for (int distance = 1; distance < 16; distance *= 2)
#pragma unroll
        for (int i = 0; i < 16; ++i)
            if (!(i & distance)) {
                float a = v[i], b = v[i + distance];
                v[i] = a + b, v[i + distance] = a - b;
            }
}

// Element i times its sign, which is negative if bit i of SIGNS is set.
OPFUSE_FN float with_sign(float x, int i) { return SIGNS >> i & 1 ? -x : x; }
