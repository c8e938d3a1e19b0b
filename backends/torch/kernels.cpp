// Steps of a few rows on the CPU.
//
// A step of decoding reads every weight once, so its time is that of the memory, if the weights
// are asked for early enough: while a few rows are multiplied with one output's weights, the
// processor does not look far enough ahead by itself.
//
// Sums are taken in one order whatever rows share the step: a token's results have the same bits
// alone and among others.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define WIDE_DOT_PRODUCTS
#endif

namespace {

#ifdef WIDE_DOT_PRODUCTS
constexpr int LANES = 16;
constexpr int PAIR = 2;    // outputs at a time: their sums for `TOGETHER` rows fit in registers
constexpr int NEARBY = 4;  // query rows that read values together
#else
constexpr int LANES = 8;
constexpr int PAIR = 1;
constexpr int NEARBY = 2;
#endif
constexpr int TOGETHER = 8;      // rows that share one reading of the weights
constexpr int64_t AHEAD = 8192;  // bytes between the weights in use and those asked for
constexpr int64_t BLOCK = 16;    // outputs whose weights stay near while all rows pass

typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t Whole __attribute__((vector_size(4 * LANES)));
typedef uint8_t Marks __attribute__((vector_size(LANES)));

template <class V, class T>
V load(const T* from) {
    V value;
    std::memcpy(&value, from, sizeof(V));
    return value;
}

// The first `count` lanes, and zeros.
template <class V, class T>
V load(const T* from, int64_t count) {
    if (count * sizeof(T) >= sizeof(V)) return load<V>(from);
    V value = {};
    std::memcpy(&value, from, count * sizeof(T));
    return value;
}

template <class V, class T>
void store(T* to, V value) {
    std::memcpy(to, &value, sizeof(V));
}

template <class V, class T>
void store(T* to, V value, int64_t count) {
    std::memcpy(to, &value, std::min(count * sizeof(T), sizeof(V)));
}

// The lanes of a and b, each with the one `apart` lanes on added to it: a's sums lie where the
// lane's number has no `apart` in it, b's where it has.
template <int apart, class V, int... lane>
V add_lanes(V a, V b, std::integer_sequence<int, lane...>) {
    constexpr int count = sizeof...(lane);
    return __builtin_shufflevector(a, b, (lane & apart ? count + lane - apart : lane)...) +
           __builtin_shufflevector(a, b, (lane & apart ? count + lane : lane + apart)...);
}

// The sum of each vector's lanes, in that lane of the result that has the vector's number. The order
// of additions is the same for each, and for any number of vectors.
template <int apart = 1, class V, int COUNT>
V add_up(const V (&vectors)[COUNT]) {
    constexpr int lanes = sizeof(V) / sizeof(vectors[0][0]);
    static_assert(COUNT <= lanes);
    if constexpr (apart == lanes) {
        return vectors[0];
    } else {
        V fewer[(COUNT + 1) / 2];
#pragma GCC unroll 16
        for (int i = 0; i < COUNT; i += 2)
            fewer[i / 2] = add_lanes<apart>(
                vectors[i], vectors[i + 1 < COUNT ? i + 1 : i], std::make_integer_sequence<int, lanes>());
        return add_up<2 * apart>(fewer);
    }
}

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

// Halves are rounded to even, as long as |x| < 2^22.
template <class V>
V rounded(V x) {
    constexpr float magic = 12582912.0f;
    return (x + magic) - magic;
}

// The scale of a row of x: its largest absolute value is 127 steps.
float row_scale(const float* x, int64_t K) {
    Lanes most = {};
    for (int64_t k = 0; k < K; k += LANES) {
        const Lanes value = load<Lanes>(x + k, K - k), size = value < 0 ? -value : value;
        most = size > most ? size : most;
    }
    float largest = 0;
    for (int lane = 0; lane < LANES; lane++) largest = std::max(largest, most[lane]);
    const float scale = largest / 127.0f;
    return scale > 0 ? scale : 1.0f;
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
    Lanes least = {}, most = {};
    for (int64_t i = 0; i < count; i += LANES) {
        const Lanes value = load<Lanes>(x + i, count - i);
        least = value < least ? value : least;
        most = value > most ? value : most;
    }
    float low = 0, high = 0;
    for (int lane = 0; lane < LANES; lane++) {
        low = std::min(low, least[lane]);
        high = std::max(high, most[lane]);
    }
    scale = (high - low) / 255.0f;
    scale = scale > 0 ? scale : 1.0f;
    zero = std::min(std::max(rounded(-low / scale), 0.0f), 255.0f);
}

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

// y = (x - mean) / sqrt(mean of squares + eps) * weight + bias; the mean is 0 unless centered.
void norm_row(
    const float* x,
    const float* weight,
    const float* bias,
    float* y,
    int64_t K,
    bool centered,
    float eps) {
    float mean = 0;
    if (centered) {
        Lanes sums[1] = {};
        for (int64_t k = 0; k < K; k += LANES) sums[0] += load<Lanes>(x + k, K - k);
        mean = add_up(sums)[0] / K;
    }
    Lanes squares[1] = {};
    int64_t k = 0;
    for (; k + LANES <= K; k += LANES) {
        const Lanes value = load<Lanes>(x + k) - mean;
        squares[0] += value * value;
    }
    for (; k < K; k++) squares[0][0] += (x[k] - mean) * (x[k] - mean);
    const float scale = 1 / std::sqrt(add_up(squares)[0] / K + eps);
    for (k = 0; k < K; k++) y[k] = (x[k] - mean) * scale * weight[k];
    if (bias)
        for (k = 0; k < K; k++) y[k] += bias[k];
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
#pragma omp parallel num_threads(threads)
    every_dot<Floats>(
        x, weight, rows, N, K, [=](int64_t row, int64_t first, int64_t count, const float* totals) {
            std::copy(totals, totals + count, y + row * N + first);
        });
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
    static thread_local std::vector<float> all_scales;
    all_steps.resize(rows * K);
    all_scales.resize(rows);
    Bytes::Value* steps = all_steps.data();
    float* scales = all_scales.data();
    float zero = 128, whole = 0;
    if (coarse) tensor_scale(x, rows * K, whole, zero);
    const int32_t left = UNSIGNED ? int32_t(zero) : 0;
    const auto take = [=](int64_t row) {
        scales[row] = coarse ? whole : row_scale(x + row * K, K);
        round_row(x + row * K, K, scales[row], zero, steps + row * K);
    };
    if (rows == 1) take(0);
#pragma omp parallel num_threads(threads)
    {
        if (rows > 1) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; row++) take(row);
        }
        every_dot<Bytes>(
            steps, weight, rows, N, K,
            [=](int64_t row, int64_t first, int64_t count, const int32_t* totals) {
                for (int64_t n = 0; n < count; n++) {
                    const float exact = float(totals[n] - left * sums[first + n]);
                    y[row * N + first + n] = exact * scales[row] * scale[first + n];
                }
            });
    }
}

// Norms of rows x [rows, K], or of x + residual, which then goes into `total`.
void norm(
    const float* x,
    const float* residual,
    const float* weight,
    const float* bias,
    float* total,
    float* y,
    int64_t rows,
    int64_t K,
    int64_t centered,
    float eps,
    int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float* values = x + row * K;
        if (residual) {
            for (int64_t i = row * K; i < (row + 1) * K; i++) total[i] = x[i] + residual[i];
            values = total + row * K;
        }
        norm_row(values, weight, bias, y + row * K, K, centered, eps);
    }
}

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
    float scale,
    float softcap,
    int64_t threads) {
    const int64_t each = H / G, rows = each * T;
    // Every thread is to have some, though its keys are then read more often.
    const int64_t parts = std::min(
        rows, std::max((rows + TOGETHER - 1) / TOGETHER, (threads + B * G - 1) / (B * G)));
    const Attention of = {T, D, E, scale, softcap};
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
