#include "grouped_rows.h"

#include <algorithm>
#include <vector>

#include "lanes.h"
#include "processor.h"
#include "stored_rows.h"

namespace {

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

// A row's codes, times and plus numbers of its channels. Bytes hold pieces of codes: the first bytes
// the lowest bits of all, and of a piece, the first channels' are the lowest.
template <int BITS>
void decode(const uint8_t* from, int64_t width, const float* times, const float* plus, float* to) {
    constexpr int least = BITS & 1 ? 1 : BITS, high = BITS - least;  // `high`: of 3 bits the first two
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
            const Lanes code = __builtin_convertvector(found, Lanes);
            store(to + d,
                  fused(code, load<Lanes>(times + d, count), load<Lanes>(plus + d, count)), count);
        }
}

// to += by * row
void add_row(const float* row, float by, int64_t width, float* to) {
    for (int64_t d = 0; d < width; d += LANES) {
        const int64_t count = std::min<int64_t>(LANES, width - d);
        const Lanes so_far = load<Lanes>(to + d, count);
        store(to + d, fused(splat(by), load<Lanes>(row + d, count), so_far), count);
    }
}

void rotate(const graftwork::GroupedRows& of, int64_t row, float* to) {
    const int64_t next = of.interleaved ? 1 : of.angles;
    const float *const cos = of.cos + row * of.angles, *const sin = of.sin + row * of.angles;
    for (int64_t i = 0; i < of.angles; i++) {
        float &x = to[of.interleaved ? 2 * i : i], &y = (&x)[next];
        const float a = x, b = y;
        x = a * cos[i] - b * sin[i];
        y = b * cos[i] + a * sin[i];
    }
}

}  // namespace

void graftwork::GroupedRows::read(int64_t first, int64_t count, float* to) const {
    static thread_local std::vector<float> space, columns;
    const int64_t pieces = shared(), all = numbers(), each = width / pieces;
    space.resize(all + 2 * width);
    columns.resize(rank * width);
    float* const known = space.data();
    float* const times = by_channel ? known : known + all;
    float* const plus = times + (by_channel ? pieces : width);
    int64_t read_steps = -1, read_columns = -1;
    for (int64_t row = first; row < first + count; row++, to += width) {
        if (row >= stored) {
            std::copy_n(latest + std::min(row - stored, L - 1) * width, width, to);
            if (gives_turned()) turn_by_hadamard(to, width);
            continue;
        }
        const int64_t place = by_channel ? row / group : row;
        if (place != read_steps) {
            widen(steps + place * all, all, known);
            for (int64_t n = 0; !by_channel && n < pieces; n++) {
                std::fill_n(times + n * each, each, known[n]);
                std::fill_n(plus + n * each, each, known[pieces + n]);
            }
            read_steps = place;
        }
        const uint8_t* const from = codes + row * (width * bits / 8);
        const auto way = bits == 2 ? decode<2> : bits == 3 ? decode<3> : bits == 4 ? decode<4> : decode<8>;
        way(from, width, times, plus, to);
        for (int64_t n = 1; n <= outliers; n++) {
            const float *const which = known + 2 * n * pieces, *const value = which + pieces;
            for (int64_t p = 0; p < pieces; p++)
                if (!by_channel)
                    to[p * each + std::min(int64_t(which[p]), each - 1)] = value[p];
                else if (which[p] == float(row % group))
                    to[p] = value[p];
        }
        if (rank && row / group != read_columns) {
            read_columns = row / group;
            widen(right + read_columns * rank * width, rank * width, columns.data());
        }
        for (int64_t r = 0; r < rank; r++)
            add_row(&columns[r * width], half_to_float(left[row * rank + r]), width, to);
        if (turned && cos) turn_by_hadamard(to, width);
        if (cos) rotate(*this, row, to);
    }
}
