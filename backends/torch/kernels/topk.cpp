// The largest values of rows: what drafts are made of. The library's call cannot be part of a run
// of kernels, and shares a single row out among threads.

#include <cmath>
#include <cstdint>
#include <limits>

namespace {

const float LEAST = -std::numeric_limits<float>::infinity();
const int64_t LOOK = 32;  // values that are compared with the least of the best at once

// Whether a stands before b; what is no number counts as the largest.
inline bool before(float a, float b) { return a > b || (std::isnan(a) && !std::isnan(b)); }

void best_of_row(const float* x, int64_t N, int64_t count, float* best, int64_t* places) {
    int64_t held = 0;
    for (int64_t begin = 0; begin < N; begin += LOOK) {
        const int64_t end = begin + LOOK < N ? begin + LOOK : N;
        const float least = held == count ? best[count - 1] : LEAST;
        bool some = held < count;
        for (int64_t n = begin; n < end; n++) some |= !(x[n] <= least);
        for (int64_t n = begin; some && n < end; n++) {
            if (held == count && !before(x[n], best[count - 1])) continue;
            int64_t at = held < count ? held++ : count - 1;
            for (; at > 0 && before(x[n], best[at - 1]); at--) {
                best[at] = best[at - 1];
                places[at] = places[at - 1];
            }
            best[at] = x[n];
            places[at] = n;
        }
    }
}

}  // namespace

extern "C" {

// best [rows, count]: the largest values of each row of x [rows, N], the largest first, of equal
// ones the first; places [rows, count]: where they are. count in 1..N.
void topk(
    const float* x,
    float* best,
    int64_t* places,
    int64_t rows,
    int64_t N,
    int64_t count,
    int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows > 1)
    for (int64_t row = 0; row < rows; row++)
        best_of_row(x + row * N, N, count, best + row * count, places + row * count);
}

}
