// What every kernel file begins with (put in front of it, not included: a module is compiled from one string).
//
// The same text is compiled by NVRTC for a device and by a C++ compiler for the host, where threadIdx and the like
// are plain variables and a launch is one call for each thread (or a single call: every loop strides over the grid).
// So kernels share nothing between threads, and their results do not depend on the size of the grid.
//
// Sums are made by the thread that owns the result, in one order: no atomics anywhere. Products and sums are not
// contracted (--fmad=false, -ffp-contract=off), so that both builds round as NumPy and the numba kernels do.
#ifdef __CUDACC__
#define KERNEL extern "C" __global__ void
#define INLINE static __device__ __forceinline__
#else
#include <cmath>
#include <cstring>
#define KERNEL extern "C" void
#define INLINE static inline
struct Index {
    unsigned int x;
};
static thread_local Index threadIdx = {0}, blockIdx = {0}, blockDim = {1}, gridDim = {1};
extern "C" void place_in_grid(unsigned int thread, unsigned int block, unsigned int threads, unsigned int blocks) {
    threadIdx.x = thread;
    blockIdx.x = block;
    blockDim.x = threads;
    gridDim.x = blocks;
}
static inline float __uint_as_float(unsigned int bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
#endif

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// for EACH(i, count): the thread's share of 0 .. count - 1. The variable is 64 bits wide, as the last step passes count.
#define EACH(i, count) \
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < (i64)(count); i += (i64)blockDim.x * gridDim.x

// The first window (of stride s, reaching k positions of dilation 1) that contains position p of the padded axis.
INLINE int first_window(int p, int k, int s) { return p < k ? 0 : (p - k) / s + 1; }
