// Rows of a cache that become codes in groups, and what is kept beside these: `graftwork.store_groups`
// and `graftwork.store_factors`, as their meanings say.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "door.h"
#include "group_codes.h"
#include "lanes.h"

using namespace graftwork;

namespace {

constexpr float MOST_HALF = 65504.0f;
constexpr int ROUNDS = 8;
constexpr float LEAST = 1e-20f;

// Members are those of the op.
struct StoreGroups {
    const uint8_t* codes;
    const uint16_t* steps;
    const float *recent, *rows;
    const int64_t* past;
    uint8_t* new_codes;
    uint16_t* new_steps;
    float* new_recent;
    int64_t B, G, C, K, S, N, R, T, D;
    int64_t bits, group, by_channel, after, outliers;
};

struct StoreFactors {
    const uint16_t *left, *right;
    const float* rows;
    const int64_t* past;
    uint16_t *new_left, *new_right;
    int64_t B, G, C, X, Y, Z, T, D;
    int64_t bits, group, by_channel, after, outliers;
};

Lanes clipped(Lanes x, float least, float most) {
    return x < splat(least) ? splat(least) : x > splat(most) ? splat(most) : x;
}

// Numbers as half precision has them, in its range.
Lanes halves(Lanes x, uint16_t* to) {
    float own[LANES];
    store(own, clipped(x, -MOST_HALF, MOST_HALF));
    narrow(own, LANES, to);
    widen(to, LANES, own);
    return load<Lanes>(own);
}

// How rows [T, D] are grouped.
struct Form {
    int64_t T, D, bits, group, outliers;
    bool by_channel;

    template <class Given>
    explicit Form(const Given& of)
        : T(of.T), D(of.D), bits(of.bits), group(of.group), outliers(of.outliers),
          by_channel(of.by_channel != 0) {
        want(bits == 2 || bits == 3 || bits == 4 || bits == 8, "bits must be 2, 3, 4 or 8");
        want(bits == 8 || D % (bits == 4 ? 2 : bits == 2 ? 4 : 8) == 0, "codes must fill bytes");
        want(group >= 1 && D >= 1, "group must be positive, and rows must have columns");
        want((by_channel ? T : D) % each() == 0, "rows must be whole groups");
        want(outliers >= 0 && outliers < each(), "outliers must be fewer than a group has");
        want(of.after >= T, "rows that become codes must be among the latest");
    }
    int64_t each() const { return by_channel ? group : std::min(group, D); }
    int64_t shared() const { return by_channel ? D : D / each(); }
    int64_t kinds() const { return 2 + 2 * outliers; }
    int64_t numbers() const { return kinds() * shared(); }
};

// Groups of numbers, one a lane, as codes. x and errors, unless they are null: [each, LANES]; codes
// likewise; kept [kinds, LANES]: see `quantize_groups`.
void code_groups(const Form& of, const float* x, uint8_t* codes, uint16_t* kept, float* errors) {
    static thread_local Space<float> space;
    const int64_t each = of.each();
    float* const far = space.of(each * LANES);  // -1: one that is kept as it is
    Lanes sum = {};
    for (int64_t i = 0; of.outliers && i < each; i++) sum += load<Lanes>(x + i * LANES);
    const Lanes mean = sum / splat(float(each));
    for (int64_t i = 0; i < each; i++) {
        const Lanes apart = load<Lanes>(x + i * LANES) - mean;
        store(far + i * LANES, of.outliers ? apart < 0.0f ? -apart : apart : Lanes{});
    }
    for (int64_t n = 1; n <= of.outliers; n++) {
        Lanes most = splat(-1), which = {}, value = {};
        for (int64_t i = 0; i < each; i++) {
            const Lanes own = load<Lanes>(far + i * LANES);
            const Whole more = own > most;
            most = more ? own : most;
            which = more ? splat(float(i)) : which;
            value = more ? load<Lanes>(x + i * LANES) : value;
        }
        for (int lane = 0; lane < LANES; lane++) far[int64_t(which[lane]) * LANES + lane] = -1;
        halves(which, kept + 2 * n * LANES);
        halves(value, kept + (2 * n + 1) * LANES);
    }
    Lanes small = splat(3e38f), large = splat(-3e38f);
    for (int64_t i = 0; i < each; i++) {
        const Lanes own = load<Lanes>(x + i * LANES);
        const Whole counts = load<Lanes>(far + i * LANES) >= 0.0f;
        small = counts & (own < small) ? own : small;
        large = counts & (own > large) ? own : large;
    }
    const float levels = float((1 << of.bits) - 1);
    const Lanes least = halves(small, kept + LANES);
    const Lanes step = halves((large - least) / splat(levels), kept);
    const Lanes by = step > 0.0f ? step : splat(1);
    for (int64_t i = 0; i < each; i++) {
        const Lanes own = load<Lanes>(x + i * LANES);
        const Lanes code = clipped(rounded((own - least) / by), 0, levels);
        store(codes + i * LANES, __builtin_convertvector(__builtin_convertvector(code, Whole), Marks));
        if (errors) store(errors + i * LANES, own - (code * step + least));
    }
    for (int64_t n = 1; errors && n <= of.outliers; n++) {
        float places[LANES], values[LANES];
        widen(kept + 2 * n * LANES, LANES, places);
        widen(kept + (2 * n + 1) * LANES, LANES, values);
        for (int lane = 0; lane < LANES; lane++) {
            const int64_t at = std::min(int64_t(places[lane]), each - 1) * LANES + lane;
            errors[at] = x[at] - values[lane];
        }
    }
}

// Rows x [T, D] as a byte a number, with steps; and what the codes leave out, unless that is null.
void code_rows(const Form& of, const float* x, uint8_t* bytes, uint16_t* steps, float* errors) {
    static thread_local Space<float> space;
    static thread_local Space<uint8_t> coded;
    static thread_local Space<uint16_t> kept;
    const int64_t each = of.each(), shared = of.shared(), kinds = of.kinds();
    float *const own = space.of(2 * each * LANES), *const left = own + each * LANES;
    uint8_t* const codes = coded.of(each * LANES);
    uint16_t* const said = kept.of(kinds * LANES);
    // A group's i-th number and its k-th kept one, from lane to lane: channels, or rows.
    const auto put = [&](const float* from, int64_t apart, int64_t next, int64_t count, float* errors,
                         uint8_t* bytes, uint16_t* steps, int64_t lane_steps) {
        std::fill_n(own, each * LANES, 0.0f);
        for (int64_t i = 0; i < each; i++)
            for (int64_t lane = 0; lane < count; lane++)
                own[i * LANES + lane] = from[i * apart + lane * next];
        code_groups(of, own, codes, said, errors ? left : nullptr);
        for (int64_t i = 0; i < each; i++)
            for (int64_t lane = 0; lane < count; lane++) {
                bytes[i * apart + lane * next] = codes[i * LANES + lane];
                if (errors) errors[i * apart + lane * next] = left[i * LANES + lane];
            }
        for (int64_t k = 0; steps && k < kinds; k++)
            for (int64_t lane = 0; lane < count; lane++)
                steps[k * shared + lane * lane_steps] = said[k * LANES + lane];
    };
    const auto at = [](auto* all, int64_t place) { return all ? all + place : all; };
    for (int64_t row = 0; of.by_channel && row < of.T; row += each)
        for (int64_t d = 0; d < of.D; d += LANES) {
            const int64_t place = row * of.D + d, count = std::min<int64_t>(LANES, of.D - d);
            put(x + place, of.D, 1, count, at(errors, place), bytes + place,
                at(steps, row / each * of.numbers() + d), 1);
        }
    for (int64_t row = 0; !of.by_channel && row < of.T; row += LANES)
        for (int64_t piece = 0; piece < shared; piece++) {
            const int64_t place = row * of.D + piece * each, count = std::min<int64_t>(LANES, of.T - row);
            put(x + place, 1, of.D, count, at(errors, place), bytes + place,
                at(steps, row * of.numbers() + piece), of.numbers());
        }
}

// A row's codes in their bits: the reverse of `unpack`.
void pack(const uint8_t* from, int64_t width, int64_t bits, uint8_t* to) {
    int64_t below = 0;
    for (const int64_t piece : {8, 4, 2, 1}) {
        if (!(bits & piece)) continue;
        const int64_t size = width * piece / 8, mask = (1 << piece) - 1;
        for (int64_t i = 0; i < size; i++) {
            int64_t found = 0;
            for (int64_t place = 0; place < 8 / piece; place++)
                found |= (from[place * size + i] >> below & mask) << (piece * place);
            to[i] = uint8_t(found);
        }
        to += size;
        below += piece;
    }
}

// See `low_rank`: x [rows, width] as left [rows, rank] times right [rank, width].
void factors(const float* x, int64_t rows, int64_t width, int64_t rank, uint16_t* left, uint16_t* right) {
    static thread_local Space<float> space;
    float *const along = space.of(rank * (rows + width)), *const columns = along + rank * rows;
    for (int64_t k = 0; k < rank; k++)
        for (int64_t d = 0; d < width; d++)
            columns[k * width + d] = std::cos(float(d) * float(k + 1) + float(k));
    for (int round = 0; round < ROUNDS; round++) {
        for (int64_t k = 0; k < rank; k++) {
            float* const own = along + k * rows;
            for (int64_t r = 0; r < rows; r++) own[r] = dot(x + r * width, columns + k * width, width);
            for (int64_t other = 0; other < k; other++)
                add_row(along + other * rows, -dot(along + other * rows, own, rows), rows, own);
            const float size = std::max(std::sqrt(dot(own, own, rows)), LEAST);
            for (int64_t r = 0; r < rows; r++) own[r] /= size;
        }
        std::fill_n(columns, rank * width, 0.0f);
        for (int64_t k = 0; k < rank; k++)
            for (int64_t r = 0; r < rows; r++)
                add_row(x + r * width, along[k * rows + r], width, columns + k * width);
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t k = 0; k < rank; k++) narrow(along + k * rows + r, 1, left + r * rank + k);
    narrow(columns, rank * width, right);
}

// A sequence's cache [rows, width] of each group, which may be the old one.
template <class T>
T* kept(const T* old, T* all, int64_t group, int64_t rows, int64_t width) {
    T* const own = all + group * rows * width;
    if (old != all) std::copy_n(old + group * rows * width, rows * width, own);
    return own;
}

// The first of `count` cache rows that are written, which stand for `each` rows of a text.
int64_t first_of(int64_t past, int64_t after, int64_t each, int64_t capacity, int64_t count) {
    return std::min((past - after) / each, capacity - count);
}

}  // namespace

KERNEL(store_groups, StoreGroups) {
    const StoreGroups& of = given;
    const Form form(of);
    const int64_t shared = form.by_channel ? of.group : 1, count = of.T / shared;
    want(of.K * 8 == of.D * of.bits, "codes must be [B, G, C, D * bits / 8]");
    want(of.N == form.numbers() && (form.by_channel || of.S == of.C), "steps must fit codes");
    want(of.T <= of.C && count <= of.S && of.after <= of.R, "caches must have room for the rows");
    team.each(of.B * of.G, of.T * of.D * int64_t(sizeof(float)), [&](int64_t group) {
        static thread_local Space<uint8_t> space;
        uint8_t* const codes = kept(of.codes, of.new_codes, group, of.C, of.K);
        uint16_t* const steps = kept(of.steps, of.new_steps, group, of.S, of.N);
        float* const recent = kept(of.recent, of.new_recent, group, of.R, of.D);
        const int64_t past = of.past[group / of.G];
        if (past < of.after) return;
        uint8_t* const bytes = space.of(of.T * of.D);
        code_rows(form, of.rows + group * of.T * of.D, bytes,
                  steps + first_of(past, of.after, shared, of.S, count) * of.N, nullptr);
        uint8_t* const to = codes + first_of(past, of.after, 1, of.C, of.T) * of.K;
        for (int64_t r = 0; r < of.T; r++) pack(bytes + r * of.D, of.D, of.bits, to + r * of.K);
        std::memmove(recent, recent + of.T * of.D, (of.after - of.T) * of.D * sizeof(float));
    });
}

KERNEL(store_factors, StoreFactors) {
    const StoreFactors& of = given;
    const Form form(of);
    const int64_t count = of.T / of.group;
    want(of.T % of.group == 0, "rows must be whole groups");
    want(of.X >= 1 && of.X <= std::min(of.group, of.D), "a rank must be of a group's rows and columns");
    want(of.Z == of.X * of.D, "factors must be of one rank");
    want(of.T <= of.C && count <= of.Y, "caches must have room for the rows");
    team.each(of.B * of.G, of.T * of.D * int64_t(sizeof(float)), [&](int64_t group) {
        static thread_local Space<uint8_t> space;
        static thread_local Space<float> wide;
        uint16_t* left = kept(of.left, of.new_left, group, of.C, of.X);
        uint16_t* right = kept(of.right, of.new_right, group, of.Y, of.Z);
        const int64_t past = of.past[group / of.G];
        if (past < of.after) return;
        float* const errors = wide.of(of.T * of.D);
        code_rows(form, of.rows + group * of.T * of.D, space.of(of.T * of.D), nullptr, errors);
        left += first_of(past, of.after, 1, of.C, of.T) * of.X;
        right += first_of(past, of.after, of.group, of.Y, count) * of.Z;
        for (int64_t n = 0; n < count; n++)
            factors(errors + n * of.group * of.D, of.group, of.D, of.X, left + n * of.group * of.X,
                    right + n * of.Z);
    });
}
