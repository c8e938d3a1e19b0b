// Weights of few bits, laid out in tiles of 16 outputs.
//
// A weight is a row of whole numbers q of `bits` bits for each output. As it is stored, a row is
// one stream of bits along K, little endian. Kernels want the 16 outputs of a tile side by side:
//
//   weights  [tiles, groups, blocks]   a block: 16 values of K of 16 outputs, 32 * bits bytes
//   scales   [tiles, groups, 16]       offsets likewise
//
// Outputs are filled up to a multiple of 16 with zeros, and the values of a group to a multiple of
// 16 likewise. In a block lie four steps of 64 bytes; a step has four values of K of each output,
// an output's side by side. With fewer bits than eight a byte holds the same place of several
// steps:
//
//   8 bits   four vectors, a step each
//   4 bits   two vectors: steps 0 and 2 in the low halves of their bytes, 1 and 3 in the high ones
//   2 bits   a vector: steps 0 to 3 in bits 0-1, 2-3, 4-5, 6-7 of its bytes
//   6 bits   the low four bits as of 4 bits, then the high two as of 2 bits
//   1 bit    half a vector: of its byte i bits 0-3 belong to steps 0-3 of place i, bits 4-7 to those
//            of place i + 32
//   3 bits   the low two bits as of 2 bits, then the highest ones as of 1 bit

#pragma once

#include <algorithm>

#include "processor.h"

namespace {

constexpr int STEPS = 4;              // of a block
constexpr int DEPTH = STEP * STEPS;   // values of K of a block

constexpr int64_t block_bytes(int64_t bits) { return bits * DEPTH * OUTPUTS / 8; }

constexpr int64_t blocks_of(int64_t group) { return (group + DEPTH - 1) / DEPTH; }

constexpr int64_t tiles_of(int64_t outputs) { return (outputs + OUTPUTS - 1) / OUTPUTS; }

// Up to eight values from `first` on of a row of `bytes` bytes, one a byte.
template <int bits>
uint64_t eight_values(const uint8_t* row, int64_t bytes, int64_t first) {
    const int64_t begin = first * bits / 8;
    uint64_t word = 0, found = 0;
    if (bytes - begin >= 8)
        std::memcpy(&word, row + begin, 8);
    else
        for (int64_t i = begin; i < bytes; i++) word |= uint64_t(row[i]) << 8 * (i - begin);
    if (bits == 8) return word;
    word >>= first * bits % 8;
    for (int i = 0; i < 8; i++) found |= (word >> i * bits & ((1u << bits) - 1)) << 8 * i;
    return found;
}

// Of a value's bits, those that lie in whole vectors.
constexpr int low_bits(int bits) { return bits == 6 ? 4 : bits == 3 ? 2 : bits == 1 ? 0 : bits; }

// Steps [4, 64] as a block.
template <int bits>
void pack_block(const uint8_t (&steps)[STEPS][VECTOR], uint8_t* block) {
    constexpr int low = low_bits(bits), each = low ? 8 / low : STEPS;
    for (int v = 0; low && v < STEPS / each; v++)
        for (int i = 0; i < VECTOR; i++) {
            int byte = 0;
            for (int s = 0; s < each; s++)
                byte |= (steps[v * each + s][i] & ((1 << low) - 1)) << s * low;
            *block++ = uint8_t(byte);
        }
    for (int i = 0; bits == 6 && i < VECTOR; i++) {
        int byte = 0;
        for (int s = 0; s < STEPS; s++) byte |= steps[s][i] >> 4 << 2 * s;
        *block++ = uint8_t(byte);
    }
    for (int i = 0; bits % 2 && i < VECTOR / 2; i++) {
        int byte = 0;
        for (int s = 0; s < STEPS; s++)
            byte |= steps[s][i] >> low << s | steps[s][i + VECTOR / 2] >> low << (4 + s);
        *block++ = uint8_t(byte);
    }
}

// The value in a place of 64 of a block's step.
inline int value_in(const uint8_t* block, int bits, int step, int place) {
    const int low = low_bits(bits), each = low ? 8 / low : STEPS, half = VECTOR / 2;
    int q = 0;
    if (low) q = block[step / each * VECTOR + place] >> step % each * low & ((1 << low) - 1);
    if (bits == 6) q |= (block[2 * VECTOR + place] >> 2 * step & 3) << 4;
    if (bits % 2)
        q |= (block[low / 2 * VECTOR + place % half] >> (step + place / half * 4) & 1) << low;
    return q;
}

// A tile [groups, blocks] of rows [count <= 16, bytes] of K values of `bits` bits. values: what
// stands for each q in the tile, then of eight bits, or null for q itself.
template <int bits>
void pack_tile(
    const uint8_t* rows,
    int64_t count,
    int64_t bytes,
    int64_t K,
    int64_t group,
    const uint8_t* values,
    uint8_t* tile) {
    const int64_t size = block_bytes(values ? 8 : bits);
    for (int64_t g = 0; g < K; g += group)
        for (int64_t first = g; first < g + group; first += DEPTH, tile += size) {
            uint8_t steps[STEPS][VECTOR] = {};
            const int64_t depth = std::min<int64_t>(DEPTH, g + group - first);
            for (int64_t n = 0; n < count; n++)
                for (int64_t k = 0; k < depth; k += 8) {
                    uint8_t found[8];
                    const uint64_t word = eight_values<bits>(rows + n * bytes, bytes, first + k);
                    std::memcpy(found, &word, 8);
                    for (int i = 0; values && i < 8; i++) found[i] = values[found[i]];
                    if (depth - k >= 8) {
                        std::memcpy(&steps[k / STEP][n * STEP], found, STEP);
                        std::memcpy(&steps[k / STEP + 1][n * STEP], found + STEP, STEP);
                        continue;
                    }
                    for (int64_t i = 0; k + i < depth; i++)
                        steps[(k + i) / STEP][n * STEP + i % STEP] = found[i];
                }
            values ? pack_block<8>(steps, tile) : pack_block<bits>(steps, tile);
        }
}

// What becomes of the numbers of a block: nothing, each is looked up in a table, or in one of two by
// what is beside it.
enum Looked { NOT, IN_TABLE, IN_PAIRS };

// Tables of a weight's codes.
struct Tables {
    Processor::Bytes first, second;
};

constexpr int mark(int bits) { return 1 << (bits - 1); }  // a code beside which another is looked up

// How a block becomes four steps of weights, a byte each.
template <int BITS, Looked LOOKED>
struct Packed {
    typedef Processor::Bytes Bytes;
    static constexpr int NUMBER = BITS;
    static constexpr int64_t BLOCK = block_bytes(BITS);
    static constexpr bool WIDE = LOOKED != NOT || BITS == 8;
    // Bytes between the weights in use and those asked for. Of eight bits the memory alone limits
    // the speed, and the second cache has more places for what is on its way; otherwise the time
    // in which they come from there shows, too.
    static constexpr int64_t AHEAD = BITS == 8 ? 4096 : 6144;

    static void ask_ahead(const uint8_t* block) {
        for (int64_t line = 0; line < BLOCK; line += 64)
            __builtin_prefetch(block + AHEAD + line, 0, BITS == 8 ? 2 : 3);
    }

    template <int S>
    static Bytes step(const uint8_t* block, int part) {
        if constexpr (BITS == 8) {
            return Processor::bytes(block + S * VECTOR, part);
        } else if constexpr (BITS == 4) {
            return Processor::bits<S % 2 * 4>(Processor::bytes(block + S / 2 * VECTOR, part), 15);
        } else if constexpr (BITS == 2) {
            return Processor::bits<S * 2>(Processor::bytes(block, part), 3);
        } else if constexpr (BITS == 6) {
            const Bytes high = Processor::bytes(block + 2 * VECTOR, part);
            return Processor::both(
                Packed<4, NOT>::step<S>(block, part), Processor::bits<S * 2 - 4>(high, 48));
        } else if constexpr (BITS == 1) {
            return Processor::bits<S>(Processor::halves(block, part), 1);
        } else {
            const Bytes high = Processor::halves(block + VECTOR, part);
            return Processor::both(
                Packed<2, NOT>::step<S>(block, part), Processor::bits<S - 2>(high, 4));
        }
    }

    static void unpack(const uint8_t* block, int part, const Tables& tables, Bytes (&steps)[STEPS]) {
        steps[0] = step<0>(block, part);
        steps[1] = step<1>(block, part);
        steps[2] = step<2>(block, part);
        steps[3] = step<3>(block, part);
        if constexpr (LOOKED == IN_TABLE)
            for (Bytes& places : steps) places = Processor::look_up(tables.first, places);
        if constexpr (LOOKED == IN_PAIRS)
            for (Bytes& places : steps)
                places = Processor::look_up(tables.first, tables.second, places, mark(BITS));
    }
};

}  // namespace
