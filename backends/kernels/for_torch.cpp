// The kernels of weights of few bits for callers in this process, such as torch: addresses and whole
// numbers.

#include "door.h"
#include "processor.h"
#include "quantized.h"

using namespace graftwork;

extern "C" {

// What products of bytes are made of.
const char* processor() { return Processor::NAME; }

void pack_tiles(
    const uint8_t* rows,
    const uint8_t* values,
    uint8_t* tiles,
    int64_t N,
    int64_t K,
    int64_t group,
    int64_t bits,
    int64_t threads) {
    pack(rows, values, tiles, N, K, group, bits, Threads(threads));
}

// y [rows, N] = x [rows, K] with weights in tiles. Of offset, book [books, length] and bias each may be
// null. book: what stands for each q, int8_t if x is rounded, else float.
void product(
    const float* x,
    const uint8_t* tiles,
    const void* scale,
    const void* offset,
    const void* book,
    const float* bias,
    float* y,
    int64_t rows,
    int64_t N,
    int64_t K,
    int64_t group,
    int64_t bits,
    int64_t half_scale,
    int64_t half_offset,
    int64_t books,
    int64_t length,
    int64_t rounded,
    int64_t span,
    int64_t threads) {
    const bool halves[] = {half_scale != 0, half_offset != 0};
    const Books of = Books::of(books, length, rounded ? 16 : int64_t(1) << bits, bits, group);
    if (rounded) {
        const Weights weights = {
            tiles, scale, offset, static_cast<const int8_t*>(book), bias, N, K, group, bits,
            halves[0], halves[1], of, checked_span(span, K, group)};
        return products(weights, x, rows, y, Threads(threads));
    }
    const Table table = {
        tiles, scale, offset, static_cast<const float*>(book), N, K, group, bits, halves[0], halves[1],
        of};
    float_products(table, bias, x, rows, y, Threads(threads));
}

// y [count, choices, R]: rows with the weights of chosen experts. Of offset and bias each may be
// null; each: x has a row for each choice.
void quantized_experts(
    const float* x,
    const int64_t* chosen,
    const uint8_t* tiles,
    const void* scale,
    const void* offset,
    const float* bias,
    float* y,
    int64_t count,
    int64_t choices,
    int64_t each,
    int64_t experts,
    int64_t R,
    int64_t K,
    int64_t group,
    int64_t bits,
    int64_t half_scale,
    int64_t half_offset,
    int64_t rounded,
    int64_t span,
    int64_t threads) {
    const Table weights = {
        tiles, scale, offset, nullptr, R, K, group, bits, half_scale != 0, half_offset != 0, {}};
    const Choices choice = {chosen, count, choices, experts, each != 0};
    expert_products(weights, bias, choice, x, rounded != 0, checked_span(span, K, group), y, Threads(threads));
}

// y [count, K]: rows of a table [V, K] in tiles. Of offset and values each may be null.
void quantized_embedding(
    const int64_t* ids,
    const uint8_t* tiles,
    const void* scale,
    const void* offset,
    const float* values,
    float* y,
    int64_t count,
    int64_t V,
    int64_t K,
    int64_t group,
    int64_t bits,
    int64_t half_scale,
    int64_t half_offset,
    int64_t threads) {
    const Table table = {
        tiles, scale, offset, values, V, K, group, bits, half_scale != 0, half_offset != 0, {}};
    rows_of(table, ids, count, y, Threads(threads));
}

}
