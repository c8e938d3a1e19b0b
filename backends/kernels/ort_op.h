// Kernels as ops of ONNX Runtime.

#pragma once

#include <algorithm>
#include <climits>
#include <type_traits>

#include "ort_abi.h"
#include "team.h"

namespace graftwork {

constexpr int64_t PART = 1 << 16;  // bytes that one thread reads at a time, or more

// The runtime's threads.
struct Pool final : Team {
    const ort::Api& api;
    ort::Context* context;
    int64_t most;  // threads, as far as is known
    Pool(const ort::Api& api, ort::Context* context, int64_t most = 1)
        : api(api), context(context), most(most) {}

    int64_t threads() const override { return most; }

    struct Share {
        const Work& work;
        int64_t count, each;
    };
    static void run(void* share, size_t part) {
        const Share& of = *static_cast<Share*>(share);
        const int64_t end = std::min(of.count, (int64_t(part) + 1) * of.each);
        for (int64_t i = int64_t(part) * of.each; i < end; i++) of.work(i);
    }
    void each(int64_t count, int64_t bytes, const Work& work) const override {
        Share share = {work, count, std::max<int64_t>(1, PART / std::max<int64_t>(1, bytes))};
        const int64_t parts = (count + share.each - 1) / share.each;
        if (parts > 1) return api.parallel(context, run, size_t(parts), &share);
        run(&share, 0);
    }
};

// An op whose nodes are `Node`s; what they take and return is still to say.
template <class Node>
struct OpOf : ort::CustomOp {
    OpOf() {
        provider = [](const CustomOp*) -> const char* { return nullptr; };
        output_presence = [](const CustomOp*, size_t) { return ort::REQUIRED; };
        memory = [](const CustomOp*, size_t) { return 0; };
        least_variadic_inputs = least_variadic_outputs = [](const CustomOp*) { return 1; };
        alike_variadic_inputs = alike_variadic_outputs = [](const CustomOp*) { return 1; };
        first_opset = [](const CustomOp*) { return 1; };
        last_opset = [](const CustomOp*) { return INT_MAX; };
        compute = [](void* kernel, ort::Context* context) {
            const Node& node = *static_cast<Node*>(kernel);
            return ort::guarded(node.api, [&] { node.run(context); });
        };
        destroy = [](void* kernel) { delete static_cast<Node*>(kernel); };
    }
};

// How many outputs of a node have to be there.
template <class Node, class = void>
constexpr int needed = Node::OUTPUTS;
template <class Node>
constexpr int needed<Node, std::void_t<decltype(Node::NEEDED)>> = Node::NEEDED;

// One that says so itself. After the REQUIRED ones inputs may be absent, and after the NEEDED ones, if
// it has such a number, outputs.
template <class Node>
struct Op : OpOf<Node> {
    using CustomOp = ort::CustomOp;
    Op() {
        this->name = [](const CustomOp*) { return Node::NAME; };
        this->input_type = [](const CustomOp*, size_t place) { return Node::input(int(place)); };
        this->input_count = [](const CustomOp*) { return size_t(Node::INPUTS); };
        this->input_presence = [](const CustomOp*, size_t place) {
            return int(place) < Node::REQUIRED ? ort::REQUIRED : ort::OPTIONAL;
        };
        this->output_type = [](const CustomOp*, size_t place) { return Node::output(int(place)); };
        this->output_count = [](const CustomOp*) { return size_t(Node::OUTPUTS); };
        this->output_presence = [](const CustomOp*, size_t place) {
            return int(place) < needed<Node> ? ort::REQUIRED : ort::OPTIONAL;
        };
        this->create = [](const CustomOp*, const ort::Api* api, const ort::Info* info, void** made) {
            return ort::guarded(*api, [&] { *made = new Node(*api, info); });
        };
    }
};

}  // namespace graftwork
