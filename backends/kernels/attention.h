// Attention of a step over caches, as ops of torch and of ONNX Runtime have it. A token's result has
// the same bits in both, alone and among others (see query_rows.h).

#pragma once

#include <cstdint>

#include "team.h"

namespace graftwork {

// `graftwork.attend`: q [B,H,T,D], k [B,G,C,D], v [B,G,C,E], mask [B,1,T,C] and, unless they are null,
// bias [B,H,T,C], sinks [H]; out [B,H,T,E]. A softcap of 0 is none.
struct Masked {
    const float *q, *k, *v;
    const uint8_t* mask;
    const float *bias, *sinks;
    float* out;
    int64_t B, H, G, T, C, D, E;
    float scale, softcap;
};

void attend(const Masked& given, const Team& team);

// `graftwork.ort_attend`: tokens are put into caches, turned by their positions, and attend.
//
// query [B,T,H,D], key [B,T,G,D], value [B,T,G,E], where a token is so many numbers after the one
// before; caches [B,G,C,D] and [B,G,C,E], of which the new ones may be the old ones themselves; past
// [B]; out [B,T,H,E]. Unless they are null: positions [B,T], otherwise those after `past`; tables
// [angles, half] of a rotary embedding; ancestors [B,T,T], otherwise the tokens are a chain; sinks
// and slopes [H]. A window or softcap of 0 is none.
struct Cached {
    const float *query, *key, *value;
    int64_t query_step, key_step, value_step;
    const float *past_keys, *past_values;
    float *keys, *values;
    const int64_t *past, *positions;
    const float *cos, *sin;
    const uint8_t* ancestors;
    const float *sinks, *slopes;
    float* out;
    int64_t B, H, G, T, C, D, E, angles, half, window;
    float scale, softcap;
    bool interleaved;
};

// Throws for rows that the caches do not have, or positions that the tables do not.
void attend(const Cached& given, const Team& team);

}  // namespace graftwork
