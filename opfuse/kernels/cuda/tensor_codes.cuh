// tensor_codes: eight values under the one scale of a tensor.
//
// Compiled       after tensor_scale.cuh, with IN, OUT and RECORD
#pragma once

// The codes of eight values; `best` is raised to the largest of their magnitudes.
OPFUSE_FN uint2 cast_eight(const Eight<IN>& v, float scale, u32& best) {
    uint2 codes = encode_eight<OUT>(v, [scale](int) { return scale; });
    if constexpr (RECORD) {
        best = larger_magnitude(best, v);
        if (magnitude_bits<IN>(best) >= INF_BITS) codes = show_nonfinite<OUT>(v, codes);
    }
    return codes;
}
