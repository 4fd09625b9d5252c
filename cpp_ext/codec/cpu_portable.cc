// The portable path: plain C++, for every CPU without a path of its own, and the text to check the others
// against.
#include <algorithm>
#include <cmath>

#include "cpu_path.h"

namespace baguarun::codec {
namespace {

constexpr size_t kTile = 64;

// The word of `dtype` (never f32) at `index`.
uint16_t wordAt(const void* src, size_t index) {
  uint16_t word;
  std::memcpy(&word, static_cast<const char*>(src) + index * sizeof word, sizeof word);
  return word;
}

void widen(DType from, const void* src, size_t n, float* dst) {
  switch (from) {
    case DType::f32:
      std::memcpy(dst, src, n * sizeof(float));
      return;
    case DType::f16:
      for (size_t i = 0; i < n; ++i) dst[i] = widenF16(wordAt(src, i));
      return;
    case DType::bf16:
      for (size_t i = 0; i < n; ++i) dst[i] = widenBf16(wordAt(src, i));
      return;
  }
}

void narrow(DType to, const float* src, size_t n, void* dst) {
  auto* words = static_cast<uint16_t*>(dst);
  switch (to) {
    case DType::f32:
      std::memcpy(dst, src, n * sizeof(float));
      return;
    case DType::f16:
      for (size_t i = 0; i < n; ++i) words[i] = narrowF16(src[i]);
      return;
    case DType::bf16:
      for (size_t i = 0; i < n; ++i) words[i] = narrowBf16(src[i]);
      return;
  }
}

// Floats as integers of the same order, which compilers compare many at a time. NaNs lie beyond the
// infinities.
int32_t orderOf(float x) {
  const auto bits = static_cast<int32_t>(bitsOf(x));
  return bits ^ (bits >> 31 & 0x7fffffff);
}

float ofOrder(int32_t order) { return floatOf(static_cast<uint32_t>(order ^ (order >> 31 & 0x7fffffff))); }

Grid measure(const float* src, size_t n) {
  int32_t least = orderOf(src[0]);
  int32_t greatest = least;
  for (size_t i = 0; i < n; ++i) {
    const int32_t order = orderOf(src[i]);
    least = order < least ? order : least;
    greatest = order > greatest ? order : greatest;
  }
  const bool nan = least < orderOf(-INFINITY) || greatest > orderOf(INFINITY);
  return gridOf(ofOrder(least), ofOrder(greatest), nan);
}

void quantise(const float* src, size_t n, Grid grid, uint8_t* q) {
  if (grid.inv == 0.0f) {
    std::memset(q, 0, n);
    return;
  }
  const float base = grid.header.base;
  const float inv = grid.inv;
  for (size_t i = 0; i < n; ++i) {
    const auto level = static_cast<int>(roundedToEven((src[i] - base) * inv));
    const int raised = level < 0 ? 0 : level;
    q[i] = static_cast<uint8_t>(raised > 255 ? 255 : raised);
  }
}

void decodeBlock(Header header, const uint8_t* q, size_t n, float* dst) {
  for (size_t i = 0; i < n; ++i) dst[i] = header.base + static_cast<float>(q[i]) * header.scale;
}

void sumNumbers(DType dtype, Sum sum, size_t first, size_t n, float* dst) {
  const size_t size = dtype == DType::f32 ? sizeof(float) : sizeof(uint16_t);
  float total[kTile];
  float term[kTile];
  for (size_t done = 0; done < n; done += kTile) {
    const size_t length = std::min(kTile, n - done);
    const auto at = [&](size_t k) { return static_cast<const char*>(sum.src[k]) + (first + done) * size; };
    widen(dtype, at(0), length, total);
    for (size_t k = 1; k < sum.count; ++k) {
      widen(dtype, at(k), length, term);
      for (size_t i = 0; i < length; ++i) total[i] += term[i];
    }
    for (size_t i = 0; i < length; ++i) dst[done + i] = total[i] * sum.scale;
  }
}

void sumBlocks(Sum sum, BlockOf at, float* dst) {
  const size_t n = blockLength(at.numel, at.block);
  float term[kBlockElems];
  for (size_t k = 0; k < sum.count; ++k) {
    const auto* chunk = static_cast<const uint8_t*>(sum.src[k]);
    Header header;
    std::memcpy(&header, chunk + at.block * sizeof header, sizeof header);
    decodeBlock(header, chunk + payloadOffset(at.numel, at.block), n, k == 0 ? dst : term);
    if (k == 0) continue;
    for (size_t i = 0; i < n; ++i) dst[i] += term[i];
  }
  for (size_t i = 0; i < n; ++i) dst[i] *= sum.scale;
}

}  // namespace

const CpuPath kPortablePath = {
    .name = "portable",
    .usable = [] { return true; },
    .widen = widen,
    .narrow = narrow,
    .measure = measure,
    .quantise = quantise,
    .decodeBlock = decodeBlock,
    .sumNumbers = sumNumbers,
    .sumBlocks = sumBlocks,
};

}  // namespace baguarun::codec
