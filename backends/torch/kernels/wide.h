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

// Sums of COUNT outputs [COUNT, PANEL], from zero if `fresh`: weights [COUNT, DEEP], of which `depth`
// are there, and values [depth, PANEL].
template <int COUNT>
__attribute__((noinline)) void add_products(
    const float* values,
    const float* weights,
    int64_t depth,
    bool fresh,
    float* totals) {
    Lanes sums[COUNT][VECTORS];
#pragma GCC unroll 16
    for (int n = 0; n < COUNT; n++)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) {
            sums[n][v] = fresh ? Lanes{} : load<Lanes>(totals + n * PANEL + v * LANES);
        }
    for (int64_t k = 0; k < depth; k++) {
        Lanes x[VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) x[v] = load<Lanes>(values + k * PANEL + v * LANES);
#pragma GCC unroll 16
        for (int n = 0; n < COUNT; n++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++)
                sums[n][v] = add_product(x[v], splat(weights[n * DEEP + k]), sums[n][v]);
    }
#pragma GCC unroll 16
    for (int n = 0; n < COUNT; n++)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) store(totals + n * PANEL + v * LANES, sums[n][v]);
}

template <int COUNT = OUTPUTS, class... Rest>
void add_products_of(int64_t count, Rest... rest) {
    if constexpr (COUNT > 1)
        if (count < COUNT) return add_products_of<COUNT - 1>(count, rest...);
    add_products<COUNT>(rest...);
}

// Rows [count, K] as a panel [K, PANEL]; zeros for those that are missing.
inline void lay_out(const float* rows, int64_t count, int64_t K, float* panel) {
    for (int64_t k = 0; k < K; k += LANES)
        for (int v = 0; v < VECTORS; v++) {
            Lanes part[LANES];
            for (int i = 0; i < LANES; i++) {
                const int64_t row = v * LANES + i;
                part[i] = row < count ? load<Lanes>(rows + row * K + k, K - k) : Lanes{};
            }
            turn_around(part);
            for (int64_t i = 0; i < std::min<int64_t>(LANES, K - k); i++)
                store(panel + (k + i) * PANEL + v * LANES, part[i]);
        }
}

template <class T>
T* aligned(T* address) {
    return address + (-reinterpret_cast<intptr_t>(address) & 63) / sizeof(T);
}

// Room for values [rows, K], rows rounded up to a multiple of PANEL.
inline float* room_for_panels(std::vector<float>& room, int64_t rows, int64_t K) {
    room.resize((rows + PANEL - 1) / PANEL * PANEL * K + 16);
    return aligned(room.data());
}

// All rows of values [rows, K] with all outputs' weights [N, K], among a team of threads:
// `give(row, first, count, totals)` takes those of `count` outputs from `first`. panels: see
// `room_for_panels`.
template <class Give>
void every_product(
    const float* values,
    const float* weights,
    int64_t rows,
    int64_t N,
    int64_t K,
    float* panels,
    Give give) {
    const int64_t count = (rows + PANEL - 1) / PANEL;
    static thread_local std::vector<float> space;
    space.resize(NEAR * DEEP + NEAR * count * PANEL + 64);
    float* near = aligned(space.data());
    float* totals = aligned(near + NEAR * DEEP);
#pragma omp for schedule(static)
    for (int64_t p = 0; p < count; p++)
        lay_out(values + p * PANEL * K, rows - p * PANEL, K, panels + p * PANEL * K);
#pragma omp for schedule(dynamic)
    for (int64_t first = 0; first < N; first += NEAR) {
        const int64_t outputs = std::min(NEAR, N - first);
        for (int64_t begin = 0; begin == 0 || begin < K; begin += DEEP) {
            const int64_t depth = std::min(DEEP, K - begin);
            for (int64_t n = 0; n < outputs; n++) {
                const float* from = weights + (first + n) * K + begin;
                std::copy(from, from + depth, near + n * DEEP);
            }
            for (int64_t p = 0; p < count; p++)
                for (int64_t n = 0; n < outputs; n += OUTPUTS)
                    add_products_of(
                        outputs - n, panels + (p * K + begin) * PANEL, near + n * DEEP, depth,
                        begin == 0, totals + (p * NEAR + n) * PANEL);
        }
        for (int64_t row = 0; row < rows; row++) {
            const float* from = totals + row / PANEL * NEAR * PANEL + row % PANEL;
            float own[NEAR];
            for (int64_t n = 0; n < outputs; n++) own[n] = from[n * PANEL];
            give(row, first, outputs, own);
        }
    }
}

}  // namespace
