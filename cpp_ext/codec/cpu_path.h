// What one CPU path offers: six loops. codec.cc composes the codecs from them, so that a path holds
// arithmetic only.
#pragma once

#include "block.h"

namespace baguarun::codec {

// scale * (src[0] + src[1] + ...), in that order, in fp32.
struct Sum {
  const void* const* src;
  size_t count;
  float scale;
};

// One block of a minmax8 chunk of `numel` numbers.
struct BlockOf {
  size_t numel;
  size_t block;
};

// Threads: functions without state. They rely on codec.cc for the floating-point environment (round to
// nearest even, no flush to zero).
struct CpuPath {
  const char* name;
  bool (*usable)();

  void (*widen)(DType from, const void* src, size_t n, float* dst);
  void (*narrow)(DType to, const float* src, size_t n, void* dst);

  // One block, 1 <= n <= kBlockElems: its grid, then its bytes. Two steps, so that codec.cc can measure the
  // next block while the grid of this one is still being computed.
  Grid (*measure)(const float* src, size_t n);
  void (*quantise)(const float* src, size_t n, Grid grid, uint8_t* q);
  void (*decodeBlock)(Header header, const uint8_t* q, size_t n, float* dst);

  // The sum of `n` numbers of `dtype`, beginning with number `first` of each source.
  void (*sumNumbers)(DType dtype, Sum sum, size_t first, size_t n, float* dst);
  // The sum of one block of minmax8 chunks.
  void (*sumBlocks)(Sum sum, BlockOf at, float* dst);
};

extern const CpuPath kPortablePath;
#if defined(__x86_64__)
extern const CpuPath kAvx2Path;
extern const CpuPath kAvx512Path;
#endif

}  // namespace baguarun::codec
