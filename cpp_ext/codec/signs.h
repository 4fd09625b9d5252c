// The rules of sums of sign1 chunks that are coded again, which CPU and CUDA share.
//
// Where few chunks are summed up, the numbers of a block have few magnitudes: those of a kind are counted
// instead of added one by one, and what they are is computed once for a block.
#pragma once

#include "block.h"

namespace baguarun::codec {

// So many chunks at most; of more, numbers are added one by one.
inline constexpr unsigned kMostCounted = 4;

// Of a number that is a sum of chunks: bit k says whether chunk k has another sign there than the last chunk.
inline constexpr unsigned kKinds = 1u << (kMostCounted - 1);

// The same block of `count` chunks.
struct SignTerms {
  float scales[kMostCounted];
  unsigned count;
  float factor;

  BAGUARUN_HOST_DEVICE unsigned kinds() const { return 1u << (count - 1); }

  // A number of that kind where the last chunk has +. Where it has -, the number is the opposite, as rounding
  // is symmetrical.
  BAGUARUN_HOST_DEVICE float valueOf(unsigned kind) const {
    float sum = 0.0f;
    for (unsigned k = 0; k < count; ++k) {
      const float term = floatOf(bitsOf(scales[k]) ^ (kind >> k & 1u) << 31);
      sum = k == 0 ? term : sum + term;
    }
    return sum * factor;
  }
};

// Which of a word's numbers are of that kind. others[k]: where chunk k has another sign than the last.
template <class Word>
BAGUARUN_HOST_DEVICE inline Word ofKind(const Word (&others)[kMostCounted], unsigned count, unsigned kind) {
  Word all = ~Word{0};
  for (unsigned k = 0; k + 1 < count; ++k) all &= (kind >> k & 1u) != 0 ? others[k] : ~others[k];
  return all;
}

// The sum of the magnitudes of `count` numbers that are `value` or the opposite: exact.
BAGUARUN_HOST_DEVICE inline double sumOfKind(uint32_t count, float value) {
  // One that nobody has may be infinite.
  if (count == 0) return 0.0;
  return static_cast<double>(floatOf(bitsOf(value) & kMagnitudeBits)) * static_cast<double>(count);
}

// The sum of the magnitudes of a block that has counts[kind] numbers of each kind: of the upper half of the
// kinds added to that of the lower one, until one sum is left. Kinds that do not exist have no numbers.
BAGUARUN_HOST_DEVICE inline float sumOfKinds(const uint32_t (&counts)[kKinds],
                                             const float (&values)[kKinds]) {
  double sums[kKinds];
  for (unsigned kind = 0; kind < kKinds; ++kind) sums[kind] = sumOfKind(counts[kind], values[kind]);
  for (unsigned width = kKinds / 2; width > 0; width /= 2) {
    for (unsigned kind = 0; kind < width; ++kind) sums[kind] += sums[kind + width];
  }
  return static_cast<float>(sums[0]);
}

}  // namespace baguarun::codec
