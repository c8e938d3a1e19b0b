// Attention as ops of ONNX Runtime.
//
//   CachedAttention(query, past_key, past_value, past, key?, value?, positions?, cos?, sin?,
//     ancestors?, sinks?, slopes?; heads, groups, scale, softcap, window, interleaved, threads)
//     -> (out, key, value)
//   MaskedAttention(q, k, v, mask, bias?, sinks?; scale, softcap, threads) -> out
//
// They are graftwork.ort_attend, of which the last dimension of query, key, value and out is that of
// all heads, and graftwork.attend. Caches are written where they lie, if key and value are bound to
// the memory of past_key and past_value.

#pragma once

#include "attention.h"
#include "ort_op.h"

namespace graftwork {

struct AttentionNode {
    const ort::Api& api;
    float scale, softcap;
    int64_t threads;

    AttentionNode(const ort::Api& api, const ort::Info* info)
        : api(api),
          scale(api.number(info, "scale")),
          softcap(api.number(info, "softcap")),
          threads(api.whole_number(info, "threads")) {
        want(threads >= 1, "threads must be positive");
    }
};

struct CachedAttention : AttentionNode {
    static constexpr const char* NAME = "CachedAttention";
    static constexpr int REQUIRED = 4, OUTPUTS = 3;
    static constexpr ort::Element INPUTS[] = {
        ort::FLOAT, ort::FLOAT, ort::FLOAT, ort::INT64, ort::FLOAT, ort::FLOAT,
        ort::INT64, ort::FLOAT, ort::FLOAT, ort::BOOL,  ort::FLOAT, ort::FLOAT};
    int64_t heads, groups, window;
    bool interleaved;

    CachedAttention(const ort::Api& api, const ort::Info* info)
        : AttentionNode(api, info),
          heads(api.whole_number(info, "heads")),
          groups(api.whole_number(info, "groups")),
          window(api.whole_number(info, "window")),
          interleaved(api.whole_number(info, "interleaved") != 0) {
        want(groups >= 1 && heads >= groups && heads <= INT_MAX && heads % groups == 0,
             "heads must be a positive multiple of groups");
        want(window >= 0, "window must not be negative");
    }

    void run(ort::Context* context) const {
        const auto input = [&](size_t place) { return ort::Tensor(api, context, place); };
        const ort::Tensor query = input(0), old_keys = input(1), old_values = input(2);
        const ort::Tensor past = input(3), key = input(4), value = input(5), positions = input(6);
        const ort::Tensor cos = input(7), sin = input(8), ancestors = input(9);
        const ort::Tensor sinks = input(10), slopes = input(11);
        want(query.sizes.size() == 3, "query must be [B, T, heads * D]");
        want(old_keys.sizes.size() == 4, "past_key must be [B, groups, C, D]");
        want(old_values.sizes.size() == 4, "past_value must be [B, groups, C, E]");
        const int64_t B = query.sizes[0], T = query.sizes[1], C = old_keys.sizes[2];
        const int64_t D = old_keys.sizes[3], E = old_values.sizes[3];
        want(old_keys.is({B, groups, C, D}), "past_key must be [B, groups, C, D]");
        want(old_values.is({B, groups, C, E}), "past_value must be [B, groups, C, E]");
        want(past.is({B}), "past must be [B]");
        want(!key.value == !value.value, "key and value go together");
        const int64_t all = heads * D + (key.value ? 0 : groups * (D + E));
        want(query.is({B, T, all}), "query must be [B, T, heads * D], or that and key and value");
        want(key.is({B, T, groups * D}), "key must be [B, T, groups * D]");
        want(value.is({B, T, groups * E}), "value must be [B, T, groups * E]");
        want(positions.is({B, T}), "positions must be [B, T]");
        want(!cos.value == !sin.value, "cos and sin go together");
        want(!cos.value || (cos.sizes.size() == 2 && 2 * cos.sizes[1] <= D),
             "cos must be [angles, at most D / 2]");
        want(!cos.value || sin.is(cos.sizes), "sin must be as cos is");
        want(ancestors.is({B, T, T}), "ancestors must be [B, T, T]");
        want(sinks.is({heads}), "sinks must be [heads]");
        want(slopes.is({heads}), "slopes must be [heads]");
        const float* const first = query.data<float>(api);
        Cached given = {};
        given.query = first;
        given.key = key.value ? key.data<float>(api) : first + heads * D;
        given.value = value.value ? value.data<float>(api) : first + (heads + groups) * D;
        given.query_step = all;
        given.key_step = key.value ? groups * D : all;
        given.value_step = value.value ? groups * E : all;
        given.past_keys = old_keys.data<float>(api);
        given.past_values = old_values.data<float>(api);
        given.past = past.data<int64_t>(api);
        given.positions = positions.data<int64_t>(api);
        given.cos = cos.data<float>(api);
        given.sin = sin.data<float>(api);
        given.ancestors = ancestors.data<uint8_t>(api);
        given.sinks = sinks.data<float>(api);
        given.slopes = slopes.data<float>(api);
        given.out = api.data<float>(api.output(context, 0, {B, T, heads * E}));
        given.keys = api.data<float>(api.output(context, 1, old_keys.sizes));
        given.values = api.data<float>(api.output(context, 2, old_values.sizes));
        given.B = B, given.H = heads, given.G = groups, given.T = T, given.C = C, given.D = D;
        given.E = E, given.window = window, given.scale = scale, given.softcap = softcap;
        given.angles = cos.value ? cos.sizes[0] : 0;
        given.half = cos.value ? cos.sizes[1] : 0;
        given.interleaved = interleaved;
        attend(given, Pool(api, context, threads));
    }
};

struct MaskedAttention : AttentionNode {
    static constexpr const char* NAME = "MaskedAttention";
    static constexpr int REQUIRED = 4, OUTPUTS = 1;
    static constexpr ort::Element INPUTS[] = {
        ort::FLOAT, ort::FLOAT, ort::FLOAT, ort::BOOL, ort::FLOAT, ort::FLOAT};

    using AttentionNode::AttentionNode;

    void run(ort::Context* context) const {
        const ort::Tensor q(api, context, 0), k(api, context, 1), v(api, context, 2);
        const ort::Tensor mask(api, context, 3), bias(api, context, 4), sinks(api, context, 5);
        want(q.sizes.size() == 4, "q must be [B, H, T, D]");
        want(k.sizes.size() == 4, "k must be [B, G, C, D]");
        want(v.sizes.size() == 4, "v must be [B, G, C, E]");
        const int64_t B = q.sizes[0], H = q.sizes[1], T = q.sizes[2], D = q.sizes[3];
        const int64_t G = k.sizes[1], C = k.sizes[2], E = v.sizes[3];
        want(G >= 1 && H % G == 0, "H must be a multiple of G");
        want(C >= 1, "there must be a row");
        want(k.is({B, G, C, D}), "k must be [B, G, C, D]");
        want(v.is({B, G, C, E}), "v must be [B, G, C, E]");
        want(mask.is({B, 1, T, C}), "mask must be [B, 1, T, C]");
        want(bias.is({B, H, T, C}), "bias must be [B, H, T, C]");
        want(sinks.is({H}), "sinks must be [H]");
        float* const out = api.data<float>(api.output(context, 0, {B, H, T, E}));
        const Masked given = {
            q.data<float>(api),     k.data<float>(api),     v.data<float>(api),
            mask.data<uint8_t>(api), bias.data<float>(api), sinks.data<float>(api),
            out, B, H, G, T, C, D, E, scale, softcap};
        attend(given, Pool(api, context, threads));
    }
};

}  // namespace graftwork
