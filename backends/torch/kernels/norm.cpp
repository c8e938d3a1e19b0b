// Norms over the last axis. A row's result has the same bits alone and among others.

#include "lanes.h"

namespace {

// y = (x - mean) / sqrt(mean of squares + eps) * weight + bias; the mean is 0 unless centered.
void norm_row(
    const float* x,
    const float* weight,
    const float* bias,
    float* y,
    int64_t K,
    bool centered,
    float eps) {
    float mean = 0;
    if (centered) {
        Lanes sums[1] = {};
        for (int64_t k = 0; k < K; k += LANES) sums[0] += load<Lanes>(x + k, K - k);
        mean = add_up(sums)[0] / K;
    }
    Lanes squares[1] = {};
    int64_t k = 0;
    for (; k + LANES <= K; k += LANES) {
        const Lanes value = load<Lanes>(x + k) - mean;
        squares[0] += value * value;
    }
    for (; k < K; k++) squares[0][0] += (x[k] - mean) * (x[k] - mean);
    const float scale = 1 / std::sqrt(add_up(squares)[0] / K + eps);
    for (k = 0; k < K; k++) y[k] = (x[k] - mean) * scale * weight[k];
    if (bias)
        for (k = 0; k < K; k++) y[k] += bias[k];
}

}  // namespace

extern "C" {

// Norms of rows x [rows, K], or of x + residual, which then goes into `total`.
void norm(
    const float* x,
    const float* residual,
    const float* weight,
    const float* bias,
    float* total,
    float* y,
    int64_t rows,
    int64_t K,
    int64_t centered,
    const float* eps,
    int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float* values = x + row * K;
        if (residual) {
            for (int64_t i = row * K; i < (row + 1) * K; i++) total[i] = x[i] + residual[i];
            values = total + row * K;
        }
        norm_row(values, weight, bias, y + row * K, K, centered, *eps);
    }
}

}
