// The AVX-512 path: F, BW, DQ and VL, so Skylake-X, Zen 4 and later.
#if defined(__x86_64__)
// GCC's own header warns once inlined: https://gcc.gnu.org/bugzilla/show_bug.cgi?id=105593
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "cpu_path.h"
#include "sparse.h"

#define BAGUARUN_TARGET [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl")]]
#define BAGUARUN_INLINE [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl"), gnu::always_inline]] inline

namespace baguarun::codec {
namespace {

using V = __m512;
constexpr size_t kLanes = 16;

BAGUARUN_INLINE V load(const float* src) { return _mm512_loadu_ps(src); }
BAGUARUN_INLINE void store(float* dst, V x) { _mm512_storeu_ps(dst, x); }
BAGUARUN_INLINE V broadcast(float x) { return _mm512_set1_ps(x); }
BAGUARUN_INLINE V add(V a, V b) { return _mm512_add_ps(a, b); }
BAGUARUN_INLINE V subtract(V a, V b) { return _mm512_sub_ps(a, b); }
BAGUARUN_INLINE V multiply(V a, V b) { return _mm512_mul_ps(a, b); }
BAGUARUN_INLINE V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
// If either is NaN, the second one.
BAGUARUN_INLINE V minimum(V a, V b) { return _mm512_min_ps(a, b); }
BAGUARUN_INLINE V maximum(V a, V b) { return _mm512_max_ps(a, b); }
BAGUARUN_INLINE float leastLane(V x) { return _mm512_reduce_min_ps(x); }
BAGUARUN_INLINE float greatestLane(V x) { return _mm512_reduce_max_ps(x); }

using NanMask = __mmask16;
constexpr NanMask kNoNan = 0;
BAGUARUN_INLINE NanMask unordered(NanMask mask, V a, V b) {
  return static_cast<NanMask>(mask | _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q));
}
BAGUARUN_INLINE bool any(NanMask mask) { return mask != 0; }

BAGUARUN_INLINE V loadLevels(const uint8_t* q) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q))));
}

// Rounds, clamps to a byte and stores 64 levels. Packing interleaves the 128-bit lanes; the permutation
// undoes it.
BAGUARUN_INLINE void storeLevels(uint8_t* q, const V (&level)[4]) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i low = _mm512_packs_epi32(_mm512_cvtps_epi32(level[0]), _mm512_cvtps_epi32(level[1]));
  const __m512i high = _mm512_packs_epi32(_mm512_cvtps_epi32(level[2]), _mm512_cvtps_epi32(level[3]));
  _mm512_storeu_si512(q, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(low, high)));
}

BAGUARUN_INLINE __m256i words(const uint16_t* src) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src));
}
BAGUARUN_INLINE void storeWords(uint16_t* dst, __m256i x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst), x);
}

BAGUARUN_INLINE V widenF16x(const uint16_t* src) { return _mm512_cvtph_ps(words(src)); }
BAGUARUN_INLINE void narrowF16x(uint16_t* dst, V x) {
  storeWords(dst, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

BAGUARUN_INLINE V widenBf16x(const uint16_t* src) {
  const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(words(src)), 16);
  const V x = _mm512_castsi512_ps(bits);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_castsi512_ps(_mm512_mask_or_epi32(bits, nan, bits, _mm512_set1_epi32(0x400000)));
}

BAGUARUN_INLINE void narrowBf16x(uint16_t* dst, V x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i kept = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  storeWords(dst, _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
}

// 32 levels from and to 16 bytes; all of them are at most 15.
BAGUARUN_INLINE void packLevels32(const uint8_t* q, uint8_t* packed) {
  const __m256i levels =
      _mm256_min_epu8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(q)), _mm256_set1_epi8(15));
  const __m256i pairs = _mm256_maddubs_epi16(levels, _mm256_set1_epi16(0x1001));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(packed), _mm256_cvtepi16_epi8(pairs));
}

BAGUARUN_INLINE void unpackLevels32(const uint8_t* packed, uint8_t* q) {
  const __m256i pairs = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(packed)));
  const __m256i spread = _mm256_or_si256(pairs, _mm256_slli_epi16(pairs, 4));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), _mm256_and_si256(spread, _mm256_set1_epi8(15)));
}

BAGUARUN_INLINE V magnitude(V x) { return _mm512_abs_ps(x); }

// One bit per lane of x that is below zero.
BAGUARUN_INLINE uint32_t negativeLanes(V x) { return _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ); }

// x, negated in the lanes whose bits are set.
BAGUARUN_INLINE V signedBy(V x, const uint8_t* bits) {
  __mmask16 set;
  std::memcpy(&set, bits, sizeof set);
  const __m512i word = _mm512_castps_si512(x);
  return _mm512_castsi512_ps(_mm512_mask_xor_epi32(word, set, word, _mm512_set1_epi32(INT32_MIN)));
}

// `x` where it is finite, elsewhere `other`.
BAGUARUN_INLINE V finiteOr(V x, V other) {
  return _mm512_mask_mov_ps(other, _mm512_cmp_ps_mask(magnitude(x), broadcast(INFINITY), _CMP_LT_OQ), x);
}

// Magnitudes as magnitudeOf gives them.
using Ints = __m512i;
BAGUARUN_INLINE Ints broadcastInt(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
BAGUARUN_INLINE Ints loadMagnitudes(const float* src) {
  return _mm512_min_epi32(_mm512_castps_si512(magnitude(load(src))), broadcastInt(kNanMagnitude));
}
BAGUARUN_INLINE Ints greater(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
// One bit per lane in which a > b.
BAGUARUN_INLINE uint32_t greaterLanes(Ints a, Ints b) { return _mm512_cmpgt_epi32_mask(a, b); }

#include "cpu_simd.inc"
// After the loops that it uses.
#include "cpu_simd_biased.inc"

bool usable() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

}  // namespace

const CpuPath kAvx512Path = {
    .name = "avx512",
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
