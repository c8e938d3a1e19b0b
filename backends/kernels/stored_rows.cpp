#include "stored_rows.h"

#include "hadamard.h"
#include "lanes.h"

namespace {

// A row of so many vectors, which stay in registers.
template <int COUNT>
void turn_row(float* row, float norm) {
    Lanes all[COUNT];
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; i++) all[i] = load<Lanes>(row + i * LANES);
    turn(all);
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; i++) store(row + i * LANES, all[i] * norm);
}

// A number in 0..most for each lane, the nearest to x.
Lanes clipped(Lanes x, float most) {
    const Lanes whole = rounded(x);
    return whole < 0.0f ? Lanes{} : whole > most ? splat(most) : whole;
}

// Codes of a row, of what `steps` says of so many channels from one on.
template <class Steps>
void put_codes(int64_t width, int64_t bits, uint8_t* codes, const Steps& steps) {
    const float most = float((1 << bits) - 1);
    const auto coded = [&](int64_t i, int64_t count) {
        const Lanes found = clipped(steps(i, count), most);
        return __builtin_convertvector(__builtin_convertvector(found, Whole), Marks);
    };
    const int64_t half = width / 2, bytes = bits == 8 ? width : half;
    for (int64_t i = 0; i < bytes; i += LANES) {
        const int64_t count = std::min<int64_t>(LANES, bytes - i);
        Marks found = coded(i, count);
        if (bits == 4) found |= coded(half + i, count) << 4;
        store(codes + i, found, count);
    }
}

}  // namespace

void graftwork::turn_by_hadamard(float* row, int64_t width) {
    if (width == 64) return turn_row<64 / LANES>(row, 0.125f);
    if (width == 128) return turn_row<128 / LANES>(row, 0.0883883476f);
    int64_t apart = 1;
    if (width % LANES == 0) {
        for (int64_t i = 0; i < width; i += LANES) store(row + i, butterflies(load<Lanes>(row + i)));
        apart = LANES;
    }
    for (; apart < width; apart *= 2)
        for (int64_t begin = 0; begin < width; begin += 2 * apart)
            for (int64_t i = begin; i < begin + apart; i++) {
                const float a = row[i], b = row[i + apart];
                row[i] = a + b;
                row[i + apart] = a - b;
            }
    const float norm = float(1 / std::sqrt(double(width)));
    for (int64_t i = 0; i < width; i++) row[i] *= norm;
}

void graftwork::store_row(
    const float* row, int64_t width, int64_t bits, uint8_t* codes, float* steps) {
    Lanes low = splat(row[0]), high = low;
    for (int64_t i = 0; i < width; i += LANES) {
        const int64_t at = std::max<int64_t>(0, std::min(i, width - LANES));  // the last ones twice
        Lanes part = low;
        const Lanes read = load<Lanes>(row + at, width - at);
        for (int lane = 0; width < LANES && lane < width; lane++) part[lane] = read[lane];
        if (width >= LANES) part = read;
        low = part < low ? part : low;
        high = part > high ? part : high;
    }
    float least = low[0], largest = high[0];
    for (int lane = 1; lane < LANES; lane++) {
        least = std::min(least, low[lane]);
        largest = std::max(largest, high[lane]);
    }
    const float step = (largest - least) / float((1 << bits) - 1);
    put_codes(width, bits, codes, [&](int64_t i, int64_t count) {
        return (load<Lanes>(row + i, count) - least) / splat(step > 0 ? step : 1.0f);
    });
    steps[0] = step;
    steps[1] = least;
}

void graftwork::store_row(
    const float* row, int64_t width, int64_t bits, const float* step, const float* least,
    uint8_t* codes) {
    put_codes(width, bits, codes, [&](int64_t i, int64_t count) {
        const Lanes up = load<Lanes>(row + i, count) - load<Lanes>(least + i, count);
        return up / load<Lanes>(step + i, count);
    });
}
