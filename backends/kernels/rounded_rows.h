// Rows of x as whole numbers, for products with weights of few bits.

#pragma once

#include <cmath>
#include <cstring>

#include "tile_weights.h"

namespace {

// What products are to have added for each value of x, because bytes stand for weights.
inline int32_t start_of(const Weights& w) {
    const int32_t zero = w.table ? 128 : w.offset ? 0 : 1 << (w.bits - 1);
    return (w.table || w.bits == 8 ? Processor::LEFT<true> : Processor::LEFT<false>) - zero;
}

struct Rows;

// How rows are multiplied with a tile: in gangs of at most `together`, as numbers of `width` bytes.
struct Way {
    void (*every_row)(const Tile&, const Rows&, float*);
    int together, width;
};

// Rows of x as whole numbers, in gangs: four bytes of each of a gang's rows one after the other,
// then the next four. starts [gang: units, rows]: what sums of products begin with, so that the
// weights' zero comes off them. sums [gang: groups, rows]: of each row's values in a group. What
// sums are multiplied with: steps [gang: spans, rows] at once, scales [rows] at the end.
struct Rows {
    Way way;
    int64_t count, row_bytes;  // with values that fill groups up
    int8_t* values;
    int32_t* starts;
    float *sums, *steps, *scales;

    int64_t gangs() const { return (count + way.together - 1) / way.together; }
    // Gangs of about the same size.
    int64_t first(int64_t gang) const { return count * gang / gangs(); }
};

// Vectors of the processor's width: compilers take wider ones apart number by number.
constexpr int LANES = OUTPUTS / Processor::PARTS;
typedef float Floats __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t Wholes __attribute__((vector_size(LANES * sizeof(int32_t))));
typedef int16_t Shorts __attribute__((vector_size(LANES * sizeof(int16_t))));
typedef int8_t Bytes __attribute__((vector_size(LANES)));

template <class V, class T>
V some(const T* from, int64_t count) {
    V value = {};
    // A size that is known is a load; another one is a call, and waits for memory to come back.
    if (count >= LANES)
        std::memcpy(&value, from, sizeof(V));
    else if (count > 0)
        std::memcpy(&value, from, count * sizeof(T));
    return value;
}

// The scale of a row: its largest absolute value is 127 steps. No number if one of its values is
// infinite or no number.
inline float scale_of(const float* x, int64_t K) {
    Wholes most = {};
    for (int64_t k = 0; k < K; k += LANES) {
        // Of positive floats the larger one has the larger bits.
        const Wholes size = some<Wholes>(x + k, K - k) & 0x7fffffff;
        most = size > most ? size : most;
    }
    int32_t bits = 0;
    for (int lane = 0; lane < LANES; lane++) bits = std::max(bits, most[lane]);
    float largest;
    std::memcpy(&largest, &bits, sizeof(largest));
    if (bits >= 0x7f800000) return std::nanf("");
    const float scale = largest / 127.0f;
    return scale > 0 ? scale : 1.0f;
}

// Round a row of x [K] to vectors V, one of `ganged` rows whose values, starts, sums and steps these
// are. Returns what its results are to be multiplied with.
template <class V>
float round_row(
    const float* x,
    const Weights& w,
    int64_t ganged,
    int8_t* values,
    int32_t* starts,
    float* sums,
    float* steps) {
    constexpr float magic = 12582912.0f;  // what has no room for fractions: halves go to even
    const Floats most = Floats{} + 127.0f;
    const int32_t start = start_of(w);
    const int64_t unit = w.unit(), each = w.span ? w.span : w.K;
    float scale = 1, step = 1;
    for (int64_t at = 0; at < w.K; at += unit, starts += ganged) {
        if (at % each == 0) {
            scale = scale_of(x + at, each);
            *steps = step = w.span ? scale : 1.0f;
            steps += ganged;
        }
        const bool fine = scale > 0;
        const Floats by = Floats{} + (fine ? scale : 1.0f);
        const int64_t padded = blocks_of(w) * DEPTH;
        Wholes total = {};
        for (int64_t k = 0; k < padded; k += LANES, values += ganged * sizeof(V)) {
            Floats value = some<Floats>(x + at + k, unit - k) / by;
            value = value > most ? most : value < -most ? -most : value;
            value = (value + magic) - magic;
            const Wholes whole = fine ? __builtin_convertvector(value, Wholes) : Wholes{};
            total += whole;
            const V found = __builtin_convertvector(whole, V);
            for (size_t to = 0; to < sizeof(V); to += WORD)
                std::memcpy(values + to * ganged, (const char*)&found + to, WORD);
        }
        int32_t all = 0;
        for (int lane = 0; lane < LANES; lane++) all += total[lane];
        *starts = start * all;
        float& sum = sums[at / w.group * ganged];
        sum = at % w.group ? std::fma(float(all), step, sum) : float(all) * step;
    }
    return w.span ? 1.0f : scale;
}

inline void round_gang(const float* x, const Weights& w, const Rows& rows, int64_t gang) {
    const int64_t begin = rows.first(gang), ganged = rows.first(gang + 1) - begin;
    const auto round = rows.way.width == 1 ? round_row<Bytes> : round_row<Shorts>;
    for (int64_t r = 0; r < ganged; r++)
        rows.scales[begin + r] =
            round(x + (begin + r) * w.K,
                  w,
                  ganged,
                  rows.values + begin * rows.row_bytes + r * WORD,
                  rows.starts + begin * w.units() + r,
                  rows.sums + begin * w.groups() + r,
                  rows.steps + begin * w.spans() + r);
}

}  // namespace
