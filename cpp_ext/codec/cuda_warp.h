// What the lanes of a warp make of their words together. Included by codec_cuda.cu only. All lanes call it,
// and all get the result.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace baguarun::codec::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;

template <class Combine>
__device__ auto combinedOfWarp(auto x, Combine combine) {
  for (int distance = 16; distance > 0; distance /= 2) {
    x = combine(x, __shfl_xor_sync(kAllLanes, x, distance));
  }
  return x;
}

// One instruction where there is one.
__device__ inline uint32_t warpSum(uint32_t x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_add_sync(kAllLanes, x);
#else
  return combinedOfWarp(x, [](uint32_t a, uint32_t b) { return a + b; });
#endif
}

__device__ inline int warpLeast(int x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_min_sync(kAllLanes, x);
#else
  return combinedOfWarp(x, [](int a, int b) { return min(a, b); });
#endif
}

__device__ inline int warpGreatest(int x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kAllLanes, x);
#else
  return combinedOfWarp(x, [](int a, int b) { return max(a, b); });
#endif
}

}  // namespace baguarun::codec::cuda
