// Which rows of a cache a token reads, and attention over them (ir/ops/sparse.py).

#include <cmath>
#include <vector>

#include "door.h"
#include "gangs.h"
#include "lanes.h"
#include "query_rows.h"
#include "stored_rows.h"

using namespace graftwork;

namespace {

// `graftwork.take_channels`: x [B,H,T,D], channels [G,R]; taken [B,H,T,R].
struct Channels {
    const float* x;
    const int64_t* channels;
    float* taken;
    int64_t B, H, G, T, D, R;
};

// `graftwork.top_rows`: q [B,H,T,D], k [B,G,C,D], mask [B,1,T,C]; picked [B,R,T,N].
struct Top {
    const float *q, *k;
    const uint8_t* mask;
    int64_t* picked;
    int64_t B, H, G, R, T, C, D, N, rows, picks;
    Number scale, softcap;
};

// `graftwork.top_stored_rows`: codes [B,G,C,K] and steps [B,G,C,2] in place of k.
struct TopStored {
    const float* q;
    const uint8_t* codes;
    const float* steps;
    const uint8_t* mask;
    int64_t* picked;
    int64_t B, H, G, R, T, C, D, K, N, bits, rows, picks;
    Number scale, softcap;
};

// `graftwork.chunk_rows`: q [B,H,T,D], marks [B,G,S,D], mask [B,1,T,C], past [B]; picked [B,G,T,W].
struct Chunks {
    const float *q, *marks;
    const uint8_t* mask;
    const int64_t* past;
    int64_t* picked;
    int64_t B, H, G, T, C, S, D, W, chunks, chunk, block, latest;
    Number scale, softcap;
};

// `graftwork.attend_rows`: q [B,H,T,D], k [B,G,C,D], v [B,G,C,E], rows [B,R,T,K] and, unless it is
// null, sinks [H]; out [B,H,T,E]. A softcap of 0 is none.
struct Picked {
    const float *q, *k, *v;
    const int64_t* rows;
    const float* sinks;
    float* out;
    int64_t B, H, G, R, T, C, D, E, K;
    Number scale, softcap;
};

constexpr float MOST = 4095, STEPS = 1024;
constexpr int32_t HIDDEN = INT32_MIN;

// Scores as whole numbers of steps: a hidden row's is HIDDEN.
void rank(const float* scores, int64_t count, int32_t* ranks) {
    for (int64_t c = 0; c < count; c += LANES) {
        const Lanes score = load<Lanes>(scores + c);
        const Lanes most = score < MOST ? score : splat(MOST);  // what is no number counts as most
        const Lanes bounded = most > -MOST ? most : splat(-MOST);
        const Whole ranked = __builtin_convertvector(rounded(bounded * STEPS), Whole);
        store(ranks + c, score == -INFINITY ? HIDDEN - Whole{} : ranked);
    }
}

// How many ranks, of every `apart`-th vector, are as high.
int64_t at_least(const int32_t* ranks, int64_t count, int32_t rank, int64_t apart) {
    Whole found = {};
    for (int64_t c = 0; c < count; c += apart * LANES) found -= load<Whole>(ranks + c) >= rank;
    int64_t total = 0;
    for (int lane = 0; lane < LANES; lane++) total += found[lane];
    return total;
}

// A rank that about as many rows reach as are wanted, and probably not fewer, by a sample of them.
int32_t low_rank(const int32_t* ranks, int64_t count, int64_t wanted) {
    constexpr int64_t APART = 8;
    const int64_t some = wanted / APART * 5 / 4 + 2 * LANES;
    int32_t low = HIDDEN + 1, high = int32_t(MOST * STEPS);
    if (at_least(ranks, count, -high, APART) < some) return low;
    for (low = -high; low < high;) {
        const int32_t middle = low + (high - low + 1) / 2;
        if (at_least(ranks, count, middle, APART) >= some)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

// Rows of a certain rank at least, ascending, as numbers whose order is that of their ranks, and of
// equal ones that of their places.
void find(const int32_t* ranks, int64_t count, int32_t least, std::vector<int64_t>& found) {
    found.clear();
    for (int64_t c = 0; c < count; c += LANES) {
        uint64_t high = bits_of(load<Whole>(ranks + c) >= least);
        for (; high; high &= high - 1) {
            const int64_t row = c + __builtin_ctzll(high);
            found.push_back(int64_t(ranks[row]) * (int64_t(1) << 32) + row);
        }
    }
}

// The rows [wanted] of a span whose scores are the highest, of equal ones the later, ascending, and -1
// for those that there are not. Scores are filled up to whole vectors by hidden rows.
void choose(const float* scores, const Span& span, int64_t wanted, int64_t* picked) {
    static thread_local std::vector<int32_t> ranks;
    static thread_local std::vector<int64_t> found, ordered;
    const int64_t count = (span.rows() + LANES - 1) / LANES * LANES;
    ranks.resize(count);
    rank(scores, count, ranks.data());
    find(ranks.data(), count, low_rank(ranks.data(), count, wanted), found);
    if (int64_t(found.size()) < wanted) find(ranks.data(), count, HIDDEN + 1, found);
    int64_t least = INT64_MIN;
    if (int64_t(found.size()) > wanted) {
        ordered = found;
        const auto last = ordered.end() - wanted;
        std::nth_element(ordered.begin(), last, ordered.end());
        least = *last;
    }
    int64_t* to = picked;
    for (int64_t row : found)
        if (row >= least) *to++ = span.begin + int64_t(uint32_t(row));
    std::fill(to, picked + wanted, -1);
}

// The largest share of attention that one of `heads` queries, which see the same, gives a row, as its
// logarithm: `best`, over the rows of a span; it is filled up to whole vectors.
template <class Make>
Span share(
    const Rows& keys, int64_t rows, float scale, float softcap, int64_t heads, const Make& make,
    std::vector<float>& best) {
    Span all = {};
    score(keys, rows, scale, softcap, 0, heads, make,
          [&](int64_t head, const float* scores, const Span& span) {
              const int64_t count = (span.rows() + LANES - 1) / LANES * LANES;
              if (head == 0) best.assign(count, -INFINITY);
              const float total = log_sum(scores, count);
              for (int64_t c = 0; c < count; c++) best[c] = std::max(best[c], scores[c] - total);
              all = span;
          });
    return all;
}

// As `pick`, of heads that pick together.
template <class Given, class Keys>
void pick_together(const Given& of, const Team& team, int64_t bytes, const Keys& keys_of) {
    const int64_t heads = of.H / of.R;
    const int64_t work = of.C * heads * (bytes + 4 * int64_t(sizeof(Lanes)));
    team.each(of.B * of.R * of.T, work, [&](int64_t place) {
        static thread_local std::vector<float> best;
        const int64_t pick = place / of.T, t = place % of.T;
        const uint8_t* const mask = of.mask + (pick / of.R * of.T + t) * of.C;
        const auto make = [&](int64_t head, int64_t) {
            return marked(of.q + ((pick * heads + head) * of.T + t) * of.D, mask, of.C);
        };
        const Rows keys = keys_of(pick / (of.R / of.G));
        const Span span = share(keys, of.C, of.scale, of.softcap, heads, make, best);
        choose(best.data(), span, of.N, of.picked + place * of.N);
    });
}

// keys_of: the keys of a group. bytes: of one.
template <class Given, class Keys>
void pick(const Given& of, const Team& team, int64_t bytes, const Keys& keys_of) {
    want(of.rows >= 1, "rows must be at least 1");
    if (of.R != of.H) return pick_together(of, team, bytes, keys_of);
    const int64_t rows = of.H / of.G * of.T;
    // To choose takes as long as to read some vectors of scores.
    const int64_t work = of.C * (bytes + 4 * int64_t(sizeof(Lanes)));
    const auto part = [&](int64_t group, int64_t first, int64_t last) {
        const auto make = [&](int64_t row, int64_t) {
            const uint8_t* const mask = of.mask + (group / of.G * of.T + row % of.T) * of.C;
            return marked(of.q + (group * rows + row) * of.D, mask, of.C);
        };
        score(keys_of(group), of.C, of.scale, of.softcap, first, last, make,
              [&](int64_t row, const float* scores, const Span& span) {
                  choose(scores, span, of.N, of.picked + (group * rows + row) * of.N);
              });
    };
    in_parts(team, of.B * of.G, rows, work, part, 4);
}

}  // namespace

KERNEL(take_channels, Channels) {
    const Channels& of = given;
    for (int64_t i = 0; i < of.G * of.R; i++) check_index(of.channels[i], of.D);
    for (int64_t row = 0; row < of.B * of.H * of.T; row++) {
        const int64_t* const own = of.channels + row / of.T % of.H / (of.H / of.G) * of.R;
        for (int64_t i = 0; i < of.R; i++) of.taken[row * of.R + i] = of.x[row * of.D + own[i]];
    }
}

KERNEL(top_rows, Top) {
    const Top& of = given;
    pick(of, team, of.D * int64_t(sizeof(float)), [&](int64_t group) {
        return Rows{of.k + group * of.C * of.D, nullptr, of.D, 32};
    });
}

KERNEL(top_stored_rows, TopStored) {
    const TopStored& of = given;
    want(of.bits == 4 || of.bits == 8, "bits must be 4 or 8");
    want(of.D % 2 == 0 && of.K == stored_bytes(of.D, of.bits), "codes must be as wide as q");
    pick(of, team, of.K + 2 * int64_t(sizeof(float)), [&](int64_t group) {
        return Rows{of.codes + group * of.C * of.K, of.steps + group * of.C * 2, of.D, of.bits};
    });
}

KERNEL(chunk_rows, Chunks) {
    const Chunks& of = given;
    want(of.chunks >= 1 && of.chunk >= 1 && of.block >= of.chunk && of.block % of.chunk == 0 &&
             of.latest >= of.block,
         "expected chunks >= 1, block a multiple of chunk and latest >= block");
    for (int64_t b = 0; b < of.B; b++) check_index(of.past[b], of.C + 1);
    const int64_t each = of.H / of.G, bytes = of.S * of.D * int64_t(sizeof(float));
    team.each(of.B * of.G * of.T, bytes, [&](int64_t place) {
        static thread_local std::vector<float> best;
        static thread_local std::vector<int64_t> chosen;
        const int64_t group = place / of.T, t = place % of.T, b = group / of.G;
        const int64_t begin = of.past[b] - of.past[b] % of.block;
        const int64_t known = std::min(of.S, begin / of.chunk);
        const auto make = [&](int64_t head, int64_t) {
            Query query = {};
            query.values = of.q + ((group * each + head) * of.T + t) * of.D;
            query.open = query.end = known;
            return query;
        };
        const Rows marks = {of.marks + group * of.S * of.D, nullptr, of.D, 32};
        const Span span = share(marks, of.S, of.scale, of.softcap, each, make, best);
        chosen.resize(of.chunks);
        choose(best.data(), span, of.chunks, chosen.data());
        int64_t* to = of.picked + place * of.W;
        for (int64_t chunk : chosen)
            for (int64_t i = 0; i < of.chunk; i++) *to++ = chunk < 0 ? -1 : chunk * of.chunk + i;
        const uint8_t* const mask = of.mask + (b * of.T + t) * of.C;
        for (int64_t row = begin; row < begin + of.latest; row++)
            *to++ = row < of.C && mask[row] ? row : -1;
    });
}

KERNEL(attend_rows, Picked) {
    const Picked& of = given;
    const int64_t each = of.H / of.R, bytes = of.K * (of.D + of.E) * int64_t(sizeof(float));
    for (int64_t i = 0; i < of.B * of.R * of.T * of.K; i++)
        if (of.rows[i] != -1) check_index(of.rows[i], of.C);
    team.each(of.B * of.R * of.T, bytes, [&](int64_t place) {
        static thread_local std::vector<int64_t> seen;
        seen.clear();
        const int64_t picks = place / of.T, group = picks / (of.R / of.G), t = place % of.T;
        for (int64_t i = 0; i < of.K; i++)
            if (of.rows[place * of.K + i] != -1) seen.push_back(of.rows[place * of.K + i]);
        const int64_t count = seen.size();
        const auto rows = [&](const float* cache, int64_t width) {
            return Rows{cache + group * of.C * width, nullptr, width, 32, nullptr, seen.data()};
        };
        const Attention own = {rows(of.k, of.D), rows(of.v, of.E), count, of.scale, of.softcap};
        const auto make = [&](int64_t head, int64_t) {
            const int64_t at = (picks * each + head) * of.T + t;
            Query query = {};
            query.values = of.q + at * of.D;
            query.open = query.end = count;
            query.sink = of.sinks ? of.sinks + picks % of.R * each + head : nullptr;
            query.out = of.out + at * of.E;
            return query;
        };
        in_gangs(0, each, make, [&](int64_t, const Query* queries, int64_t gang) {
            attend_rows(own, queries, gang);
        });
    });
}
