// The public functions: check, choose the device, and compose the CPU codecs from the loops of the chosen
// path.
#include "codec.h"

#include <atomic>
#include <cfenv>
#include <stdexcept>
#include <string>

#include "cpu_path.h"
#include "cuda.h"

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
  FloatEnvironment() {
    std::fegetenv(&callers_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~FloatEnvironment() { std::fesetenv(&callers_); }
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  std::fenv_t callers_;
};

size_t sizeOf(DType dtype) { return dtype == DType::f32 ? sizeof(float) : sizeof(uint16_t); }

// The type of the numbers in a plain wire.
DType plainType(Wire wire) {
  switch (wire) {
    case Wire::f32:
      return DType::f32;
    case Wire::f16:
      return DType::f16;
    case Wire::bf16:
      return DType::bf16;
    case Wire::minmax8:
      break;
  }
  throw std::logic_error("codec: minmax8 is not a plain wire");
}

template <class Pointer>
Pointer* advance(Pointer* start, size_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<Pointer>, const char, char>;
  return static_cast<Pointer*>(static_cast<Byte*>(start) + bytes);
}

// Calls `work(first number, how many)` for every block.
template <class Work>
void forEachBlock(size_t numel, Work work) {
  for (size_t block = 0; block < blockCount(numel); ++block) {
    work(block * kBlockElems, blockLength(numel, block));
  }
}

void convert(const CpuPath& path, DType from, const void* src, DType to, size_t numel, void* dst) {
  if (from == to) {
    if (src != dst) std::memcpy(dst, src, numel * sizeOf(to));
  } else if (from == DType::f32) {
    path.narrow(to, static_cast<const float*>(src), numel, dst);
  } else if (to == DType::f32) {
    path.widen(from, src, numel, static_cast<float*>(dst));
  } else {
    forEachBlock(numel, [&](size_t first, size_t n) {
      alignas(64) float wide[kBlockElems];
      path.widen(from, advance(src, first * sizeOf(from)), n, wide);
      path.narrow(to, wide, n, advance(dst, first * sizeOf(to)));
    });
  }
}

Header* headerAt(void* chunk, size_t first) { return static_cast<Header*>(chunk) + first / kBlockElems; }

uint8_t* payloadAt(void* chunk, size_t numel, size_t first) {
  return static_cast<uint8_t*>(chunk) + payloadOffset(numel, first / kBlockElems);
}

void encodeMinMax8(const CpuPath& path, DType dtype, const void* src, size_t numel, void* dst) {
  forEachBlock(numel, [&](size_t first, size_t n) {
    alignas(64) float wide[kBlockElems];
    const void* numbers = advance(src, first * sizeOf(dtype));
    if (dtype != DType::f32) path.widen(dtype, numbers, n, wide);
    path.encodeBlock(dtype == DType::f32 ? static_cast<const float*>(numbers) : wide, n, headerAt(dst, first),
                     payloadAt(dst, numel, first));
  });
}

void decodeMinMax8(const CpuPath& path, DType dtype, const void* src, size_t numel, void* dst) {
  forEachBlock(numel, [&](size_t first, size_t n) {
    alignas(64) float wide[kBlockElems];
    Header header;
    std::memcpy(&header, static_cast<const Header*>(src) + first / kBlockElems, sizeof header);
    const uint8_t* q = static_cast<const uint8_t*>(src) + payloadOffset(numel, first / kBlockElems);
    void* numbers = advance(dst, first * sizeOf(dtype));
    path.decodeBlock(header, q, n, dtype == DType::f32 ? static_cast<float*>(numbers) : wide);
    if (dtype != DType::f32) path.narrow(dtype, wide, n, numbers);
  });
}

void reduceMinMax8(const CpuPath& path, Sum sum, size_t numel, void* dst) {
  forEachBlock(numel, [&](size_t first, size_t n) {
    alignas(64) float wide[kBlockElems];
    path.sumBlocks(sum, {numel, first / kBlockElems}, wide);
    path.encodeBlock(wide, n, headerAt(dst, first), payloadAt(dst, numel, first));
  });
}

void reduceMinMax8To(const CpuPath& path, DType dtype, Sum sum, size_t numel, void* dst) {
  forEachBlock(numel, [&](size_t first, size_t n) {
    alignas(64) float wide[kBlockElems];
    void* numbers = advance(dst, first * sizeOf(dtype));
    path.sumBlocks(sum, {numel, first / kBlockElems},
                   dtype == DType::f32 ? static_cast<float*>(numbers) : wide);
    if (dtype != DType::f32) path.narrow(dtype, wide, n, numbers);
  });
}

void reducePlain(const CpuPath& path, DType from, DType to, Sum sum, size_t numel, void* dst) {
  if (to == DType::f32) {
    path.sumNumbers(from, sum, 0, numel, static_cast<float*>(dst));
    return;
  }
  forEachBlock(numel, [&](size_t first, size_t n) {
    alignas(64) float wide[kBlockElems];
    path.sumNumbers(from, sum, first, n, wide);
    path.narrow(to, wide, n, advance(dst, first * sizeOf(to)));
  });
}

void checkReduction(const char* function, const void* const* src, size_t count) {
  if (count == 0)
    throw std::invalid_argument(std::string(function) + ": count=0: want at least one chunk to reduce");
  for (size_t k = 0; k < count; ++k) {
    if (src[k] == nullptr) {
      throw std::invalid_argument(std::string(function) + ": src[" + std::to_string(k) + "] is null");
    }
  }
}

}  // namespace

#ifndef BAGUARUN_WITH_CUDA
namespace cuda {
namespace {
[[noreturn]] void refuse() {
  throw std::runtime_error("codec: Device::cuda, but this build has no CUDA: build with a CUDA toolkit");
}
}  // namespace

void encode(void*, Wire, DType, const void*, size_t, void*) { refuse(); }
void decode(void*, Wire, DType, const void*, size_t, void*) { refuse(); }
void reduceEncode(void*, Wire, const void* const*, size_t, float, size_t, void*) { refuse(); }
void reduceDecode(void*, Wire, DType, const void* const*, size_t, float, size_t, void*) { refuse(); }
}  // namespace cuda
#endif

size_t encodedBytes(Wire wire, size_t numel) {
  const size_t bytes =
      wire == Wire::minmax8 ? payloadOffset(numel, 0) + numel : numel * sizeOf(plainType(wire));
  return (bytes + 15) / 16 * 16;
}

void encode(Exec exec, Wire wire, DType dtype, const void* src, size_t numel, void* dst) {
  if (numel == 0) return;
  if (exec.device == Device::cuda) return cuda::encode(exec.stream, wire, dtype, src, numel, dst);
  const FloatEnvironment environment;
  const CpuPath& path = *chosenPath();
  if (wire == Wire::minmax8) {
    encodeMinMax8(path, dtype, src, numel, dst);
  } else {
    convert(path, dtype, src, plainType(wire), numel, dst);
  }
}

void decode(Exec exec, Wire wire, DType dtype, const void* src, size_t numel, void* dst) {
  if (numel == 0) return;
  if (exec.device == Device::cuda) return cuda::decode(exec.stream, wire, dtype, src, numel, dst);
  const FloatEnvironment environment;
  const CpuPath& path = *chosenPath();
  if (wire == Wire::minmax8) {
    decodeMinMax8(path, dtype, src, numel, dst);
  } else {
    convert(path, plainType(wire), src, dtype, numel, dst);
  }
}

void reduceEncode(Exec exec, Wire wire, const void* const* src, size_t count, float scale, size_t numel,
                  void* dst) {
  if (numel == 0) return;
  checkReduction("codec.reduceEncode", src, count);
  if (exec.device == Device::cuda)
    return cuda::reduceEncode(exec.stream, wire, src, count, scale, numel, dst);
  const FloatEnvironment environment;
  const CpuPath& path = *chosenPath();
  if (wire == Wire::minmax8) {
    reduceMinMax8(path, {src, count, scale}, numel, dst);
  } else {
    reducePlain(path, plainType(wire), plainType(wire), {src, count, scale}, numel, dst);
  }
}

void reduceDecode(Exec exec, Wire wire, DType dtype, const void* const* src, size_t count, float scale,
                  size_t numel, void* dst) {
  if (numel == 0) return;
  checkReduction("codec.reduceDecode", src, count);
  if (exec.device == Device::cuda)
    return cuda::reduceDecode(exec.stream, wire, dtype, src, count, scale, numel, dst);
  const FloatEnvironment environment;
  const CpuPath& path = *chosenPath();
  if (wire == Wire::minmax8) {
    reduceMinMax8To(path, dtype, {src, count, scale}, numel, dst);
  } else {
    reducePlain(path, plainType(wire), dtype, {src, count, scale}, numel, dst);
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
