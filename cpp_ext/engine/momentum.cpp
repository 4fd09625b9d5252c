#include "engine/momentum.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include "engine/errors.h"
#include "engine/momentum_update.h"
#include "engine/ranges.h"

namespace baguarun::engine {

void mix(const at::Tensor& gradient, const Momentum& with, double lossScale, const at::Tensor& into) {
  const at::NoGradGuard noGrad;
  at::Tensor result = into;
  if (lossScale == 1) {
    at::lerp_out(result, with.average, gradient, 1 - with.beta);
  } else {
    result.copy_(gradient).mul_(1 / lossScale);
    at::lerp_out(result, with.average, result, 1 - with.beta);
  }
}

void MomentumResult::finish(bool areKnownFinite) {
  if (lossScale != 1) {
    const at::NoGradGuard noGrad;
    flat.mul_(lossScale);
  }
  version_ = flat._version();
  // A scaler writes to the result before the optimizer asks. What was known is not of what somebody wrote
  // since.
  wasFinite_ = lossScale == 1 && flat.is_cpu() && ((areKnownFinite && version_ == begun_) || lookAtAll());
}

bool MomentumResult::lookAtAll() const {
  const Span span("look for NaN", "codec", static_cast<int64_t>(flat.nbytes()));
  return allFinite({flat});
}

bool MomentumResult::isKnownFinite() const { return wasFinite_ && flat._version() == version_; }

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
