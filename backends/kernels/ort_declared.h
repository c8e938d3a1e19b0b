// Ops of ONNX Runtime whose operands graftwork's op declares (`backends/own_kernels.py` writes the text):
// a node has the operands, options and results of the op, and `threads`.
//
// A line of the text is one of these, in the order in which the op declares them; places count operands.
//
//   operand NAME ELEMENT OPTIONAL     result ELEMENT AXES     like ELEMENT PLACE
//   fit PLACE AXES                    multiple H G            least C             less P N AMOUNT
//   made W chunks*chunk+1             size B                  number scale        whole bits

#pragma once

#include <list>
#include <sstream>

#include "door.h"
#include "ort_op.h"

namespace graftwork {

struct Declared {
    struct Operand {
        std::string name;
        ort::Element type;
        bool optional;
    };
    struct Result {
        ort::Element type;
        std::string axes;
        int like;  // an operand whose shape it has, or -1
    };
    // fit: an operand and its axes. less: axes[0] is that much less than axes[1]. made: axes[0] is what
    // a sum of products of sizes, options and numbers says, over one of these.
    struct Rule {
        enum { FIT, MULTIPLE, LEAST, LESS, MADE } kind;
        int number;
        std::string axes, sum = {};
    };
    struct Option {
        std::string name;
        bool is_float;
    };
    std::string name;
    const Kernel* kernel;
    std::vector<Operand> operands;
    std::vector<Result> results;
    std::vector<Rule> rules;
    std::string sizes;
    std::vector<Option> options;

    Declared(const char* name, const char* text, const Kernel* kernel) : name(name), kernel(kernel) {
        std::istringstream lines(text);
        for (std::string line; std::getline(lines, line);) read(line);
    }
    size_t members() const {
        return operands.size() + results.size() + sizes.size() + options.size();
    }
    void read(const std::string& line) {
        std::istringstream words(line);
        std::string kind, a, b;
        int number = 0;
        words >> kind;
        if (kind == "operand" && words >> a >> number >> b)
            operands.push_back({a, ort::Element(number), b == "1"});
        else if (kind == "result" && words >> number >> a)
            results.push_back({ort::Element(number), a, -1});
        else if (kind == "like" && words >> number >> a)
            results.push_back({ort::Element(number), "", std::stoi(a)});
        else if (kind == "fit" && words >> number >> a)
            rules.push_back({Rule::FIT, number, a});
        else if (kind == "multiple" && words >> a >> b)
            rules.push_back({Rule::MULTIPLE, 0, a + b});
        else if (kind == "least" && words >> a)
            rules.push_back({Rule::LEAST, 0, a});
        else if (kind == "less" && words >> a >> b >> number)
            rules.push_back({Rule::LESS, number, a + b});
        else if (kind == "made" && words >> a >> b)
            rules.push_back({Rule::MADE, 0, a, b});
        else if (kind == "size" && words >> a)
            sizes += a;
        else if ((kind == "number" || kind == "whole") && words >> a)
            options.push_back({a, kind == "number"});
        else
            throw std::invalid_argument("an op's declaration has no such line: " + line);
    }
};

struct DeclaredNode {
    const ort::Api& api;
    const Declared& of;
    int64_t threads;
    std::vector<float> numbers;
    std::vector<int64_t> whole;

    DeclaredNode(const ort::Api& api, const ort::Info* info, const Declared& of)
        : api(api), of(of), threads(api.whole_number(info, "threads")) {
        want(threads >= 1, "threads must be positive");
        for (const auto& option : of.options) {
            const char* const name = option.name.c_str();
            numbers.push_back(option.is_float ? api.number(info, name) : 0);
            whole.push_back(option.is_float ? 0 : api.whole_number(info, name));
        }
    }

    static int64_t address(const void* data) { return reinterpret_cast<int64_t>(data); }

    // Sizes of axes by their letters; a digit is itself.
    struct Sizes {
        int64_t of[128];
        Sizes() {
            std::fill(of, of + 128, -1);
            for (char digit = '0'; digit <= '9'; digit++) of[int(digit)] = digit - '0';
        }
        int64_t& operator[](char axis) { return of[int(axis) & 127]; }
    };

    static std::string text(char axis) { return std::string(1, axis); }

    int64_t value(const std::string& said, Sizes& sizes) const {
        const size_t over = said.find('/');
        int64_t total = 0;
        std::istringstream terms(said.substr(0, over));
        for (std::string term; std::getline(terms, term, '+');) {
            int64_t product = 1;
            std::istringstream factors(term);
            for (std::string factor; std::getline(factors, factor, '*');)
                product *= named(factor, sizes);
            total += product;
        }
        if (over == std::string::npos) return total;
        return total / std::max<int64_t>(1, named(said.substr(over + 1), sizes));
    }
    int64_t named(const std::string& factor, Sizes& sizes) const {
        if (std::isupper(factor[0])) return sizes[factor[0]];
        for (size_t i = 0; i < of.options.size(); i++)
            if (of.options[i].name == factor) return whole[i];
        return std::stoll(factor);
    }

    void check(const Declared::Rule& rule, const std::vector<ort::Tensor>& given, Sizes& sizes) const {
        const std::string& axes = rule.axes;
        int64_t &first = sizes[axes[0]], &second = sizes[axes[1]];
        if (rule.kind == Declared::Rule::LESS) first = second - rule.number;
        if (rule.kind == Declared::Rule::MADE) first = std::max<int64_t>(0, value(rule.sum, sizes));
        if (rule.kind == Declared::Rule::LEAST && first < 1)
            throw std::invalid_argument(text(axes[0]) + " must be at least 1");
        if (rule.kind == Declared::Rule::MULTIPLE && (second < 1 || first % second != 0))
            throw std::invalid_argument(
                text(axes[0]) + " must be a multiple of " + text(axes[1]));
        if (rule.kind != Declared::Rule::FIT || !given[rule.number].value) return;
        const std::vector<int64_t>& found = given[rule.number].sizes;
        bool fits = found.size() == axes.size();
        for (size_t i = 0; fits && i < axes.size(); i++) {
            if (sizes[axes[i]] < 0) sizes[axes[i]] = found[i];
            fits = sizes[axes[i]] == found[i];
        }
        if (fits) return;
        std::string wanted;
        for (char axis : axes) wanted += (wanted.empty() ? "" : ", ") + text(axis);
        throw std::invalid_argument(of.operands[rule.number].name + " must be [" + wanted + "]");
    }

    void run(ort::Context* context) const {
        std::vector<ort::Tensor> given;
        given.reserve(of.operands.size());
        for (size_t i = 0; i < of.operands.size(); i++) given.emplace_back(api, context, i);
        Sizes sizes;
        for (const auto& rule : of.rules) check(rule, given, sizes);
        std::vector<int64_t> members, shape;
        members.reserve(of.members());
        for (const auto& tensor : given) members.push_back(address(tensor.data<void>(api)));
        for (size_t i = 0; i < of.results.size(); i++) {
            const Declared::Result& result = of.results[i];
            shape.clear();
            for (char axis : result.axes) shape.push_back(sizes[axis]);
            const auto& wanted = result.like < 0 ? shape : given[result.like].sizes;
            members.push_back(address(api.data<void>(api.output(context, i, wanted))));
        }
        for (char axis : of.sizes) members.push_back(std::max<int64_t>(0, sizes[axis]));
        for (size_t i = 0; i < of.options.size(); i++)
            members.push_back(of.options[i].is_float ? address(&numbers[i]) : whole[i]);
        of.kernel->with_team(members.data(), Pool(api, context, threads));
    }
};

struct DeclaredOp : OpOf<DeclaredNode> {
    Declared of;
    static const Declared& self(const CustomOp* op) { return static_cast<const DeclaredOp*>(op)->of; }

    explicit DeclaredOp(Declared declared) : of(std::move(declared)) {
        name = [](const CustomOp* op) { return self(op).name.c_str(); };
        input_type = [](const CustomOp* op, size_t place) { return self(op).operands[place].type; };
        input_count = [](const CustomOp* op) { return self(op).operands.size(); };
        input_presence = [](const CustomOp* op, size_t place) {
            return self(op).operands[place].optional ? ort::OPTIONAL : ort::REQUIRED;
        };
        output_type = [](const CustomOp* op, size_t place) { return self(op).results[place].type; };
        output_count = [](const CustomOp* op) { return self(op).results.size(); };
        create = [](const CustomOp* op, const ort::Api* api, const ort::Info* info, void** made) {
            return ort::guarded(*api, [&] { *made = new DeclaredNode(*api, info, self(op)); });
        };
    }
};

// The ops that were declared in this process, before a session asked for them.
inline std::list<DeclaredOp>& declared_ops() {
    static std::list<DeclaredOp> ops;
    return ops;
}

}  // namespace graftwork
