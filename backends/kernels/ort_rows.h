// Rows of a cache as an op of ONNX Runtime.
//
//   ReadRows(cache, past, columns; chosen) -> rows
//
// cache float [B, 1, C, H], past int64 [B], columns int64 [B, S] -> rows float [B, S, H]. chosen 1: row
// past + columns of each sequence, which is graftwork.cache_read; 0: rows past to past + S - 1, for which
// no more than the size of columns counts, which is graftwork.ort_read_rows.

#pragma once

#include <cstring>

#include "ort_op.h"

namespace graftwork {

struct ReadRows {
    static constexpr const char* NAME = "ReadRows";
    static constexpr int REQUIRED = 3, INPUTS = 3, OUTPUTS = 1;
    static ort::Element input(int place) { return place == 0 ? ort::FLOAT : ort::INT64; }
    static ort::Element output(int) { return ort::FLOAT; }
    const ort::Api& api;
    bool chosen;

    ReadRows(const ort::Api& api, const ort::Info* info)
        : api(api), chosen(api.whole_number(info, "chosen") != 0) {}

    void run(ort::Context* context) const {
        const ort::Tensor cache(api, context, 0), past(api, context, 1), columns(api, context, 2);
        want(cache.sizes.size() == 4 && cache.sizes[1] == 1, "cache must be [B, 1, C, H]");
        want(columns.sizes.size() == 2, "columns must be [B, S]");
        const int64_t B = cache.sizes[0], C = cache.sizes[2], H = cache.sizes[3];
        const int64_t S = columns.sizes[1];
        want(past.is({B}), "past must be [B]");
        want(columns.is({B, S}), "columns must be [B, S]");
        const float* const from = cache.data<float>(api);
        const int64_t *const first = past.data<int64_t>(api), *const at = columns.data<int64_t>(api);
        float* to = api.data<float>(api.output(context, 0, {B, S, H}));
        for (int64_t b = 0; b < B; b++) {
            want(first[b] >= 0 && first[b] <= C, "past must be in 0..C");
            for (int64_t s = 0; s < S; s++, to += H) {
                const int64_t column = chosen ? at[b * S + s] : s;
                want(column >= -first[b] && column < C - first[b], "a row is not in the cache");
                std::memcpy(to, from + (b * C + first[b] + column) * H, size_t(H) * sizeof(float));
            }
        }
    }
};

}  // namespace graftwork
