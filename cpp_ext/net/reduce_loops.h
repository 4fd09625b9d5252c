// The loops of reduce.cc, written once and inlined into functions that are compiled for each path.
//
// Each iteration reads and writes only its own element, also where an out is a source: `ivdep` is true.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#define NET_INLINE [[gnu::always_inline]] inline

namespace baguarun::net::loops {

// Signed overflow is undefined, wrapping is what is wanted.
template <class T>
using Wrapping =
    typename std::conditional_t<std::is_integral_v<T>, std::make_unsigned<T>, std::type_identity<T>>::type;

struct Sum {
  template <class T>
  NET_INLINE static T apply(T a, T b) {
    using W = Wrapping<T>;
    return static_cast<T>(static_cast<W>(a) + static_cast<W>(b));
  }
};

struct Product {
  template <class T>
  NET_INLINE static T apply(T a, T b) {
    // Two uint16 would multiply as int and might overflow: at least unsigned int.
    if constexpr (std::is_integral_v<T> && sizeof(T) < sizeof(int)) {
      return static_cast<T>(static_cast<unsigned>(a) * static_cast<unsigned>(b));
    } else {
      using W = Wrapping<T>;
      return static_cast<T>(static_cast<W>(a) * static_cast<W>(b));
    }
  }
};

struct Min {
  template <class T>
  NET_INLINE static T apply(T a, T b) {
    return a < b || a != a ? a : b;
  }
};

struct Max {
  template <class T>
  NET_INLINE static T apply(T a, T b) {
    return a > b || a != a ? a : b;
  }
};

struct Band {
  template <class T>
  NET_INLINE static T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};

struct Bor {
  template <class T>
  NET_INLINE static T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};

struct Bxor {
  template <class T>
  NET_INLINE static T apply(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

template <class Op, class T>
NET_INLINE void two(const T* a, const T* b, T* out, size_t count) {
#pragma GCC ivdep
  for (size_t i = 0; i < count; ++i) {
    out[i] = Op::apply(a[i], b[i]);
  }
}

template <class Op, class T>
NET_INLINE void four(const T* a, const T* b, const T* c, const T* d, T* out, size_t count) {
#pragma GCC ivdep
  for (size_t i = 0; i < count; ++i) {
    out[i] = Op::apply(Op::apply(Op::apply(a[i], b[i]), c[i]), d[i]);
  }
}

template <class T>
NET_INLINE void divide(T* values, T divisor, size_t count) {
#pragma GCC ivdep
  for (size_t i = 0; i < count; ++i) {
    values[i] = values[i] / divisor;
  }
}

NET_INLINE void fromBFloat16(const uint16_t* in, float* out, size_t count) {
#pragma GCC ivdep
  for (size_t i = 0; i < count; ++i) {
    out[i] = std::bit_cast<float>(static_cast<uint32_t>(in[i]) << 16);
  }
}

NET_INLINE void toBFloat16(const float* in, uint16_t* out, size_t count) {
#pragma GCC ivdep
  for (size_t i = 0; i < count; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(in[i]);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const uint32_t quietNan = (bits >> 16) | 0x40;
    out[i] = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quietNan : rounded);
  }
}

// As the processor's own conversion (F16C) does it: exact, subnormals kept, a NaN made quiet.
NET_INLINE float fromFloat16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t magnitude = half & 0x7fff;
  if (magnitude >= 0x7c00) {
    const uint32_t mantissa = (magnitude & 0x3ff) << 13;
    return std::bit_cast<float>(sign | 0x7f800000 | mantissa | (mantissa != 0 ? 0x400000 : 0));
  }
  // The exponent moves by the difference of the biases; the product is exact, also for subnormals.
  const float value = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
}

// Nearest even, as F16C: too large is infinity, a NaN keeps the top of its payload and is made quiet.
NET_INLINE uint16_t toFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00 | ((magnitude >> 13) & 0x3ff);
  } else if (magnitude >= 0x477ff000) {  // 65520 and more round to infinity
    half = 0x7c00;
  } else if (magnitude < 0x38800000) {  // below 2^-14: one unit of a subnormal is 2^-24, as fp32 has at 0.5
    half = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;
  } else {
    half = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  }
  return static_cast<uint16_t>(sign | half);
}

NET_INLINE void fromFloat16(const uint16_t* in, float* out, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    out[i] = fromFloat16(in[i]);
  }
}

NET_INLINE void toFloat16(const float* in, uint16_t* out, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    out[i] = toFloat16(in[i]);
  }
}

}  // namespace baguarun::net::loops
