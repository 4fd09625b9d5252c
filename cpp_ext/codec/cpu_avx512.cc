// The AVX-512 path: F, BW, DQ and VL, so Skylake-X, Zen 4 and later.
#if defined(__x86_64__)
// GCC's own header warns once inlined: https://gcc.gnu.org/bugzilla/show_bug.cgi?id=105593
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include <algorithm>

#include "cpu_path.h"

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

#include "cpu_simd.inc"

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
    .measure = measure,
    .quantise = quantise,
    .decodeBlock = decodeBlock,
    .sumNumbers = sumNumbers,
    .sumBlocks = sumBlocks,
};

}  // namespace baguarun::codec
#endif
