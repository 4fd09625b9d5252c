// minmax8, minmax4 and sign1 on CUDA: of every number something is sent. Included by codec_cuda.cu only.
//
// Levels and Signs are a thread's part of a block, as it comes in: `fetch` begins the loads, `widen` waits
// for them. emitLevels and emitSigns are called by all threads of a block: they write the block whose numbers
// these hold, and leave in x what the chunk decodes to.
#pragma once

#include "cuda_load.h"
#include "cuda_warp.h"

namespace baguarun::codec::cuda {

// Levels in a word, the first lowest. Below 0 counts as 0, and above the greatest as that.
template <unsigned levels, int count>
__device__ uint32_t packed(const int (&level)[count]) {
  static_assert(count % 2 == 0 && count * (levels == 256 ? 8 : 4) <= 32);
  uint32_t word = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750
#pragma unroll
  for (int i = count - 2; i >= 0; i -= 2) {
    if constexpr (levels == 256) {
      asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %0;" : "+r"(word) : "r"(level[i + 1]), "r"(level[i]));
    } else {
      asm("cvt.pack.sat.u4.s32.b32 %0, %1, %2, %0;" : "+r"(word) : "r"(level[i + 1]), "r"(level[i]));
    }
  }
#else
  for (int i = 0; i < count; ++i) {
    const int most = static_cast<int>(levels) - 1;
    word |= static_cast<uint32_t>(min(max(level[i], 0), most)) << (levels == 256 ? 8 : 4) * i;
  }
#endif
  return word;
}

// Powers of two of whose mantissas the bits 0, 4, 8 and 12 are ones. In memory, since an instruction takes
// one constant, and levelAt has a mask already.
static __constant__ uint32_t kPowers[kQuad] = {0x4b000000u, 0x49000000u, 0x47000000u, 0x45000000u};

// Level i of the word as a number: put into the mantissa of a power of two, which is then taken away.
// Conversions are slower.
template <unsigned levels>
__device__ float levelAt(uint32_t word, int i) {
  if constexpr (levels == 16) {
    // Where it lies in the word, so that nothing is shifted.
    const uint32_t power = kPowers[i];
    return __fsub_rn(floatOf((word & 0xfu << 4 * i) | power), floatOf(power));
  } else {
#ifdef __CUDA_ARCH__
    const uint32_t sum = __byte_perm(word, kPowers[0], 0x7540 + i);
#else
    const uint32_t sum = (word >> 8 * i & 0xffu) | kPowers[0];
#endif
    return __fsub_rn(floatOf(sum), 0x1p23f);
  }
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

// Floats as integers in the same order (-0 before +0, a positive NaN after all), and back.
__device__ inline int orderedOf(float x) {
  const int bits = static_cast<int>(bitsOf(x));
  return bits ^ (bits >> 31 & 0x7fffffff);
}
__device__ inline float fromOrdered(int ordered) {
  return floatOf(static_cast<uint32_t>(ordered ^ (ordered >> 31 & 0x7fffffff)));
}

// A NaN if one of them is: a positive one.
__device__ inline float greaterOrNan(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float greater;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(greater) : "f"(a), "f"(b));
  return greater;
#else
  return a != a || b != b ? floatOf(kQuietNan) : fmaxf(a, b);
#endif
}

// The grid of the block whose numbers lie in all threads' x, the same in every thread. Its two barriers
// also keep one turn's use of the shared memory apart from the next one's.
__device__ inline Grid blockGrid(unsigned levels, const Quads& x, Block block) {
  __shared__ int least[kWarps];
  __shared__ int greatest[kWarps];
  __shared__ Grid grid;
  float ownLeast = INFINITY;
  float ownGreatest = -INFINITY;
  for (int quad = 0; quad < kQuads; ++quad) {
    const int valid = block.place(quad).valid;
    for (int i = 0; i < kQuad; ++i) {
      if (i >= valid) continue;
      ownLeast = fminf(ownLeast, x[quad][i]);
      ownGreatest = greaterOrNan(ownGreatest, x[quad][i]);
    }
  }
  const int leastHere = warpLeast(orderedOf(ownLeast));
  const int greatestHere = warpGreatest(orderedOf(ownGreatest));
  if (threadIdx.x % 32 == 0) {
    least[threadIdx.x / 32] = leastHere;
    greatest[threadIdx.x / 32] = greatestHere;
  }
  __syncthreads();
  const uint32_t turned = block.turned();
  if (turned < 32) {
    const float mn = fromOrdered(warpLeast(least[turned % kWarps]));
    const float mx = fromOrdered(warpGreatest(greatest[turned % kWarps]));
    if (turned == 0) grid = gridOf(levels, mn, mx, mx != mx);
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
