// Products with a Hadamard matrix in its usual order, of rows in registers.

#pragma once

#include <utility>

#include "lanes.h"

namespace {

// Lanes a and b that are `apart` become a + b and a - b.
template <int apart, int... lane>
Lanes butterflies(Lanes x, std::integer_sequence<int, lane...>) {
    const Lanes signs = {(lane & apart ? -1.0f : 1.0f)...};
    return fused(x, signs, __builtin_shufflevector(x, x, (lane ^ apart)...));
}

template <int apart = 1>
Lanes butterflies(Lanes x) {
    if constexpr (apart < LANES)
        return butterflies<2 * apart>(
            butterflies<apart>(x, std::make_integer_sequence<int, LANES>()));
    return x;
}

// A row of so many vectors, times the square root of its width.
template <int COUNT>
void turn(Lanes (&all)[COUNT]) {
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; i++) all[i] = butterflies(all[i]);
#pragma GCC unroll 16
    for (int apart = 1; apart < COUNT; apart *= 2)
#pragma GCC unroll 16
        for (int i = 0; i < COUNT; i++)
            if (!(i & apart)) {
                const Lanes a = all[i], b = all[i + apart];
                all[i] = a + b;
                all[i + apart] = a - b;
            }
}

}  // namespace
