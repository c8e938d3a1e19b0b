// Codes in groups and what is stored beside them (see grouped_rows.h) as kernels read them.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "lanes.h"
#include "processor.h"

namespace {

typedef uint64_t Pair __attribute__((vector_size(16)));

// The first `count` lanes: of all of them compilers make one instruction.
void put(float* to, Lanes value, int64_t count) {
    if (count == LANES)
        store(to, value);
    else
        store(to, value, count);
}

// Places among `size` as they are stored, less `begin`, if `there` are from that on; others are -1, and
// what is no place: that may come from a file.
Whole places_of(Lanes said, int64_t size, int64_t begin, int64_t there) {
    const Lanes inside = (said >= 0.0f) & (said < float(size)) ? said : splat(-1);
    const Whole whole = __builtin_convertvector(inside, Whole);
    const Whole good = (__builtin_convertvector(whole, Lanes) == inside) & (whole >= int32_t(begin)) &
                       (whole < int32_t(begin + there));
    return good ? whole - int32_t(begin) : Whole{} - 1;
}

// Calls `what` for each of so many groups that has such a place.
template <class What>
void each_place(
    const float* said, int64_t groups, int64_t size, int64_t begin, int64_t there, const What& what) {
    for (int64_t i = 0; i < groups; i += LANES) {
        int32_t places[LANES];
        store(places, places_of(load<Lanes>(said + i, groups - i), size, begin, there));
        for (int64_t lane = 0; lane < std::min<int64_t>(LANES, groups - i); lane++)
            if (places[lane] >= 0) what(i + lane, places[lane]);
    }
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

// The number in half precision that is nearest to x, of two the even one.
inline uint16_t half_of(float x) {
    uint32_t bits, half;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return uint16_t(sign | 0x7e00);
    if (size >= 0x47800000) return uint16_t(sign | 0x7c00);
    if (size >= 0x38800000) {
        half = (size + 0xc8000fff + (size >> 13 & 1)) >> 13;
    } else {  // below the smallest normal one: what 0.5 has no room for is rounded off
        float sum;
        std::memcpy(&sum, &size, sizeof sum);
        sum += 0.5f;
        std::memcpy(&half, &sum, sizeof half);
        half -= 0x3f000000;
    }
    return uint16_t(sign | half);
}

// Floats in half precision.
inline void narrow(const float* from, int64_t count, uint16_t* to) {
    int64_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128((__m128i*)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
#endif
    for (; i < count; i++) to[i] = half_of(from[i]);
}

// to += by * row
inline void add_row(const float* row, float by, int64_t width, float* to) {
    for (int64_t d = 0; d < width; d += LANES) {
        const int64_t count = std::min<int64_t>(LANES, width - d);
        const Lanes so_far = load<Lanes>(to + d, count);
        put(to + d, fused(splat(by), load<Lanes>(row + d, count), so_far), count);
    }
}

inline float dot(const float* a, const float* b, int64_t count) {
    Lanes sums[1] = {};
    for (int64_t d = 0; d < count; d += LANES)
        sums[0] = fused(load<Lanes>(a + d, count - d), load<Lanes>(b + d, count - d), sums[0]);
    return add_up(sums)[0];
}

// A piece of the codes of a row, PIECE bits of which all but those BELOW are known: `size` bytes of it,
// of which the first channels' bits are the lowest, as a byte a channel.
template <int PIECE, int BELOW>
inline void unpack_piece(const uint8_t* from, int64_t size, uint8_t* to) {
    constexpr int PLACES = 8 / PIECE, PAIR = sizeof(Pair);
    constexpr uint64_t mask = 0x0101010101010101 * ((1 << PIECE) - 1);
    const auto put = [](uint8_t* at, Pair bits) {
        Pair found = (bits & mask) << BELOW;
        if (BELOW) found |= load<Pair>(at);
        store(at, found);
    };
    if (size == PAIR / 2) {  // a vector is two places
        const uint64_t word = load<uint64_t>(from);
        const Pair both = {word, word >> PIECE};
#pragma GCC unroll 8
        for (int place = 0; place < PLACES; place += 2) put(to + place * size, both >> (PIECE * place));
        return;
    }
    int64_t i = 0;
    for (; i + PAIR <= size; i += PAIR) {
        const Pair bits = load<Pair>(from + i);
#pragma GCC unroll 8
        for (int place = 0; place < PLACES; place++) put(to + place * size + i, bits >> (PIECE * place));
    }
    for (; i < size; i++)
        for (int place = 0; place < PLACES; place++) {
            uint8_t* const at = to + place * size + i;
            const int found = (from[i] >> (PIECE * place) & ((1 << PIECE) - 1)) << BELOW;
            *at = uint8_t(BELOW ? *at | found : found);
        }
}

// WIDTH: what compilers know of it, or 0.
template <int BITS, int WIDTH>
void unpack_rows(const uint8_t* from, int64_t rows, int64_t any, uint8_t* to) {
    const int64_t width = WIDTH ? WIDTH : any, pair = width / 4;
    for (int64_t r = 0; r < rows; r++, from += width * BITS / 8, to += width) {
        if constexpr (BITS == 4) unpack_piece<4, 0>(from, width / 2, to);
        if constexpr (BITS < 4) unpack_piece<2, 0>(from, pair, to);
        if constexpr (BITS == 3) unpack_piece<1, 2>(from + pair, width / 8, to);
    }
}

template <int BITS>
void unpack_rows(const uint8_t* from, int64_t rows, int64_t width, uint8_t* to) {
    if (width == 64) return unpack_rows<BITS, 64>(from, rows, width, to);
    if (width == 128) return unpack_rows<BITS, 128>(from, rows, width, to);
    unpack_rows<BITS, 0>(from, rows, width, to);
}

// Codes of so many rows as bytes [rows, width]; of 8 bits they lie as such.
const uint8_t* unpack(
    const uint8_t* from, int64_t bits, int64_t rows, int64_t width, Space<uint8_t>& space) {
    if (bits == 8) return from;
    uint8_t* const to = space.of(rows * width);
    if (bits == 4) unpack_rows<4>(from, rows, width, to);
    if (bits == 3) unpack_rows<3>(from, rows, width, to);
    if (bits == 2) unpack_rows<2>(from, rows, width, to);
    return to;
}

// Rows whose codes are bytes at a time. Blocks end at multiples of it, and where groups do: a row is
// in the same block and lane, whatever else is read.
constexpr int64_t SOME = 64;

// Numbers of rows [rows, count] as [count, SOME], filled up with zeros.
void columns_of(const float* numbers, int64_t rows, int64_t count, float* to) {
    for (int64_t n = 0; n < count; n++) {
        for (int64_t c = 0; c < rows; c++) to[n * SOME + c] = numbers[c * count + n];
        std::fill_n(to + n * SOME + rows, SOME - rows, 0.0f);
    }
}

// Numbers that are not what their codes say, one for each of a row's or channel's groups: their places,
// and by how much they are another; none is no number more, in the first place.
struct Outliers {
    std::vector<int32_t> places;
    std::vector<float> apart;

    void clear() { places.clear(), apart.clear(); }
    // Of so many groups, of `size` numbers each, of which those from `begin` on are `there`: their
    // places as they are stored, and the numbers. code: the one of group i and place. times and plus:
    // of each group.
    template <class Code>
    void add(
        const float* said, const float* numbers, const float* times, const float* plus, int64_t groups,
        int64_t size, int64_t begin, int64_t there, const Code& code) {
        const int64_t old = places.size(), most = (groups + LANES - 1) / LANES * LANES;
        places.resize(old + most);
        apart.resize(old + most);
        for (int64_t i = 0; i < groups; i += LANES) {
            int32_t* const found = places.data() + old + i;
            const int64_t left = groups - i;
            const Whole place = places_of(load<Lanes>(said + i, left), size, begin, there);
            store(found, place & (place >= 0));
            float codes[LANES] = {};
            for (int64_t lane = 0; lane < std::min<int64_t>(LANES, left); lane++)
                codes[lane] = float(code(i + lane, found[lane]));
            const Lanes value =
                fused(load<Lanes>(codes), load<Lanes>(times + i, left), load<Lanes>(plus + i, left));
            const Lanes by = load<Lanes>(numbers + i, left) - value;
            store(apart.data() + old + i, place >= 0 ? by : Lanes{});
        }
        places.resize(old + groups);
        apart.resize(old + groups);
    }
};

}  // namespace
