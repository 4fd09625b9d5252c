// The loop over a block of signs that paths have in common: each compiles it for its own instructions, of
// which the one that counts bits matters.
#pragma once

#include <bit>
#include <cstring>

#include "cpu_path.h"
#include "signs.h"

namespace baguarun::codec {

// As CpuPath::countSigns.
template <unsigned count>
[[gnu::always_inline]] inline void countSignsOf(const Signs* blocks, size_t n, const float* values,
                                                uint32_t* counts, uint8_t* bits) {
  using Word = uint64_t;
  constexpr size_t kWordBits = 64;
  constexpr unsigned kinds = 1u << (count - 1);
  // Where a number takes the last block's sign, or the other one.
  Word above[kinds];
  Word below[kinds];
  uint32_t found[kinds] = {};
  for (unsigned kind = 0; kind < kinds; ++kind) {
    above[kind] = values[kind] > 0.0f ? ~Word{0} : 0;
    below[kind] = values[kind] < 0.0f ? ~Word{0} : 0;
  }
  const auto take = [&](size_t first, size_t bytes, Word exists) [[gnu::always_inline]] {
    Word others[kMostCounted] = {};
    for (unsigned k = 0; k < count; ++k) std::memcpy(&others[k], blocks[k].bits + first / 8, bytes);
    const Word last = others[count - 1];
    for (unsigned k = 0; k < count; ++k) others[k] ^= last;
    Word same = 0;
    Word opposite = 0;
    for (unsigned kind = 0; kind < kinds; ++kind) {
      const Word here = ofKind(others, count, kind) & exists;
      found[kind] += static_cast<uint32_t>(std::popcount(here));
      same |= here & above[kind];
      opposite |= here & below[kind];
    }
    const Word coded = (same & last) | (opposite & ~last);
    std::memcpy(bits + first / 8, &coded, bytes);
  };
  size_t first = 0;
  for (; first + kWordBits <= n; first += kWordBits) take(first, sizeof(Word), ~Word{0});
  if (first < n) take(first, (n - first + 7) / 8, (Word{1} << (n - first)) - 1);
  for (unsigned kind = 0; kind < kinds; ++kind) counts[kind] = found[kind];
}

[[gnu::always_inline]] inline void countSignsOf(const Signs* blocks, size_t count, size_t n,
                                                const float* values, uint32_t* counts, uint8_t* bits) {
  static_assert(kMostCounted == 4);
  switch (count) {
    case 1:
      return countSignsOf<1>(blocks, n, values, counts, bits);
    case 2:
      return countSignsOf<2>(blocks, n, values, counts, bits);
    case 3:
      return countSignsOf<3>(blocks, n, values, counts, bits);
    default:
      return countSignsOf<4>(blocks, n, values, counts, bits);
  }
}

}  // namespace baguarun::codec
