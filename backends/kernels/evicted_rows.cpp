// How much attention the rows of a cache get, and which a full cache keeps (ir/ops/eviction.py).

#include <algorithm>
#include <numeric>
#include <vector>

#include "door.h"
#include "gangs.h"
#include "lanes.h"
#include "query_rows.h"

using namespace graftwork;

namespace {

// `graftwork.row_attention`: queries [B,H,W,D], keys [B,G,C,D], past [B]; attention [B,G,C].
struct Asked {
    const float *queries, *keys;
    const int64_t* past;
    float* attention;
    int64_t B, H, W, D, G, C, block, last;
    Number scale, softcap;
};

// `graftwork.keep_top`: scores [B,G,C], past [B]; kept [B,G,K].
struct Kept {
    const float* scores;
    const int64_t* past;
    int64_t* kept;
    int64_t B, G, C, K, rows, full, sinks, recent;
};

constexpr float MOST = 1 << 23;

}  // namespace

KERNEL(row_attention, Asked) {
    const Asked& of = given;
    want(of.last >= 1 && of.last <= of.block && of.block <= of.W, "expected 1 <= last <= block <= W");
    for (int64_t b = 0; b < of.B; b++) check_index(of.past[b], of.C + 1);
    // Each head's own: threads share heads, whose sums are the same for any number of threads.
    std::vector<float> sums(of.B * of.H * of.C);
    const int64_t each = of.G ? of.H / of.G : 0;
    team.each(of.B * of.H, of.last * of.C * of.D, [&](int64_t place) {
        const int64_t b = place / of.H, group = b * of.G + place % of.H / each;
        float* const sum = sums.data() + place * of.C;
        const auto make = [&](int64_t row, int64_t) {
            Query query = {};
            query.values = of.queries + (place * of.W + of.block - of.last + row) * of.D;
            query.open = query.end = std::max<int64_t>(0, of.past[b] - of.last + row + 1);
            return query;
        };
        const Rows keys = {of.keys + group * of.C * of.D, nullptr, of.D, 32};
        score(keys, of.C, of.scale, of.softcap, 0, of.last, make,
              [&](int64_t, float* scores, const Span& span) {
                  const int64_t whole = (span.rows() + LANES - 1) / LANES * LANES;
                  share_attention(scores, whole);
                  for (int64_t c = 0; c < span.rows(); c++) sum[span.begin + c] += scores[c];
              });
    });
    for (int64_t group = 0; group < of.B * of.G; group++)
        for (int64_t c = 0; c < of.C; c++) {
            float total = 0;
            for (int64_t i = 0; i < each; i++) total += sums[(group * each + i) * of.C + c];
            of.attention[group * of.C + c] = total / float(each * of.last);
        }
}

KERNEL(keep_top, Kept) {
    const Kept& of = given;
    want(of.K == of.rows && of.rows <= of.C, "there must be so many rows");
    team.each(of.B * of.G, of.C * 8 * int64_t(sizeof(int64_t)), [&](int64_t group) {
        static thread_local std::vector<int64_t> order, sorted;
        const int64_t past = of.past[group / of.G];
        int64_t* to = of.kept + group * of.rows;
        if (past < of.full) return std::iota(to, to + of.rows, 0);
        order.resize(of.C);
        for (int64_t c = 0; c < of.C; c++) {
            // In this order what is no number counts as least.
            const float score = std::min(MOST, std::max(-MOST, of.scores[group * of.C + c]));
            const bool stays = c < of.sinks || c >= past - of.recent;
            const int64_t rank = int64_t(score) + (int64_t(1) << 24) + (int64_t(stays) << 26);
            order[c] = c < past ? rank * of.C + c : c - of.C;
        }
        sorted = order;
        const auto least = sorted.end() - of.rows;
        std::nth_element(sorted.begin(), least, sorted.end());
        for (int64_t c = 0; c < of.C; c++)
            if (order[c] >= *least) *to++ = c;
    });
}
