// topk and randomk on CUDA. Included by codec_cuda.cu only. loadKept, emitTop and emitRandom are called by
// all threads of a block, and end with a barrier, so that the shared memory is free again.
#pragma once

#include "cuda_load.h"
#include "cuda_task.h"
#include "cuda_warp.h"
#include "sparse.h"

namespace baguarun::codec::cuda {

// A thread for each number kept.
static_assert(kMostKept <= kThreads);

// Calls `use(place, x[quad][i])` for the numbers that exist.
template <class Use>
__device__ void forOwn(Quads& x, Block block, Use use) {
  for (int quad = 0; quad < kQuads; ++quad) {
    const Place at = block.place(quad);
    for (int i = 0; i < kQuad; ++i) {
      if (i < at.valid) use(static_cast<uint32_t>(at.offset + i), x[quad][i]);
    }
  }
}

// What a chunk holds of a block.
struct Kept {
  Format format;
  Block block;

  __device__ uint32_t count() const { return keptOf(format.keep, block.length()); }
  // In the chunk, of the first one kept of this block.
  __device__ size_t first() const { return size_t{block.index} * format.keep; }
  __device__ uint16_t* places(void* chunk) const {
    return reinterpret_cast<uint16_t*>(static_cast<float*>(chunk) + keptInAll(format.keep, block.numel));
  }
  __device__ RandomOrder order() const { return {format.seed, block.index, block.length()}; }
};

// x = before + src[0] + src[1] + ..., in that order.
template <Wire wire>
__device__ void loadKept(const Sources& sources, Kept kept, Quads& x) {
  constexpr unsigned kAtOnce = 4;  // sources whose loads are under way together
  alignas(16) __shared__ float sums[kBlockElems];
  const Block block = kept.block;
  const unsigned count = sources.count;
  const void* const* src = sources.src;
  Quads start = {};
  if (sources.before.at != nullptr) loadNumbers(sources.before, block, start);
  for (int quad = 0; quad < kQuads; ++quad) {
    storeQuad(sums, {block.place(quad).offset, kQuad, true}, start[quad]);
  }
  const uint32_t turned = block.turned();
  const bool mine = turned < kept.count();
  uint32_t place[kAtOnce];
  if constexpr (wire == Wire::randomk) {
    const uint32_t drawn = mine ? kept.order().at(turned) : 0;
    for (uint32_t& same : place) same = drawn;
  }
  for (unsigned k = 0; k < count; k += kAtOnce) {
    const unsigned now = count - k < kAtOnce ? count - k : kAtOnce;
    float value[kAtOnce];
    for (unsigned s = 0; s < kAtOnce; ++s) {
      if (!mine || s >= now) continue;
      const size_t j = kept.first() + turned;
      value[s] = static_cast<const float*>(src[k + s])[j];
      if constexpr (wire == Wire::topk) place[s] = kept.places(const_cast<void*>(src[k + s]))[j];
    }
    for (unsigned s = 0; s < kAtOnce; ++s) {
      if (s >= now) continue;
      __syncthreads();
      if (!mine || place[s] >= block.length()) continue;
      float& sum = sums[place[s]];
      // The device's sum would not keep the bits of a NaN, which one chunk alone has to.
      sum = sum == 0.0f ? value[s] : __fadd_rn(sum, value[s]);
    }
  }
  __syncthreads();
  for (int quad = 0; quad < kQuads; ++quad) {
    loadQuad(sums, {block.place(quad).offset, kQuad, true}, x[quad]);
  }
  __syncthreads();
}

__device__ inline uint64_t ownRank(uint32_t place, float x) { return rankOf(magnitudeOf(x), place); }

// The greatest of the ranks of the thread's numbers; 0 if it has none.
__device__ inline uint64_t highestRank(Quads& x, Block block) {
  constexpr uint32_t kNone = kBlockElems - 1;
  uint32_t magnitude = 0;
  uint32_t highest = kNone;
  forOwn(x, block, [&](uint32_t place, float own) {
    // Of equal ones, the first.
    if (magnitudeOf(own) <= magnitude && highest != kNone) return;
    magnitude = magnitudeOf(own);
    highest = place;
  });
  return rankOf(magnitude, highest);
}

// A rank that the highest numbers of exactly `kept` groups of threads reach: whatever is kept does, too, and
// besides it only other numbers of these groups. `highest`: by thread, in shared memory. `groups`: a power of
// two, and no less than `kept`. Called by one warp.
template <int groups>
__device__ uint64_t reachedRank(const uint64_t* highest, uint32_t kept) {
  constexpr int kEach = groups / 32;
  constexpr int kTogether = kThreads / groups;
  constexpr int kPlaceBits = 11;
  const uint32_t lane = threadIdx.x % 32;
  const auto rankOfGroup = [&](int i) {
    uint64_t rank = 0;
    for (int j = 0; j < kTogether; ++j) {
      const uint64_t other = highest[(i * kTogether + j) * 32 + lane];
      rank = other > rank ? other : rank;
    }
    return rank;
  };
  // Between a magnitude that enough of them reach and one that too few do.
  uint32_t own[kEach];
  uint32_t low = 0xffffffffu;
  uint32_t high = 0;
  for (int i = 0; i < kEach; ++i) {
    own[i] = magnitudeOfRank(rankOfGroup(i));
    low = own[i] < low ? own[i] : low;
    high = own[i] > high ? own[i] : high;
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    const uint32_t otherLow = __shfl_xor_sync(0xffffffffu, low, distance);
    const uint32_t otherHigh = __shfl_xor_sync(0xffffffffu, high, distance);
    low = otherLow < low ? otherLow : low;
    high = otherHigh > high ? otherHigh : high;
  }
  ++high;
  uint32_t count = groups;
  while (count != kept && high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    // Magnitudes have 31 bits: the difference's top bit says which one is less.
    uint32_t below = 0;
    for (int i = 0; i < kEach; ++i) below += (own[i] - middle) >> 31;
    const uint32_t reaching = groups - warpSum(below);
    if (reaching >= kept) {
      low = middle;
      count = reaching;
    } else {
      high = middle;
    }
  }
  // Of equal ones, the first.
  uint64_t rank = uint64_t{low} << kPlaceBits;
  for (int bit = kPlaceBits - 1; bit >= 0 && count != kept; --bit) {
    const uint64_t higher = rank | uint64_t{1} << bit;
    uint32_t reaching = 0;
    for (int i = 0; i < kEach; ++i) reaching += rankOfGroup(i) >= higher ? 1u : 0u;
    reaching = warpSum(reaching);
    if (reaching < kept) continue;
    rank = higher;
    count = reaching;
  }
  return rank;
}

// A number that may be kept: its rank, and its sign as the lowest bit.
__device__ inline uint64_t entryOf(uint64_t rank, float x) { return rank << 1 | bitsOf(x) >> 31; }

__device__ inline float valueOf(uint64_t entry) {
  const uint32_t magnitude = magnitudeOfRank(entry >> 1);
  return keptValue(floatOf(static_cast<uint32_t>(entry & 1) << 31 | magnitude));
}

// Writes the block, and leaves in x what the chunk decodes to.
__device__ inline void emitTop(Quads& x, Kept kept, void* chunk) {
  constexpr uint32_t kEach = kQuads * kQuad;
  // By thread, its highest rank; then the kept ones, the highest first.
  __shared__ uint64_t entries[kThreads];
  __shared__ uint16_t places[kThreads];
  __shared__ uint64_t reached;
  // The numbers of the threads of which some may be kept, and which threads these are.
  alignas(16) __shared__ float numbers[kThreads][kEach];
  __shared__ uint16_t owners[kThreads];
  __shared__ uint32_t numOwners;
  __shared__ uint64_t candidates[kBlockElems];
  __shared__ uint32_t count;
  const Block block = kept.block;
  const uint32_t turned = block.turned();
  if (threadIdx.x == 0) numOwners = count = 0;
  const uint64_t mine = entries[threadIdx.x] = highestRank(x, block);
  __syncthreads();
  if (turned < 32) {
    constexpr int kFew = kThreads / 2;
    const uint64_t rank = kept.count() <= kFew ? reachedRank<kFew>(entries, kept.count())
                                               : reachedRank<kThreads>(entries, kept.count());
    if (turned == 0) reached = rank;
  }
  __syncthreads();
  if (mine >= reached) {
    const uint32_t slot = atomicAdd(&numOwners, 1u);
    for (int quad = 0; quad < kQuads; ++quad) storeQuad(numbers[slot], {quad * kQuad, kQuad, true}, x[quad]);
    owners[slot] = static_cast<uint16_t>(threadIdx.x);
  }
  __syncthreads();
  for (uint32_t i = turned; i < numOwners * kEach; i += kThreads) {
    const uint32_t owner = owners[i / kEach];
    const uint32_t place = (i % kEach / kQuad * kThreads + owner) * kQuad + i % kQuad;
    const float number = numbers[i / kEach][i % kEach];
    const uint64_t rank = ownRank(place, number);
    if (place < block.length() && rank >= reached) {
      candidates[atomicAdd(&count, 1u)] = entryOf(rank, number);
    }
  }
  __syncthreads();
  for (uint32_t c = turned; c < count; c += kThreads) {
    const uint64_t entry = candidates[c];
    uint32_t higher = 0;
#pragma unroll 4
    for (uint32_t other = 0; other < count; ++other) higher += candidates[other] > entry ? 1u : 0u;
    if (higher >= kept.count()) continue;
    entries[higher] = entry;
    places[higher] = static_cast<uint16_t>(indexOf(entry >> 1));
  }
  __syncthreads();
  if (turned < kept.count()) {
    const uint16_t place = places[turned];
    uint32_t before = 0;
#pragma unroll 4
    for (uint32_t other = 0; other < kept.count(); ++other) before += places[other] < place ? 1u : 0u;
    static_cast<float*>(chunk)[kept.first() + before] = valueOf(entries[turned]);
    kept.places(chunk)[kept.first() + before] = place;
  }
  const uint64_t least = entries[kept.count() - 1];
  forOwn(x, block, [&](uint32_t place, float& own) {
    own = entryOf(ownRank(place, own), own) >= least ? keptValue(own) : 0.0f;
  });
  __syncthreads();
}

// Writes the block, and leaves in x what the chunk decodes to.
__device__ inline void emitRandom(Quads& x, Kept kept, void* chunk) {
  constexpr int kWords = static_cast<int>(kBlockElems) / 32;
  alignas(16) __shared__ float numbers[kBlockElems];
  __shared__ uint32_t drawn[kWords];  // a bit for each number
  const Block block = kept.block;
  for (unsigned i = threadIdx.x; i < kWords; i += kThreads) drawn[i] = 0;
  bool finite = true;
  forOwn(x, block, [&](uint32_t, float own) { finite &= isFinite(own); });
  for (int quad = 0; quad < kQuads; ++quad) {
    storeQuad(numbers, {block.place(quad).offset, kQuad, true}, x[quad]);
  }
  finite = __syncthreads_or(!finite) == 0;
  const uint32_t turned = block.turned();
  if (turned < kept.count()) {
    const uint32_t place = kept.order().at(turned);
    static_cast<float*>(chunk)[kept.first() + turned] =
        finite ? keptValue(numbers[place]) : floatOf(kQuietNan);
    atomicOr(&drawn[place / 32], 1u << place % 32);
  }
  __syncthreads();
  forOwn(x, block, [&](uint32_t place, float& own) {
    const bool isDrawn = (drawn[place / 32] >> place % 32 & 1u) != 0;
    own = !isDrawn ? 0.0f : finite ? keptValue(own) : floatOf(kQuietNan);
  });
  __syncthreads();
}

}  // namespace baguarun::codec::cuda
