// What may change between the rounds of an engine, and what a checkpoint keeps of it.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "engine/engine.h"
#include "engine/errors.h"

namespace baguarun::engine {

void Engine::setMomentum(const std::vector<Momentum>& momentum, double lossScale) {
  const std::scoped_lock lock(mutex_);
  throwIfRunning("set_momentum");
  TORCH_CHECK(momentum.empty() || momentum.size() == parameters_.size(), "set_momentum: ", momentum.size(),
              " averages for ", parameters_.size(), " parameters");
  for (size_t index = 0; index < parameters_.size(); ++index) {
    Parameter& parameter = parameters_[index];
    parameter.momentum = momentum.empty() ? Momentum{} : momentum[index];
    requireFit(parameter.momentum, parameter.tensor, parameter.name);
  }
  lossScale_ = lossScale;
  for (Bucket& bucket : buckets_) {
    if (bucket.momentum && !momentum.empty()) {
      placeMomentum(bucket);
    }
  }
}

void Engine::setOperations(const std::vector<OperationSpec>& operations) {
  const std::scoped_lock lock(mutex_);
  const at::NoGradGuard noGrad;
  throwIfRunning("set_operations");
  TORCH_CHECK(operations.size() == parameters_.size(), "set_operations: ", operations.size(),
              " operations for ", parameters_.size(), " parameters");
  for (size_t index = 0; index < parameters_.size(); ++index) {
    parameters_[index].operation = operations[index];
    parameters_[index].residual.reset();
  }
  moveGradientsOut();
  buildBuckets(presentOrder());
}

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

bool Engine::loadState(const EngineState& state) {
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
  std::vector<at::Tensor> results;
  for (const Bucket& bucket : buckets_) {
    if (bucket.resultResidual.defined()) {
      results.push_back(bucket.resultResidual);
    }
  }
  const std::vector<at::Tensor>& saved = state.resultResiduals;
  const bool fits = std::equal(
      results.begin(), results.end(), saved.begin(), saved.end(),
      [](const at::Tensor& here, const at::Tensor& there) { return here.numel() == there.numel(); });
  for (size_t index = 0; fits && index < results.size(); ++index) {
    results[index].copy_(saved[index]);
  }
  return fits || saved.empty();
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
