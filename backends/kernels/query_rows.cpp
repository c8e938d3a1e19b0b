#include "query_rows.h"

#include <vector>

#include "lanes.h"

using namespace graftwork;

namespace {

#ifdef WIDE_DOT_PRODUCTS
constexpr int NEARBY = 4;  // query rows whose sums fit in registers
#else
constexpr int NEARBY = 2;
#endif
constexpr int FEW = 4;  // keys, or vectors of values, at a time

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

// Lane sums of FEW keys' products with each of ROWS queries [dim], added up as far as FEW vectors
// make one. Keys are those from `keys` on, of which there are `count`; of more, the last one's.
template <int ROWS>
void few_products(
    const Query* queries, const float* keys, int64_t count, int64_t dim, Lanes (&sums)[ROWS]) {
    const float* from[FEW];
    for (int key = 0; key < FEW; key++) from[key] = keys + std::min<int64_t>(key, count - 1) * dim;
    Lanes all[ROWS][FEW] = {};
    const auto add = [&](int64_t d, auto read) {
        Lanes few[FEW];
#pragma GCC unroll 4
        for (int key = 0; key < FEW; key++) few[key] = held(read(from[key] + d));
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; row++) {
            const Lanes query = held(read(queries[row].values + d));
#pragma GCC unroll 4
            for (int key = 0; key < FEW; key++) all[row][key] = fused(query, few[key], all[row][key]);
        }
    };
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) add(d, [](const float* at) { return load<Lanes>(at); });
    if (d < dim) add(d, [&](const float* at) { return load<Lanes>(at, dim - d); });
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; row++) sums[row] = add_up<1, FEW>(all[row]);
}

// Products of ROWS queries with LANES keys, of which there are `count`; what the lanes of others
// hold is undefined.
template <int ROWS>
void products(
    const Query* queries, const float* keys, int64_t count, int64_t dim, Lanes (&scores)[ROWS]) {
    Lanes parts[LANES / FEW][ROWS];
    for (int part = 0; part < LANES / FEW; part++) {
        const int64_t at = std::min<int64_t>(part * FEW, count - 1);
        few_products(queries, keys + at * dim, count - at, dim, parts[part]);
    }
    for (int row = 0; row < ROWS; row++) {
        Lanes own[LANES / FEW];
        for (int part = 0; part < LANES / FEW; part++) own[part] = parts[part][row];
        scores[row] = add_up<FEW, LANES>(own);
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

// Turns scores [rows] of a query row into weights; what they add up to. Rows in parts of LANES.
float soften(float* scores, int64_t rows, const float* sink) {
    Lanes most = splat(-INFINITY);
    for (int64_t c = 0; c < rows; c += LANES) {
        const Lanes score = load<Lanes>(scores + c);
        most = score > most ? score : most;
    }
    float largest = sink ? *sink : -INFINITY;
    for (int lane = 0; lane < LANES; lane++) largest = std::max(largest, most[lane]);
    Lanes sums[1] = {};
    for (int64_t c = 0; c < rows; c += LANES) {
        const Lanes weight = exponential(load<Lanes>(scores + c) - largest);
        store(scores + c, weight);
        sums[0] += weight;
    }
    return add_up(sums)[0] + (sink ? exponential(*sink - largest) : 0);
}

// What rows weigh: weights [ROWS, stride] times values [rows, wide] over totals [ROWS], of COUNT
// vectors of columns; of the last one, `last` columns.
template <int ROWS, int COUNT>
void weigh(
    const float* weights, int64_t stride, const float* totals, const float* values, int64_t rows,
    int64_t wide, int64_t last, const Query* queries, int64_t e) {
    Lanes sums[ROWS][COUNT] = {};
    for (int64_t c = 0; c < rows; c++)
#pragma GCC unroll 4
        for (int i = 0; i < COUNT; i++) {
            const float* from = values + c * wide + e + i * LANES;
            const Lanes value = held(i + 1 < COUNT ? load<Lanes>(from) : load<Lanes>(from, last));
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++)
                sums[r][i] = fused(splat(weights[r * stride + c]), value, sums[r][i]);
        }
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < COUNT; i++)
            store(queries[r].out + e + i * LANES, sums[r][i] / totals[r],
                  i + 1 < COUNT ? LANES : last);
}

// Calls one of `what`'s functions, with as many rows at a time as fit, until all `count` are done.
template <int ROWS = NEARBY, class What>
void by_rows(int64_t count, const What& what, int64_t first = 0) {
    for (; first + ROWS <= count; first += ROWS) what(std::integral_constant<int, ROWS>(), first);
    if constexpr (ROWS > 1) by_rows<ROWS - 1>(count, what, first);
}

}  // namespace

void graftwork::attend_rows(const Attention& of, const Query* queries, int64_t count) {
    static thread_local std::vector<float> space;
    int64_t begin = of.rows, end = 0;
    for (int64_t row = 0; row < count; row++) {
        const bool open = queries[row].first < queries[row].open;
        begin = std::min(begin, open ? queries[row].first : queries[row].open);
        end = std::max(end, queries[row].end);
    }
    begin = begin / LANES * LANES;  // a row's place decides the lane that it is added up in
    const int64_t rows = std::max<int64_t>(0, end - begin);
    const int64_t stride = (rows + LANES - 1) / LANES * LANES;
    space.resize(count * stride);
    float* const weights = space.data();
    for (int64_t c = begin; c < end; c += LANES) {
        const float* const keys = of.keys + c * of.dim;
        const int64_t there = std::min<int64_t>(LANES, of.rows - c);
        by_rows(count, [&](auto rows_at_once, int64_t first) {
            Lanes scores[rows_at_once.value];
            products(queries + first, keys, there, of.dim, scores);
            for (int row = 0; row < rows_at_once.value; row++) {
                const Query& query = queries[first + row];
                Lanes score = scores[row] * of.scale;
                if (of.softcap != 0)
                    score = of.softcap - 2 * of.softcap / (exponential(score * (2 / of.softcap)) + 1);
                if (query.bias) score += load<Lanes>(query.bias + c, there);
                if (query.slope) score += query.slope->slope * distances(*query.slope, c);
                store(weights + (first + row) * stride + c - begin, seen(query, c, score));
            }
        });
    }
    float totals[TOGETHER];
    for (int64_t row = 0; row < count; row++)
        totals[row] = soften(weights + row * stride, stride, queries[row].sink);
    const float* const values = of.values + begin * of.wide;
    by_rows(count, [&](auto rows_at_once, int64_t first) {
        constexpr int ROWS = rows_at_once.value;
        const float* const own = weights + first * stride;
        int64_t e = 0;
        for (; e + FEW * LANES <= of.wide; e += FEW * LANES)
            weigh<ROWS, FEW>(own, stride, totals + first, values, rows, of.wide, LANES,
                             queries + first, e);
        for (; e < of.wide; e += LANES)
            weigh<ROWS, 1>(own, stride, totals + first, values, rows, of.wide, of.wide - e,
                           queries + first, e);
    });
}
