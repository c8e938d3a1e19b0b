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
constexpr int TOGETHER = 8;  // rows that share one reading of weights, or of keys and values

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

// Halves are rounded to even, as long as |x| < 2^22.
template <class V>
V rounded(V x) {
    constexpr float magic = 12582912.0f;
    return (x + magic) - magic;
}

}  // namespace
