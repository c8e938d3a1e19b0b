// Attention of a step over caches, as ops of torch and of ONNX Runtime have it. A token's result has
// the same bits in both, alone and among others (see query_rows.h).

#pragma once

#include <cstdint>

#include "team.h"

namespace graftwork {

// How caches hold rows: as floats if `bits` is 32, otherwise as codes [.., width * bits / 8] and steps
// [.., 2] (see stored_rows.h), if `turned`, of rows that a Hadamard matrix has turned.
struct Stored {
    int64_t bits;
    bool turned;
};

// `graftwork.attend`, `graftwork.attend_part` and `graftwork.attend_quantized`: q [B,H,T,D], k [B,G,C,D], v [B,G,C,E], mask
// [B,1,T,C] and, unless they are null, steps of k and v, bias [B,H,T,C], sinks [H]; out [B,H,T,E] and,
// unless it is null, weight [B,H,T]. A softcap of 0 is none.
struct Masked {
    const float* q;
    const void *k, *v;
    const float *k_steps, *v_steps;
    const uint8_t* mask;
    const float *bias, *sinks;
    float *out, *weight;
    int64_t B, H, G, T, C, D, E;
    float scale, softcap;
    Stored stored;
};

void attend(const Masked& given, const Team& team);

// `graftwork.attend_rows`: q [B,H,T,D], k [B,G,C,D], v [B,G,C,E], rows [B,R,T,K] and, unless it is null,
// sinks [H]; out [B,H,T,E]. A softcap of 0 is none.
struct Picked {
    const float *q, *k, *v;
    const int64_t* rows;
    const float* sinks;
    float* out;
    int64_t B, H, G, R, T, C, D, E, K;
    float scale, softcap;
};

// Throws for rows that the caches do not have.
void attend(const Picked& given, const Team& team);

// `graftwork.ort_attend`: tokens are put into caches, turned by their positions, and attend.
//
// query [B,T,H,D], key [B,T,G,D], value [B,T,G,E], where a token is so many numbers after the one
// before; caches [B,G,C,D] and [B,G,C,E], of which the new ones may be the old ones themselves, and
// likewise their steps; past [B]; out [B,T,H,E]. Unless they are null: positions [B,T], otherwise
// those after `past`; tables [angles, half] of a rotary embedding; ancestors [B,T,T], otherwise the
// tokens are a chain; sinks and slopes [H]. A window, chunk or softcap of 0 is none.
struct Cached {
    const float *query, *key, *value;
    int64_t query_step, key_step, value_step;
    const void *past_keys, *past_values;
    void *keys, *values;
    const float *past_key_steps, *past_value_steps;
    float *key_steps, *value_steps;
    const int64_t *past, *positions;
    const float *cos, *sin;
    const uint8_t* ancestors;
    const float *sinks, *slopes;
    float* out;
    int64_t B, H, G, T, C, D, E, angles, half, window, chunk;
    float scale, softcap;
    bool interleaved;
    Stored stored;
};

// Throws for rows that the caches do not have, or positions that the tables do not.
void attend(const Cached& given, const Team& team);

// `graftwork.quantize_rows`: x [count, width] as codes and steps.
void store_rows(
    const float* x, int64_t count, int64_t width, const Stored& stored, uint8_t* codes, float* steps);

}  // namespace graftwork
