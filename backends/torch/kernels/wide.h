// Products of many rows, such as a prompt's.
//
// A step of many rows uses each weight for all of them: its time is that of the arithmetic. So lanes
// are rows, and a weight is multiplied with as many of them as there are registers for sums. Values
// are laid out for that once, weights a piece at a time that stays in the nearest cache.
//
// A row's sums are taken in one order whatever rows share the step.

#pragma once

#include "lanes.h"

namespace {

constexpr int VECTORS = 2;                // of rows at a time
constexpr int PANEL = VECTORS * LANES;    // rows
#ifdef WIDE_DOT_PRODUCTS
constexpr int OUTPUTS = 12;  // at a time: VECTORS times as many sums fit in registers
#else
constexpr int OUTPUTS = 6;
#endif
constexpr int64_t DEEP = 256;            // of K at a time
constexpr int64_t NEAR = 8 * OUTPUTS;    // outputs that use values while they are near

// LANES vectors, turned around: lane j of vector i becomes lane i of vector j.
template <int apart = 1, class V>
void turn_around(V (&vectors)[LANES]) {
    if constexpr (apart < LANES) {
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (!(i & apart))
                swap_lanes<apart>(
                    vectors[i], vectors[i + apart], std::make_integer_sequence<int, LANES>());
        turn_around<2 * apart>(vectors);
    }
}

// How products are added up: a lane of `Values` holds GROUP values of a row, as many `Piece`s of
// weights are read at once, and `Sums` is what `add` adds their products to.

struct WideFloats {
    typedef float Weight;
    typedef float Piece;
    typedef float Total;
    typedef Lanes Values;
    typedef Lanes Sums;
    static constexpr int GROUP = 1;
    static void add(Sums& sums, Values values, const Piece* weights) { sums += values * *weights; }
};

// Sums of COUNT outputs [COUNT, PANEL], from zero if FRESH: weights [COUNT, DEEP], of which `groups`
// groups, and values [groups, PANEL].
template <class Of, int COUNT>
__attribute__((noinline)) void add_products(
    const float* values,
    const typename Of::Piece* weights,
    int64_t groups,
    bool fresh,
    typename Of::Total* totals) {
    typename Of::Sums sums[COUNT][VECTORS];
#pragma GCC unroll 16
    for (int n = 0; n < COUNT; n++)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) {
            typename Of::Total* from = totals + n * PANEL + v * LANES;
            sums[n][v] = fresh ? typename Of::Sums{} : load<typename Of::Sums>(from);
        }
    for (int64_t k = 0; k < groups; k++) {
        typename Of::Values x[VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++)
            x[v] = load<typename Of::Values>(values + k * PANEL + v * LANES);
#pragma GCC unroll 16
        for (int n = 0; n < COUNT; n++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++)
                Of::add(sums[n][v], x[v], weights + n * DEEP + k * Of::GROUP);
    }
#pragma GCC unroll 16
    for (int n = 0; n < COUNT; n++)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) store(totals + n * PANEL + v * LANES, sums[n][v]);
}

template <class Of, int COUNT = OUTPUTS, class... Rest>
void add_products_of(int64_t count, Rest... rest) {
    if constexpr (COUNT > 1)
        if (count < COUNT) return add_products_of<Of, COUNT - 1>(count, rest...);
    add_products<Of, COUNT>(rest...);
}

// Rows [count, groups], `stride` apart, as a panel [groups, PANEL]; zeros for those that are missing.
inline void lay_out(const float* rows, int64_t count, int64_t stride, int64_t groups, float* panel) {
    for (int64_t k = 0; k < groups; k += LANES)
        for (int v = 0; v < VECTORS; v++) {
            Lanes part[LANES];
            for (int i = 0; i < LANES; i++) {
                const int64_t row = v * LANES + i;
                part[i] = row < count ? load<Lanes>(rows + row * stride + k, groups - k) : Lanes{};
            }
            turn_around(part);
            for (int64_t i = 0; i < std::min<int64_t>(LANES, groups - k); i++)
                store(panel + (k + i) * PANEL + v * LANES, part[i]);
        }
}

template <class T>
T* aligned(T* address) {
    return address + (-reinterpret_cast<intptr_t>(address) & 63) / sizeof(T);
}

// Room for values [rows, groups], rows rounded up to a multiple of PANEL.
inline float* room_for_panels(std::vector<float>& room, int64_t rows, int64_t groups) {
    room.resize((rows + PANEL - 1) / PANEL * PANEL * groups + 16);
    return aligned(room.data());
}

// All rows of values with all outputs' weights [N, K], among a team of threads, `give(row, first,
// count, totals)` takes those of `count` outputs from `first`. values [rows, groups]: in a float's
// place lie GROUP of a row's values, zeros behind the last one. panels: see `room_for_panels`.
template <class Of, class Give>
void every_product(
    const float* values,
    const typename Of::Weight* weights,
    int64_t rows,
    int64_t N,
    int64_t K,
    float* panels,
    Give give) {
    typedef typename Of::Piece Piece;
    typedef typename Of::Total Total;
    static_assert(sizeof(Total) == sizeof(float));
    const int64_t count = (rows + PANEL - 1) / PANEL, groups = (K + Of::GROUP - 1) / Of::GROUP;
    static thread_local std::vector<float> space;
    space.resize((NEAR * DEEP * sizeof(Piece) + NEAR * count * PANEL * sizeof(Total)) / 4 + 64);
    Piece* near = (Piece*)aligned(space.data());
    Total* totals = (Total*)aligned((float*)(near + NEAR * DEEP));
#pragma omp for schedule(static)
    for (int64_t p = 0; p < count; p++)
        lay_out(
            values + p * PANEL * groups, rows - p * PANEL, groups, groups,
            panels + p * PANEL * groups);
#pragma omp for schedule(dynamic)
    for (int64_t first = 0; first < N; first += NEAR) {
        const int64_t outputs = std::min(NEAR, N - first);
        for (int64_t begin = 0; begin == 0 || begin < K; begin += DEEP) {
            const int64_t depth = std::min(DEEP, K - begin);
            const int64_t inside = (depth + Of::GROUP - 1) / Of::GROUP;
            for (int64_t n = 0; n < outputs; n++) {
                const typename Of::Weight* from = weights + (first + n) * K + begin;
                std::fill(std::copy(from, from + depth, near + n * DEEP), near + (n + 1) * DEEP, 0);
            }
            for (int64_t p = 0; p < count; p++)
                for (int64_t n = 0; n < outputs; n += OUTPUTS)
                    add_products_of<Of>(
                        outputs - n, panels + (p * groups + begin / Of::GROUP) * PANEL,
                        near + n * DEEP, inside, begin == 0, totals + (p * NEAR + n) * PANEL);
        }
        for (int64_t row = 0; row < rows; row++) {
            const Total* from = totals + row / PANEL * NEAR * PANEL + row % PANEL;
            Total own[NEAR];
            for (int64_t n = 0; n < outputs; n++) own[n] = from[n * PANEL];
            give(row, first, outputs, own);
        }
    }
}

}  // namespace
