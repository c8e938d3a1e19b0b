#include "query_rows.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "lanes.h"
#include "row_products.h"

using namespace graftwork;

namespace {

// e^x, within two units in the last place; 0 below the smallest normal number.
Lanes exponential(Lanes x) {
    const Lanes least = splat(-87.33654f), most = splat(88.37626f);
    const Lanes inside = x < least ? least : x > most ? most : x;
    const Lanes twos = rounded(inside * 1.44269504f);
    const Lanes rest =
        fused(twos, splat(2.12194440e-4f), fused(twos, splat(-0.693359375f), inside));
    Lanes sum = splat(1.9875691500e-4f);
    for (float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                         5.0000001201e-1f})
        sum = fused(sum, rest, splat(factor));
    sum = fused(sum * rest, rest, rest + 1.0f);
    const Whole exponent = (__builtin_convertvector(twos, Whole) + 127) << 23;
    return x < least ? Lanes{} : sum * (Lanes)exponent;
}

float exponential(float x) { return exponential(splat(x))[0]; }

template <int... lane>
void part_steps(const float* from, Lanes& times, Lanes& plus, std::integer_sequence<int, lane...>) {
    const Lanes low = load<Lanes>(from), high = load<Lanes>(from + LANES);
    times = __builtin_shufflevector(low, high, (2 * lane)...);
    plus = __builtin_shufflevector(low, high, (2 * lane + 1)...);
}

// The steps of LANES rows from the first on, up to `last`: those that whole numbers are times, and
// those that are added.
void steps_of(const Rows& rows, int64_t first, int64_t last, Lanes& times, Lanes& plus) {
    const auto lanes = std::make_integer_sequence<int, LANES>();
    if (first + LANES - 1 <= last) return part_steps(rows.steps + 2 * first, times, plus, lanes);
    for (int lane = 0; lane < LANES; lane++) {
        const float* const own = rows.steps + 2 * std::min<int64_t>(first + lane, last);
        times[lane] = own[0];
        plus[lane] = own[1];
    }
}

// Scores of the cache rows c .. c + LANES; those that the query does not see are -infinity.
Lanes seen(const Query& query, int64_t c, Lanes scores) {
    if (c >= query.first && c + LANES <= query.open) return scores;
    Whole sees = {};
    if (c >= query.open && c + LANES <= query.end) {
        sees = __builtin_convertvector(load<Marks>(query.marks + (c - query.open)), Whole);
        return sees != 0 ? scores : splat(-INFINITY);
    }
    for (int lane = 0; lane < LANES; lane++) {
        const int64_t row = c + lane;
        const bool marked = row >= query.open && row < query.end && query.marks[row - query.open];
        sees[lane] = (row >= query.first && row < query.open) || marked;
    }
    return sees != 0 ? scores : splat(-INFINITY);
}

// How far the cache rows c .. c + LANES are behind a query.
Lanes distances(const Slope& of, int64_t c) {
    Lanes found = {};
    for (int lane = 0; lane < LANES; lane++) {
        const int64_t row = c + lane, step = row - of.past;
        const int64_t position = step < 0 ? row : of.positions[std::min(step, of.width - 1)];
        found[lane] = float(position - of.position);
    }
    return found;
}

typedef float HalfLanes __attribute__((vector_size(2 * LANES)));
typedef double Doubles __attribute__((vector_size(4 * LANES)));

// A sum that has the same bits in whatever lanes its terms are, and with any zeros among them: a token
// lies elsewhere in the cache as a node of a tree than in a chain. Terms are rounded to multiples of
// 2^(exponent - 31), if none is larger than 2^exponent, and of such the sums of 2^22 are exact.
class Exact {
    Doubles sums[2] = {};
    Doubles magic;

public:
    explicit Exact(int exponent) : magic(std::ldexp(1.5, exponent + 21) - Doubles{}) {}
    // LANES terms.
    void add(const float* terms) {
        for (int half = 0; half < 2; half++) {
            const Doubles wide = __builtin_convertvector(
                load<HalfLanes>(terms + half * LANES / 2), Doubles);
            sums[half] += (wide + magic) - magic;
        }
    }
    double sum() const {
        const Doubles both = sums[0] + sums[1];
        double total = 0;
        for (int lane = 0; lane < LANES / 2; lane++) total += both[lane];
        return total;
    }
};

// The largest of scores [rows], which come in parts of LANES.
float largest_of(const float* scores, int64_t rows) {
    Lanes most = splat(-INFINITY);
    for (int64_t c = 0; c < rows; c += LANES) {
        const Lanes score = load<Lanes>(scores + c);
        most = score > most ? score : most;
    }
    float largest = -INFINITY;
    for (int lane = 0; lane < LANES; lane++) largest = std::max(largest, most[lane]);
    return largest;
}

// Turns scores [rows] into the exponentials of what they are more than `largest`; their sum.
double soften(float* scores, int64_t rows, float largest) {
    Exact sum(0);
    for (int64_t c = 0; c < rows; c += LANES) {
        store(scores + c, exponential(load<Lanes>(scores + c) - largest));
        sum.add(scores + c);
    }
    return sum.sum();
}

// What weights add up to, with that of a sink.
float total_of(double sum, const float* sink, float largest) {
    return float(sum + (sink ? exponential(*sink - largest) : 0));
}

// Turns scores [rows] of a query row into weights; what they add up to. Rows in parts of LANES. weight:
// see `Query`.
float soften(float* scores, int64_t rows, const float* sink, float* weight) {
    const float largest = std::max(sink ? *sink : -INFINITY, largest_of(scores, rows));
    if (weight && largest == -INFINITY) {
        std::fill_n(scores, rows, 0.0f);
        *weight = largest;
        return 1;
    }
    const float total = total_of(soften(scores, rows, largest), sink, largest);
    if (weight) *weight = largest + std::log(total);
    return total;
}

// Weights [rows] of a query row from the first on, made those of values' whole numbers; what is to be
// added to each sum of them.
float fold_steps(float* weights, const Rows& values, int64_t first, int64_t rows) {
    static thread_local Space<float> space;
    float* const products = space.of((rows + LANES - 1) / LANES * LANES);
    Lanes most = {};
    for (int64_t c = 0; c < rows; c += LANES) {
        Lanes times, plus, weight = load<Lanes>(weights + c);
        steps_of(values, first + c, first + rows - 1, times, plus);
        const Lanes product = weight * plus, size = product < 0.0f ? -product : product;
        most = size > most ? size : most;
        store(products + c, product);
        store(weights + c, weight * times);
    }
    float largest = 0;
    for (int lane = 0; lane < LANES; lane++) largest = std::max(largest, most[lane]);
    int exponent;
    std::frexp(largest, &exponent);
    Exact sum(exponent);
    for (int64_t c = 0; c < rows; c += LANES) sum.add(products + c);
    return float(sum.sum());
}

// Rows as they lie in memory: those from the first on, which then is row 0.
struct Lying {
    Space<float> space;

    template <class Kind>
    Rows from(const Rows& rows, int64_t first, int64_t count) {
        const float* const steps = rows.steps ? rows.steps + 2 * first : nullptr;
        if (rows.places) return {rows.data, nullptr, rows.width, 32, nullptr, rows.places + first};
        if (!rows.source) return {row_of<Kind>(rows, first), steps, rows.width, rows.bits};
        float* const made = space.of(count * rows.width);
        rows.source->read(first, count, made);
        return {made, nullptr, rows.width, rows.bits};
    }
};

// Rows that stay in the processor's nearest cache.
template <class Kind>
int64_t near_rows(const Rows& rows) {
    // They may have no columns, and so no bytes.
    const int64_t wide = std::max<int64_t>(1, Kind::bytes(rows.width));
    return std::max<int64_t>(1, NEAR_BYTES / wide);
}

// See `score_rows`.
template <class Kind>
void score_kind(
    const Attention& of, const Query* queries, int64_t count, const Span& span, float* scores,
    int64_t stride) {
    static thread_local Lying lying;
    const Rows& keys = of.keys;
    const int64_t begin = span.begin, end = span.end, rows = span.rows();
    float sums[MANY] = {};
    for (int64_t row = 0; keys.steps && row < count; row++)
        sums[row] = sum_of(queries[row].values, keys.width);
    const auto finish = [&](int64_t row, int64_t c, Lanes score) {
        const Query& query = queries[row];
        score *= of.scale;
        if (of.softcap != 0)
            score = of.softcap - 2 * of.softcap / (exponential(score * (2 / of.softcap)) + 1);
        if (query.bias) score += load<Lanes>(query.bias + c, std::min<int64_t>(LANES, of.rows - c));
        if (query.slope) score += query.slope->slope * distances(*query.slope, c);
        store(scores + row * stride + c - begin, seen(query, c, score));
    };
    const auto score_keys = [&](const Rows& own, int64_t from, int64_t c) {
        const int64_t last = of.rows - 1 - from;
        Lanes times = {}, plus = {};
        if (own.steps) steps_of(own, c - from, last, times, plus);
        by_rows(count, [&](auto rows_at_once, int64_t first) {
            Lanes products_of[rows_at_once.value];
            products<Kind>(queries + first, own, c - from, last, products_of);
            for (int row = 0; row < rows_at_once.value; row++) {
                Lanes score = products_of[row];
                if (own.steps) score = fused(score, times, plus * sums[first + row]);
                finish(first + row, c, score);
            }
        });
    };
    if (keys.source && keys.source->multiply(queries, count, begin, rows, scores, stride)) {
        for (int64_t row = 0; row < count; row++)
            for (int64_t c = begin; c < end; c += LANES)
                finish(row, c, load<Lanes>(scores + row * stride + c - begin));
        return;
    }
    // A multiple of LANES, and so blocks end where parts of LANES do.
    const int64_t some = keys.source ? (near_rows<Kind>(keys) + LANES - 1) / LANES * LANES : rows;
    for (int64_t from = begin; from < end; from += some) {
        const int64_t until = std::min(end, from + some);
        const Rows own = lying.from<Kind>(keys, from, std::min(of.rows, from + some) - from);
        for (int64_t c = from; c < until; c += LANES) score_keys(own, from, c);
    }
}

// Adds what rows of a span weigh, weights [count, stride], to the queries' results.
template <class Kind>
void weigh_rows(
    const Rows& values, const float* weights, int64_t stride, const Span& span, const Query* queries,
    int64_t count) {
    static thread_local Lying lying;
    const int64_t block = near_rows<Kind>(values), rows = span.rows();
    if (values.source && values.source->weigh(weights, stride, span.begin, rows, queries, count)) return;
    for (int64_t c = 0; c < rows; c += block) {
        const int64_t there = std::min(block, rows - c);
        const Rows own = lying.from<Kind>(values, span.begin + c, there);
        by_rows(count, [&](auto rows_at_once, int64_t first) {
            constexpr int ROWS = rows_at_once.value;
            const auto columns = [&](auto vectors, int64_t e) {
                const int64_t last = std::min<int64_t>(LANES, values.width - e);
                weigh<Kind, ROWS, vectors.value>(
                    weights + first * stride + c, stride, own, 0, there, last, queries + first, e);
            };
            int64_t e = 0;
            for (; e + FEW * LANES <= values.width; e += FEW * LANES)
                columns(std::integral_constant<int, FEW>(), e);
            for (; e < values.width; e += LANES) columns(std::integral_constant<int, 1>(), e);
        });
    }
}

// The span's part that begins with a row.
Span part_of(const Rows& values, const Span& span, int64_t row) {
    return {row, std::min(span.end, values.source->part_end(row))};
}

// As `weigh_rows`, of rows of a part: to sums [count, width], which are its own.
void weigh_part(
    const Rows& values, const float* weights, int64_t stride, const Span& part, const Query* queries,
    int64_t count, float* sums) {
    Query own[MANY];
    for (int64_t row = 0; row < count; row++) {
        own[row] = queries[row];
        own[row].out = sums + row * values.width;
    }
    std::fill_n(sums, count * values.width, 0.0f);
    weigh_rows<Floats>(values, weights, stride, part, own, count);
}

// Adds sums of a part to results.
void add_part(const float* sums, const Query* queries, int64_t count, int64_t width) {
    for (int64_t row = 0; row < count; row++)
        for (int64_t e = 0; e < width; e++) queries[row].out[e] += sums[row * width + e];
}

void divide(const Query* queries, const float* totals, int64_t count, int64_t width) {
    for (int64_t row = 0; row < count; row++)
        for (int64_t e = 0; e < width; e++) queries[row].out[e] /= totals[row];
}

// See `attend_rows`.
template <class Kind>
void attend_kind(const Attention& of, const Query* queries, int64_t count) {
    static thread_local Space<float> space;
    float added[MANY] = {}, totals[MANY];
    const Rows& values = of.values;
    const int64_t width = values.width;
    const Span span = span_of(of, queries, count);
    const int64_t begin = span.begin, rows = span.rows();
    const int64_t stride = (rows + LANES - 1) / LANES * LANES;
    float* const weights = space.of(count * stride + (values.source ? count * width : 0));
    score_kind<Kind>(of, queries, count, span, weights, stride);
    for (int64_t row = 0; row < count; row++) {
        const Query& query = queries[row];
        totals[row] = soften(weights + row * stride, stride, query.sink, query.weight);
        if (values.steps) added[row] = fold_steps(weights + row * stride, values, begin, rows);
    }
    for (int64_t row = 0; row < count; row++) std::fill_n(queries[row].out, width, added[row]);
    if (!values.source) weigh_rows<Kind>(values, weights, stride, span, queries, count);
    float* const sums = weights + count * stride;
    for (int64_t row = begin; values.source && row < span.end;) {
        const Span part = part_of(values, span, row);
        weigh_part(values, weights + row - begin, stride, part, queries, count, sums);
        add_part(sums, queries, count, width);
        row = part.end;
    }
    divide(queries, totals, count, width);
}

// A gang's scores, which become weights, and what becomes of each of its parts.
struct Shared {
    const Gang& gang;
    Span span;
    int64_t stride;
    std::vector<Span> parts;
    std::vector<float> largest, sums;  // [parts, count], [parts, count, width]
    std::vector<double> totals;        // [parts, count]
    float* scores;

    explicit Shared(const Gang& gang)
        : gang(gang), span(span_of(gang.of, gang.queries.data(), count())), scores(nullptr) {
        stride = (span.rows() + LANES - 1) / LANES * LANES;
        for (int64_t row = span.begin; row < span.end; row = parts.back().end)
            parts.push_back(part_of(gang.of.values, span, row));
        largest.resize(parts.size() * count());
        totals.resize(parts.size() * count());
        sums.resize(parts.size() * count() * width());
    }
    int64_t count() const { return gang.queries.size(); }
    int64_t width() const { return gang.of.values.width; }
    const Query* queries() const { return gang.queries.data(); }
    float* scores_of(int64_t row, const Span& part) const {
        return scores + row * stride + part.begin - span.begin;
    }
    static int64_t whole(const Span& part) { return (part.rows() + LANES - 1) / LANES * LANES; }

    void score(int64_t at) {
        const Span& part = parts[at];
        score_kind<Floats>(gang.of, queries(), count(), part, scores_of(0, part), stride);
        for (int64_t row = 0; row < count(); row++)
            largest[at * count() + row] = largest_of(scores_of(row, part), whole(part));
    }
    float largest_for(int64_t row) const {
        const float* const sink = gang.queries[row].sink;
        float found = sink ? *sink : -INFINITY;
        for (size_t at = 0; at < parts.size(); at++)
            found = std::max(found, largest[at * count() + row]);
        return found;
    }
    void weigh(int64_t at) {
        const Span& part = parts[at];
        for (int64_t row = 0; row < count(); row++)
            totals[at * count() + row] = soften(scores_of(row, part), whole(part), largest_for(row));
        weigh_part(gang.of.values, scores_of(0, part), stride, part, queries(), count(),
                   sums.data() + at * count() * width());
    }
    void finish() const {
        float all[MANY];
        for (int64_t row = 0; row < count(); row++) {
            double total = 0;  // of sums that are exact
            for (size_t at = 0; at < parts.size(); at++) total += totals[at * count() + row];
            all[row] = total_of(total, gang.queries[row].sink, largest_for(row));
            std::fill_n(gang.queries[row].out, width(), 0.0f);
        }
        for (size_t at = 0; at < parts.size(); at++)
            add_part(sums.data() + at * count() * width(), queries(), count(), width());
        divide(queries(), all, count(), width());
    }
};

}  // namespace

Span graftwork::span_of(const Attention& of, const Query* queries, int64_t count) {
    Span span = {of.rows, 0};
    for (int64_t row = 0; row < count; row++) {
        const bool open = queries[row].first < queries[row].open;
        span.begin = std::min(span.begin, open ? queries[row].first : queries[row].open);
        span.end = std::max(span.end, queries[row].end);
    }
    span.begin = span.begin / LANES * LANES;  // a row's place decides the lane that it is added up in
    return span;
}

void graftwork::score_rows(
    const Attention& of, const Query* queries, int64_t count, const Span& span, float* scores,
    int64_t stride) {
    if (of.keys.bits == 4) return score_kind<Halves>(of, queries, count, span, scores, stride);
    if (of.keys.bits == 8) return score_kind<Bytes>(of, queries, count, span, scores, stride);
    score_kind<Floats>(of, queries, count, span, scores, stride);
}

float graftwork::log_sum(const float* scores, int64_t count) {
    static thread_local std::vector<float> space;
    space.assign(scores, scores + count);
    float found = -INFINITY;
    soften(space.data(), count, nullptr, &found);
    return found;
}

void graftwork::share_attention(float* scores, int64_t count) {
    float log_total;
    const Lanes total = splat(soften(scores, count, nullptr, &log_total));
    for (int64_t c = 0; c < count; c += LANES) store(scores + c, load<Lanes>(scores + c) / total);
}

void graftwork::attend_rows(const Attention& of, const Query* queries, int64_t count) {
    if (of.keys.bits == 4) return attend_kind<Halves>(of, queries, count);
    if (of.keys.bits == 8) return attend_kind<Bytes>(of, queries, count);
    if (of.keys.places) return attend_kind<Scattered>(of, queries, count);
    attend_kind<Floats>(of, queries, count);
}

void graftwork::attend_together(const std::vector<Gang>& gangs, const Team& team) {
    static thread_local Space<float> space;
    std::vector<Shared> shared;
    std::vector<std::pair<Shared*, int64_t>> work;
    shared.reserve(gangs.size());
    int64_t scores = 0, bytes = 0;
    for (const Gang& gang : gangs) {
        shared.emplace_back(gang);
        scores += shared.back().count() * shared.back().stride;
    }
    float* room = space.of(scores);
    for (Shared& each : shared) {
        each.scores = room;
        room += each.count() * each.stride;
        for (size_t at = 0; at < each.parts.size(); at++) {
            work.emplace_back(&each, at);
            bytes = std::max(bytes, each.parts[at].rows() * each.width() * int64_t(sizeof(float)));
        }
    }
    team.each(work.size(), bytes, [&](int64_t i) { work[i].first->score(work[i].second); });
    team.each(work.size(), bytes, [&](int64_t i) { work[i].first->weigh(work[i].second); });
    for (const Shared& each : shared) each.finish();
}
