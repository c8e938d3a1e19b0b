// Attention of query rows that a mask says what they see.

#pragma once

#include <algorithm>
#include <vector>

#include "gangs.h"
#include "query_rows.h"
#include "stored_rows.h"

namespace {

using namespace graftwork;

// What `graftwork.attend` and its kin have in common: q [B,H,T,D], mask [B,1,T,C] and, unless they
// are null, bias [B,H,T,C] and sinks [H]; out [B,H,T,E] and, unless it is null, weight [B,H,T]. A
// softcap of 0 is none. row_bytes: of a key and a value together. turned: keys or values are rows that
// a Hadamard matrix has turned.
struct Sizes {
    int64_t B, H, G, T, C, D, E;
};
struct Masked : Sizes {
    const float* q;
    const uint8_t* mask;
    const float *bias, *sinks;
    float *out, *weight;
    float scale, softcap;
    int64_t row_bytes;
    bool turned_keys, turned_values;
    int64_t together;  // query rows that read keys and values once
};

// The results of query rows from first to last, that `make` makes. turned: they are of values that a
// Hadamard matrix has turned.
template <class Make>
void attend_all(
    const Attention& of, bool turned, int64_t first, int64_t last, const Make& make,
    int64_t together = TOGETHER) {
    const auto attend = [&](int64_t, const Query* queries, int64_t count) {
        attend_rows(of, queries, count);
        for (int64_t i = 0; turned && i < count; i++)
            turn_by_hadamard(queries[i].out, of.values.width);
    };
    in_gangs(first, last, make, attend, together);
}

// Query rows of a group [D]: `make(row, i)` is the query, whose own values go to the i-th row of a space
// if a Hadamard matrix turns them.
struct MaskedRows {
    const Masked& of;
    int64_t group;
    float* space;

    int64_t each() const { return of.H / of.G; }
    Query operator()(int64_t row, int64_t i) const {
        const int64_t place = group * each() * of.T + row;
        const uint8_t* const mask = of.mask + (group / of.G * of.T + row % of.T) * of.C;
        Query query = marked(of.q + place * of.D, mask, of.C);
        if (of.turned_keys) {
            float* const turned = space + i * of.D;
            std::copy(query.values, query.values + of.D, turned);
            turn_by_hadamard(turned, of.D);
            query.values = turned;
        }
        query.bias = of.bias ? of.bias + place * of.C : nullptr;
        query.sink = of.sinks ? of.sinks + group % of.G * each() + row / of.T : nullptr;
        query.out = of.out + place * of.E;
        query.weight = of.weight ? of.weight + place : nullptr;
        return query;
    }
};

// caches: calls `attend` with the keys and values of a group.
template <class Caches>
void attend_masked(const Masked& of, const Team& team, const Caches& caches) {
    const int64_t rows = of.H / of.G * of.T, bytes = of.C * of.row_bytes;
    const auto part = [&](int64_t group, int64_t first, int64_t last) {
        static thread_local std::vector<float> space;
        space.resize(of.together * of.D);
        const MaskedRows make = {of, group, space.data()};
        caches(group, [&](const Rows& keys, const Rows& values) {
            const Attention shared = {keys, values, of.C, of.scale, of.softcap};
            attend_all(shared, of.turned_values, first, last, make, of.together);
        });
    };
    in_parts(team, of.B * of.G, rows, bytes, part, 1, of.together);
}

}  // namespace
