// Attention of a few query rows over the rows of a cache.
//
// A row's result has the same bits alone and among others, whatever shares its step, however large
// the cache is and whoever calls: sums are taken in one order, which the row's own numbers decide.

#pragma once

#include <cstdint>

namespace graftwork {

// Query rows that read keys and values together.
constexpr int64_t TOGETHER = 8;

// What all rows of an attention have in common: keys [C, dim], values [C, wide].
struct Attention {
    const float* keys;
    const float* values;
    int64_t rows, dim, wide;  // C rows
    float scale, softcap;     // 0: no cap
};

// What ALiBi adds to a score: `slope` times the row's position minus the query's. Rows up to `past`
// stand for positions by their numbers, those after it for `positions` [width].
struct Slope {
    float slope;
    int64_t position, past, width;
    const int64_t* positions;
};

// A query row, the cache rows that it sees, and where its result goes.
//
// It sees those from `first` up to `open`, and of those from there up to `end` the ones with a mark.
struct Query {
    const float* values;      // [dim]
    int64_t first, open, end;
    const uint8_t* marks;     // [end - open], or null if open == end
    const float* bias;        // [C] is added to scores, or null
    const Slope* slope;       // or null
    const float* sink;        // a score that takes weight and adds nothing, or null
    float* out;               // [wide]
};

// The results of up to TOGETHER rows.
void attend_rows(const Attention& of, const Query* queries, int64_t count);

}  // namespace graftwork
