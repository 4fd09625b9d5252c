// How topk chooses among candidates on the CPU, where no vector path has a shorter way.
#pragma once

#include <algorithm>
#include <functional>

#include "sparse.h"

namespace baguarun::codec {

// Writes the places of the `keep` highest of `count` ranks, which are in the order of the block, in this
// order. count >= keep. Returns the magnitude of the lowest kept.
inline uint32_t takeHighest(const uint64_t* ranks, size_t count, size_t keep, uint16_t* places) {
  uint64_t sorted[kBlockElems];
  // For GCC's warning: it cannot know that count >= keep.
  sorted[keep - 1] = 0;
  std::copy_n(ranks, count, sorted);
  std::nth_element(sorted, sorted + keep - 1, sorted + count, std::greater<>());
  for (size_t i = 0; i < count; ++i) {
    if (ranks[i] >= sorted[keep - 1]) *places++ = static_cast<uint16_t>(indexOf(ranks[i]));
  }
  return magnitudeOfRank(sorted[keep - 1]);
}

}  // namespace baguarun::codec
