// What a library of ops needs of ONNX Runtime's C interface, whose header no package brings.
//
// The interface is a table of functions, of which none ever moves: by the project's rule new ones
// are appended. So a function is known by its place, and its arguments are those of
// onnxruntime_c_api.h. Whether all of this holds for the runtime at hand, a small graph is to show
// before anything relies on it.

#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace ort {

struct Status;
struct Value;
struct Options;
struct Context;  // of one run of a kernel
struct Info;     // of a node
struct Domain;
struct Shape;    // and type, of a tensor

constexpr uint32_t VERSION = 20;  // of the table, and of `CustomOp`

enum Element : int {
    ANY = 0, FLOAT = 1, UINT8 = 2, INT8 = 3, INT64 = 7, BOOL = 9, FLOAT16 = 10
};
enum Presence : int { REQUIRED = 0, OPTIONAL = 1 };

// What the runtime said is wrong, to be handed back to it.
struct Failed {
    Status* status;
};

struct Api {
    typedef void (*Entry)();
    Entry entries[275];

    template <class Result, class... Arguments>
    Result call(int place, Arguments... arguments) const {
        return reinterpret_cast<Result (*)(Arguments...)>(entries[place])(arguments...);
    }
    template <class... Arguments>
    void ask(int place, Arguments... arguments) const {
        Status* const status = call<Status*>(place, arguments...);
        if (status) throw Failed{status};
    }

    Status* fail(const char* text) const { return call<Status*>(0, 2, text); }
    Domain* create_domain(const char* name) const {
        Domain* domain = nullptr;
        ask(26, name, &domain);
        return domain;
    }
    void add_op(Domain* domain, const struct CustomOp* op) const { ask(27, domain, op); }
    void add_domain(Options* options, Domain* domain) const { ask(28, options, domain); }
    template <class T>
    T* data(const Value* value) const {
        void* address = nullptr;
        ask(51, const_cast<Value*>(value), &address);
        return static_cast<T*>(address);
    }
    Element type(const Shape* shape) const {
        Element type = ANY;
        ask(60, shape, &type);
        return type;
    }
    std::vector<int64_t> sizes(const Shape* shape) const {
        size_t count = 0;
        ask(61, shape, &count);
        std::vector<int64_t> sizes(count);
        ask(62, shape, sizes.data(), count);
        return sizes;
    }
    Shape* shape(const Value* value) const {
        Shape* shape = nullptr;
        ask(65, value, &shape);
        return shape;
    }
    float number(const Info* info, const char* name) const {
        float value = 0;
        ask(85, info, name, &value);
        return value;
    }
    int64_t whole_number(const Info* info, const char* name) const {
        int64_t value = 0;
        ask(86, info, name, &value);
        return value;
    }
    size_t inputs(const Context* context) const {
        size_t count = 0;
        ask(88, context, &count);
        return count;
    }
    const Value* input(const Context* context, size_t place) const {
        const Value* value = nullptr;
        if (place < inputs(context)) ask(90, context, place, &value);
        return value;
    }
    Value* output(Context* context, size_t place, const std::vector<int64_t>& sizes) const {
        Value* value = nullptr;
        ask(91, context, place, sizes.data(), sizes.size(), &value);
        return value;
    }
    void release(Shape* shape) const { call<void>(99, shape); }
    void parallel(Context* context, void (*work)(void*, size_t), size_t count, void* with) const {
        ask(274, context, work, count, size_t(0), with);
    }
};

struct ApiBase {
    const Api* (*get)(uint32_t version);
    const char* (*version)();
};

// OrtCustomOp, as of VERSION. What is null is not asked for.
struct CustomOp {
    uint32_t version = VERSION;
    void* (*create_v1)(const CustomOp*, const Api*, const Info*) = nullptr;
    const char* (*name)(const CustomOp*) = nullptr;
    const char* (*provider)(const CustomOp*) = nullptr;
    Element (*input_type)(const CustomOp*, size_t) = nullptr;
    size_t (*input_count)(const CustomOp*) = nullptr;
    Element (*output_type)(const CustomOp*, size_t) = nullptr;
    size_t (*output_count)(const CustomOp*) = nullptr;
    void (*compute_v1)(void*, Context*) = nullptr;
    void (*destroy)(void*) = nullptr;
    Presence (*input_presence)(const CustomOp*, size_t) = nullptr;
    Presence (*output_presence)(const CustomOp*, size_t) = nullptr;
    int (*memory)(const CustomOp*, size_t) = nullptr;
    int (*least_variadic_inputs)(const CustomOp*) = nullptr;
    int (*alike_variadic_inputs)(const CustomOp*) = nullptr;
    int (*least_variadic_outputs)(const CustomOp*) = nullptr;
    int (*alike_variadic_outputs)(const CustomOp*) = nullptr;
    Status* (*create)(const CustomOp*, const Api*, const Info*, void**) = nullptr;
    Status* (*compute)(void*, Context*) = nullptr;
    Status* (*infer_shape)(const CustomOp*, void*) = nullptr;
    int (*first_opset)(const CustomOp*) = nullptr;
    int (*last_opset)(const CustomOp*) = nullptr;
    size_t (*in_place)(int**, int**) = nullptr;
    void (*release_in_place)(int*, int*) = nullptr;
    size_t (*aliases)(int**, int**) = nullptr;
    void (*release_aliases)(int*, int*) = nullptr;
};

// A tensor: none if `value` is null.
struct Tensor {
    const Value* value;
    Element type = ANY;
    std::vector<int64_t> sizes;

    Tensor(const Api& api, const Context* context, size_t place)
        : value(api.input(context, place)) {
        if (!value) return;
        Shape* const shape = api.shape(value);
        try {
            type = api.type(shape);
            sizes = api.sizes(shape);
        } catch (...) {
            api.release(shape);
            throw;
        }
        api.release(shape);
    }

    // Where it lies: null if there is none.
    template <class T>
    const T* data(const Api& api) const {
        return value ? api.data<const T>(value) : nullptr;
    }
    bool is(const std::vector<int64_t>& wanted) const { return !value || sizes == wanted; }
    bool is_float_or_half() const { return !value || type == FLOAT || type == FLOAT16; }
};

// The result of a callback: what `function` throws as a status.
template <class Function>
Status* guarded(const Api& api, const Function& function) noexcept {
    try {
        function();
        return nullptr;
    } catch (const Failed& failed) {
        return failed.status;
    } catch (const std::exception& error) {
        return api.fail(error.what());
    }
}

}  // namespace ort
