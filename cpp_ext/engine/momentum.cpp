#include "engine/momentum.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include "engine/errors.h"

namespace baguarun::engine {

void MomentumStep::mix() const {
  const at::NoGradGuard noGrad;
  if (lossScale != 1) {
    flat.mul_(1 / lossScale);
  }
  for (const Piece& piece : pieces) {
    at::Tensor result = piece.gradient;
    at::lerp_out(result, piece.with.average, piece.gradient, 1 - piece.with.beta);
  }
}

void MomentumStep::restore() const {
  if (lossScale != 1) {
    const at::NoGradGuard noGrad;
    flat.mul_(lossScale);
  }
}

void requireFit(const Momentum& momentum, const at::Tensor& parameter, const std::string& name) {
  const at::Tensor& average = momentum.average;
  if (!average.defined()) {
    return;
  }
  if (average.sizes() != parameter.sizes() || average.scalar_type() != parameter.scalar_type() ||
      average.device() != parameter.device()) {
    throw UsageFailure("the momentum of '" + name + "' is " + c10::toString(average.scalar_type()) + " " +
                       c10::str(average.sizes()) + " on " + average.device().str() +
                       "; want shape, type and device of the parameter");
  }
}

}  // namespace baguarun::engine
