// The AVX2 path, with FMA and F16C: Haswell, Zen and later.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>

#include "cpu_path.h"

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

#include "cpu_simd.inc"

bool usable() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

}  // namespace

const CpuPath kAvx2Path = {
    .name = "avx2",
    .usable = usable,
    .widen = widen,
    .narrow = narrow,
    .measure = measure,
    .quantise = quantise,
    .decodeBlock = decodeBlock,
    .sumNumbers = sumNumbers,
    .sumBlocks = sumBlocks,
};

}  // namespace baguarun::codec
#endif
