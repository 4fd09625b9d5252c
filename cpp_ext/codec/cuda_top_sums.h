// Sums of few chunks of topk, each of few numbers, that are coded again: a warp adds up what they hold of a
// block where it belongs in the block, and looks for the greatest among these places only. Included by
// codec_cuda.cu only.
#pragma once

#include "cuda_task.h"
#include "cuda_top.h"
#include "cuda_warp.h"
#include "sparse.h"

namespace baguarun::codec::cuda {

// So many chunks at most, and a lane for each number that one holds of a block.
constexpr unsigned kMostTopChunks = 4;
constexpr uint32_t kMostOfLanes = 32;

// What the chunks hold of a block: of each a number per lane.
template <unsigned count>
struct LaneTerms {
  float values[count];
  uint32_t places[count];  // kBlockElems where there is none

  __device__ void fetch(const Task& task, uint32_t index) {
    const uint32_t lane = threadIdx.x % 32;
    const size_t at = size_t{index} * task.format.keep + lane;
#pragma unroll
    for (unsigned k = 0; k < count; ++k) {
      values[k] = 0.0f;
      places[k] = kBlockElems;
      if (lane >= task.format.keep) continue;
      const auto* chunk = static_cast<const float*>(task.sources.src[k]);
      values[k] = chunk[at];
      places[k] = reinterpret_cast<const uint16_t*>(chunk + task.keptInAll)[at];
    }
  }
};

// A block's numbers, and then those of them that are kept. Called by all lanes of a warp.
struct TopSums {
  alignas(16) float numbers[kBlockElems];  // 0 from one block to the next
  float values[kMostOfLanes];
  alignas(16) uint16_t places[kMostOfLanes];  // above all where there is none

  __device__ void clear() {
    for (uint32_t i = threadIdx.x % 32; i < kBlockElems; i += 32) numbers[i] = 0.0f;
    places[threadIdx.x % 32] = 0x7fff;
    __syncwarp();
  }
  template <unsigned count>
  __device__ void add(const LaneTerms<count>& terms) {
#pragma unroll
    for (unsigned k = 0; k < count; ++k) {
      if (terms.places[k] < kBlockElems) {
        float& number = numbers[terms.places[k]];
        number = k == 0 ? terms.values[k] : __fadd_rn(number, terms.values[k]);
      }
      __syncwarp();
    }
  }
  // Whoever has the same place after this one gets 0.
  __device__ float take(uint32_t place) {
    float number = 0.0f;
    if (place < kBlockElems) {
      number = numbers[place];
      numbers[place] = 0.0f;
    }
    __syncwarp();
    return number;
  }
  // How many of the first `count` places are less than `place`.
  __device__ uint32_t placesBelow(uint32_t place, uint32_t count) const {
    // Two differences in a word, and of each the top bit, which says that it is not below 0.
    constexpr uint32_t kTopBits = 0x80008000u;
    const uint32_t less = kTopBits - place * 0x10001u;
    uint32_t seen = 0;
    uint32_t reaching = 0;
#pragma unroll 1
    for (; seen < count; seen += 8) {
      const uint4 eight = *reinterpret_cast<const uint4*>(places + seen);
      reaching += __popc(((eight.x + less) & kTopBits) | ((eight.y + less) & kTopBits) >> 1 |
                         ((eight.z + less) & kTopBits) >> 2 | ((eight.w + less) & kTopBits) >> 3);
    }
    return seen - reaching;
  }
};

// Where a warp writes what it keeps of a block.
struct TopBlock {
  float* values;
  uint16_t* places;

  __device__ TopBlock(const Task& task, uint32_t index)
      : values(static_cast<float*>(task.dst) + size_t{index} * task.format.keep),
        places(reinterpret_cast<uint16_t*>(static_cast<float*>(task.dst) + task.keptInAll) +
               size_t{index} * task.format.keep) {}

  __device__ void store(uint32_t at, float value, uint32_t place) {
    values[at] = keptValue(value);
    places[at] = static_cast<uint16_t>(place);
  }
};

__device__ inline uint32_t lanesBefore(uint32_t lanes) {
  return static_cast<uint32_t>(__popc(lanes & ((1u << threadIdx.x % 32) - 1)));
}

// For blocks of equal numbers, or of fewer that are not zero than are kept: all are looked at. `sums` holds
// them, and none afterwards.
__device__ inline void keepOfAll(const Task& task, TopSums& sums, TopBlock out) {
  const uint32_t lane = threadIdx.x % 32;
  for (uint32_t place = lane; place < kBlockElems; place += 32) {
    sums.numbers[place] = __fmul_rn(sums.numbers[place], task.scale);
  }
  __syncwarp();
  const Bounds all{0, kNanMagnitude + 1, kNanMagnitude + 1, kBlockElems};
  const Limit limit = exactLimit<Wire::f32>(sums.numbers, {kBlockElems, 1, 0, true}, all, task.format.keep);
  uint32_t before = 0;
  for (uint32_t place = lane; place < kBlockElems; place += 32) {
    const float number = sums.numbers[place];
    const bool isKept = limit.admits(magnitudeOf(number), place);
    const uint32_t lanes = __ballot_sync(kAllLanes, isKept);
    if (isKept) out.store(before + lanesBefore(lanes), number, place);
    before += static_cast<uint32_t>(__popc(lanes));
  }
  sums.clear();
}

// dst = encode(scale * sum(src)), whole blocks.
template <unsigned count>
__global__ void __launch_bounds__(kThreadsTogether, 6) sumTop(Task task) {
  __shared__ TopSums byWarp[kWarpsTogether];
  TopSums& sums = byWarp[threadIdx.x / 32];
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t keep = task.format.keep;
  sums.clear();
  forBlocksOfWarp(task.wholeBlocks, [&](uint32_t index) {
    TopBlock out(task, index);
    LaneTerms<count> terms;
    terms.fetch(task, index);
    sums.add(terms);
    float numbers[count];
    uint32_t magnitudes[count];
    uint32_t greatest = 0;
#pragma unroll
    for (unsigned k = 0; k < count; ++k) {
      numbers[k] = __fmul_rn(sums.take(terms.places[k]), task.scale);
      magnitudes[k] = magnitudeOf(numbers[k]);
      greatest = max(greatest, magnitudes[k]);
    }
    const auto reaching = [&](uint32_t least) {
      // Magnitudes have 31 bits: the difference's top bit says which one is less.
      uint32_t below = 0;
#pragma unroll
      for (const uint32_t each : magnitudes) below += (each - least) >> 31;
      return count - below;
    };
    // There are as many lanes with numbers as are kept.
    const uint32_t end = static_cast<uint32_t>(warpGreatest(static_cast<int>(greatest))) + 1;
    const auto low =
        static_cast<uint32_t>(warpLeast(static_cast<int>(lane < keep ? greatest : kNanMagnitude)));
    Bounds bounds{low, end, end, warpSum(reaching(low))};
    bounds.close(keep, reaching);
    if (bounds.low == 0 || bounds.count != keep) {
      sums.add(terms);
      return keepOfAll(task, sums, out);
    }
    uint32_t before = 0;
#pragma unroll
    for (unsigned k = 0; k < count; ++k) {
      const bool isKept = magnitudes[k] >= bounds.low;
      const uint32_t lanes = __ballot_sync(kAllLanes, isKept);
      if (isKept) {
        const uint32_t slot = before + lanesBefore(lanes);
        sums.values[slot] = numbers[k];
        sums.places[slot] = static_cast<uint16_t>(terms.places[k]);
      }
      before += static_cast<uint32_t>(__popc(lanes));
    }
    __syncwarp();
    if (lane < keep) {
      const uint32_t place = sums.places[lane];
      out.store(sums.placesBelow(place, keep), sums.values[lane], place);
    }
    // All have read what the next block's are written over.
    __syncwarp();
  });
}

inline Kernel topSummer(size_t count) {
  static_assert(kMostTopChunks == 4);
  const Kernel summers[] = {sumTop<1>, sumTop<2>, sumTop<3>, sumTop<4>};
  return summers[count - 1];
}

}  // namespace baguarun::codec::cuda
