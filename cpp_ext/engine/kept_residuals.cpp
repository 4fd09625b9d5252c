#include "engine/kept_residuals.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <utility>

namespace baguarun::engine {

void KeptResiduals::add(const at::Tensor& residual, at::Tensor committed) {
  taken_ = taken_ || committed.defined();
  entries_.push_back({residual, std::move(committed)});
}

void KeptResiduals::beforeWrite() {
  if (!enabled_) {
    return;
  }
  const at::NoGradGuard noGrad;
  for (Entry& entry : entries_) {
    if (!entry.residual.defined() || (taken_ && entry.copy.defined())) {
      continue;
    }
    if (entry.copy.defined()) {
      entry.copy.copy_(entry.residual, /*non_blocking=*/true);
    } else {
      entry.copy = entry.residual.clone();
    }
  }
  taken_ = true;
}

void KeptResiduals::rollBack() {
  if (!taken_) {
    return;
  }
  const at::NoGradGuard noGrad;
  for (const Entry& entry : entries_) {
    if (entry.copy.defined()) {
      entry.residual.copy_(entry.copy);
    }
  }
  taken_ = false;
}

at::Tensor KeptResiduals::committed(size_t index) const {
  if (!enabled_) {
    return {};
  }
  const Entry& entry = entries_.at(index);
  if (!entry.residual.defined()) {
    return {};
  }
  return (taken_ && entry.copy.defined() ? entry.copy : entry.residual).clone();
}

}  // namespace baguarun::engine
