// Rows of a cache whose older ones are codes in groups (`graftwork.quantize_groups`), and whose latest
// ones are floats.

#pragma once

#include <algorithm>
#include <cstdint>

#include "query_rows.h"

namespace graftwork {

// Rows of codes in a part, and what the last one's are a multiple of: vectors end there.
constexpr int64_t PART_ROWS = 256, PARTS_OF = 16;

// codes [C, width * bits / 8]; steps [S, numbers()], in half precision as all that is stored beside
// codes; latest [L, width]: those from row `stored` on. Unless they are null: left [C, rank] and right
// [.., rank * width], which are added; cos and sin [C, angles], by which stored rows are rotated.
// group: rows (by_channel) or channels that share a step. turned: stored rows are those that a Hadamard
// matrix has turned.
struct GroupedRows final : Source {
    const uint8_t* codes;
    const uint16_t* steps;
    const float* latest;
    const uint16_t *left, *right;
    const float *cos, *sin;
    int64_t width, stored, L, bits, group, outliers, rank, angles;
    bool by_channel, turned, interleaved;

    // Numbers that channels share.
    int64_t shared() const { return by_channel ? width : width / std::min(group, width); }
    int64_t numbers() const { return (2 + 2 * outliers) * shared(); }
    // Whether `read` gives all rows turned: those that are rotated, too, are turned back before.
    bool gives_turned() const { return turned && !cos; }
    // So many rows of codes, and all that are floats: wherever these lie in a tree, sums of them begin
    // with the same one.
    int64_t part_end(int64_t row) const override {
        const int64_t codes = stored / PARTS_OF * PARTS_OF;
        if (row >= codes) return INT64_MAX;
        return std::min(codes, row / PART_ROWS * PART_ROWS + PART_ROWS);
    }
    void read(int64_t first, int64_t count, float* to) const override;
    // Where channels share steps from row to row and nothing rotates them, steps go into the queries:
    // codes are read as they are.
    bool multiply(
        const Query* queries, int64_t count, int64_t first, int64_t rows, float* scores,
        int64_t stride) const override;
    // Where rows have steps, these go into the weights.
    bool weigh(
        const float* weights, int64_t stride, int64_t first, int64_t rows, const Query* queries,
        int64_t count) const override;

private:
    // Rows of one group.
    void decode_group(int64_t first, int64_t count, float* to) const;
};

}  // namespace graftwork
