#include "attention.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "door.h"
#include "gangs.h"
#include "masked_rows.h"
#include "query_rows.h"
#include "stored_rows.h"

using namespace graftwork;

namespace {

struct Attend {
    const float *q, *k, *v;
    const uint8_t* mask;
    const float *bias, *sinks;
    float* out;
    Sizes sizes;
    Number scale, softcap;
};

struct AttendPart {
    const float *q, *k, *v;
    const uint8_t* mask;
    const float *bias, *sinks;
    float *out, *weight;
    Sizes sizes;
    Number scale, softcap;
};

struct AttendQuantized {
    const float* q;
    const uint8_t* k;
    const float* k_steps;
    const uint8_t* v;
    const float* v_steps;
    const uint8_t* mask;
    const float *bias, *sinks;
    float* out;
    Sizes sizes;
    int64_t bits, turned;
    Number scale, softcap;
};

// `graftwork.quantize_rows`: x [B,G,T,D] as codes and steps.
struct Rounded {
    const float* x;
    uint8_t* codes;
    float* steps;
    int64_t B, G, T, D, bits, turned;
};

// `graftwork.static_codes`: x [B,G,T,D] as codes, on steps [G,D] of channels.
struct Static {
    const float *x, *step, *least;
    uint8_t* codes;
    int64_t B, G, T, D, bits;
};

// `graftwork.hadamard_rows`: x and y [B,G,T,D].
struct Turned {
    const float* x;
    float* y;
    int64_t B, G, T, D;
};

// Bytes of a row of so many numbers.
int64_t row_bytes(const Stored& stored, int64_t width) {
    return stored.bits == 32 ? width * int64_t(sizeof(float)) : stored_bytes(width, stored.bits);
}

// A group's rows of a cache [groups, rows, width].
Rows rows_of(
    const Stored& stored, const void* data, const float* steps, int64_t group, int64_t rows,
    int64_t width) {
    const char* const own = static_cast<const char*>(data) + group * rows * row_bytes(stored, width);
    return {own, stored.bits == 32 ? nullptr : steps + group * rows * 2, width, stored.bits};
}

// A row of floats as a cache holds it. It is changed on the way.
void put(const Stored& stored, float* row, int64_t width, void* to, float* steps) {
    if (stored.bits == 32) {
        std::memcpy(to, row, width * sizeof(float));
        return;
    }
    if (stored.turned) turn_by_hadamard(row, width);
    store_row(row, width, stored.bits, static_cast<uint8_t*>(to), steps);
}

// A cache [groups, rows, width] that a step writes, which may be the old one.
struct Cache {
    const Stored& stored;
    const void* old_data;
    void* data;
    const float* old_steps;
    float* steps;
    int64_t rows, width;

    bool is_new() const { return data != old_data || (stored.bits != 32 && steps != old_steps); }
    void keep(int64_t group, int64_t count) const {
        const int64_t bytes = row_bytes(stored, width), at = group * rows;
        if (data != old_data)
            std::memcpy(static_cast<char*>(data) + at * bytes,
                        static_cast<const char*>(old_data) + at * bytes, count * bytes);
        if (stored.bits != 32 && steps != old_steps)
            std::memcpy(steps + at * 2, old_steps + at * 2, count * 2 * sizeof(float));
    }
    void write(int64_t group, int64_t row, float* values) const {
        const int64_t at = group * rows + row;
        put(stored, values, width, static_cast<char*>(data) + at * row_bytes(stored, width),
            stored.bits == 32 ? nullptr : steps + at * 2);
    }
};

// A sequence's tokens, and what they see.
struct Tokens {
    const Cached& of;
    std::vector<int64_t> counted;  // [B, T] positions, if none are given
    std::vector<uint8_t> near;     // [B, T, T] the step's tokens that one sees, if its reach ends

    explicit Tokens(const Cached& of) : of(of) {
        for (int64_t b = 0; b < of.B; b++) {
            if (of.past[b] < 0 || of.past[b] > of.C - of.T)
                throw std::out_of_range(
                    "index " + std::to_string(of.past[b] + of.T - 1) + " of a row lies outside 0.." +
                    std::to_string(of.C - 1));
            for (int64_t t = 0; !of.positions && t < of.T; t++) counted.push_back(of.past[b] + t);
        }
        for (int64_t b = 0; of.kept && b < of.B; b++)
            if (of.T) check_index(of.kept_past[b], of.W - of.T + 1);
        for (int64_t i = 0; of.cos && i < of.B * of.T; i++) check_index(positions(0)[i], of.angles);
        if (reach_ends()) near.resize(of.B * of.T * of.T);
        for (int64_t i = 0; i < int64_t(near.size()); i++) near[i] = is_near(i);
    }
    const int64_t* positions(int64_t b) const {
        return (of.positions ? of.positions : counted.data()) + b * of.T;
    }
    // A token's position among the rows.
    int64_t place_of(int64_t b, int64_t t) const {
        return positions(b)[t] - (of.latest ? positions(b)[0] - of.past[b] : 0);
    }
    bool is_near(int64_t place) const {
        const int64_t b = place / of.T / of.T, t = place / of.T % of.T, token = place % of.T;
        const bool follows = of.ancestors ? of.ancestors[place] != 0 : token <= t;
        return follows && place_of(b, token) >= since(place_of(b, t));
    }
    bool reach_ends() const { return of.window || of.chunk; }
    // The first position that a token at one sees.
    int64_t since(int64_t position) const {
        const int64_t near = of.window ? position - of.window + 1 : 0;
        return std::max(near, of.chunk ? position - position % of.chunk : 0);
    }
    // What token t of a sequence sees, but for the query itself.
    Query seen(int64_t b, int64_t t) const {
        const int64_t past = of.past[b];
        Query query = {};
        if (reach_ends()) query.first = std::min(past, since(place_of(b, t)));
        query.open = past;
        query.end = past + of.T;
        query.marks = (reach_ends() ? near.data() : of.ancestors) + (b * of.T + t) * of.T;
        if (!reach_ends() && !of.ancestors) {
            query.open = query.end = past + t + 1;
            query.marks = nullptr;
        }
        while (query.end > query.open && !query.marks[query.end - query.open - 1]) query.end--;
        return query;
    }
    // A row [D] turned by the position of its token, into `to`.
    void turn(const float* row, int64_t b, int64_t t, float* to) const {
        const int64_t half = of.cos ? of.half : 0, next = of.interleaved ? 1 : half;
        const int64_t angle = of.cos ? positions(b)[t] * half : 0;
        for (int64_t i = 0; i < half; i++) {
            const int64_t a = of.interleaved ? 2 * i : i;
            const float x = row[a], y = row[a + next], c = of.cos[angle + i], s = of.sin[angle + i];
            to[a] = x * c - y * s;
            to[a + next] = y * c + x * s;
        }
        std::copy(row + 2 * half, row + of.D, to + 2 * half);
    }
    Cache keys() const {
        return {of.stored, of.past_keys, of.keys, of.past_key_steps, of.key_steps, of.C, of.D};
    }
    Cache values() const {
        return {of.stored, of.past_values, of.values, of.past_value_steps, of.value_steps, of.C, of.E};
    }
    // Keeps a token's query [D].
    void keep(const float* query, int64_t b, int64_t head, int64_t t) const {
        std::copy(query, query + of.D,
                  of.kept + ((b * of.H + head) * of.W + of.kept_past[b] + t) * of.D);
    }
    // A token's key [D], of the head that a group's rows are for.
    const float* key(int64_t b, int64_t g, int64_t t) const {
        return of.key + (b * of.T + t) * of.key_step + g / of.repeat * of.D;
    }
    // A group's new rows into its caches, and the queries that were kept of its heads.
    void write(int64_t group) const {
        if (of.kept && of.kept != of.past_kept) {
            const int64_t size = of.H / of.G * of.W * of.D;
            std::copy(of.past_kept + group * size, of.past_kept + (group + 1) * size,
                      of.kept + group * size);
        }
        static thread_local std::vector<float> space;
        space.resize(std::max(of.D, of.E));
        const int64_t b = group / of.G, g = group % of.G, past = of.past[b];
        keys().keep(group, past);
        values().keep(group, past);
        for (int64_t t = 0; t < of.T; t++) {
            turn(key(b, g, t), b, t, space.data());
            keys().write(group, past + t, space.data());
            const float* const value =
                of.value + (b * of.T + t) * of.value_step + g / of.repeat * of.E;
            std::copy(value, value + of.E, space.data());
            values().write(group, past + t, space.data());
        }
    }
};

// Attention over caches that lie as they are read.
void attend_lying(
    const Masked& of, const Stored& stored, const void* k, const float* k_steps, const void* v,
    const float* v_steps, const Team& team) {
    attend_masked(of, team, [&](int64_t group, const auto& attend) {
        attend(rows_of(stored, k, k_steps, group, of.C, of.D),
               rows_of(stored, v, v_steps, group, of.C, of.E));
    });
}

template <class Given>
Masked masked(const Given& of, float* weight, const Stored& stored) {
    const int64_t bytes = row_bytes(stored, of.sizes.D) + row_bytes(stored, of.sizes.E);
    return {of.sizes, of.q, of.mask, of.bias, of.sinks, of.out, weight, of.scale, of.softcap, bytes,
            stored.turned, stored.turned, TOGETHER};
}

}  // namespace

KERNEL(attend, Attend) {
    const Stored floats = {32, false};
    attend_lying(masked(given, nullptr, floats), floats, given.k, nullptr, given.v, nullptr, team);
}

KERNEL(attend_part, AttendPart) {
    const Stored floats = {32, false};
    attend_lying(masked(given, given.weight, floats), floats, given.k, nullptr, given.v, nullptr, team);
}

KERNEL(attend_quantized, AttendQuantized) {
    const Stored stored = {given.bits, given.turned != 0};
    attend_lying(masked(given, nullptr, stored), stored, given.k, given.k_steps, given.v, given.v_steps,
                 team);
}

KERNEL(quantize_rows, Rounded) {
    const Stored stored = {given.bits, given.turned != 0};
    want(given.bits == 4 || given.bits == 8, "bits must be 4 or 8");
    want(given.D >= 2 && given.D % 2 == 0, "rows must be of an even width");
    want(!stored.turned || (given.D & (given.D - 1)) == 0, "turned rows must be a power of two");
    std::vector<float> row(given.D);
    for (int64_t i = 0; i < given.B * given.G * given.T; i++) {
        std::copy(given.x + i * given.D, given.x + (i + 1) * given.D, row.data());
        uint8_t* const codes = given.codes + i * row_bytes(stored, given.D);
        put(stored, row.data(), given.D, codes, given.steps + i * 2);
    }
}

KERNEL(static_codes, Static) {
    want(given.bits == 4 || given.bits == 8, "bits must be 4 or 8");
    want(given.D >= 2 && given.D % 2 == 0, "rows must be of an even width");
    const int64_t bytes = stored_bytes(given.D, given.bits);
    for (int64_t i = 0; i < given.B * given.G * given.T; i++) {
        const int64_t of = i / given.T % given.G * given.D;
        store_row(given.x + i * given.D, given.D, given.bits, given.step + of, given.least + of,
                  given.codes + i * bytes);
    }
}

KERNEL(hadamard_rows, Turned) {
    want((given.D & (given.D - 1)) == 0, "rows must be a power of two");
    std::copy_n(given.x, given.B * given.G * given.T * given.D, given.y);
    for (int64_t i = 0; i < given.B * given.G * given.T; i++)
        turn_by_hadamard(given.y + i * given.D, given.D);
}

void graftwork::put_rows(const Cached& of, float* new_keys, const Team& team) {
    const Tokens tokens(of);
    const int64_t each = of.H / of.G, row = of.D * int64_t(sizeof(float));
    const int64_t copied = tokens.keys().is_new() || tokens.values().is_new() ? of.C : 0;
    team.each(of.B * of.G, (of.T * (each + 2) + 2 * copied) * row, [&](int64_t group) {
        const int64_t b = group / of.G, g = group % of.G;
        // All rows: unlike attention, other ops may read those behind the step's.
        tokens.keys().keep(group, of.C);
        tokens.values().keep(group, of.C);
        tokens.write(group);
        for (int64_t head = g * each; head < (g + 1) * each; head++)
            for (int64_t t = 0; t < of.T; t++)
                tokens.turn(of.query + (b * of.T + t) * of.query_step + head * of.D, b, t,
                            of.out + ((b * of.H + head) * of.T + t) * of.D);
        if (g % of.repeat) return;
        float* const to = new_keys + (b * of.G + g) / of.repeat * of.T * of.D;
        for (int64_t t = 0; t < of.T; t++) tokens.turn(tokens.key(b, g, t), b, t, to + t * of.D);
    });
}

void graftwork::attend(const Cached& of, const Team& team) {
    const Tokens tokens(of);
    const int64_t each = of.H / of.G, rows = each * of.T;
    int64_t most = 0;
    for (int64_t b = 0; b < of.B; b++) most = std::max(most, of.past[b]);
    const int64_t copied = tokens.keys().is_new() || tokens.values().is_new() ? most : 0;
    const int64_t wide = row_bytes(of.stored, of.D) + row_bytes(of.stored, of.E);
    team.each(of.B * of.G, (of.T + copied) * wide, [&](int64_t group) { tokens.write(group); });
    const int64_t bytes = (most + of.T) * wide;
    const bool turns = of.cos || of.stored.turned;
    in_parts(team, of.B * of.G, rows, bytes, [&](int64_t group, int64_t first, int64_t last) {
        static thread_local std::vector<float> space;
        space.resize(TOGETHER * of.D);
        Slope slopes[TOGETHER];
        const int64_t b = group / of.G;
        const Attention shared = {rows_of(of.stored, of.keys, of.key_steps, group, of.C, of.D),
                                  rows_of(of.stored, of.values, of.value_steps, group, of.C, of.E),
                                  of.C, of.scale, of.softcap};
        attend_all(shared, of.stored.turned, first, last, [&](int64_t row, int64_t i) {
            const int64_t t = row % of.T, head = group % of.G * each + row / of.T;
            const float* const values = of.query + (b * of.T + t) * of.query_step + head * of.D;
            float* const turned = space.data() + i * of.D;
            Query query = tokens.seen(b, t);
            if (turns) tokens.turn(values, b, t, turned);
            if (of.kept) tokens.keep(turns ? turned : values, b, head, t);
            if (of.stored.turned) turn_by_hadamard(turned, of.D);
            query.values = turns ? turned : values;
            query.sink = of.sinks ? of.sinks + head : nullptr;
            query.out = of.out + ((b * of.T + t) * of.H + head) * of.E;
            if (of.slopes) {
                const int64_t* const positions = tokens.positions(b);
                slopes[i] = {of.slopes[head], positions[t], of.past[b], of.T, positions};
                query.slope = slopes + i;
            }
            return query;
        });
    });
}
