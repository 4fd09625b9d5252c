// The public functions: check, choose the device, and compose the CPU codecs from the loops of the chosen
// path.
#include "codec.h"

#include <atomic>
#include <cfenv>
#include <stdexcept>
#include <string>

#include "codec_cuda.h"
#include "cpu_path.h"

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

// One block of a chunk of `numel` numbers: `n` numbers, beginning with number `first`.
struct Span {
  size_t block;
  size_t first;
  size_t n;
};

Span spanOf(size_t numel, size_t block) { return {block, block * kBlockElems, blockLength(numel, block)}; }

// Room for one block in fp32.
struct alignas(64) Wide {
  float numbers[kBlockElems];
};

void convert(const CpuPath& path, DType from, const void* src, DType to, size_t numel, void* dst) {
  if (from == to) {
    if (src != dst) std::memcpy(dst, src, numel * sizeOf(to));
  } else if (from == DType::f32) {
    path.narrow(to, static_cast<const float*>(src), numel, dst);
  } else if (to == DType::f32) {
    path.widen(from, src, numel, static_cast<float*>(dst));
  } else {
    for (size_t block = 0; block < blockCount(numel); ++block) {
      const Span at = spanOf(numel, block);
      Wide wide;
      path.widen(from, advance(src, at.first * sizeOf(from)), at.n, wide.numbers);
      path.narrow(to, wide.numbers, at.n, advance(dst, at.first * sizeOf(to)));
    }
  }
}

// Encodes the blocks that `numbersOf(span, room)` yields, in `room` or elsewhere. Always one block ahead: the
// extremes and the two divisions of the next grid then cost no time of their own.
template <class NumbersOf>
void encodeBlocks(const CpuPath& path, size_t numel, void* dst, NumbersOf numbersOf) {
  Wide room[2];
  Span at = spanOf(numel, 0);
  const float* numbers = numbersOf(at, room[0].numbers);
  Grid grid = path.measure(numbers, at.n);
  for (size_t block = 1; block <= blockCount(numel); ++block) {
    const Span thisAt = at;
    const float* const theseNumbers = numbers;
    const Grid thisGrid = grid;
    if (block < blockCount(numel)) {
      at = spanOf(numel, block);
      numbers = numbersOf(at, room[block % 2].numbers);
      grid = path.measure(numbers, at.n);
    }
    std::memcpy(static_cast<Header*>(dst) + thisAt.block, &thisGrid.header, sizeof(Header));
    path.quantise(theseNumbers, thisAt.n, thisGrid,
                  static_cast<uint8_t*>(dst) + payloadOffset(numel, thisAt.block));
  }
}

void encodeMinMax8(const CpuPath& path, DType dtype, const void* src, size_t numel, void* dst) {
  encodeBlocks(path, numel, dst, [&](Span at, float* room) -> const float* {
    const void* numbers = advance(src, at.first * sizeOf(dtype));
    if (dtype == DType::f32) return static_cast<const float*>(numbers);
    path.widen(dtype, numbers, at.n, room);
    return room;
  });
}

void reduceMinMax8(const CpuPath& path, Sum sum, size_t numel, void* dst) {
  encodeBlocks(path, numel, dst, [&](Span at, float* room) -> const float* {
    path.sumBlocks(sum, {numel, at.block}, room);
    return room;
  });
}

// Writes the blocks that `fill(span, destination)` computes as numbers of `dtype`.
template <class Fill>
void writeBlocks(const CpuPath& path, DType dtype, size_t numel, void* dst, Fill fill) {
  for (size_t block = 0; block < blockCount(numel); ++block) {
    const Span at = spanOf(numel, block);
    void* numbers = advance(dst, at.first * sizeOf(dtype));
    if (dtype == DType::f32) {
      fill(at, static_cast<float*>(numbers));
      continue;
    }
    Wide wide;
    fill(at, wide.numbers);
    path.narrow(dtype, wide.numbers, at.n, numbers);
  }
}

void decodeMinMax8(const CpuPath& path, DType dtype, const void* src, size_t numel, void* dst) {
  writeBlocks(path, dtype, numel, dst, [&](Span at, float* numbers) {
    Header header;
    std::memcpy(&header, static_cast<const Header*>(src) + at.block, sizeof header);
    path.decodeBlock(header, static_cast<const uint8_t*>(src) + payloadOffset(numel, at.block), at.n,
                     numbers);
  });
}

void reduceMinMax8To(const CpuPath& path, DType dtype, Sum sum, size_t numel, void* dst) {
  writeBlocks(path, dtype, numel, dst, [&](Span at, float* numbers) {
    path.sumBlocks(sum, {numel, at.block}, numbers);
  });
}

void reducePlain(const CpuPath& path, DType from, DType to, Sum sum, size_t numel, void* dst) {
  writeBlocks(path, to, numel, dst,
              [&](Span at, float* numbers) { path.sumNumbers(from, sum, at.first, at.n, numbers); });
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
