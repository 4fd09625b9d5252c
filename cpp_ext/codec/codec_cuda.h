// The CUDA half of codec.h, in codec_cuda.cu. Declared in every build, defined in a build with
// BAGUARUN_WITH_CUDA. Arguments have been checked by codec.cc and numel is not 0.
#pragma once

#include "block.h"

namespace baguarun::codec::cuda {

void encode(void* stream, Format format, DType dtype, const void* src, size_t numel, void* dst);
void encodeSumWithResidual(void* stream, Format format, DType dtype, const void* own, const void* const* src,
                           size_t count, float* residual, size_t numel, void* dst);
void decode(void* stream, Format format, DType dtype, const void* src, size_t numel, void* dst);
void reduceEncode(void* stream, Format format, const void* const* src, size_t count, float scale,
                  size_t numel, void* dst);
void reduceDecode(void* stream, Format format, DType dtype, const void* const* src, size_t count, float scale,
                  size_t numel, void* dst);

}  // namespace baguarun::codec::cuda
