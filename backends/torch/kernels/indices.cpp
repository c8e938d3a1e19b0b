// Looking indices up is left to the compiler, whose own checks throw among a team of threads, which
// ends the process. So indices are looked at before.

#include <cstdint>
#include <stdexcept>
#include <string>

extern "C" {

// y [count] = x [count], all of which must be in first..last.
void indices(const int64_t* x, int64_t* y, int64_t count, int64_t first, int64_t last) {
    for (int64_t i = 0; i < count; i++) {
        if (x[i] < first || x[i] > last)
            throw std::out_of_range(
                "index " + std::to_string(x[i]) + " lies outside " + std::to_string(first) + ".." +
                std::to_string(last));
        y[i] = x[i];
    }
}

}
