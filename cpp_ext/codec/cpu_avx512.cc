// The AVX-512 path: F, BW, DQ and VL, so Skylake-X, Zen 4 and later.
#if defined(__x86_64__)
// GCC's own header warns once inlined: https://gcc.gnu.org/bugzilla/show_bug.cgi?id=105593
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "cpu_path.h"
#include "cpu_ranks.h"
#include "cpu_signs.h"

#define BAGUARUN_TARGET [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl")]]
#define BAGUARUN_INLINE [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl"), gnu::always_inline]] inline

namespace baguarun::codec {
namespace {

using V = __m512;
constexpr size_t kLanes = 16;
// 32 of them, not 16.
constexpr bool kHasManyRegisters = true;

BAGUARUN_INLINE V load(const float* src) { return _mm512_loadu_ps(src); }
BAGUARUN_INLINE void store(float* dst, V x) { _mm512_storeu_ps(dst, x); }
BAGUARUN_INLINE V broadcast(float x) { return _mm512_set1_ps(x); }
BAGUARUN_INLINE V add(V a, V b) { return _mm512_add_ps(a, b); }
BAGUARUN_INLINE V subtract(V a, V b) { return _mm512_sub_ps(a, b); }
BAGUARUN_INLINE V multiply(V a, V b) { return _mm512_mul_ps(a, b); }
BAGUARUN_INLINE V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }

// The bits of numbers, compared with sign or without.
using Ints = __m512i;
BAGUARUN_INLINE Ints bitsIn(V x) { return _mm512_castps_si512(x); }
BAGUARUN_INLINE Ints greater(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
BAGUARUN_INLINE Ints greaterUnsigned(Ints a, Ints b) { return _mm512_max_epu32(a, b); }
BAGUARUN_INLINE Ints lesserUnsigned(Ints a, Ints b) { return _mm512_min_epu32(a, b); }
BAGUARUN_INLINE uint32_t greatestLane(Ints x) { return static_cast<uint32_t>(_mm512_reduce_max_epi32(x)); }
BAGUARUN_INLINE uint32_t greatestLaneUnsigned(Ints x) { return _mm512_reduce_max_epu32(x); }
BAGUARUN_INLINE uint32_t leastLaneUnsigned(Ints x) { return _mm512_reduce_min_epu32(x); }

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

// The upper half is added to the lower one until one number is left.
BAGUARUN_INLINE float foldLanes(V x) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  __m128 sums = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  sums = _mm_add_ps(sums, _mm_movehl_ps(sums, sums));
  return _mm_cvtss_f32(_mm_add_ss(sums, _mm_movehdup_ps(sums)));
}

// One bit per lane of x that is below zero.
BAGUARUN_INLINE uint32_t negativeLanes(V x) { return _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ); }

// Lane by lane, `minus` where the bit is set, else `plus`; for vector `j` of the four whose bits begin at
// `bits`.
BAGUARUN_INLINE V chosenByBits(const uint8_t* bits, int j, V plus, V minus) {
  int word;
  std::memcpy(&word, bits + 4 * (j / 2), sizeof word);
  const __m512i lane = _mm512_setr_epi32(1, 1 << 1, 1 << 2, 1 << 3, 1 << 4, 1 << 5, 1 << 6, 1 << 7, 1 << 8,
                                         1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15);
  const __m512i mine = j % 2 == 0 ? lane : _mm512_slli_epi32(lane, 16);
  return _mm512_mask_blend_ps(_mm512_test_epi32_mask(_mm512_set1_epi32(word), mine), plus, minus);
}

// `minus` in the lanes in which x is below zero, else `plus`.
BAGUARUN_INLINE V chosenBySign(V x, V plus, V minus) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ), plus, minus);
}

// `x` where it is finite, elsewhere `other`.
BAGUARUN_INLINE V finiteOr(V x, V other) {
  return _mm512_mask_mov_ps(other, _mm512_cmp_ps_mask(magnitude(x), broadcast(INFINITY), _CMP_LT_OQ), x);
}

// Magnitudes as magnitudeOf gives them.
BAGUARUN_INLINE Ints broadcastInt(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
BAGUARUN_INLINE Ints loadInts(const uint32_t* src) { return _mm512_loadu_si512(src); }
BAGUARUN_INLINE Ints loadMagnitudes(const float* src) {
  return _mm512_min_epi32(_mm512_castps_si512(magnitude(load(src))), broadcastInt(kNanMagnitude));
}
// `counts`, and one more in the lanes in which a > b.
BAGUARUN_INLINE Ints countGreater(Ints counts, Ints a, Ints b) {
  return _mm512_mask_add_epi32(counts, _mm512_cmpgt_epi32_mask(a, b), counts, _mm512_set1_epi32(1));
}
// One bit per lane in which a > b.
BAGUARUN_INLINE uint32_t greaterLanes(Ints a, Ints b) { return _mm512_cmpgt_epi32_mask(a, b); }

#include "cpu_simd.inc"
// After the loops that it uses.
#include "cpu_simd_biased.inc"
#include "cpu_simd_sparse.inc"

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
    .addAndOwe = addAndOwe,
    .sumNumbers = sumNumbers,
    .measure = measure,
    .quantise = quantise,
    .quantiseAndMeasure = quantiseAndMeasure,
    .packLevels = packLevels,
    .unpackLevels = unpackLevels,
    .decodeLevels = decodeLevels,
    .sumLevels = sumLevels,
    .quantiseAndSum = quantiseAndSum,
    .sumMagnitudes = sumMagnitudes,
    .takeSigns = takeSigns,
    .addAndSumMagnitudes = addAndSumMagnitudes,
    .takeSignsWithResidual = takeSignsWithResidual,
    .decodeSigns = decodeSigns,
    .sumSigns = sumSigns,
    .countSigns = countSigns,
    .keepHighest = keepHighest,
    .allFinite = allFinite,
};

}  // namespace baguarun::codec
#endif
