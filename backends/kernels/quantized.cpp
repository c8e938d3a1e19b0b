// What quantized.h promises.
//
// A step of decoding has a few rows and reads every weight once: its time is that of the memory. A
// prompt's many rows find a tile near; where that is faster, it is unpacked once for all of them.

#include "quantized.h"

#include <stdexcept>
#include <string>
#include <vector>

#include "rounded_rows.h"
#include "tile_weights.h"

namespace {

using namespace graftwork;

int64_t tile_bytes(const Weights& w) { return w.units() * blocks_of(w) * block_bytes(w.bits); }

Processor::Real reals(const void* from, bool half, int64_t at, int part) {
    return half ? Processor::reals((const uint16_t*)from + at, part)
                : Processor::reals((const float*)from + at, part);
}

// Add value(part, row) times the factors [16] of the outputs to totals.
template <int ROWS, class Value>
INLINE void add_scaled(
    const Value& value,
    const void* factors,
    bool half,
    int64_t at,
    Sums<Processor::Real, ROWS>& totals) {
#pragma GCC unroll 2
    for (int part = 0; part < Processor::PARTS; part++) {
        const Processor::Real factor = reals(factors, half, at, part);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++)
            totals[part][r] = Processor::fused(value(part, r), factor, totals[part][r]);
    }
}

// Totals times the rows' scales, and a bias, to the tile's columns of y.
template <int ROWS>
void give(
    const Tile& tile, const float* scales, const Sums<Processor::Real, ROWS>& totals, float* y) {
    const Weights& w = *tile.of;
    const int64_t begin = tile.number * OUTPUTS, count = std::min<int64_t>(OUTPUTS, w.N - begin);
    float bias[OUTPUTS] = {}, last[OUTPUTS];
    if (w.bias) std::copy(w.bias + begin, w.bias + begin + count, bias);
    for (int r = 0; r < ROWS; r++) {
        float* const to = y + r * w.N + begin;
        for (int part = 0; part < Processor::PARTS; part++) {
            const Processor::Real scale = Processor::real(scales[r]);
            Processor::Real result = Processor::product(totals[part][r], scale);
            if (w.bias) result = Processor::sum(result, Processor::reals(bias, part));
            Processor::store(count < OUTPUTS ? last : to, part, result);
        }
        if (count < OUTPUTS) std::copy(last, last + count, to);
    }
}

// What a gang's rows have, from its first one on: see `Rows`.
struct Gang {
    const int8_t* values;
    const int32_t* starts;
    const float *sums, *steps;
    int64_t each;  // units that share a step
};

// Adds a gang's products with a tile to totals, unit by unit.
template <int ROWS, class Source>
INLINE void add_units(
    const Tile& tile, const Source& source, Gang gang, Sums<Processor::Real, ROWS>& totals) {
    const Weights& w = *tile.of;
    const int64_t groups = w.groups(), several = w.group / w.unit();
    const int64_t bytes = blocks_of(w) * DEPTH * Source::WIDTH;
    int64_t u = 0, left = gang.each;
    for (int64_t g = 0; g < groups; g++) {
        const int64_t at = (tile.number * groups + g) * OUTPUTS;
        Sums<Processor::Real, ROWS> inner;
        for (int64_t i = 0; i < several; i++, u++) {
            Sums<Processor::Whole, ROWS> found;
            source.template add_unit<ROWS>(u, gang.values, gang.starts, found);
#pragma GCC unroll 32
            for (int n = 0; n < Processor::PARTS * ROWS; n++) {
                const int part = n / ROWS, r = n % ROWS;
                const Processor::Real one = Processor::real(found[part][r]);
                const Processor::Real by = Processor::real(gang.steps[r]);
                inner[part][r] = i == 0 ? Processor::product(one, by)
                                        : Processor::fused(one, by, inner[part][r]);
            }
            gang.values += bytes * ROWS;
            gang.starts += ROWS;
            if (--left == 0) {
                gang.steps += ROWS;
                left = gang.each;
            }
        }
        const auto product = [&](int part, int r) { return inner[part][r]; };
        const auto sum = [&](int, int r) { return Processor::real(gang.sums[g * ROWS + r]); };
        add_scaled<ROWS>(product, w.scale, w.half_scale, at, totals);
        if (w.offset) add_scaled<ROWS>(sum, w.offset, w.half_offset, at, totals);
    }
}

// The same where units are groups, in one function whose loop has the registers for a group's sums.
template <int ROWS, bool OFFSETS, class Many>
__attribute__((noinline)) void add_groups(
    const Tile& tile, const Unpacked<Many>& source, Gang gang, Sums<Processor::Real, ROWS>& totals) {
    constexpr int PARTS = Processor::PARTS;
    const Weights& w = *tile.of;
    const int64_t groups = w.groups();
    const Line* line = source.lines;
    for (int64_t g = 0, left = gang.each; g < groups; g++) {
        Sums<Processor::Bytes, ROWS> found;
#pragma GCC unroll 32
        for (int i = 0; i < PARTS * ROWS; i++) found[i / ROWS][i % ROWS] = Many::zero();
        for (const Line* const end = line + source.each; line < end; line++) {
            source.template multiply<ROWS>(line, gang.values, found);
            gang.values += ROWS * WORD;
        }
        Processor::Real scale[PARTS], offset[PARTS];
        const int64_t at = (tile.number * groups + g) * OUTPUTS;
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
            scale[part] = reals(w.scale, w.half_scale, at, part);
            if constexpr (OFFSETS) offset[part] = reals(w.offset, w.half_offset, at, part);
        }
#pragma GCC unroll 32
        for (int i = 0; i < PARTS * ROWS; i++) {
            const int part = i % PARTS, r = i / PARTS;
            const Processor::Whole sum =
                Processor::sum(Many::whole(found[part][r]), Processor::whole(gang.starts[r]));
            const Processor::Real value =
                Processor::product(Processor::real(sum), Processor::real(gang.steps[r]));
            Processor::Real total = Processor::fused(value, scale[part], totals[part][r]);
            if constexpr (OFFSETS)
                total = Processor::fused(Processor::real(gang.sums[r]), offset[part], total);
            totals[part][r] = total;
        }
        gang.starts += ROWS;
        gang.sums += ROWS;
        if (--left == 0) {
            gang.steps += ROWS;
            left = gang.each;
        }
    }
}

// The same of weights as they are packed: nothing but the sums and totals needs registers.
template <int ROWS, bool OFFSETS, class Format>
__attribute__((noinline)) void add_groups(
    const Tile& tile,
    const AsPacked<Format>& source,
    Gang gang,
    Sums<Processor::Real, ROWS>& given) {
    constexpr int PARTS = Processor::PARTS;
    const Weights& w = *tile.of;
    const int64_t groups = w.groups(), bytes = source.blocks * DEPTH * ROWS;
    Sums<Processor::Real, ROWS> totals;
#pragma GCC unroll 32
    for (int i = 0; i < PARTS * ROWS; i++) totals[i / ROWS][i % ROWS] = given[i / ROWS][i % ROWS];
    for (int64_t g = 0, left = gang.each; g < groups; g++) {
        Sums<Processor::Whole, ROWS> found;
        source.template add_unit<ROWS>(g, gang.values, gang.starts, found);
        const int64_t at = (tile.number * groups + g) * OUTPUTS;
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
            const Processor::Real scale = reals(w.scale, w.half_scale, at, part);
            Processor::Real offset;
            if constexpr (OFFSETS) offset = reals(w.offset, w.half_offset, at, part);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) {
                const Processor::Real value = Processor::product(
                    Processor::real(found[part][r]), Processor::real(gang.steps[r]));
                Processor::Real total = Processor::fused(value, scale, totals[part][r]);
                if constexpr (OFFSETS)
                    total = Processor::fused(Processor::real(gang.sums[r]), offset, total);
                totals[part][r] = total;
            }
        }
        gang.values += bytes;
        gang.starts += ROWS;
        gang.sums += ROWS;
        if (--left == 0) {
            gang.steps += ROWS;
            left = gang.each;
        }
    }
#pragma GCC unroll 32
    for (int i = 0; i < PARTS * ROWS; i++) given[i / ROWS][i % ROWS] = totals[i / ROWS][i % ROWS];
}

template <int ROWS, class Format>
INLINE void add_products(
    const Tile& tile,
    const AsPacked<Format>& source,
    const Gang& gang,
    Sums<Processor::Real, ROWS>& totals) {
    if (tile.of->unit() != tile.of->group) return add_units<ROWS>(tile, source, gang, totals);
    if (tile.of->offset) return add_groups<ROWS, true>(tile, source, gang, totals);
    add_groups<ROWS, false>(tile, source, gang, totals);
}

template <int ROWS, class Many>
INLINE void add_products(
    const Tile& tile,
    const Unpacked<Many>& source,
    const Gang& gang,
    Sums<Processor::Real, ROWS>& totals) {
    const Weights& w = *tile.of;
    if (w.unit() != w.group || source.each > source.limit)
        return add_units<ROWS>(tile, source, gang, totals);
    if (w.offset) return add_groups<ROWS, true>(tile, source, gang, totals);
    add_groups<ROWS, false>(tile, source, gang, totals);
}

// Products of a gang of ROWS rows, from its first one on, with a tile: of y the tile's columns.
template <int ROWS, class Source>
__attribute__((noinline)) void tile_products(
    const Tile& tile, const Source& source, const Rows& rows, int64_t first, float* y) {
    const Weights& w = *tile.of;
    const Gang gang = {
        rows.values + first * rows.row_bytes,
        rows.starts + first * w.units(),
        rows.sums + first * w.groups(),
        rows.steps + first * w.spans(),
        w.units() / w.spans()};
    Sums<Processor::Real, ROWS> totals;
#pragma GCC unroll 32
    for (int i = 0; i < Processor::PARTS * ROWS; i++)
        totals[i / ROWS][i % ROWS] = Processor::real(0.0f);
    add_products<ROWS>(tile, source, gang, totals);
    give<ROWS>(tile, rows.scales + first, totals, y + first * w.N);
}

template <int ROWS, class Source>
void tile_products_of(
    int64_t count,
    const Tile& tile,
    const Source& source,
    const Rows& rows,
    int64_t first,
    float* y) {
    if constexpr (ROWS > 1)
        if (count < ROWS) return tile_products_of<ROWS - 1>(count, tile, source, rows, first, y);
    tile_products<ROWS>(tile, source, rows, first, y);
}

// Products of all rows with a tile, whose weights stay near meanwhile.
template <class Source>
void every_row(const Source& source, const Tile& tile, const Rows& rows, float* y) {
    for (int64_t gang = 0; gang < rows.gangs(); gang++) {
        const int64_t first = rows.first(gang), count = rows.first(gang + 1) - first;
        tile_products_of<Source::MOST>(count, tile, source, rows, first, y);
    }
}

// Products of all rows as `Way` has them.
template <class Format>
void few_rows(const Tile& tile, const Rows& rows, float* y) {
    every_row(AsPacked<Format>(tile), tile, rows, y);
}

template <class Format, class Many = Processor::ManyOf<Format>>
void many_rows(const Tile& tile, const Rows& rows, float* y) {
    const int64_t each = blocks_of(*tile.of) * STEPS * Many::WIDTH;
    const Unpacked<Many> source = {unpacked<Format>(tile), each, Many::limit(Format::NUMBER)};
    every_row(source, tile, rows, y);
}

// The one place where the number of rows decides.
template <class Format, class P = Processor>
Way way_of_rows(int64_t count) {
    if constexpr (P::MANY_ROWS > 0) {
        typedef typename P::template ManyOf<Format> Many;
        if (count >= Many::MANY) return {many_rows<Format>, P::MANY_ROWS, Many::WIDTH};
    }
    return {few_rows<Format>, P::ROWS, 1};
}

Way way_of(int64_t bits, Looked looked, int64_t count) {
    switch (bits + 16 * looked) {
        case 1: return way_of_rows<Packed<1, NOT>>(count);
        case 2: return way_of_rows<Packed<2, NOT>>(count);
        case 3: return way_of_rows<Packed<3, NOT>>(count);
        case 4: return way_of_rows<Packed<4, NOT>>(count);
        case 6: return way_of_rows<Packed<6, NOT>>(count);
        case 8: return way_of_rows<Packed<8, NOT>>(count);
        case 16 * IN_TABLE + 1: return way_of_rows<Packed<1, IN_TABLE>>(count);
        case 16 * IN_TABLE + 2: return way_of_rows<Packed<2, IN_TABLE>>(count);
        case 16 * IN_TABLE + 3: return way_of_rows<Packed<3, IN_TABLE>>(count);
        case 16 * IN_TABLE + 4: return way_of_rows<Packed<4, IN_TABLE>>(count);
        case 16 * IN_PAIRS + 4: return way_of_rows<Packed<4, IN_PAIRS>>(count);
    }
    throw std::invalid_argument("no tiles of " + std::to_string(bits) + " bits");
}

float number(const void* from, bool half, int64_t place) {
    return half ? half_to_float(((const uint16_t*)from)[place]) : ((const float*)from)[place];
}

// y [K]: a row of a table. Its values lie four by four in all steps of its tile.
void read_row(const Table& t, int64_t row, float* y) {
    const int64_t groups = t.K / t.group, size = block_bytes(t.bits);
    const int64_t tile = row / OUTPUTS, lane = row % OUTPUTS;
    const float zero = t.offset || t.values ? 0.0f : float(1 << (t.bits - 1));
    const uint8_t* block = t.tiles + tile * groups * blocks_of(t.group) * size;
    for (int64_t g = 0; g < groups; g++, y += t.group) {
        const int64_t at = (tile * groups + g) * OUTPUTS + lane;
        const float scale = number(t.scale, t.half_scale, at);
        const float offset = t.offset ? number(t.offset, t.half_offset, at) : 0.0f;
        for (int64_t k = 0; k < t.group; k++) {
            const int64_t depth = k % DEPTH;
            const int q = value_in(
                block, int(t.bits), int(depth / STEP), int(lane * STEP + depth % STEP));
            const float value = scale * (t.values ? t.values[q] : float(q) - zero);
            y[k] = t.offset ? value + offset : value;
            if (depth == DEPTH - 1 || k == t.group - 1) block += size;
        }
    }
}

}  // namespace

namespace graftwork {

void products(const Job* jobs, int64_t number, const Team& team) {
    // Of the calling thread: other threads' steps have their own.
    static thread_local std::vector<int8_t> values;
    static thread_local std::vector<int32_t> starts;
    static thread_local std::vector<float> sums, steps, scales;
    static thread_local std::vector<Rows> rows;
    static thread_local std::vector<int64_t> gangs;  // those of jobs before each
    const Weights& alike = jobs->weights;
    const Looked looked = !alike.table ? NOT : alike.books.paired ? IN_PAIRS : IN_TABLE;
    const int64_t groups = alike.groups(), units = alike.units(), spans = alike.spans();
    const int64_t padded = units * blocks_of(alike) * DEPTH;
    const int64_t size = tile_bytes(alike), tiles = tiles_of(alike.N);
    int64_t count = 0, bytes = 0, most = 0;
    rows.clear();
    gangs.assign(1, 0);
    for (int64_t i = 0; i < number; i++) {
        Rows of = {};
        of.way = way_of(alike.bits, looked, jobs[i].count);
        of.count = jobs[i].count;
        of.row_bytes = padded * of.way.width;
        rows.push_back(of);
        gangs.push_back(gangs.back() + of.gangs());
        most = std::max(most, of.gangs());
        count += of.count;
        bytes += of.count * of.row_bytes;
    }
    values.resize(bytes);
    starts.resize(count * units);
    sums.resize(count * groups);
    steps.resize(count * spans);
    scales.resize(count);
    count = bytes = 0;
    for (Rows& of : rows) {
        of.values = values.data() + bytes;
        of.starts = starts.data() + count * units;
        of.sums = sums.data() + count * groups;
        of.steps = steps.data() + count * spans;
        of.scales = scales.data() + count;
        count += of.count;
        bytes += of.count * of.row_bytes;
    }
    const Rows* const all = rows.data();
    const int64_t *const first = gangs.data(), *const last = first + number;
    const int64_t read = rows.front().way.together * alike.K * int64_t(sizeof(float));
    team.each(*last, read, [=](int64_t gang) {
        const int64_t job = std::upper_bound(first, last, gang) - first - 1;
        round_gang(jobs[job].x, jobs[job].weights, all[job], gang - first[job]);
    });
    team.each(number * tiles, size * most, [=](int64_t place) {
        const Job& job = jobs[place / tiles];
        const int64_t tile = place % tiles;
        const Rows& own = all[place / tiles];
        own.way.every_row({job.weights.tiles + tile * size, &job.weights, tile}, own, job.y);
    });
}

void products(const Weights& w, const float* x, int64_t count, float* y, const Team& team) {
    const Job job = {w, x, count, y};
    products(&job, 1, team);
}

void rows_of(const Table& t, const int64_t* ids, int64_t count, float* y, const Team& team) {
    for (int64_t i = 0; i < count; i++) check_index(ids[i], t.V);
    team.each(count, t.K * t.bits / 8 * OUTPUTS, [&](int64_t i) { read_row(t, ids[i], y + i * t.K); });
}

// What lays out a tile of a weight of so many bits.
static auto way_of_packing(int64_t bits) {
    switch (bits) {
        case 1: return pack_tile<1>;
        case 2: return pack_tile<2>;
        case 3: return pack_tile<3>;
        case 4: return pack_tile<4>;
        case 6: return pack_tile<6>;
        default: return pack_tile<8>;
    }
}

void pack(
    const uint8_t* rows,
    const uint8_t* values,
    uint8_t* tiles,
    int64_t N,
    int64_t K,
    int64_t group,
    int64_t bits,
    const Team& team) {
    const int64_t bytes = K * bits / 8;
    const int64_t size = K / group * blocks_of(group) * block_bytes(values ? 8 : bits);
    const auto way = way_of_packing(bits);
    team.each(tiles_of(N), bytes * OUTPUTS, [&](int64_t number) {
        const int64_t first = number * OUTPUTS, count = std::min<int64_t>(OUTPUTS, N - first);
        way(rows + first * bytes, count, bytes, K, group, values, tiles + number * size);
    });
}

}  // namespace graftwork
