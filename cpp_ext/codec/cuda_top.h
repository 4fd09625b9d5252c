// topk without a residual: a warp finds the numbers to keep of a block among those that its lanes hold.
// Included by codec_cuda.cu only.
#pragma once

#include "cuda_task.h"
#include "cuda_warp.h"
#include "sparse.h"

namespace baguarun::codec::cuda {

// Magnitudes of a whole block, as integers of the same order.
using LaneMagnitudes = uint32_t[kLaneNumbers];

// Where in the block a lane's number i lies.
__device__ inline uint32_t placeInBlock(int i) {
  return static_cast<uint32_t>(i / kQuad * 32 + static_cast<int>(threadIdx.x) % 32) * kQuad + i % kQuad;
}

// Calls `use(i, magnitude)` for the lane's numbers of a whole block.
template <Wire in, int atOnce, class Use>
__device__ void forLane(const void* src, Block block, Use use) {
  const auto* numbers = static_cast<const WordOf<in>*>(src) + block.first();
#pragma unroll atOnce
  for (int quad = 0; quad < kLaneNumbers / kQuad; ++quad) {
    WordOf<in> words[kQuad];
    loadQuad<WordOf<in>, VectorOf<in>>(numbers, {static_cast<int>(placeInBlock(quad * kQuad)), kQuad, true},
                                       words);
#pragma unroll
    for (int i = 0; i < kQuad; ++i) use(quad * kQuad + i, magnitudeOf(numberOf<in>(words[i])));
  }
}

// Magnitudes between which the least of those to be kept lies: `low` is reached by `count`, and these are
// enough; `high` is reached by too few, and `end` by none.
struct Bounds {
  uint32_t low;
  uint32_t high;
  uint32_t end;
  uint32_t count;

  // Until exactly `kept` reach `low`, or those that reach it and are too many are equal.
  template <class Reaching>
  __device__ void close(uint32_t kept, Reaching reaching) {
    while (count != kept && high - low > 1) {
      const uint32_t middle = low + (high - low) / 2;
      const uint32_t reached = warpSum(reaching(middle));
      if (reached >= kept) {
        low = middle;
        count = reached;
      } else {
        high = middle;
      }
    }
  }
};

// Of the greatest numbers of 32 * `groups` groups, which are no fewer than `kept`. What so many of these
// reach, so many numbers do, and few more.
template <int groups>
__device__ Bounds boundsByGroups(const LaneMagnitudes& magnitudes, uint32_t kept) {
  uint32_t greatest[groups] = {};
#pragma unroll
  for (int i = 0; i < kLaneNumbers; ++i) {
    uint32_t& group = greatest[i / (kLaneNumbers / groups)];
    group = max(group, magnitudes[i]);
  }
  uint32_t least = greatest[0];
  uint32_t most = greatest[0];
#pragma unroll
  for (const uint32_t each : greatest) {
    least = min(least, each);
    most = max(most, each);
  }
  // Magnitudes have 31 bits.
  const uint32_t end = static_cast<uint32_t>(warpGreatest(static_cast<int>(most))) + 1;
  Bounds bounds{static_cast<uint32_t>(warpLeast(static_cast<int>(least))), end, end, 32 * groups};
  bounds.close(kept, [&](uint32_t magnitude) {
    uint32_t reaching = 0;
#pragma unroll
    for (const uint32_t each : greatest) reaching += each >= magnitude ? 1u : 0u;
    return reaching;
  });
  return bounds;
}

// Of the numbers of that magnitude only those before a place are kept, besides all that are greater.
struct Limit {
  uint32_t magnitude;
  uint32_t place;

  __device__ bool admits(uint32_t other, uint32_t at) const {
    return other > magnitude || (other == magnitude && at < place);
  }
};

// What exactly `kept` numbers are within, of which more reach `low`. For blocks of many equal numbers: they
// are looked at again and again where they lie.
template <Wire in>
__device__ Limit exactLimit(const void* src, Block block, Bounds bounds, uint32_t kept) {
  const auto admitted = [&](Limit limit) {
    uint32_t count = 0;
    forLane<in, 4>(src, block, [&](int i, uint32_t magnitude) {
      count += limit.admits(magnitude, placeInBlock(i)) ? 1u : 0u;
    });
    return count;
  };
  // Too few of the groups' greatest reach the upper one, but more numbers may.
  bounds.high = bounds.end;
  bounds.count = kBlockElems;
  bounds.close(kept, [&](uint32_t magnitude) { return admitted({magnitude, kBlockElems}); });
  Limit limit{bounds.low, kBlockElems};
  uint32_t tooFew = 0;
  while (bounds.count != kept && limit.place - tooFew > 1) {
    const uint32_t middle = (limit.place + tooFew) / 2;
    (warpSum(admitted({bounds.low, middle})) >= kept ? limit.place : tooFew) = middle;
  }
  return limit;
}

// Ranks of numbers of a block, in no order: more than there is room for are counted only.
struct Candidates {
  uint64_t ranks[kMostKept];
  uint64_t kept[kMostKept];
  uint32_t count;

  // Called by all lanes.
  __device__ void clear() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) count = 0;
    __syncwarp();
  }
  __device__ void add(uint32_t magnitude, uint32_t place) {
    const uint32_t slot = atomicAdd(&count, 1u);
    if (slot < kMostKept) ranks[slot] = rankOf(magnitude, place);
  }
};

template <Wire in>
__device__ void loadAheadOfWarp(const Task& task, uint32_t index) {
  constexpr uint32_t kBytes = kBlockElems * sizeof(WordOf<in>);
  if (index + kAhead >= task.wholeBlocks) return;
  const auto* next = static_cast<const char*>(task.sources.src[0]) + size_t{index + kAhead} * kBytes;
#pragma unroll
  for (uint32_t line = 0; line < kBytes; line += 32 * kLine) prefetch(next + line + threadIdx.x % 32 * kLine);
}

// Whole blocks.
template <Wire in>
__global__ void __launch_bounds__(kThreadsTogether, 4) encodeTop(Task task) {
  __shared__ Candidates byWarp[kWarpsTogether];
  Candidates& candidates = byWarp[threadIdx.x / 32];
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t kept = task.format.keep;
  const auto* src = static_cast<const WordOf<in>*>(task.sources.src[0]);
  auto* values = static_cast<float*>(task.dst);
  auto* places = reinterpret_cast<uint16_t*>(values + keptInAll(kept, task.numel));
  forBlocksOfWarp(task.wholeBlocks, [&](uint32_t index) {
    const Block block = task.block(index);
    LaneMagnitudes magnitudes;
    forLane<in, kLaneNumbers / kQuad>(src, block,
                                      [&](int i, uint32_t magnitude) { magnitudes[i] = magnitude; });
    loadAheadOfWarp<in>(task, index);
    const Bounds bounds =
        kept <= 128 ? boundsByGroups<4>(magnitudes, kept) : boundsByGroups<8>(magnitudes, kept);
    candidates.clear();
#pragma unroll
    for (int i = 0; i < kLaneNumbers; ++i) {
      if (magnitudes[i] >= bounds.low) candidates.add(magnitudes[i], placeInBlock(i));
    }
    __syncwarp();
    if (candidates.count > kMostKept) {
      const Limit limit = exactLimit<in>(src, block, bounds, kept);
      candidates.clear();
      forLane<in, 4>(src, block, [&](int i, uint32_t magnitude) {
        if (limit.admits(magnitude, placeInBlock(i))) candidates.add(magnitude, placeInBlock(i));
      });
      __syncwarp();
    }
    for (uint32_t c = lane; c < candidates.count; c += 32) {
      const uint64_t rank = candidates.ranks[c];
      uint32_t higher = 0;
#pragma unroll 4
      for (uint32_t other = 0; other < candidates.count; ++other) {
        higher += candidates.ranks[other] > rank ? 1u : 0u;
      }
      if (higher < kept) candidates.kept[higher] = rank;
    }
    __syncwarp();
    for (uint32_t j = lane; j < kept; j += 32) {
      const size_t place = indexOf(candidates.kept[j]);
      uint32_t before = 0;
#pragma unroll 4
      for (uint32_t other = 0; other < kept; ++other)
        before += indexOf(candidates.kept[other]) < place ? 1u : 0u;
      const size_t to = size_t{index} * kept + before;
      values[to] = keptValue(numberOf<in>(src[block.first() + place]));
      places[to] = static_cast<uint16_t>(place);
    }
  });
}

inline Kernel topEncoder(Wire in) {
  switch (in) {
    case Wire::f32:
      return encodeTop<Wire::f32>;
    case Wire::f16:
      return encodeTop<Wire::f16>;
    default:
      return encodeTop<Wire::bf16>;
  }
}

}  // namespace baguarun::codec::cuda
