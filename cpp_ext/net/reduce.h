// Elementwise reductions of k sources at once, the same bits on every path.
//
// Each element is combined in the order of the sources, so whoever reduces the same sources in the same order
// gets the same bits, with AVX-512, AVX2 or neither. 16-bit floats are accumulated in fp32 and rounded once,
// to nearest even. MIN and MAX hand on a NaN. Integer sums and products wrap around. A bool is a byte of 0 or
// 1: SUM and MAX are "or", PRODUCT and MIN are "and".
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace baguarun::net {

enum class Dtype : uint8_t {
  kFloat64,
  kFloat32,
  kFloat16,
  kBFloat16,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUint8,
  kBool,
};

enum class ReduceOp : uint8_t { kSum, kAvg, kMin, kMax, kProduct, kBand, kBor, kBxor };

// How it is computed; ordered, later is faster.
enum class ReducePath : uint8_t { kPortable, kAvx2, kAvx512 };

size_t elementBytes(Dtype dtype);
const char* name(Dtype dtype);
const char* name(ReduceOp op);

// Throws Error(kUsage) where `op` means nothing for `dtype`: AVG of integers, bitwise operations on floats.
void checkReduction(ReduceOp op, Dtype dtype);

// The fastest path of this processor.
ReducePath bestReducePath();

// Writes the reduction of `sources`, `count` elements each, to every one of `outs`. An out may be one of the
// sources; other overlap is not allowed. No alignment is needed beyond the element's. AVG divides by the
// number of sources. Throws as checkReduction() does. Threads: any.
void reduce(ReduceOp op, Dtype dtype, std::span<const void* const> sources, std::span<void* const> outs,
            size_t count, ReducePath path = bestReducePath());

}  // namespace baguarun::net
