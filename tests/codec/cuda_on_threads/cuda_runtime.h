// As much of CUDA as codec_cuda.cu uses, on CPU threads: the kernels' logic can be tested without a GPU. A
// launch runs its blocks one after the other, each on blockDim.x threads that meet at real barriers. What
// this cannot show is what only a device has: its own rounding, its memory model, its speed.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __constant__
#define __launch_bounds__(...)

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorMemoryAllocation };
enum cudaMemcpyKind { cudaMemcpyDeviceToDevice };

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x_ = 1) : x(x_) {}
};

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(8) ushort4 {
  unsigned short x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline ushort4 make_ushort4(unsigned short x, unsigned short y, unsigned short z, unsigned short w) {
  return {x, y, z, w};
}

inline thread_local dim3 threadIdx{0}, blockIdx{0};
inline dim3 blockDim, gridDim;

namespace cuda_on_threads {

struct Meeting {
  explicit Meeting(unsigned threads) : barrier(threads), words(threads), flags(threads) {
    for (unsigned warp = 0; warp < threads / 32; ++warp) warps.emplace_back(32);
  }
  std::barrier<> barrier;
  std::deque<std::barrier<>> warps;
  std::vector<uint32_t> words;
  std::vector<int> flags;
};
inline std::unique_ptr<Meeting> meeting;

}  // namespace cuda_on_threads

inline void __syncthreads() { cuda_on_threads::meeting->barrier.arrive_and_wait(); }

inline void __syncwarp() { cuda_on_threads::meeting->warps[threadIdx.x / 32].arrive_and_wait(); }

inline int __syncthreads_or(int flag) {
  cuda_on_threads::Meeting& meeting = *cuda_on_threads::meeting;
  meeting.flags[threadIdx.x] = flag;
  meeting.barrier.arrive_and_wait();
  const bool any = std::any_of(meeting.flags.begin(), meeting.flags.end(), [](int f) { return f != 0; });
  meeting.barrier.arrive_and_wait();
  return any;
}

// All threads of the warp call it.
template <class Word>
Word __shfl_xor_sync(unsigned, Word x, int distance) {
  static_assert(sizeof(Word) == sizeof(uint32_t));
  cuda_on_threads::Meeting& meeting = *cuda_on_threads::meeting;
  std::barrier<>& warp = meeting.warps[threadIdx.x / 32];
  meeting.words[threadIdx.x] = std::bit_cast<uint32_t>(x);
  warp.arrive_and_wait();
  const uint32_t other = meeting.words[threadIdx.x ^ static_cast<unsigned>(distance)];
  warp.arrive_and_wait();
  return std::bit_cast<Word>(other);
}

inline unsigned __ballot_sync(unsigned, bool flag) {
  cuda_on_threads::Meeting& meeting = *cuda_on_threads::meeting;
  std::barrier<>& warp = meeting.warps[threadIdx.x / 32];
  meeting.words[threadIdx.x] = flag ? 1 : 0;
  warp.arrive_and_wait();
  unsigned all = 0;
  for (unsigned lane = 0; lane < 32; ++lane) all |= meeting.words[threadIdx.x / 32 * 32 + lane] << lane;
  warp.arrive_and_wait();
  return all;
}

inline unsigned atomicAdd(unsigned* word, unsigned x) { return std::atomic_ref(*word).fetch_add(x); }
inline unsigned atomicOr(unsigned* word, unsigned x) { return std::atomic_ref(*word).fetch_or(x); }
inline int __popc(unsigned x) { return std::popcount(x); }

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline int __float2int_rn(float x) {
  if (x != x) return 0;
  return static_cast<int>(std::nearbyint(std::clamp(static_cast<double>(x), -2147483648.0, 2147483647.0)));
}
inline int min(int a, int b) { return std::min(a, b); }
inline int max(int a, int b) { return std::max(a, b); }
inline unsigned min(unsigned a, unsigned b) { return std::min(a, b); }
inline unsigned max(unsigned a, unsigned b) { return std::max(a, b); }
inline size_t min(size_t a, size_t b) { return std::min(a, b); }

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream = nullptr;
};

template <class Kernel, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, Kernel kernel, Args... args) {
  // Fewer blocks than asked for: a kernel that goes on to the next block of numbers has to show it.
  gridDim.x = std::min(config->gridDim.x, 2u);
  blockDim = config->blockDim;
  cuda_on_threads::meeting = std::make_unique<cuda_on_threads::Meeting>(blockDim.x);
  std::vector<std::jthread> threads;
  for (unsigned t = 0; t < blockDim.x; ++t) {
    threads.emplace_back([=] {
      threadIdx.x = t;
      for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
        kernel(args...);
        __syncthreads();
      }
    });
  }
  return cudaSuccess;
}

inline cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memcpy(dst, src, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) {
  *pointer = std::malloc(bytes);
  return *pointer == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
inline cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) {
  std::free(pointer);
  return cudaSuccess;
}
inline const char* cudaGetErrorString(cudaError_t) { return "out of memory"; }
