// The portable path: plain C++, for every CPU without a path of its own, and the text to check the others
// against.
#include <algorithm>
#include <cmath>
#include <functional>

#include "cpu_path.h"
#include "cpu_ranks.h"
#include "cpu_signs.h"

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

void add(const float* a, const float* b, size_t n, float* dst) {
  for (size_t i = 0; i < n; ++i) dst[i] = a[i] + b[i];
}

void addAndOwe(const float* a, float* residual, size_t n, float* sum) {
  for (size_t i = 0; i < n; ++i) {
    const float total = a[i] + residual[i];
    sum[i] = total;
    residual[i] = isFinite(total) ? total : residual[i];
  }
}

void updateResidual(const float* x, const float* decoded, size_t n, float* residual) {
  for (size_t i = 0; i < n; ++i) {
    const float left = x[i] - decoded[i];
    residual[i] = isFinite(left) ? left : residual[i];
  }
}

Grid measure(unsigned levels, const float* src, size_t n) {
  int32_t least = orderOf(src[0]);
  int32_t greatest = least;
  for (size_t i = 0; i < n; ++i) {
    const int32_t order = orderOf(src[i]);
    least = order < least ? order : least;
    greatest = order > greatest ? order : greatest;
  }
  const bool nan = least < orderOf(-INFINITY) || greatest > orderOf(INFINITY);
  return gridOf(levels, ofOrder(least), ofOrder(greatest), nan);
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

Grid quantiseAndMeasure(const float* src, Grid grid, uint8_t* q, unsigned levels, const float* next) {
  quantise(src, kBlockElems, grid, q);
  return measure(levels, next, kBlockElems);
}

void packLevels(const uint8_t* q, size_t n, uint8_t* packed) {
  const auto level = [&](size_t i) { return i < n ? std::min<unsigned>(q[i], 15) : 0u; };
  for (size_t i = 0; i < n; i += 2) packed[i / 2] = static_cast<uint8_t>(level(i) | level(i + 1) << 4);
}

void unpackLevels(const uint8_t* packed, size_t n, uint8_t* q) {
  for (size_t i = 0; i < n; ++i) q[i] = packed[i / 2] >> (i % 2 * 4) & 0xf;
}

void decodeLevels(Levels block, size_t n, float* dst) {
  for (size_t i = 0; i < n; ++i) {
    dst[i] = block.header.base + static_cast<float>(block.q[i]) * block.header.scale;
  }
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

// dst = factor * (dst + terms), where decode(k, room) writes term k.
template <class Decode>
void sumTerms(size_t count, bool first, float factor, size_t n, float* dst, Decode decode) {
  float term[kBlockElems];
  for (size_t k = 0; k < count; ++k) {
    if (first && k == 0) {
      decode(k, dst);
      continue;
    }
    decode(k, term);
    add(dst, term, n, dst);
  }
  for (size_t i = 0; i < n; ++i) dst[i] *= factor;
}

void sumLevels(const Levels* blocks, size_t count, bool first, float factor, size_t n, float* dst) {
  sumTerms(count, first, factor, n, dst, [&](size_t k, float* term) { decodeLevels(blocks[k], n, term); });
}

Grid quantiseAndSum(const float* src, Grid grid, uint8_t* q, unsigned levels, const Levels* blocks,
                    size_t count, float factor, float* dst) {
  quantise(src, kBlockElems, grid, q);
  sumLevels(blocks, count, true, factor, kBlockElems, dst);
  return measure(levels, dst, kBlockElems);
}

float sumMagnitudes(const float* src, size_t n) {
  float sums[kBlockElems] = {};
  for (size_t i = 0; i < n; ++i) sums[i] = floatOf(bitsOf(src[i]) & kMagnitudeBits);
  for (size_t width = kBlockElems / 2; width > 0; width /= 2) {
    for (size_t i = 0; i < width; ++i) sums[i] += sums[i + width];
  }
  return sums[0];
}

float addAndSumMagnitudes(const float* a, const float* b, size_t n, float* dst) {
  add(a, b, n, dst);
  return sumMagnitudes(dst, n);
}

void takeSigns(const float* src, size_t n, uint8_t* bits) {
  for (size_t i = 0; i < n; i += 8) {
    unsigned byte = 0;
    for (size_t j = i; j < std::min(i + 8, n); ++j) byte |= (src[j] < 0.0f ? 1u : 0u) << (j - i);
    bits[i / 8] = static_cast<uint8_t>(byte);
  }
}

void takeSignsWithResidual(const float* x, float scale, size_t n, float* residual, uint8_t* bits) {
  takeSigns(x, n, bits);
  for (size_t i = 0; i < n; ++i) residual[i] = x[i] - (x[i] < 0.0f ? -scale : scale);
}

void decodeSigns(Signs block, size_t n, float* dst) {
  const uint32_t scale = bitsOf(block.scale);
  for (size_t i = 0; i < n; ++i) {
    dst[i] = floatOf(scale ^ static_cast<uint32_t>(block.bits[i / 8] >> i % 8 & 1) << 31);
  }
}

void sumSigns(const Signs* blocks, size_t count, bool first, float factor, size_t n, float* dst) {
  sumTerms(count, first, factor, n, dst, [&](size_t k, float* term) { decodeSigns(blocks[k], n, term); });
}

void countSigns(const Signs* blocks, size_t count, size_t n, const float* values, uint32_t* counts,
                uint8_t* bits) {
  countSignsOf(blocks, count, n, values, counts, bits);
}

// Writes the ranks of some numbers of the block, all of its `keep` highest among them, in the order of the
// block. Returns how many.
//
// Among any kMostKept or more groups of numbers, the number of rank `keep` is no less than the `keep`-highest
// of the groups' greatest: so many groups hold a number that is no less.
size_t candidates(const float* src, size_t n, size_t keep, uint64_t* ranks) {
  uint32_t magnitudes[kBlockElems];
  uint32_t greatest[kMostKept] = {};
  for (size_t i = 0; i < n; ++i) magnitudes[i] = magnitudeOf(src[i]);
  for (size_t start = 0; start < n; start += kMostKept) {
    const size_t length = std::min<size_t>(kMostKept, n - start);
    for (size_t i = 0; i < length; ++i) greatest[i] = std::max(greatest[i], magnitudes[start + i]);
  }
  std::nth_element(greatest, greatest + keep - 1, greatest + kMostKept, std::greater<>());
  uint32_t least = greatest[keep - 1];
  size_t count = 0;
  size_t ties = 0;
  for (size_t i = 0; i < n; ++i) {
    if (magnitudes[i] < least) continue;
    ranks[count++] = rankOf(magnitudes[i], i);
    // Of equal ones, the first `keep` are enough.
    if (magnitudes[i] == least && ++ties == keep) ++least;
  }
  return count;
}

void keepHighest(const float* src, size_t n, size_t keep, uint32_t&, uint16_t* places) {
  uint64_t ranks[kBlockElems];
  takeHighest(ranks, candidates(src, n, keep, ranks), keep, places);
}

bool allFinite(const float* src, size_t n) {
  uint32_t greatest = 0;
  for (size_t i = 0; i < n; ++i) greatest = std::max(greatest, magnitudeOf(src[i]));
  return greatest < 0x7f800000u;
}

}  // namespace

const CpuPath kPortablePath = {
    .name = "portable",
    .usable = [] { return true; },
    .widen = widen,
    .narrow = narrow,
    .add = add,
    .updateResidual = updateResidual,
    .addAndOwe = addAndOwe,
    .sumNumbers = sumNumbers,
    .measure = measure,
    .quantise = quantise,
    .quantiseAndMeasure = quantiseAndMeasure,
    .packLevels = packLevels,
    .unpackLevels = unpackLevels,
    .decodeLevels = decodeLevels,
    .sumLevels = sumLevels,
    .quantiseAndSum = quantiseAndSum,
    .sumMagnitudes = sumMagnitudes,
    .takeSigns = takeSigns,
    .addAndSumMagnitudes = addAndSumMagnitudes,
    .takeSignsWithResidual = takeSignsWithResidual,
    .decodeSigns = decodeSigns,
    .sumSigns = sumSigns,
    .countSigns = countSigns,
    .keepHighest = keepHighest,
    .allFinite = allFinite,
};

}  // namespace baguarun::codec
