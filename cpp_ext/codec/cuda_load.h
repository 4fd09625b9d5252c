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

BAGUARUN_HOST_DEVICE inline bool aligned(const void* pointer, size_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// Where a thread's quad lies: `offset` numbers into its block.
struct Place {
  int offset;
  int valid;   // of the four, so many exist
  bool whole;  // all four do, and in memory they are aligned

  // Whether the quad at `pointer` can be one access of `bytes`. Without a look at `pointer` in whole blocks,
  // so that no branch stands between their loads, and all are under way at once.
  __device__ bool atOnce(const void* pointer, size_t bytes) const {
    return whole || (valid == kQuad && aligned(pointer, bytes));
  }
};

// Has the cache line at `pointer`, in global memory, be brought from there into the second-level cache.
__device__ inline void prefetch([[maybe_unused]] const void* pointer) {
#ifdef __CUDA_ARCH__
  asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer));
#endif
}

// A block of a chunk's numbers.
struct Block {
  size_t numel;    // of the chunk
  uint32_t count;  // of blocks in it
  uint32_t index;
  // All its numbers exist, and all memory of the task is aligned. The kernel's two ways through its code
  // have it as a constant.
  bool whole;

  __device__ size_t length() const { return whole ? kBlockElems : blockLength(numel, index); }
  __device__ size_t first() const { return size_t{index} * kBlockElems; }
  __device__ Place place(int quad) const {
    const int offset = (quad * kThreads + static_cast<int>(threadIdx.x)) * kQuad;
    if (whole) return {offset, kQuad, true};
    return {offset, min(max(static_cast<int>(length()) - offset, 0), kQuad), false};
  }
  // The threads' numbers, turned by whole warps: what a few threads do for all begins at 0 here, so that of
  // a multiprocessor's blocks it does not always fall to the same scheduler.
  __device__ uint32_t turned() const {
    const uint32_t turn = index * 0x9e3779b1u >> 29;
    return (threadIdx.x + 32 * turn) % kThreads;
  }
};

template <Wire plain>
__device__ float widened(uint16_t word) {
  return plain == Wire::f16 ? widenF16(word) : widenBf16(word);
}

template <Wire plain>
__device__ uint16_t narrowed(float x) {
  return plain == Wire::f16 ? narrowF16(x) : narrowBf16(x);
}

template <Wire plain>
using WordOf = std::conditional_t<plain == Wire::f32, float, uint16_t>;
template <Wire plain>
using VectorOf = std::conditional_t<plain == Wire::f32, float4, ushort4>;

template <Wire plain>
__device__ float numberOf(WordOf<plain> word) {
  if constexpr (plain == Wire::f32) {
    return word;
  } else {
    return widened<plain>(word);
  }
}

// A thread's quad of the block whose numbers begin at `block`. What does not exist becomes 0.
template <class Word, class Vector>
__device__ void loadQuad(const Word* block, Place at, Word (&x)[kQuad]) {
  const Word* src = block + at.offset;
  if (at.atOnce(src, sizeof(Vector))) {
    const Vector quad = *reinterpret_cast<const Vector*>(src);
    x[0] = quad.x, x[1] = quad.y, x[2] = quad.z, x[3] = quad.w;
    return;
  }
  for (int i = 0; i < kQuad; ++i) x[i] = i < at.valid ? src[i] : Word{0};
}

__device__ inline void loadQuad(const float* block, Place at, float (&x)[kQuad]) {
  loadQuad<float, float4>(block, at, x);
}

__device__ inline void storeQuad(float* block, Place at, const float (&x)[kQuad]) {
  float* dst = block + at.offset;
  if (at.atOnce(dst, sizeof(float4))) {
    *reinterpret_cast<float4*>(dst) = make_float4(x[0], x[1], x[2], x[3]);
    return;
  }
  for (int i = 0; i < kQuad; ++i) {
    if (i < at.valid) dst[i] = x[i];
  }
}

template <Wire plain>
__device__ void storeNarrowed(uint16_t* block, Place at, const float (&x)[kQuad]) {
  uint16_t* dst = block + at.offset;
  if (at.atOnce(dst, sizeof(ushort4))) {
    *reinterpret_cast<ushort4*>(dst) = make_ushort4(narrowed<plain>(x[0]), narrowed<plain>(x[1]),
                                                    narrowed<plain>(x[2]), narrowed<plain>(x[3]));
    return;
  }
  for (int i = 0; i < kQuad; ++i) {
    if (i < at.valid) dst[i] = narrowed<plain>(x[i]);
  }
}

// A thread's part of a block of plain numbers. `fetch` begins the loads, `widen` waits for them.
template <Wire wire>
class Plain {
  using Word = WordOf<wire>;

 public:
  __device__ void fetch(const void* chunk, Block block) {
    for (int quad = 0; quad < kQuads; ++quad) {
      loadQuad<Word, VectorOf<wire>>(static_cast<const Word*>(chunk) + block.first(), block.place(quad),
                                     words_[quad]);
    }
  }
  template <bool isSummed>
  __device__ void widen(Quads& x) const {
    for (int quad = 0; quad < kQuads; ++quad) {
      for (int i = 0; i < kQuad; ++i) x[quad][i] = numberOf<wire>(words_[quad][i]);
    }
  }

 private:
  Word words_[kQuads][kQuad];
};

template <Wire wire>
__device__ void emitPlain(Quads& x, Block block, void* chunk) {
  for (int quad = 0; quad < kQuads; ++quad) {
    if constexpr (wire == Wire::f32) {
      storeQuad(static_cast<float*>(chunk) + block.first(), block.place(quad), x[quad]);
    } else {
      storeNarrowed<wire>(static_cast<uint16_t*>(chunk) + block.first(), block.place(quad), x[quad]);
      for (int i = 0; i < kQuad; ++i) x[quad][i] = widened<wire>(narrowed<wire>(x[quad][i]));
    }
  }
}

// `width` bytes at `q`, of which `valid` exist; byte i is bits 8*i and up. `whole` as in Place.
template <int width>
__device__ uint32_t loadBytes(const uint8_t* q, int valid, bool whole) {
  using Word = std::conditional_t<width == 4, uint32_t, uint16_t>;
  if (whole || (valid == width && aligned(q, width))) return *reinterpret_cast<const Word*>(q);
  uint32_t bytes = 0;
  for (int i = 0; i < width; ++i) bytes |= i < valid ? static_cast<uint32_t>(q[i]) << (8 * i) : 0;
  return bytes;
}

template <int width>
__device__ void storeBytes(uint8_t* q, int valid, bool whole, uint32_t bytes) {
  using Word = std::conditional_t<width == 4, uint32_t, uint16_t>;
  if (whole || (valid == width && aligned(q, width))) {
    *reinterpret_cast<Word*>(q) = static_cast<Word>(bytes);
    return;
  }
  for (int i = 0; i < width; ++i) {
    if (i < valid) q[i] = static_cast<uint8_t>(bytes >> (8 * i));
  }
}

}  // namespace baguarun::codec::cuda
