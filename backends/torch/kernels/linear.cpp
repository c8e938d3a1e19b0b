// Linear layers.
//
// A step of decoding has a few rows and reads every weight once, so its time is that of the memory,
// if the weights are asked for early enough: while a few rows are multiplied with one output's
// weights, the processor does not look far enough ahead by itself. Of many rows see `wide.h`.
//
// Sums are taken in one order whatever rows share the step: a token's results have the same bits
// alone and among others. Those of `wide.h` are taken in another one.

#include "wide.h"

namespace {

constexpr int TOGETHER = 8;  // rows that share one reading of weights

#ifdef WIDE_DOT_PRODUCTS
constexpr int PAIR = 2;  // outputs at a time: their sums for `TOGETHER` rows fit in registers
#else
constexpr int PAIR = 1;
#endif
constexpr int64_t AHEAD = 8192;  // bytes between the weights in use and those asked for
constexpr int64_t BLOCK = 16;    // outputs whose weights stay near while all rows pass
constexpr int64_t FEW = 64;      // rows; for more, `wide.h` is faster

// Products of ROWS rows of values [ROWS, K] with PAIRED rows of weights [PAIRED, K], added up: the
// first lanes are [ROWS, PAIRED].
template <int ROWS, int PAIRED>
inline Lanes dots(const float* values, const float* weights, int64_t K) {
    Lanes sums[ROWS * PAIRED] = {};
    // Unrolled, so that the sums stay in registers.
    const auto step = [&](const auto* w, int64_t next_output, const auto* x, int64_t next_row)
        __attribute__((always_inline)) {
        Lanes loaded[PAIRED];
#pragma GCC unroll 2
        for (int p = 0; p < PAIRED; p++) {
            // Into the second cache: the first has too few places for what is on its way.
            __builtin_prefetch((const char*)(w + p * next_output) + AHEAD, 0, 2);
            loaded[p] = load<Lanes>(w + p * next_output);
        }
#pragma GCC unroll 16
        for (int i = 0; i < ROWS * PAIRED; i++)
            sums[i] =
                add_product(loaded[i % PAIRED], load<Lanes>(x + i / PAIRED * next_row), sums[i]);
    };
    int64_t k = 0;
    for (; k + LANES <= K; k += LANES) step(weights + k, K, values + k, K);
    if (k < K) {
        float last_weights[PAIRED][LANES] = {};
        float last_values[ROWS][LANES] = {};
        for (int p = 0; p < PAIRED; p++)
            std::copy(weights + p * K + k, weights + (p + 1) * K, last_weights[p]);
        for (int r = 0; r < ROWS; r++)
            std::copy(values + r * K + k, values + (r + 1) * K, last_values[r]);
        step(last_weights[0], LANES, last_values[0], LANES);
    }
    return add_up(sums);
}

// `dots` of ROWS rows with `count` <= BLOCK rows of weights: totals [ROWS, BLOCK].
template <int ROWS>
__attribute__((noinline)) void block_of_dots(
    const float* values,
    const float* weights,
    int64_t count,
    int64_t K,
    float* totals) {
    constexpr int PAIRED = ROWS > 1 ? PAIR : 1;
    typedef float Pair[PAIRED];
    int64_t n = 0;
    for (; n + PAIRED <= count; n += PAIRED) {
        Pair found[sizeof(Lanes) / sizeof(Pair)];
        store(found, dots<ROWS, PAIRED>(values, weights + n * K, K));
        for (int r = 0; r < ROWS; r++) std::memcpy(totals + r * BLOCK + n, found[r], sizeof(Pair));
    }
    for (; n < count; n++) {
        const Lanes total = dots<ROWS, 1>(values, weights + n * K, K);
        for (int r = 0; r < ROWS; r++) totals[r * BLOCK + n] = total[r];
    }
}

template <int ROWS = TOGETHER, class... Rest>
void block_by_rows(int64_t rows, Rest... rest) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return block_by_rows<ROWS - 1>(rows, rest...);
    block_of_dots<ROWS>(rest...);
}

// All rows [rows, K] with all outputs' weights [N, K], among a team of threads:
// `give(row, first, count, totals)` takes those of `count` outputs from `first`.
template <class Give>
void every_dot(
    const float* values,
    const float* weights,
    int64_t rows,
    int64_t N,
    int64_t K,
    Give give) {
    const int64_t groups = (rows + TOGETHER - 1) / TOGETHER;
    float totals[TOGETHER * BLOCK];
#pragma omp for schedule(static)
    for (int64_t first = 0; first < N; first += BLOCK) {
        const int64_t count = std::min(BLOCK, N - first);
        for (int64_t group = 0; group < groups; group++) {
            // Groups of about the same size.
            const int64_t begin = rows * group / groups, end = rows * (group + 1) / groups;
            block_by_rows(
                end - begin, values + begin * K, weights + first * K, count, K, totals);
            for (int64_t row = begin; row < end; row++)
                give(row, first, count, totals + (row - begin) * BLOCK);
        }
    }
}

}  // namespace

extern "C" {

// y [rows, N] = x [rows, K] weight [N, K]^T; if `alike`, of many rows in the order of a few.
void linear_float32(
    const float* x,
    const float* weight,
    float* y,
    int64_t rows,
    int64_t N,
    int64_t K,
    int64_t alike,
    int64_t threads) {
    const auto give = [=](int64_t row, int64_t first, int64_t count, const float* totals) {
        std::copy(totals, totals + count, y + row * N + first);
    };
    if (rows <= FEW || alike) {
#pragma omp parallel num_threads(threads)
        every_dot(x, weight, rows, N, K, give);
        return;
    }
    static thread_local std::vector<float> room;
    float* panels = room_for_panels(room, rows, K);
#pragma omp parallel num_threads(threads)
    every_product(x, weight, rows, N, K, panels, give);
}

}
