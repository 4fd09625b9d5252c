// The CPU half of codec.h, on the path given. Arguments have been checked by codec.cc and numel is not 0.
#pragma once

#include "cpu_path.h"

namespace baguarun::codec::cpu {

void encode(const CpuPath& path, Format format, DType dtype, const void* src, size_t numel, void* dst);
void encodeWithResidual(const CpuPath& path, Format format, const Terms& terms, float* residual, size_t numel,
                        void* dst);
void decode(const CpuPath& path, Format format, DType dtype, const void* src, size_t numel, void* dst);
void reduceEncode(const CpuPath& path, Format format, Sum sum, size_t numel, void* dst);
void reduceDecode(const CpuPath& path, Format format, DType dtype, Sum sum, size_t numel, void* dst);

}  // namespace baguarun::codec::cpu
