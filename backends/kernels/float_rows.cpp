// Products of float rows with weights of few bits, see quantized.h.
//
// Weights are read as they are stored and become floats in registers, for all rows of a gang at
// once. Every sum is one chain of fused multiply-adds in one order, whatever rows share the work.

#include "quantized.h"

#include <algorithm>
#include <vector>

#include "tiles.h"

namespace {

using namespace graftwork;

// Rows that share one reading of weights: their chains fit in registers.
constexpr int TOGETHER = Processor::ROWS;

constexpr int CHAINS = 2;  // of each sum, whose values of K take turns

int64_t steps_of(const Table& w) { return w.K / w.group * blocks_of(w.group) * DEPTH; }

// Rows of x in gangs of at most TOGETHER: of each value of K, with those that fill groups up, the
// gang's one after the other. sums [gang: groups, rows]: of each row's values in a group.
struct Rows {
    int64_t count;
    float* values;
    float* sums;

    int64_t gangs() const { return (count + TOGETHER - 1) / TOGETHER; }
    // Gangs of about the same size.
    int64_t first(int64_t gang) const { return count * gang / gangs(); }
};

void lay_out_gang(const float* x, const Table& w, const Rows& rows, int64_t gang) {
    const int64_t begin = rows.first(gang), ganged = rows.first(gang + 1) - begin;
    const int64_t depth = blocks_of(w.group) * DEPTH, groups = w.K / w.group;
    for (int64_t r = 0; r < ganged; r++) {
        const float* from = x + (begin + r) * w.K;
        float* to = rows.values + begin * steps_of(w) + r;
        float* sums = rows.sums + begin * groups + r;
        for (int64_t g = 0; g < groups; g++, from += w.group, sums += ganged) {
            float lanes[DEPTH] = {};
            for (int64_t k = 0; k < depth; k++, to += ganged) {
                *to = k < w.group ? from[k] : 0.0f;
                lanes[k % DEPTH] += *to;
            }
            *sums = 0.0f;
            for (float lane : lanes) *sums += lane;
        }
    }
}

#define INLINE inline __attribute__((always_inline))

template <int ROWS>
using Chains = Processor::Real[CHAINS][ROWS];

// Add to chains the products of a step's values of K whose weights are byte J of each output's.
template <int J, int ROWS>
INLINE void add_value(
    Processor::Bytes step, const Processor::Book* book, const float* values, Chains<ROWS>& chains) {
    const Processor::Real weight =
        book ? Processor::look_up<J>(*book, step) : Processor::reals<J>(step);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
        Processor::Real& sum = chains[J % CHAINS][r];
        sum = Processor::fused(weight, Processor::real(values[J * ROWS + r]), sum);
    }
}

template <class Format, bool PAIRED, int ROWS>
INLINE void add_block(
    const uint8_t* block,
    int part,
    const Processor::Book* book,
    const float* values,
    Chains<ROWS>& chains) {
    if (part == 0) Format::ask_ahead(block);
    Processor::Bytes steps[STEPS];
    Format::unpack(block, part, Tables{}, steps);
    if constexpr (PAIRED)
        for (Processor::Bytes& places : steps)
            places = Processor::raised(places, mark(Format::NUMBER), 1 << Format::NUMBER);
#pragma GCC unroll 4
    for (int s = 0; s < STEPS; s++) {
        const float* of_step = values + s * STEP * ROWS;
        add_value<0, ROWS>(steps[s], book, of_step, chains);
        add_value<1, ROWS>(steps[s], book, of_step, chains);
        add_value<2, ROWS>(steps[s], book, of_step, chains);
        add_value<3, ROWS>(steps[s], book, of_step, chains);
    }
}

Processor::Real factors(const void* from, bool half, int64_t at, int part) {
    return half ? Processor::reals((const uint16_t*)from + at, part)
                : Processor::reals((const float*)from + at, part);
}

struct Tile {
    const uint8_t* weights;  // [groups, blocks]
    const Table* of;
    const float* bias;
    int64_t number;
};

// The part's totals of a gang, and a bias, to the tile's columns of y.
template <int ROWS>
void give(const Tile& tile, int part, const Processor::Real (&totals)[ROWS], float* y) {
    constexpr int WIDTH = OUTPUTS / Processor::PARTS;
    const int64_t outputs = tile.of->V, begin = tile.number * OUTPUTS + part * WIDTH;
    const int64_t count = std::max<int64_t>(0, std::min<int64_t>(WIDTH, outputs - begin));
    for (int r = 0; r < ROWS; r++) {
        float found[OUTPUTS];
        Processor::store(found, part, totals[r]);
        const float* const own = found + part * WIDTH;
        float* const to = y + r * outputs + begin;
        for (int64_t n = 0; n < count; n++)
            to[n] = tile.bias ? own[n] + tile.bias[begin + n] : own[n];
    }
}

// Products of a gang of ROWS rows, from its first one on, with a tile: of y the tile's columns.
template <class Format, Looked LOOKED, int ROWS>
__attribute__((noinline)) void tile_products(
    const Tile& tile, const Rows& rows, int64_t first, float* y) {
    const Table& w = *tile.of;
    const int64_t groups = w.K / w.group, blocks = blocks_of(w.group);
    const float* sums = rows.sums + first * groups;
    const float zero = w.offset ? 0.0f : -float(1 << (w.bits - 1));
    constexpr bool BOOK = LOOKED != NOT;
    const int entries = LOOKED == IN_PAIRS ? 2 << w.bits : 1 << w.bits;
    const int64_t each = w.books.count > 1 ? tiles_of(w.V) / w.books.count : tiles_of(w.V);
    const float* const from = BOOK ? w.values + tile.number / each * entries : nullptr;
    const Processor::Book known = Processor::book(from, entries);
    const Processor::Book* const book = BOOK ? &known : nullptr;
    for (int part = 0; part < Processor::PARTS; part++) {
        const float* values = rows.values + first * steps_of(w);
        const uint8_t* block = tile.weights;
        Processor::Real totals[ROWS];
        for (auto& total : totals) total = Processor::real(0.0f);
        for (int64_t g = 0; g < groups; g++) {
            Chains<ROWS> chains;
#pragma GCC unroll 32
            for (int i = 0; i < CHAINS * ROWS; i++)
                chains[i / ROWS][i % ROWS] = Processor::real(0.0f);
            for (int64_t b = 0; b < blocks; b++, block += Format::BLOCK, values += DEPTH * ROWS)
                add_block<Format, LOOKED == IN_PAIRS, ROWS>(block, part, book, values, chains);
            const int64_t at = (tile.number * groups + g) * OUTPUTS;
            const Processor::Real scale = factors(w.scale, w.half_scale, at, part);
            for (int r = 0; r < ROWS; r++) {
                const Processor::Real sum = Processor::real(sums[g * ROWS + r]);
                Processor::Real found = Processor::sum(chains[0][r], chains[1][r]);
                if (!BOOK && !w.offset)
                    found = Processor::fused(Processor::real(zero), sum, found);
                totals[r] = Processor::fused(found, scale, totals[r]);
                if (w.offset)
                    totals[r] = Processor::fused(
                        sum, factors(w.offset, w.half_offset, at, part), totals[r]);
            }
        }
        give<ROWS>(tile, part, totals, y + first * w.V);
    }
}

template <class Format, Looked LOOKED, int ROWS = TOGETHER>
void tile_products_of(int64_t count, const Tile& tile, const Rows& rows, int64_t first, float* y) {
    if constexpr (ROWS > 1)
        if (count < ROWS)
            return tile_products_of<Format, LOOKED, ROWS - 1>(count, tile, rows, first, y);
    tile_products<Format, LOOKED, ROWS>(tile, rows, first, y);
}

// Products of all rows with a tile, whose weights stay near meanwhile.
template <int BITS, Looked LOOKED>
void every_row(const Tile& tile, const Rows& rows, float* y) {
    for (int64_t gang = 0; gang < rows.gangs(); gang++) {
        const int64_t first = rows.first(gang);
        tile_products_of<Packed<BITS, NOT>, LOOKED>(
            rows.first(gang + 1) - first, tile, rows, first, y);
    }
}

typedef void (*EveryRow)(const Tile&, const Rows&, float*);

EveryRow every_row_of(int64_t bits, Looked looked) {
    const bool book = looked != NOT;
    switch (looked == IN_PAIRS ? 16 + bits : bits) {
        case 1: return book ? every_row<1, IN_TABLE> : every_row<1, NOT>;
        case 2: return book ? every_row<2, IN_TABLE> : every_row<2, NOT>;
        case 3: return book ? every_row<3, IN_TABLE> : every_row<3, NOT>;
        case 4: return book ? every_row<4, IN_TABLE> : every_row<4, NOT>;
        case 6: return book ? every_row<6, IN_TABLE> : every_row<6, NOT>;
        case 8: return book ? every_row<8, IN_TABLE> : every_row<8, NOT>;
        case 16 + 4: return every_row<4, IN_PAIRS>;
    }
    throw std::invalid_argument("no tiles of " + std::to_string(bits) + " bits");
}

}  // namespace

namespace graftwork {

void float_products(
    const Table& w, const float* bias, const float* x, int64_t count, float* y, const Team& team) {
    // Of the calling thread: other threads' steps have their own.
    static thread_local std::vector<float> values, sums;
    const EveryRow every_row = every_row_of(w.bits, !w.values ? NOT : w.books.paired ? IN_PAIRS : IN_TABLE);
    const int64_t size = w.K / w.group * blocks_of(w.group) * block_bytes(w.bits);
    values.resize(count * steps_of(w));
    sums.resize(count * (w.K / w.group));
    const Rows rows = {count, values.data(), sums.data()};
    team.each(rows.gangs(), TOGETHER * w.K * int64_t(sizeof(float)), [&](int64_t gang) {
        lay_out_gang(x, w, rows, gang);
    });
    team.each(tiles_of(w.V), size * rows.gangs(), [&](int64_t number) {
        every_row(Tile{w.tiles + number * size, &w, bias, number}, rows, y);
    });
}

}  // namespace graftwork
