// Sums that are coded again, where gathering all numbers in fp32 takes longer than memory does. Included by
// codec_cuda.cu only.
#pragma once

#include "cuda_dense.h"
#include "cuda_task.h"
#include "signs.h"
#include "sparse.h"

namespace baguarun::codec::cuda {

__device__ inline Header headerOf(const void* chunk, uint32_t block) {
  const float2 both = static_cast<const float2*>(chunk)[block];
  return {both.x, both.y};
}

// A lane's part of a whole block of minmax4: `fetch` begins the loads.
struct LaneLevels {
  static constexpr int kLoads = kLaneNumbers / 16;
  uint2 words[kLoads];
  Header header;

  // Eight bytes, to which all blocks are aligned.
  static __device__ size_t offset(Block block, int load) {
    return levelsOffset(16, block.count, block.index) + (load * 32 + threadIdx.x % 32) * sizeof(uint2);
  }

  __device__ void fetch(const void* chunk, Block block) {
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      words[load] = *reinterpret_cast<const uint2*>(static_cast<const uint8_t*>(chunk) + offset(block, load));
    }
    header = headerOf(chunk, block.index);
  }

  // Calls `use(place among the lane's, factor * number)`, where that is exact. Of what is about to be summed
  // up the bits of a NaN do not matter.
  template <class Use>
  __device__ void widen(float factor, Use use) const {
    const Header scaled{__fmul_rn(header.base, factor), __fmul_rn(header.scale, factor)};
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      const uint32_t quads[4] = {words[load].x, words[load].x >> 16, words[load].y, words[load].y >> 16};
#pragma unroll
      for (int quad = 0; quad < 4; ++quad) {
        float x[kQuad];
        widenLevels<16>(scaled, quads[quad], x);
#pragma unroll
        for (int i = 0; i < kQuad; ++i) use((load * 4 + quad) * kQuad + i, x[i]);
      }
    }
  }
};

// A lane for each line of a block's levels in four chunks, and so on.
__device__ inline void loadLevelsAhead(const Task& task, uint32_t index) {
  constexpr unsigned kLines = kBlockElems / 2 / kLine;
  if (index + kAhead >= task.wholeBlocks) return;
  const size_t payload = levelsOffset(16, task.blocks, index + kAhead);
#pragma unroll 1
  for (unsigned line = threadIdx.x % 32; line < kLines * task.sources.count; line += 32) {
    prefetch(static_cast<const char*>(task.sources.src[line / kLines]) + payload + line % kLines * kLine);
  }
}

// dst = encode(scale * sum(src)), whole blocks of minmax4.
__global__ void __launch_bounds__(kThreadsTogether, 5) sumLevels(Task task) {
  forBlocksOfWarp(task.wholeBlocks, [&](uint32_t index) {
    const Block block = task.block(index);
    const unsigned lane = threadIdx.x % 32;
    // Scales headers in place of sums if that comes to the same.
    const bool isExact = lane >= task.sources.count || scalesExactly(headerOf(task.sources.src[lane], index));
    const bool isScaledFirst = isLittlePower(task.scale) && task.sources.count <= 32 &&
                               __ballot_sync(kAllLanes, isExact) == kAllLanes;
    const float factor = isScaledFirst ? task.scale : 1.0f;
    float total[kLaneNumbers];
    LaneLevels next;
    next.fetch(task.sources.src[0], block);
    {
      const LaneLevels first = next;
      if (task.sources.count > 1) next.fetch(task.sources.src[1], block);
      loadLevelsAhead(task, index);
      first.widen(factor, [&](int i, float x) { total[i] = x; });
    }
#pragma unroll 1
    for (unsigned k = 1; k < task.sources.count; ++k) {
      const LaneLevels term = next;
      if (k + 1 < task.sources.count) next.fetch(task.sources.src[k + 1], block);
      term.widen(factor, [&](int i, float x) { total[i] = __fadd_rn(total[i], x); });
    }
    if (!isScaledFirst) {
#pragma unroll
      for (float& x : total) x = __fmul_rn(x, task.scale);
    }
    float least = INFINITY;
    float greatest = -INFINITY;
#pragma unroll
    for (const float x : total) {
      least = fminf(least, x);
      greatest = greaterOrNan(greatest, x);
    }
    const float mn = fromOrdered(warpLeast(orderedOf(least)));
    const float mx = fromOrdered(warpGreatest(orderedOf(greatest)));
    const Grid grid = gridOf(16, mn, mx, mx != mx);
    // All have read what dst may be one of.
    __syncwarp();
    if (lane == 0) static_cast<Header*>(task.dst)[index] = grid.header;
#pragma unroll
    for (int load = 0; load < LaneLevels::kLoads; ++load) {
      uint32_t words[2];
#pragma unroll
      for (int word = 0; word < 2; ++word) {
        int level[2 * kQuad];
#pragma unroll
        for (int i = 0; i < 2 * kQuad; ++i) {
          const float x = total[(load * 2 + word) * 2 * kQuad + i];
          // 0 where the grid has one point: the inverse is 0 there, and a NaN becomes 0.
          level[i] = __float2int_rn(__fmul_rn(__fsub_rn(x, grid.header.base), grid.inv));
        }
        words[word] = packed<16>(level);
      }
      *reinterpret_cast<uint2*>(static_cast<uint8_t*>(task.dst) + LaneLevels::offset(block, load)) =
          make_uint2(words[0], words[1]);
    }
  });
}

// What eight neighbouring lanes have, added up in the order of sumOfKinds.
__device__ inline double sumOfEight(double x) {
  for (int distance = 4; distance > 0; distance /= 2) {
    uint32_t halves[2];
    memcpy(halves, &x, sizeof x);
    for (uint32_t& half : halves) half = __shfl_xor_sync(kAllLanes, half, distance);
    double other;
    memcpy(&other, halves, sizeof other);
    x += other;
  }
  return x;
}

template <unsigned count, bool whole>
__device__ void sumSignsOf(const Task& task, uint32_t index) {
  static_assert(kKinds == 8);
  constexpr int kWords = kLaneNumbers / 32;
  constexpr size_t kApart = 32 * sizeof(uint32_t);  // a lane's words
  constexpr unsigned kinds = 1u << (count - 1);
  const Block block{task.numel, task.blocks, index, whole};
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const size_t place = signsOffset(block.count, index) + lane * sizeof(uint32_t);
  const auto validIn = [&](int word) {  // numbers
    return whole ? 32 : min(max(static_cast<int>(block.length()) - (word * 32 + lane) * 32, 0), 32);
  };
  const auto existing = [&](int word) {
    const int valid = validIn(word);
    return valid == 32 ? ~0u : (1u << valid) - 1;
  };
  uint32_t others[kWords][kMostCounted];
  uint32_t last[kWords];
  SignTerms terms{{}, count, task.scale};
#pragma unroll
  for (unsigned k = 0; k < count; ++k) {
    const auto* chunk = static_cast<const uint8_t*>(task.sources.src[k]);
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      others[word][k] = loadBytes<4>(chunk + place + word * kApart, (validIn(word) + 7) / 8, whole);
    }
    terms.scales[k] = reinterpret_cast<const float*>(chunk)[index];
  }
#pragma unroll
  for (int word = 0; word < kWords; ++word) {
    last[word] = others[word][count - 1];
#pragma unroll
    for (unsigned k = 0; k < count; ++k) others[word][k] ^= last[word];
  }
  // Each lane knows the value of one kind, and of all whether it is below zero, or zero.
  const unsigned own = static_cast<unsigned>(lane) % kinds;
  const float value = terms.valueOf(own);
  const uint32_t isBelow = __ballot_sync(kAllLanes, value < 0.0f);
  const uint32_t isZero = __ballot_sync(kAllLanes, value == 0.0f);
  uint32_t counts[kKinds] = {};
  uint32_t below[kWords] = {};  // of each kind that is below zero where the last chunk has +
#pragma unroll
  for (unsigned kind = 0; kind < kinds; ++kind) {
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      const uint32_t here = ofKind(others[word], count, kind) & existing(word);
      counts[kind] += static_cast<uint32_t>(__popc(here));
      if ((isBelow >> kind & 1u) != 0) below[word] |= here;
    }
  }
  // Two sums at once: none is above 2048.
  uint32_t numbers = 0;  // of this lane's kind
#pragma unroll
  for (unsigned kind = 0; kind < kinds; kind += 2) {
    const uint32_t both = warpSum(counts[kind] | counts[kind + 1] << 16);
    if (own / 2 == kind / 2) numbers = own % 2 == 0 ? both & 0xffffu : both >> 16;
  }
  const double sum =
      sumOfEight(static_cast<unsigned>(lane) % kKinds < kinds ? sumOfKind(numbers, value) : 0.0);
  const float scale = signScale(static_cast<float>(sum), block.length());
  uint32_t positive[kWords];  // whatever the signs: zeros, and all where the scale is not finite
#pragma unroll
  for (int word = 0; word < kWords; ++word) positive[word] = isFinite(scale) ? ~existing(word) : ~0u;
  if (isZero != 0) {
#pragma unroll
    for (unsigned kind = 0; kind < kinds; ++kind) {
      if ((isZero >> kind & 1u) == 0) continue;
#pragma unroll
      for (int word = 0; word < kWords; ++word) positive[word] |= ofKind(others[word], count, kind);
    }
  }
  // All have read what dst may be one of.
  __syncwarp();
  if (lane == 0) static_cast<float*>(task.dst)[index] = scale;
#pragma unroll
  for (int word = 0; word < kWords; ++word) {
    uint8_t* to = static_cast<uint8_t*>(task.dst) + place + word * kApart;
    storeBytes<4>(to, (validIn(word) + 7) / 8, whole, (last[word] ^ below[word]) & ~positive[word]);
  }
}

// dst = encode(scale * sum(src)) of `count` chunks of sign1.
template <unsigned count>
__global__ void __launch_bounds__(kThreadsTogether, 12) sumSigns(Task task) {
  forBlocksOfWarp(task.blocks, [&](uint32_t index) {
    if (index < task.wholeBlocks) {
      sumSignsOf<count, true>(task, index);
    } else {
      sumSignsOf<count, false>(task, index);
    }
  });
}

inline Kernel signCounter(size_t count) {
  static_assert(kMostCounted == 4);
  const Kernel counters[] = {sumSigns<1>, sumSigns<2>, sumSigns<3>, sumSigns<4>};
  return counters[count - 1];
}

// How many threads sum up chunks of randomk together: a quad each, and in all those of whole blocks.
inline int threadsOfDrawn(uint32_t keep) {
  static_assert(kMostKept <= kThreads);
  return static_cast<int>(kThreads / keep * keep);
}

// dst = encode(scale * sum(src)) of chunks of randomk: all have the same places, which do not matter then.
__global__ void __launch_bounds__(kThreads) sumDrawn(Task task) {
  constexpr unsigned kAtOnce = 4;                // sources whose loads are under way together
  __shared__ unsigned spoilt[kThreads * kQuad];  // by block of numbers
  const uint32_t keep = task.format.keep;
  const uint32_t together = blockDim.x * kQuad;
  const size_t all = keptInAll(keep, task.numel);
  for (size_t first = size_t{blockIdx.x} * together; first < all; first += size_t{gridDim.x} * together) {
    const int offset = static_cast<int>(threadIdx.x) * kQuad;
    const int left = static_cast<int>(min(all - first, size_t{together})) - offset;
    const Place at{offset, min(max(left, 0), kQuad), left >= kQuad && task.wholeBlocks > 0};
    float sums[kQuad] = {};
#pragma unroll 1
    for (unsigned k = 0; k < task.sources.count; k += kAtOnce) {
      float values[kAtOnce][kQuad] = {};
#pragma unroll
      for (unsigned s = 0; s < kAtOnce; ++s) {
        if (k + s >= task.sources.count) break;
        loadQuad(static_cast<const float*>(task.sources.src[k + s]) + first, at, values[s]);
      }
#pragma unroll
      for (unsigned s = 0; s < kAtOnce; ++s) {
        // The device's sum would not keep the bits of a NaN, which one chunk alone has to.
        for (int i = 0; i < kQuad; ++i) {
          sums[i] = sums[i] == 0.0f ? values[s][i] : __fadd_rn(sums[i], values[s][i]);
        }
      }
    }
    bool finite = true;
    for (float& sum : sums) {
      sum = __fmul_rn(sum, task.scale);
      finite &= isFinite(sum);
    }
    if (__syncthreads_or(!finite) != 0) {
      for (uint32_t i = threadIdx.x; i < kThreads * kQuad; i += blockDim.x) spoilt[i] = 0;
      __syncthreads();
      for (int i = 0; i < kQuad; ++i) {
        if (!isFinite(sums[i])) atomicOr(&spoilt[(offset + i) / keep], 1u);
      }
      __syncthreads();
      for (int i = 0; i < kQuad; ++i) {
        if (spoilt[(offset + i) / keep] != 0) sums[i] = floatOf(kQuietNan);
      }
      __syncthreads();
    }
    for (float& sum : sums) sum = keptValue(sum);
    storeQuad(static_cast<float*>(task.dst) + first, at, sums);
  }
}

}  // namespace baguarun::codec::cuda
