// What quantized.h promises.
//
// A step of decoding has a few rows and reads every weight once: its time is that of the memory. Of
// a prompt's many rows, eight or so use each weight that is unpacked, and the others find the tile
// near; keeping it unpacked for them gains nothing.

#include "quantized.h"

#include <stdexcept>
#include <string>
#include <vector>

#include "tiles.h"

namespace {

using namespace graftwork;

constexpr int TOGETHER = Processor::ROWS;  // that share one reading of weights

int64_t blocks_of(const Weights& w) { return blocks_of(w.group); }  // of a group

int64_t tile_bytes(const Weights& w) { return w.groups() * blocks_of(w) * block_bytes(w.bits); }

// The tables of a tile of a weight, of unsigned bytes.
Tables tables_of(const Weights& w, int64_t tile) {
    uint8_t bytes[2][OUTPUTS] = {};
    const int several = w.books.paired ? 2 : 1;
    const int64_t each = w.books.count > 1 ? tiles_of(w.N) / w.books.count : tiles_of(w.N);
    for (int half = 0; w.table && half < several; half++)
        for (int i = 0; i < OUTPUTS; i++)
            bytes[half][i] =
                uint8_t(w.table[(tile / each * several + half) * OUTPUTS + i] + 128);
    return {Processor::table(bytes[0]), Processor::table(bytes[1])};
}

// What products are to have added for each value of x, because bytes stand for weights.
int32_t start_of(const Weights& w) {
    const int32_t zero = w.table ? 128 : w.offset ? 0 : 1 << (w.bits - 1);
    return (w.table || w.bits == 8 ? Processor::LEFT<true> : Processor::LEFT<false>) - zero;
}

// Rows of x as bytes, in gangs of at most TOGETHER: of each step of K the gang's rows one after the
// other. sums [gang: groups, rows]: of each row's values in a group; starts: what sums of products
// begin with, so that the weights' zero comes off them. scales [rows].
struct Rows {
    int64_t count, steps;  // steps of K, with those that fill groups up
    int8_t* values;
    int32_t* starts;
    float* sums;
    float* scales;

    int64_t gangs() const { return (count + TOGETHER - 1) / TOGETHER; }
    // Gangs of about the same size.
    int64_t first(int64_t gang) const { return count * gang / gangs(); }
};

typedef float SixteenFloats __attribute__((vector_size(64)));
typedef int32_t SixteenWhole __attribute__((vector_size(64)));
typedef int8_t SixteenBytes __attribute__((vector_size(16)));

template <class V, class T>
V some(const T* from, int64_t count) {
    constexpr int64_t whole = sizeof(V) / sizeof(T);
    V value = {};
    // A size that is known is a load; another one is a call, and waits for memory to come back.
    if (count >= whole)
        std::memcpy(&value, from, sizeof(V));
    else
        std::memcpy(&value, from, count * sizeof(T));
    return value;
}

// The scale of a row: its largest absolute value is 127 steps. No number if one of its values is
// infinite or no number.
float scale_of(const float* x, int64_t K) {
    SixteenWhole most = {};
    for (int64_t k = 0; k < K; k += OUTPUTS) {
        // Of positive floats the larger one has the larger bits.
        const SixteenWhole size = some<SixteenWhole>(x + k, K - k) & 0x7fffffff;
        most = size > most ? size : most;
    }
    int32_t bits = 0;
    for (int lane = 0; lane < OUTPUTS; lane++) bits = std::max(bits, most[lane]);
    float largest;
    std::memcpy(&largest, &bits, sizeof(largest));
    if (bits >= 0x7f800000) return std::nanf("");
    const float scale = largest / 127.0f;
    return scale > 0 ? scale : 1.0f;
}

// Round a row of x [K], one of `ganged` whose values, sums and starts these are.
void round_row(
    const float* x,
    float scale,
    const Weights& w,
    int64_t ganged,
    int8_t* values,
    float* sums,
    int32_t* starts) {
    constexpr float magic = 12582912.0f;  // what has no room for fractions: halves go to even
    const bool fine = scale > 0;
    const SixteenFloats by = SixteenFloats{} + (fine ? scale : 1.0f);
    const SixteenFloats most = SixteenFloats{} + 127.0f;
    const int32_t start = start_of(w);
    for (int64_t g = 0; g < w.K; g += w.group, sums += ganged, starts += ganged) {
        SixteenWhole total = {};
        for (int64_t k = g; k < g + w.group; k += DEPTH, values += ganged * DEPTH) {
            SixteenFloats value = some<SixteenFloats>(x + k, g + w.group - k) / by;
            value = value > most ? most : value < -most ? -most : value;
            value = (value + magic) - magic;
            const SixteenWhole whole =
                fine ? __builtin_convertvector(value, SixteenWhole) : SixteenWhole{};
            total += whole;
            const SixteenBytes bytes = __builtin_convertvector(whole, SixteenBytes);
            for (int s = 0; s < STEPS; s++)
                std::memcpy(values + s * ganged * STEP, (const char*)&bytes + s * STEP, STEP);
        }
        int32_t all = 0;
        for (int lane = 0; lane < OUTPUTS; lane++) all += total[lane];
        *sums = float(all);
        *starts = start * all;
    }
}

void round_gang(const float* x, const Weights& w, const Rows& rows, int64_t gang) {
    const int64_t begin = rows.first(gang), ganged = rows.first(gang + 1) - begin;
    const int64_t at = begin * w.groups();
    int8_t* values = rows.values + begin * rows.steps * STEP;
    for (int64_t r = 0; r < ganged; r++) {
        const float* row = x + (begin + r) * w.K;
        const float scale = rows.scales[begin + r] = scale_of(row, w.K);
        round_row(
            row, scale, w, ganged, values + r * STEP, rows.sums + at + r, rows.starts + at + r);
    }
}

Processor::Real reals(const void* from, bool half, int64_t at, int part) {
    return half ? Processor::reals((const uint16_t*)from + at, part)
                : Processor::reals((const float*)from + at, part);
}

struct Tile {
    const uint8_t* weights;  // [groups, blocks]
    const Weights* of;
    int64_t number;
};

#define INLINE inline __attribute__((always_inline))

// Sums of products: of each part of a tile's outputs those of ROWS rows.
template <class Sum, int ROWS>
using Sums = Sum[Processor::PARTS][ROWS];

// Add the products of a block to sums; a step's to those after the step's before it.
template <class Format, int ROWS, int CHAINS>
INLINE void add_block(
    const uint8_t* block,
    const int8_t* values,
    const Tables& tables,
    Sums<Processor::Whole, ROWS> (&chains)[CHAINS]) {
    Format::ask_ahead(block);
#pragma GCC unroll 2
    for (int part = 0; part < Processor::PARTS; part++) {
        Processor::Bytes steps[STEPS];
        Format::unpack(block, part, tables, steps);
#pragma GCC unroll 32
        for (int i = 0; i < STEPS * ROWS; i++)
            Processor::add<Format::WIDE>(
                chains[i / ROWS % CHAINS][part][i % ROWS], steps[i / ROWS], values + i * STEP);
    }
}

// The products of a group, added up from where the rows start.
template <class Format, int ROWS>
INLINE void add_group(
    const uint8_t* block,
    const int8_t* values,
    const int32_t* starts,
    int64_t blocks,
    const Tables& tables,
    Sums<Processor::Whole, ROWS>& sums) {
    // A sum waits for the one before it; a few rows have too few of them to fill the time.
    constexpr int CHAINS = std::max(1, std::min(STEPS, Processor::CHAINS / ROWS));
    constexpr int EACH = Processor::PARTS * ROWS;
    Sums<Processor::Whole, ROWS> chains[CHAINS];
#pragma GCC unroll 32
    for (int i = 0; i < CHAINS * EACH; i++)
        chains[i / EACH][i % EACH / ROWS][i % ROWS] =
            i < EACH ? Processor::whole(starts[i % ROWS]) : Processor::whole(0);
    for (int64_t b = 0; b < blocks; b++)
        add_block<Format, ROWS>(
            block + b * Format::BLOCK, values + b * DEPTH * ROWS, tables, chains);
#pragma GCC unroll 32
    for (int i = 0; i < EACH; i++) sums[i / ROWS][i % ROWS] = chains[0][i / ROWS][i % ROWS];
#pragma GCC unroll 32
    for (int i = EACH; i < CHAINS * EACH; i++) {
        Processor::Whole& sum = sums[i % EACH / ROWS][i % ROWS];
        sum = Processor::sum(sum, chains[i / EACH][i % EACH / ROWS][i % ROWS]);
    }
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

// Products of a gang of ROWS rows, from its first one on, with a tile: of y the tile's columns.
template <class Format, int ROWS>
__attribute__((noinline)) void tile_products(
    const Tile& tile, const Rows& rows, int64_t first, float* y) {
    const Weights& w = *tile.of;
    const int64_t groups = w.groups(), blocks = blocks_of(w);
    const int8_t* values = rows.values + first * rows.steps * STEP;
    const int32_t* starts = rows.starts + first * groups;
    const float* sums = rows.sums + first * groups;
    const Tables tables = tables_of(w, tile.number);
    Sums<Processor::Real, ROWS> totals;
#pragma GCC unroll 32
    for (int i = 0; i < Processor::PARTS * ROWS; i++)
        totals[i / ROWS][i % ROWS] = Processor::real(0.0f);
    for (int64_t g = 0; g < groups; g++) {
        const uint8_t* block = tile.weights + g * blocks * Format::BLOCK;
        const int64_t at = (tile.number * groups + g) * OUTPUTS;
        Sums<Processor::Whole, ROWS> found;
        add_group<Format, ROWS>(
            block, values + g * blocks * DEPTH * ROWS, starts + g * ROWS, blocks, tables, found);
        const auto product = [&](int part, int r) { return Processor::real(found[part][r]); };
        const auto sum = [&](int, int r) { return Processor::real(sums[g * ROWS + r]); };
        add_scaled<ROWS>(product, w.scale, w.half_scale, at, totals);
        if (w.offset) add_scaled<ROWS>(sum, w.offset, w.half_offset, at, totals);
    }
    give<ROWS>(tile, rows.scales + first, totals, y + first * w.N);
}

template <class Format, int ROWS = TOGETHER>
void tile_products_of(int64_t count, const Tile& tile, const Rows& rows, int64_t first, float* y) {
    if constexpr (ROWS > 1)
        if (count < ROWS) return tile_products_of<Format, ROWS - 1>(count, tile, rows, first, y);
    tile_products<Format, ROWS>(tile, rows, first, y);
}

// Products of all rows with a tile, whose weights stay near meanwhile.
template <class Format>
void every_row(const Tile& tile, const Rows& rows, float* y) {
    for (int64_t gang = 0; gang < rows.gangs(); gang++) {
        const int64_t first = rows.first(gang);
        tile_products_of<Format>(rows.first(gang + 1) - first, tile, rows, first, y);
    }
}

typedef void (*EveryRow)(const Tile&, const Rows&, float*);

EveryRow every_row_of(int64_t bits, Looked looked) {
    switch (bits + 16 * looked) {
        case 1: return every_row<Packed<1, NOT>>;
        case 2: return every_row<Packed<2, NOT>>;
        case 3: return every_row<Packed<3, NOT>>;
        case 4: return every_row<Packed<4, NOT>>;
        case 6: return every_row<Packed<6, NOT>>;
        case 8: return every_row<Packed<8, NOT>>;
        case 16 * IN_TABLE + 1: return every_row<Packed<1, IN_TABLE>>;
        case 16 * IN_TABLE + 2: return every_row<Packed<2, IN_TABLE>>;
        case 16 * IN_TABLE + 3: return every_row<Packed<3, IN_TABLE>>;
        case 16 * IN_TABLE + 4: return every_row<Packed<4, IN_TABLE>>;
        case 16 * IN_PAIRS + 4: return every_row<Packed<4, IN_PAIRS>>;
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
    static thread_local std::vector<float> sums, scales;
    static thread_local std::vector<Rows> rows;
    static thread_local std::vector<int64_t> gangs;  // those of jobs before each
    const Weights& alike = jobs->weights;
    const EveryRow every_row = every_row_of(
        alike.bits, !alike.table ? NOT : alike.books.paired ? IN_PAIRS : IN_TABLE);
    const int64_t groups = alike.groups(), steps = groups * blocks_of(alike) * STEPS;
    const int64_t size = tile_bytes(alike), tiles = tiles_of(alike.N);
    int64_t count = 0, most = 0;
    for (int64_t i = 0; i < number; i++) count += jobs[i].count;
    values.resize(count * steps * STEP);
    starts.resize(count * groups);
    sums.resize(count * groups);
    scales.resize(count);
    rows.clear();
    gangs.assign(1, 0);
    int64_t before = 0;
    for (int64_t i = 0; i < number; before += jobs[i++].count) {
        rows.push_back(
            {jobs[i].count, steps, values.data() + before * steps * STEP,
             starts.data() + before * groups, sums.data() + before * groups,
             scales.data() + before});
        gangs.push_back(gangs.back() + rows.back().gangs());
        most = std::max(most, rows.back().gangs());
    }
    const Rows* const all = rows.data();
    const int64_t *const first = gangs.data(), *const last = first + number;
    team.each(*last, TOGETHER * alike.K * int64_t(sizeof(float)), [=](int64_t gang) {
        const int64_t job = std::upper_bound(first, last, gang) - first - 1;
        round_gang(jobs[job].x, jobs[job].weights, all[job], gang - first[job]);
    });
    team.each(number * tiles, size * most, [=](int64_t place) {
        const Job& job = jobs[place / tiles];
        const int64_t tile = place % tiles;
        every_row(
            Tile{job.weights.tiles + tile * size, &job.weights, tile}, all[place / tiles], job.y);
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
    team.each(tiles_of(N), bytes * OUTPUTS, [&](int64_t number) {
        const int64_t first = number * OUTPUTS, count = std::min<int64_t>(OUTPUTS, N - first);
        pack_tile(
            rows + first * bytes, count, bytes, K, group, int(bits), values, tiles + number * size);
    });
}

}  // namespace graftwork
