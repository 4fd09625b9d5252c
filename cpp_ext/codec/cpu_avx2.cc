// The AVX2 path, with FMA and F16C: Haswell, Zen and later.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "cpu_path.h"
#include "sparse.h"

#define BAGUARUN_TARGET [[gnu::target("avx2,fma,f16c")]]
#define BAGUARUN_INLINE [[gnu::target("avx2,fma,f16c"), gnu::always_inline]] inline

namespace baguarun::codec {
namespace {

using V = __m256;
constexpr size_t kLanes = 8;

BAGUARUN_INLINE V load(const float* src) { return _mm256_loadu_ps(src); }
BAGUARUN_INLINE void store(float* dst, V x) { _mm256_storeu_ps(dst, x); }
BAGUARUN_INLINE V broadcast(float x) { return _mm256_set1_ps(x); }
BAGUARUN_INLINE V add(V a, V b) { return _mm256_add_ps(a, b); }
BAGUARUN_INLINE V subtract(V a, V b) { return _mm256_sub_ps(a, b); }
BAGUARUN_INLINE V multiply(V a, V b) { return _mm256_mul_ps(a, b); }
BAGUARUN_INLINE V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
// If either is NaN, the second one.
BAGUARUN_INLINE V minimum(V a, V b) { return _mm256_min_ps(a, b); }
BAGUARUN_INLINE V maximum(V a, V b) { return _mm256_max_ps(a, b); }

BAGUARUN_INLINE float leastLane(V x) {
  __m128 m = _mm_min_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  m = _mm_min_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_min_ss(m, _mm_movehdup_ps(m)));
}

BAGUARUN_INLINE float greatestLane(V x) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

using NanMask = __m256;
const NanMask kNoNan{};
BAGUARUN_INLINE NanMask unordered(NanMask mask, V a, V b) {
  return _mm256_or_ps(mask, _mm256_cmp_ps(a, b, _CMP_UNORD_Q));
}
BAGUARUN_INLINE bool any(NanMask mask) { return _mm256_movemask_ps(mask) != 0; }

BAGUARUN_INLINE V loadLevels(const uint8_t* q) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(q))));
}

// Rounds, clamps to a byte and stores 32 levels. Packing interleaves the 128-bit lanes; the permutation
// undoes it.
BAGUARUN_INLINE void storeLevels(uint8_t* q, const V (&level)[4]) {
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i low = _mm256_packs_epi32(_mm256_cvtps_epi32(level[0]), _mm256_cvtps_epi32(level[1]));
  const __m256i high = _mm256_packs_epi32(_mm256_cvtps_epi32(level[2]), _mm256_cvtps_epi32(level[3]));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q),
                      _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order));
}

BAGUARUN_INLINE __m128i words(const uint16_t* src) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(src));
}
BAGUARUN_INLINE void storeWords(uint16_t* dst, __m128i x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(dst), x);
}

BAGUARUN_INLINE V widenF16x(const uint16_t* src) { return _mm256_cvtph_ps(words(src)); }
BAGUARUN_INLINE void narrowF16x(uint16_t* dst, V x) {
  storeWords(dst, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

BAGUARUN_INLINE V quietBit(V x) {
  return _mm256_and_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q), _mm256_castsi256_ps(_mm256_set1_epi32(0x400000)));
}

BAGUARUN_INLINE V widenBf16x(const uint16_t* src) {
  const V x = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words(src)), 16));
  return _mm256_or_ps(x, quietBit(x));
}

BAGUARUN_INLINE void narrowBf16x(uint16_t* dst, V x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const V kept = _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_or_ps(x, quietBit(x)),
                                  _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(kept), 16);
  storeWords(dst, _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)));
}

// 32 levels from and to 16 bytes; all of them are at most 15.
BAGUARUN_INLINE void packLevels32(const uint8_t* q, uint8_t* packed) {
  const __m256i levels =
      _mm256_min_epu8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(q)), _mm256_set1_epi8(15));
  const __m256i pairs = _mm256_maddubs_epi16(levels, _mm256_set1_epi16(0x1001));
  const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(packed), bytes);
}

BAGUARUN_INLINE void unpackLevels32(const uint8_t* packed, uint8_t* q) {
  const __m256i pairs = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(packed)));
  const __m256i spread = _mm256_or_si256(pairs, _mm256_slli_epi16(pairs, 4));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), _mm256_and_si256(spread, _mm256_set1_epi8(15)));
}

BAGUARUN_INLINE V magnitude(V x) { return _mm256_andnot_ps(broadcast(-0.0f), x); }

// One bit per lane of x that is below zero.
BAGUARUN_INLINE uint32_t negativeLanes(V x) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_LT_OQ)));
}

// x, negated in the lanes whose bits are set.
BAGUARUN_INLINE V signedBy(V x, const uint8_t* bits) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i mine = _mm256_and_si256(_mm256_set1_epi32(*bits), lane);
  const V set = _mm256_castsi256_ps(_mm256_cmpeq_epi32(mine, lane));
  return _mm256_xor_ps(x, _mm256_and_ps(set, broadcast(-0.0f)));
}

// `x` where it is finite, elsewhere `other`.
BAGUARUN_INLINE V finiteOr(V x, V other) {
  return _mm256_blendv_ps(other, x, _mm256_cmp_ps(magnitude(x), broadcast(INFINITY), _CMP_LT_OQ));
}

// Magnitudes as magnitudeOf gives them.
using Ints = __m256i;
BAGUARUN_INLINE Ints broadcastInt(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
BAGUARUN_INLINE Ints loadMagnitudes(const float* src) {
  return _mm256_min_epi32(_mm256_castps_si256(magnitude(load(src))), broadcastInt(kNanMagnitude));
}
BAGUARUN_INLINE Ints greater(Ints a, Ints b) { return _mm256_max_epi32(a, b); }
// One bit per lane in which a > b.
BAGUARUN_INLINE uint32_t greaterLanes(Ints a, Ints b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(a, b))));
}

#include "cpu_simd.inc"
// After the loops that it uses.
#include "cpu_simd_biased.inc"

bool usable() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

}  // namespace

const CpuPath kAvx2Path = {
    .name = "avx2",
    .usable = usable,
    .widen = widen,
    .narrow = narrow,
    .add = add,
    .updateResidual = updateResidual,
    .sumNumbers = sumNumbers,
    .measure = measure,
    .quantise = quantise,
    .packLevels = packLevels,
    .unpackLevels = unpackLevels,
    .decodeLevels = decodeLevels,
    .sumLevels = sumLevels,
    .sumMagnitudes = sumMagnitudes,
    .takeSigns = takeSigns,
    .decodeSigns = decodeSigns,
    .sumSigns = sumSigns,
    .candidates = candidates,
    .allFinite = allFinite,
};

}  // namespace baguarun::codec
#endif
