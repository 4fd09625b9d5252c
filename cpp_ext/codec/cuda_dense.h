// minmax8, minmax4 and sign1 on CUDA: of every number something is sent. Included by codec_cuda.cu only.
//
// Levels and Signs are a thread's part of a block, as it comes in: `fetch` begins the loads, `widen` waits
// for them. emitLevels and emitSigns are called by all threads of a block: they write the block whose numbers
// these hold, and leave in x what the chunk decodes to.
#pragma once

#include "cuda_load.h"

namespace baguarun::codec::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;

// Four levels in a word, the first lowest. Below 0 counts as 0, and above the greatest as that.
template <unsigned levels>
__device__ uint32_t packed(const int (&level)[kQuad]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750
  uint32_t upper;
  uint32_t word;
  if constexpr (levels == 256) {
    asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, 0;" : "=r"(upper) : "r"(level[3]), "r"(level[2]));
    asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(level[1]), "r"(level[0]), "r"(upper));
  } else {
    asm("cvt.pack.sat.u4.s32.b32 %0, %1, %2, 0;" : "=r"(upper) : "r"(level[3]), "r"(level[2]));
    asm("cvt.pack.sat.u4.s32.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(level[1]), "r"(level[0]), "r"(upper));
  }
  return word;
#else
  uint32_t word = 0;
  for (int i = 0; i < kQuad; ++i) {
    const int most = static_cast<int>(levels) - 1;
    word |= static_cast<uint32_t>(min(max(level[i], 0), most)) << (levels == 256 ? 8 : 4) * i;
  }
  return word;
#endif
}

// Level i of the word as a number: put into the mantissa of 2^23, from which 2^23 is taken away. Conversions
// are slower.
template <unsigned levels>
__device__ float levelAt(uint32_t word, int i) {
  constexpr int kBits = levels == 256 ? 8 : 4;
  constexpr uint32_t kTwoTo23 = 0x4b000000u;
#ifdef __CUDA_ARCH__
  if constexpr (levels == 256) return __fsub_rn(floatOf(__byte_perm(word, kTwoTo23, 0x7540 + i)), 0x1p23f);
#endif
  return __fsub_rn(floatOf((word >> (kBits * i) & (levels - 1)) | kTwoTo23), 0x1p23f);
}

template <unsigned levels>
__device__ void widenLevels(Header header, uint32_t word, float (&x)[kQuad]) {
  for (int i = 0; i < kQuad; ++i) x[i] = __fmaf_rn(levelAt<levels>(word, i), header.scale, header.base);
}

// The device answers with a NaN of its own.
template <unsigned levels>
__device__ void widenLevelsAndNan(Header header, uint32_t word, float (&x)[kQuad]) {
  widenLevels<levels>(header, word, x);
  for (float& own : x) own = header.base != header.base ? floatOf(kQuietNan) : own;
}

template <unsigned levels>
class Levels {
 public:
  static constexpr int kBits = levels == 256 ? 8 : 4;

  __device__ void fetch(const void* chunk, Block block) {
    const uint8_t* payload =
        static_cast<const uint8_t*>(chunk) + levelsOffset(levels, block.count, block.index);
    for (int quad = 0; quad < kQuads; ++quad) {
      const Place at = block.place(quad);
      words_[quad] =
          loadBytes<kQuad * kBits / 8>(payload + at.offset * kBits / 8, (at.valid * kBits + 7) / 8, at.whole);
    }
    const Header* header = static_cast<const Header*>(chunk) + block.index;
    if (block.whole) {
      const float2 both = *reinterpret_cast<const float2*>(header);
      header_ = {both.x, both.y};
    } else {
      header_ = *header;
    }
  }
  // Of what is about to be summed up the bits of a NaN do not matter.
  template <bool isSummed>
  __device__ void widen(Quads& x) const {
    for (int quad = 0; quad < kQuads; ++quad) {
      if constexpr (isSummed) {
        widenLevels<levels>(header_, words_[quad], x[quad]);
      } else {
        widenLevelsAndNan<levels>(header_, words_[quad], x[quad]);
      }
    }
  }

 private:
  uint32_t words_[kQuads];
  Header header_;
};

__device__ inline float signValue(float scale, uint32_t bit) { return floatOf(bitsOf(scale) ^ bit << 31); }

class Signs {
 public:
  __device__ void fetch(const void* chunk, Block block) {
    const uint8_t* payload = static_cast<const uint8_t*>(chunk) + signsOffset(block.count, block.index);
    for (int quad = 0; quad < kQuads; ++quad) {
      const Place at = block.place(quad);
      bits_[quad] = at.valid > 0 ? payload[at.offset / 8] >> at.offset % 8 : 0;
    }
    scale_ = static_cast<const float*>(chunk)[block.index];
  }
  template <bool isSummed>
  __device__ void widen(Quads& x) const {
    for (int quad = 0; quad < kQuads; ++quad) {
      for (int i = 0; i < kQuad; ++i) x[quad][i] = signValue(scale_, bits_[quad] >> i & 1u);
    }
  }

 private:
  uint32_t bits_[kQuads];
  float scale_;
};

// The grid of the block whose numbers lie in all threads' x, the same in every thread. Its two barriers
// also keep one turn's use of the shared memory apart from the next one's.
__device__ inline Grid blockGrid(unsigned levels, const Quads& x, Block block) {
  __shared__ float warpLeast[kWarps];
  __shared__ float warpGreatest[kWarps];
  __shared__ Grid grid;
  float least = INFINITY;
  float greatest = -INFINITY;
  bool nan = false;
  for (int quad = 0; quad < kQuads; ++quad) {
    const int valid = block.place(quad).valid;
    for (int i = 0; i < kQuad; ++i) {
      if (i >= valid) continue;
      least = fminf(least, x[quad][i]);
      greatest = fmaxf(greatest, x[quad][i]);
      nan |= x[quad][i] != x[quad][i];
    }
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    least = fminf(least, __shfl_xor_sync(kAllLanes, least, distance));
    greatest = fmaxf(greatest, __shfl_xor_sync(kAllLanes, greatest, distance));
  }
  if (threadIdx.x % 32 == 0) {
    warpLeast[threadIdx.x / 32] = least;
    warpGreatest[threadIdx.x / 32] = greatest;
  }
  const bool anyNan = __syncthreads_or(nan) != 0;
  if (block.turned() == 0) {
    for (int warp = 0; warp < kWarps; ++warp) {
      least = fminf(least, warpLeast[warp]);
      greatest = fmaxf(greatest, warpGreatest[warp]);
    }
    grid = gridOf(levels, least, greatest, anyNan);
  }
  __syncthreads();
  return grid;
}

template <unsigned levels>
__device__ void emitLevels(Quads& x, Block block, void* chunk) {
  constexpr int kBits = levels == 256 ? 8 : 4;
  const Grid grid = blockGrid(levels, x, block);
  if (threadIdx.x == 0) static_cast<Header*>(chunk)[block.index] = grid.header;
  uint8_t* payload = static_cast<uint8_t*>(chunk) + levelsOffset(levels, block.count, block.index);
  for (int quad = 0; quad < kQuads; ++quad) {
    const Place at = block.place(quad);
    int level[kQuad];
    for (int i = 0; i < kQuad; ++i) {
      // 0 where the grid has one point: the inverse is 0 there, and a NaN becomes 0.
      const int wide = __float2int_rn(__fmul_rn(__fsub_rn(x[quad][i], grid.header.base), grid.inv));
      level[i] = i < at.valid ? wide : 0;
    }
    const uint32_t word = packed<levels>(level);
    storeBytes<kQuad * kBits / 8>(payload + at.offset * kBits / 8, (at.valid * kBits + 7) / 8, at.whole,
                                  word);
    widenLevelsAndNan<levels>(grid.header, word, x[quad]);
  }
}

// The scale of a sign1 block, the same in every thread. The sum is in the order of codec.h: a thread's quads
// lie 1024 numbers apart, threads 128 apart hold numbers 512 apart, and so on.
__device__ inline float blockScale(const Quads& x, Block block) {
  static_assert(kQuads == 2);
  __shared__ float sums[kQuad][kThreads];
  __shared__ float scale;
  const int thread = static_cast<int>(threadIdx.x);
  const int valid[kQuads] = {block.place(0).valid, block.place(1).valid};
  for (int i = 0; i < kQuad; ++i) {
    const float lower = i < valid[0] ? fabsf(x[0][i]) : 0.0f;
    sums[i][thread] = __fadd_rn(lower, i < valid[1] ? fabsf(x[1][i]) : 0.0f);
  }
  __syncthreads();
  const uint32_t turned = block.turned();
  if (turned < 32) {
    float total[kQuad];
    for (int i = 0; i < kQuad; ++i) {
      const float* sum = sums[i] + turned;
      const float even = __fadd_rn(__fadd_rn(sum[0], sum[128]), __fadd_rn(sum[64], sum[192]));
      const float odd = __fadd_rn(__fadd_rn(sum[32], sum[160]), __fadd_rn(sum[96], sum[224]));
      total[i] = __fadd_rn(even, odd);
      for (int distance = 16; distance > 0; distance /= 2) {
        total[i] = __fadd_rn(total[i], __shfl_xor_sync(kAllLanes, total[i], distance));
      }
    }
    const float sum = __fadd_rn(__fadd_rn(total[0], total[2]), __fadd_rn(total[1], total[3]));
    if (turned == 0) scale = signScale(sum, block.length());
  }
  __syncthreads();
  return scale;
}

__device__ inline void emitSigns(Quads& x, Block block, void* chunk) {
  const float scale = blockScale(x, block);
  const bool finite = isFinite(scale);
  if (threadIdx.x == 0) static_cast<float*>(chunk)[block.index] = scale;
  uint8_t* payload = static_cast<uint8_t*>(chunk) + signsOffset(block.count, block.index);
  for (int quad = 0; quad < kQuads; ++quad) {
    const Place at = block.place(quad);
    uint32_t bits = 0;
    for (int i = 0; i < kQuad; ++i) {
      const uint32_t bit = finite && i < at.valid && x[quad][i] < 0.0f;
      bits |= bit << i;
      x[quad][i] = signValue(scale, bit);
    }
    // Eight threads make a word.
    bits <<= threadIdx.x % 8 * kQuad;
    for (int distance = 1; distance < 8; distance *= 2) {
      bits |= __shfl_xor_sync(kAllLanes, bits, distance);
    }
    if (threadIdx.x % 8 != 0) continue;
    const int left = static_cast<int>(block.length()) - at.offset;
    storeBytes<sizeof(bits)>(payload + at.offset / 8, (min(max(left, 0), 32) + 7) / 8, at.whole, bits);
  }
}

}  // namespace baguarun::codec::cuda
