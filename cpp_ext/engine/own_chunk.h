// What a rank sums up for all, where there is error feedback.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <vector>

#include "codec/codec.h"
#include "engine/bucket.h"

namespace baguarun::engine {

// sum = scale * ((own + residual) + the encoded numbers of `others`, summed in their order), in fp32, and
// residual = 0. All are this rank's chunk of the bucket; `residual` and `sum` are fp32.
//
// What this rank contributes to its own chunk goes nowhere. So it passes no codec, which would lose something
// of it for nothing: with one bit and four ranks that is a quarter of what the sum has of each of them.
inline void sumOwnChunk(const codec::Exec& exec, codec::Format format, const std::vector<const void*>& others,
                        const at::Tensor& own, const at::Tensor& residual, float scale,
                        const at::Tensor& sum) {
  const at::NoGradGuard noGrad;
  const auto count = static_cast<size_t>(own.numel());
  std::vector<const void*> terms{own.const_data_ptr(), residual.const_data_ptr()};
  if (own.scalar_type() != at::kFloat) {
    residual.add_(own);
    terms = {residual.const_data_ptr()};
  }
  if (!others.empty()) {
    codec::reduceDecode(exec, format, codec::DType::f32, others.data(), others.size(), 1.0F, count,
                        sum.data_ptr());
    terms.push_back(sum.const_data_ptr());
  }
  codec::reduceDecode(exec, codec::Wire::f32, codec::DType::f32, terms.data(), terms.size(), scale, count,
                      sum.data_ptr());
  residual.zero_();
}

}  // namespace baguarun::engine
