// The rules of the formats that CPU and CUDA share: the layout of a chunk with a header per block, the grid
// of a block, and the conversions between fp32 and the 16-bit types. One text for host and device, so that
// they cannot drift apart.
//
// Nothing here depends on contraction: no product is added to anything unless it is exact.
#pragma once

#include <cstring>

#include "codec.h"

#ifdef __CUDACC__
#define BAGUARUN_HOST_DEVICE __host__ __device__
#else
#define BAGUARUN_HOST_DEVICE
#endif

namespace baguarun::codec {

struct Header {
  float base;
  float scale;
};
static_assert(sizeof(Header) == 8);

// The grid of one block: what the header says, and what the encoder multiplies by (0 if every q is 0).
struct Grid {
  Header header;
  float inv;
};

BAGUARUN_HOST_DEVICE inline uint32_t bitsOf(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

BAGUARUN_HOST_DEVICE inline float floatOf(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

inline constexpr uint32_t kMagnitudeBits = 0x7fffffffu;
inline constexpr uint32_t kInfinityBits = 0x7f800000u;
inline constexpr uint32_t kQuietNan = 0x7fc00000u;
inline constexpr float kOverflow =
    0x1p126f;  // magnitudes from here on count as overflow: no sum below can then overflow
inline constexpr float kLeastStep = 0x1p-126f;  // the least normal number

BAGUARUN_HOST_DEVICE inline size_t blockCount(size_t numel) {
  return numel / kBlockElems + (numel % kBlockElems != 0);
}

BAGUARUN_HOST_DEVICE inline size_t blockLength(size_t numel, size_t block) {
  const size_t left = numel - block * kBlockElems;
  return left < kBlockElems ? left : kBlockElems;
}

// Where the bytes of a block begin in a chunk of `count` blocks, with `levels` (256 or 16) points in a grid.
BAGUARUN_HOST_DEVICE inline size_t levelsOffset(unsigned levels, size_t count, size_t block) {
  return count * sizeof(Header) + block * (levels == 256 ? kBlockElems : kBlockElems / 2);
}

// Where the bits of a block begin in a sign1 chunk of `count` blocks.
BAGUARUN_HOST_DEVICE inline size_t signsOffset(size_t count, size_t block) {
  return count * sizeof(float) + block * (kBlockElems / 8);
}

// To the nearest integer, ties to even, for |x| < 2^31. Not rintf, which is a library call on plain x86-64;
// in double, so that the sum cannot be contracted with the fp32 product that x may be.
BAGUARUN_HOST_DEVICE inline float roundedToEven(float x) {
  const double units = static_cast<double>(x) + 0x1.8p52;
  return static_cast<float>(units - 0x1.8p52);
}

// Steps 1 to 4 of codec.h, for a grid of `levels` points. `mn` and `mx` are the extremes of the block, NaN
// left out; `nan` says whether there was one.
BAGUARUN_HOST_DEVICE inline Grid gridOf(unsigned levels, float mn, float mx, bool nan) {
  if (nan || mn <= -kOverflow || mx >= kOverflow) return {{floatOf(kQuietNan), 0.0f}, 0.0f};
  const bool spansZero = mn <= 0.0f && mx >= 0.0f;
  const float step = (mx - mn) / static_cast<float>(levels - (spansZero ? 2 : 1));
  if (step < kLeastStep) return {{spansZero ? 0.0f : mn, 0.0f}, 0.0f};
  const float scale = floatOf((bitsOf(step) + 0xffu) & ~0xffu);
  const float inv = 1.0f / scale;
  // Adding zero turns -0 into +0. The product of an 8-bit and a 16-bit number is exact.
  const float base = spansZero ? roundedToEven(mn * inv) * scale + 0.0f : mn;
  return {{base, scale}, inv};
}

// A power of two from 2^-20 to 1/2.
BAGUARUN_HOST_DEVICE inline bool isLittlePower(float x) {
  return x >= 0x1p-20f && x < 1.0f && (bitsOf(x) & 0x7fffffu) == 0;
}

// Whether no bit of a sum of decoded blocks depends on whether it, or their bases and scales, are multiplied
// by a little power of two: as far as this header is concerned. It changes nothing but exponents as long as
// these stay in range. Bases and scales from 2^-100 on are whole multiples of 2^-123, and so are sums, which
// are exact where they are not above 2^-99; divided by 2^20 these are still multiples of the least number of
// all. Up to 2^90 no sum overflows.
BAGUARUN_HOST_DEVICE inline bool scalesExactly(Header header) {
  constexpr uint32_t kLeast = (127u - 100) << 23;
  constexpr uint32_t kGreatest = (127u + 90) << 23;
  const uint32_t base = bitsOf(header.base) & kMagnitudeBits;
  const uint32_t scale = bitsOf(header.scale) & kMagnitudeBits;
  return ((base == 0) | (base - kLeast <= kGreatest - kLeast)) &
         ((scale == 0) | (scale - kLeast <= kGreatest - kLeast));
}

BAGUARUN_HOST_DEVICE inline bool isFinite(float x) { return (bitsOf(x) & 0x7fffffffu) < 0x7f800000u; }

// The scale of a sign1 block of `n` numbers whose magnitudes sum up to `sum`.
BAGUARUN_HOST_DEVICE inline float signScale(float sum, size_t n) {
  if (!isFinite(sum)) return floatOf(kQuietNan);
  // The same quotient, as it is of a power of two.
  return n == kBlockElems ? sum * (1.0f / kBlockElems) : sum / static_cast<float>(n);
}

BAGUARUN_HOST_DEVICE inline float widenF16(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00u) {
    const uint32_t quiet = magnitude > 0x7c00u ? 0x400000u : 0u;
    return floatOf(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13 | quiet);
  }
  // The exponent of 2^112 moves the bias; for a half below 2^-14 the product makes the number normal. Exact
  // either way.
  return floatOf(sign | bitsOf(floatOf(magnitude << 13) * 0x1p112f));
}

BAGUARUN_HOST_DEVICE inline uint16_t narrowF16(float x) {
  const uint32_t bits = bitsOf(x);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 2^16 and more
  uint32_t half;
  if (magnitude >=
      0x38800000u) {  // 2^-14: normal as a half; the carry of rounding runs into the exponent, up to Inf
    half = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13;
  } else {  // In units of 2^-24: adding 0.5 puts the unit at the last bit of the sum, so the addition rounds.
    half = bitsOf(floatOf(magnitude) + 0.5f) - 0x3f000000u;
  }
  return static_cast<uint16_t>(sign | half);
}

BAGUARUN_HOST_DEVICE inline float widenBf16(uint16_t b) {
  const uint32_t bits = static_cast<uint32_t>(b) << 16;
  return floatOf((bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x400000u : bits);
}

BAGUARUN_HOST_DEVICE inline uint16_t narrowBf16(float x) {
  const uint32_t bits = bitsOf(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

}  // namespace baguarun::codec
