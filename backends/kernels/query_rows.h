// Attention of a few query rows over the rows of a cache.
//
// A row's result has the same bits alone and among others, whatever shares its step, however large
// the cache is and whoever calls, and wherever in the cache the rows lie that it sees: sums over these
// are taken in their order, or are exact.

#pragma once

#include <cstdint>
#include <vector>

#include "team.h"

namespace graftwork {

// Query rows that read keys and values together; and those that share rows that are made for them.
constexpr int64_t TOGETHER = 8, MANY = 64;

struct Query;

// Rows that are made when they are read, for up to MANY queries. What values weigh is added up in parts
// of rows, and then these sums, so that threads may share rows out.
struct Source {
    // Where the part ends that begins with this row: the same for all that read the source.
    virtual int64_t part_end(int64_t row) const = 0;
    // Writes `count` rows from the first on.
    virtual void read(int64_t first, int64_t count, float* to) const = 0;
    // Products of queries with so many rows from the first on, to scores [count, stride], which is
    // filled up to whole vectors; or false, if the rows have to be read.
    virtual bool multiply(
        const Query* queries, int64_t count, int64_t first, int64_t rows, float* scores,
        int64_t stride) const = 0;
    // Adds what rows weigh, weights [count, stride], to the queries' results; or false.
    virtual bool weigh(
        const float* weights, int64_t stride, int64_t first, int64_t rows, const Query* queries,
        int64_t count) const = 0;

protected:
    ~Source() = default;
};

// Rows of a cache [C, width], as floats or as whole numbers of 4 or 8 bits without a sign. A row's
// numbers are `steps`' first number times these, plus its second one. Of 4 bits, the first half of a
// row's numbers are the lower halves of its bytes. Or floats that a source makes, or of which those at
// `places` are the rows.
struct Rows {
    const void* data;
    const float* steps;  // [C, 2], or null for floats
    int64_t width, bits;  // 32: floats
    const Source* source = nullptr;
    const int64_t* places = nullptr;
};

// What all rows of an attention have in common.
struct Attention {
    Rows keys, values;
    int64_t rows;          // C
    float scale, softcap;  // 0: no cap
};

// What ALiBi adds to a score: `slope` times the row's position minus the query's. Rows up to `past`
// stand for positions by their numbers, those after it for `positions` [width].
struct Slope {
    float slope;
    int64_t position, past, width;
    const int64_t* positions;
};

// A query row, the cache rows that it sees, and where its result goes. If it sees none, that is 0, and
// its weight -infinity.
//
// It sees those from `first` up to `open`, and of those from there up to `end` the ones with a mark.
struct Query {
    const float* values;      // as wide as keys
    int64_t first, open, end;
    const uint8_t* marks;     // [end - open], or null if open == end
    const float* bias;        // [C] is added to scores, or null
    const Slope* slope;       // or null
    const float* sink;        // a score that takes weight and adds nothing, or null
    float* out;               // as wide as values
    float* weight;            // the logarithm of the sum of its scores' exponentials, or null
};

// Rows of a cache from `begin`, a multiple of the lanes of a vector, up to `end`.
struct Span {
    int64_t begin, end;
    int64_t rows() const { return end > begin ? end - begin : 0; }
};

// The rows that some query sees.
Span span_of(const Attention& of, const Query* queries, int64_t count);

// Scores [count, stride] of a span's rows for up to MANY queries, filled up to whole vectors; those
// of rows that a query does not see are -infinity.
void score_rows(
    const Attention& of, const Query* queries, int64_t count, const Span& span, float* scores,
    int64_t stride);

// The logarithm of the sum of scores' exponentials; of whole vectors.
float log_sum(const float* scores, int64_t count);

// Turns scores into the attention that rows get: 0 where all are -infinity. Of whole vectors.
void share_attention(float* scores, int64_t count);

// The results of up to MANY rows.
void attend_rows(const Attention& of, const Query* queries, int64_t count);

// Up to MANY queries of rows that sources make. None of them wants its weight.
struct Gang {
    Attention of;
    std::vector<Query> queries;
};

// The same bits as `attend_rows` gives each, of few gangs: threads share their rows out.
void attend_together(const std::vector<Gang>& gangs, const Team& team);

}  // namespace graftwork
