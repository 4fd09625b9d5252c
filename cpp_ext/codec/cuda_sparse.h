// topk and randomk on CUDA. Included by codec_cuda.cu only. All functions are called by all threads of a
// block, and end with a barrier, so that the shared memory is free again.
#pragma once

#include "cuda_load.h"
#include "sparse.h"

namespace baguarun::codec::cuda {

// A thread for each number kept.
static_assert(kMostKept <= kThreads);

// A bit for each number of the block.
constexpr int kKeptWords = static_cast<int>(kBlockElems) / 32;

__device__ inline void clear(uint32_t* kept) {
  for (unsigned i = threadIdx.x; i < kKeptWords; i += kThreads) kept[i] = 0;
}
__device__ inline void mark(uint32_t* kept, uint32_t place) { atomicOr(&kept[place / 32], 1u << place % 32); }
__device__ inline bool isKept(const uint32_t* kept, uint32_t place) {
  return (kept[place / 32] >> place % 32 & 1u) != 0;
}

__device__ inline uint32_t keptBelow(const uint32_t* kept, uint32_t place) {
  uint32_t count = static_cast<uint32_t>(__popc(kept[place / 32] & ((1u << place % 32) - 1)));
  for (uint32_t word = 0; word < place / 32; ++word) count += static_cast<uint32_t>(__popc(kept[word]));
  return count;
}

struct Choice {
  Format format;
  size_t numel;
  size_t block;

  __device__ uint32_t kept() const { return keptOf(format.keep, blockLength(numel, block)); }
  // In the chunk, of the first one kept of this block.
  __device__ size_t first() const { return block * format.keep; }
  __device__ uint16_t* places(void* chunk) const {
    return reinterpret_cast<uint16_t*>(static_cast<float*>(chunk) + keptInAll(format.keep, numel));
  }
};

// Calls `use(i, place, x[quad][i])` for the numbers that exist.
template <class Use>
__device__ void forOwn(Quads& x, size_t numel, size_t block, Use use) {
  for (int quad = 0; quad < kQuads; ++quad) {
    const Place at = placeOf(numel, block, quad);
    for (int i = 0; i < kQuad; ++i) {
      if (i < at.valid) use(static_cast<uint32_t>(at.offset + i), x[quad][i]);
    }
  }
}

// x = before + src[0] + src[1] + ..., in that order; `before` may be null.
template <Wire wire>
__device__ void loadKept(const void* const* src, unsigned count, const float* before, Choice choice,
                         Quads& x) {
  __shared__ float sums[kBlockElems];
  const size_t n = blockLength(choice.numel, choice.block);
  for (size_t i = threadIdx.x; i < n; i += kThreads) {
    sums[i] = before == nullptr ? 0.0f : before[choice.block * kBlockElems + i];
  }
  __syncthreads();
  for (unsigned k = 0; k < count; ++k) {
    if (threadIdx.x < choice.kept()) {
      const size_t j = choice.first() + threadIdx.x;
      const float value = static_cast<const float*>(src[k])[j];
      uint32_t place;
      if constexpr (wire == Wire::topk) {
        place = choice.places(const_cast<void*>(src[k]))[j];
      } else {
        place = RandomOrder(choice.format.seed, choice.block, n).at(threadIdx.x);
      }
      // The device's sum would not keep the bits of a NaN, which one chunk alone has to.
      if (place < n) sums[place] = sums[place] == 0.0f ? value : __fadd_rn(sums[place], value);
    }
    __syncthreads();
  }
  forOwn(x, choice.numel, choice.block, [&](uint32_t place, float& own) { own = sums[place]; });
  __syncthreads();
}

// The lowest rank among the threads' highest that `kept` of them reach: whatever is kept is no lower, and at
// most 8 numbers per thread that reaches it are candidates.
__device__ inline uint64_t reachedRank(uint64_t mine, uint32_t kept) {
  __shared__ uint64_t highest[kThreads];
  __shared__ uint64_t reached;
  highest[threadIdx.x] = mine;
  __syncthreads();
  uint32_t higher = 0;
  for (int thread = 0; thread < kThreads; ++thread) higher += highest[thread] > mine ? 1u : 0u;
  // Threads without numbers have rank 0, too, but are more than `kept` threads down.
  if (higher == kept - 1) reached = mine;
  __syncthreads();
  return reached;
}

__device__ inline uint64_t ownRank(uint32_t place, float x) { return rankOf(magnitudeOf(x), place); }

// Marks the kept numbers of the block.
__device__ inline void chooseTop(Quads& x, Choice choice, uint32_t* kept) {
  __shared__ uint64_t candidates[kBlockElems];
  __shared__ uint32_t count;
  if (threadIdx.x == 0) count = 0;
  clear(kept);
  uint64_t highest = 0;
  forOwn(x, choice.numel, choice.block, [&](uint32_t place, float own) {
    const uint64_t rank = ownRank(place, own);
    highest = rank > highest ? rank : highest;
  });
  const uint64_t least = reachedRank(highest, choice.kept());
  forOwn(x, choice.numel, choice.block, [&](uint32_t place, float own) {
    const uint64_t rank = ownRank(place, own);
    if (rank >= least) candidates[atomicAdd(&count, 1u)] = rank;
  });
  __syncthreads();
  for (uint32_t c = threadIdx.x; c < count; c += kThreads) {
    uint32_t higher = 0;
    for (uint32_t other = 0; other < count; ++other) higher += candidates[other] > candidates[c] ? 1u : 0u;
    if (higher < choice.kept()) mark(kept, static_cast<uint32_t>(indexOf(candidates[c])));
  }
  __syncthreads();
}

// Writes the block, and leaves in x what the chunk decodes to.
__device__ inline void emitTop(Quads& x, Choice choice, void* chunk) {
  __shared__ uint32_t kept[kKeptWords];
  chooseTop(x, choice, kept);
  forOwn(x, choice.numel, choice.block, [&](uint32_t place, float& own) {
    own = isKept(kept, place) ? keptValue(own) : 0.0f;
    if (!isKept(kept, place)) return;
    const size_t j = choice.first() + keptBelow(kept, place);
    static_cast<float*>(chunk)[j] = own;
    choice.places(chunk)[j] = static_cast<uint16_t>(place);
  });
  __syncthreads();
}

__device__ inline void emitRandom(Quads& x, Choice choice, void* chunk) {
  __shared__ float numbers[kBlockElems];
  __shared__ uint32_t kept[kKeptWords];
  bool finite = true;
  clear(kept);
  forOwn(x, choice.numel, choice.block, [&](uint32_t place, float own) {
    numbers[place] = own;
    finite &= isFinite(own);
  });
  finite = __syncthreads_or(!finite) == 0;
  if (threadIdx.x < choice.kept()) {
    const RandomOrder order(choice.format.seed, choice.block, blockLength(choice.numel, choice.block));
    const uint32_t place = order.at(threadIdx.x);
    static_cast<float*>(chunk)[choice.first() + threadIdx.x] =
        finite ? keptValue(numbers[place]) : floatOf(kQuietNan);
    mark(kept, place);
  }
  __syncthreads();
  forOwn(x, choice.numel, choice.block, [&](uint32_t place, float& own) {
    if (isKept(kept, place)) {
      own = finite ? keptValue(own) : floatOf(kQuietNan);
    } else {
      own = 0.0f;
    }
  });
  __syncthreads();
}

}  // namespace baguarun::codec::cuda
