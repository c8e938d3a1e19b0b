// Linear attention, token by token. Columns of a state do not depend on each other, so a few of them
// pass through all tokens of a step while they stay in the processor's first cache. A token's result
// has the same bits alone and among others, and so has the state, whether a token was folded in its
// own step or out of the log.

#include <algorithm>
#include <cmath>
#include <vector>

#include "door.h"

using graftwork::Team;

namespace {

// `graftwork.linear_attention_step`: state [B,H,K,V]; log keys [B,G,W,K], values [B,H,W,V], decays
// [B,H,W,D]; folded, past, certain [B]; ancestors [B,T,T], or null for a chain; q, k [B,G,T,K];
// v [B,H,T,V]; g [B,H,T,D], D = 1 or K; beta [B,H,T] or null; y [B,H,T,V]. What is new may lie where
// the old is.
struct Before {
    const float *keys, *values, *decays;
    const int64_t *folded, *past, *certain;
    const uint8_t* ancestors;
    const float *q, *k, *v, *g, *beta;
    float* y;
};
struct After {
    float *new_keys, *new_values, *new_decays;
    int64_t B, H, G, T, K, V, D, W;
};
struct Floats {
    const float* state;
    Before before;
    float* new_state;
    After after;
};

// `graftwork.linear_attention_step_int8`: codes [B,H,K,V] and scales [B,H,V] in the place of states.
struct Codes {
    const int8_t* codes;
    const float* scale;
    Before before;
    int8_t* new_codes;
    float* new_scale;
    After after;
};

struct Recurrence : Before, After {
    const float* state = nullptr;
    float* new_state = nullptr;
    const int8_t* codes = nullptr;
    const float* scale = nullptr;
    int8_t* new_codes = nullptr;
    float* new_scale = nullptr;
    Recurrence(const Before& before, const After& after) : Before(before), After(after) {}
};

constexpr float LEAST = -200.0f;  // the logarithm of a decay is at least this

inline float decay_of(float g) { return std::exp(std::max(g, LEAST)); }

constexpr float LARGEST = 127.0f;     // the largest code of a state in 8 bits
constexpr float SMALLEST = 1e-30f;    // a column of smaller numbers is held as zeros
constexpr float WHOLE = 12582912.0f;  // 1.5 * 2^23: added to a number, it leaves no fraction

inline float whole(float x) { return (x + WHOLE) - WHOLE; }
inline float scale_of(float most) { return most < SMALLEST ? 0.0f : most / LARGEST; }
inline float inverse_of(float scale) { return scale > 0.0f ? 1.0f / scale : 0.0f; }

// What is no number is one, too.
inline float clip(float x) { return std::max(-LARGEST, std::min(LARGEST, x)); }

// What a token brings: its key [K], what the state decays by, for each key or (`each` = 0) for all,
// and what is added under the key, [columns].
struct Row {
    const float* k;
    const float* by;
    int64_t each;
};

// to = the decayed `from`, both [K,N], and known += k to where the delta rule asks for that. What is
// `rounded` is decayed as its codes stand for it, with the scale of each column.
template <int64_t N, bool asked, bool rounded>
void decay(
    const float* from, const float* scale, float* to, const Row& row, float* known, int64_t K) {
    float sums[N] = {}, steps[N], inverse[N];
    for (int64_t e = 0; rounded && e < N; e++)
        steps[e] = scale[e], inverse[e] = inverse_of(scale[e]);
    for (int64_t c = 0; c < K; c++) {
        const float by = row.by[c * row.each], key = row.k[c];
        for (int64_t e = 0; e < N; e++)
            to[e] = by * (rounded ? steps[e] * whole(from[e] * inverse[e]) : from[e]);
        if (asked)
            for (int64_t e = 0; e < N; e++) sums[e] = __builtin_fmaf(key, to[e], sums[e]);
        from += N, to += N;
    }
    if (asked) std::copy(sums, sums + N, known);
}

// to += k u^T, y = q to where a query is given, and the scales that it is `rounded` with.
template <int64_t N, bool asked, bool rounded>
void add(
    float* to, const float* q, const float* k, const float* u, float* y, float* scale, int64_t K) {
    float sums[N] = {}, most[N] = {}, mine[N];
    std::copy(u, u + N, mine);
    for (int64_t c = 0; c < K; c++) {
        const float key = k[c], query = asked ? q[c] : 0.0f;
        for (int64_t e = 0; e < N; e++) to[e] = __builtin_fmaf(key, mine[e], to[e]);
        if (asked)
            for (int64_t e = 0; e < N; e++) sums[e] = __builtin_fmaf(query, to[e], sums[e]);
        for (int64_t e = 0; rounded && e < N; e++) most[e] = std::max(most[e], std::fabs(to[e]));
        to += N;
    }
    if (asked) std::copy(sums, sums + N, y);
    for (int64_t e = 0; rounded && e < N; e++) scale[e] = scale_of(most[e]);
}

// The step of one head of one sequence. ROUNDED: its state is held in 8 bits. It is worked out in
// float, [K,N] at a time, and a scale for each of the N columns says how it is to be rounded before
// the next token, so that this takes no pass of its own.
template <bool ROUNDED>
struct Head {
    const Recurrence& given;
    int64_t K, V, D, b, h, group, certain, pending;
    float* u;                                 // [T,V]
    std::vector<float> logged, now;           // factors [pending,D], [T,D]
    std::vector<int64_t> parent;              // the token that each continues, -1 for none
    bool chain;                               // whether that is always the one before it

    Head(const Recurrence& given, int64_t index, float* u)
        : given(given),
          K(given.K),
          V(given.V),
          D(given.D),
          b(index / given.H),
          h(index % given.H),
          group(h / (given.H / given.G)),
          certain(std::min(std::max<int64_t>(given.certain[b], 0), given.T)),
          pending(given.past[b] <= 0 ? 0 : std::min(given.past[b] - given.folded[b], given.W)),
          u(u) {}

    int64_t of_head(int64_t rows) const { return (b * given.H + h) * rows; }
    int64_t of_group(int64_t rows) const { return (b * given.G + group) * rows; }

    static void factors(const float* g, int64_t count, std::vector<float>& to) {
        to.resize(std::max<int64_t>(count, 0));
        for (int64_t i = 0; i < count; i++) to[i] = decay_of(g[i]);
    }

    Row logged_row(int64_t row) const {
        return {given.keys + of_group(given.W * K) + row * K, &logged[row * D], D > 1};
    }
    Row token_row(int64_t t) const {
        return {given.k + (of_group(given.T) + t) * K, &now[t * D], D > 1};
    }

    void find_parents() {
        chain = true;
        parent.resize(given.T);
        for (int64_t t = 0; t < given.T; t++) {
            parent[t] = t - 1;
            if (!given.ancestors) continue;
            const uint8_t* const seen = given.ancestors + (b * given.T + t) * given.T;
            while (parent[t] >= 0 && !seen[parent[t]]) parent[t]--;
            chain = chain && parent[t] == t - 1;
        }
    }

    // `count` columns of what is held [K,V], from `first`, as [K,N] with zeros after them.
    template <int64_t N, typename Held>
    void take(const Held* held, int64_t first, int64_t count, float* to) const {
        for (int64_t c = 0; c < K; c++) {
            const Held* const row = held + c * V + first;
            if (count == N)
                std::copy(row, row + N, to + c * N);
            else
                std::fill(std::copy(row, row + count, to + c * N), to + (c + 1) * N, 0.0f);
        }
    }

    // The state before the step, and its scales if it has some.
    template <int64_t N>
    void begin(int64_t first, int64_t count, float* state, float* scale) const {
        std::fill(scale, scale + N, 0.0f);
        if (given.past[b] <= 0) return std::fill(state, state + K * N, 0.0f);
        if (!ROUNDED) return take<N>(given.state + of_head(K * V), first, count, state);
        const float* const scales = given.scale + of_head(V) + first;
        std::copy(scales, scales + count, scale);
        take<N>(given.codes + of_head(K * V), first, count, state);
        for (int64_t i = 0; i < K * N; i += N)
            for (int64_t e = 0; e < N; e++) state[i + e] *= scale[e];
    }

    // The state after the step.
    template <int64_t N>
    void give(const float* from, const float* scale, int64_t first, int64_t count) const {
        if (!ROUNDED) {
            float* const state = given.new_state + of_head(K * V) + first;
            for (int64_t c = 0; c < K; c++)
                std::copy(from + c * N, from + c * N + count, state + c * V);
            return;
        }
        std::copy(scale, scale + count, given.new_scale + of_head(V) + first);
        int8_t* const codes = given.new_codes + of_head(K * V) + first;
        float inverse[N];
        for (int64_t e = 0; e < N; e++) inverse[e] = inverse_of(scale[e]);
        for (int64_t c = 0; c < K; c++)
            for (int64_t e = 0; e < count; e++)
                codes[c * V + e] = int8_t(int32_t(whole(clip(from[c * N + e] * inverse[e]))));
    }

    template <int64_t N>
    void token(
        int64_t t, int64_t first, int64_t count, const float* from, const float* scale, float* to,
        float* new_scale) {
        const float* const q = given.q + (of_group(given.T) + t) * K;
        const float* const v = given.v + (of_head(given.T) + t) * V + first;
        const Row row = token_row(t);
        float known[N], mine[N] = {}, read[N];
        if (given.beta) {
            const float rate = given.beta[of_head(given.T) + t];
            decay<N, true, ROUNDED>(from, scale, to, row, known, K);
            for (int64_t e = 0; e < count; e++) mine[e] = rate * (v[e] - known[e]);
        } else {
            decay<N, false, ROUNDED>(from, scale, to, row, nullptr, K);
            std::copy(v, v + count, mine);
        }
        add<N, true, ROUNDED>(to, q, row.k, mine, read, new_scale, K);
        std::copy(mine, mine + count, u + t * V + first);
        std::copy(read, read + count, given.y + (of_head(given.T) + t) * V + first);
    }

    // The tokens before `first`, whose states are not kept, out of what they added.
    template <int64_t N>
    void fold(
        float* state, float* scale, const Row& row, const float* added, int64_t count) const {
        float mine[N] = {};
        std::copy(added, added + count, mine);
        decay<N, false, ROUNDED>(state, scale, state, row, nullptr, K);
        add<N, false, ROUNDED>(state, nullptr, row.k, mine, nullptr, scale, K);
    }

    // Columns of the state, N at a time.
    template <int64_t N>
    void columns() {
        for (int64_t first = 0; first < V; first += N) columns<N>(first, std::min(N, V - first));
    }

    template <int64_t N>
    void columns(int64_t first, int64_t count) {
        static thread_local std::vector<float> room, scales;
        const int64_t size = K * N, states = chain ? 1 : given.T + 1;
        room.resize(size * states), scales.resize(N * states);
        float *const state = room.data(), *const scale = scales.data();
        begin<N>(first, count, state, scale);
        const float* const values = given.values + of_head(given.W * V) + first;
        for (int64_t row = 0; row < pending; row++)
            fold<N>(state, scale, logged_row(row), values + row * V, count);
        if (chain) {
            if (certain == 0) give<N>(state, scale, first, count);
            for (int64_t t = 0; t < given.T; t++) {
                token<N>(t, first, count, state, scale, state, scale);
                if (t + 1 == certain) give<N>(state, scale, first, count);
            }
            return;
        }
        for (int64_t t = 0; t < given.T; t++) {
            const int64_t from = parent[t] < 0 ? 0 : parent[t] + 1;
            token<N>(t, first, count, state + from * size, scale + from * N,
                  state + (t + 1) * size, scale + (t + 1) * N);
        }
        for (int64_t t = 0; t < certain; t++)
            fold<N>(state, scale, token_row(t), u + t * V + first, count);
        give<N>(state, scale, first, count);
    }

    void run() {
        factors(given.decays + of_head(given.W * D), pending * D, logged);
        factors(given.g + of_head(given.T * D), given.T * D, now);
        find_parents();
        // As many as the first cache holds of a state, but for states that have fewer.
        if (V == 1)
            columns<1>();
        else if (V <= 8)
            columns<8>();
        else
            columns<32>();
    }

    void copy_rows(const float* from, float* to, int64_t size) const {
        const int64_t first = std::min(std::max(given.certain[b], -given.W), given.T);
        for (int64_t row = 0; row < given.W; row++) {
            const int64_t t = std::min(std::max<int64_t>(first + row, 0), given.T - 1);
            std::copy(from + t * size, from + (t + 1) * size, to + row * size);
        }
    }

    void log() const {
        copy_rows(u, given.new_values + of_head(given.W * V), V);
        copy_rows(given.g + of_head(given.T * D), given.new_decays + of_head(given.W * D), D);
        if (h % (given.H / given.G)) return;
        copy_rows(given.k + of_group(given.T * K), given.new_keys + of_group(given.W * K), K);
    }
};

template <bool ROUNDED>
void step_of(const Recurrence& given, const Team& team) {
    graftwork::want(given.D == 1 || given.D == given.K, "g must have one decay a head or one a key");
    const int64_t heads = given.B * given.H, bytes = 8 * given.K * given.V * given.T;
    std::vector<float> u(heads * given.T * given.V);
    const auto head = [&](int64_t i) {
        return Head<ROUNDED>(given, i, &u[i * given.T * given.V]);
    };
    team.each(heads, bytes, [&](int64_t i) { head(i).run(); });
    // The log may lie where the old one is, which all heads of a group have read by now.
    team.each(heads, 4 * given.W * (given.K + given.V), [&](int64_t i) { head(i).log(); });
}

}  // namespace

KERNEL(linear_attention_step, Floats) {
    Recurrence of(given.before, given.after);
    of.state = given.state, of.new_state = given.new_state;
    step_of<false>(of, team);
}

KERNEL(linear_attention_step_int8, Codes) {
    Recurrence of(given.before, given.after);
    of.codes = given.codes, of.new_codes = given.new_codes;
    of.scale = given.scale, of.new_scale = given.new_scale;
    step_of<true>(of, team);
}
