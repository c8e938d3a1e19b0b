// Weights of few bits, for callers in this process: work is shared out by OpenMP.

#include "quantized.h"

namespace {

struct Team {
    int64_t threads;
    template <class Function>
    void operator()(int64_t count, int64_t, const Function& function) const {
#pragma omp parallel for schedule(static) num_threads(threads) if (count > 1)
        for (int64_t i = 0; i < count; i++) function(i);
    }
};

}  // namespace

extern "C" {

// Rows [N, bytes] of K values of `bits` bits as tiles, see tiles.h. values: what stands for each
// value, then of eight bits, or null.
void pack_tiles(
    const uint8_t* rows,
    const uint8_t* values,
    uint8_t* tiles,
    int64_t N,
    int64_t K,
    int64_t group,
    int64_t bits,
    int64_t threads) {
    const int64_t bytes = K * bits / 8;
    const int64_t size = K / group * blocks_of(group) * block_bytes(values ? 8 : bits);
    Team{threads}(tiles_of(N), size, [=](int64_t tile) {
        const int64_t first = tile * OUTPUTS, count = std::min<int64_t>(OUTPUTS, N - first);
        pack_tile(
            rows + first * bytes, count, bytes, K, group, int(bits), values, tiles + tile * size);
    });
}

// `graftwork.quantized_linear`, rounded, of x [rows, K] with weights in tiles: y [rows, N]. Of
// offset, table and bias each may be null.
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
    int64_t threads) {
    const Weights weights = {
        tiles, scale, offset, table, bias, N, K, group, bits, half_scale != 0, half_offset != 0};
    quantized_products(weights, x, rows, y, Team{threads});
}

// `graftwork.quantized_embedding`: y [count, K]. Of offset and values each may be null.
void quantized_embedding(
    const int64_t* ids,
    const uint8_t* rows,
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
        rows, scale, offset, values, V, K, group, bits, half_scale != 0, half_offset != 0};
    quantized_rows(table, ids, count, y, Team{threads});
}

}
