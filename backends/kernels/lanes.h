// Vectors of the processor's width, and what kernels do with them.

#pragma once

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
#else
constexpr int LANES = 8;
#endif

typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t Whole __attribute__((vector_size(4 * LANES)));
typedef uint8_t Marks __attribute__((vector_size(LANES)));
typedef uint8_t Half __attribute__((vector_size(LANES / 2)));

// Memory for so many numbers, of any value, where vectors lie in lines of the processor's cache: stores
// across two take twice the time.
template <class T>
class Space {
    std::vector<T> all;

public:
    T* of(int64_t count) {
        constexpr size_t line = 64, more = line / sizeof(T);
        if (all.size() < size_t(count) + more) all.resize(count + more);
        return all.data() + (-(uintptr_t)all.data() % line) / sizeof(T);
    }
};

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

// Sums of lanes that are `apart` from each other, those of a before those of b: of neighbours in each
// block of four, first 1 apart and then 2, or of blocks.
template <int apart, class V, int... lane>
V add_lanes(V a, V b, std::integer_sequence<int, lane...>) {
    constexpr int count = sizeof...(lane), size = apart < 4 ? 4 : count, unit = apart < 4 ? 1 : 4;
    constexpr auto first = [](int at) {  // of the two lanes whose sum becomes this one
        const int place = at % size / unit, half = size / unit / 2;
        const int from = at / size * size + place % half * 2 * unit + at % unit;
        return place < half ? from : count + from;
    };
    return __builtin_shufflevector(a, b, first(lane)...) +
           __builtin_shufflevector(a, b, first(lane) + unit...);
}

// Lanes of a and b change places: those of a whose number has `apart` in it, with those of b that
// are `apart` before them.
template <int apart, class V, int... lane>
void swap_lanes(V& a, V& b, std::integer_sequence<int, lane...>) {
    constexpr int count = sizeof...(lane);
    const V low = __builtin_shufflevector(a, b, (lane & apart ? count + lane - apart : lane)...);
    b = __builtin_shufflevector(a, b, (lane & apart ? count + lane : lane + apart)...);
    a = low;
}

// The sum of each vector's lanes, in that lane of the result that has the vector's number. The order
// of additions is the same for each, and for any number of vectors. It may be done in two parts:
// `until` four lanes are added up, of four vectors, and from there on (`apart`) what that gave.
template <int apart = 1, int until = 0, class V, int COUNT>
V add_up(const V (&vectors)[COUNT]) {
    constexpr int lanes = sizeof(V) / sizeof(vectors[0][0]), end = until ? until : lanes;
    static_assert(COUNT * apart <= end);
    if constexpr (apart == end) {
        return vectors[0];
    } else {
        V fewer[(COUNT + 1) / 2];
#pragma GCC unroll 16
        for (int i = 0; i < COUNT; i += 2)
            fewer[i / 2] = add_lanes<apart>(
                vectors[i], vectors[i + 1 < COUNT ? i + 1 : i], std::make_integer_sequence<int, lanes>());
        return add_up<2 * apart, until>(fewer);
    }
}

// A number in all lanes. (Adding it to zeros would make of -0 another one.)
inline Lanes splat(float x) { return x - Lanes{}; }

// A vector that compilers hold in a register: they would read it again wherever it is a factor.
inline Lanes held(Lanes x) {
#if defined(__AVX512F__)
    asm("" : "+v"(x));
#elif defined(__AVX2__)
    asm("" : "+x"(x));
#endif
    return x;
}

// a b + c, rounded once.
inline Lanes fused(Lanes a, Lanes b, Lanes c) {
#if defined(WIDE_DOT_PRODUCTS)
    return (Lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    for (int lane = 0; lane < LANES; lane++) c[lane] = std::fma(a[lane], b[lane], c[lane]);
    return c;
#endif
}

// a b + c, rounded once where the processor does that as fast. Compilers that choose by themselves
// choose another way for other numbers of rows, and give a row other bits in other company.
inline Lanes add_product(Lanes a, Lanes b, Lanes c) {
#ifdef __FP_FAST_FMAF
    return fused(a, b, c);
#else
    return a * b + c;
#endif
}

// A bit for each lane that is not zero.
inline uint64_t bits_of(Whole lanes) {
#if defined(WIDE_DOT_PRODUCTS)
    return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes);
#elif defined(__AVX2__)
    return _mm256_movemask_ps((__m256)(lanes != 0));
#else
    uint64_t bits = 0;
    for (int lane = 0; lane < LANES; lane++) bits |= uint64_t(lanes[lane] != 0) << lane;
    return bits;
#endif
}

// Halves are rounded to even, as long as |x| < 2^22.
template <class V>
V rounded(V x) {
    constexpr float magic = 12582912.0f;
    return (x + magic) - magic;
}

}  // namespace
