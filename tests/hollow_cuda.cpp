// A CUDA runtime whose device is this machine's memory and whose kernels do nothing.
//
// Copies and fills are real, so that what sessions move is there; streams, events and graphs are
// counted. Written against the interface of CUDA 13 by its documentation; all that is not here
// succeeds and does nothing (see hollow_cuda.py).

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>

namespace {

using Code = int;  // 0: success

struct Grid {
    unsigned x, y, z;
};

struct Launch {
    Grid blocks, threads;
    size_t shared;
    void* stream;
};

constexpr size_t MEMORY = size_t{80} << 30;
constexpr int VERSION = 13000;

std::mutex guard;
std::unordered_map<void*, size_t> sizes;
long held = 0, launched = 0, captured = 0, replayed = 0;
void* capturing = nullptr;
char anything[64];
thread_local Launch pending;

Code take(void** place, size_t bytes) {
    *place = std::aligned_alloc(256, (bytes + 511) / 256 * 256);
    std::lock_guard<std::mutex> alone(guard);
    sizes[*place] = bytes;
    held += static_cast<long>(bytes);
    return 0;
}

Code give(void* place) {
    std::lock_guard<std::mutex> alone(guard);
    held -= static_cast<long>(sizes[place]);
    sizes.erase(place);
    std::free(place);
    return 0;
}

template <typename T>
void put(void* record, size_t offset, T value) {
    std::memcpy(static_cast<char*>(record) + offset, &value, sizeof value);
}

Code make(void** place) {
    *place = std::malloc(8);
    return 0;
}

}  // namespace

extern "C" {

long hollow_held() { return held; }
long hollow_launched() { return launched; }
long hollow_captured() { return captured; }
long hollow_replayed() { return replayed; }

Code cudaMalloc(void** place, size_t bytes) { return take(place, bytes); }
Code cudaMallocHost(void** place, size_t bytes) { return take(place, bytes); }
Code cudaHostAlloc(void** place, size_t bytes, unsigned) { return take(place, bytes); }
Code cudaMallocFromPoolAsync(void** place, size_t bytes, void*, void*) {
    return take(place, bytes);
}
Code cudaFree(void* place) { return give(place); }
Code cudaFreeHost(void* place) { return give(place); }
Code cudaFreeAsync(void* place, void*) { return give(place); }

Code cudaMemcpy(void* to, const void* from, size_t bytes, int) {
    std::memmove(to, from, bytes);
    return 0;
}
Code cudaMemcpyAsync(void* to, const void* from, size_t bytes, int, void*) {
    if (capturing == nullptr) std::memmove(to, from, bytes);
    return 0;
}
Code cudaMemset(void* to, int value, size_t bytes) {
    std::memset(to, value, bytes);
    return 0;
}
Code cudaMemsetAsync(void* to, int value, size_t bytes, void*) {
    if (capturing == nullptr) std::memset(to, value, bytes);
    return 0;
}

Code cudaGetDeviceCount(int* count) { return *count = 1, 0; }
Code cudaGetDevice(int* device) { return *device = 0, 0; }
Code cudaRuntimeGetVersion(int* version) { return *version = VERSION, 0; }
Code cudaDriverGetVersion(int* version) { return *version = VERSION, 0; }
Code cudaMemGetInfo(size_t* free, size_t* total) {
    *total = MEMORY;
    *free = MEMORY - static_cast<size_t>(held);
    return 0;
}

// cudaDeviceProp of CUDA 13: 1008 bytes, of a device like an H100.
Code cudaGetDeviceProperties(void* record, int) {
    std::memset(record, 0, 1008);
    std::strcpy(static_cast<char*>(record), "hollow");
    put<size_t>(record, 288, MEMORY);  // totalGlobalMem
    put<size_t>(record, 296, 49152);   // sharedMemPerBlock
    put<int>(record, 304, 65536);      // regsPerBlock
    put<int>(record, 308, 32);         // warpSize
    put<int>(record, 320, 1024);       // maxThreadsPerBlock
    for (int axis = 0; axis < 3; ++axis) {
        put<int>(record, 324 + 4 * axis, axis < 2 ? 1024 : 64);           // maxThreadsDim
        put<int>(record, 336 + 4 * axis, axis < 1 ? 2147483647 : 65535);  // maxGridSize
    }
    put<size_t>(record, 352, 65536);   // totalConstMem
    put<int>(record, 360, 9);          // major
    put<size_t>(record, 368, 512);     // textureAlignment
    put<int>(record, 384, 132);        // multiProcessorCount
    put<int>(record, 588, 1);          // unifiedAddressing
    put<int>(record, 596, 50 << 20);   // l2CacheSize
    put<int>(record, 604, 2048);       // maxThreadsPerMultiProcessor
    put<size_t>(record, 624, 233472);  // sharedMemPerMultiprocessor
    put<int>(record, 632, 65536);      // regsPerMultiprocessor
    put<size_t>(record, 672, 232448);  // sharedMemPerBlockOptin
    put<int>(record, 688, 32);         // maxBlocksPerMultiProcessor
    return 0;
}
Code cudaDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
        case 1: *value = 1024; break;     // threads a block
        case 8: *value = 49152; break;    // shared memory a block
        case 10: *value = 32; break;      // threads a warp
        case 16: *value = 132; break;     // multiprocessors
        case 39: *value = 2048; break;    // threads a multiprocessor
        case 75: *value = 9; break;       // compute capability, major
        case 76: *value = 0; break;       // and minor
        case 81: *value = 233472; break;  // shared memory a multiprocessor
        case 97: *value = 232448; break;  // shared memory a block that opts in
        default: *value = 1;
    }
    return 0;
}
Code cudaPointerGetAttributes(void* record, const void* place) {
    std::memset(record, 0, 88);
    put<int>(record, 0, 2);  // memory of the device
    put<const void*>(record, 8, place);
    put<const void*>(record, 16, place);
    return 0;
}
const char* cudaGetErrorString(Code) { return "a fault of the hollow runtime"; }
const char* cudaGetErrorName(Code) { return "hollow"; }

Code cudaStreamCreate(void** stream) { return make(stream); }
Code cudaStreamCreateWithFlags(void** stream, unsigned) { return make(stream); }
Code cudaEventCreate(void** event) { return make(event); }
Code cudaEventCreateWithFlags(void** event, unsigned) { return make(event); }
Code cudaEventElapsedTime(float* milliseconds, void*, void*) { return *milliseconds = 1, 0; }

Code cudaStreamBeginCapture(void* stream, int) { return capturing = stream, ++captured, 0; }
Code cudaStreamEndCapture(void*, void** graph) { return capturing = nullptr, *graph = anything, 0; }
Code cudaStreamIsCapturing(void*, int* state) { return *state = capturing != nullptr, 0; }
Code cudaGraphInstantiate(void** made, void*, unsigned long long) { return *made = anything, 0; }
Code cudaGraphLaunch(void*, void*) { return ++replayed, 0; }
Code cudaMemPoolCreate(void** pool, const void*) { return *pool = anything, 0; }

Code cudaFuncGetAttributes(void* record, const void*) {
    std::memset(record, 0, 144);
    put<int>(record, 24, 1024);  // threads a block
    put<int>(record, 32, 90);    // compiled for
    put<int>(record, 36, 90);
    return 0;
}
Code cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* blocks, const void*, int, size_t, unsigned) {
    return *blocks = 2, 0;
}
Code cudaLaunchKernel(const void*, Grid, Grid, void**, size_t, void*) { return ++launched, 0; }
Code __cudaLaunchKernel(void*, Grid, Grid, void**, size_t, void*) { return ++launched, 0; }
Code cudaLaunchKernelExC(const void*, const void*, void**) { return ++launched, 0; }
Code __cudaGetKernel(void** kernel, const void*) { return *kernel = anything, 0; }
void** __cudaRegisterFatBinary(void*) {
    static void* binary;
    return &binary;
}
unsigned __cudaPushCallConfiguration(Grid blocks, Grid threads, size_t shared, void* stream) {
    pending = {blocks, threads, shared, stream};
    return 0;
}
Code __cudaPopCallConfiguration(Grid* blocks, Grid* threads, size_t* shared, void* stream) {
    *blocks = pending.blocks;
    *threads = pending.threads;
    *shared = pending.shared;
    std::memcpy(stream, &pending.stream, sizeof pending.stream);
    return 0;
}
Code cudaGetDriverEntryPointByVersion(
    const char*, void** entry, unsigned, unsigned long long, int* found) {
    *entry = nullptr;
    if (found != nullptr) *found = 1;  // there is none
    return 0;
}

}  // extern "C"
