// Attention of a step's tokens that are put into caches. A token's result has the same bits alone and
// among others (see query_rows.h).

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

// `graftwork.ort_attend`: tokens are put into caches, turned by their positions, and attend.
//
// query [B,T,H,D], key [B,T,G,D], value [B,T,G,E], where a token is so many numbers after the one
// before; caches [B,G,C,D] and [B,G,C,E], of which the new ones may be the old ones themselves, and
// likewise their steps; past [B]; out [B,T,H,E]. Unless they are null: positions [B,T], otherwise
// those after `past`; tables [angles, half] of a rotary embedding; ancestors [B,T,T], otherwise the
// tokens are a chain; sinks and slopes [H]. A window, chunk or softcap of 0 is none. Queries are kept
// as they are compared with keys, in kept [B,H,W,D] from the rows kept_past [B] on, unless it is null.
// Every key and value is written for `repeat` heads of caches that follow one another: there are G / repeat
// of them. latest: caches hold a text's latest rows, and the step's first token stands behind them, as far
// as a window is concerned.
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
    const float* past_kept;
    const int64_t* kept_past;
    float* kept;
    int64_t B, H, G, T, C, D, E, W, angles, half, window, chunk;
    float scale, softcap;
    bool interleaved;
    Stored stored;
    int64_t repeat;
    bool latest;
};

// Throws for rows that the caches do not have, or positions that the tables do not.
void attend(const Cached& given, const Team& team);

// `graftwork.ort_put_rows`: tokens are put into caches of floats, and nothing attends. out [B,H,T,D] and
// new_keys [B,G/repeat,T,D] are the queries and keys, turned by their positions.
void put_rows(const Cached& given, float* new_keys, const Team& team);

}  // namespace graftwork
