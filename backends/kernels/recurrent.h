// A step of linear attention, as ops of torch and of ONNX Runtime have it. A token's result has the
// same bits in both, alone and among others, and so has the state, whether a token was folded in its
// own step or out of the log.

#pragma once

#include <cstdint>

#include "team.h"

namespace graftwork {

// `graftwork.linear_attention_step`: state [B,H,K,V]; log keys [B,G,W,K], values [B,H,W,V], decays
// [B,H,W,D]; folded, past, certain [B]; ancestors [B,T,T], or null for a chain; q, k [B,G,T,K];
// v [B,H,T,V]; g [B,H,T,D], D = 1 or K; beta [B,H,T] or null; y [B,H,T,V]. What is new may lie where
// the old is.
struct Recurrence {
    const float *state, *keys, *values, *decays;
    const int64_t *folded, *past, *certain;
    const uint8_t* ancestors;
    const float *q, *k, *v, *g, *beta;
    float *y, *new_state, *new_keys, *new_values, *new_decays;
    int64_t B, H, G, T, K, V, D, W;
    // Of `graftwork.linear_attention_step_int8`, in the place of the states: codes [B,H,K,V] and
    // scales [B,H,V].
    const int8_t* codes;
    const float* scale;
    int8_t* new_codes;
    float* new_scale;
};

void step(const Recurrence& given, const Team& team);

}  // namespace graftwork
