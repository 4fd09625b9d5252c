// The AVX2 path, with FMA and F16C: Haswell, Zen and later.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "cpu_path.h"
#include "cpu_ranks.h"
#include "cpu_signs.h"

#define BAGUARUN_TARGET [[gnu::target("avx2,fma,f16c")]]
#define BAGUARUN_INLINE [[gnu::target("avx2,fma,f16c"), gnu::always_inline]] inline

namespace baguarun::codec {
namespace {

using V = __m256;
constexpr size_t kLanes = 8;
// 32 of them, not 16.
constexpr bool kHasManyRegisters = false;

BAGUARUN_INLINE V load(const float* src) { return _mm256_loadu_ps(src); }
BAGUARUN_INLINE void store(float* dst, V x) { _mm256_storeu_ps(dst, x); }
BAGUARUN_INLINE V broadcast(float x) { return _mm256_set1_ps(x); }
BAGUARUN_INLINE V add(V a, V b) { return _mm256_add_ps(a, b); }
BAGUARUN_INLINE V subtract(V a, V b) { return _mm256_sub_ps(a, b); }
BAGUARUN_INLINE V multiply(V a, V b) { return _mm256_mul_ps(a, b); }
BAGUARUN_INLINE V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }

// The bits of numbers, compared with sign or without.
using Ints = __m256i;
BAGUARUN_INLINE Ints bitsIn(V x) { return _mm256_castps_si256(x); }
BAGUARUN_INLINE Ints greater(Ints a, Ints b) { return _mm256_max_epi32(a, b); }
BAGUARUN_INLINE Ints greaterUnsigned(Ints a, Ints b) { return _mm256_max_epu32(a, b); }
BAGUARUN_INLINE Ints lesserUnsigned(Ints a, Ints b) { return _mm256_min_epu32(a, b); }

// The lane that `choose` prefers to all others.
template <Ints (*choose)(Ints, Ints)>
BAGUARUN_INLINE uint32_t chosenLane(Ints x) {
  x = choose(x, _mm256_permute4x64_epi64(x, 0x4e));
  x = choose(x, _mm256_shuffle_epi32(x, 0x4e));
  x = choose(x, _mm256_shuffle_epi32(x, 0xb1));
  return static_cast<uint32_t>(_mm256_cvtsi256_si32(x));
}
BAGUARUN_INLINE uint32_t greatestLane(Ints x) { return chosenLane<greater>(x); }
BAGUARUN_INLINE uint32_t greatestLaneUnsigned(Ints x) { return chosenLane<greaterUnsigned>(x); }
BAGUARUN_INLINE uint32_t leastLaneUnsigned(Ints x) { return chosenLane<lesserUnsigned>(x); }

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

// The upper half is added to the lower one until one number is left.
BAGUARUN_INLINE float foldLanes(V x) {
  __m128 sums = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  sums = _mm_add_ps(sums, _mm_movehl_ps(sums, sums));
  return _mm_cvtss_f32(_mm_add_ss(sums, _mm_movehdup_ps(sums)));
}

// One bit per lane of x that is below zero.
BAGUARUN_INLINE uint32_t negativeLanes(V x) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_LT_OQ)));
}

// Lane by lane, `minus` where the bit is set, else `plus`; for vector `j` of the four whose bits begin at
// `bits`.
BAGUARUN_INLINE V chosenByBits(const uint8_t* bits, int j, V plus, V minus) {
  int word;
  std::memcpy(&word, bits, sizeof word);
  const int top = 31 - 8 * j;
  const __m256i toTop = _mm256_setr_epi32(top, top - 1, top - 2, top - 3, top - 4, top - 5, top - 6, top - 7);
  return _mm256_blendv_ps(plus, minus,
                          _mm256_castsi256_ps(_mm256_sllv_epi32(_mm256_set1_epi32(word), toTop)));
}

// `minus` in the lanes in which x is below zero, else `plus`.
BAGUARUN_INLINE V chosenBySign(V x, V plus, V minus) {
  return _mm256_blendv_ps(plus, minus, _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_LT_OQ));
}

// `x` where it is finite, elsewhere `other`.
BAGUARUN_INLINE V finiteOr(V x, V other) {
  return _mm256_blendv_ps(other, x, _mm256_cmp_ps(magnitude(x), broadcast(INFINITY), _CMP_LT_OQ));
}

// Magnitudes as magnitudeOf gives them.
BAGUARUN_INLINE Ints broadcastInt(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
BAGUARUN_INLINE Ints loadInts(const uint32_t* src) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src));
}
BAGUARUN_INLINE Ints loadMagnitudes(const float* src) {
  return _mm256_min_epi32(_mm256_castps_si256(magnitude(load(src))), broadcastInt(kNanMagnitude));
}
// `counts`, and one more in the lanes in which a > b.
BAGUARUN_INLINE Ints countGreater(Ints counts, Ints a, Ints b) {
  return _mm256_sub_epi32(counts, _mm256_cmpgt_epi32(a, b));
}
// One bit per lane in which a > b.
BAGUARUN_INLINE uint32_t greaterLanes(Ints a, Ints b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(a, b))));
}

#include "cpu_simd.inc"
// After the loops that it uses.
#include "cpu_simd_biased.inc"
#include "cpu_simd_sparse.inc"

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
