// Linear layers.
//
// A step of decoding has a few rows and reads every weight once, so its time is that of the memory,
// if the weights are asked for early enough: while a few rows are multiplied with one output's
// weights, the processor does not look far enough ahead by itself. Of many rows see `wide.h`.
//
// Sums are taken in one order whatever rows share the step: a token's results have the same bits
// alone and among others.

#include "wide.h"

namespace {

#ifdef WIDE_DOT_PRODUCTS
constexpr int PAIR = 2;  // outputs at a time: their sums for `TOGETHER` rows fit in registers
#else
constexpr int PAIR = 1;
#endif
constexpr int64_t AHEAD = 8192;  // bytes between the weights in use and those asked for
constexpr int64_t BLOCK = 16;    // outputs whose weights stay near while all rows pass
constexpr int64_t FEW = 64;      // rows, in float32; for more, `wide.h` is faster
constexpr int64_t FEW_BYTES = 32;

// How a step of K products is added up: `Weight` and `Value` are what is multiplied, `Sum` is what
// `add` adds `STEP` products at a time to, and `Total` what is left of it.

struct Floats {
    typedef float Weight;
    typedef float Value;
    typedef float Total;
    typedef Lanes Sum;
    typedef Lanes Loaded;
    static constexpr int STEP = LANES;
    static Loaded weights(const Weight* from) { return load<Lanes>(from); }
    static void add(Sum& sum, Loaded weights, const Value* values) {
        sum += weights * load<Lanes>(values);
    }
};

// Of many rows: as many values of a row as fit lie in a float's place.
template <class Of, class Part>
struct ManyBytes {
    typedef typename Of::Weight Weight;
    typedef Part Piece;
    typedef int32_t Total;
    typedef Lanes Values;
    typedef Whole Sums;
    static constexpr int GROUP = sizeof(float) / sizeof(typename Of::Value);
};

#ifdef WIDE_DOT_PRODUCTS
constexpr bool UNSIGNED = true;  // dot products of bytes want one side unsigned
struct Bytes {
    typedef int8_t Weight;
    typedef uint8_t Value;
    typedef int32_t Total;
    typedef Whole Sum;
    typedef __m512i Loaded;
    static constexpr int STEP = 64;
    static Loaded weights(const Weight* from) { return _mm512_loadu_si512(from); }
    static void add(Sum& sum, Loaded weights, const Value* values) {
        sum = (Sum)_mm512_dpbusd_epi32((__m512i)sum, _mm512_loadu_si512(values), weights);
    }
};
struct WideBytes : ManyBytes<Bytes, int8_t> {
    static void add(Whole& sums, Lanes values, const int8_t* weights) {
        const Whole same = Whole{} + load<int32_t>(weights);
        sums = (Whole)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)values, (__m512i)same);
    }
};
#elif defined(__AVX2__)
constexpr bool UNSIGNED = false;
struct Bytes {
    typedef int8_t Weight;
    typedef int16_t Value;
    typedef int32_t Total;
    typedef int32_t Sum __attribute__((vector_size(32)));
    typedef __m256i Loaded;
    static constexpr int STEP = 16;
    static Loaded weights(const Weight* from) {
        return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from));
    }
    static void add(Sum& sum, Loaded weights, const Value* values) {
        __m256i loaded = _mm256_loadu_si256((const __m256i*)values);
        sum += (Sum)_mm256_madd_epi16(loaded, weights);
    }
};
struct WideBytes : ManyBytes<Bytes, int16_t> {
    static void add(Whole& sums, Lanes values, const int16_t* weights) {
        const Whole same = Whole{} + load<int32_t>(weights);
        sums += (Whole)_mm256_madd_epi16((__m256i)values, (__m256i)same);
    }
};
#else
constexpr bool UNSIGNED = false;
struct Bytes {
    typedef int8_t Weight;
    typedef int16_t Value;
    typedef int32_t Total;
    typedef Whole Sum;
    typedef Whole Loaded;
    static constexpr int STEP = LANES;
    template <class T>
    static Whole wide(const T* from) {
        typedef T Narrow __attribute__((vector_size(sizeof(T) * LANES)));
        return __builtin_convertvector(load<Narrow>(from), Whole);
    }
    static Loaded weights(const Weight* from) { return wide(from); }
    static void add(Sum& sum, Loaded weights, const Value* values) { sum += weights * wide(values); }
};
struct WideBytes : ManyBytes<Bytes, int16_t> {
    static void add(Whole& sums, Lanes values, const int16_t* weights) {
        const Whole both = (Whole)values, first = (both << 16) >> 16, second = both >> 16;
        sums += first * weights[0] + second * weights[1];
    }
};
#endif

// Products of ROWS rows of values [ROWS, K] with PAIRED rows of weights [PAIRED, K], added up: the
// first lanes are [ROWS, PAIRED].
template <class Of, int ROWS, int PAIRED>
inline typename Of::Sum dots(
    const typename Of::Value* values, const typename Of::Weight* weights, int64_t K) {
    typename Of::Sum sums[ROWS * PAIRED] = {};
    // Unrolled, so that the sums stay in registers.
    const auto step = [&](const auto* w, int64_t next_output, const auto* x, int64_t next_row)
        __attribute__((always_inline)) {
        typename Of::Loaded loaded[PAIRED];
#pragma GCC unroll 2
        for (int p = 0; p < PAIRED; p++) {
            // Into the second cache: the first has too few places for what is on its way.
            __builtin_prefetch((const char*)(w + p * next_output) + AHEAD, 0, 2);
            loaded[p] = Of::weights(w + p * next_output);
        }
#pragma GCC unroll 16
        for (int i = 0; i < ROWS * PAIRED; i++)
            Of::add(sums[i], loaded[i % PAIRED], x + i / PAIRED * next_row);
    };
    int64_t k = 0;
    for (; k + Of::STEP <= K; k += Of::STEP) step(weights + k, K, values + k, K);
    if (k < K) {
        typename Of::Weight last_weights[PAIRED][Of::STEP] = {};
        typename Of::Value last_values[ROWS][Of::STEP] = {};
        for (int p = 0; p < PAIRED; p++)
            std::copy(weights + p * K + k, weights + (p + 1) * K, last_weights[p]);
        for (int r = 0; r < ROWS; r++)
            std::copy(values + r * K + k, values + (r + 1) * K, last_values[r]);
        step(last_weights[0], Of::STEP, last_values[0], Of::STEP);
    }
    return add_up(sums);
}

// `dots` of ROWS rows with `count` <= BLOCK rows of weights: totals [ROWS, BLOCK].
template <class Of, int ROWS>
__attribute__((noinline)) void block_of_dots(
    const typename Of::Value* values,
    const typename Of::Weight* weights,
    int64_t count,
    int64_t K,
    typename Of::Total* totals) {
    constexpr int PAIRED = ROWS > 1 ? PAIR : 1;
    typedef typename Of::Total Pair[PAIRED];
    int64_t n = 0;
    for (; n + PAIRED <= count; n += PAIRED) {
        Pair found[sizeof(typename Of::Sum) / sizeof(Pair)];
        store(found, dots<Of, ROWS, PAIRED>(values, weights + n * K, K));
        for (int r = 0; r < ROWS; r++) std::memcpy(totals + r * BLOCK + n, found[r], sizeof(Pair));
    }
    for (; n < count; n++) {
        const typename Of::Sum total = dots<Of, ROWS, 1>(values, weights + n * K, K);
        for (int r = 0; r < ROWS; r++) totals[r * BLOCK + n] = total[r];
    }
}

template <class Of, int ROWS = TOGETHER, class... Rest>
void block_by_rows(int64_t rows, Rest... rest) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return block_by_rows<Of, ROWS - 1>(rows, rest...);
    block_of_dots<Of, ROWS>(rest...);
}

// All rows [rows, K] with all outputs' weights [N, K], among a team of threads:
// `give(row, first, count, totals)` takes those of `count` outputs from `first`.
template <class Of, class Give>
void every_dot(
    const typename Of::Value* values,
    const typename Of::Weight* weights,
    int64_t rows,
    int64_t N,
    int64_t K,
    Give give) {
    const int64_t groups = (rows + TOGETHER - 1) / TOGETHER;
    typename Of::Total totals[TOGETHER * BLOCK];
#pragma omp for schedule(static)
    for (int64_t first = 0; first < N; first += BLOCK) {
        const int64_t count = std::min(BLOCK, N - first);
        for (int64_t group = 0; group < groups; group++) {
            // Groups of about the same size.
            const int64_t begin = rows * group / groups, end = rows * (group + 1) / groups;
            block_by_rows<Of>(
                end - begin, values + begin * K, weights + first * K, count, K, totals);
            for (int64_t row = begin; row < end; row++)
                give(row, first, count, totals + (row - begin) * BLOCK);
        }
    }
}

// The scale of a row of x: its largest absolute value is 127 steps.
float row_scale(const float* x, int64_t K) {
    Lanes most = {}, broken = {};
    for (int64_t k = 0; k < K; k += LANES) {
        const Lanes value = load<Lanes>(x + k, K - k), size = value < 0 ? -value : value;
        most = size > most ? size : most;
        broken += value - value;  // 0, or NaN for what is not finite, which comparing loses
    }
    float largest = 0, rest = 0;
    for (int lane = 0; lane < LANES; lane++) {
        largest = std::max(largest, most[lane]);
        rest += broken[lane];
    }
    const float scale = largest / 127.0f;
    return (scale > 0 ? scale : 1.0f) + rest;
}

// The steps of a row, in 0..255 with their zero point, which stays in them if UNSIGNED.
void round_row(const float* x, int64_t K, float scale, float zero, Bytes::Value* steps) {
    typedef Bytes::Value Narrow __attribute__((vector_size(sizeof(Bytes::Value) * LANES)));
    const Lanes by = Lanes{} + scale, least = {}, most = least + 255;
    const float back = UNSIGNED ? 0 : zero;
    for (int64_t k = 0; k < K; k += LANES) {
        Lanes value = rounded(load<Lanes>(x + k, K - k) / by) + zero;
        value = value < least ? least : value > most ? most : value;
        const Whole whole = __builtin_convertvector(value - back, Whole);
        store(steps + k, __builtin_convertvector(whole, Narrow), K - k);
    }
}

// One scale and zero point for all values: 256 steps from the least, or 0, to the largest, or 0.
void tensor_scale(const float* x, int64_t count, float& scale, float& zero) {
    Lanes least = {}, most = {}, broken = {};
    for (int64_t i = 0; i < count; i += LANES) {
        const Lanes value = load<Lanes>(x + i, count - i);
        least = value < least ? value : least;
        most = value > most ? value : most;
        broken += value - value;
    }
    float low = 0, high = 0, rest = 0;
    for (int lane = 0; lane < LANES; lane++) {
        low = std::min(low, least[lane]);
        high = std::max(high, most[lane]);
        rest += broken[lane];
    }
    scale = (high - low) / 255.0f;
    scale = scale > 0 ? scale : 1.0f;
    zero = std::min(std::max(rounded(-low / scale), 0.0f), 255.0f);
    scale += rest;
}

}  // namespace

extern "C" {

// y [rows, N] = x [rows, K] weight [N, K]^T
void linear_float32(
    const float* x,
    const float* weight,
    float* y,
    int64_t rows,
    int64_t N,
    int64_t K,
    int64_t threads) {
    const auto give = [=](int64_t row, int64_t first, int64_t count, const float* totals) {
        std::copy(totals, totals + count, y + row * N + first);
    };
    if (rows <= FEW) {
#pragma omp parallel num_threads(threads)
        every_dot<Floats>(x, weight, rows, N, K, give);
        return;
    }
    static thread_local std::vector<float> room;
    float* panels = room_for_panels(room, rows, K);
#pragma omp parallel num_threads(threads)
    every_product<WideFloats>(x, weight, rows, N, K, panels, give);
}

// `graftwork.linear_int8` without its bias. sums [N]: each output's weights added up.
void linear_int8(
    const float* x,
    const int8_t* weight,
    const float* scale,
    const int32_t* sums,
    float* y,
    int64_t rows,
    int64_t N,
    int64_t K,
    int64_t coarse,
    int64_t threads) {
    // Of the calling thread: other threads' steps have their own.
    static thread_local std::vector<Bytes::Value> all_steps;
    static thread_local std::vector<float> all_scales, room;
    const bool many = rows > FEW_BYTES;
    const int64_t groups = (K + WideBytes::GROUP - 1) / WideBytes::GROUP;
    const int64_t stride = many ? groups * WideBytes::GROUP : K;
    all_steps.resize(rows * stride);
    all_scales.resize(rows);
    Bytes::Value* steps = all_steps.data();
    float* scales = all_scales.data();
    float* panels = many ? room_for_panels(room, rows, groups) : nullptr;
    float zero = 128, whole = 0;
    if (coarse) tensor_scale(x, rows * K, whole, zero);
    const int32_t left = UNSIGNED ? int32_t(zero) : 0;
    const auto take = [=](int64_t row) {
        scales[row] = coarse ? whole : row_scale(x + row * K, K);
        round_row(x + row * K, K, scales[row], zero, steps + row * stride);
        std::fill(steps + row * stride + K, steps + (row + 1) * stride, 0);
    };
    const auto give = [=](int64_t row, int64_t first, int64_t count, const int32_t* totals) {
        for (int64_t n = 0; n < count; n++) {
            const float exact = float(totals[n] - left * sums[first + n]);
            y[row * N + first + n] = exact * scales[row] * scale[first + n];
        }
    };
    if (rows == 1) take(0);
#pragma omp parallel num_threads(threads)
    {
        if (rows > 1) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; row++) take(row);
        }
        if (many)
            every_product<WideBytes>((const float*)steps, weight, rows, N, K, panels, give);
        else
            every_dot<Bytes>(steps, weight, rows, N, K, give);
    }
}

}
