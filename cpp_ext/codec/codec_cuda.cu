// The CUDA path. One block of threads takes one block of numbers at a time, whatever the wire: it gathers
// fp32 values (a load, or a sum over chunks in rank order), then emits numbers or a compressed block. Where
// that takes longer than memory does, there are kernels of their own (cuda_sums.h, cuda_top.h,
// cuda_top_sums.h). The rules are those of block.h, signs.h and sparse.h, the roundings are written out, so
// the bits are those of the CPU paths.
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "codec_cuda.h"
#include "cuda_dense.h"
#include "cuda_sparse.h"
#include "cuda_sums.h"
#include "cuda_top.h"
#include "cuda_top_sums.h"

namespace baguarun::codec::cuda {
namespace {

// Of threads in a launch; each goes on to the next blocks of numbers.
constexpr uint32_t kMostBlocks = 1 << 20;

// What a kernel does: dst = encode(decode(src)), where one of the two is plain; dst = encode(scale *
// sum(decode(src))); the first with a residual; or the second, added to numbers, with a residual in place of
// a scale.
enum class Mode { convert, reduce, feedback, sumFeedback };

BAGUARUN_HOST_DEVICE constexpr bool hasFeedback(Mode mode) {
  return mode == Mode::feedback || mode == Mode::sumFeedback;
}

constexpr bool isPlain(Wire wire) { return wire == Wire::f32 || wire == Wire::f16 || wire == Wire::bf16; }
BAGUARUN_HOST_DEVICE constexpr bool isSparse(Wire wire) {
  return wire == Wire::topk || wire == Wire::randomk;
}

// A thread's part of a block, as it comes in.
template <Wire wire>
struct PartOf {
  using Type = Plain<wire>;
};
template <>
struct PartOf<Wire::minmax8> {
  using Type = Levels<256>;
};
template <>
struct PartOf<Wire::minmax4> {
  using Type = Levels<16>;
};
template <>
struct PartOf<Wire::sign1> {
  using Type = Signs;
};

__device__ inline void add(const Quads& x, Quads& total) {
  for (int quad = 0; quad < kQuads; ++quad) {
    for (int i = 0; i < kQuad; ++i) total[quad][i] = __fadd_rn(total[quad][i], x[quad][i]);
  }
}

template <Wire wire>
__device__ void loadBlock(const void* chunk, Block block, Quads& x) {
  typename PartOf<wire>::Type part;
  part.fetch(chunk, block);
  part.template widen</*isSummed=*/false>(x);
}

// The total becomes src[0] + ... + src[count-1], in that order, or if it is not new, what it was is added to.
// The loads are under way together.
template <Wire wire, unsigned count, bool isNew>
__device__ void sumBlocks(const void* const* src, Block block, Quads& total) {
  typename PartOf<wire>::Type parts[count];
#pragma unroll
  for (unsigned k = 0; k < count; ++k) parts[k].fetch(src[k], block);
  if constexpr (isNew) parts[0].template widen<(count > 1)>(total);
#pragma unroll
  for (unsigned k = isNew ? 1 : 0; k < count; ++k) {
    Quads x;
    parts[k].template widen</*isSummed=*/true>(x);
    add(x, total);
  }
}

// before + src[0] + src[1] + ..., in that order.
template <Wire wire>
__device__ void loadSum(const Sources& sources, Block block, Quads& total) {
  const unsigned count = sources.count;
  unsigned k = 0;
  if (sources.before.at != nullptr) {
    loadNumbers(sources.before, block, total);
  } else if (block.whole && count >= 4) {
    sumBlocks<wire, 4, true>(sources.src, block, total);
    k = 4;
  } else if (block.whole && count >= 2) {
    sumBlocks<wire, 2, true>(sources.src, block, total);
    k = 2;
  } else {
    sumBlocks<wire, 1, true>(sources.src, block, total);
    k = 1;
  }
#pragma unroll 1
  for (; block.whole && k + 4 <= count; k += 4) sumBlocks<wire, 4, false>(sources.src + k, block, total);
#pragma unroll 1
  for (; k < count; ++k) sumBlocks<wire, 1, false>(sources.src + k, block, total);
}

template <Wire in, Mode mode>
__device__ void gather(const Task& task, Block block, Quads& x) {
  if constexpr (isSparse(in)) {
    loadKept<in>(task.sources, {task.format, block}, x);
  } else if constexpr (mode == Mode::reduce || mode == Mode::sumFeedback) {
    loadSum<in>(task.sources, block, x);
  } else {
    loadBlock<in>(task.sources.src[0], block, x);
  }
  if constexpr (mode == Mode::reduce) {
    for (int quad = 0; quad < kQuads; ++quad) {
      for (int i = 0; i < kQuad; ++i) x[quad][i] = __fmul_rn(x[quad][i], task.scale);
    }
  }
}

// Writes the block whose numbers the threads' x hold, and leaves in x what it decodes to.
template <Wire out>
__device__ void emit(const Task& task, Block block, Quads& x) {
  if constexpr (out == Wire::minmax8) {
    emitLevels<256>(x, block, task.dst);
  } else if constexpr (out == Wire::minmax4) {
    emitLevels<16>(x, block, task.dst);
  } else if constexpr (out == Wire::sign1) {
    emitSigns(x, block, task.dst);
  } else if constexpr (out == Wire::topk) {
    emitTop(x, {task.format, block}, task.dst);
  } else if constexpr (out == Wire::randomk) {
    emitRandom(x, {task.format, block}, task.dst);
  } else {
    emitPlain<out>(x, block, task.dst);
  }
}

template <Wire in, Wire out, Mode mode>
__device__ void transcodeBlock(const Task& task, Block block) {
  Quads x;
  if constexpr (!hasFeedback(mode)) {
    gather<in, mode>(task, block, x);
    emit<out>(task, block, x);
  } else {
    // Emits x + residual, and leaves in the residual what the chunk lacks of it.
    Plain<Wire::f32> carried;
    carried.fetch(task.residual, block);
    gather<in, mode>(task, block, x);
    Quads before;
    carried.template widen</*isSummed=*/true>(before);
    add(before, x);
    Quads wanted;
    for (int quad = 0; quad < kQuads; ++quad) {
      for (int i = 0; i < kQuad; ++i) wanted[quad][i] = x[quad][i];
    }
    emit<out>(task, block, x);
    for (int quad = 0; quad < kQuads; ++quad) {
      for (int i = 0; i < kQuad; ++i) {
        const float left = __fsub_rn(wanted[quad][i], x[quad][i]);
        if (isFinite(left)) before[quad][i] = left;
      }
      storeQuad(task.residual + block.first(), block.place(quad), before[quad]);
    }
  }
}

// Threads that a multiprocessor has room for: CUDA C++ Programming Guide, compute capabilities.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kResidentThreads = 1024;
#elif defined(__CUDA_ARCH__) && ((__CUDA_ARCH__ > 800 && __CUDA_ARCH__ < 900) || __CUDA_ARCH__ >= 1100)
constexpr int kResidentThreads = 1536;
#else
constexpr int kResidentThreads = 2048;
#endif

// How many blocks of threads it is to hold at least; registers are given out accordingly. As measured on an
// H100: docs/results/gpu_algorithms.json.
constexpr int blocksAtOnce(Mode mode) {
  const int wanted = hasFeedback(mode) ? 4 : mode == Mode::reduce ? 6 : 8;
  return wanted * kThreads <= kResidentThreads ? wanted : kResidentThreads / kThreads;
}

// Has the second-level cache load what a block of threads that begins in some microseconds reads, with
// its residual: where a kernel computes for long between its loads, these keep the memory busy no more.
template <Wire in>
__device__ void loadAhead(const Task& task, uint32_t index) {
  constexpr uint32_t kAhead = 512;
  constexpr uint32_t kLine = 128;
  constexpr size_t kBytes = kBlockElems * (in == Wire::f32 ? sizeof(float) : sizeof(uint16_t));
  if (index + kAhead >= task.wholeBlocks) return;
  const size_t next = index + kAhead;
  const uint32_t line = threadIdx.x * kLine;
  if (line < kBytes) prefetch(static_cast<const char*>(task.sources.src[0]) + next * kBytes + line);
  if (line < kBlockElems * sizeof(float)) {
    prefetch(reinterpret_cast<const char*>(task.residual + next * kBlockElems) + line);
  }
}

template <Wire in, Wire out, Mode mode>
__global__ void __launch_bounds__(kThreads, blocksAtOnce(mode)) transcode(Task task) {
  for (uint32_t index = task.firstBlock + blockIdx.x; index < task.blocks; index += gridDim.x) {
    if constexpr (out == Wire::topk && mode == Mode::feedback) loadAhead<in>(task, index);
    if (index < task.wholeBlocks) {
      transcodeBlock<in, out, mode>(task, {task.numel, task.blocks, index, true});
    } else {
      transcodeBlock<in, out, mode>(task, {task.numel, task.blocks, index, false});
    }
  }
}

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("codec: ") + call + ": " + cudaGetErrorString(error));
}

// Null for what no function of codec.h asks for.
template <Wire in, Wire out, Mode mode>
Kernel kernel() {
  constexpr bool used = mode == Mode::convert    ? isPlain(in) || isPlain(out)
                        : mode == Mode::reduce   ? isPlain(out) || in == out
                        : mode == Mode::feedback ? isPlain(in)
                                                 : in == out;
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

bool isAligned(const Task& task) {
  constexpr size_t kBytes = sizeof(float4);
  const Sources& sources = task.sources;
  return std::all_of(sources.src, sources.src + sources.count,
                     [](const void* src) { return aligned(src, kBytes); }) &&
         aligned(sources.before.at, kBytes) && aligned(task.dst, kBytes) && aligned(task.residual, kBytes);
}

Task measured(Task task) {
  task.blocks = static_cast<uint32_t>(blockCount(task.numel));
  task.wholeBlocks = isAligned(task) ? static_cast<uint32_t>(task.numel / kBlockElems) : 0;
  return task;
}

// With a block of `threads` for each `each` of `count` pieces of work.
void launch(cudaStream_t stream, Kernel kernel, const Task& task, size_t count, uint32_t each, int threads) {
  if (count == 0) return;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<uint32_t>(std::min<size_t>((count - 1) / each + 1, kMostBlocks)));
  config.blockDim = dim3(static_cast<uint32_t>(threads));
  config.stream = stream;
  check(cudaLaunchKernelEx(&config, kernel, task), "cudaLaunchKernelEx");
}

// A block of threads for each block of numbers, from task.firstBlock on.
void launch(cudaStream_t stream, Kernel kernel, const Task& task) {
  launch(stream, kernel, task, task.blocks - task.firstBlock, 1, kThreads);
}

// A warp for each whole block, and a block of threads for the others.
void launchByWarps(cudaStream_t stream, Kernel byWarps, Kernel others, Task task) {
  launch(stream, byWarps, task, task.wholeBlocks, kWarpsTogether, kThreadsTogether);
  task.firstBlock = task.wholeBlocks;
  launch(stream, others, task);
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
  const Task task = measured({{{src}, 1, {}}, format, 1.0f, numel, dst, nullptr});
  const Kernel kernel = kernelOf<Mode::convert>(in, out);
  if (out == Wire::topk) return launchByWarps(cudaStream, topEncoder(in), kernel, task);
  launch(cudaStream, kernel, task);
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

void reduce(cudaStream_t stream, Reduction what, const void* const* src, size_t count, Numbers before) {
  Task task{{{}, static_cast<unsigned>(count), before}, what.in, what.scale, what.numel, what.dst, nullptr};
  std::copy_n(src, count, task.sources.src);
  task = measured(task);
  const Kernel kernel = kernelOf<Mode::reduce>(what.in.wire, what.out);
  if (before.at != nullptr || what.in.wire != what.out) return launch(stream, kernel, task);
  switch (what.out) {
    case Wire::minmax4:
      return launchByWarps(stream, sumLevels, kernel, task);
    case Wire::sign1:
      if (count > kMostCounted) return launch(stream, kernel, task);
      return launch(stream, signCounter(count), task, task.blocks, kWarpsTogether, kThreadsTogether);
    case Wire::topk:
      if (count > kMostTopChunks || what.in.keep > kMostOfLanes) return launch(stream, kernel, task);
      task.keptInAll = keptInAll(what.in.keep, what.numel);
      return launchByWarps(stream, topSummer(count), kernel, task);
    case Wire::randomk: {
      const int threads = threadsOfDrawn(what.in.keep);
      return launch(stream, sumDrawn, task, keptInAll(what.in.keep, what.numel),
                    static_cast<uint32_t>(threads * kQuad), threads);
    }
    default:
      return launch(stream, kernel, task);
  }
}

// Calls `last(src, count, before)` with the last sources, as many as one launch takes. The others have been
// added to `before` by then.
template <class Last>
void addUp(cudaStream_t stream, Format in, size_t numel, const void* const* src, size_t count, Numbers before,
           Last last) {
  if (count <= kMostSources) return last(src, count, before);
  const RunningSum sum(stream, numel);
  for (; count > kMostSources; src += kMostSources, count -= kMostSources) {
    reduce(stream, {in, Wire::f32, 1.0f, numel, sum.get()}, src, kMostSources, before);
    before = {sum.get(), DType::f32};
  }
  last(src, count, before);
}

void reduceAll(void* stream, Reduction what, const void* const* src, size_t count) {
  const auto cudaStream = static_cast<cudaStream_t>(stream);
  addUp(cudaStream, what.in, what.numel, src, count, {},
        [&](const void* const* some, size_t left, Numbers before) {
          reduce(cudaStream, what, some, left, before);
        });
}

}  // namespace

void encode(void* stream, Format format, DType dtype, const void* src, size_t numel, void* dst) {
  convert(stream, format, plainWire(dtype), format.wire, src, numel, dst);
}

void encodeSumWithResidual(void* stream, Format format, DType dtype, const void* own, const void* const* src,
                           size_t count, float* residual, size_t numel, void* dst) {
  const auto cudaStream = static_cast<cudaStream_t>(stream);
  Task task{{{own}, 1, {}}, format, 1.0f, numel, dst, residual};
  if (count == 0) {
    return launch(cudaStream, kernelOf<Mode::feedback>(plainWire(dtype), format.wire), measured(task));
  }
  addUp(cudaStream, format, numel, src, count, {own, dtype},
        [&](const void* const* some, size_t left, Numbers before) {
          std::copy_n(some, left, task.sources.src);
          task.sources.count = static_cast<unsigned>(left);
          task.sources.before = before;
          launch(cudaStream, kernelOf<Mode::sumFeedback>(format.wire, format.wire), measured(task));
        });
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
