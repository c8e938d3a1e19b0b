// Attention over parts of the rows put together, and over what dropped rows add up to. A token's result
// has the same bits alone and among others.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "door.h"

namespace {

// `graftwork.merge_parts`: a, b and out [B,H,T,E], weights [B,H,T].
struct Merged {
    const float *a, *a_weight, *b, *b_weight;
    float* out;
    int64_t B, H, T, E;
};

// `graftwork.positive_features`: x [B,H,T,D], inner [H,D,I], outer [H,I,R], last [H,R,R] or null; out
// [B,H,T,R].
struct Features {
    const float *x, *inner, *outer, *last;
    float* out;
    int64_t B, H, T, D, I, R;
};

// `graftwork.read_dropped`: features [B,H,T,R], state [B,G,P,F], positions [B,T], past [B]; out
// [B,H,T,F-1], weight [B,H,T].
struct Dropped {
    const float *features, *state;
    const int64_t *positions, *past;
    float *out, *weight;
    int64_t B, H, T, R, G, P, F;
};

constexpr float LEAST = -1e30f;

// COUNT columns at a time, from one on, of what `product` works out. Where it came to an end.
template <int COUNT>
int64_t columns_of(
    const float* from, const float* matrix, int64_t rows, int64_t columns, int64_t first, float* to) {
    for (; first + COUNT <= columns; first += COUNT) {
        float sums[COUNT] = {};
        for (int64_t row = 0; row < rows; row++)
            for (int i = 0; i < COUNT; i++) sums[i] += from[row] * matrix[row * columns + first + i];
        std::copy(sums, sums + COUNT, to + first);
    }
    return first;
}

// to [columns] = from [rows] times a matrix [rows, columns].
void product(const float* from, const float* matrix, int64_t rows, int64_t columns, float* to) {
    int64_t done = columns_of<64>(from, matrix, rows, columns, 0, to);
    done = columns_of<8>(from, matrix, rows, columns, done, to);
    columns_of<1>(from, matrix, rows, columns, done, to);
}

// A quotient of polynomials, which lanes work out side by side (Eigen's generic_fast_erf_float).
float error_function(float x) {
    x = std::min(std::max(x, -4.0f), 4.0f);
    const float s = x * x;
    float p = -2.72614225801306e-10f * s + 2.77068142495902e-08f;
    p = p * s - 2.10102402082508e-06f;
    p = p * s - 5.69250639462346e-05f;
    p = p * s - 7.34990630326855e-04f;
    p = p * s - 2.95459980854025e-03f;
    p = p * s - 1.60960333262415e-02f;
    float q = -1.45660718464996e-05f * s - 2.13374055278905e-04f;
    q = q * s - 1.68282697438203e-03f;
    q = q * s - 7.37332916720468e-03f;
    q = q * s - 1.42647390514189e-02f;
    return x * p / q;
}

void gelu(float* x, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        x[i] = 0.5f * x[i] * (1.0f + error_function(x[i] * 0.70710678118654752f));
}

}  // namespace

KERNEL(merge_parts, Merged) {
    const int64_t row = given.E * int64_t(sizeof(float));
    team.each(given.B * given.H, given.T * 3 * row, [&](int64_t head) {
        for (int64_t i = head * given.T; i < (head + 1) * given.T; i++) {
            const float a = given.a_weight[i], b = given.b_weight[i];
            const float most = std::max(std::max(a, b), LEAST);
            const float mine = std::exp(a - most), other = std::exp(b - most);
            const float total = std::max(mine + other, 1e-30f);
            const float of_a = mine / total, of_b = other / total;
            for (int64_t e = i * given.E; e < (i + 1) * given.E; e++)
                given.out[e] = given.a[e] * of_a + given.b[e] * of_b;
        }
    });
}

KERNEL(positive_features, Features) {
    const int64_t numbers = given.I * (given.D + given.R);
    team.each(given.B * given.H, given.T * numbers, [&](int64_t head) {
        static thread_local std::vector<float> space;
        space.resize(given.I + given.R);
        float *const within = space.data(), *const found = within + given.I;
        const int64_t h = head % given.H;
        const float* const last = given.last ? given.last + h * given.R * given.R : nullptr;
        for (int64_t i = head * given.T; i < (head + 1) * given.T; i++) {
            float* const out = given.out + i * given.R;
            product(given.x + i * given.D, given.inner + h * given.D * given.I, given.D, given.I, within);
            gelu(within, given.I);
            product(within, given.outer + h * given.I * given.R, given.I, given.R, found);
            gelu(found, given.R);
            if (last) product(found, last, given.R, given.R, out);
            for (int64_t r = 0; r < given.R; r++) out[r] = std::fabs(last ? out[r] : found[r]);
        }
    });
}

KERNEL(read_dropped, Dropped) {
    graftwork::want(given.P >= given.R, "there must be a row of the state for each feature");
    const int64_t each = given.G ? given.H / given.G : 0, wide = given.F - 1;
    team.each(given.B * given.H, given.T * given.R * given.F * int64_t(sizeof(float)), [&](int64_t head) {
        static thread_local std::vector<float> sums;
        sums.resize(given.F);
        const int64_t b = head / given.H, group = b * given.G + head % given.H / each;
        const bool some = given.T && given.positions[b * given.T] > given.past[b];
        for (int64_t i = head * given.T; i < (head + 1) * given.T; i++) {
            float* const out = given.out + i * wide;
            if (some)
                product(given.features + i * given.R, given.state + group * given.P * given.F, given.R,
                        given.F, sums.data());
            const float total = some ? sums[wide] : 0.0f;
            given.weight[i] = total > 0 ? std::log(total) : -std::numeric_limits<float>::infinity();
            for (int64_t e = 0; e < wide; e++) out[e] = total > 0 ? sums[e] / total : 0.0f;
        }
    });
}
