// The kernels as ops of ONNX Runtime, domain "graftwork". Its own threads run them, and weights are
// read where it has them: in a file that is mapped, they are not copied.
//
//   QuantizedLinear(x, packed, scale, offset?, table?, bias?; bits, group, span, N) -> y
//   FloatLinear(x, packed, scale, offset?, codebook?, bias?; bits, group, N) -> y
//   QuantizedExperts(x, experts, packed, scale, offset?, bias?; bits, group, span, N, E, rounded) -> y
//   QuantizedEmbedding(ids, weight, scale, offset?, codebook?; bits, group) -> y
//   CachedAttention, CachedQuantizedAttention, PutRows: see ort_attention.h
//   ReadRows: see ort_rows.h
//   and those of ort_declared.h

#include "ort_attention.h"
#include "ort_declared.h"
#include "ort_op.h"
#include "ort_rows.h"
#include "quantized.h"

using namespace graftwork;

namespace {

constexpr int64_t LARGEST = 1 << 16;  // group: products of two bytes add up in 32 bits

// A node's kernel.
struct Node {
    static constexpr int REQUIRED = 3, OUTPUTS = 1;
    static ort::Element output(int) { return ort::FLOAT; }
    const ort::Api& api;
    int64_t bits, group, outputs;

    Node(const ort::Api& api, const ort::Info* info)
        : api(api),
          bits(api.whole_number(info, "bits")),
          group(api.whole_number(info, "group")),
          outputs(api.whole_number(info, "N")) {
        want(outputs >= 0, "N must not be negative");
        const bool known = (bits >= 1 && bits <= 4) || bits == 6 || bits == 8;
        want(known, "bits must be 1, 2, 3, 4, 6 or 8");
        want(group >= 1 && group <= LARGEST, "group must be in 1..65536");
    }
    template <class T>
    const T* data(const ort::Tensor& tensor) const {
        return tensor.data<T>(api);
    }
    void check_stored(
        const ort::Tensor& packed,
        const ort::Tensor& scale,
        const ort::Tensor& offset,
        int64_t groups,
        int64_t rows) const {
        const int64_t tiles = (rows + 15) / 16;
        want(packed.is({tiles, groups, (group + 15) / 16 * 32 * bits}), "packed must be [T, G, B]");
        want(scale.is({tiles, groups, 16}), "scale must be [T, G, 16]");
        want(offset.is({tiles, groups, 16}), "offset must be [T, G, 16]");
        want(scale.is_float_or_half() && offset.is_float_or_half(), "scale must be float or half");
    }
    void check_codebook(const ort::Tensor& codebook, const ort::Tensor& offset) const {
        want(codebook.is({int64_t(1) << bits}), "codebook must be [2^bits]");
        want(!codebook.value || !offset.value, "a codebook goes with no offset");
    }
    // Codebooks [entries] or [books, entries], entries of one number or, in pairs, of twice as many.
    Books books_of(const ort::Tensor& found, int64_t entries, const ort::Tensor& offset) const {
        if (!found.value) return {};
        want(!offset.value, "a codebook goes with no offset");
        const size_t axes = found.sizes.size();
        want(axes == 1 || axes == 2, "codebooks must be [L] or [S, L]");
        const int64_t last = found.sizes.back(), count = axes == 2 ? found.sizes[0] : 1;
        want(last > 0, "codebooks must be of 2^bits numbers, or 4 bits in pairs");
        want(count >= 1, "there must be a codebook");
        want(count == 1 || outputs % (count * 16) == 0, "codebooks must be of whole tiles");
        return Books::of(count, last, entries, bits, group);
    }
    Table table(
        const ort::Tensor& packed,
        const ort::Tensor& scale,
        const ort::Tensor& offset,
        const float* codebook,
        int64_t K,
        Books books = {}) const {
        return {
            data<uint8_t>(packed),       data<void>(scale),           data<void>(offset),
            codebook,                    outputs,                     K,
            group,                       bits,                        scale.type == ort::FLOAT16,
            offset.type == ort::FLOAT16, books,
        };
    }
    // Rows of x [..., K], and what becomes of them.
    static int64_t rows_of(const ort::Tensor& x) {
        int64_t rows = 1;
        for (size_t axis = 0; axis + 1 < x.sizes.size(); axis++) rows *= x.sizes[axis];
        return rows;
    }
    float* result(ort::Context* context, const ort::Tensor& x) const {
        std::vector<int64_t> sizes = x.sizes;
        sizes.back() = outputs;
        return api.data<float>(api.output(context, 0, sizes));
    }
};

struct Linear : Node {
    static constexpr const char* NAME = "QuantizedLinear";
    static constexpr int INPUTS = 6;
    static ort::Element input(int place) {
        constexpr ort::Element kinds[] = {ort::FLOAT, ort::UINT8, ort::ANY,
                                          ort::ANY,   ort::INT8,  ort::FLOAT};
        return kinds[place];
    }
    int64_t span;

    Linear(const ort::Api& api, const ort::Info* info)
        : Node(api, info), span(api.whole_number(info, "span")) {}

    void run(ort::Context* context) const {
        const ort::Tensor x(api, context, 0), packed(api, context, 1), scale(api, context, 2);
        const ort::Tensor offset(api, context, 3), table(api, context, 4), bias(api, context, 5);
        want(!x.sizes.empty(), "x must be [..., K]");
        const int64_t K = x.sizes.back();
        want(K > 0 && K % group == 0, "K must be a multiple of group");
        check_stored(packed, scale, offset, K / group, outputs);
        want(!table.value || bits <= 4, "a table goes with 4 bits");
        const Books books = books_of(table, 16, offset);
        want(bias.is({outputs}), "bias must be [N]");
        float* const y = result(context, x);
        const Weights weights = {
            data<uint8_t>(packed),       data<void>(scale),           data<void>(offset),
            data<int8_t>(table),         data<float>(bias),           outputs,
            K,                           group,                       bits,
            scale.type == ort::FLOAT16,  offset.type == ort::FLOAT16,
            books,                       checked_span(span, K, group),
        };
        products(weights, data<float>(x), rows_of(x), y, Pool(api, context));
    }
};

struct FloatLinear : Node {
    static constexpr const char* NAME = "FloatLinear";
    static constexpr int INPUTS = 6;
    static ort::Element input(int place) {
        constexpr ort::Element kinds[] = {ort::FLOAT, ort::UINT8, ort::ANY,
                                          ort::ANY,   ort::FLOAT, ort::FLOAT};
        return kinds[place];
    }

    using Node::Node;

    void run(ort::Context* context) const {
        const ort::Tensor x(api, context, 0), packed(api, context, 1), scale(api, context, 2);
        const ort::Tensor offset(api, context, 3), codebook(api, context, 4), bias(api, context, 5);
        want(!x.sizes.empty(), "x must be [..., K]");
        const int64_t K = x.sizes.back();
        want(K > 0 && K % group == 0, "K must be a multiple of group");
        check_stored(packed, scale, offset, K / group, outputs);
        const Books books = books_of(codebook, int64_t(1) << bits, offset);
        want(bias.is({outputs}), "bias must be [N]");
        float* const y = result(context, x);
        float_products(
            table(packed, scale, offset, data<float>(codebook), K, books), data<float>(bias), data<float>(x),
            rows_of(x), y, Pool(api, context));
    }
};

struct Experts : Node {
    static constexpr const char* NAME = "QuantizedExperts";
    static constexpr int REQUIRED = 4, INPUTS = 6;
    static ort::Element input(int place) {
        constexpr ort::Element kinds[] = {ort::FLOAT, ort::INT64, ort::UINT8,
                                          ort::ANY,   ort::ANY,   ort::FLOAT};
        return kinds[place];
    }
    int64_t experts, span;
    bool rounded;

    Experts(const ort::Api& api, const ort::Info* info)
        : Node(api, info),
          experts(api.whole_number(info, "E")),
          span(api.whole_number(info, "span")),
          rounded(api.whole_number(info, "rounded") != 0) {
        want(experts >= 1 && outputs % 16 == 0, "experts must have whole tiles of outputs");
        want(outputs <= (int64_t(1) << 40) / experts, "there are too many experts");
    }

    void run(ort::Context* context) const {
        const ort::Tensor x(api, context, 0), chosen(api, context, 1), packed(api, context, 2);
        const ort::Tensor scale(api, context, 3), offset(api, context, 4), bias(api, context, 5);
        want(chosen.sizes.size() == 2, "experts must be [N, C]");
        const int64_t count = chosen.sizes[0], choices = chosen.sizes[1];
        want(!x.sizes.empty(), "x must be [N, K] or [N, C, K]");
        const int64_t K = x.sizes.back();
        const bool each = x.sizes.size() == 3;
        want(each ? x.is({count, choices, K}) : x.is({count, K}), "x must be [N, K] or [N, C, K]");
        want(K > 0 && K % group == 0, "K must be a multiple of group");
        check_stored(packed, scale, offset, K / group, experts * outputs);
        want(bias.is({experts, outputs}), "bias must be [E, N]");
        float* const y = api.data<float>(api.output(context, 0, {count, choices, outputs}));
        const Choices choice = {data<int64_t>(chosen), count, choices, experts, each};
        expert_products(
            table(packed, scale, offset, nullptr, K), data<float>(bias), choice, data<float>(x),
            rounded, checked_span(span, K, group), y, Pool(api, context));
    }
};

struct Embedding : Node {
    static constexpr const char* NAME = "QuantizedEmbedding";
    static constexpr int INPUTS = 5;
    static ort::Element input(int place) {
        constexpr ort::Element kinds[] = {
            ort::INT64, ort::UINT8, ort::ANY, ort::ANY, ort::FLOAT};
        return kinds[place];
    }

    using Node::Node;

    void run(ort::Context* context) const {
        const ort::Tensor ids(api, context, 0), packed(api, context, 1), scale(api, context, 2);
        const ort::Tensor offset(api, context, 3), codebook(api, context, 4);
        want(scale.sizes.size() == 3, "scale must be [T, G, 16]");
        const int64_t groups = scale.sizes[1], K = groups * group;
        want(K > 0, "a table must have columns");
        check_stored(packed, scale, offset, groups, outputs);
        check_codebook(codebook, offset);
        std::vector<int64_t> sizes = ids.sizes;
        sizes.push_back(K);
        int64_t count = 1;
        for (int64_t size : ids.sizes) count *= size;
        float* const y = api.data<float>(api.output(context, 0, sizes));
        graftwork::rows_of(
            table(packed, scale, offset, data<float>(codebook), K), data<int64_t>(ids), count, y,
            Pool(api, context));
    }
};

}  // namespace

// Makes an op known, unless one of its name is; before the first session asks for ops.
extern "C" void declare_op(const char* name, const char* text, const Kernel* kernel) {
    for (const DeclaredOp& op : declared_ops())
        if (op.of.name == name) return;
    declared_ops().emplace_back(Declared(name, text, kernel));
}

template <class Node>
static const ort::CustomOp* op_of() {
    static const Op<Node> op;
    return &op;
}

template <class... Nodes>
static void add_ops(const ort::Api& api, ort::Domain* domain) {
    (api.add_op(domain, op_of<Nodes>()), ...);
}

// What the runtime calls when the library is registered with a session's options.
extern "C" ort::Status* RegisterCustomOps(ort::Options* options, const ort::ApiBase* base) {
    const ort::Api* const api = base->get(ort::VERSION);
    if (!api) return nullptr;  // older than all that are served: its sessions find no such op
    return ort::guarded(*api, [&] {
        static ort::Domain* const domain = [&] {  // sessions use it as long as they live
            ort::Domain* const made = api->create_domain("graftwork");
            add_ops<Linear, FloatLinear, Experts, Embedding, CachedNode<false>, CachedNode<true>,
                    CachedNode<false, false>, ReadRows>(*api, made);
            for (const DeclaredOp& op : declared_ops()) api->add_op(made, &op);
            return made;
        }();
        api->add_domain(options, domain);
    });
}
