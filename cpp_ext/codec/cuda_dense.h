// The wires that send something of every number, on CUDA: plain ones, minmax8, minmax4 and sign1. Included by
// codec_cuda.cu only.
//
// load<wire> gives a thread's quad of a chunk. emit<wire> is called by all threads of a block: it writes the
// block whose numbers they hold, and leaves in x what the chunk decodes to.
#pragma once

#include "cuda_load.h"

namespace baguarun::codec::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;

// The device would answer with a NaN of its own.
__device__ inline float levelValue(Header header, uint32_t level) {
  if (header.base != header.base) return floatOf(kQuietNan);
  return __fmaf_rn(static_cast<float>(level), header.scale, header.base);
}

__device__ inline float signValue(float scale, uint32_t bit) { return floatOf(bitsOf(scale) ^ bit << 31); }

template <unsigned levels>
__device__ void loadLevels(const void* chunk, Place at, float (&x)[kQuad]) {
  constexpr int kBits = levels == 256 ? 8 : 4;
  const Header header = static_cast<const Header*>(chunk)[at.block];
  const uint8_t* payload = static_cast<const uint8_t*>(chunk) + levelsOffset(levels, at.numel, at.block);
  const uint32_t packed = loadBytes(payload + at.offset * kBits / 8, (at.valid * kBits + 7) / 8);
  for (int i = 0; i < kQuad; ++i) x[i] = levelValue(header, packed >> (kBits * i) & (levels - 1));
}

__device__ inline void loadSigns(const void* chunk, Place at, float (&x)[kQuad]) {
  const float scale = static_cast<const float*>(chunk)[at.block];
  const uint8_t* payload = static_cast<const uint8_t*>(chunk) + signsOffset(at.numel, at.block);
  const uint32_t bits = at.valid > 0 ? payload[at.offset / 8] >> at.offset % 8 : 0u;
  for (int i = 0; i < kQuad; ++i) x[i] = signValue(scale, bits >> i & 1u);
}

template <Wire wire>
__device__ void load(const void* chunk, Place at, float (&x)[kQuad]) {
  if constexpr (wire == Wire::minmax8) {
    loadLevels<256>(chunk, at, x);
  } else if constexpr (wire == Wire::minmax4) {
    loadLevels<16>(chunk, at, x);
  } else if constexpr (wire == Wire::sign1) {
    loadSigns(chunk, at, x);
  } else {
    loadQuad<wire>(chunk, at.block * kBlockElems + at.offset, at.valid, x);
  }
}

// The grid of the block whose numbers lie in all threads' x, the same in every thread. Its two barriers
// also keep one turn's use of the shared memory apart from the next one's.
__device__ inline Grid blockGrid(unsigned levels, const Quads& x, size_t numel, size_t block) {
  __shared__ float warpLeast[kWarps];
  __shared__ float warpGreatest[kWarps];
  __shared__ Grid grid;
  float least = INFINITY;
  float greatest = -INFINITY;
  bool nan = false;
  for (int quad = 0; quad < kQuads; ++quad) {
    const int valid = placeOf(numel, block, quad).valid;
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
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kWarps; ++warp) {
      least = fminf(least, warpLeast[warp]);
      greatest = fmaxf(greatest, warpGreatest[warp]);
    }
    grid = gridOf(levels, least, greatest, anyNan);
  }
  __syncthreads();
  return grid;
}

template <unsigned levels>
__device__ uint32_t levelOf(float x, Grid grid) {
  if (grid.inv == 0.0f) return 0;
  const int level = __float2int_rn(__fmul_rn(__fsub_rn(x, grid.header.base), grid.inv));
  return static_cast<uint32_t>(min(max(level, 0), static_cast<int>(levels) - 1));
}

template <unsigned levels>
__device__ void emitLevels(Quads& x, size_t numel, size_t block, void* chunk) {
  constexpr int kBits = levels == 256 ? 8 : 4;
  const Grid grid = blockGrid(levels, x, numel, block);
  if (threadIdx.x == 0) static_cast<Header*>(chunk)[block] = grid.header;
  uint8_t* payload = static_cast<uint8_t*>(chunk) + levelsOffset(levels, numel, block);
  for (int quad = 0; quad < kQuads; ++quad) {
    const Place at = placeOf(numel, block, quad);
    uint32_t packed = 0;
    for (int i = 0; i < kQuad; ++i) {
      const uint32_t level = i < at.valid ? levelOf<levels>(x[quad][i], grid) : 0u;
      packed |= level << (kBits * i);
      x[quad][i] = levelValue(grid.header, level);
    }
    storeBytes<kQuad * kBits / 8>(payload + at.offset * kBits / 8, (at.valid * kBits + 7) / 8, packed);
  }
}

// The scale of a sign1 block, the same in every thread. The sum is in the order of codec.h: a thread's quads
// lie 1024 numbers apart, threads 128 apart hold numbers 512 apart, and so on.
__device__ inline float blockScale(const Quads& x, size_t numel, size_t block) {
  static_assert(kQuads == 2);
  __shared__ float sums[kQuad][kThreads];
  __shared__ float scale;
  const int thread = static_cast<int>(threadIdx.x);
  const int valid[kQuads] = {placeOf(numel, block, 0).valid, placeOf(numel, block, 1).valid};
  for (int i = 0; i < kQuad; ++i) {
    const float lower = i < valid[0] ? fabsf(x[0][i]) : 0.0f;
    sums[i][thread] = __fadd_rn(lower, i < valid[1] ? fabsf(x[1][i]) : 0.0f);
  }
  __syncthreads();
  if (thread < 32) {
    float total[kQuad];
    for (int i = 0; i < kQuad; ++i) {
      const float* sum = sums[i] + thread;
      const float even = __fadd_rn(__fadd_rn(sum[0], sum[128]), __fadd_rn(sum[64], sum[192]));
      const float odd = __fadd_rn(__fadd_rn(sum[32], sum[160]), __fadd_rn(sum[96], sum[224]));
      total[i] = __fadd_rn(even, odd);
      for (int distance = 16; distance > 0; distance /= 2) {
        total[i] = __fadd_rn(total[i], __shfl_xor_sync(kAllLanes, total[i], distance));
      }
    }
    const float sum = __fadd_rn(__fadd_rn(total[0], total[2]), __fadd_rn(total[1], total[3]));
    if (thread == 0) scale = signScale(sum, blockLength(numel, block));
  }
  __syncthreads();
  return scale;
}

__device__ inline void emitSigns(Quads& x, size_t numel, size_t block, void* chunk) {
  const float scale = blockScale(x, numel, block);
  const bool finite = isFinite(scale);
  if (threadIdx.x == 0) static_cast<float*>(chunk)[block] = scale;
  uint8_t* payload = static_cast<uint8_t*>(chunk) + signsOffset(numel, block);
  for (int quad = 0; quad < kQuads; ++quad) {
    const Place at = placeOf(numel, block, quad);
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
    const int left = static_cast<int>(blockLength(numel, block)) - at.offset;
    storeBytes<sizeof(bits)>(payload + at.offset / 8, (min(max(left, 0), 32) + 7) / 8, bits);
  }
}

template <Wire wire>
__device__ void emit(Quads& x, size_t numel, size_t block, void* chunk) {
  if constexpr (wire == Wire::minmax8) {
    emitLevels<256>(x, numel, block, chunk);
  } else if constexpr (wire == Wire::minmax4) {
    emitLevels<16>(x, numel, block, chunk);
  } else if constexpr (wire == Wire::sign1) {
    emitSigns(x, numel, block, chunk);
  } else {
    for (int quad = 0; quad < kQuads; ++quad) {
      const Place at = placeOf(numel, block, quad);
      storeQuad<wire>(chunk, block * kBlockElems + at.offset, at.valid, x[quad]);
      if constexpr (wire != Wire::f32) {
        for (int i = 0; i < kQuad; ++i) x[quad][i] = widened<wire>(narrowed<wire>(x[quad][i]));
      }
    }
  }
}

}  // namespace baguarun::codec::cuda
