// Steps of linear attention and of causal convolutions as ops of ONNX Runtime.
//
//   LinearAttentionStep(state, keys, values, decays, folded, past, certain, q, k, v, g, ancestors?,
//     beta?; threads) -> (y, state, keys, values, decays)
//
//   LinearAttentionStepInt8(codes, scale, keys, ...) -> (y, codes, scale, keys, values, decays)
//
//   CausalConvStep(history, rows, folded, past, certain, x, weight, ancestors?, bias?; threads)
//     -> (y, history, rows)
//
// They are graftwork.linear_attention_step, graftwork.linear_attention_step_int8 and
// graftwork.causal_conv_step.

#pragma once

#include "conv.h"
#include "ort_op.h"
#include "recurrent.h"

namespace graftwork {

// ROUNDED: the state is held in 8 bits, as codes and scales.
template <bool ROUNDED>
struct LinearAttentionStep {
    static constexpr const char* NAME =
        ROUNDED ? "LinearAttentionStepInt8" : "LinearAttentionStep";
    static constexpr int HELD = ROUNDED ? 2 : 1;  // tensors that are the state
    static constexpr int REQUIRED = HELD + 10, INPUTS = HELD + 12, OUTPUTS = HELD + 4;
    static ort::Element input(int place) {
        if (ROUNDED && place == 0) return ort::INT8;
        if (place >= HELD + 3 && place <= HELD + 5) return ort::INT64;
        return place == REQUIRED ? ort::BOOL : ort::FLOAT;
    }
    static ort::Element output(int place) {
        return ROUNDED && place == 1 ? ort::INT8 : ort::FLOAT;
    }
    const ort::Api& api;
    int64_t threads;

    LinearAttentionStep(const ort::Api& api, const ort::Info* info)
        : api(api), threads(api.whole_number(info, "threads")) {
        want(threads >= 1, "threads must be positive");
    }

    void run(ort::Context* context) const {
        size_t next = 0;
        const auto input = [&] { return ort::Tensor(api, context, next++); };
        const ort::Tensor state = input(), scale = ROUNDED ? input() : state;
        const ort::Tensor keys = input(), values = input(), decays = input();
        const ort::Tensor folded = input(), past = input(), certain = input();
        const ort::Tensor q = input(), k = input(), v = input(), g = input();
        const ort::Tensor ancestors = input(), beta = input();
        want(state.sizes.size() == 4, "the state must be [B, H, K, V]");
        want(keys.sizes.size() == 4, "keys must be [B, G, W, K]");
        want(g.sizes.size() == 4, "g must be [B, H, T, D]");
        const int64_t B = state.sizes[0], H = state.sizes[1], K = state.sizes[2];
        const int64_t V = state.sizes[3], G = keys.sizes[1], W = keys.sizes[2];
        const int64_t T = g.sizes[2], D = g.sizes[3];
        want(G >= 1 && H % G == 0, "H must be a multiple of G");
        want(D == 1 || D == K, "g must have one decay a head or one a key");
        want(T >= 1 && W >= 1, "there must be a token and a row of the log");
        want(keys.is({B, G, W, K}), "keys must be [B, G, W, K]");
        want(values.is({B, H, W, V}), "values must be [B, H, W, V]");
        want(decays.is({B, H, W, D}), "decays must be [B, H, W, D]");
        want(folded.is({B}) && past.is({B}) && certain.is({B}), "counts must be [B]");
        want(q.is({B, G, T, K}) && k.is({B, G, T, K}), "q and k must be [B, G, T, K]");
        want(v.is({B, H, T, V}), "v must be [B, H, T, V]");
        want(g.is({B, H, T, D}), "g must be [B, H, T, D]");
        want(ancestors.is({B, T, T}), "ancestors must be [B, T, T]");
        want(beta.is({B, H, T}), "beta must be [B, H, T]");
        Recurrence given = {};
        given.keys = keys.data<float>(api);
        given.values = values.data<float>(api);
        given.decays = decays.data<float>(api);
        given.folded = folded.data<int64_t>(api);
        given.past = past.data<int64_t>(api);
        given.certain = certain.data<int64_t>(api);
        given.ancestors = ancestors.data<uint8_t>(api);
        given.q = q.data<float>(api);
        given.k = k.data<float>(api);
        given.v = v.data<float>(api);
        given.g = g.data<float>(api);
        given.beta = beta.data<float>(api);
        given.y = api.data<float>(api.output(context, 0, v.sizes));
        if (ROUNDED) {
            want(scale.is({B, H, V}), "scale must be [B, H, V]");
            given.codes = state.data<int8_t>(api);
            given.scale = scale.data<float>(api);
            given.new_codes = api.data<int8_t>(api.output(context, 1, state.sizes));
            given.new_scale = api.data<float>(api.output(context, 2, scale.sizes));
        } else {
            given.state = state.data<float>(api);
            given.new_state = api.data<float>(api.output(context, 1, state.sizes));
        }
        given.new_keys = api.data<float>(api.output(context, HELD + 1, keys.sizes));
        given.new_values = api.data<float>(api.output(context, HELD + 2, values.sizes));
        given.new_decays = api.data<float>(api.output(context, HELD + 3, decays.sizes));
        given.B = B, given.H = H, given.G = G, given.T = T, given.K = K, given.V = V;
        given.D = D, given.W = W;
        step(given, Pool(api, context, threads));
    }
};

struct CausalConvStep {
    static constexpr const char* NAME = "CausalConvStep";
    static constexpr int REQUIRED = 7, INPUTS = 9, OUTPUTS = 3;
    static ort::Element input(int place) {
        if (place >= 2 && place <= 4) return ort::INT64;
        return place == REQUIRED ? ort::BOOL : ort::FLOAT;
    }
    static ort::Element output(int) { return ort::FLOAT; }
    const ort::Api& api;
    int64_t threads;

    CausalConvStep(const ort::Api& api, const ort::Info* info)
        : api(api), threads(api.whole_number(info, "threads")) {
        want(threads >= 1, "threads must be positive");
    }

    void run(ort::Context* context) const {
        const auto input = [&](size_t place) { return ort::Tensor(api, context, place); };
        const ort::Tensor history = input(0), rows = input(1), folded = input(2), past = input(3);
        const ort::Tensor certain = input(4), x = input(5), weight = input(6);
        const ort::Tensor ancestors = input(7), bias = input(8);
        want(x.sizes.size() == 3, "x must be [B, T, D]");
        want(rows.sizes.size() == 3, "rows must be [B, W, D]");
        want(weight.sizes.size() == 2, "weight must be [D, N]");
        const int64_t B = x.sizes[0], T = x.sizes[1], D = x.sizes[2];
        const int64_t W = rows.sizes[1], N = weight.sizes[1];
        want(T >= 1 && W >= 1, "there must be a token and a row of the log");
        want(N >= 2, "weight must span at least 2 tokens");
        want(weight.is({D, N}), "weight must be [D, N]");
        want(history.is({B, N - 1, D}), "history must be [B, N-1, D]");
        want(rows.is({B, W, D}), "rows must be [B, W, D]");
        want(folded.is({B}) && past.is({B}) && certain.is({B}), "counts must be [B]");
        want(ancestors.is({B, T, T}), "ancestors must be [B, T, T]");
        want(bias.is({D}), "bias must be [D]");
        Convolution given = {};
        given.history = history.data<float>(api);
        given.rows = rows.data<float>(api);
        given.folded = folded.data<int64_t>(api);
        given.past = past.data<int64_t>(api);
        given.certain = certain.data<int64_t>(api);
        given.ancestors = ancestors.data<uint8_t>(api);
        given.x = x.data<float>(api);
        given.weight = weight.data<float>(api);
        given.bias = bias.data<float>(api);
        given.y = api.data<float>(api.output(context, 0, x.sizes));
        given.new_history = api.data<float>(api.output(context, 1, history.sizes));
        given.new_rows = api.data<float>(api.output(context, 2, rows.sizes));
        given.B = B, given.T = T, given.D = D, given.N = N, given.W = W;
        step(given, Pool(api, context, threads));
    }
};

}  // namespace graftwork
