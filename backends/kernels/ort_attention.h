// Attention as ops of ONNX Runtime.
//
//   CachedAttention(query, past_key, past_value, past, key?, value?, positions?, cos?, sin?,
//     ancestors?, sinks?, slopes?, past_kept?, kept_past?; heads, groups, scale, softcap, window, chunk,
//     interleaved, repeat, first, keys, latest, threads) -> (out, key, value, kept?)
//   PutRows(...; the same) -> (query, key, value, new_key)
//   CachedQuantizedAttention(query, past_key, past_value, past_key_steps, past_value_steps, past, ...
//     as above; bits, turned, ...) -> (out, key, value, key_steps, value_steps, kept?)
//
// They are graftwork.ort_attend, ort_put_rows and ort_attend_quantized, or with past_kept ort_attend_keeping (of
// quantized caches no pass asks for it), where the last dimension of query, key, value and out is that
// of all heads. Caches are written where they lie, if key and value are bound to the memory of past_key and
// past_value, and kept likewise.

#pragma once

#include "attention.h"
#include "ort_op.h"

namespace graftwork {

// STORED: whether caches are codes with steps (see stored_rows.h). ATTENDS: whether tokens do.
template <bool STORED, bool ATTENDS = true>
struct CachedNode {
    static constexpr const char* NAME = !ATTENDS ? "PutRows"
                                        : STORED ? "CachedQuantizedAttention"
                                                 : "CachedAttention";
    static constexpr int STEPS = STORED ? 2 : 0, REQUIRED = 4 + STEPS, NEEDED = 3 + STEPS + !ATTENDS;
    static constexpr ort::Element ROWS = STORED ? ort::UINT8 : ort::FLOAT;
    static ort::Element input(int place) {
        if (place == 1 || place == 2) return ROWS;
        if (place == REQUIRED - 1 || place == REQUIRED + 2 || place == REQUIRED + 9) return ort::INT64;
        return place == REQUIRED + 5 ? ort::BOOL : ort::FLOAT;
    }
    static constexpr int INPUTS = REQUIRED + 10, OUTPUTS = NEEDED + ATTENDS;
    static ort::Element output(int place) { return place == 1 || place == 2 ? ROWS : ort::FLOAT; }

    const ort::Api& api;
    float scale, softcap;
    int64_t threads, heads, groups, window, chunk, repeat, first, keys, each;
    bool interleaved, latest;
    Stored stored = {32, false};

    CachedNode(const ort::Api& api, const ort::Info* info)
        : api(api),
          scale(api.number(info, "scale")),
          softcap(api.number(info, "softcap")),
          threads(api.whole_number(info, "threads")),
          heads(api.whole_number(info, "heads")),
          groups(api.whole_number(info, "groups")),
          window(api.whole_number(info, "window")),
          chunk(api.whole_number(info, "chunk")),
          repeat(std::max<int64_t>(api.whole_number(info, "repeat"), 1)),
          first(api.whole_number(info, "first")),
          keys(api.whole_number(info, "keys")),
          interleaved(api.whole_number(info, "interleaved") != 0),
          latest(api.whole_number(info, "latest") != 0) {
        want(threads >= 1, "threads must be positive");
        want(groups >= 1 && heads >= groups && heads <= INT_MAX && heads % groups == 0,
             "heads must be a positive multiple of groups");
        want(groups % repeat == 0, "groups must be a multiple of repeat");
        if (!keys) keys = groups / repeat;
        want(first >= 0 && keys <= INT_MAX && groups / repeat <= keys - first,
             "first and keys must leave room for the groups");
        each = heads / groups * repeat;  // heads of queries that share a key
        want(window >= 0, "window must not be negative");
        want(chunk >= 0, "chunk must not be negative");
        if (!STORED) return;
        stored = {api.whole_number(info, "bits"), api.whole_number(info, "turned") != 0};
        want(stored.bits == 4 || stored.bits == 8, "bits must be 4 or 8");
    }

    // Numbers of a row of a cache.
    int64_t width(const ort::Tensor& cache) const {
        const int64_t bytes = cache.sizes[3], count = STORED ? bytes * 8 / stored.bits : bytes;
        want(!stored.turned || (count & (count - 1)) == 0, "turned rows must be a power of two");
        want(!STORED || (count >= 2 && count % 2 == 0), "stored rows must be even");
        return count;
    }

    void run(ort::Context* context) const {
        const auto read = [&](size_t place) { return ort::Tensor(api, context, place); };
        const ort::Tensor query = read(0), old_keys = read(1), old_values = read(2);
        const ort::Tensor old_key_steps = read(STORED ? 3 : -1);
        const ort::Tensor old_value_steps = read(STORED ? 4 : -1);
        const ort::Tensor past = read(REQUIRED - 1), key = read(REQUIRED);
        const ort::Tensor value = read(REQUIRED + 1), positions = read(REQUIRED + 2);
        const ort::Tensor cos = read(REQUIRED + 3), sin = read(REQUIRED + 4);
        const ort::Tensor ancestors = read(REQUIRED + 5), sinks = read(REQUIRED + 6);
        const ort::Tensor slopes = read(REQUIRED + 7), old_kept = read(REQUIRED + 8);
        const ort::Tensor kept_past = read(REQUIRED + 9);
        want(query.sizes.size() == 3, "query must be [B, T, heads * D]");
        want(old_keys.sizes.size() == 4, "past_key must be [B, groups, C, D]");
        want(old_values.sizes.size() == 4, "past_value must be [B, groups, C, E]");
        const int64_t B = query.sizes[0], T = query.sizes[1], C = old_keys.sizes[2];
        const int64_t D = width(old_keys), E = width(old_values);
        want(old_keys.is({B, groups, C, old_keys.sizes[3]}), "past_key must be [B, groups, C, D]");
        want(old_values.is({B, groups, C, old_values.sizes[3]}),
             "past_value must be [B, groups, C, E]");
        want(old_key_steps.is({B, groups, C, 2}), "past_key_steps must be [B, groups, C, 2]");
        want(old_value_steps.is({B, groups, C, 2}), "past_value_steps must be [B, groups, C, 2]");
        want(past.is({B}), "past must be [B]");
        want(!key.value == !value.value, "key and value go together");
        const int64_t asked = keys * each * D, all = asked + (key.value ? 0 : keys * (D + E));
        want(query.is({B, T, all}), "query must be [B, T, heads * D], or that and key and value");
        want(key.is({B, T, keys * D}), "key must be [B, T, groups * D]");
        want(value.is({B, T, keys * E}), "value must be [B, T, groups * E]");
        want(positions.is({B, T}), "positions must be [B, T]");
        want(!cos.value == !sin.value, "cos and sin go together");
        want(!cos.value || (cos.sizes.size() == 2 && 2 * cos.sizes[1] <= D),
             "cos must be [angles, at most D / 2]");
        want(!cos.value || sin.is(cos.sizes), "sin must be as cos is");
        want(ancestors.is({B, T, T}), "ancestors must be [B, T, T]");
        want(sinks.is({heads}), "sinks must be [heads]");
        want(slopes.is({heads}), "slopes must be [heads]");
        want(!old_kept.value == !kept_past.value, "past_kept and kept_past go together");
        const int64_t W = old_kept.value && old_kept.sizes.size() == 4 ? old_kept.sizes[2] : 0;
        want(old_kept.is({B, heads, W, D}), "past_kept must be [B, heads, W, D]");
        want(kept_past.is({B}), "kept_past must be [B]");
        const float* const packed = query.data<float>(api);
        const auto output = [&](size_t place, const std::vector<int64_t>& sizes) {
            return api.data<void>(api.output(context, place, sizes));
        };
        Cached given = {};
        given.query = packed + first * each * D;
        given.key = (key.value ? key.data<float>(api) : packed + asked) + first * D;
        given.value = (value.value ? value.data<float>(api) : packed + asked + keys * D) + first * E;
        given.query_step = all;
        given.key_step = key.value ? keys * D : all;
        given.value_step = value.value ? keys * E : all;
        given.past_keys = old_keys.data<void>(api);
        given.past_values = old_values.data<void>(api);
        given.past_key_steps = old_key_steps.data<float>(api);
        given.past_value_steps = old_value_steps.data<float>(api);
        given.past = past.data<int64_t>(api);
        given.positions = positions.data<int64_t>(api);
        given.cos = cos.data<float>(api);
        given.sin = sin.data<float>(api);
        given.ancestors = ancestors.data<uint8_t>(api);
        given.sinks = sinks.data<float>(api);
        given.slopes = slopes.data<float>(api);
        given.out = static_cast<float*>(ATTENDS ? output(0, {B, T, heads * E})
                                                : output(0, {B, heads, T, D}));
        given.keys = output(1, old_keys.sizes);
        given.values = output(2, old_values.sizes);
        if (STORED) given.key_steps = static_cast<float*>(output(3, old_key_steps.sizes));
        if (STORED) given.value_steps = static_cast<float*>(output(4, old_value_steps.sizes));
        if (old_kept.value) {
            given.past_kept = old_kept.data<float>(api);
            given.kept_past = kept_past.data<int64_t>(api);
            given.kept = static_cast<float*>(output(NEEDED, old_kept.sizes));
            given.W = W;
        }
        given.B = B, given.H = heads, given.G = groups, given.T = T, given.C = C, given.D = D;
        given.E = E, given.window = window, given.chunk = chunk;
        given.scale = scale, given.softcap = softcap;
        given.angles = cos.value ? cos.sizes[0] : 0;
        given.half = cos.value ? cos.sizes[1] : 0;
        given.interleaved = interleaved;
        given.stored = stored;
        given.repeat = repeat, given.latest = latest;
        const Pool pool(api, context, threads);
        if (ATTENDS) return attend(given, pool);
        put_rows(given, static_cast<float*>(output(3, {B, groups / repeat, T, D})), pool);
    }
};

}  // namespace graftwork
