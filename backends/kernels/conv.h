// A step of a causal convolution, as ops of torch and of ONNX Runtime have it. A token's result has
// the same bits in both, alone and among others.

#pragma once

#include <cstdint>

#include "team.h"

namespace graftwork {

// `graftwork.causal_conv_step`: history [B,N-1,D]; log rows [B,W,D]; folded, past, certain [B];
// ancestors [B,T,T], or null for a chain; x, y [B,T,D]; weight [D,N]; bias [D] or null. What is new
// may lie where the old is.
struct Convolution {
    const float *history, *rows;
    const int64_t *folded, *past, *certain;
    const uint8_t* ancestors;
    const float *x, *weight, *bias;
    float *y, *new_history, *new_rows;
    int64_t B, T, D, N, W;
};

void step(const Convolution& given, const Team& team);

}  // namespace graftwork
