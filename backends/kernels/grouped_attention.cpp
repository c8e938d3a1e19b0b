#include <algorithm>
#include <utility>
#include <vector>

#include "door.h"
#include "grouped_rows.h"
#include "masked_rows.h"

namespace {

// Members are those of the op; see `GroupedRows`.
struct AttendGrouped {
    const float* q;
    const uint8_t* k;
    const uint16_t* k_steps;
    const float* k_recent;
    const uint8_t* v;
    const uint16_t* v_steps;
    const float* v_recent;
    const int64_t* past;
    const uint8_t* mask;
    const float *bias, *sinks;
    const uint16_t *k_left, *k_right, *v_left, *v_right;
    const float *cos, *sin;
    float* out;
    Sizes sizes;
    int64_t R, S, U, N, M, X, Y, A;
    int64_t bits, group, keys_by_channel, values_by_channel, residual, block;
    Number scale;
    int64_t outliers, turned, interleaved;
    Number softcap;
};

// Gangs for a thread, of which none waits long for the others.
constexpr int64_t FEW_GANGS = 4;

// The same over rows that sources make, where there are too few query rows to give all threads as much
// to do: they share the cache's rows out. sources: makes those of a group's keys and values.
template <class Sources>
void attend_shared(const Masked& of, const Team& team, const Sources& sources) {
    const int64_t groups = of.B * of.G, rows = of.H / of.G * of.T;
    std::vector<float> space(groups * rows * of.D);
    std::vector<std::pair<GroupedRows, GroupedRows>> made;
    for (int64_t group = 0; group < groups; group++) made.push_back(sources(group));
    std::vector<Gang> gangs;
    for (int64_t group = 0; group < groups; group++) {
        const Rows keys = {nullptr, nullptr, of.D, 32, &made[group].first};
        const Rows values = {nullptr, nullptr, of.E, 32, &made[group].second};
        const MaskedRows make = {of, group, space.data() + group * rows * of.D};
        for (int64_t row = 0; row < rows; row++) {
            if (row % of.together == 0)
                gangs.push_back({{keys, values, of.C, of.scale, of.softcap}, {}});
            gangs.back().queries.push_back(make(row, row));
        }
    }
    attend_together(gangs, team);
    for (int64_t i = 0; of.turned_values && i < groups * rows; i++)
        turn_by_hadamard(of.out + i * of.E, of.E);
}

// The number of rows of a text that are codes (`stored_rows` in ir/ops/grouped_cache.py).
int64_t coded(const AttendGrouped& of, int64_t past) {
    if (past < 0 || past > of.sizes.C) check_index(past, of.sizes.C + 1);
    return past - std::min(past, of.residual + past % of.block);
}

// Places of rows in a cache's parts that `rows` of a text have.
template <class T>
const T* part(const T* all, int64_t group, int64_t rows, int64_t width) {
    return all ? all + group * rows * width : nullptr;
}

}  // namespace

KERNEL(attend_grouped, AttendGrouped) {
    const AttendGrouped& of = given;
    const Sizes& sizes = of.sizes;
    const int64_t groups = (sizes.C + of.group - 1) / of.group;
    want(of.residual >= 1 && of.block >= 1, "residual and block must be positive");
    want((!of.keys_by_channel || of.S >= groups) && (!of.values_by_channel || of.U >= groups) &&
             (!of.X || of.Y >= groups),
         "groups of rows must have room for all rows");
    for (int64_t b = 0; b < sizes.B; b++) coded(of, of.past[b]);
    Masked masked = {sizes, of.q, of.mask, of.bias, of.sinks, of.out, nullptr, of.scale, of.softcap,
                     (sizes.D + sizes.E) * of.bits / 8, of.turned && !of.cos, of.turned != 0, MANY};
    const auto sources = [&](int64_t group) {
        const int64_t stored = coded(of, of.past[group / sizes.G]);
        GroupedRows keys, values;
        keys.codes = part(of.k, group, sizes.C, sizes.D * of.bits / 8);
        keys.steps = part(of.k_steps, group, of.S, of.N);
        keys.latest = part(of.k_recent, group, of.R, sizes.D);
        keys.left = part(of.k_left, group, sizes.C, of.X);
        keys.right = part(of.k_right, group, of.Y, of.X * sizes.D);
        keys.cos = of.cos, keys.sin = of.sin, keys.angles = of.A;
        keys.width = sizes.D, keys.by_channel = of.keys_by_channel != 0;
        keys.rank = of.k_left ? of.X : 0;
        values.codes = part(of.v, group, sizes.C, sizes.E * of.bits / 8);
        values.steps = part(of.v_steps, group, of.U, of.M);
        values.latest = part(of.v_recent, group, of.R, sizes.E);
        values.left = part(of.v_left, group, sizes.C, of.X);
        values.right = part(of.v_right, group, of.Y, of.X * sizes.E);
        values.cos = values.sin = nullptr, values.angles = 0;
        values.width = sizes.E, values.by_channel = of.values_by_channel != 0;
        values.rank = of.v_left ? of.X : 0;
        for (GroupedRows* rows : {&keys, &values}) {
            rows->stored = stored, rows->L = of.R, rows->bits = of.bits, rows->group = of.group;
            rows->outliers = of.outliers, rows->turned = of.turned != 0;
            rows->interleaved = of.interleaved != 0;
        }
        return std::make_pair(keys, values);
    };
    const int64_t rows = sizes.H / std::max<int64_t>(1, sizes.G) * sizes.T;
    const int64_t gangs = sizes.B * sizes.G * ((rows + MANY - 1) / MANY);
    if (team.threads() > 1 && gangs < FEW_GANGS * team.threads() && sizes.C > PART_ROWS)
        return attend_shared(masked, team, sources);
    attend_masked(masked, team, [&](int64_t group, const auto& attend) {
        const auto made = sources(group);
        attend({nullptr, nullptr, sizes.D, 32, &made.first},
               {nullptr, nullptr, sizes.E, 32, &made.second});
    });
}
