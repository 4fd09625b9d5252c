// The public functions: check, choose the device and the CPU path, and set the floating-point environment.
#include "codec.h"

#include <atomic>
#include <cfenv>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "codec_cuda.h"
#include "cpu_codec.h"
#include "sparse.h"

namespace baguarun::codec {
namespace {

// The best first.
constexpr const CpuPath* kPaths[] = {
#if defined(__x86_64__)
    &kAvx512Path, &kAvx2Path,
#endif
    &kPortablePath};

const CpuPath* bestPath() {
  for (const CpuPath* path : kPaths) {
    if (path->usable()) return path;
  }
  throw std::logic_error("codec: no CPU path is usable, not even the portable one");
}

std::atomic<const CpuPath*>& chosenPath() {
  static std::atomic<const CpuPath*> path{bestPath()};
  return path;
}

// Gives the loops rounding to nearest and numbers below the normal range, whatever the caller has set
// (torch.set_flush_denormal, for one), and gives the caller's settings back.
class FloatEnvironment {
 public:
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;
#if defined(__x86_64__)
  // The register that the loops obey, alone: fesetenv takes as long as a block, for the sake of the x87.
  FloatEnvironment() : callers_(_mm_getcsr()) { _mm_setcsr(kDefaults); }
  ~FloatEnvironment() { _mm_setcsr(callers_); }

 private:
  static constexpr unsigned kDefaults = 0x1f80;  // all exceptions masked
  unsigned callers_;
#else
  FloatEnvironment() {
    std::fegetenv(&callers_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~FloatEnvironment() { std::fesetenv(&callers_); }

 private:
  std::fenv_t callers_;
#endif
};

void checkFormat(Format format) {
  if (format.wire != Wire::topk && format.wire != Wire::randomk) return;
  if (format.keep < 1 || format.keep > kMostKept) {
    throw std::invalid_argument("codec: keep=" + std::to_string(format.keep) + ": want 1 to " +
                                std::to_string(kMostKept) + " numbers of each " +
                                std::to_string(kBlockElems));
  }
}

size_t payloadBytes(Format format, size_t numel) {
  switch (format.wire) {
    case Wire::f32:
      return numel * sizeof(float);
    case Wire::f16:
    case Wire::bf16:
      return numel * sizeof(uint16_t);
    case Wire::minmax8:
      return levelsOffset(256, blockCount(numel), 0) + numel;
    case Wire::minmax4:
      return levelsOffset(16, blockCount(numel), 0) + numel / 2 + numel % 2;
    case Wire::sign1:
      return signsOffset(blockCount(numel), 0) + numel / 8 + (numel % 8 != 0);
    case Wire::topk:
      return keptInAll(format.keep, numel) * (sizeof(float) + sizeof(uint16_t));
    case Wire::randomk:
      return keptInAll(format.keep, numel) * sizeof(float);
  }
  throw std::logic_error("codec: no such wire");
}

// Of whole and last blocks alike, `finite(header)`.
template <class Header, class Finite>
bool allHeaders(size_t numel, const void* chunk, const Finite& finite) {
  for (size_t block = 0; block < blockCount(numel); ++block) {
    Header header;
    std::memcpy(&header, static_cast<const char*>(chunk) + block * sizeof header, sizeof header);
    if (!finite(header)) return false;
  }
  return true;
}

void checkSources(const char* function, const void* const* src, size_t count) {
  for (size_t k = 0; k < count; ++k) {
    if (src[k] == nullptr) {
      throw std::invalid_argument(std::string(function) + ": src[" + std::to_string(k) + "] is null");
    }
  }
}

void checkReduction(const char* function, const void* const* src, size_t count) {
  if (count == 0)
    throw std::invalid_argument(std::string(function) + ": count=0: want at least one chunk to reduce");
  checkSources(function, src, count);
}

}  // namespace

#ifndef BAGUARUN_WITH_CUDA
namespace cuda {
namespace {
[[noreturn]] void refuse() {
  throw std::runtime_error("codec: Device::cuda, but this build has no CUDA: build with a CUDA toolkit");
}
}  // namespace

void encode(void*, Format, DType, const void*, size_t, void*) { refuse(); }
void encodeSumWithResidual(void*, Format, DType, const void*, const void* const*, size_t, float*, size_t,
                           void*) {
  refuse();
}
void decode(void*, Format, DType, const void*, size_t, void*) { refuse(); }
void reduceEncode(void*, Format, const void* const*, size_t, float, size_t, void*) { refuse(); }
void reduceDecode(void*, Format, DType, const void* const*, size_t, float, size_t, void*) { refuse(); }
}  // namespace cuda
#endif

size_t encodedBytes(Format format, size_t numel) {
  checkFormat(format);
  return (payloadBytes(format, numel) + 15) / 16 * 16;
}

void encode(Exec exec, Format format, DType dtype, const void* src, size_t numel, void* dst) {
  checkFormat(format);
  if (numel == 0) return;
  if (exec.device == Device::cuda) return cuda::encode(exec.stream, format, dtype, src, numel, dst);
  const FloatEnvironment environment;
  cpu::encode(*chosenPath(), format, dtype, src, numel, dst);
}

void encodeWithResidual(Exec exec, Format format, DType dtype, const void* src, float* residual, size_t numel,
                        void* dst) {
  encodeSumWithResidual(exec, format, dtype, src, nullptr, 0, residual, numel, dst);
}

void encodeSumWithResidual(Exec exec, Format format, DType dtype, const void* own, const void* const* src,
                           size_t count, float* residual, size_t numel, void* dst) {
  checkFormat(format);
  if (numel == 0) return;
  if (residual == nullptr) throw std::invalid_argument("codec.encodeSumWithResidual: residual is null");
  checkSources("codec.encodeSumWithResidual", src, count);
  if (exec.device == Device::cuda) {
    return cuda::encodeSumWithResidual(exec.stream, format, dtype, own, src, count, residual, numel, dst);
  }
  const FloatEnvironment environment;
  cpu::encodeWithResidual(*chosenPath(), format, {dtype, own, {src, count, 1.0f}}, residual, numel, dst);
}

void decode(Exec exec, Format format, DType dtype, const void* src, size_t numel, void* dst) {
  checkFormat(format);
  if (numel == 0) return;
  if (exec.device == Device::cuda) return cuda::decode(exec.stream, format, dtype, src, numel, dst);
  const FloatEnvironment environment;
  cpu::decode(*chosenPath(), format, dtype, src, numel, dst);
}

void reduceEncode(Exec exec, Format format, const void* const* src, size_t count, float scale, size_t numel,
                  void* dst) {
  checkFormat(format);
  if (numel == 0) return;
  checkReduction("codec.reduceEncode", src, count);
  if (exec.device == Device::cuda)
    return cuda::reduceEncode(exec.stream, format, src, count, scale, numel, dst);
  const FloatEnvironment environment;
  cpu::reduceEncode(*chosenPath(), format, {src, count, scale}, numel, dst);
}

void reduceDecode(Exec exec, Format format, DType dtype, const void* const* src, size_t count, float scale,
                  size_t numel, void* dst) {
  checkFormat(format);
  if (numel == 0) return;
  checkReduction("codec.reduceDecode", src, count);
  if (exec.device == Device::cuda)
    return cuda::reduceDecode(exec.stream, format, dtype, src, count, scale, numel, dst);
  const FloatEnvironment environment;
  cpu::reduceDecode(*chosenPath(), format, dtype, {src, count, scale}, numel, dst);
}

bool headersAreFinite(Format format, size_t numel, const void* chunk) {
  checkFormat(format);
  const FloatEnvironment environment;
  // Levels lie between the first and the last one.
  const auto gridIsFinite = [](float last) {
    return [last](Header header) {
      return isFinite(header.base) && isFinite(last * header.scale + header.base);
    };
  };
  switch (format.wire) {
    case Wire::minmax8:
      return allHeaders<Header>(numel, chunk, gridIsFinite(255));
    case Wire::minmax4:
      return allHeaders<Header>(numel, chunk, gridIsFinite(15));
    case Wire::sign1:
      return allHeaders<float>(numel, chunk, [](float scale) { return isFinite(scale); });
    default:
      return false;
  }
}

const char* cpuPath() { return chosenPath().load()->name; }

bool usePath(const char* name) {
  for (const CpuPath* path : kPaths) {
    if (std::strcmp(path->name, name) == 0 && path->usable()) {
      chosenPath() = path;
      return true;
    }
  }
  return false;
}

}  // namespace baguarun::codec
