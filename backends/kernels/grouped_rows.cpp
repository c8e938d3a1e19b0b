#include "grouped_rows.h"

#include <algorithm>

#include "group_codes.h"
#include "hadamard.h"
#include "lanes.h"
#include "row_products.h"
#include "stored_rows.h"

namespace {

// What codes are multiplied with and added to, of `count` channels from the d-th on: numbers of each,
// or of `1 << shift` channels, as many vectors.
struct Each {
    const float *times, *plus;
    Lanes value(Lanes code, int64_t d, int64_t count) const {
        return fused(code, load<Lanes>(times + d, count), load<Lanes>(plus + d, count));
    }
};
struct Shared {
    const float *times, *plus;
    int shift;
    Lanes value(Lanes code, int64_t d, int64_t) const {
        return fused(code, splat(times[d >> shift]), splat(plus[d >> shift]));
    }
};

// A row's codes as numbers.
template <class Factors>
void decode(const uint8_t* codes, int64_t width, const Factors& factors, float* to) {
    int64_t d = 0;
    for (; d + LANES <= width; d += LANES)
        store(to + d, factors.value(Bytes::read(codes, width, d), d, LANES));
    if (d < width) store(to + d, factors.value(Bytes::some(codes, width, d, width - d), d, width - d), width - d);
}

// A pair of channels by an angle.
void rotate(Lanes& x, Lanes& y, Lanes cos, Lanes sin) {
    const Lanes was = x;
    x = add_product(x, cos, -(y * sin));
    y = add_product(y, cos, was * sin);
}

void rotate(const graftwork::GroupedRows& of, int64_t row, float* to) {
    const float *const cos = of.cos + row * of.angles, *const sin = of.sin + row * of.angles;
    float* const other = to + of.angles;
    for (int64_t i = 0; !of.interleaved && i < of.angles; i += LANES) {
        const int64_t count = std::min<int64_t>(LANES, of.angles - i);
        Lanes x = load<Lanes>(to + i, count), y = load<Lanes>(other + i, count);
        rotate(x, y, load<Lanes>(cos + i, count), load<Lanes>(sin + i, count));
        put(to + i, x, count);
        put(other + i, y, count);
    }
    for (int64_t i = 0; of.interleaved && i < of.angles; i++) {
        const float x = to[2 * i], y = to[2 * i + 1];
        to[2 * i] = x * cos[i] - y * sin[i];
        to[2 * i + 1] = y * cos[i] + x * sin[i];
    }
}

// LANES channels of a group of rows. ONES: whether one number of each is not what its code says.
template <bool ONES>
struct Channels {
    Lanes times, plus, instead;
    Whole place;

    Channels(const float* known, int64_t width, int64_t group, int64_t begin, int64_t there)
        : times(load<Lanes>(known)), plus(load<Lanes>(known + width)), instead{}, place{} {
        if (!ONES) return;
        place = places_of(load<Lanes>(known + 2 * width), group, begin, there);
        instead = load<Lanes>(known + 3 * width);
    }
    Lanes value(const uint8_t* codes, int row) const {
        const Lanes found = fused(Bytes::floats(load<Marks>(codes)), times, plus);
        return ONES ? place == row ? instead : found : found;
    }
};

// Rows from the first on of one group, whose channels share steps, rotated by their positions.
template <bool ONES>
void decode_channels(
    const graftwork::GroupedRows& of, const uint8_t* codes, const float* known, int64_t first,
    int64_t count, float* to) {
    const int64_t width = of.width, half = of.angles, begin = first % of.group;
    for (int64_t d = 0; d < half; d += LANES) {
        const Channels<ONES> low(known + d, width, of.group, begin, count);
        const Channels<ONES> high(known + d + half, width, of.group, begin, count);
        const float *const cos = of.cos + first * half + d, *const sin = of.sin + first * half + d;
        for (int64_t r = 0; r < count; r++) {
            const uint8_t* const from = codes + r * width + d;
            Lanes x = low.value(from, r), y = high.value(from + half, r);
            rotate(x, y, load<Lanes>(cos + r * half), load<Lanes>(sin + r * half));
            store(to + r * width + d, x);
            store(to + r * width + d + half, y);
        }
    }
}

// Rows of COUNT vectors from the first on, with steps of their own for every `1 << shift` numbers, that
// are turned back and rotated by their positions.
template <int COUNT>
void decode_turned(
    const graftwork::GroupedRows& of, const uint8_t* codes, const float* known, int shift,
    int64_t first, int64_t count, float* to) {
    constexpr int WIDTH = COUNT * LANES, HALF = WIDTH / 2;
    const float norm = float(1 / std::sqrt(double(WIDTH)));
    const int64_t pieces = of.shared();
    for (int64_t r = 0; r < count; r++, codes += WIDTH, known += of.numbers(), to += WIDTH) {
        Lanes all[COUNT];
#pragma GCC unroll 16
        for (int i = 0; i < COUNT; i++) {
            const int64_t p = i * LANES >> shift;
            const Lanes code = Bytes::floats(load<Marks>(codes + i * LANES));
            all[i] = fused(code, splat(known[p] * norm), splat(known[pieces + p] * norm));
        }
        turn(all);
        const float *const cos = of.cos + (first + r) * HALF, *const sin = of.sin + (first + r) * HALF;
#pragma GCC unroll 16
        for (int i = 0; i < COUNT / 2; i++) {
            rotate(all[i], all[i + COUNT / 2], load<Lanes>(cos + i * LANES), load<Lanes>(sin + i * LANES));
            store(to + i * LANES, all[i]);
            store(to + HALF + i * LANES, all[i + COUNT / 2]);
        }
    }
}

}  // namespace

void graftwork::GroupedRows::read(int64_t first, int64_t count, float* to) const {
    const int64_t coded = std::max<int64_t>(0, std::min(count, stored - first));
    // Rows of a group together: they share what is kept beside their codes.
    for (int64_t done = 0; done < coded;) {
        const int64_t row = first + done, some = std::min(coded - done, group - row % group);
        decode_group(row, some, to + done * width);
        done += some;
    }
    for (int64_t r = coded; r < count; r++) {
        float* const own = to + r * width;
        std::copy_n(latest + std::min(first + r - stored, L - 1) * width, width, own);
        if (gives_turned()) turn_by_hadamard(own, width);
    }
}

void graftwork::GroupedRows::decode_group(int64_t first, int64_t count, float* to) const {
    static thread_local Space<float> space;
    static thread_local Space<uint8_t> unpacked;
    const int64_t pieces = shared(), all = numbers(), each = width / pieces, bytes = width * bits / 8;
    float* const times = space.of((by_channel ? 1 : count) * all + (2 + rank) * width + count * rank);
    float *const plus = times + width, *const columns = plus + width;
    float *const shares = columns + rank * width, *const known = shares + count * rank;
    int shift = 0;
    while (int64_t(1) << shift < each) shift++;
    const bool whole = int64_t(1) << shift == each && each % LANES == 0;
    const uint8_t* const from = unpack(codes + first * bytes, bits, count, width, unpacked);
    // What most caches are: all is done to a vector at once.
    const bool halves = cos && !interleaved && 2 * angles == width && angles % LANES == 0 && !rank;
    if (by_channel) {
        widen(steps + first / group * all, all, known);
        if (halves && !turned && outliers == 0)
            return decode_channels<false>(*this, from, known, first, count, to);
        if (halves && !turned && outliers == 1)
            return decode_channels<true>(*this, from, known, first, count, to);
        for (int64_t r = 0; r < count; r++)
            decode(from + r * width, width, Each{known, known + width}, to + r * width);
        for (int64_t n = 1; n <= outliers; n++) {
            const float *const said = known + 2 * n * width, *const instead = said + width;
            each_place(said, width, group, first % group, count,
                       [&](int64_t d, int64_t c) { to[c * width + d] = instead[d]; });
        }
    } else {
        widen(steps + first * all, count * all, known);
        const bool one = halves && whole && turned && outliers == 0;
        if (one && width == 64)
            return decode_turned<64 / LANES>(*this, from, known, shift, first, count, to);
        if (one && width == 128)
            return decode_turned<128 / LANES>(*this, from, known, shift, first, count, to);
    }
    for (int64_t r = 0; !by_channel && r < count; r++) {
        float* const own = to + r * width;
        const float* const said = known + r * all;
        if (whole) {
            decode(from + r * width, width, Shared{said, said + pieces, shift}, own);
        } else {
            for (int64_t p = 0; p < pieces; p++) {
                std::fill_n(times + p * each, each, said[p]);
                std::fill_n(plus + p * each, each, said[pieces + p]);
            }
            decode(from + r * width, width, Each{times, plus}, own);
        }
        for (int64_t n = 1; n <= outliers; n++) {
            const float *const where = said + 2 * n * pieces, *const instead = where + pieces;
            each_place(where, pieces, each, 0, each,
                       [&](int64_t p, int64_t place) { own[p * each + place] = instead[p]; });
        }
    }
    if (rank) {
        widen(right + first / group * rank * width, rank * width, columns);
        widen(left + first * rank, count * rank, shares);
    }
    for (int64_t r = 0; r < count; r++) {
        float* const own = to + r * width;
        for (int64_t k = 0; k < rank; k++)
            add_row(columns + k * width, shares[r * rank + k], width, own);
        if (turned && cos) turn_by_hadamard(own, width);
        if (cos) rotate(*this, first + r, own);
    }
}

namespace {

// Calls `work` for each of the gangs of so many queries.
template <class Work>
void each_gang(int64_t count, const Work& work) {
    for (int64_t at = 0; at < count; at += graftwork::TOGETHER)
        work(at, std::min(graftwork::TOGETHER, count - at));
}

}  // namespace

bool graftwork::GroupedRows::multiply(
    const Query* queries, int64_t count, int64_t first, int64_t rows, float* scores,
    int64_t stride) const {
    if (!by_channel || cos || rank > 16 || group % LANES || stored % LANES) return false;
    static thread_local Space<float> space;
    static thread_local Space<uint8_t> unpacked;
    static thread_local Outliers apart;
    const int64_t all = numbers(), end = (first + rows + LANES - 1) / LANES * LANES;
    float* const latest_rows = space.of(all + (TOGETHER + rank + LANES) * width + 2 * rank * SOME);
    float *const folded = latest_rows + LANES * width, *const known = folded + TOGETHER * width;
    float* const columns = known + all;
    float *const shares = columns + rank * width, *const said = shares + rank * SOME;
    for (int64_t row = first; row < std::min(end, stored);) {
        const int64_t begin = row / group * group;
        const int64_t until = std::min({begin + group, row / SOME * SOME + SOME, stored, end});
        const int64_t some = until - row;
        const uint8_t* const bytes =
            unpack(codes + row * (width * bits / 8), bits, some, width, unpacked);
        const Rows own = {bytes, nullptr, width, 8};
        widen(steps + row / group * all, all, known);
        apart.clear();
        for (int64_t n = 1; n <= outliers; n++) {
            const float* const places = known + 2 * n * width;
            apart.add(places, places + width, known, known + width, width, group, row - begin, some,
                      [&](int64_t d, int64_t c) { return bytes[c * width + d]; });
        }
        if (rank) {
            widen(right + row / group * rank * width, rank * width, columns);
            widen(left + row * rank, some * rank, said);
            columns_of(said, some, rank, shares);
        }
        each_gang(count, [&](int64_t at, int64_t gang) {
            Query asked[TOGETHER];
            float base[TOGETHER], along[TOGETHER][16];
            for (int64_t r = 0; r < gang; r++) {
                const float* const query = queries[at + r].values;
                for (int64_t d = 0; d < width; d += LANES) {
                    const int64_t there = std::min<int64_t>(LANES, width - d);
                    put(folded + r * width + d,
                        load<Lanes>(query + d, there) * load<Lanes>(known + d, there), there);
                }
                asked[r].values = folded + r * width;
                base[r] = dot(query, known + width, width);
                for (int64_t k = 0; k < rank; k++)
                    along[r][k] = dot(query, columns + k * width, width);
            }
            float* const to = scores + at * stride + row - first;
            for (int64_t c = 0; c < some; c += LANES)
                by_rows(gang, [&](auto rows_at_once, int64_t from) {
                    Lanes found[rows_at_once.value];
                    products<Bytes>(asked + from, own, c, some - 1, found);
                    for (int i = 0; i < rows_at_once.value; i++) {
                        Lanes score = found[i] + base[from + i];
                        for (int64_t k = 0; k < rank; k++)
                            score = fused(
                                splat(along[from + i][k]), load<Lanes>(shares + k * SOME + c), score);
                        store(to + (from + i) * stride + c, score);
                    }
                });
            for (int64_t r = 0; r < gang; r++)
                for (int64_t n = 0; n < outliers; n++)
                    for (int64_t d = 0; d < width; d++) {
                        float& score = to[r * stride + apart.places[n * width + d]];
                        score = std::fma(
                            queries[at + r].values[d], apart.apart[n * width + d], score);
                    }
        });
        row = until;
    }
    for (int64_t row = std::max(first, stored); row < end; row += LANES) {
        read(row, LANES, latest_rows);
        const Rows own = {latest_rows, nullptr, width, 32};
        by_rows(count, [&](auto rows_at_once, int64_t at) {
            Lanes found[rows_at_once.value];
            products<Floats>(queries + at, own, 0, LANES - 1, found);
            for (int r = 0; r < rows_at_once.value; r++)
                store(scores + (at + r) * stride + row - first, found[r]);
        });
    }
    return true;
}

namespace {

// Columns of values from `begin` to `end`, as many vectors at once as fit.
template <class Kind>
void weigh_columns(
    const float* weights, int64_t stride, const Rows& values, int64_t rows, const Query* queries,
    int64_t count, int64_t begin, int64_t end) {
    by_rows(count, [&](auto rows_at_once, int64_t at) {
        constexpr int ROWS = rows_at_once.value;
        const float* const own = weights + at * stride;
        int64_t e = begin;
        for (; e + FEW * LANES <= end; e += FEW * LANES)
            weigh<Kind, ROWS, FEW>(own, stride, values, 0, rows, LANES, queries + at, e);
        for (; e < end; e += LANES)
            weigh<Kind, ROWS, 1>(
                own, stride, values, 0, rows, std::min<int64_t>(LANES, end - e), queries + at, e);
    });
}

}  // namespace

bool graftwork::GroupedRows::weigh(
    const float* weights, int64_t stride, int64_t first, int64_t rows, const Query* queries,
    int64_t count) const {
    const int64_t pieces = shared(), all = numbers(), each = width / pieces, end = first + rows;
    if (by_channel || cos || each % LANES || rank > 16 || (rank && group % LANES)) return false;
    static thread_local Space<float> space;
    static thread_local Space<uint8_t> unpacked;
    static thread_local Outliers apart;
    const int64_t most = std::max(all, rank);
    float* const said = space.of(
        SOME * (most + all + rank + TOGETHER + width) + count * pieces * LANES + rank * width);
    float* const known = said + SOME * most;
    float *const shares = known + SOME * all, *const own = shares + SOME * rank;
    float *const latest_rows = own + SOME * TOGETHER, *const base = latest_rows + SOME * width;
    float* const columns = base + count * pieces * LANES;
    std::fill_n(base, count * pieces * LANES, 0.0f);
    int64_t row = first;
    while (row < std::min(end, stored)) {
        int64_t until = std::min({row / SOME * SOME + SOME, stored, end});
        if (rank) until = std::min(until, row / group * group + group);
        const int64_t some = until - row;
        const uint8_t* const bytes =
            unpack(codes + row * (width * bits / 8), bits, some, width, unpacked);
        const Rows from = {bytes, nullptr, width, 8};
        widen(steps + row * all, some * all, said);
        columns_of(said, some, all, known);
        apart.clear();
        for (int64_t n = 1; n <= outliers; n++)
            for (int64_t p = 0; p < pieces; p++) {
                const float *const times = known + p * SOME, *const numbers = times + pieces * SOME;
                const float* const places = times + 2 * n * pieces * SOME;
                apart.add(places, places + pieces * SOME, times, numbers, some, each, 0, each,
                          [&](int64_t c, int64_t place) { return bytes[c * width + p * each + place]; });
            }
        if (rank) {
            widen(right + row / group * rank * width, rank * width, columns);
            widen(left + row * rank, some * rank, said);
            columns_of(said, some, rank, shares);
        }
        each_gang(count, [&](int64_t at, int64_t gang) {
            const Query* const asked = queries + at;
            const float* const given = weights + at * stride + row - first;
            for (int64_t p = 0; p < pieces; p++) {
                const float *const times = known + p * SOME, *const plus = times + pieces * SOME;
                for (int64_t r = 0; r < gang; r++) {
                    float* const so_far = base + ((at + r) * pieces + p) * LANES;
                    Lanes sum = load<Lanes>(so_far);
                    for (int64_t c = 0; c < some; c += LANES) {
                        const Lanes weight = load<Lanes>(given + r * stride + c, some - c);
                        store(own + r * SOME + c, weight * load<Lanes>(times + c));
                        sum = fused(weight, load<Lanes>(plus + c), sum);
                    }
                    store(so_far, sum);
                }
                weigh_columns<Bytes>(own, SOME, from, some, asked, gang, p * each, (p + 1) * each);
            }
            for (int64_t r = 0; r < gang; r++)
                for (int64_t n = 0; n < outliers * pieces; n++)
                    for (int64_t c = 0; c < some; c++) {
                        const int64_t place = apart.places[n * some + c];
                        float& sum = asked[r].out[n % pieces * each + place];
                        sum = std::fma(given[r * stride + c], apart.apart[n * some + c], sum);
                    }
            for (int64_t k = 0; k < rank; k++)
                for (int64_t r = 0; r < gang; r++) {
                    const float share = dot(given + r * stride, shares + k * SOME, some);
                    add_row(columns + k * width, share, width, asked[r].out);
                }
        });
        row = until;
    }
    for (int64_t r = 0; r < count; r++)
        for (int64_t p = 0; p < pieces; p++) {
            const Lanes sums[1] = {load<Lanes>(base + (r * pieces + p) * LANES)};
            const float sum = add_up(sums)[0];
            for (int64_t d = p * each; d < (p + 1) * each; d++) queries[r].out[d] += sum;
        }
    while (row < end) {
        const int64_t some = std::min(SOME, end - row);
        read(row, some, latest_rows);
        const Rows from = {latest_rows, nullptr, width, 32};
        weigh_columns<Floats>(weights + row - first, stride, from, some, queries, count, 0, width);
        row += some;
    }
    return true;
}
