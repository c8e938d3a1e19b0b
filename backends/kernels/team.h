// Who shares a kernel's work out among threads.

#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>

namespace graftwork {

struct Team {
    typedef std::function<void(int64_t)> Work;

    // Threads that there may be: work in fewer parts than that keeps some of them waiting.
    virtual int64_t threads() const = 0;
    // Calls work(i) for all i < count, in any order and from any threads, each of which reads about
    // so many bytes.
    virtual void each(int64_t count, int64_t bytes, const Work& work) const = 0;

protected:
    ~Team() = default;
};

inline void want(bool holds, const char* text) {
    if (!holds) throw std::invalid_argument(text);
}

// Throws for an index of which there are not so many.
inline void check_index(int64_t index, int64_t count) {
    if (index < 0 || index >= count)
        throw std::out_of_range(
            "index " + std::to_string(index) + " lies outside 0.." + std::to_string(count - 1));
}

}  // namespace graftwork
