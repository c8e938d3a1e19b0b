// Attention of a few query rows, which share keys and values. A row's result has the same bits alone
// and among others.

#include "lanes.h"

namespace {

#ifdef WIDE_DOT_PRODUCTS
constexpr int NEARBY = 4;  // query rows that read values together: their sums fit in registers
#else
constexpr int NEARBY = 2;
#endif

// e^x, within two units in the last place; 0 below the smallest normal number.
Lanes exponential(Lanes x) {
    const Lanes least = Lanes{} - 87.33654f, most = Lanes{} + 88.37626f;
    const Lanes inside = x < least ? least : x > most ? most : x;
    const Lanes twos = rounded(inside * 1.44269504f);
    const Lanes rest = (inside - twos * 0.693359375f) + twos * 2.12194440e-4f;
    Lanes sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    const Whole exponent = (__builtin_convertvector(twos, Whole) + 127) << 23;
    return x < least ? Lanes{} : sum * (Lanes)exponent;
}

float exponential(float x) { return exponential(Lanes{} + x)[0]; }

// What every row of an attention has in common.
struct Attention {
    int64_t width, dim, wide;
    float scale, softcap;  // 0: no cap
};

// Products of a query row [dim] and keys [LANES, dim], of which there are `count` unless ALL; what
// the lanes of others hold is undefined.
template <bool ALL>
Lanes scores_of(const float* q, const float* keys, int64_t count, int64_t dim) {
    Lanes sums[LANES] = {};
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) {
        const Lanes query = load<Lanes>(q + d);
        const float* from = keys + d;
#pragma GCC unroll 16
        for (int key = 0; key < LANES; key++) {
            sums[key] += query * load<Lanes>(from);
            if (ALL || key + 1 < count) from += dim;
        }
    }
    if (d < dim) {
        const Lanes query = load<Lanes>(q + d, dim - d);
#pragma GCC unroll 16
        for (int key = 0; key < LANES; key++) {
            const float* from = keys + (ALL || key < count ? key : 0) * dim + d;
            sums[key] += query * load<Lanes>(from, dim - d);
        }
    }
    return add_up(sums);
}

// Turns scores [rows] of a query row into weights; what they add up to. Rows in parts of LANES.
float soften(float* scores, int64_t rows, const float* sink) {
    Lanes most = Lanes{} - INFINITY;
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

// out [ROWS, wide] = weights [ROWS, stride] v [rows, wide], of COUNT vectors of columns; of the last
// one, `last` columns.
template <int ROWS, int COUNT>
void weigh(
    const float* weights,
    int64_t stride,
    const float* v,
    int64_t rows,
    int64_t wide,
    int64_t last,
    float* out) {
    Lanes sums[ROWS][COUNT] = {};
    for (int64_t c = 0; c < rows; c++)
#pragma GCC unroll 4
        for (int i = 0; i < COUNT; i++) {
            const float* from = v + c * wide + i * LANES;
            const Lanes value = i + 1 < COUNT ? load<Lanes>(from) : load<Lanes>(from, last);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) sums[r][i] += weights[r * stride + c] * value;
        }
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < COUNT; i++)
            store(out + r * wide + i * LANES, sums[r][i], i + 1 < COUNT ? LANES : last);
}

template <int ROWS>
void weigh_columns(
    const float* weights,
    int64_t stride,
    const float* v,
    int64_t rows,
    int64_t wide,
    float* out) {
    int64_t e = 0;
    for (; e + 4 * LANES <= wide; e += 4 * LANES)
        weigh<ROWS, 4>(weights, stride, v + e, rows, wide, LANES, out + e);
    for (; e < wide; e += LANES)
        weigh<ROWS, 1>(weights, stride, v + e, rows, wide, wide - e, out + e);
}

// Query rows first..last of a group, which share its keys k [C, dim] and values v [C, wide].
void attend_rows(
    const Attention& of,
    const float* q,
    const float* k,
    const float* v,
    const bool* mask,   // [width, C]
    const float* bias,  // [heads of the group, width, C], or none
    const float* sinks,
    float* out,
    int64_t first,
    int64_t last,
    int64_t C) {
    static thread_local std::vector<float> space;
    int64_t seen = 0;  // cache rows up to the last one that any of the query rows sees
    for (int64_t row = first; row < last; row++) {
        const bool* sees = mask + row % of.width * C;
        int64_t c = C;
        while (c > seen && !sees[c - 1]) c--;
        seen = c;
    }
    const int64_t stride = (seen + LANES - 1) / LANES * LANES;
    space.resize((last - first) * stride);
    float* weights = space.data();
    float totals[TOGETHER];
    for (int64_t c = 0; c < stride; c += LANES) {
        const int64_t count = std::min<int64_t>(LANES, C - c);
        for (int64_t row = first; row < last; row++) {
            const float *query = q + row * of.dim, *keys = k + c * of.dim;
            Lanes score = count == LANES ? scores_of<true>(query, keys, count, of.dim)
                                         : scores_of<false>(query, keys, count, of.dim);
            score *= of.scale;
            if (of.softcap != 0)
                score = of.softcap - 2 * of.softcap / (exponential(score * (2 / of.softcap)) + 1);
            if (bias) score += load<Lanes>(bias + row * C + c, count);
            const auto sees = load<Marks>(mask + row % of.width * C + c, count);
            score = __builtin_convertvector(sees, Whole) != 0 ? score : Lanes{} - INFINITY;
            store(weights + (row - first) * stride + c, score);
        }
    }
    for (int64_t row = first; row < last; row++)
        totals[row - first] = soften(
            weights + (row - first) * stride, stride, sinks ? sinks + row / of.width : nullptr);
    int64_t row = first;
    for (; row + NEARBY <= last; row += NEARBY)
        weigh_columns<NEARBY>(
            weights + (row - first) * stride, stride, v, seen, of.wide, out + row * of.wide);
    for (; row < last; row++)
        weigh_columns<1>(
            weights + (row - first) * stride, stride, v, seen, of.wide, out + row * of.wide);
    for (row = first; row < last; row++)
        for (int64_t e = 0; e < of.wide; e++) out[row * of.wide + e] /= totals[row - first];
}

}  // namespace

extern "C" {

// `graftwork.attend`: q [B,H,T,D], k [B,G,C,D], v [B,G,C,E], mask [B,1,T,C], bias [B,H,T,C] or none,
// sinks [H] or none; out [B,H,T,E].
void attend(
    const float* q,
    const float* k,
    const float* v,
    const bool* mask,
    const float* bias,
    const float* sinks,
    float* out,
    int64_t B,
    int64_t H,
    int64_t G,
    int64_t T,
    int64_t C,
    int64_t D,
    int64_t E,
    const float* scale,
    const float* softcap,
    int64_t threads) {
    if (B * H * T * E == 0) return;
    const int64_t each = H / G, rows = each * T;
    // Every thread is to have some, though its keys are then read more often.
    const int64_t parts = std::min(
        rows, std::max((rows + TOGETHER - 1) / TOGETHER, (threads + B * G - 1) / (B * G)));
    const Attention of = {T, D, E, *scale, *softcap};
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t part = 0; part < B * G * parts; part++) {
        const int64_t group = part / parts, at = part % parts, b = group / G, g = group % G;
        attend_rows(
            of, q + group * rows * D, k + group * C * D, v + group * C * E, mask + b * T * C,
            bias ? bias + group * rows * C : nullptr, sinks ? sinks + g * each : nullptr,
            out + group * rows * E, rows * at / parts, rows * (at + 1) / parts, C);
    }
}

}
