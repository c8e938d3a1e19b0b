// Query rows of attention in parts for threads, and in gangs that read cache rows together.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "lanes.h"
#include "query_rows.h"
#include "team.h"

namespace graftwork {

// Query rows of every group in parts, `work(group, first, last)`, of which each reads keys once for
// `together` rows: so many parts for a thread at least, though keys are then read more often.
template <class Work>
void in_parts(
    const Team& team, int64_t groups, int64_t rows, int64_t bytes, const Work& work,
    int64_t shares = 1, int64_t together = TOGETHER) {
    if (groups * rows == 0) return;
    const int64_t gangs = (rows + together - 1) / together;
    const int64_t wanted = (shares * team.threads() + groups - 1) / groups;
    const int64_t parts = std::min(rows, std::max(gangs, wanted));
    team.each(groups * parts, bytes, [&](int64_t part) {
        const int64_t at = part % parts;
        work(part / parts, rows * at / parts, rows * (at + 1) / parts);
    });
}

// Calls `make` for each query row from first to last, and gives them to `work` in gangs: the number of
// the first, the queries, and how many they are.
template <class Make, class Work>
void in_gangs(
    int64_t first, int64_t last, const Make& make, const Work& work, int64_t together = TOGETHER) {
    Query queries[MANY];
    for (; first < last; first += together) {
        const int64_t count = std::min(together, last - first);
        for (int64_t i = 0; i < count; i++) queries[i] = make(first + i, i);
        work(first, queries, count);
    }
}

// Scores of queries over what they see of keys, given to `take(number, scores, span)`; they are
// filled up to whole vectors by hidden rows.
template <class Make, class Take>
void score(
    const Rows& keys, int64_t rows, float scale, float softcap, int64_t first, int64_t last,
    const Make& make, const Take& take) {
    static thread_local std::vector<float> space;
    const Attention of = {keys, {}, rows, scale, softcap};
    in_gangs(first, last, make, [&](int64_t first, const Query* queries, int64_t count) {
        const Span span = span_of(of, queries, count);
        const int64_t stride = (span.rows() + LANES - 1) / LANES * LANES;
        space.resize(count * stride);
        if (stride) score_rows(of, queries, count, span, space.data(), stride);
        for (int64_t i = 0; i < count; i++) take(first + i, space.data() + i * stride, span);
    });
}

// A query row [width] that sees the cache rows [rows] with a mark.
inline Query marked(const float* values, const uint8_t* marks, int64_t rows) {
    Query query = {};
    query.values = values;
    query.first = query.open = std::find_if(marks, marks + rows, [](auto m) { return m; }) - marks;
    query.end = rows;
    query.marks = marks + query.open;
    while (query.end > query.open && !marks[query.end - 1]) query.end--;
    return query;
}

}  // namespace graftwork
