// Linear attention, token by token: a head's state stays in the processor's caches meanwhile.

#include "recurrent.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace graftwork {

namespace {

constexpr float LEAST = -200.0f;  // the logarithm of a decay is at least this

struct Sizes {
    int64_t K, V, D;
};

// to = exp(g) from, for key c.
inline float decay_of(const float* g, int64_t c, const Sizes& n, float shared) {
    return n.D == 1 ? shared : std::exp(std::max(g[c], LEAST));
}

// to = to + k u^T, and y += q to where a query is given.
void add(float* to, const float* q, const float* k, const float* u, float* y, const Sizes& n) {
    for (int64_t c = 0; c < n.K; c++) {
        float* const row = to + c * n.V;
        const float key = k[c];
        for (int64_t e = 0; e < n.V; e++) row[e] = __builtin_fmaf(key, u[e], row[e]);
        if (!q) continue;
        const float query = q[c];
        for (int64_t e = 0; e < n.V; e++) y[e] = __builtin_fmaf(query, row[e], y[e]);
    }
}

// to = exp(g) from, and known += k to where a key is given.
void decay(
    const float* from, float* to, const float* g, const float* k, float* known, const Sizes& n) {
    const float shared = n.D == 1 ? std::exp(std::max(g[0], LEAST)) : 0.0f;
    for (int64_t c = 0; c < n.K; c++) {
        const float by = decay_of(g, c, n, shared);
        const float* const old = from + c * n.V;
        float* const row = to + c * n.V;
        for (int64_t e = 0; e < n.V; e++) row[e] = by * old[e];
        if (!k) continue;
        const float key = k[c];
        for (int64_t e = 0; e < n.V; e++) known[e] = __builtin_fmaf(key, row[e], known[e]);
    }
}

// The step of one head of one sequence.
struct Head {
    const Recurrence& given;
    Sizes n;
    int64_t b, h, group;
    std::vector<float> known;
    float* u;  // [T,V]

    Head(const Recurrence& given, int64_t index, float* u)
        : given(given),
          n{given.K, given.V, given.D},
          b(index / given.H),
          h(index % given.H),
          group(h / (given.H / given.G)),
          known(given.V),
          u(u) {}

    int64_t of_head(int64_t rows) const { return (b * given.H + h) * rows; }
    int64_t of_group(int64_t rows) const { return (b * given.G + group) * rows; }

    void fold(float* state) {
        const int64_t size = n.K * n.V;
        const float* const old = given.state + of_head(size);
        if (given.past[b] <= 0) {
            std::fill(state, state + size, 0.0f);
            return;
        }
        if (state != old) std::copy(old, old + size, state);
        const int64_t count = std::min(given.past[b] - given.folded[b], given.W);
        const float* const k = given.keys + of_group(given.W * n.K);
        const float* const v = given.values + of_head(given.W * n.V);
        const float* const g = given.decays + of_head(given.W * n.D);
        for (int64_t row = 0; row < count; row++) {
            decay(state, state, g + row * n.D, nullptr, nullptr, n);
            add(state, nullptr, k + row * n.K, v + row * n.V, nullptr, n);
        }
    }

    void token(int64_t t, const float* from, float* to) {
        const float* const q = given.q + (of_group(given.T) + t) * n.K;
        const float* const k = given.k + (of_group(given.T) + t) * n.K;
        const float* const v = given.v + (of_head(given.T) + t) * n.V;
        const float* const g = given.g + (of_head(given.T) + t) * n.D;
        float* const y = given.y + (of_head(given.T) + t) * n.V;
        float* const mine = u + t * n.V;
        std::fill(y, y + n.V, 0.0f);
        if (given.beta) {
            const float rate = given.beta[of_head(given.T) + t];
            std::fill(known.begin(), known.end(), 0.0f);
            decay(from, to, g, k, known.data(), n);
            for (int64_t e = 0; e < n.V; e++) mine[e] = rate * (v[e] - known[e]);
        } else {
            decay(from, to, g, nullptr, nullptr, n);
            std::copy(v, v + n.V, mine);
        }
        add(to, q, k, mine, y, n);
    }

    // The token that each continues, -1 for none; whether that is always the one before it.
    bool parents(std::vector<int64_t>& parent) const {
        bool chain = true;
        for (int64_t t = 0; t < given.T; t++) {
            parent[t] = t - 1;
            if (!given.ancestors) continue;
            const uint8_t* const seen = given.ancestors + (b * given.T + t) * given.T;
            while (parent[t] >= 0 && !seen[parent[t]]) parent[t]--;
            chain = chain && parent[t] == t - 1;
        }
        return chain;
    }

    void run() {
        const int64_t size = n.K * n.V;
        float* const state = given.new_state + of_head(size);
        const int64_t certain = std::min(std::max<int64_t>(given.certain[b], 0), given.T);
        fold(state);
        std::vector<int64_t> parent(given.T);
        if (parents(parent)) {
            for (int64_t t = 0; t < certain; t++) token(t, state, state);
            if (certain == given.T) return;
            std::vector<float> later(state, state + size);
            for (int64_t t = certain; t < given.T; t++) token(t, later.data(), later.data());
            return;
        }
        std::vector<float> states(given.T * size);
        for (int64_t t = 0; t < given.T; t++) {
            const float* const from = parent[t] < 0 ? state : &states[parent[t] * size];
            token(t, from, &states[t * size]);
        }
        for (int64_t t = 0; t < certain; t++) {
            decay(state, state, given.g + (of_head(given.T) + t) * n.D, nullptr, nullptr, n);
            add(state, nullptr, given.k + (of_group(given.T) + t) * n.K, u + t * n.V, nullptr, n);
        }
    }

    void copy_rows(const float* from, float* to, int64_t size) const {
        const int64_t first = std::min(std::max(given.certain[b], -given.W), given.T);
        for (int64_t row = 0; row < given.W; row++) {
            const int64_t t = std::min(std::max<int64_t>(first + row, 0), given.T - 1);
            std::copy(from + t * size, from + (t + 1) * size, to + row * size);
        }
    }

    void log() const {
        copy_rows(u, given.new_values + of_head(given.W * n.V), n.V);
        copy_rows(given.g + of_head(given.T * n.D), given.new_decays + of_head(given.W * n.D), n.D);
        if (h % (given.H / given.G)) return;
        copy_rows(given.k + of_group(given.T * n.K), given.new_keys + of_group(given.W * n.K), n.K);
    }
};

}  // namespace

void step(const Recurrence& given, const Team& team) {
    const int64_t heads = given.B * given.H, bytes = 8 * given.K * given.V * given.T;
    std::vector<float> u(heads * given.T * given.V);
    const auto head = [&](int64_t i) { return Head(given, i, &u[i * given.T * given.V]); };
    team.each(heads, bytes, [&](int64_t i) { head(i).run(); });
    // The log may lie where the old one is, which all heads of a group have read by now.
    team.each(heads, 4 * given.W * (given.K + given.V), [&](int64_t i) { head(i).log(); });
}

}  // namespace graftwork
