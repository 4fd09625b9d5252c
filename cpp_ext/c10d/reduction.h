// What a reduction of torch's means to the transport. For sources of collectives only.
#pragma once

#include <ATen/ATen.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "net/error.h"
#include "net/reduce.h"

namespace baguarun::backend {

// Of tensors of one type. Made on the caller's thread, so that what cannot be done is a ValueError there.
class Reduction {
 public:
  Reduction(const ::c10d::ReduceOp& asked, const at::Tensor& model)
      : op(opOf(asked.op_)), dtype(dtypeOf(model)) {
    if (asked.op_ == ::c10d::ReduceOp::PREMUL_SUM) {
      readFactor(asked, model);
    }
    const bool isLinear = op == net::ReduceOp::kSum || op == net::ReduceOp::kAvg;
    check(!model.is_complex() || isLinear, model);
    // The bits of a sum or product do not depend on the sign, the order of numbers does.
    const bool isOrder = op == net::ReduceOp::kMin || op == net::ReduceOp::kMax;
    check(!isWideUnsigned(model.scalar_type()) || !isOrder, model);
    try {
      net::checkReduction(op, dtype);
    } catch (const net::Error& error) {
      TORCH_CHECK_VALUE(false, "baguanet: ", error.what());
    }
  }

  net::ReduceOp op;
  net::Dtype dtype;

  // Elements of `dtype` in `tensor`.
  size_t count(const at::Tensor& tensor) const {
    return static_cast<size_t>(tensor.numel()) * (tensor.is_complex() ? 2 : 1);
  }

  bool isScaled() const { return factor_.defined(); }

  // Multiplies as PREMUL_SUM wants it; other reductions leave the tensor as it is.
  void scale(at::Tensor& tensor) const {
    if (factor_.defined()) {
      tensor.mul_(factor_);
    }
  }
  at::Tensor scaled(const at::Tensor& tensor) const {
    return factor_.defined() ? tensor.mul(factor_) : tensor;
  }

 private:
  static bool isWideUnsigned(at::ScalarType type) {
    return type == at::kUInt16 || type == at::kUInt32 || type == at::kUInt64;
  }

  void check(bool good, const at::Tensor& model) const {
    TORCH_CHECK_VALUE(good, "baguanet: ", net::name(op), " of ", model.scalar_type(), " is not supported");
  }

  void readFactor(const ::c10d::ReduceOp& asked, const at::Tensor& model) {
    // Its name in all versions of torch.
    const auto* premul = dynamic_cast<const ::c10d::NCCLPreMulSumSupplement*>(asked.supplement_.get());
    TORCH_CHECK_VALUE(premul != nullptr, "baguanet: PREMUL_SUM without a factor");
    TORCH_CHECK_VALUE(model.is_floating_point() || model.is_complex(), "baguanet: PREMUL_SUM of ",
                      model.scalar_type(), " is not supported");
    factor_ = premul->tensor_factor.defined() ? premul->tensor_factor.reshape({})
                                              : at::scalar_tensor(premul->double_factor, at::kDouble);
  }

  static net::ReduceOp opOf(::c10d::ReduceOp::RedOpType op) {
    switch (op) {
      case ::c10d::ReduceOp::SUM:
      case ::c10d::ReduceOp::PREMUL_SUM:
        return net::ReduceOp::kSum;
      case ::c10d::ReduceOp::AVG:
        return net::ReduceOp::kAvg;
      case ::c10d::ReduceOp::PRODUCT:
        return net::ReduceOp::kProduct;
      case ::c10d::ReduceOp::MIN:
        return net::ReduceOp::kMin;
      case ::c10d::ReduceOp::MAX:
        return net::ReduceOp::kMax;
      case ::c10d::ReduceOp::BAND:
        return net::ReduceOp::kBand;
      case ::c10d::ReduceOp::BOR:
        return net::ReduceOp::kBor;
      case ::c10d::ReduceOp::BXOR:
        return net::ReduceOp::kBxor;
      case ::c10d::ReduceOp::UNUSED:
        break;
    }
    TORCH_CHECK_VALUE(false, "baguanet: found a reduction that is none");
  }

  static net::Dtype dtypeOf(const at::Tensor& model) {
    const at::ScalarType type = model.scalar_type();
    switch (type) {
      case at::kDouble:
      case at::kComplexDouble:
        return net::Dtype::kFloat64;
      case at::kFloat:
      case at::kComplexFloat:
        return net::Dtype::kFloat32;
      case at::kHalf:
      case at::kComplexHalf:
        return net::Dtype::kFloat16;
      case at::kBFloat16:
        return net::Dtype::kBFloat16;
      case at::kChar:
        return net::Dtype::kInt8;
      case at::kShort:
      case at::kUInt16:
        return net::Dtype::kInt16;
      case at::kInt:
      case at::kUInt32:
        return net::Dtype::kInt32;
      case at::kLong:
      case at::kUInt64:
        return net::Dtype::kInt64;
      case at::kByte:
        return net::Dtype::kUint8;
      case at::kBool:
        return net::Dtype::kBool;
      // Torch's types are open-ended: what is not above (8-bit floats, packed and quantised types) is
      // refused.
      default:
        TORCH_CHECK_VALUE(false, "baguanet: reductions of ", type, " are not supported");
    }
  }

  at::Tensor factor_;
};

}  // namespace baguarun::backend
