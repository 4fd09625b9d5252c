// The chunk that a rank sums up for all, where there is error feedback.
#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <vector>

#include "codec/codec.h"
#include "engine/bucket.h"

namespace baguarun::engine {

// Sums what others have sent and what this rank has itself, and encodes the result.
//
// What a rank contributes to its own chunk goes nowhere. So it passes no codec, which would lose something of
// it for nothing: with one bit and four ranks that is a quarter of what the sum has of each of them. It owes
// nothing for it either, and that place has what the result lacks: as this rank's contribution, so that it
// stays with the parameter wherever that is summed up next.
//
// Threads: one at a time.
class OwnChunk {
 public:
  // `count` numbers of the bucket from number `first` on. Without error feedback it is not used, and takes no
  // memory.
  OwnChunk(const Bucket& bucket, size_t first, size_t count)
      : dtype_(codecType(bucket.flat.scalar_type())), count_(count) {
    if (bucket.residual.defined()) {
      residual_ = bucket.residual.narrow(0, static_cast<int64_t>(first), static_cast<int64_t>(count));
      sum_ = at::empty_like(residual_);
      wide_ = dtype_ == codec::DType::f32 ? at::Tensor() : at::empty_like(residual_);
    }
  }

  bool feeds() const { return residual_.defined(); }

  // chunk = encode(s + residual), where s = (others, summed in their order) + own in fp32, and
  // residual = s + residual - decode(chunk). Others are encoded; `own` is the numbers in the bucket. It is
  // the sum that is encoded, for an average would owe in other units: who decodes it divides.
  void encodeSum(const codec::Exec& exec, codec::Format format, const std::vector<const void*>& others,
                 const void* own, void* chunk) {
    constexpr auto kF32 = codec::DType::f32;
    std::vector<const void*> terms;
    if (!others.empty()) {
      codec::reduceDecode(exec, format, kF32, others.data(), others.size(), 1.0F, count_, sum_.data_ptr());
      terms.push_back(sum_.const_data_ptr());
    }
    if (wide_.defined()) {
      codec::decode(exec, plainWire(dtype_), kF32, own, count_, wide_.data_ptr());
      own = wide_.const_data_ptr();
    }
    terms.push_back(own);
    codec::reduceDecode(exec, codec::Wire::f32, kF32, terms.data(), terms.size(), 1.0F, count_,
                        sum_.data_ptr());
    codec::encodeWithResidual(exec, format, kF32, sum_.data_ptr(), residual_.data_ptr<float>(), count_,
                              chunk);
  }

 private:
  const codec::DType dtype_;
  const size_t count_;
  at::Tensor residual_;
  at::Tensor sum_;
  // Of 16-bit gradients: the own ones in fp32.
  at::Tensor wide_;
};

}  // namespace baguarun::engine
