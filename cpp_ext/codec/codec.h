// Codecs: numbers in, fewer bytes out, and back. No torch, no third-party code: pointers, sizes, a stream.
//
// Words. A *chunk* is the encoded form of one contiguous run of `numel` numbers; it takes
// encodedBytes(wire, numel) bytes. A *block* is kBlockElems neighbouring numbers that share one grid in the
// minmax8 wire (the last may be short).
//
// Wires
//   f32, f16, bf16  The numbers themselves. Narrowing rounds to nearest, ties to even, overflows to Inf, and
//                   keeps a NaN a NaN (sign and upper payload bits, made quiet). The same type in and out is
//                   a copy.
//   minmax8         One byte per number. A chunk is: a header {float base, float scale} for every block, then
//                   one byte q per number. A number decodes to base + q*scale.
//   minmax4         Half a byte per number: as minmax8 with 15 steps instead of 255 (below: 14 for 254, 15
//   for
//                   255). Numbers 2i and 2i+1 are the lower and the upper half of byte i.
//   sign1           One bit per number. A chunk is: a float scale for every block, then the bits, number i in
//                   bit i%8 of byte i/8 (1-bit Adam, arXiv 2102.02888, with a scale per block).
//   topk            The `keep` numbers of greatest magnitude of each block. A chunk is: their values in fp32,
//                   then their places in the block, 16 bits each, in rising order. All others decode to +0.
//   randomk         `keep` numbers of each block, drawn by `seed`. A chunk is their values in fp32: whoever
//   has
//                   the seed knows the places. All others decode to +0, and kept ones are not scaled up.
//
// minmax8, rule by rule, for a block with least value mn and greatest value mx
//   1. NaN, Inf or a magnitude of 2^126 or more anywhere in the block: base = NaN, scale = 0. The whole block
//      decodes to NaN, so that whoever looks for overflow (GradScaler) sees it.
//   2. mn <= 0 <= mx: step = (mx-mn)/254, base = rint(mn*inv)*scale; the grid holds zero, and zero decodes to
//      exactly zero. Otherwise: step = (mx-mn)/255, base = mn.
//   3. scale is step rounded up to 16 significant bits, inv = 1/scale. Then q*scale is exact in fp32, and
//      fma(q, scale, base) and "multiply, then add" are the same bits.
//   4. step below 2^-126 (a constant block, or a range too small for normal numbers): scale = 0, q = 0, and
//      base = 0 if the block spans zero, else mn. A constant block is therefore exact.
//   5. q = clamp(rint((x-base)*inv), 0, 255). Every operation is rounded once, to nearest even.
//   The error is at most scale*(1/2 + 2^-14) plus one ulp of the block's largest magnitude; under rule 4 it
//   is at most mx-mn, which is then below 2^-118 (minmax4: 2^-122). -0 decodes to +0.
//
// sign1: scale is the mean magnitude of the block, from a sum in one fixed order (the upper half of the
// block, filled up with zeros, is added to the lower one until one number is left). A number decodes to
// -scale if it is below zero, else to scale, so both zeros decode to scale. If the sum is not finite, the
// scale is NaN and all bits are 0: the whole block decodes to NaN. In a sum of at most four chunks that is
// coded again the magnitudes of a block, which then are eight at most, are counted: the scale is from the sum
// of these products, in double and in one fixed order (signs.h).
//
// topk and randomk: a block of n numbers keeps ceil(keep*n/2048). topk ranks NaN above Inf above all others,
// and the earlier of equal magnitudes first, so that a NaN or Inf is always kept. In randomk a NaN or Inf
// anywhere in the block makes all its kept values NaN. Kept values travel as they are, but -0 as +0 and NaN
// as one quiet NaN. Chunks of randomk can be reduced if they have the same seed, and no chunk if `keep`
// differs. A place beyond the block, in a damaged chunk of topk, is passed over.
//
// Error feedback: encodeWithResidual encodes x = src + residual, and leaves x - decoded in the residual,
// both in fp32. Where that is not finite the residual stays what it was, so that one overflow does not spoil
// all later steps.
//
// Every path (portable, AVX2, AVX-512, CUDA) gives the same chunk and the same decoded numbers, bit for bit.
// Two things are left open: payload and sign of a NaN that a sum produces. The caller's floating-point
// environment (flush-to-zero, rounding mode) does not matter: the CPU paths set their own and restore it. Do
// not compile with -ffast-math, --use_fast_math or -ftz=true.
//
// Memory. The caller owns all of it; nothing is kept after return (CUDA: after the stream has passed the
// call, except the host array `src` of pointers, which is read before return). Chunks want 4-byte alignment
// and are fastest at 16; plain numbers want the alignment of their type. Exactly the payload is written: the
// padding between the payload's end and encodedBytes is left as it is. Source and destination must not
// overlap, except that `dst` may be exactly one of the `src` of a reduction whose result has the same
// representation, and exactly `src` of a copy. What sums up more than 64 chunks on CUDA borrows numel
// floats from the stream's pool.
//
// Errors. std::invalid_argument for a reduction of nothing or of null pointers, and for `keep` out of range;
// std::runtime_error for
// Device::cuda in a build without CUDA, and for every CUDA error, with the call that failed.
//
// Threads: all functions may be called from any thread at any time. usePath changes the choice for the whole
// process.
#pragma once

#include <cstddef>
#include <cstdint>

namespace baguarun::codec {

enum class DType : uint8_t { f32, f16, bf16 };

enum class Device : uint8_t { cpu, cuda };

// Where a call runs. On the CPU it is done when the call returns. On CUDA it is enqueued on `stream` (a
// cudaStream_t of the current device; null is the default stream), all pointers to data are device pointers,
// and nothing waits.
struct Exec {
  Device device;
  void* stream;
};

enum class Wire : uint8_t { f32, f16, bf16, minmax8, minmax4, sign1, topk, randomk };

inline constexpr size_t kBlockElems = 2048;
inline constexpr uint32_t kMostKept = 256;

// A wire and its settings, which the other wires do not read.
struct Format {
  Wire wire;
  uint32_t keep = 20;  // topk, randomk: how many of each 2048 numbers, 1 to kMostKept
  uint64_t seed = 0;   // randomk: the same on all ranks, another one at each step

  constexpr Format(Wire wire_) : wire(wire_) {}
  constexpr Format(Wire wire_, uint32_t keep_, uint64_t seed_) : wire(wire_), keep(keep_), seed(seed_) {}
};

// Size of one chunk, a multiple of 16; 0 for no numbers.
size_t encodedBytes(Format format, size_t numel);

// dst[chunk] = src[numel numbers of `dtype`].
void encode(Exec exec, Format format, DType dtype, const void* src, size_t numel, void* dst);

// dst[chunk] = encode(src + residual), residual = src + residual - decode(dst), in one pass over memory.
// `residual` is `numel` floats, of the alignment of a float.
void encodeWithResidual(Exec exec, Format format, DType dtype, const void* src, float* residual, size_t numel,
                        void* dst);

// The same of a sum: s = ((own + src[0]) + src[1]) + ... in fp32, `own` being `numel` numbers of `dtype`, and
// each src a chunk; dst[chunk] = encode(s + residual), residual = s + residual - decode(dst). No src at all
// is fine.
void encodeSumWithResidual(Exec exec, Format format, DType dtype, const void* own, const void* const* src,
                           size_t count, float* residual, size_t numel, void* dst);

// dst[numel numbers of `dtype`] = src[chunk].
void decode(Exec exec, Format format, DType dtype, const void* src, size_t numel, void* dst);

// dst[chunk] = encode(scale * (((src[0] + src[1]) + src[2]) + ...)), each src a chunk of `numel` numbers,
// summed in fp32. Wire::f32 is the plain scaled sum. dst may be one of src.
void reduceEncode(Exec exec, Format format, const void* const* src, size_t count, float scale, size_t numel,
                  void* dst);

// The same sum, written as `numel` numbers of `dtype`. dst may be one of src if wire and dtype are the same
// type.
void reduceDecode(Exec exec, Format format, DType dtype, const void* const* src, size_t count, float scale,
                  size_t numel, void* dst);

// True: every number that decode would write in fp32 is finite, as the headers of a chunk in this machine's
// memory tell, without a look at its numbers. False: one may not be, or the wire has no headers that tell
// (all but minmax8, minmax4 and sign1).
bool headersAreFinite(Format format, size_t numel, const void* chunk);

// The CPU path in use: "avx512", "avx2" or "portable". The best that this machine has, chosen once by CPUID.
const char* cpuPath();

// For tests: takes the named path from now on. False, and no change, if there is no such path or the CPU
// lacks it.
bool usePath(const char* name);

}  // namespace baguarun::codec
