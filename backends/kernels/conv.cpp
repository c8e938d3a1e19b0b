// A step of a causal convolution, a few channels at a time through all its tokens. A token's result
// has the same bits alone and among others.

#include <algorithm>
#include <vector>

#include "door.h"

namespace {

// `graftwork.causal_conv_step`: history [B,N-1,D]; log rows [B,W,D]; folded, past, certain [B];
// ancestors [B,T,T], or null for a chain; x, y [B,T,D]; weight [D,N]; bias [D] or null. What is new
// may lie where the old is.
struct Convolution {
    const float *history, *rows;
    const int64_t *folded, *past, *certain;
    const uint8_t* ancestors;
    const float *x, *weight, *bias;
    float *y, *new_history, *new_rows;
    int64_t B, T, D, N, W;
};

constexpr int64_t CHANNELS = 128;  // that are worked on at once

// Channels [first, first + count) of one sequence.
struct Block {
    const Convolution& given;
    int64_t b, first, count, span;  // span: N - 1
    std::vector<float> rows;        // [N-1+T, count]: what is before the step, and its tokens
    std::vector<float> weight;      // [N, count]

    Block(const Convolution& given, int64_t index)
        : given(given),
          b(index / blocks(given)),
          first(index % blocks(given) * CHANNELS),
          count(std::min(CHANNELS, given.D - first)),
          span(given.N - 1),
          rows((span + given.T) * count),
          weight(given.N * count) {}

    static int64_t blocks(const Convolution& given) { return (given.D + CHANNELS - 1) / CHANNELS; }

    // The place of a token, or of what is before the step, in tensors of so many rows a sequence.
    int64_t at(int64_t row, int64_t number) const { return (b * number + row) * given.D + first; }

    void load() {
        const int64_t begun = given.past[b] > 0, last = span + given.W - 1;
        const int64_t pending = begun ? std::max<int64_t>(given.past[b] - given.folded[b], 0) : 0;
        for (int64_t i = 0; i < span && begun; i++) {
            const int64_t row = std::min(std::min(pending, last) + i, last);
            const float* const from = row < span ? given.history + at(row, span)
                                                 : given.rows + at(row - span, given.W);
            std::copy(from, from + count, &rows[i * count]);
        }
        for (int64_t t = 0; t < given.T; t++) {
            const float* const from = given.x + at(t, given.T);
            std::copy(from, from + count, &rows[(span + t) * count]);
        }
        for (int64_t c = 0; c < count; c++)
            for (int64_t n = 0; n < given.N; n++)
                weight[n * count + c] = given.weight[(first + c) * given.N + n];
    }

    // The row that is before another one in the text of a token; the last rows before the step are
    // before those of its first tokens.
    int64_t before(int64_t row, const uint8_t* ancestors) const {
        int64_t t = row - span - 1;
        if (ancestors && row > span)
            while (t >= 0 && !ancestors[(row - span) * given.T + t]) t--;
        return row <= span ? row - 1 : span + (t < 0 ? -1 : t);
    }

    void token(int64_t t) {
        const uint8_t* const seen =
            given.ancestors ? given.ancestors + b * given.T * given.T : nullptr;
        float* const y = given.y + at(t, given.T);
        int64_t row = span + t;
        for (int64_t n = span; n >= 0; n--) {
            const float *const x = &rows[row * count], *const w = &weight[n * count];
            if (n == span)
                for (int64_t c = 0; c < count; c++) y[c] = x[c] * w[c];
            else
                for (int64_t c = 0; c < count; c++) y[c] = __builtin_fmaf(x[c], w[c], y[c]);
            if (n) row = before(row, seen);
        }
        if (!given.bias) return;
        for (int64_t c = 0; c < count; c++) y[c] += given.bias[first + c];
    }

    // `number` rows to [B,number,D] from `row` on, the nearest of those there are for others.
    void keep(int64_t row, int64_t least, int64_t number, float* to) const {
        const int64_t last = span + given.T - 1;
        for (int64_t i = 0; i < number; i++) {
            const float* const from = &rows[std::min(std::max(row + i, least), last) * count];
            std::copy(from, from + count, to + at(i, number));
        }
    }

    void run() {
        load();
        for (int64_t t = 0; t < given.T; t++) token(t);
        const int64_t most = span + given.T;
        const int64_t certain = std::min(std::max(given.certain[b], -given.W - span), most);
        keep(certain, 0, span, given.new_history);
        keep(span + certain, span, given.W, given.new_rows);
    }
};

}  // namespace

KERNEL(causal_conv_step, Convolution) {
    graftwork::want(given.N >= 2, "weight must span at least 2 tokens");
    const int64_t bytes = 8 * CHANNELS * (given.T + given.W + 3 * given.N);
    team.each(given.B * Block::blocks(given), bytes, [&](int64_t i) { Block(given, i).run(); });
}
