// Products with weights of few bits, and rows of such weights.
//
// Rows of x are rounded to bytes with a scale each; products of bytes are added up exactly over a
// group, and groups in one order. Or they stay floats, whose products are added up in one order. So
// a row's result has the same bits alone and among others, with any number of threads, on every
// processor.

#pragma once

#include <cstdint>

#include "team.h"

namespace graftwork {

// How many codebooks a weight has, each of a run of as many outputs, which are whole tiles if there
// are several; and whether numbers are in pairs, of which one beside a mark is looked up in the
// second half of its codebook.
struct Books {
    int64_t count = 1;
    bool paired = false;

    // Those of `length` numbers each, where a value looks up one of `entries`; 0 for no codebooks.
    static Books of(int64_t count, int64_t length, int64_t entries, int64_t bits, int64_t group) {
        const bool paired = length == 2 * entries && bits == 4 && group % 2 == 0;
        want(length == 0 || paired || length == entries,
             "codebooks must be of 2^bits numbers, or 4 bits in pairs");
        return {count, paired};
    }
};

// Weights [N, K] in tiles, see tiles.h. A value is scale * q + offset, scale * table[q], or
// scale * (q - half of what q may be).
struct Weights {
    const uint8_t* tiles;
    const void* scale;    // [tiles, groups, 16] float, or half
    const void* offset;   // likewise, or null
    const int8_t* table;  // [books, 16], in pairs [books, 32], or null
    const float* bias;    // [N], or null
    int64_t N, K, group, bits;
    bool half_scale, half_offset;
    Books books;
    int64_t span = 0;  // values of a row of x that share a scale; 0: all

    int64_t groups() const { return K / group; }
    int64_t spans() const { return span ? K / span : 1; }
    // Values whose products are added up exactly: they share a scale here and there.
    int64_t unit() const { return span && span < group ? span : group; }
    int64_t units() const { return K / unit(); }
};

// A table [V, K] whose rows are looked up, in the same tiles: one that is a weight, too, is there
// once. Values likewise, but what stands for each q may be any number.
struct Table {
    const uint8_t* tiles;
    const void* scale;    // [tiles, groups, 16] float, or half
    const void* offset;   // likewise, or null
    const float* values;  // [books, 2^bits], in pairs [books, 2^(bits + 1)], or null
    int64_t V, K, group, bits;
    bool half_scale, half_offset;
    Books books;
};

// A span of values that x may be rounded in with such weights. Throws for others.
inline int64_t checked_span(int64_t span, int64_t K, int64_t group) {
    if (span == 0) return 0;
    want(span > 0 && K % span == 0, "spans must divide K");
    const bool whole = span >= group ? span % group == 0 : group % span == 0 && span % 16 == 0;
    want(whole, "spans must be of whole groups, or groups of whole spans of 16");
    return span;
}

// y [count, N] = x [count, K] with weights. Throws for bits of which there are no tiles.
void products(const Weights& weights, const float* x, int64_t count, float* y, const Team& team);

// The same of several weights that differ in their numbers alone, shared out at once.
struct Job {
    Weights weights;
    const float* x;
    int64_t count;
    float* y;
};
void products(const Job* jobs, int64_t number, const Team& team);

// y [count, V] = x [count, K] with a table as weights, x not rounded; bias [V], or null. Throws for
// bits of which there are no tiles.
void float_products(
    const Table& weights,
    const float* bias,
    const float* x,
    int64_t count,
    float* y,
    const Team& team);

// Rows of x, each with `chosen` [count, choices] of the experts: x [count, K], or with `each`
// [count, choices, K].
struct Choices {
    const int64_t* chosen;
    int64_t count, choices, experts;
    bool each;
};

// y [count, choices, V] = products of rows with the weights of the experts that they chose, whose
// V outputs are whole tiles: expert after expert in tiles, scales and bias [experts, V]. rounded:
// as `products`, in spans, else as `float_products`. Throws for an expert that is not there.
void expert_products(
    const Table& weights,
    const float* bias,
    const Choices& choices,
    const float* x,
    bool rounded,
    int64_t span,
    float* y,
    const Team& team);

// y [count, K]: the rows that ids [count] name, of a table with one codebook and no pairs. Throws for
// a row that the table does not have.
void rows_of(const Table& table, const int64_t* ids, int64_t count, float* y, const Team& team);

// Rows [N, K * bits / 8] as tiles. values: what stands for each q, then of eight bits, or null.
void pack(
    const uint8_t* rows,
    const uint8_t* values,
    uint8_t* tiles,
    int64_t N,
    int64_t K,
    int64_t group,
    int64_t bits,
    const Team& team);

}  // namespace graftwork
