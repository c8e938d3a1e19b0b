#include "grouped_rows.h"

#include <algorithm>
#include <vector>

#include "lanes.h"
#include "processor.h"
#include "row_products.h"
#include "stored_rows.h"

namespace {

// The first `count` lanes: of all of them compilers make one instruction.
void put(float* to, Lanes value, int64_t count) {
    if (count == LANES)
        store(to, value);
    else
        store(to, value, count);
}

// A place among `count`, as it is stored; -1 for what is none: that may come from a file.
int64_t place_of(float said, int64_t count) {
    if (!(said >= 0 && said < float(count))) return -1;
    const int64_t place = int64_t(said);
    return float(place) == said ? place : -1;
}

// Numbers in half precision as floats.
void widen(const uint16_t* from, int64_t count, float* to) {
    int64_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + i))));
#endif
    for (; i < count; i++) to[i] = half_to_float(from[i]);
}

Whole wide(Marks bytes) {
#if defined(WIDE_DOT_PRODUCTS)
    return (Whole)_mm512_cvtepu8_epi32((__m128i)bytes);
#elif defined(__AVX2__)
    return (Whole)_mm256_cvtepu8_epi32(_mm_loadl_epi64((__m128i*)&bytes));
#else
    return __builtin_convertvector(bytes, Whole);
#endif
}

template <int... lane>
Whole second_half(std::integer_sequence<int, lane...>) {
    return Whole{(lane >= LANES / 2)...};
}

// Rows of codes, which are read as floats. Widths are powers of two. Bytes hold pieces of codes: the
// first bytes the lowest bits of all, and of a piece, the first channels' are the lowest.
template <int BITS>
struct Codes {
    typedef uint8_t Number;
    static constexpr int LEAST = BITS & 1 ? 1 : BITS, HIGH = BITS - LEAST;  // `HIGH`: of 3 bits two
    static constexpr int PLACES = LEAST == 1 ? 3 : LEAST == 2 ? 2 : LEAST == 4 ? 1 : 0;
    static int64_t bytes(int64_t width) { return width * BITS / 8; }
    // Whether a vector's channels have one place in whole vectors of bytes, or two in halves.
    static bool in_vectors(int64_t width) {
        const int64_t size = width * LEAST / 8;
        const bool whole = size % LANES == 0 || (size == LANES / 2 && width % LANES == 0);
        return (width & (width - 1)) == 0 && whole;
    }
    static Lanes read(const uint8_t* row, int64_t width, int64_t d) {
        const int log = __builtin_ctzll(width) - PLACES;
        const int64_t place = d >> log, i = d & ((int64_t(1) << log) - 1);
        const uint8_t* const least = row + width * HIGH / 8 + i;
        Whole found;
        if (int64_t(1) << log >= LANES) {
            found = wide(load<Marks>(least));
            if constexpr (BITS != 8) found = found >> int(LEAST * place);
        } else {
            Half both[2];
            both[0] = both[1] = load<Half>(least);
            Marks twice;
            std::memcpy(&twice, both, sizeof(twice));
            const Whole second = second_half(std::make_integer_sequence<int, LANES>());
            found = wide(twice) >> (int(LEAST * place) + LEAST * second);
        }
        if constexpr (BITS != 8) found = found & ((1 << LEAST) - 1);
        if constexpr (HIGH != 0) {
            // Places of two halves are the first two in a vector of these bytes.
            const uint8_t* const first = row + ((place % HIGH) << log) + i;
            const Whole low = wide(load<Marks>(first)) >> int(place / HIGH * HIGH);
            found = (found << HIGH) | (low & ((1 << HIGH) - 1));
        }
        return __builtin_convertvector(found, Lanes);
    }
    static Lanes some(const uint8_t* row, int64_t width, int64_t d, int64_t) {
        return read(row, width, d);
    }
};

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
template <int BITS, class Factors>
void decode(const uint8_t* from, int64_t width, const Factors& factors, float* to) {
    typedef Codes<BITS> Kind;
    if (Kind::in_vectors(width)) {
        for (int64_t d = 0; d < width; d += LANES)
            store(to + d, factors.value(Kind::read(from, width, d), d, LANES));
        return;
    }
    constexpr int least = Kind::LEAST, high = Kind::HIGH;
    const int64_t size = width * least / 8;
    for (int place = 0; place < 8 / least; place++)
        for (int64_t i = 0; i < size; i += LANES) {
            const int64_t count = std::min<int64_t>(LANES, size - i), d = place * size + i;
            const uint8_t* const last = from + width * high / 8 + i;
            Whole found = (wide(load<Marks>(last, count)) >> (least * place)) & ((1 << least) - 1);
            if constexpr (high != 0) {
                const uint8_t* const first = from + place % high * size + i;
                const Whole low = wide(load<Marks>(first, count)) >> (place / high * high);
                found = (found << high) | (low & ((1 << high) - 1));
            }
            put(to + d, factors.value(__builtin_convertvector(found, Lanes), d, count), count);
        }
}

template <class Factors>
void decode(int64_t bits, const uint8_t* from, int64_t width, const Factors& factors, float* to) {
    if (bits == 2) return decode<2>(from, width, factors, to);
    if (bits == 3) return decode<3>(from, width, factors, to);
    if (bits == 4) return decode<4>(from, width, factors, to);
    decode<8>(from, width, factors, to);
}

// to += by * row
void add_row(const float* row, float by, int64_t width, float* to) {
    for (int64_t d = 0; d < width; d += LANES) {
        const int64_t count = std::min<int64_t>(LANES, width - d);
        const Lanes so_far = load<Lanes>(to + d, count);
        put(to + d, fused(splat(by), load<Lanes>(row + d, count), so_far), count);
    }
}

void rotate(const graftwork::GroupedRows& of, int64_t row, float* to) {
    const float *const cos = of.cos + row * of.angles, *const sin = of.sin + row * of.angles;
    float* const other = to + of.angles;
    for (int64_t i = 0; !of.interleaved && i < of.angles; i += LANES) {
        const int64_t count = std::min<int64_t>(LANES, of.angles - i);
        const Lanes x = load<Lanes>(to + i, count), y = load<Lanes>(other + i, count);
        const Lanes c = load<Lanes>(cos + i, count), s = load<Lanes>(sin + i, count);
        put(to + i, x * c - y * s, count);
        put(other + i, y * c + x * s, count);
    }
    for (int64_t i = 0; of.interleaved && i < of.angles; i++) {
        const float x = to[2 * i], y = to[2 * i + 1];
        to[2 * i] = x * cos[i] - y * sin[i];
        to[2 * i + 1] = y * cos[i] + x * sin[i];
    }
}

// Calls `what` with the kind of codes of so many bits.
template <class What>
void of_bits(int64_t bits, const What& what) {
    if (bits == 2) return what(Codes<2>());
    if (bits == 3) return what(Codes<3>());
    if (bits == 4) return what(Codes<4>());
    what(Codes<8>());
}

float dot(const float* a, const float* b, int64_t count) {
    Lanes sums[1] = {};
    for (int64_t d = 0; d < count; d += LANES)
        sums[0] = fused(load<Lanes>(a + d, count - d), load<Lanes>(b + d, count - d), sums[0]);
    return add_up(sums)[0];
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
    static thread_local std::vector<float> space, columns;
    const int64_t pieces = shared(), all = numbers(), each = width / pieces, bytes = width * bits / 8;
    space.resize(all + 2 * width);
    float* const known = space.data();
    float *const times = known + all, *const plus = times + width;
    int shift = 0;
    while (int64_t(1) << shift < each) shift++;
    const bool whole = int64_t(1) << shift == each && each % LANES == 0;
    const uint8_t* const from = codes + first * bytes;
    if (by_channel) {
        widen(steps + first / group * all, all, known);
        for (int64_t r = 0; r < count; r++)
            decode(bits, from + r * bytes, width, Each{known, known + width}, to + r * width);
        for (int64_t n = 1; n <= outliers; n++)
            for (int64_t d = 0; d < width; d++) {
                const int64_t place = place_of(known[2 * n * width + d], group) - first % group;
                if (place >= 0 && place < count)
                    to[place * width + d] = known[(2 * n + 1) * width + d];
            }
    }
    for (int64_t r = 0; !by_channel && r < count; r++) {
        float* const own = to + r * width;
        widen(steps + (first + r) * all, all, known);
        if (whole) {
            decode(bits, from + r * bytes, width, Shared{known, known + pieces, shift}, own);
        } else {
            for (int64_t p = 0; p < pieces; p++) {
                std::fill_n(times + p * each, each, known[p]);
                std::fill_n(plus + p * each, each, known[pieces + p]);
            }
            decode(bits, from + r * bytes, width, Each{times, plus}, own);
        }
        for (int64_t n = 1; n <= outliers; n++)
            for (int64_t p = 0; p < pieces; p++) {
                const int64_t place = place_of(known[2 * n * pieces + p], each);
                if (place >= 0) own[p * each + place] = known[(2 * n + 1) * pieces + p];
            }
    }
    if (rank) {
        columns.resize(rank * width);
        widen(right + first / group * rank * width, rank * width, columns.data());
    }
    for (int64_t r = 0; r < count; r++) {
        float* const own = to + r * width;
        for (int64_t k = 0; k < rank; k++)
            add_row(&columns[k * width], half_to_float(left[(first + r) * rank + k]), width, own);
        if (turned && cos) turn_by_hadamard(own, width);
        if (cos) rotate(*this, first + r, own);
    }
}

bool graftwork::GroupedRows::in_vectors() const {
    bool found = false;
    of_bits(bits, [&](auto kind) { found = decltype(kind)::in_vectors(width); });
    return found;
}

// The code of a channel of a row, of whole vectors.
float graftwork::GroupedRows::code(int64_t row, int64_t d) const {
    const uint8_t* const from = codes + row * (width * bits / 8);
    const int log = __builtin_ctzll(width);
    const auto piece = [&](const uint8_t* bytes, int size, int places) {
        const int64_t place = d >> (log - places);
        return (bytes[d & ((int64_t(1) << (log - places)) - 1)] >> (size * place)) & ((1 << size) - 1);
    };
    if (bits == 8) return float(from[d]);
    if (bits == 4) return float(piece(from, 4, 1));
    const int low = piece(from, 2, 2);
    return float(bits == 2 ? low : low | piece(from + width / 4, 1, 3) << 2);
}

bool graftwork::GroupedRows::multiply(
    const Query* queries, int64_t count, int64_t first, int64_t rows, float* scores,
    int64_t stride) const {
    if (!by_channel || cos || !in_vectors() || rank > 16) return false;
    if (group % LANES || stored % LANES) return false;
    static thread_local std::vector<float> space;
    const int64_t all = numbers(), end = first + rows;
    space.resize(all + (TOGETHER + rank) * width + group * width);
    float* const known = space.data();
    float *const folded = known + all, *const columns = folded + TOGETHER * width;
    float* const latest_rows = columns + rank * width;
    Query asked[TOGETHER];
    for (int64_t r = 0; r < count; r++) asked[r] = queries[r];
    for (int64_t row = first; row < std::min(end, stored);) {
        const int64_t begin = row / group * group, until = std::min(begin + group, stored);
        widen(steps + row / group * all, all, known);
        float base[TOGETHER], along[TOGETHER][16] = {};
        for (int64_t r = 0; r < count; r++) {
            float* const own = folded + r * width;
            for (int64_t d = 0; d < width; d += LANES)
                store(own + d, load<Lanes>(queries[r].values + d) * load<Lanes>(known + d));
            base[r] = dot(queries[r].values, known + width, width);
            asked[r].values = own;
        }
        if (rank) widen(right + row / group * rank * width, rank * width, columns);
        for (int64_t r = 0; r < count; r++)
            for (int64_t k = 0; k < rank; k++)
                along[r][k] = dot(queries[r].values, columns + k * width, width);
        const int64_t from = row;
        of_bits(bits, [&](auto kind) {
            typedef decltype(kind) Kind;
            const Rows own = {codes, nullptr, width, bits, nullptr};
            for (; row < std::min(end, until); row += LANES)
                by_rows(count, [&](auto rows_at_once, int64_t at) {
                    Lanes found[rows_at_once.value];
                    products<Kind>(asked + at, own, row, stored - 1, found);
                    for (int r = 0; r < rows_at_once.value; r++)
                        store(scores + (at + r) * stride + row - first, found[r] + base[at + r]);
                });
        });
        for (int64_t n = 1; n <= outliers; n++)
            for (int64_t d = 0; d < width; d++) {
                const int64_t c = begin + place_of(known[2 * n * width + d], group);
                if (c < from || c >= row || c < begin) continue;
                const float instead = known[(2 * n + 1) * width + d];
                const float apart = instead - (code(c, d) * known[d] + known[width + d]);
                for (int64_t r = 0; r < count; r++)
                    scores[r * stride + c - first] += queries[r].values[d] * apart;
            }
        for (int64_t c = from; rank && c < row; c++)
            for (int64_t k = 0; k < rank; k++) {
                const float share = half_to_float(left[c * rank + k]);
                for (int64_t r = 0; r < count; r++)
                    scores[r * stride + c - first] += share * along[r][k];
            }
    }
    for (int64_t row = std::max(first, stored); row < end; row += LANES) {
        read(row, LANES, latest_rows);
        const Rows own = {latest_rows, nullptr, width, 32, nullptr};
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
    if (by_channel || cos || !in_vectors() || each % LANES || rank > 16) return false;
    constexpr int64_t SOME = 64;
    static thread_local std::vector<float> space;
    space.resize(SOME * (all + TOGETHER + width) + TOGETHER * pieces + rank * width);
    float* const known = space.data();
    float *const own = known + SOME * all, *const base = own + SOME * TOGETHER;
    float *const columns = base + TOGETHER * pieces, *const latest_rows = columns + rank * width;
    std::fill_n(base, TOGETHER * pieces, 0.0f);
    int64_t row = first;
    while (row < std::min(end, stored)) {
        // Not beyond a group's end: its rows share factors.
        const int64_t within = std::min(SOME, group - row % group);
        const int64_t some = std::min({within, stored - row, end - row});
        widen(steps + row * all, some * all, known);
        for (int64_t p = 0; p < pieces; p++) {
            for (int64_t r = 0; r < count; r++) {
                const float* const given = weights + r * stride + row - first;
                float sum = base[r * pieces + p];
                for (int64_t c = 0; c < some; c++) {
                    own[r * SOME + c] = given[c] * known[c * all + p];
                    sum = std::fma(given[c], known[c * all + pieces + p], sum);
                }
                base[r * pieces + p] = sum;
            }
            of_bits(bits, [&](auto kind) {
                typedef decltype(kind) Kind;
                const Rows from = {codes + row * Kind::bytes(width), nullptr, width, bits, nullptr};
                weigh_columns<Kind>(own, SOME, from, some, queries, count, p * each, (p + 1) * each);
            });
            for (int64_t n = 1; n <= outliers; n++)
                for (int64_t c = 0; c < some; c++) {
                    const float* const said = known + c * all;
                    const int64_t place = place_of(said[2 * n * pieces + p], each);
                    if (place < 0) continue;
                    const int64_t d = p * each + place;
                    const float instead = said[(2 * n + 1) * pieces + p];
                    const float apart = instead - (code(row + c, d) * said[p] + said[pieces + p]);
                    for (int64_t r = 0; r < count; r++)
                        queries[r].out[d] += weights[r * stride + row - first + c] * apart;
                }
        }
        if (rank) widen(right + row / group * rank * width, rank * width, columns);
        for (int64_t k = 0; k < rank; k++)
            for (int64_t r = 0; r < count; r++) {
                float share = 0;
                for (int64_t c = 0; c < some; c++)
                    share = std::fma(
                        weights[r * stride + row - first + c],
                        half_to_float(left[(row + c) * rank + k]), share);
                add_row(columns + k * width, share, width, queries[r].out);
            }
        row += some;
    }
    for (int64_t r = 0; r < count; r++)
        for (int64_t d = 0; d < width; d++) queries[r].out[d] += base[r * pieces + d / each];
    for (; row < end; row += SOME) {
        const int64_t some = std::min(SOME, end - row);
        read(row, some, latest_rows);
        const Rows from = {latest_rows, nullptr, width, 32, nullptr};
        weigh_columns<Floats>(weights + row - first, stride, from, some, queries, count, 0, width);
    }
    return true;
}
