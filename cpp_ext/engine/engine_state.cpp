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
    if (!momentum.empty()) {
      requireFit(momentum[index], parameters_[index].tensor, parameters_[index].name);
    }
  }
  for (size_t index = 0; index < parameters_.size(); ++index) {
    parameters_[index].momentum = momentum.empty() ? Momentum{} : momentum[index];
  }
  lossScale_ = lossScale;
  for (Bucket& bucket : buckets_) {
    if (bucket.momentum && !momentum.empty()) {
      bucket.momentum->lossScale = lossScale_;
    }
  }
}

bool Engine::momentumIsKnownFinite() {
  const std::scoped_lock lock(mutex_);
  return !running_ && std::ranges::all_of(buckets_, [](const Bucket& bucket) {
    return bucket.momentum && bucket.momentum->isKnownFinite();
  }) && std::ranges::all_of(parameters_, [](const Parameter& parameter) {
    const at::Tensor& gradient = parameter.tensor.grad();
    return !gradient.defined() || (gradient.is_same(parameter.given) && isAt(gradient, parameter.view));
  });
}

void Engine::setOperations(const std::vector<OperationSpec>& operations) {
  const std::scoped_lock lock(mutex_);
  const at::NoGradGuard noGrad;
  throwIfRunning("set_operations");
  TORCH_CHECK(operations.size() == parameters_.size(), "set_operations: ", operations.size(),
              " operations for ", parameters_.size(), " parameters");
  for (size_t index = 0; index < parameters_.size(); ++index) {
    parameters_[index].operation = operations[index];
  }
  for (Bucket& bucket : buckets_) {
    bucket.kept.reset();
  }
  moveGradientsOut();
  buildBuckets(order_);
}

EngineState Engine::state() {
  const std::scoped_lock lock(mutex_);
  throwIfRunning("state");
  return copyState();
}

EngineState Engine::copyState() const {
  const at::NoGradGuard noGrad;
  EngineState state;
  const bool awaitsOrder = !orderAdopted_ && observedOrder_.size() == parameters_.size();
  state.order = awaitsOrder ? observedOrder_ : order_;
  state.orderAdopted = orderAdopted_ || awaitsOrder;
  for (const Parameter& parameter : parameters_) {
    state.residuals.push_back(parameter.residual.defined() ? parameter.residual.clone()
                                                           : at::empty({0}, at::kFloat));
  }
  return state;
}

void Engine::requireComplete(const std::function<std::optional<std::string>()>& interruption, bool again) {
  const std::scoped_lock lock(mutex_);
  throwIfRunning("require_complete");
  if (again && completeRound_ == round_) {
    return;
  }
  if (round_ > 0) {
    schedule_->synchronize();
  }
  if (const auto reason = interruption()) {
    throw CommunicationFailure("the World is given up: " + *reason);
  }
  completeRound_ = round_;
}

void Engine::keepCommitted(bool keep) {
  const std::scoped_lock lock(mutex_);
  throwIfRunning("keep_committed");
  keepsCommitted_ = keep;
  for (const Bucket& bucket : buckets_) {
    if (bucket.kept) {
      bucket.kept->enable(keep);
    }
  }
}

void Engine::commit() {
  const std::scoped_lock lock(mutex_);
  throwIfRunning("commit");
  for (const Bucket& bucket : buckets_) {
    if (bucket.kept) {
      bucket.kept->commit();
    }
  }
}

void Engine::rollBack() {
  const std::scoped_lock lock(mutex_);
  throwIfRunning("roll_back");
  for (const Bucket& bucket : buckets_) {
    if (bucket.kept) {
      bucket.kept->rollBack();
    }
  }
}

// Before the buckets go.
void Engine::gatherCommitted() {
  for (const Bucket& bucket : buckets_) {
    for (size_t place = 0; bucket.kept && place < bucket.parameters.size(); ++place) {
      parameters_[bucket.parameters[place]].committed = bucket.kept->committed(place);
    }
  }
}

void Engine::keepResiduals(Bucket& bucket) {
  if (!bucket.residual.defined() && bucket.lowRank.matrices.empty()) {
    return;
  }
  bucket.kept = std::make_shared<KeptResiduals>(keepsCommitted_);
  for (const size_t index : bucket.parameters) {
    Parameter& parameter = parameters_[index];
    at::Tensor committed = std::exchange(parameter.committed, at::Tensor());
    at::Tensor residual = parameter.residual.defined() ? parameter.residual : parameter.lowRank.residual;
    // One that was owed under another operation is given up with it.
    const bool fits = committed.defined() && residual.defined() && committed.numel() == residual.numel();
    bucket.kept->add(residual, fits ? std::move(committed) : at::Tensor());
  }
}

EngineState Engine::close() {
  const std::scoped_lock lock(mutex_);
  // Ends the stages that still read and write buckets and residuals.
  schedule_.reset();
  EngineState state = copyState();
  if (keepsCommitted_) {
    gatherCommitted();
    for (const Parameter& parameter : parameters_) {
      state.committed.push_back(parameter.committed.defined() ? parameter.committed
                                                              : at::empty({0}, at::kFloat));
    }
  }
  removeHooks();
  running_ = false;
  armed_ = 0;
  consumed_ = true;
  for (Parameter& parameter : parameters_) {
    parameter.tensor.mutable_grad().reset();
    parameter.view.reset();
    parameter.given.reset();
    parameter.residual.reset();
  }
  buckets_.clear();
  arena_.reset();
  return state;
}

void Engine::loadState(const EngineState& state) {
  const std::scoped_lock lock(mutex_);
  throwIfRunning("load_state");
  const at::NoGradGuard noGrad;
  const std::vector<size_t> mine = state.order.empty() ? order_ : state.order;
  TORCH_CHECK(mine.size() == parameters_.size(), "load_state: an order of ", mine.size(), " parameters for ",
              parameters_.size());
  for (Bucket& bucket : buckets_) {
    bucket.kept.reset();
  }
  for (size_t index = 0; index < parameters_.size(); ++index) {
    parameters_[index].residual.reset();
    const bool kept = !state.committed.empty() && state.committed[index].numel() > 0;
    parameters_[index].committed = kept ? state.committed[index] : at::Tensor();
  }
  moveGradientsOut();
  observedOrder_.clear();
  orderAdopted_ = state.orderAdopted;
  buildBuckets(orderOfRankZero(mine));
  for (size_t index = 0; index < state.residuals.size(); ++index) {
    if (parameters_[index].residual.defined() && state.residuals[index].numel() > 0) {
      parameters_[index].residual.copy_(state.residuals[index]);
    }
  }
}

void Engine::throwIfRunning(const char* what) const {
  if (running_) {
    throw UsageFailure(std::string(what) + " in the middle of a backward pass, or after one that raised; " +
                       "want it between steps");
  }
}

}  // namespace baguarun::engine
