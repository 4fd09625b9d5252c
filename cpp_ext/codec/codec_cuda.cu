// The CUDA path. One block of threads takes one block of numbers at a time, whatever the wire: it gathers
// fp32 values (a load, or a sum over chunks in rank order), then emits numbers or a minmax8 block. The rules
// are those of block.h, the roundings are written out, so the bits are those of the CPU paths.
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "codec_cuda.h"

namespace baguarun::codec::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kQuad = 4;  // neighbouring numbers that one thread loads and stores at once
constexpr int kQuads = static_cast<int>(kBlockElems) / (kThreads * kQuad);
constexpr size_t kMostSources = 64;      // in one kernel's parameters
constexpr size_t kMostBlocks = 1 << 20;  // of threads in a launch; each goes on to the next blocks of numbers

struct Sources {
  const void* src[kMostSources];
  unsigned count;
  const float* before;  // the sum of earlier sources, or null
};

__device__ bool aligned(const void* pointer, size_t bytes) {
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

// The same for the bytes of a block, `offset` bytes into its payload; byte i is bits 8*i and up.
__device__ uint32_t loadBytes(const uint8_t* q, int valid) {
  if (valid == kQuad && aligned(q, sizeof(uint32_t))) return *reinterpret_cast<const uint32_t*>(q);
  uint32_t bytes = 0;
  for (int i = 0; i < valid; ++i) bytes |= static_cast<uint32_t>(q[i]) << (8 * i);
  return bytes;
}

__device__ void storeBytes(uint8_t* q, int valid, uint32_t bytes) {
  if (valid == kQuad && aligned(q, sizeof(uint32_t))) {
    *reinterpret_cast<uint32_t*>(q) = bytes;
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

__device__ Place placeOf(size_t numel, size_t block, int quad) {
  const int offset = (quad * kThreads + static_cast<int>(threadIdx.x)) * kQuad;
  const int left = static_cast<int>(blockLength(numel, block)) - offset;
  return {numel, block, offset, min(max(left, 0), kQuad)};
}

template <Wire wire>
__device__ void loadFromChunk(const void* chunk, Place at, float (&x)[kQuad]) {
  if constexpr (wire == Wire::minmax8) {
    const Header* header = static_cast<const Header*>(chunk) + at.block;
    const float base = header->base;
    const float scale = header->scale;
    const uint8_t* q = static_cast<const uint8_t*>(chunk) + payloadOffset(at.numel, at.block) + at.offset;
    const uint32_t bytes = loadBytes(q, at.valid);
    for (int i = 0; i < kQuad; ++i) {
      const float level = static_cast<float>(bytes >> (8 * i) & 0xffu);
      // The device would answer with a NaN of its own.
      x[i] = base != base ? floatOf(kQuietNan) : __fmaf_rn(level, scale, base);
    }
  } else {
    loadQuad<wire>(chunk, at.block * kBlockElems + at.offset, at.valid, x);
  }
}

// scale * (before + src[0] + src[1] + ...), in that order.
template <Wire wire>
__device__ void loadSum(const Sources& sources, float scale, Place at, float (&total)[kQuad]) {
  unsigned k = 0;
  if (sources.before != nullptr) {
    loadQuad<Wire::f32>(sources.before, at.block * kBlockElems + at.offset, at.valid, total);
  } else {
    loadFromChunk<wire>(sources.src[k++], at, total);
  }
#pragma unroll 4
  for (; k < sources.count; ++k) {
    float x[kQuad];
    loadFromChunk<wire>(sources.src[k], at, x);
    for (int i = 0; i < kQuad; ++i) total[i] = __fadd_rn(total[i], x[i]);
  }
  for (int i = 0; i < kQuad; ++i) total[i] = __fmul_rn(total[i], scale);
}

// The grid of the block whose numbers lie in all threads' x, the same in every thread. Its two barriers
// also keep one turn's use of the shared memory apart from the next one's.
__device__ Grid blockGrid(const float (&x)[kQuads][kQuad], size_t numel, size_t block) {
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
    least = fminf(least, __shfl_xor_sync(0xffffffffu, least, distance));
    greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffffu, greatest, distance));
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
    grid = gridOf(least, greatest, anyNan);
  }
  __syncthreads();
  return grid;
}

__device__ uint32_t levelOf(float x, Grid grid) {
  if (grid.inv == 0.0f) return 0;
  const int level = __float2int_rn(__fmul_rn(__fsub_rn(x, grid.header.base), grid.inv));
  return static_cast<uint32_t>(min(max(level, 0), 255));
}

__device__ void storeBlock(const float (&x)[kQuads][kQuad], size_t numel, size_t block, void* chunk) {
  const Grid grid = blockGrid(x, numel, block);
  if (threadIdx.x == 0) static_cast<Header*>(chunk)[block] = grid.header;
  uint8_t* payload = static_cast<uint8_t*>(chunk) + payloadOffset(numel, block);
  for (int quad = 0; quad < kQuads; ++quad) {
    const Place at = placeOf(numel, block, quad);
    uint32_t bytes = 0;
    for (int i = 0; i < kQuad; ++i) bytes |= levelOf(x[quad][i], grid) << (8 * i);
    storeBytes(payload + at.offset, at.valid, bytes);
  }
}

// dst = out(in(src)), or out(scale * sum(in(src))). `out` is a wire, or the plain wire that a dtype is.
template <Wire in, Wire out, bool reduce>
__global__ void __launch_bounds__(kThreads) transcode(Sources sources, float scale, size_t numel, void* dst) {
  for (size_t block = blockIdx.x; block < blockCount(numel); block += gridDim.x) {
    float x[kQuads][kQuad];
    for (int quad = 0; quad < kQuads; ++quad) {
      const Place at = placeOf(numel, block, quad);
      if constexpr (reduce) {
        loadSum<in>(sources, scale, at, x[quad]);
      } else {
        loadFromChunk<in>(sources.src[0], at, x[quad]);
      }
    }
    if constexpr (out == Wire::minmax8) {
      storeBlock(x, numel, block, dst);
    } else {
      for (int quad = 0; quad < kQuads; ++quad) {
        const Place at = placeOf(numel, block, quad);
        storeQuad<out>(dst, block * kBlockElems + at.offset, at.valid, x[quad]);
      }
    }
  }
}

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("codec: ") + call + ": " + cudaGetErrorString(error));
}

using Kernel = void (*)(Sources, float, size_t, void*);

template <Wire in, bool reduce>
Kernel kernelTo(Wire out) {
  switch (out) {
    case Wire::f32:
      return transcode<in, Wire::f32, reduce>;
    case Wire::f16:
      return transcode<in, Wire::f16, reduce>;
    case Wire::bf16:
      return transcode<in, Wire::bf16, reduce>;
    case Wire::minmax8:
      return transcode<in, Wire::minmax8, reduce>;
  }
  throw std::logic_error("codec: no such wire");
}

template <bool reduce>
Kernel kernelOf(Wire in, Wire out) {
  switch (in) {
    case Wire::f32:
      return kernelTo<Wire::f32, reduce>(out);
    case Wire::f16:
      return kernelTo<Wire::f16, reduce>(out);
    case Wire::bf16:
      return kernelTo<Wire::bf16, reduce>(out);
    case Wire::minmax8:
      return kernelTo<Wire::minmax8, reduce>(out);
  }
  throw std::logic_error("codec: no such wire");
}

void launch(cudaStream_t stream, Kernel kernel, const Sources& sources, float scale, size_t numel,
            void* dst) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(std::min(blockCount(numel), kMostBlocks)));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  check(cudaLaunchKernelEx(&config, kernel, sources, scale, numel, dst), "cudaLaunchKernelEx");
}

Wire plainWire(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return Wire::f32;
    case DType::f16:
      return Wire::f16;
    case DType::bf16:
      return Wire::bf16;
  }
  throw std::logic_error("codec: no such dtype");
}

void convert(void* stream, Wire in, Wire out, const void* src, size_t numel, void* dst) {
  const auto cudaStream = static_cast<cudaStream_t>(stream);
  if (in == out && in != Wire::minmax8) {
    if (src == dst) return;
    const size_t bytes = numel * (in == Wire::f32 ? sizeof(float) : sizeof(uint16_t));
    check(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, cudaStream), "cudaMemcpyAsync");
    return;
  }
  launch(cudaStream, kernelOf<false>(in, out), {{src}, 1, nullptr}, 1.0f, numel, dst);
}

// The sum of more sources than one launch takes, as it stands between two launches. Stream-ordered.
class RunningSum {
 public:
  RunningSum(cudaStream_t stream, size_t numel) : stream_(stream) {
    check(cudaMallocAsync(&numbers_, numel * sizeof(float), stream_), "cudaMallocAsync");
  }
  // An error here is the stream's, which the next call on it reports.
  ~RunningSum() { static_cast<void>(cudaFreeAsync(numbers_, stream_)); }
  RunningSum(const RunningSum&) = delete;
  RunningSum& operator=(const RunningSum&) = delete;
  float* get() const { return static_cast<float*>(numbers_); }

 private:
  cudaStream_t stream_;
  void* numbers_ = nullptr;
};

struct Reduction {
  Wire in;
  Wire out;
  float scale;
  size_t numel;
  void* dst;
};

void reduce(cudaStream_t stream, Reduction what, const void* const* src, size_t count, const float* before) {
  Sources sources{{}, static_cast<unsigned>(count), before};
  std::copy_n(src, count, sources.src);
  launch(stream, kernelOf<true>(what.in, what.out), sources, what.scale, what.numel, what.dst);
}

void reduceAll(void* stream, Reduction what, const void* const* src, size_t count) {
  const auto cudaStream = static_cast<cudaStream_t>(stream);
  if (count <= kMostSources) return reduce(cudaStream, what, src, count, nullptr);
  const RunningSum sum(cudaStream, what.numel);
  const float* before = nullptr;
  for (; count > kMostSources; src += kMostSources, count -= kMostSources) {
    reduce(cudaStream, {what.in, Wire::f32, 1.0f, what.numel, sum.get()}, src, kMostSources, before);
    before = sum.get();
  }
  reduce(cudaStream, what, src, count, before);
}

}  // namespace

void encode(void* stream, Wire wire, DType dtype, const void* src, size_t numel, void* dst) {
  convert(stream, plainWire(dtype), wire, src, numel, dst);
}

void decode(void* stream, Wire wire, DType dtype, const void* src, size_t numel, void* dst) {
  convert(stream, wire, plainWire(dtype), src, numel, dst);
}

void reduceEncode(void* stream, Wire wire, const void* const* src, size_t count, float scale, size_t numel,
                  void* dst) {
  reduceAll(stream, {wire, wire, scale, numel, dst}, src, count);
}

void reduceDecode(void* stream, Wire wire, DType dtype, const void* const* src, size_t count, float scale,
                  size_t numel, void* dst) {
  reduceAll(stream, {wire, plainWire(dtype), scale, numel, dst}, src, count);
}

}  // namespace baguarun::codec::cuda
