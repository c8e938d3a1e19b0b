// The kernels for callers in this process, such as torch: addresses and whole numbers.

#include "attention.h"
#include "conv.h"
#include "processor.h"
#include "quantized.h"
#include "recurrent.h"

using namespace graftwork;

namespace {

struct Threads final : Team {
    int64_t count;
    explicit Threads(int64_t count) : count(count) {}
    int64_t threads() const override { return count; }
    void each(int64_t number, int64_t, const Work& work) const override {
        // Not a region of one thread: OpenMP would let the team of the last region go.
        if (number == 1) return work(0);
#pragma omp parallel for schedule(static) num_threads(count)
        for (int64_t i = 0; i < number; i++) work(i);
    }
};

}  // namespace

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

// y [rows, N] = x [rows, K] with weights in tiles. Of offset, table and bias each may be null.
void quantized_linear(
    const float* x,
    const uint8_t* tiles,
    const void* scale,
    const void* offset,
    const int8_t* table,
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
    int64_t paired,
    int64_t threads) {
    const Weights weights = {
        tiles, scale, offset, table, bias, N, K, group, bits, half_scale != 0, half_offset != 0,
        {books, paired != 0}};
    products(weights, x, rows, y, Threads(threads));
}

// The same, x not rounded. values [books, entries]: what stands for each q, or null.
void float_linear(
    const float* x,
    const uint8_t* tiles,
    const void* scale,
    const void* offset,
    const float* values,
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
    int64_t paired,
    int64_t threads) {
    const Table weights = {
        tiles, scale, offset, values, N, K, group, bits, half_scale != 0, half_offset != 0,
        {books, paired != 0}};
    float_products(weights, bias, x, rows, y, Threads(threads));
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
    int64_t threads) {
    const Table weights = {
        tiles, scale, offset, nullptr, R, K, group, bits, half_scale != 0, half_offset != 0, {}};
    const Choices choice = {chosen, count, choices, experts, each != 0};
    expert_products(weights, bias, choice, x, rounded != 0, y, Threads(threads));
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

// See `Recurrence`. Of ancestors and beta each may be null.
void linear_attention_step(
    const float* state,
    const float* keys,
    const float* values,
    const float* decays,
    const int64_t* folded,
    const int64_t* past,
    const int64_t* certain,
    const uint8_t* ancestors,
    const float* q,
    const float* k,
    const float* v,
    const float* g,
    const float* beta,
    float* y,
    float* new_state,
    float* new_keys,
    float* new_values,
    float* new_decays,
    int64_t B,
    int64_t H,
    int64_t G,
    int64_t T,
    int64_t K,
    int64_t V,
    int64_t D,
    int64_t W,
    int64_t threads) {
    const Recurrence given = {
        state, keys, values,    decays,   folded,     past,       certain, ancestors, q, k, v, g,
        beta,  y,    new_state, new_keys, new_values, new_decays, B,       H,         G, T, K, V,
        D,     W,    nullptr,   nullptr,  nullptr,    nullptr};
    step(given, Threads(threads));
}

// The same of a state in 8 bits.
void linear_attention_step_int8(
    const int8_t* codes,
    const float* scale,
    const float* keys,
    const float* values,
    const float* decays,
    const int64_t* folded,
    const int64_t* past,
    const int64_t* certain,
    const uint8_t* ancestors,
    const float* q,
    const float* k,
    const float* v,
    const float* g,
    const float* beta,
    float* y,
    int8_t* new_codes,
    float* new_scale,
    float* new_keys,
    float* new_values,
    float* new_decays,
    int64_t B,
    int64_t H,
    int64_t G,
    int64_t T,
    int64_t K,
    int64_t V,
    int64_t D,
    int64_t W,
    int64_t threads) {
    const Recurrence given = {
        nullptr, keys, values,  decays,   folded,     past,       certain, ancestors, q, k, v, g,
        beta,    y,    nullptr, new_keys, new_values, new_decays, B,       H,         G, T, K, V,
        D,       W,    codes,   scale,    new_codes,  new_scale};
    step(given, Threads(threads));
}

// See `Convolution`. Of ancestors and bias each may be null.
void causal_conv_step(
    const float* history,
    const float* rows,
    const int64_t* folded,
    const int64_t* past,
    const int64_t* certain,
    const uint8_t* ancestors,
    const float* x,
    const float* weight,
    const float* bias,
    float* y,
    float* new_history,
    float* new_rows,
    int64_t B,
    int64_t T,
    int64_t D,
    int64_t N,
    int64_t W,
    int64_t threads) {
    const Convolution given = {history, rows, folded, past, certain, ancestors, x, weight, bias, y,
                               new_history, new_rows, B, T, D, N, W};
    step(given, Threads(threads));
}

// `graftwork.attend`, with a weight `graftwork.attend_part`, and with steps
// `graftwork.attend_quantized`; see attention.h.
void attend(
    const float* q,
    const void* k,
    const void* v,
    const float* k_steps,
    const float* v_steps,
    const uint8_t* mask,
    const float* bias,
    const float* sinks,
    float* out,
    float* weight,
    int64_t B,
    int64_t H,
    int64_t G,
    int64_t T,
    int64_t C,
    int64_t D,
    int64_t E,
    const float* scale,
    const float* softcap,
    int64_t bits,
    int64_t turned,
    int64_t threads) {
    const Masked given = {q,   k, v, k_steps, v_steps, mask, bias,   sinks,    out, weight,
                          B,   H, G, T,       C,       D,    E,      *scale,   *softcap,
                          {bits, turned != 0}};
    attend(given, Threads(threads));
}

// `graftwork.attend_rows`; see attention.h.
void attend_rows(
    const float* q,
    const float* k,
    const float* v,
    const int64_t* rows,
    const float* sinks,
    float* out,
    int64_t B,
    int64_t H,
    int64_t G,
    int64_t R,
    int64_t T,
    int64_t C,
    int64_t D,
    int64_t E,
    int64_t K,
    const float* scale,
    const float* softcap,
    int64_t threads) {
    const Picked given = {q, k, v, rows, sinks, out, B, H, G, R, T, C, D, E, K, *scale, *softcap};
    attend(given, Threads(threads));
}

// `graftwork.quantize_rows` of x [count, width].
void quantize_rows(
    const float* x,
    uint8_t* codes,
    float* steps,
    int64_t count,
    int64_t width,
    int64_t bits,
    int64_t turned) {
    store_rows(x, count, width, {bits, turned != 0}, codes, steps);
}

}
