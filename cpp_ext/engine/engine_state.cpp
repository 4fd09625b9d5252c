// What a checkpoint keeps of an engine.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include "engine/engine.h"
#include "engine/errors.h"

namespace baguarun::engine {

EngineState Engine::state() {
  const std::scoped_lock lock(mutex_);
  throwIfRunning("state");
  const at::NoGradGuard noGrad;
  EngineState state;
  const bool awaitsOrder = !orderAdopted_ && observedOrder_.size() == parameters_.size();
  state.order = awaitsOrder ? observedOrder_ : presentOrder();
  state.orderAdopted = orderAdopted_ || awaitsOrder;
  for (const Parameter& parameter : parameters_) {
    state.residuals.push_back(parameter.residual.defined() ? parameter.residual.clone()
                                                           : at::empty({0}, at::kFloat));
  }
  // A new order is adopted at the next round, and these with it are given up.
  for (const Bucket& bucket : buckets_) {
    if (bucket.resultResidual.defined() && !awaitsOrder) {
      state.resultResiduals.push_back(bucket.resultResidual.clone());
    }
  }
  return state;
}

void Engine::loadState(const EngineState& state) {
  const std::scoped_lock lock(mutex_);
  throwIfRunning("load_state");
  const at::NoGradGuard noGrad;
  TORCH_CHECK(state.order.size() == parameters_.size(), "load_state: an order of ", state.order.size(),
              " parameters for ", parameters_.size());
  for (Parameter& parameter : parameters_) {
    parameter.residual.reset();
  }
  moveGradientsOut();
  observedOrder_.clear();
  orderAdopted_ = state.orderAdopted;
  buildBuckets(orderOfRankZero(state.order));
  for (size_t index = 0; index < state.residuals.size(); ++index) {
    if (parameters_[index].residual.defined()) {
      parameters_[index].residual.copy_(state.residuals[index]);
    }
  }
  size_t next = 0;
  for (Bucket& bucket : buckets_) {
    if (bucket.resultResidual.defined() && next < state.resultResiduals.size()) {
      bucket.resultResidual.copy_(state.resultResiduals[next++]);
    }
  }
}

void Engine::throwIfRunning(const char* what) const {
  if (running_) {
    throw UsageFailure(std::string(what) + " in the middle of a backward pass, or after one that raised; " +
                       "want it between steps");
  }
}

// Parameters bucket by bucket: the order that makes the plan as it is.
std::vector<size_t> Engine::presentOrder() const {
  std::vector<size_t> order;
  for (const Bucket& bucket : buckets_) {
    order.insert(order.end(), bucket.parameters.begin(), bucket.parameters.end());
  }
  return order;
}

}  // namespace baguarun::engine
