// The rules of topk and randomk that CPU and CUDA share: where things lie in a chunk, and which numbers a
// seed draws.
#pragma once

#include "block.h"

namespace baguarun::codec {

// How many of a block of `n` numbers are kept. A whole block keeps `keep`.
BAGUARUN_HOST_DEVICE inline uint32_t keptOf(uint32_t keep, size_t n) {
  return static_cast<uint32_t>((keep * n + kBlockElems - 1) / kBlockElems);
}

BAGUARUN_HOST_DEVICE inline size_t keptInAll(uint32_t keep, size_t numel) {
  const size_t whole = numel / kBlockElems;
  return whole * keep + keptOf(keep, numel % kBlockElems);
}

// What topk compares: all NaNs are the same, one above Inf.
inline constexpr uint32_t kNanMagnitude = 0x7f800001u;
BAGUARUN_HOST_DEVICE inline uint32_t magnitudeOf(float x) {
  const uint32_t bits = bitsOf(x) & 0x7fffffffu;
  return bits < kNanMagnitude ? bits : kNanMagnitude;
}

// A number's place in the order of topk: greater first. No two numbers of a block have the same rank.
BAGUARUN_HOST_DEVICE inline uint64_t rankOf(uint32_t magnitude, size_t index) {
  return static_cast<uint64_t>(magnitude) << 11 | (kBlockElems - 1 - index);
}

BAGUARUN_HOST_DEVICE inline size_t indexOf(uint64_t rank) {
  return kBlockElems - 1 - static_cast<size_t>(rank & (kBlockElems - 1));
}

BAGUARUN_HOST_DEVICE inline uint32_t magnitudeOfRank(uint64_t rank) {
  return static_cast<uint32_t>(rank >> 11);
}

// What a chunk holds of a kept number.
BAGUARUN_HOST_DEVICE inline float keptValue(float x) {
  if (x != x) return floatOf(kQuietNan);
  return x == 0.0f ? 0.0f : x;
}

// SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): the next of a sequence of well mixed numbers.
BAGUARUN_HOST_DEVICE inline uint64_t nextRandom(uint64_t& state) {
  state += 0x9e3779b97f4a7c15u;
  uint64_t z = state;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

// A shuffled order of the numbers of one block. Any place in it is found on its own, as a GPU wants it:
// rounds of an odd multiplication and a shift, each of which permutes the numbers below a power of two,
// repeated until the result lies in the block (cycle walking: Black and Rogaway, CT-RSA 2002).
class RandomOrder {
 public:
  BAGUARUN_HOST_DEVICE RandomOrder(uint64_t seed, size_t block, size_t n) : n_(static_cast<uint32_t>(n)) {
    unsigned bits = 0;
    while ((1u << bits) < n_) ++bits;
    mask_ = (1u << bits) - 1;
    shift_ = (bits + 1) / 2;
    // Mixed once before the block is added, or neighbouring seeds would share the orders of blocks.
    uint64_t state = seed;
    state = nextRandom(state) + block;
    for (Round& round : rounds_) {
      const uint64_t random = nextRandom(state);
      round = {static_cast<uint32_t>(random) | 1u, static_cast<uint32_t>(random >> 32)};
    }
  }

  // Of the numbers 0 to n-1, each is the answer to one `place` of 0 to n-1.
  BAGUARUN_HOST_DEVICE uint32_t at(uint32_t place) const {
    uint32_t x = place;
    do {
      for (const Round& round : rounds_) {
        x = (x * round.factor + round.offset) & mask_;
        x ^= x >> shift_;
      }
    } while (x >= n_);
    return x;
  }

 private:
  struct Round {
    uint32_t factor;
    uint32_t offset;
  };
  Round rounds_[4];
  uint32_t n_;
  uint32_t mask_;
  unsigned shift_;
};

}  // namespace baguarun::codec
