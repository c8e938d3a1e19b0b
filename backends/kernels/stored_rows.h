// Rows of a cache as whole numbers of 4 or 8 bits, each with steps of its own (see query_rows.h).

#pragma once

#include <cstdint>

namespace graftwork {

// Turns a row by a Hadamard matrix in its usual order, made orthogonal: twice is the row itself, but
// for rounding. The width is a power of two.
void turn_by_hadamard(float* row, int64_t width);

// Bytes of a stored row.
inline int64_t stored_bytes(int64_t width, int64_t bits) { return width * bits / 8; }

// codes [stored_bytes] and steps [2]: the row's least number stands for 0, its largest for all ones.
void store_row(const float* row, int64_t width, int64_t bits, uint8_t* codes, float* steps);

// The same on steps [width] that are known, and what stands for 0 on each: others are clipped.
void store_row(
    const float* row, int64_t width, int64_t bits, const float* step, const float* least,
    uint8_t* codes);

}  // namespace graftwork
