#include "engine/bucket.h"

#include <ATen/ops/as_strided.h>

#include <stdexcept>

#include "engine/errors.h"

namespace baguarun::engine {

bool isPlain(codec::Wire wire, at::ScalarType dtype) {
  switch (wire) {
    case codec::Wire::f32:
      return dtype == at::kFloat;
    case codec::Wire::f16:
      return dtype == at::kHalf;
    case codec::Wire::bf16:
      return dtype == at::kBFloat16;
    case codec::Wire::minmax8:
    case codec::Wire::minmax4:
    case codec::Wire::sign1:
    case codec::Wire::topk:
    case codec::Wire::randomk:
      return false;
  }
  return false;
}

codec::DType codecType(at::ScalarType dtype) {
  if (dtype == at::kFloat) return codec::DType::f32;
  if (dtype == at::kHalf) return codec::DType::f16;
  if (dtype == at::kBFloat16) return codec::DType::bf16;
  throw UsageFailure(std::string("gradients of type ") + c10::toString(dtype) +
                     " have no codec; want float32, float16 or bfloat16");
}

codec::Wire plainWire(codec::DType dtype) {
  switch (dtype) {
    case codec::DType::f32:
      return codec::Wire::f32;
    case codec::DType::f16:
      return codec::Wire::f16;
    case codec::DType::bf16:
      return codec::Wire::bf16;
  }
  throw std::logic_error("unknown type of numbers");
}

void requireFeedback(const OperationSpec& operation, at::ScalarType dtype) {
  if (operation.errorFeedback &&
      (operation.kind != OperationKind::kScatterReduceGather || isPlain(operation.wire, dtype))) {
    throw UsageFailure(std::string("error feedback for gradients of type ") + c10::toString(dtype) +
                       ", which are sent as they are; want a scatter-reduce-gather with a narrower wire");
  }
}

Bucket vectorsOf(const Bucket& bucket, const at::Tensor& vectors, size_t index) {
  Bucket made;
  made.index = index;
  made.label = bucket.label;
  made.bytes = vectors.nbytes();
  made.flat = vectors;
  made.operation.kind = OperationKind::kScatterReduceGather;
  made.operation.rails = bucket.operation.rails;
  return made;
}

at::Tensor gradientView(const at::Tensor& flat, const at::Tensor& parameter, size_t offset) {
  const auto start = static_cast<int64_t>(offset);
  if (parameter.is_non_overlapping_and_dense()) {
    return flat.as_strided(parameter.sizes(), parameter.strides(), start);
  }
  return flat.narrow(0, start, parameter.numel()).view(parameter.sizes());
}

bool isAt(const at::Tensor& gradient, const at::Tensor& view) {
  // What mostly differs comes first.
  return gradient.has_storage() && gradient.const_data_ptr() == view.const_data_ptr() &&
         gradient.strides() == view.strides() && gradient.sizes() == view.sizes() &&
         gradient.scalar_type() == view.scalar_type() && gradient.device() == view.device() &&
         !gradient.is_neg() && !gradient.is_conj();
}

}  // namespace baguarun::engine
