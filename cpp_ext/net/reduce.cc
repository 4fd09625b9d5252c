#include "net/reduce.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "net/error.h"
#include "net/reduce_loops.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define NET_AVX2 [[gnu::target("avx2,f16c")]]
#define NET_AVX512 [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,f16c,prefer-vector-width=512")]]
#endif

namespace baguarun::net {

namespace {

// Bytes of one tile of accumulators: a few of them stay in the first-level cache.
constexpr size_t kTileBytes = 4096;

// What one path offers for arithmetic on T: out = a op b; out = ((a op b) op c) op d; values /= divisor.
template <class T>
struct Arithmetic {
  void (*two)(const T*, const T*, T*, size_t);
  void (*four)(const T*, const T*, const T*, const T*, T*, size_t);
  void (*divide)(T*, T, size_t);
};

// Conversions of one 16-bit format.
struct Conversion {
  void (*load)(const uint16_t*, float*, size_t);
  void (*store)(const float*, uint16_t*, size_t);
};

struct Portable {
  template <class Op, class T>
  static void two(const T* a, const T* b, T* out, size_t count) {
    loops::two<Op>(a, b, out, count);
  }
  template <class Op, class T>
  static void four(const T* a, const T* b, const T* c, const T* d, T* out, size_t count) {
    loops::four<Op>(a, b, c, d, out, count);
  }
  template <class T>
  static void divide(T* values, T divisor, size_t count) {
    loops::divide(values, divisor, count);
  }
  static void loadBFloat16(const uint16_t* in, float* out, size_t count) {
    loops::fromBFloat16(in, out, count);
  }
  static void storeBFloat16(const float* in, uint16_t* out, size_t count) {
    loops::toBFloat16(in, out, count);
  }
  static void loadFloat16(const uint16_t* in, float* out, size_t count) {
    loops::fromFloat16(in, out, count);
  }
  static void storeFloat16(const float* in, uint16_t* out, size_t count) { loops::toFloat16(in, out, count); }
};

#if defined(__x86_64__)
struct Avx2 {
  template <class Op, class T>
  NET_AVX2 static void two(const T* a, const T* b, T* out, size_t count) {
    loops::two<Op>(a, b, out, count);
  }
  template <class Op, class T>
  NET_AVX2 static void four(const T* a, const T* b, const T* c, const T* d, T* out, size_t count) {
    loops::four<Op>(a, b, c, d, out, count);
  }
  template <class T>
  NET_AVX2 static void divide(T* values, T divisor, size_t count) {
    loops::divide(values, divisor, count);
  }
  NET_AVX2 static void loadBFloat16(const uint16_t* in, float* out, size_t count) {
    loops::fromBFloat16(in, out, count);
  }
  NET_AVX2 static void storeBFloat16(const float* in, uint16_t* out, size_t count) {
    loops::toBFloat16(in, out, count);
  }
  NET_AVX2 static void loadFloat16(const uint16_t* in, float* out, size_t count) {
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
      _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
    }
    loops::fromFloat16(in + i, out + i, count - i);
  }
  NET_AVX2 static void storeFloat16(const float* in, uint16_t* out, size_t count) {
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
    }
    loops::toFloat16(in + i, out + i, count - i);
  }
};

struct Avx512 {
  template <class Op, class T>
  NET_AVX512 static void two(const T* a, const T* b, T* out, size_t count) {
    loops::two<Op>(a, b, out, count);
  }
  template <class Op, class T>
  NET_AVX512 static void four(const T* a, const T* b, const T* c, const T* d, T* out, size_t count) {
    loops::four<Op>(a, b, c, d, out, count);
  }
  template <class T>
  NET_AVX512 static void divide(T* values, T divisor, size_t count) {
    loops::divide(values, divisor, count);
  }
  NET_AVX512 static void loadBFloat16(const uint16_t* in, float* out, size_t count) {
    loops::fromBFloat16(in, out, count);
  }
  NET_AVX512 static void storeBFloat16(const float* in, uint16_t* out, size_t count) {
    loops::toBFloat16(in, out, count);
  }
  // The 256-bit conversions are as fast as memory here.
  static void loadFloat16(const uint16_t* in, float* out, size_t count) { Avx2::loadFloat16(in, out, count); }
  static void storeFloat16(const float* in, uint16_t* out, size_t count) {
    Avx2::storeFloat16(in, out, count);
  }
};
#endif

using Sources = std::span<const void* const>;
using Outs = std::span<void* const>;

template <class T>
const T* at(const void* base, size_t index) {
  return static_cast<const T*>(base) + index;
}

void copyToAll(const void* from, Outs outs, size_t offset, size_t bytes) {
  for (void* out : outs) {
    std::byte* to = static_cast<std::byte*>(out) + offset;
    if (to != from) {
      std::memcpy(to, from, bytes);
    }
  }
}

// Any number of sources, tile by tile. The first out is written straight from registers for 2 and 4 sources.
template <class T>
void reduceTiles(const Arithmetic<T>& path, bool average, Sources sources, Outs outs, size_t count) {
  constexpr size_t kTile = kTileBytes / sizeof(T);
  alignas(64) std::array<T, kTile> tile;
  const size_t numSources = sources.size();
  const bool direct = numSources == 2 || numSources == 4;
  for (size_t i = 0; i < count; i += kTile) {
    const size_t n = std::min(kTile, count - i);
    T* sum = direct ? static_cast<T*>(outs[0]) + i : tile.data();
    if (numSources == 4) {
      path.four(at<T>(sources[0], i), at<T>(sources[1], i), at<T>(sources[2], i), at<T>(sources[3], i), sum,
                n);
    } else {
      path.two(at<T>(sources[0], i), at<T>(sources[1], i), sum, n);
      for (size_t k = 2; k < numSources; ++k) {
        path.two(sum, at<T>(sources[k], i), sum, n);
      }
    }
    if (average) {
      path.divide(sum, static_cast<T>(numSources), n);
    }
    copyToAll(sum, outs, i * sizeof(T), n * sizeof(T));
  }
}

// The same for 16-bit floats: widened, combined in fp32, rounded once.
void reduceHalves(const Arithmetic<float>& path, const Conversion& conversion, bool average, Sources sources,
                  Outs outs, size_t count) {
  constexpr size_t kTile = kTileBytes / sizeof(float);
  alignas(64) std::array<float, kTile> sum;
  alignas(64) std::array<float, kTile> next;
  alignas(64) std::array<uint16_t, kTile> rounded;
  for (size_t i = 0; i < count; i += kTile) {
    const size_t n = std::min(kTile, count - i);
    conversion.load(at<uint16_t>(sources[0], i), sum.data(), n);
    for (size_t k = 1; k < sources.size(); ++k) {
      conversion.load(at<uint16_t>(sources[k], i), next.data(), n);
      path.two(sum.data(), next.data(), sum.data(), n);
    }
    if (average) {
      path.divide(sum.data(), static_cast<float>(sources.size()), n);
    }
    conversion.store(sum.data(), rounded.data(), n);
    copyToAll(rounded.data(), outs, i * sizeof(uint16_t), n * sizeof(uint16_t));
  }
}

template <class Path, class Op, class T>
Arithmetic<T> arithmetic() {
  if constexpr (std::is_floating_point_v<T>) {
    return {&Path::template two<Op, T>, &Path::template four<Op, T>, &Path::template divide<T>};
  } else {
    return {&Path::template two<Op, T>, &Path::template four<Op, T>, nullptr};
  }
}

[[noreturn]] void reject(ReduceOp op, Dtype dtype) {
  throw Error(Fault::kUsage, "",
              std::string("reduction ") + name(op) + " of " + name(dtype) + ": want " +
                  (op == ReduceOp::kAvg ? "a floating-point type" : "an integer type"));
}

template <class Path, class T>
Arithmetic<T> arithmeticOf(ReduceOp op, Dtype dtype) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      return arithmetic<Path, loops::Sum, T>();
    case ReduceOp::kMin:
      return arithmetic<Path, loops::Min, T>();
    case ReduceOp::kMax:
      return arithmetic<Path, loops::Max, T>();
    case ReduceOp::kProduct:
      return arithmetic<Path, loops::Product, T>();
    case ReduceOp::kBand:
    case ReduceOp::kBor:
    case ReduceOp::kBxor:
      break;
  }
  reject(op, dtype);
}

// Bits have no type: bytes will do, and one set of loops serves all.
template <class Path>
void reduceBits(ReduceOp op, Sources sources, Outs outs, size_t bytes) {
  const Arithmetic<uint8_t> path = op == ReduceOp::kBand  ? arithmetic<Path, loops::Band, uint8_t>()
                                   : op == ReduceOp::kBor ? arithmetic<Path, loops::Bor, uint8_t>()
                                                          : arithmetic<Path, loops::Bxor, uint8_t>();
  reduceTiles(path, false, sources, outs, bytes);
}

ReduceOp ofBool(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
    case ReduceOp::kBor:
      return ReduceOp::kBor;
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
    case ReduceOp::kBand:
      return ReduceOp::kBand;
    case ReduceOp::kBxor:
      return ReduceOp::kBxor;
    case ReduceOp::kAvg:
      break;
  }
  reject(op, Dtype::kBool);
}

bool isBitwise(ReduceOp op) { return op == ReduceOp::kBand || op == ReduceOp::kBor || op == ReduceOp::kBxor; }

template <class Path, class T>
void reduceTyped(ReduceOp op, Dtype dtype, Sources sources, Outs outs, size_t count) {
  reduceTiles(arithmeticOf<Path, T>(op, dtype), op == ReduceOp::kAvg, sources, outs, count);
}

template <class Path>
void reduceOn(ReduceOp op, Dtype dtype, Sources sources, Outs outs, size_t count) {
  if (dtype == Dtype::kBool || isBitwise(op)) {
    reduceBits<Path>(dtype == Dtype::kBool ? ofBool(op) : op, sources, outs, count * elementBytes(dtype));
    return;
  }
  const bool average = op == ReduceOp::kAvg;
  switch (dtype) {
    case Dtype::kFloat64:
      return reduceTyped<Path, double>(op, dtype, sources, outs, count);
    case Dtype::kFloat32:
      return reduceTyped<Path, float>(op, dtype, sources, outs, count);
    case Dtype::kFloat16:
      return reduceHalves(arithmeticOf<Path, float>(op, dtype), {&Path::loadFloat16, &Path::storeFloat16},
                          average, sources, outs, count);
    case Dtype::kBFloat16:
      return reduceHalves(arithmeticOf<Path, float>(op, dtype), {&Path::loadBFloat16, &Path::storeBFloat16},
                          average, sources, outs, count);
    case Dtype::kInt8:
      return reduceTyped<Path, int8_t>(op, dtype, sources, outs, count);
    case Dtype::kInt16:
      return reduceTyped<Path, int16_t>(op, dtype, sources, outs, count);
    case Dtype::kInt32:
      return reduceTyped<Path, int32_t>(op, dtype, sources, outs, count);
    case Dtype::kInt64:
      return reduceTyped<Path, int64_t>(op, dtype, sources, outs, count);
    case Dtype::kUint8:
      return reduceTyped<Path, uint8_t>(op, dtype, sources, outs, count);
    case Dtype::kBool:
      break;
  }
}

}  // namespace

size_t elementBytes(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat64:
    case Dtype::kInt64:
      return 8;
    case Dtype::kFloat32:
    case Dtype::kInt32:
      return 4;
    case Dtype::kFloat16:
    case Dtype::kBFloat16:
    case Dtype::kInt16:
      return 2;
    case Dtype::kInt8:
    case Dtype::kUint8:
    case Dtype::kBool:
      return 1;
  }
  throw Error(Fault::kUsage, "", "dtype " + std::to_string(static_cast<int>(dtype)) + ": want one of Dtype");
}

const char* name(Dtype dtype) {
  constexpr std::array kNames = {"fp64",  "fp32",  "fp16",  "bf16",  "int8",
                                 "int16", "int32", "int64", "uint8", "bool"};
  const auto index = static_cast<size_t>(dtype);
  return index < kNames.size() ? kNames[index] : "an unknown dtype";
}

const char* name(ReduceOp op) {
  constexpr std::array kNames = {"SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR"};
  const auto index = static_cast<size_t>(op);
  return index < kNames.size() ? kNames[index] : "an unknown reduction";
}

void checkReduction(ReduceOp op, Dtype dtype) {
  elementBytes(dtype);
  if (static_cast<size_t>(op) > static_cast<size_t>(ReduceOp::kBxor)) {
    throw Error(Fault::kUsage, "",
                "reduction " + std::to_string(static_cast<int>(op)) + ": want one of ReduceOp");
  }
  const bool isFloat = static_cast<size_t>(dtype) <= static_cast<size_t>(Dtype::kBFloat16);
  if ((op == ReduceOp::kAvg && !isFloat) || (isBitwise(op) && isFloat)) {
    reject(op, dtype);
  }
}

ReducePath bestReducePath() {
#if defined(__x86_64__)
  static const ReducePath best = [] {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("f16c")) {
      return ReducePath::kAvx512;
    }
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") ? ReducePath::kAvx2
                                                                            : ReducePath::kPortable;
  }();
  return best;
#else
  return ReducePath::kPortable;
#endif
}

void reduce(ReduceOp op, Dtype dtype, std::span<const void* const> sources, std::span<void* const> outs,
            size_t count, ReducePath path) {
  checkReduction(op, dtype);
  NET_CHECK(!sources.empty() && !outs.empty());
  NET_CHECK(path <= bestReducePath());
  if (sources.size() == 1) {
    copyToAll(sources[0], outs, 0, count * elementBytes(dtype));
    return;
  }
  switch (path) {
    case ReducePath::kPortable:
      return reduceOn<Portable>(op, dtype, sources, outs, count);
#if defined(__x86_64__)
    case ReducePath::kAvx2:
      return reduceOn<Avx2>(op, dtype, sources, outs, count);
    case ReducePath::kAvx512:
      return reduceOn<Avx512>(op, dtype, sources, outs, count);
#else
    case ReducePath::kAvx2:
    case ReducePath::kAvx512:
      break;
#endif
  }
}

}  // namespace baguarun::net
