// Products with the weights of chosen experts, see quantized.h.
//
// The rows that chose an expert are gathered and multiplied together, so that its weights are read
// once a step. A row's result has the bits that it has alone.

#include <algorithm>
#include <vector>

#include "quantized.h"
#include "tiles.h"

namespace graftwork {

namespace {

// The weights of one expert.
Table of_expert(const Table& all, int64_t expert) {
    const int64_t groups = all.K / all.group, tiles = tiles_of(all.V);
    const int64_t scales = expert * tiles * groups * OUTPUTS;
    const auto moved = [&](const void* from, bool half) -> const void* {
        if (!from) return nullptr;
        return half ? (const void*)((const uint16_t*)from + scales)
                    : (const void*)((const float*)from + scales);
    };
    Table one = all;
    one.tiles += expert * tiles * groups * blocks_of(all.group) * block_bytes(all.bits);
    one.scale = moved(all.scale, all.half_scale);
    one.offset = moved(all.offset, all.half_offset);
    return one;
}

}  // namespace

void expert_products(
    const Table& all,
    const float* bias,
    const Choices& given,
    const float* x,
    bool rounded,
    int64_t span,
    float* y,
    const Team& team) {
    const int64_t pairs = given.count * given.choices;
    if (all.V % OUTPUTS) throw std::invalid_argument("experts must have whole tiles of outputs");
    for (int64_t i = 0; i < pairs; i++) check_index(given.chosen[i], given.experts);
    std::vector<int64_t> order(pairs);
    for (int64_t i = 0; i < pairs; i++) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
        return given.chosen[a] < given.chosen[b];
    });
    std::vector<float> rows(pairs * all.K), found(pairs * all.V);
    std::vector<Job> jobs;
    for (int64_t i = 0; i < pairs; i++) {
        const int64_t row = given.each ? order[i] : order[i] / given.choices;
        std::copy(x + row * all.K, x + (row + 1) * all.K, &rows[i * all.K]);
    }
    for (int64_t first = 0, last; first < pairs; first = last) {
        const int64_t expert = given.chosen[order[first]];
        for (last = first; last < pairs && given.chosen[order[last]] == expert;) last++;
        const Table w = of_expert(all, expert);
        const float* const own = bias ? bias + expert * all.V : nullptr;
        const Weights weights = {
            w.tiles, w.scale, w.offset, nullptr, own, w.V, w.K, w.group, w.bits, w.half_scale,
            w.half_offset, w.books, span};
        jobs.push_back({weights, &rows[first * all.K], last - first, &found[first * all.V]});
        if (!rounded)
            float_products(w, own, jobs.back().x, last - first, jobs.back().y, team);
    }
    if (rounded && pairs) products(jobs.data(), int64_t(jobs.size()), team);
    for (int64_t i = 0; i < pairs; i++)
        std::copy(&found[i * all.V], &found[i * all.V] + all.V, y + order[i] * all.V);
}

}  // namespace graftwork
