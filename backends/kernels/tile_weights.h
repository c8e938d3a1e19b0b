// A tile's weights as products with gangs of rows read them: as they are packed, or unpacked once
// for many rows.

#pragma once

#include <cstring>
#include <vector>

#include "quantized.h"
#include "tiles.h"

#define INLINE inline __attribute__((always_inline))

namespace {

using graftwork::Weights;

constexpr int WORD = 4;  // bytes of a row that are multiplied at once

inline int64_t blocks_of(const Weights& w) { return blocks_of(w.unit()); }  // of a unit

struct Tile {
    const uint8_t* weights;  // [units, blocks]
    const Weights* of;
    int64_t number;
};

// The tables of a tile, of unsigned bytes.
inline Tables tables_of(const Weights& w, int64_t tile) {
    uint8_t bytes[2][OUTPUTS] = {};
    const int several = w.books.paired ? 2 : 1;
    const int64_t each = w.books.count > 1 ? tiles_of(w.N) / w.books.count : tiles_of(w.N);
    for (int half = 0; w.table && half < several; half++)
        for (int i = 0; i < OUTPUTS; i++)
            bytes[half][i] =
                uint8_t(w.table[(tile / each * several + half) * OUTPUTS + i] + 128);
    return {Processor::table(bytes[0]), Processor::table(bytes[1])};
}

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

// A tile's weights as they are packed, for gangs of a few rows.
template <class F>
struct AsPacked {
    static constexpr int MOST = Processor::ROWS;  // rows of a gang
    static constexpr int WIDTH = 1;               // bytes of a row's value
    const uint8_t* weights;                       // [units, blocks]
    int64_t blocks;                               // of a unit
    Tables tables;

    explicit AsPacked(const Tile& tile)
        : weights(tile.weights),
          blocks(blocks_of(*tile.of)),
          tables(tables_of(*tile.of, tile.number)) {}

    // The products of a unit, added up from where the rows start.
    template <int ROWS>
    INLINE void add_unit(
        int64_t u,
        const int8_t* values,
        const int32_t* starts,
        Sums<Processor::Whole, ROWS>& sums) const {
        // A sum waits for the one before it; a few rows have too few of them to fill the time.
        constexpr int CHAINS = std::max(1, std::min(STEPS, Processor::CHAINS / ROWS));
        constexpr int EACH = Processor::PARTS * ROWS;
        const uint8_t* const block = weights + u * blocks * F::BLOCK;
        Sums<Processor::Whole, ROWS> chains[CHAINS];
#pragma GCC unroll 32
        for (int i = 0; i < CHAINS * EACH; i++)
            chains[i / EACH][i % EACH / ROWS][i % ROWS] =
                i < EACH ? Processor::whole(starts[i % ROWS]) : Processor::whole(0);
        for (int64_t b = 0; b < blocks; b++)
            add_block<F, ROWS>(block + b * F::BLOCK, values + b * DEPTH * ROWS, tables, chains);
#pragma GCC unroll 32
        for (int i = 0; i < EACH; i++) sums[i / ROWS][i % ROWS] = chains[0][i / ROWS][i % ROWS];
#pragma GCC unroll 32
        for (int i = EACH; i < CHAINS * EACH; i++) {
            Processor::Whole& sum = sums[i % EACH / ROWS][i % ROWS];
            sum = Processor::sum(sum, chains[i / EACH][i % EACH / ROWS][i % ROWS]);
        }
    }
};

// What is multiplied at once of a tile's weights: four bytes of each output.
struct alignas(VECTOR) Line {
    uint8_t at[VECTOR];
};

// Memory of the calling thread for a tile that is unpacked.
inline Line* memory_of(int64_t count) {
    static thread_local std::vector<Line> lines;
    lines.resize(count);
    return lines.data();
}

// A tile's weights unpacked, in memory of the thread: as many bytes as sixteen rows have.
template <class Format, class Many = Processor::ManyOf<Format>>
const Line* unpacked(const Tile& tile) {
    const Tables tables = tables_of(*tile.of, tile.number);
    const int64_t blocks = tile.of->units() * blocks_of(*tile.of);
    Line* const lines = memory_of(blocks * STEPS * Many::WIDTH);
    for (int64_t b = 0; b < blocks; b++) {
        const uint8_t* const block = tile.weights + b * Format::BLOCK;
        Format::ask_ahead(block);
        for (int part = 0; part < Processor::PARTS; part++) {
            Processor::Bytes steps[STEPS];
            Format::unpack(block, part, tables, steps);
            for (int i = 0; i < STEPS * Many::WIDTH; i++) {
                const Processor::Bytes found = Many::unpacked(
                    steps[i / Many::WIDTH], i % Many::WIDTH, Processor::LEFT<Format::WIDE>);
                uint8_t* const to = lines[b * STEPS * Many::WIDTH + i].at;
                std::memcpy(to + part * sizeof(found), &found, sizeof(found));
            }
        }
    }
    return lines;
}

// A tile's weights unpacked, for gangs of many rows.
template <class Many>
struct Unpacked {
    static constexpr int MOST = Processor::MANY_ROWS;
    static constexpr int WIDTH = Many::WIDTH;
    const Line* lines;  // [units, each]
    int64_t each, limit;

    template <int ROWS>
    INLINE void add_unit(
        int64_t u,
        const int8_t* values,
        const int32_t* starts,
        Sums<Processor::Whole, ROWS>& found) const {
        const Line* const first = lines + u * each;
        multiply<ROWS>(first, std::min(limit, each), values, found);
        const auto start = [&](int, int r) { return Processor::whole(starts[r]); };
        add<ROWS>(start, found);
        for (int64_t i = limit; i < each; i += limit) {
            Sums<Processor::Whole, ROWS> more;
            multiply<ROWS>(first + i, std::min(limit, each - i), values + i * ROWS * WORD, more);
            add<ROWS>([&](int part, int r) { return more[part][r]; }, found);
        }
    }

    template <int ROWS, class Value>
    static INLINE void add(const Value& value, Sums<Processor::Whole, ROWS>& sums) {
#pragma GCC unroll 32
        for (int i = 0; i < Processor::PARTS * ROWS; i++) {
            const int part = i / ROWS, r = i % ROWS;
            sums[part][r] = Processor::sum(sums[part][r], value(part, r));
        }
    }

    // Adds the products of a line.
    template <int ROWS>
    static INLINE void multiply(
        const Line* line, const int8_t* values, Sums<Processor::Bytes, ROWS>& sums) {
        constexpr int PARTS = Processor::PARTS;
        Processor::Bytes weights[PARTS];
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) weights[part] = Processor::bytes(line->at, part);
#pragma GCC unroll 32
        for (int i = 0; i < PARTS * ROWS; i++) {
            const int part = i % PARTS, r = i / PARTS;
            Many::add(sums[part][r], weights[part], values + r * WORD);
        }
    }

    // The products of some lines. Not inlined, so that their sums have the registers.
    template <int ROWS>
    static __attribute__((noinline)) void multiply(
        const Line* line,
        int64_t count,
        const int8_t* values,
        Sums<Processor::Whole, ROWS>& found) {
        constexpr int PARTS = Processor::PARTS;
        Sums<Processor::Bytes, ROWS> sums;
#pragma GCC unroll 32
        for (int i = 0; i < PARTS * ROWS; i++) sums[i / ROWS][i % ROWS] = Many::zero();
        for (const Line* const end = line + count; line < end; line++, values += ROWS * WORD)
            multiply<ROWS>(line, values, sums);
#pragma GCC unroll 32
        for (int i = 0; i < PARTS * ROWS; i++)
            found[i / ROWS][i % ROWS] = Many::whole(sums[i / ROWS][i % ROWS]);
    }
};

}  // namespace
