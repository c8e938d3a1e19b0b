// Kernels one after the other, without Python between them.

#include <cstdint>
#include <exception>
#include <string>
#include <utility>

namespace {

constexpr int MOST = 128;  // arguments

typedef void (*Function)();

// A kernel and its arguments: addresses and whole numbers.
struct Call {
    Function function;
    const int64_t* arguments;
    int64_t count;
};

template <size_t... place>
void call(Function function, const int64_t* arguments, std::index_sequence<place...>) {
    typedef void (*Kernel)(decltype(int64_t(place))...);
    reinterpret_cast<Kernel>(function)(arguments[place]...);
}

template <size_t count>
void call_with(Function function, const int64_t* arguments) {
    call(function, arguments, std::make_index_sequence<count>());
}

typedef void (*Caller)(Function, const int64_t*);

template <size_t... count>
const Caller* callers(std::index_sequence<count...>) {
    static constexpr Caller all[] = {call_with<count>...};
    return all;
}

}  // namespace

extern "C" {

// Arguments that a kernel may have.
int32_t most_arguments() { return MOST; }

// None, or what a kernel threw, as text; those after it are not called.
const char* run(const Call* calls, int64_t count) {
    static thread_local std::string thrown;
    const Caller* const by_count = callers(std::make_index_sequence<MOST + 1>());
    try {
        for (int64_t i = 0; i < count; i++)
            by_count[calls[i].count](calls[i].function, calls[i].arguments);
        return nullptr;
    } catch (const std::exception& error) {
        thrown = error.what();
    }
    return thrown.c_str();
}

}
