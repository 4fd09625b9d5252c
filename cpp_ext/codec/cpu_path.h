// What one CPU path offers: the loops. cpu_wires.h makes the wires of them, so that a path holds arithmetic
// only.
#pragma once

#include "block.h"

namespace baguarun::codec {

// scale * (termScale * src[0] + termScale * src[1] + ...), in that order, in fp32.
struct Sum {
  const void* const* src;
  size_t count;
  float scale;
  // Other than 1 only for minmax, whose headers take it in.
  float termScale = 1.0f;
};

// What is encoded with a residual: numbers, and to these are added what others have sent, if anybody did.
struct Terms {
  DType dtype;
  const void* own;
  Sum others;
};

// One block of a minmax chunk, or of a sign1 chunk.
struct Levels {
  Header header;
  const uint8_t* q;
};
struct Signs {
  float scale;
  const uint8_t* bits;
};

// How many blocks sumLevels and sumSigns take at most.
inline constexpr size_t kMostTerms = 4;

// Threads: functions without state. They rely on codec.cc for the floating-point environment (round to
// nearest even, no flush to zero). A block has 1 <= n <= kBlockElems numbers.
struct CpuPath {
  const char* name;
  bool (*usable)();

  void (*widen)(DType from, const void* src, size_t n, float* dst);
  void (*narrow)(DType to, const float* src, size_t n, void* dst);

  // dst = a + b; dst may be a or b.
  void (*add)(const float* a, const float* b, size_t n, float* dst);
  // residual = x - decoded where that is finite.
  void (*updateResidual)(const float* x, const float* decoded, size_t n, float* residual);
  // sum = a + residual, and residual = sum where that is finite.
  void (*addAndOwe)(const float* a, float* residual, size_t n, float* sum);
  // The sum of `n` numbers of `dtype`, beginning with number `first` of each source.
  void (*sumNumbers)(DType dtype, Sum sum, size_t first, size_t n, float* dst);

  // minmax: the grid of a block, then its bytes. Two steps, so that the next block can be measured while the
  // grid of this one is still being computed. Levels of 16 points are kept one per byte until they are
  // packed.
  Grid (*measure)(unsigned levels, const float* src, size_t n);
  void (*quantise)(const float* src, size_t n, Grid grid, uint8_t* q);
  // Both, of one whole block and of the whole block after it.
  Grid (*quantiseAndMeasure)(const float* src, Grid grid, uint8_t* q, unsigned levels, const float* next);
  void (*packLevels)(const uint8_t* q, size_t n, uint8_t* packed);
  void (*unpackLevels)(const uint8_t* packed, size_t n, uint8_t* q);
  void (*decodeLevels)(Levels block, size_t n, float* dst);
  // dst = factor * (dst + blocks[0] + ...), without the old dst if these blocks are the first.
  void (*sumLevels)(const Levels* blocks, size_t count, bool first, float factor, size_t n, float* dst);
  // Levels of one whole block, and the sum of a whole block after it: dst = factor * (blocks[0] + ...).
  // Returns the sum's grid.
  Grid (*quantiseAndSum)(const float* src, Grid grid, uint8_t* q, unsigned levels, const Levels* blocks,
                         size_t count, float factor, float* dst);

  // sign1, likewise.
  float (*sumMagnitudes)(const float* src, size_t n);
  void (*takeSigns)(const float* src, size_t n, uint8_t* bits);
  // The same with error feedback: of dst = a + b; and residual = x - decoded, for numbers whose sum of
  // magnitudes is finite.
  float (*addAndSumMagnitudes)(const float* a, const float* b, size_t n, float* dst);
  void (*takeSignsWithResidual)(const float* x, float scale, size_t n, float* residual, uint8_t* bits);
  void (*decodeSigns)(Signs block, size_t n, float* dst);
  void (*sumSigns)(const Signs* blocks, size_t count, bool first, float factor, size_t n, float* dst);
  // A sum of at most kMostCounted blocks that is coded again (signs.h): how many numbers are of each kind,
  // and the signs of all, where `values` are those of the kinds.
  void (*countSigns)(const Signs* blocks, size_t count, size_t n, const float* values, uint32_t* counts,
                     uint8_t* bits);

  // topk: writes the places of the `keep` highest of the block, in rising order. `hint` is what the same call
  // left there for an earlier block, or 0: how high one might have to be. The choice does not depend on it.
  void (*keepHighest)(const float* src, size_t n, size_t keep, uint32_t& hint, uint16_t* places);
  bool (*allFinite)(const float* src, size_t n);
};

extern const CpuPath kPortablePath;
#if defined(__x86_64__)
extern const CpuPath kAvx2Path;
extern const CpuPath kAvx512Path;
#endif

}  // namespace baguarun::codec
