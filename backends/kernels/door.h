// How callers in this process, such as torch, and ONNX Runtime call the kernel of an op.
//
// A kernel takes a struct of 8-byte members: the addresses of the op's operands and results, as the
// op declares them, the sizes that its declaration names (`Native` in ir/ops), and its options. Of
// what is absent the address is null.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "team.h"

namespace graftwork {

// An option that is a floating number.
struct Number {
    const float* at;
    operator float() const { return *at; }
};

// Threads of OpenMP.
struct Threads final : Team {
    int64_t count;
    explicit Threads(int64_t count) : count(count) {}
    int64_t threads() const override { return count; }
    void each(int64_t number, int64_t, const Work& work) const override {
        // Not a region of one thread: OpenMP would let the team of the last region go.
        if (number == 1) return work(0);
#pragma omp parallel for schedule(static) num_threads(count)
        for (int64_t i = 0; i < number; i++) work(i);
    }
};

// A kernel's entries, and how many members it takes (`backends/own_kernels.py` compares them with the
// op's declaration). with_threads: takes the members, and a number of threads, one by one.
struct Kernel {
    void (*with_threads)();
    void (*with_team)(const int64_t* members, const Team& team);
    int64_t members;
};

template <class Given, void (*run)(const Given&, const Team&)>
struct Door {
    static_assert(std::is_trivially_copyable<Given>::value, "members are addresses and numbers");
    static_assert(sizeof(Given) % sizeof(int64_t) == 0, "members have 8 bytes each");

    static void with_team(const int64_t* members, const Team& team) {
        Given given;
        std::memcpy(&given, members, sizeof given);
        run(given, team);
    }
    template <size_t>
    using Member = int64_t;

    template <size_t... place>
    static void with_threads(Member<place>... members, int64_t threads) {
        const int64_t all[] = {members...};
        with_team(all, Threads(threads));
    }
    template <size_t... place>
    static constexpr auto entry(std::index_sequence<place...>) {
        return &with_threads<place...>;
    }
    static Kernel entries() {
        constexpr size_t count = sizeof(Given) / sizeof(int64_t);
        const auto places = std::make_index_sequence<count>();
        return {reinterpret_cast<void (*)()>(entry(places)), with_team, int64_t(count)};
    }
};

// Defines the kernel of an op; what follows is its body, of `given` and `team`.
#define KERNEL(NAME, Given)                                                              \
    static void run_##NAME(const Given& given, const graftwork::Team& team);             \
    extern "C" {                                                                         \
    extern const graftwork::Kernel NAME##_kernel;                                        \
    const graftwork::Kernel NAME##_kernel = graftwork::Door<Given, run_##NAME>::entries(); \
    }                                                                                    \
    static void run_##NAME(const Given& given, const graftwork::Team& team)

}  // namespace graftwork
