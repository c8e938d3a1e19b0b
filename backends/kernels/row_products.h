// Products of query rows with the rows of a cache, and of weights with them: what kernels of attention
// share.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "lanes.h"
#include "query_rows.h"

namespace {

using graftwork::Query;
using graftwork::Rows;

#ifdef WIDE_DOT_PRODUCTS
constexpr int NEARBY = 4;  // query rows whose sums fit in registers
#else
constexpr int NEARBY = 2;
#endif
constexpr int FEW = 4;  // keys, or vectors of values, at a time
// How rows lie: `row` is where one begins, `read` gives LANES of its numbers from the d-th on, `some`
// the first few of them.
struct Floats {
    typedef float Number;
    static int64_t bytes(int64_t width) { return width * int64_t(sizeof(float)); }
    static Lanes read(const float* row, int64_t, int64_t d) { return load<Lanes>(row + d); }
    static Lanes some(const float* row, int64_t, int64_t d, int64_t count) {
        return load<Lanes>(row + d, count);
    }
};

struct Bytes {
    typedef uint8_t Number;
    static int64_t bytes(int64_t width) { return width; }
    static Lanes read(const uint8_t* row, int64_t, int64_t d) { return floats(load<Marks>(row + d)); }
    static Lanes some(const uint8_t* row, int64_t, int64_t d, int64_t count) {
        return floats(load<Marks>(row + d, count));
    }
    static Lanes floats(Marks bytes) { return floats(whole(bytes)); }
    static Lanes floats(Whole numbers) { return __builtin_convertvector(numbers, Lanes); }
    static Whole whole(Marks bytes) {
#if defined(WIDE_DOT_PRODUCTS)
        return (Whole)_mm512_cvtepu8_epi32((__m128i)bytes);
#elif defined(__AVX2__)
        return (Whole)_mm256_cvtepu8_epi32(_mm_loadl_epi64((__m128i*)&bytes));
#else
        return __builtin_convertvector(bytes, Whole);
#endif
    }
};

struct Halves {
    typedef uint8_t Number;
    static int64_t bytes(int64_t width) { return width / 2; }
    static Lanes read(const uint8_t* row, int64_t width, int64_t d) {
        const int64_t half = width / 2;
        // Bytes are parted when they are wide: eight of them are no vector that processors know.
        if (d + LANES <= half) return Bytes::floats(Bytes::whole(load<Marks>(row + d)) & 15);
        if (d >= half) return Bytes::floats(Bytes::whole(load<Marks>(row + d - half)) >> 4);
        return some(row, width, d, LANES);
    }
    static Lanes some(const uint8_t* row, int64_t width, int64_t d, int64_t count) {
        const int64_t half = width / 2;
        Lanes found = {};
        for (int64_t lane = 0; lane < count; lane++)
            found[lane] = d + lane < half ? row[d + lane] & 15 : row[d + lane - half] >> 4;
        return found;
    }
};

// Floats of which some rows are read.
struct Scattered : Floats {};

template <class Kind>
const typename Kind::Number* row_of(const Rows& rows, int64_t row) {
    if constexpr (std::is_same_v<Kind, Scattered>) row = rows.places[row];
    return reinterpret_cast<const typename Kind::Number*>(
        static_cast<const char*>(rows.data) + row * Kind::bytes(rows.width));
}

// Lane sums of FEW keys' products with each of ROWS queries, added up as far as FEW vectors make one.
// Keys are those from `first` on, up to `last`; of more, the last one's.
template <class Kind, int ROWS>
void few_products(
    const Query* queries, const Rows& keys, int64_t first, int64_t last, Lanes (&sums)[ROWS]) {
    const typename Kind::Number* from[FEW];
    for (int key = 0; key < FEW; key++) from[key] = row_of<Kind>(keys, std::min(first + key, last));
    const int64_t width = keys.width;
    Lanes all[ROWS][FEW] = {};
    const auto add = [&](int64_t d, auto key_lanes, auto query_lanes) {
        Lanes few[FEW];
#pragma GCC unroll 4
        for (int key = 0; key < FEW; key++) few[key] = held(key_lanes(from[key], d));
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; row++) {
            const Lanes query = held(query_lanes(queries[row].values + d));
#pragma GCC unroll 4
            for (int key = 0; key < FEW; key++) all[row][key] = fused(query, few[key], all[row][key]);
        }
    };
    int64_t d = 0;
    for (; d + LANES <= width; d += LANES)
        add(d, [&](auto row, int64_t at) { return Kind::read(row, width, at); },
            [](const float* at) { return load<Lanes>(at); });
    if (const int64_t rest = width - d)
        add(d, [&](auto row, int64_t at) { return Kind::some(row, width, at, rest); },
            [&](const float* at) { return load<Lanes>(at, rest); });
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; row++) sums[row] = add_up<1, FEW>(all[row]);
}

// Words of 32 bits, the second of two or the first.
template <int... lane>
Whole every_second(Whole low, Whole high, int which, std::integer_sequence<int, lane...>) {
    return which ? __builtin_shufflevector(low, high, (2 * lane + 1)...)
                 : __builtin_shufflevector(low, high, (2 * lane)...);
}

// A label: eight or sixteen numbers of 4 bits, in one word or two. Few numbers of many rows are added
// up a row a lane, where a vector of one row would be mostly empty.
inline bool is_label(int64_t width) { return width == 8 || width == 16; }

// As `products`, of labels.
template <int ROWS>
void label_products(
    const Query* queries, const Rows& keys, int64_t first, int64_t last, Lanes (&scores)[ROWS]) {
    const int64_t words = keys.width / 8, there = std::min<int64_t>(LANES, last - first + 1);
    const auto* const from = static_cast<const uint32_t*>(keys.data) + first * words;
    Whole of[2] = {load<Whole>(from, there * words)};
    if (words == 2) {
        const Whole low = of[0];
        const Whole high = load<Whole>(from + LANES, std::max<int64_t>(0, 2 * there - LANES));
        const auto lanes = std::make_integer_sequence<int, LANES>();
        of[0] = every_second(low, high, 0, lanes);
        of[1] = every_second(low, high, 1, lanes);
    }
    for (int row = 0; row < ROWS; row++) scores[row] = Lanes{};
    for (int64_t d = 0; d < keys.width; d++) {
        const int64_t at = d % (keys.width / 2), high = d >= keys.width / 2 ? 4 : 0;
        const Lanes value = Bytes::floats(of[at / 4] >> int(at % 4 * 8 + high) & 15);
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; row++)
            scores[row] = fused(splat(queries[row].values[d]), value, scores[row]);
    }
}

// Products of ROWS queries with LANES keys from `first` on, up to `last`; what the lanes of others
// hold is undefined.
template <class Kind, int ROWS>
void products(
    const Query* queries, const Rows& keys, int64_t first, int64_t last, Lanes (&scores)[ROWS]) {
    if constexpr (std::is_same_v<Kind, Halves>)
        if (is_label(keys.width)) return label_products(queries, keys, first, last, scores);
    Lanes parts[LANES / FEW][ROWS];
    for (int part = 0; part < LANES / FEW; part++)
        few_products<Kind>(queries, keys, std::min(first + part * FEW, last), last, parts[part]);
    for (int row = 0; row < ROWS; row++) {
        Lanes own[LANES / FEW];
        for (int part = 0; part < LANES / FEW; part++) own[part] = parts[part][row];
        scores[row] = add_up<FEW, LANES>(own);
    }
}
inline float sum_of(const float* values, int64_t count) {
    Lanes sums[1] = {};
    for (int64_t d = 0; d < count; d += LANES) sums[0] += load<Lanes>(values + d, count - d);
    return add_up(sums)[0];
}
// Values that stay in the processor's nearest cache while all query rows read them.
constexpr int64_t NEAR_BYTES = 16384;

// Adds what rows weigh to the queries' results: weights [ROWS, stride] times `rows` values from the
// first on, of COUNT vectors of columns; of the last one, `last` columns.
template <class Kind, int ROWS, int COUNT>
void weigh(
    const float* weights, int64_t stride, const Rows& values, int64_t first, int64_t rows,
    int64_t last, const Query* queries, int64_t e) {
    const bool whole = COUNT > 1 || last == LANES;
    Lanes sums[ROWS][COUNT];
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < COUNT; i++) {
            const float* const so_far = queries[r].out + e + i * LANES;
            sums[r][i] = whole ? load<Lanes>(so_far) : load<Lanes>(so_far, last);
        }
    const int64_t width = values.width;
    for (int64_t c = 0; c < rows; c++) {
        const typename Kind::Number* const from = row_of<Kind>(values, first + c);
#pragma GCC unroll 4
        for (int i = 0; i < COUNT; i++) {
            const int64_t at = e + i * LANES;
            const Lanes value =
                held(whole ? Kind::read(from, width, at) : Kind::some(from, width, at, last));
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++)
                sums[r][i] = fused(splat(weights[r * stride + c]), value, sums[r][i]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < COUNT; i++)
            store(queries[r].out + e + i * LANES, sums[r][i], whole ? LANES : last);
}

// Calls one of `what`'s functions, with as many rows at a time as fit, until all `count` are done.
template <int ROWS = NEARBY, class What>
void by_rows(int64_t count, const What& what, int64_t first = 0) {
    for (; first + ROWS <= count; first += ROWS) what(std::integral_constant<int, ROWS>(), first);
    if constexpr (ROWS > 1) by_rows<ROWS - 1>(count, what, first);
}

}  // namespace
