// What a kernel is launched with. Included by codec_cuda.cu only.
#pragma once

#include "cuda_load.h"

namespace baguarun::codec::cuda {

constexpr size_t kMostSources = 64;  // in one kernel's parameters

// Plain ones; `at` may be null.
struct Numbers {
  const void* at = nullptr;
  DType dtype = DType::f32;
};

struct Sources {
  const void* src[kMostSources];
  unsigned count;
  Numbers before;  // the sum of earlier sources, or what these are added to
};

// The thread's part of a block of numbers whose type the launch knows.
__device__ inline void loadNumbers(Numbers numbers, Block block, Quads& x) {
  const auto load = [&](auto part) {
    part.fetch(numbers.at, block);
    part.template widen</*isSummed=*/false>(x);
  };
  switch (numbers.dtype) {
    case DType::f32:
      return load(Plain<Wire::f32>());
    case DType::f16:
      return load(Plain<Wire::f16>());
    case DType::bf16:
      return load(Plain<Wire::bf16>());
  }
}

struct Task {
  Sources sources;
  Format format;  // of what is not plain
  float scale;
  size_t numel;
  void* dst;
  float* residual;
  // How many blocks of numbers there are, and the first of them that have all their numbers and four of any
  // wire in one access, all memory above being aligned.
  uint32_t blocks = 0;
  uint32_t wholeBlocks = 0;
  uint32_t firstBlock = 0;  // that the kernel has to do with
  size_t keptInAll = 0;     // numbers in a chunk of topk

  __device__ Block block(uint32_t index) const { return {numel, blocks, index, index < wholeBlocks}; }
};

using Kernel = void (*)(Task);

// Where a warp has a block of numbers to itself: no barrier holds it up, and while it computes, others' loads
// are under way.
constexpr int kWarpsTogether = 4;
constexpr int kThreadsTogether = 32 * kWarpsTogether;
constexpr int kLaneNumbers = static_cast<int>(kBlockElems) / 32;

// How many blocks later a warp begins in some microseconds: what it will load is asked for then.
constexpr uint32_t kAhead = 1024;
constexpr uint32_t kLine = 128;  // of the second-level cache, in bytes

// Calls `use(index)` for the blocks before `end` that are this warp's.
template <class Use>
__device__ void forBlocksOfWarp(uint32_t end, Use use) {
  const uint32_t warp = blockIdx.x * kWarpsTogether + threadIdx.x / 32;
  for (uint32_t index = warp; index < end; index += gridDim.x * kWarpsTogether) use(index);
}

}  // namespace baguarun::codec::cuda
