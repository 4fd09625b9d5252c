// How a block of threads shares a block of numbers, and how it loads and stores plain ones. Included by
// codec_cuda.cu only.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "block.h"

namespace baguarun::codec::cuda {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kQuad = 4;  // neighbouring numbers that one thread loads and stores at once
constexpr int kQuads = static_cast<int>(kBlockElems) / (kThreads * kQuad);

// The numbers of one block that one thread holds.
using Quads = float[kQuads][kQuad];

__device__ inline bool aligned(const void* pointer, size_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

template <Wire plain>
__device__ float widened(uint16_t word) {
  return plain == Wire::f16 ? widenF16(word) : widenBf16(word);
}

template <Wire plain>
__device__ uint16_t narrowed(float x) {
  return plain == Wire::f16 ? narrowF16(x) : narrowBf16(x);
}

// Four numbers from `first`, of which `valid` exist (the others become 0).
template <Wire plain>
__device__ void loadQuad(const void* numbers, size_t first, int valid, float (&x)[kQuad]) {
  if constexpr (plain == Wire::f32) {
    const float* src = static_cast<const float*>(numbers) + first;
    if (valid == kQuad && aligned(src, sizeof(float4))) {
      const float4 quad = *reinterpret_cast<const float4*>(src);
      x[0] = quad.x, x[1] = quad.y, x[2] = quad.z, x[3] = quad.w;
      return;
    }
    for (int i = 0; i < kQuad; ++i) x[i] = i < valid ? src[i] : 0.0f;
  } else {
    const uint16_t* src = static_cast<const uint16_t*>(numbers) + first;
    if (valid == kQuad && aligned(src, sizeof(ushort4))) {
      const ushort4 quad = *reinterpret_cast<const ushort4*>(src);
      x[0] = widened<plain>(quad.x), x[1] = widened<plain>(quad.y);
      x[2] = widened<plain>(quad.z), x[3] = widened<plain>(quad.w);
      return;
    }
    for (int i = 0; i < kQuad; ++i) x[i] = i < valid ? widened<plain>(src[i]) : 0.0f;
  }
}

template <Wire plain>
__device__ void storeQuad(void* numbers, size_t first, int valid, const float (&x)[kQuad]) {
  if constexpr (plain == Wire::f32) {
    float* dst = static_cast<float*>(numbers) + first;
    if (valid == kQuad && aligned(dst, sizeof(float4))) {
      *reinterpret_cast<float4*>(dst) = make_float4(x[0], x[1], x[2], x[3]);
      return;
    }
    for (int i = 0; i < valid; ++i) dst[i] = x[i];
  } else {
    uint16_t* dst = static_cast<uint16_t*>(numbers) + first;
    if (valid == kQuad && aligned(dst, sizeof(ushort4))) {
      *reinterpret_cast<ushort4*>(dst) = make_ushort4(narrowed<plain>(x[0]), narrowed<plain>(x[1]),
                                                      narrowed<plain>(x[2]), narrowed<plain>(x[3]));
      return;
    }
    for (int i = 0; i < valid; ++i) dst[i] = narrowed<plain>(x[i]);
  }
}

// Up to four bytes of a block; byte i is bits 8*i and up.
__device__ inline uint32_t loadBytes(const uint8_t* q, int valid) {
  if (valid == kQuad && aligned(q, sizeof(uint32_t))) return *reinterpret_cast<const uint32_t*>(q);
  uint32_t bytes = 0;
  for (int i = 0; i < valid; ++i) bytes |= static_cast<uint32_t>(q[i]) << (8 * i);
  return bytes;
}

// `width` is how many there are in a block that is whole.
template <size_t width>
__device__ void storeBytes(uint8_t* q, int valid, uint32_t bytes) {
  using Word = std::conditional_t<width == 4, uint32_t, uint16_t>;
  if (valid == static_cast<int>(width) && aligned(q, width)) {
    *reinterpret_cast<Word*>(q) = static_cast<Word>(bytes);
    return;
  }
  for (int i = 0; i < valid; ++i) q[i] = static_cast<uint8_t>(bytes >> (8 * i));
}

// Where a thread's quad lies: `offset` numbers into block `block` of a chunk of `numel`.
struct Place {
  size_t numel;
  size_t block;
  int offset;
  int valid;
};

__device__ inline Place placeOf(size_t numel, size_t block, int quad) {
  const int offset = (quad * kThreads + static_cast<int>(threadIdx.x)) * kQuad;
  const int left = static_cast<int>(blockLength(numel, block)) - offset;
  return {numel, block, offset, min(max(left, 0), kQuad)};
}

}  // namespace baguarun::codec::cuda
