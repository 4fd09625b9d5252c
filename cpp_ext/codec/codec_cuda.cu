// The CUDA path. One block of threads takes one block of numbers at a time, whatever the wire: it gathers
// fp32 values (a load, or a sum over chunks in rank order), then emits numbers or a compressed block. The
// rules are those of block.h and sparse.h, the roundings are written out, so the bits are those of the CPU
// paths.
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "codec_cuda.h"
#include "cuda_dense.h"
#include "cuda_sparse.h"

namespace baguarun::codec::cuda {
namespace {

constexpr size_t kMostSources = 64;      // in one kernel's parameters
constexpr size_t kMostBlocks = 1 << 20;  // of threads in a launch; each goes on to the next blocks of numbers

struct Sources {
  const void* src[kMostSources];
  unsigned count;
  const float* before;  // the sum of earlier sources, or null
};

// What a kernel does: dst = encode(decode(src)), where one of the two is plain; dst = encode(scale *
// sum(decode(src))); or the first with a residual.
enum class Mode { convert, reduce, feedback };

struct Task {
  Sources sources;
  Format format;  // of what is not plain
  float scale;
  size_t numel;
  void* dst;
  float* residual;
};

constexpr bool isPlain(Wire wire) { return wire == Wire::f32 || wire == Wire::f16 || wire == Wire::bf16; }
BAGUARUN_HOST_DEVICE constexpr bool isSparse(Wire wire) {
  return wire == Wire::topk || wire == Wire::randomk;
}

// before + src[0] + src[1] + ..., in that order.
template <Wire wire>
__device__ void loadSum(const Sources& sources, Place at, float (&total)[kQuad]) {
  unsigned k = 0;
  if (sources.before != nullptr) {
    loadQuad<Wire::f32>(sources.before, at.block * kBlockElems + at.offset, at.valid, total);
  } else {
    load<wire>(sources.src[k++], at, total);
  }
#pragma unroll 4
  for (; k < sources.count; ++k) {
    float x[kQuad];
    load<wire>(sources.src[k], at, x);
    for (int i = 0; i < kQuad; ++i) total[i] = __fadd_rn(total[i], x[i]);
  }
}

template <Wire in, Mode mode>
__device__ void gather(const Task& task, size_t block, Quads& x) {
  if constexpr (isSparse(in)) {
    loadKept<in>(task.sources.src, task.sources.count, task.sources.before, {task.format, task.numel, block},
                 x);
  } else {
    for (int quad = 0; quad < kQuads; ++quad) {
      const Place at = placeOf(task.numel, block, quad);
      if constexpr (mode == Mode::reduce) {
        loadSum<in>(task.sources, at, x[quad]);
      } else {
        load<in>(task.sources.src[0], at, x[quad]);
      }
    }
  }
  if constexpr (mode == Mode::reduce) {
    for (int quad = 0; quad < kQuads; ++quad) {
      for (int i = 0; i < kQuad; ++i) x[quad][i] = __fmul_rn(x[quad][i], task.scale);
    }
  }
}

template <Wire out>
__device__ void emitBlock(const Task& task, size_t block, Quads& x) {
  if constexpr (out == Wire::topk) {
    emitTop(x, {task.format, task.numel, block}, task.dst);
  } else if constexpr (out == Wire::randomk) {
    emitRandom(x, {task.format, task.numel, block}, task.dst);
  } else {
    emit<out>(x, task.numel, block, task.dst);
  }
}

// Emits x + residual, and leaves in the residual what the chunk lacks of it.
template <Wire out>
__device__ void emitWithResidual(const Task& task, size_t block, Quads& x) {
  Quads before;
  Quads wanted;
  for (int quad = 0; quad < kQuads; ++quad) {
    const Place at = placeOf(task.numel, block, quad);
    loadQuad<Wire::f32>(task.residual, block * kBlockElems + at.offset, at.valid, before[quad]);
    for (int i = 0; i < kQuad; ++i) wanted[quad][i] = x[quad][i] = __fadd_rn(x[quad][i], before[quad][i]);
  }
  emitBlock<out>(task, block, x);
  for (int quad = 0; quad < kQuads; ++quad) {
    const Place at = placeOf(task.numel, block, quad);
    for (int i = 0; i < kQuad; ++i) {
      const float left = __fsub_rn(wanted[quad][i], x[quad][i]);
      if (isFinite(left)) before[quad][i] = left;
    }
    storeQuad<Wire::f32>(task.residual, block * kBlockElems + at.offset, at.valid, before[quad]);
  }
}

template <Wire in, Wire out, Mode mode>
__global__ void __launch_bounds__(kThreads) transcode(Task task) {
  for (size_t block = blockIdx.x; block < blockCount(task.numel); block += gridDim.x) {
    Quads x;
    gather<in, mode>(task, block, x);
    if constexpr (mode == Mode::feedback) {
      emitWithResidual<out>(task, block, x);
    } else {
      emitBlock<out>(task, block, x);
    }
  }
}

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("codec: ") + call + ": " + cudaGetErrorString(error));
}

using Kernel = void (*)(Task);

// Null for what no function of codec.h asks for.
template <Wire in, Wire out, Mode mode>
Kernel kernel() {
  constexpr bool used = mode == Mode::convert  ? isPlain(in) || isPlain(out)
                        : mode == Mode::reduce ? isPlain(out) || in == out
                                               : isPlain(in);
  if constexpr (used) {
    return transcode<in, out, mode>;
  } else {
    return nullptr;
  }
}

template <Wire in, Mode mode>
Kernel kernelTo(Wire out) {
  switch (out) {
    case Wire::f32:
      return kernel<in, Wire::f32, mode>();
    case Wire::f16:
      return kernel<in, Wire::f16, mode>();
    case Wire::bf16:
      return kernel<in, Wire::bf16, mode>();
    case Wire::minmax8:
      return kernel<in, Wire::minmax8, mode>();
    case Wire::minmax4:
      return kernel<in, Wire::minmax4, mode>();
    case Wire::sign1:
      return kernel<in, Wire::sign1, mode>();
    case Wire::topk:
      return kernel<in, Wire::topk, mode>();
    case Wire::randomk:
      return kernel<in, Wire::randomk, mode>();
  }
  throw std::logic_error("codec: no such wire");
}

template <Mode mode>
Kernel kernelOf(Wire in, Wire out) {
  switch (in) {
    case Wire::f32:
      return kernelTo<Wire::f32, mode>(out);
    case Wire::f16:
      return kernelTo<Wire::f16, mode>(out);
    case Wire::bf16:
      return kernelTo<Wire::bf16, mode>(out);
    case Wire::minmax8:
      return kernelTo<Wire::minmax8, mode>(out);
    case Wire::minmax4:
      return kernelTo<Wire::minmax4, mode>(out);
    case Wire::sign1:
      return kernelTo<Wire::sign1, mode>(out);
    case Wire::topk:
      return kernelTo<Wire::topk, mode>(out);
    case Wire::randomk:
      return kernelTo<Wire::randomk, mode>(out);
  }
  throw std::logic_error("codec: no such wire");
}

void launch(cudaStream_t stream, Kernel kernel, const Task& task) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(std::min(blockCount(task.numel), kMostBlocks)));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  check(cudaLaunchKernelEx(&config, kernel, task), "cudaLaunchKernelEx");
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

// Of the wires `in` and `out`, at least one is plain, and `format` is the other.
void convert(void* stream, Format format, Wire in, Wire out, const void* src, size_t numel, void* dst) {
  const auto cudaStream = static_cast<cudaStream_t>(stream);
  if (in == out) {
    if (src == dst) return;
    const size_t bytes = numel * (in == Wire::f32 ? sizeof(float) : sizeof(uint16_t));
    check(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, cudaStream), "cudaMemcpyAsync");
    return;
  }
  launch(cudaStream, kernelOf<Mode::convert>(in, out),
         {{{src}, 1, nullptr}, format, 1.0f, numel, dst, nullptr});
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
  Format in;
  Wire out;
  float scale;
  size_t numel;
  void* dst;
};

void reduce(cudaStream_t stream, Reduction what, const void* const* src, size_t count, const float* before) {
  Task task{{{}, static_cast<unsigned>(count), before}, what.in, what.scale, what.numel, what.dst, nullptr};
  std::copy_n(src, count, task.sources.src);
  launch(stream, kernelOf<Mode::reduce>(what.in.wire, what.out), task);
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

void encode(void* stream, Format format, DType dtype, const void* src, float* residual, size_t numel,
            void* dst) {
  if (residual == nullptr) {
    return convert(stream, format, plainWire(dtype), format.wire, src, numel, dst);
  }
  launch(static_cast<cudaStream_t>(stream), kernelOf<Mode::feedback>(plainWire(dtype), format.wire),
         {{{src}, 1, nullptr}, format, 1.0f, numel, dst, residual});
}

void decode(void* stream, Format format, DType dtype, const void* src, size_t numel, void* dst) {
  convert(stream, format, format.wire, plainWire(dtype), src, numel, dst);
}

void reduceEncode(void* stream, Format format, const void* const* src, size_t count, float scale,
                  size_t numel, void* dst) {
  reduceAll(stream, {format, format.wire, scale, numel, dst}, src, count);
}

void reduceDecode(void* stream, Format format, DType dtype, const void* const* src, size_t count, float scale,
                  size_t numel, void* dst) {
  reduceAll(stream, {format, plainWire(dtype), scale, numel, dst}, src, count);
}

}  // namespace baguarun::codec::cuda
