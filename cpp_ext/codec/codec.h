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
//   is at most mx-mn, which is then below 2^-118. -0 decodes to +0.
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
// representation, and exactly `src` of a copy. A CUDA reduction of more than 64 chunks borrows numel floats
// from the stream's pool.
//
// Errors. std::invalid_argument for a reduction of nothing or of null pointers; std::runtime_error for
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

enum class Wire : uint8_t { f32, f16, bf16, minmax8 };

inline constexpr size_t kBlockElems = 2048;

// Size of one chunk, a multiple of 16; 0 for no numbers.
size_t encodedBytes(Wire wire, size_t numel);

// dst[chunk] = src[numel numbers of `dtype`].
void encode(Exec exec, Wire wire, DType dtype, const void* src, size_t numel, void* dst);

// dst[numel numbers of `dtype`] = src[chunk].
void decode(Exec exec, Wire wire, DType dtype, const void* src, size_t numel, void* dst);

// dst[chunk] = encode(scale * (((src[0] + src[1]) + src[2]) + ...)), each src a chunk of `numel` numbers,
// summed in fp32. Wire::f32 is the plain scaled sum. dst may be one of src.
void reduceEncode(Exec exec, Wire wire, const void* const* src, size_t count, float scale, size_t numel,
                  void* dst);

// The same sum, written as `numel` numbers of `dtype`. dst may be one of src if wire and dtype are the same
// type.
void reduceDecode(Exec exec, Wire wire, DType dtype, const void* const* src, size_t count, float scale,
                  size_t numel, void* dst);

// The CPU path in use: "avx512", "avx2" or "portable". The best that this machine has, chosen once by CPUID.
const char* cpuPath();

// For tests: takes the named path from now on. False, and no change, if there is no such path or the CPU
// lacks it.
bool usePath(const char* name);

}  // namespace baguarun::codec
